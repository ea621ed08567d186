//! An address space in bytes, as a fuzzer writes it: 17 registers, then pages of an address, a length and content each.

use vpmu_unwind::{Call, MOST_CALLS, Memory, Outcome, PAGE, Registers, Unwinder};

/// Most pages of a space.
const MOST: usize = 64;

pub(crate) struct Space {
    pages: Vec<(u64, [u8; PAGE as usize])>,
    /// What the unwinder has asked for.
    pub(crate) asked: u64,
}

/// Returns the registers and the space that `bytes` are, as far as they go.
pub(crate) fn parse(mut bytes: &[u8]) -> (Registers, Space) {
    let mut registers = Registers::default();
    let places = registers.general.iter_mut().chain([&mut registers.rip]);
    for place in places {
        *place = word(&mut bytes);
    }
    let mut space = Space {
        pages: Vec::new(),
        asked: 0,
    };
    while !bytes.is_empty() && space.pages.len() < MOST {
        let address = word(&mut bytes) & !(PAGE - 1);
        let length = word(&mut bytes).min(PAGE).min(bytes.len() as u64) as usize;
        let (content, rest) = bytes.split_at(length);
        let mut page = [0; PAGE as usize];
        page[..length].copy_from_slice(content);
        space.pages.push((address, page));
        bytes = rest;
    }
    space.pages.sort_by_key(|(address, _)| *address);
    (registers, space)
}

fn word(bytes: &mut &[u8]) -> u64 {
    let mut word = [0; 8];
    let length = bytes.len().min(8);
    word[..length].copy_from_slice(&bytes[..length]);
    *bytes = &bytes[length..];
    u64::from_le_bytes(word)
}

/// Unwinds the space twice, with cold caches and with warm ones. Both find the same, and neither asks for more than the budget
/// allows.
pub(crate) fn check(bytes: &[u8]) -> Outcome {
    /// The budget of reads, and what an object's identity and the last frame may add.
    const MOST_ASKED: u64 = 16384;
    let (registers, mut space) = parse(bytes);
    let mut unwinder = Unwinder::new();
    let mut unwind = || {
        let mut calls = [Call::default(); MOST_CALLS];
        space.asked = 0;
        let outcome = unwinder.unwind(&mut space, 1, &registers, &mut calls);
        assert!(space.asked <= MOST_ASKED, "{} reads", space.asked);
        assert!(outcome.calls <= MOST_CALLS);
        (outcome, calls)
    };
    let cold = unwind();
    let warm = unwind();
    // With warm caches the budget goes further.
    let is_budget = cold.0.end == vpmu_unwind::End::Cut(vpmu_unwind::Cut::Budget);
    if !is_budget {
        assert_eq!(cold.1, warm.1);
        assert_eq!((cold.0.calls, cold.0.end), (warm.0.calls, warm.0.end));
    }
    cold.0
}

impl Memory for Space {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        self.asked += 1;
        let offset = (address % PAGE) as usize;
        assert!(offset + bytes.len() <= PAGE as usize, "on one page");
        let linear = address & !(PAGE - 1);
        let found = self.pages.iter().find(|(at, _)| *at == linear);
        if let Some((_, page)) = found {
            bytes.copy_from_slice(&page[offset..offset + bytes.len()]);
        }
        found.is_some()
    }

    fn page(&mut self, address: u64) -> Option<u64> {
        self.asked += 1;
        let linear = address & !(PAGE - 1);
        let found = self.pages.iter().find(|(at, _)| *at == linear);
        found.map(|&(at, _)| at)
    }

    fn present_below(&mut self, address: u64, lowest: u64) -> Option<u64> {
        self.asked += 1;
        let last = self.pages.iter().rev().find(|(at, _)| *at <= address);
        last.map(|&(at, _)| at).filter(|&at| at >= lowest)
    }
}
