//! A guest kernel: taken out of a distribution's image, its RDPMC instructions rewritten.
//!
//! KVM completes RDPMC itself and never asks the VMM; without a PMU in KVM the instruction is #GP,
//! and the first `perf` in the guest oopses its kernel. So RDPMC, two bytes, is replaced at load
//! by `out 0xe6, al`, two bytes too, which exits to the VMM and is completed there as RDPMC.

mod bzimage;
mod rdpmc;

use std::fs;
use std::path::Path;

use elf::ElfBytes;
use elf::endian::LittleEndian;

/// Why a file is no kernel that can be booted here.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Read(String, #[source] std::io::Error),
    /// Neither a bzImage nor an ELF file.
    #[error("this is neither a bzImage (vmlinuz) nor a 64-bit ELF file (vmlinux)")]
    Unknown,
    /// It ends before its header says.
    #[error("the kernel image is truncated: {0}")]
    Truncated(&'static str),
    /// The boot protocol is older than 2.08 (Linux 2.6.26), or the header makes no sense.
    #[error("the bzImage's header makes no sense, or is older than boot protocol 2.08")]
    Header,
    /// The payload has a magic number of no known method.
    #[error(
        "the kernel is compressed with a method not known here (it begins with {0:02x?}); known \
         are gzip, xz, zstd and lz4, or give an uncompressed vmlinux"
    )]
    Compression([u8; 4]),
    /// The compressed data is damaged.
    #[error("the kernel's {0} data cannot be decompressed: {1}")]
    Damaged(&'static str, String),
    /// The ELF file is damaged.
    #[error("the kernel's ELF headers are damaged: {0}")]
    Elf(#[from] elf::ParseError),
    /// Not for this processor.
    #[error("the kernel is not for x86-64")]
    Machine,
    /// Without sections nobody can tell code from data.
    #[error(
        "the kernel has no section headers, so its RDPMC instructions cannot be found safely; give \
         the distribution's bzImage or an unstripped vmlinux, or boot it with --no-pmu"
    )]
    NoSections,
    /// Two bytes that may be an RDPMC or the inside of another instruction.
    #[error(
        "at {0:#x} the kernel has two bytes that may be an RDPMC or a part of another instruction, \
         so it cannot be rewritten safely; boot it with --no-pmu"
    )]
    Ambiguous(u64),
    /// No RDPMC at all.
    #[error(
        "the kernel has no RDPMC instruction: built without perf, or rewritten already; boot it \
         with --no-pmu"
    )]
    NoRdpmc,
}

/// A kernel in memory: an ELF file.
#[derive(Debug)]
pub struct Kernel {
    elf: Vec<u8>,
    rdpmc: Vec<u64>,
}

impl Kernel {
    /// Reads `path`, a bzImage or an ELF file.
    ///
    /// # Errors
    ///
    /// Says what is wrong with the file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bytes =
            fs::read(path).map_err(|error| Error::Read(path.display().to_string(), error))?;
        Self::from_bytes(bytes)
    }

    /// Takes the kernel out of `image`.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub fn from_bytes(image: Vec<u8>) -> Result<Self, Error> {
        let elf = if image.starts_with(b"\x7fELF") {
            image
        } else if bzimage::is_one(&image) {
            bzimage::extract(&image)?
        } else {
            return Err(Error::Unknown);
        };
        let parsed = ElfBytes::<LittleEndian>::minimal_parse(&elf)?;
        if parsed.ehdr.e_machine != elf::abi::EM_X86_64 {
            return Err(Error::Machine);
        }
        Ok(Self {
            elf,
            rdpmc: Vec::new(),
        })
    }

    /// Replaces every RDPMC of the kernel by an exit.
    ///
    /// # Errors
    ///
    /// Refuses a kernel where this cannot be done safely, or that has none. It is then unchanged.
    pub fn rewrite_rdpmc(&mut self) -> Result<(), Error> {
        let sites = rdpmc::find(&self.elf)?;
        for site in &sites {
            self.elf[site.offset..][..2].copy_from_slice(&rdpmc::EXIT);
        }
        self.rdpmc = sites.iter().map(|site| site.address).collect();
        Ok(())
    }

    /// The ELF file.
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }

    /// Where an RDPMC was replaced.
    pub fn rdpmc_addresses(&self) -> &[u64] {
        &self.rdpmc
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An ELF file with one section of code, as small as can be.
    pub(crate) fn elf_with(code: &[u8]) -> Vec<u8> {
        let names = b"\0.text\0.shstrtab\0";
        let code_at = 64;
        let names_at = code_at + code.len();
        let sections_at = names_at + names.len();
        let mut file = Vec::new();
        file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        file.extend(2_u16.to_le_bytes()); // ET_EXEC
        file.extend(62_u16.to_le_bytes()); // EM_X86_64
        file.extend(1_u32.to_le_bytes());
        file.extend(0x100_0000_u64.to_le_bytes()); // entry
        file.extend(0_u64.to_le_bytes());
        file.extend((sections_at as u64).to_le_bytes());
        file.extend(0_u32.to_le_bytes());
        for half in [64_u16, 56, 0, 64, 3, 2] {
            file.extend(half.to_le_bytes());
        }
        file.extend(code);
        file.extend(names);
        let mut section =
            |name: u32, kind: u32, flags: u64, address: u64, at: usize, size: usize| {
                file.extend(name.to_le_bytes());
                file.extend(kind.to_le_bytes());
                for word in [flags, address, at as u64, size as u64] {
                    file.extend(word.to_le_bytes());
                }
                file.extend([0; 8]);
                file.extend(1_u64.to_le_bytes());
                file.extend(0_u64.to_le_bytes());
            };
        section(0, 0, 0, 0, 0, 0);
        section(1, 1, 6, 0xffff_ffff_8100_0000, code_at, code.len());
        section(7, 3, 0, 0, names_at, names.len());
        file
    }

    #[test]
    fn rubbish_is_no_kernel() {
        for image in [&b""[..], b"MZ", b"\x7fELF", &[0; 4096]] {
            assert!(Kernel::from_bytes(image.to_vec()).is_err());
        }
    }

    #[test]
    fn every_truncation_of_an_elf_file_is_an_error_or_another_file() {
        let whole = elf_with(&[0x90, 0x0f, 0x33, 0xc3]);
        for length in 0..whole.len() {
            if let Ok(mut kernel) = Kernel::from_bytes(whole[..length].to_vec()) {
                assert!(kernel.rewrite_rdpmc().is_err(), "{length}");
            }
        }
        assert!(Kernel::from_bytes(whole).unwrap().rewrite_rdpmc().is_ok());
    }
}
