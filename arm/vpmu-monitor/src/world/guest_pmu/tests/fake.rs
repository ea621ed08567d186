//! PMU registers without a machine, for tests: plain storage.

use std::collections::HashMap;
use std::vec::Vec;

use vpmu::arm::{Register, partition::PmuRegisters};

#[derive(Default)]
pub(crate) struct FakeRegisters {
    values: HashMap<Register, u64>,
    pub(crate) writes: Vec<(Register, u64)>,
}

impl FakeRegisters {
    pub(crate) fn get(&self, register: Register) -> u64 {
        self.values.get(&register).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, register: Register, value: u64) {
        self.values.insert(register, value);
    }

    /// The machine counts `events` on a counter of `width` bits (a mask).
    pub(crate) fn count(&mut self, register: Register, events: u64, width: u64) {
        self.set(register, self.get(register).wrapping_add(events) & width);
    }

    pub(crate) fn last_write(&self, register: Register) -> Option<u64> {
        let (_, value) = self.writes.iter().rev().find(|(r, _)| *r == register)?;
        Some(*value)
    }
}

impl PmuRegisters for FakeRegisters {
    fn read(&mut self, register: Register) -> u64 {
        self.get(register)
    }

    fn write(&mut self, register: Register, value: u64) {
        self.writes.push((register, value));
        self.set(register, value);
    }
}
