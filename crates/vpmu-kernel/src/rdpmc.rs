//! Finds the RDPMC instructions of a kernel, by decoding.
//!
//! The bytes `0f 33` are RDPMC only where an instruction begins; in a large kernel they also stand
//! inside addresses and constants, some twenty times. The code around such a pair is decoded from
//! several places before it. x86 code falls into step with itself within a few instructions
//! wherever decoding begins, so the decodings agree on whether one begins at the pair. Where they
//! do not agree, the kernel is refused.

use elf::ElfBytes;
use elf::abi::{SHF_EXECINSTR, SHT_NOBITS};
use elf::endian::LittleEndian;
use iced_x86::{Code, Decoder, DecoderOptions};

use super::Error;

const RDPMC: [u8; 2] = [0x0f, 0x33];
/// `out 0xe6, al`.
pub(super) const EXIT: [u8; 2] = [0xe6, 0xe6];
/// How far before a pair decoding begins, at the most.
const RUN_UP: usize = 256;
/// How much of the run-up is left to fall into step: more than ten of the longest instructions.
const IN_STEP: usize = 160;

/// An RDPMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// In the file.
    pub(super) offset: usize,
    /// In the running kernel.
    pub(super) address: u64,
}

/// All of `file`, which is not empty-handed: a kernel without any is an error.
pub(super) fn find(file: &[u8]) -> Result<Vec<Site>, Error> {
    let elf = ElfBytes::<LittleEndian>::minimal_parse(file)?;
    let sections = elf.section_headers().ok_or(Error::NoSections)?;
    let mut sites = Vec::new();
    for section in sections {
        if section.sh_flags & u64::from(SHF_EXECINSTR) == 0 || section.sh_type == SHT_NOBITS {
            continue;
        }
        let start = usize::try_from(section.sh_offset).map_err(|_| Error::Header)?;
        let size = usize::try_from(section.sh_size).map_err(|_| Error::Header)?;
        let code = file
            .get(start..)
            .and_then(|rest| rest.get(..size))
            .ok_or(Error::Truncated("it ends within its code"))?;
        for at in pairs(code) {
            let address = section.sh_addr.wrapping_add(at as u64);
            if begins_at(code, at).ok_or(Error::Ambiguous(address))? {
                sites.push(Site {
                    offset: start + at,
                    address,
                });
            }
        }
    }
    if sites.is_empty() {
        return Err(Error::NoRdpmc);
    }
    Ok(sites)
}

fn pairs(code: &[u8]) -> impl Iterator<Item = usize> {
    code.windows(2)
        .enumerate()
        .filter(|(_, pair)| *pair == RDPMC)
        .map(|(at, _)| at)
}

/// Whether an RDPMC begins at `at`; `None`: cannot be told.
fn begins_at(code: &[u8], at: usize) -> Option<bool> {
    let end = code.len().min(at + 16);
    let first = at.saturating_sub(RUN_UP);
    // The section's own beginning is in step; from elsewhere it takes a while.
    let starts = if first == 0 {
        0..=0
    } else {
        first..=at - IN_STEP
    };
    let mut answer = None;
    for start in starts {
        let mut decoder =
            Decoder::with_ip(64, &code[start..end], start as u64, DecoderOptions::NONE);
        let begins = loop {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                // Began inside an instruction, and ran into nonsense: says nothing.
                break None;
            }
            let here = instruction.ip() as usize;
            if here == at {
                break Some(instruction.code() == Code::Rdpmc);
            }
            if instruction.next_ip() as usize > at {
                break Some(false);
            }
        };
        match (answer, begins) {
            (_, None) => {}
            (None, Some(_)) => answer = begins,
            (Some(before), Some(now)) if before == now => {}
            _ => return None,
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::super::tests::elf_with;
    use super::*;
    use crate::Kernel;

    /// Ordinary code, long enough to begin in the middle of.
    fn filler() -> Vec<u8> {
        let one = [
            0x55, 0x48, 0x89, 0xe5, 0x41, 0x54, 0x48, 0x83, 0xec, 0x10, 0x48, 0x8b, 0x07, 0x48,
            0x85, 0xc0, 0x74, 0x05, 0xe8, 0x10, 0x20, 0x30, 0x00, 0x5d, 0xc3,
        ];
        one.repeat(40)
    }

    fn offsets(code: &[u8]) -> Vec<usize> {
        find(&elf_with(code))
            .map(|sites| sites.iter().map(|site| site.offset - 64).collect())
            .unwrap_or_default()
    }

    #[test]
    fn an_instruction_is_found_and_the_same_bytes_in_a_constant_are_not() {
        let mut code = filler();
        code.extend([0xb8, 0x0f, 0x33, 0x00, 0x00]); // mov eax, 0x330f
        code.extend([0x48, 0x8d, 0x05, 0x0f, 0x33, 0x0f, 0x33]); // lea rax, [rip+0x330f330f]
        code.extend(filler());
        assert!(matches!(find(&elf_with(&code)), Err(Error::NoRdpmc)));
        let real = code.len();
        code.extend([0x0f, 0x33]);
        code.extend(filler());
        assert_eq!(offsets(&code), [real]);
    }

    #[test]
    fn at_the_very_beginning_and_end_too() {
        let mut code = vec![0x0f, 0x33];
        code.extend(filler());
        let end = code.len();
        code.extend([0x0f, 0x33]);
        assert_eq!(offsets(&code), [0, end]);
        // Half of one is none.
        assert!(offsets(&code[..1]).is_empty());
    }

    #[test]
    fn nothing_but_the_instructions_changes() {
        let mut code = filler();
        code.extend([0x0f, 0x33]);
        code.extend(filler());
        let file = elf_with(&code);
        let mut kernel = Kernel::from_bytes(file.clone()).unwrap();
        kernel.rewrite_rdpmc().unwrap();
        let changed: Vec<usize> = (0..file.len())
            .filter(|&n| file[n] != kernel.elf()[n])
            .collect();
        let at = 64 + filler().len();
        assert_eq!(changed, [at, at + 1]);
        assert_eq!(kernel.elf()[at..at + 2], EXIT);
        assert_eq!(kernel.rdpmc_addresses().len(), 1);
        assert!(kernel.rewrite_rdpmc().is_err(), "there is none any more");
    }
}
