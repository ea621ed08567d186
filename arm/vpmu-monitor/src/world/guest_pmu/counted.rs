//! Counts accesses on their way to the registers.

use vpmu::arm::Register;
use vpmu::arm::partition::PmuRegisters;

/// Registers, and the accesses of them so far.
pub(super) struct Counted<'a, R> {
    registers: &'a mut R,
    pub(super) accesses: u64,
}

impl<'a, R> Counted<'a, R> {
    pub(super) fn new(registers: &'a mut R) -> Self {
        Self {
            registers,
            accesses: 0,
        }
    }
}

impl<R: PmuRegisters> PmuRegisters for Counted<'_, R> {
    fn read(&mut self, register: Register) -> u64 {
        self.accesses += 1;
        self.registers.read(register)
    }

    fn write(&mut self, register: Register, value: u64) {
        self.accesses += 1;
        self.registers.write(register, value);
    }
}
