//! Finds the RDPMC instructions of a kernel, by decoding.
//!
//! The bytes `0f 33` are RDPMC only where an instruction begins; in a large kernel they also stand
//! inside addresses and constants, some twenty times. The code around such a pair is decoded from
//! several places before it. x86 code falls into step with itself within a few instructions
//! wherever decoding begins, so the decodings agree on whether one begins at the pair. Where they
//! do not agree, the kernel is refused.
//!
//! The decodings of one pair share their ends with each other and with those of the next pair, so
//! each byte of code is decoded at most once, whatever the code is.

use iced_x86::{Code as Opcode, Decoder, DecoderOptions, Instruction};

use super::elf::Code;
use super::{Error, MOST_PAIRS};

const RDPMC: [u8; 2] = [0x0f, 0x33];
/// `out 0xe6, al`.
pub(super) const EXIT: [u8; 2] = [0xe6, 0xe6];
/// How far before a pair decoding begins, at the most.
const RUN_UP: usize = 256;
/// How much of the run-up is left to fall into step: more than ten of the longest instructions.
const IN_STEP: usize = 160;
/// Steps that are kept: those of a pair's run-up and of the pair.
const KEPT: usize = (RUN_UP + 1).next_power_of_two();

/// What was searched, and the instructions found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Where an RDPMC begins.
    pub sites: Vec<Site>,
    /// Places that hold the two bytes.
    pub pairs: usize,
    /// Instructions decoded to tell the two apart: at most one for each byte of code, and at most
    /// 257 for each pair.
    pub decoded: u64,
}

/// An RDPMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// In the file.
    pub offset: usize,
    /// In the running kernel.
    pub address: u64,
}

/// All RDPMCs in `code`, parts of `file` in ascending order that share no bytes.
pub(super) fn find(file: &[u8], code: &[Code]) -> Result<Search, Error> {
    let mut search = Search::default();
    for part in code {
        let bytes = &file[part.file.clone()];
        let mut steps = Steps::of(bytes);
        for at in pairs(bytes) {
            search.pairs += 1;
            if search.pairs > MOST_PAIRS {
                return Err(Error::Pairs);
            }
            let address = part.address.wrapping_add(at as u64);
            if steps.begins_at(at).ok_or(Error::Ambiguous(address))? {
                search.sites.push(Site {
                    offset: part.file.start + at,
                    address,
                });
            }
        }
        search.decoded += steps.decoded;
    }
    Ok(search)
}

fn pairs(code: &[u8]) -> impl Iterator<Item = usize> {
    code.windows(2)
        .enumerate()
        .filter(|(_, pair)| *pair == RDPMC)
        .map(|(at, _)| at)
}

/// What decoding at one byte gives.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    /// Of the instruction, in bytes; 0: there is none.
    length: u8,
    rdpmc: bool,
}

/// A part of the code, decoded from each of its bytes as far as somebody asked.
struct Steps<'a> {
    decoder: Decoder<'a>,
    /// By offset, modulo its length.
    kept: [Step; KEPT],
    /// The first offset that is not decoded yet.
    next: usize,
    decoded: u64,
}

impl<'a> Steps<'a> {
    fn of(code: &'a [u8]) -> Self {
        Self {
            decoder: Decoder::new(64, code, DecoderOptions::NONE),
            kept: [Step::default(); KEPT],
            next: 0,
            decoded: 0,
        }
    }

    /// Whether an RDPMC begins at `at`, which is later than any before; `None`: not known.
    fn begins_at(&mut self, at: usize) -> Option<bool> {
        let first = at.saturating_sub(RUN_UP);
        for offset in self.next.max(first)..=at {
            self.kept[offset % KEPT] = self.decode(offset);
        }
        self.next = at + 1;
        // Backwards, each answer leads to one that is known. Invalid: decoding began inside an
        // instruction and ran into nonsense, which says nothing.
        let mut answers = [None; RUN_UP + 1];
        for offset in (first..=at).rev() {
            let step = self.kept[offset % KEPT];
            answers[offset - first] = match offset + usize::from(step.length) {
                _ if step.length == 0 => None,
                _ if offset == at => Some(step.rdpmc),
                // Prefixes that mean nothing to RDPMC mean nothing to what replaces it.
                next if next > at => Some(step.rdpmc && next == at + RDPMC.len()),
                next => answers[next - first],
            };
        }
        // The section's own beginning is in step; from elsewhere it takes a while.
        let starts = if first == 0 { 1 } else { RUN_UP - IN_STEP + 1 };
        let mut known = answers[..starts].iter().flatten();
        let answer = *known.next()?;
        known.all(|other| *other == answer).then_some(answer)
    }

    fn decode(&mut self, offset: usize) -> Step {
        self.decoded += 1;
        let mut instruction = Instruction::default();
        if self.decoder.set_position(offset).is_ok() {
            self.decoder.decode_out(&mut instruction);
        }
        match instruction.code() {
            Opcode::INVALID => Step::default(),
            opcode => Step {
                length: instruction.len() as u8,
                rdpmc: opcode == Opcode::Rdpmc,
            },
        }
    }
}

#[cfg(test)]
mod tests;
