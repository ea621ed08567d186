//! One record, group by group.
//!
//! SDM vol. 3B, 20.9.2.2. A record begins with the basic group; those that MSR_PEBS_DATA_CFG names follow in the order of
//! their bits. Branch records have the last place, behind the XMM registers: 24 bytes for each of as many as bits 31:24
//! say, plus one.

use super::{Fault, Guest, Sample};
use crate::x86::lbr::Stack;

/// Bits of MSR_PEBS_DATA_CFG.
pub mod data_cfg {
    /// The group of memory accesses: 32 bytes, zero here.
    pub const MEMORY: u64 = 1 << 0;
    /// General registers: 144 bytes.
    pub const GENERAL: u64 = 1 << 1;
    /// XMM registers: 256 bytes.
    pub const XMM: u64 = 1 << 2;
    /// Last branches: 24 bytes for each, the most recent first.
    pub const BRANCHES: u64 = 1 << 3;
    /// One less than the number of last branches, which is 32 at most.
    pub const MOST_BRANCHES: u64 = 0x1f << 24;
    /// Bits that may be set.
    pub const ALL: u64 = MEMORY | GENERAL | XMM | BRANCHES | MOST_BRANCHES;
}

/// The longest record, in words: basic, memory, general, XMM, branches.
const WORDS: usize = 4 + 4 + 18 + 32 + 32 * BRANCH;
/// Words of a last branch.
const BRANCH: usize = 3;

/// Bytes of a record of the basic group alone.
pub(in crate::x86) const BASIC: usize = 32;

/// Returns such a record.
pub(in crate::x86) fn basic(counters: u64, sample: Sample) -> [u8; BASIC] {
    // Bits 63:48 are the size. No bit of the groups is set: the basic one has none.
    let words = [(BASIC as u64) << 48, sample.ip, counters, sample.tsc];
    let mut record = [0; BASIC];
    let (room, _) = record.as_chunks_mut();
    for (place, word) in room.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    record
}

/// A record of format 4.
#[derive(Debug)]
pub(in crate::x86) struct Record {
    bytes: [u8; 8 * WORDS],
    length: usize,
}

impl Record {
    /// A record of `groups` for the counters in `counters`, numbered as in the global registers. `branches`: the last ones
    /// that the guest has taken; `None`: nobody knows.
    pub(in crate::x86) fn new(
        guest: &mut dyn Guest,
        groups: u64,
        counters: u64,
        sample: Sample,
        branches: Option<&Stack>,
    ) -> Result<Self, Fault> {
        let mut record = Self {
            bytes: [0; 8 * WORDS],
            length: 0,
        };
        let size = 8 * words(groups);
        // Between the groups and the size is the latency of the instruction, which nobody knows here.
        record.put(&[groups | size << 48, sample.ip, counters, sample.tsc]);
        if groups & data_cfg::MEMORY != 0 {
            record.put(&[0; 4]);
        }
        if groups & data_cfg::GENERAL != 0 {
            // The order of Linux's `struct pebs_gprs` (arch/x86/include/asm/perf_event.h).
            let registers = guest.general()?;
            record.put(&[registers.rflags, registers.rip]);
            record.put(&registers.general);
        }
        if groups & data_cfg::XMM != 0 {
            for register in guest.xmm()? {
                record.put(&[register as u64, (register >> 64) as u64]);
            }
        }
        if groups & data_cfg::BRANCHES != 0 {
            // The baseline has the group wherever there are adaptive records (SDM 20.9.2.2.5), also without last branch
            // records. MSR_PEBS_DATA_CFG alone makes the record's size: what is not there is zeros, as in the registers of a
            // branch that is none. So is an entry beyond IA32_LBR_DEPTH; Linux asks for none (`pebs_update_adaptive_cfg`).
            for n in 0..number_of_branches(groups) as u8 {
                record.put(&branches.map_or([0; BRANCH], |stack| stack.words(n)));
            }
        }
        Ok(record)
    }

    pub(in crate::x86) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn put(&mut self, words: &[u64]) {
        let room = self.bytes.get_mut(self.length..).unwrap_or_default();
        let (room, _) = room.as_chunks_mut();
        for (place, word) in room.iter_mut().zip(words) {
            *place = word.to_le_bytes();
            self.length += 8;
        }
    }
}

/// Words of a record of `groups`.
const fn words(groups: u64) -> u64 {
    const SIZES: [(u64, u64); 3] = [
        (data_cfg::MEMORY, 4),
        (data_cfg::GENERAL, 18),
        (data_cfg::XMM, 32),
    ];
    let mut words = 4;
    let mut n = 0;
    while n < SIZES.len() {
        if groups & SIZES[n].0 != 0 {
            words += SIZES[n].1;
        }
        n += 1;
    }
    if groups & data_cfg::BRANCHES != 0 {
        words += BRANCH as u64 * number_of_branches(groups);
    }
    words
}

/// Returns the last branches in a record of `groups` that has them.
const fn number_of_branches(groups: u64) -> u64 {
    ((groups & data_cfg::MOST_BRANCHES) >> data_cfg::MOST_BRANCHES.trailing_zeros()) + 1
}

const _: () = assert!(words(data_cfg::ALL) == WORDS as u64);
