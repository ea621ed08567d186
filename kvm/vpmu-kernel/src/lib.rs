//! A guest kernel: taken out of a distribution's image, its RDPMC instructions rewritten.
//!
//! KVM completes RDPMC itself and never asks the VMM; without a PMU in KVM the instruction is #GP,
//! and the first `perf` in the guest oopses its kernel. So RDPMC, two bytes, is replaced at load
//! by `out 0xe6, al`, two bytes too, which exits to the VMM and is completed there as RDPMC.
//!
//! ```no_run
//! let mut kernel = vpmu_kernel::Kernel::open("/boot/vmlinuz".as_ref())?;
//! let done = kernel.rewrite_rdpmc()?;
//! println!("{} of {} pairs are instructions", done.sites.len(), done.pairs);
//! for segment in kernel.segments() {
//!     // to `segment.address` in the guest: &kernel.elf()[segment.file.clone()]
//! }
//! # Ok::<(), vpmu_kernel::Error>(())
//! ```
//!
//! # What is lost
//!
//! - KASLR: the code that unpacks a bzImage also moves the kernel; a kernel that arrives unpacked
//!   stays where it was linked to. `Kernel::repack` (feature `pack`) puts it back into its bzImage, and loses nothing.
//! - A kernel that the guest loads by itself (kexec, kdump) is not rewritten. Its first `perf` faults.
//! - RDPMC in user space. Write 0 to /sys/bus/event_source/devices/cpu/rdpmc in the guest.
//!
//! # Bounds
//!
//! A file may be anybody's. What it can make this crate do is bounded, and beyond the bound the file
//! is refused:
//!
//! | what | bound |
//! |---|---|
//! | a file | [`LARGEST_FILE`]; a bzImage [`LARGEST_BZIMAGE`] |
//! | the kernel in a bzImage | [`LARGEST_UNPACKED`], whatever the compression; never more than announced |
//! | a decompressor's window (xz, zstd) | [`LARGEST_WINDOW`]; gzip needs 32 KiB, lz4 nothing |
//! | program headers, section headers | [`MOST_HEADERS`] each |
//! | places that look like an RDPMC | [`MOST_PAIRS`]; decoded: 257 instructions for each, and no byte twice |
//! | segments | share neither memory nor bytes of the file |
//!
//! So memory is at most that of the file, the kernel in it and one window, 450 MiB for a bzImage, and
//! time is linear in the file and the kernel.

mod bzimage;
#[cfg(feature = "cache")]
mod cache;
mod elf;
mod error;
#[cfg(feature = "pack")]
mod pack;
mod rdpmc;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

#[cfg(feature = "cache")]
pub use cache::Cache;
pub use elf::Segment;
pub use error::Error;
pub use rdpmc::{Search, Site};

/// Bytes that are read of a file. A vmlinux with all its debug information has less.
pub const LARGEST_FILE: u64 = 1 << 30;
/// Bytes of a bzImage. Distributions' have 10 to 20 MiB.
pub const LARGEST_BZIMAGE: u64 = 64 << 20;
/// Bytes that are unpacked from a bzImage. Distributions' kernels have 40 to 80 MiB.
pub const LARGEST_UNPACKED: u64 = 256 << 20;
/// Bytes that a decompressor may refer back to. Linux's own build asks xz and zstd for as much.
pub const LARGEST_WINDOW: u64 = 128 << 20;
/// Program headers, and section headers. A Linux has 5 and some 80.
pub const MOST_HEADERS: u32 = 0xffff;
/// Pairs of bytes in code that may be an RDPMC. A Linux has some twenty.
pub const MOST_PAIRS: usize = 4096;

/// A kernel in memory: an ELF file whose headers have been checked.
#[derive(Clone, Debug)]
pub struct Kernel {
    elf: Vec<u8>,
    layout: elf::Layout,
}

impl Kernel {
    /// Reads `path`, a bzImage or an ELF file.
    ///
    /// # Errors
    ///
    /// Says what is wrong with the file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::from_bytes(read_file(path)?)
    }

    /// Takes the kernel out of `image`.
    ///
    /// # Errors
    ///
    /// Says what is wrong with it.
    pub fn from_bytes(image: Vec<u8>) -> Result<Self, Error> {
        let elf = if image.len() as u64 > LARGEST_FILE {
            return Err(Error::File);
        } else if image.starts_with(b"\x7fELF") {
            image
        } else if is_bzimage(&image) {
            bzimage::extract(&image)?
        } else {
            return Err(Error::Unknown);
        };
        let layout = elf::Layout::of(&elf)?;
        Ok(Self { elf, layout })
    }

    /// Replaces every RDPMC of the kernel by an exit. A kernel that has none stays as it is: it was
    /// built without perf, or rewritten before.
    ///
    /// # Errors
    ///
    /// Refuses a kernel where this cannot be done safely. It is then unchanged.
    pub fn rewrite_rdpmc(&mut self) -> Result<Search, Error> {
        let code = self.layout.code.as_deref().ok_or(Error::NoSections)?;
        let search = rdpmc::find(&self.elf, code)?;
        for site in &search.sites {
            self.elf[site.offset..][..2].copy_from_slice(&rdpmc::EXIT);
        }
        Ok(search)
    }

    /// The ELF file.
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }

    /// What is to be loaded, by ascending address.
    pub fn segments(&self) -> &[Segment] {
        &self.layout.segments
    }

    /// Where the kernel begins: a physical address.
    pub fn entry(&self) -> u64 {
        self.layout.entry
    }

    /// For each of `sites` the symbol it is in and how far in, where the kernel has symbols: a
    /// distribution's bzImage does not.
    ///
    /// # Errors
    ///
    /// When the symbols make no sense.
    pub fn symbols(&self, sites: &[Site]) -> Result<Vec<Option<(String, u64)>>, Error> {
        let mut order: Vec<usize> = (0..sites.len()).collect();
        order.sort_by_key(|&n| sites[n].address);
        let addresses: Vec<u64> = order.iter().map(|&n| sites[n].address).collect();
        let mut named = vec![None; sites.len()];
        for (n, name) in order.into_iter().zip(elf::symbols(&self.elf, &addresses)?) {
            named[n] = name;
        }
        Ok(named)
    }
}

/// Whether `image` begins as a bzImage does.
pub fn is_bzimage(image: &[u8]) -> bool {
    image.get(bzimage::MAGIC_AT..bzimage::MAGIC_AT + 4) == Some(b"HdrS")
}

/// Reads a kernel's file, of [`LARGEST_FILE`] bytes at most.
///
/// # Errors
///
/// The file cannot be read, or is larger.
pub fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    let error = |error| Error::Read(path.display().to_string(), error);
    let file = File::open(path).map_err(error)?;
    read(file, LARGEST_FILE).map_err(|e| e.map_or(Error::File, error))
}

/// All of `input`, unless it is longer than `most`: then the error is none of reading. A device has
/// no length that could be asked for before.
fn read(input: impl Read, most: u64) -> Result<Vec<u8>, Option<io::Error>> {
    let mut bytes = Vec::new();
    // One byte more, to notice it.
    input.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(None),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests;
