//! The DS save area: the guest's, at IA32_DS_AREA, with fields of 64 bits (SDM vol. 3B, 18.4.9.1; with CPUID's DTES64 in
//! any mode). The guest may have anything there, and write it meanwhile.

use super::record::BASIC;
use super::{Fault, Guest};
use crate::counter::Counter;
use crate::x86::intel;

/// The head: buffer base, index, absolute maximum, interrupt threshold.
const HEAD: u64 = 0x20;
const INDEX: u64 = HEAD + 8;
/// Reset values of general counters, and of fixed ones (format 4).
const GENERAL_RESET: u64 = 0x40;
const FIXED_RESET: u64 = 0x80;

/// What the head says.
#[derive(Clone, Copy, Debug)]
pub(in crate::x86) struct Area {
    at: u64,
    base: u64,
    index: u64,
    maximum: u64,
    threshold: u64,
}

impl Area {
    pub(in crate::x86) fn read(guest: &mut dyn Guest, at: u64) -> Result<Self, Fault> {
        let mut head = [0; 32];
        guest.read(at.checked_add(HEAD).ok_or(Fault)?, &mut head)?;
        let ([base, index, maximum, threshold], _) = head.as_chunks() else {
            return Err(Fault);
        };
        Ok(Self {
            at,
            base: u64::from_le_bytes(*base),
            index: u64::from_le_bytes(*index),
            maximum: u64::from_le_bytes(*maximum),
            threshold: u64::from_le_bytes(*threshold),
        })
    }

    /// What counter `n` is to go on from.
    pub(in crate::x86) fn reset(&self, guest: &mut dyn Guest, n: Counter) -> Result<u64, Fault> {
        let offset = match n.number().checked_sub(intel::FIXED) {
            Some(fixed) => FIXED_RESET + 8 * u64::from(fixed),
            None => GENERAL_RESET + 8 * u64::from(n.number()),
        };
        let mut value = [0; 8];
        guest.read(self.at.checked_add(offset).ok_or(Fault)?, &mut value)?;
        Ok(u64::from_le_bytes(value))
    }

    /// Appends `record`, if it fits.
    pub(in crate::x86) fn append(
        &mut self,
        guest: &mut dyn Guest,
        record: &[u8],
    ) -> Result<(), Fault> {
        let next = self.index.checked_add(record.len() as u64).ok_or(Fault)?;
        // The guest may have moved any of them since; a record goes only where all agree.
        if self.index < self.base || next > self.maximum {
            return Err(Fault);
        }
        // The record first: an index that moves without a record would show the guest what was there before.
        guest.write(self.index, record)?;
        let index = self.at.checked_add(INDEX).ok_or(Fault)?;
        guest.write(index, &next.to_le_bytes())?;
        self.index = next;
        Ok(())
    }

    /// How many records of the basic group fit behind the index.
    pub(in crate::x86) fn room(&self) -> u64 {
        // Else the buffer's length would be counted from before its begin.
        match self.index < self.base {
            true => 0,
            false => self.maximum.saturating_sub(self.index) / BASIC as u64,
        }
    }

    /// How many fit into the empty buffer up to the threshold.
    pub(in crate::x86) fn up_to_threshold(&self) -> u64 {
        self.threshold.saturating_sub(self.base) / BASIC as u64
    }

    /// How many are left up to the threshold. The guest will have emptied a buffer that is due.
    pub(in crate::x86) fn left(&self) -> u64 {
        match self.threshold.saturating_sub(self.index) {
            0 => self.up_to_threshold(),
            // Rounded up: the record that crosses the threshold is the one that interrupts.
            bytes => bytes.div_ceil(BASIC as u64),
        }
    }

    /// Whether the buffer is filled so far that the guest wants an interrupt.
    pub(in crate::x86) fn is_due(&self) -> bool {
        self.index >= self.threshold
    }
}
