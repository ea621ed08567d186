//! The registers of the CPU that executes a call, at EL2.

use core::ffi::c_void;

use vpmu::arm::partition::PmuRegisters;
use vpmu::arm::{Encoding, Register};

/// The registers of the CPU that executes this, at EL2. `write` has an ISB behind it.
///
/// Registers are named by the ISS of their own access: op0, op2, op1, CRn and CRm at their places,
/// Rt and the direction zero (`VPMU_REGISTER` makes such a number).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuRegisters {
    /// Handed to both functions.
    pub context: *mut c_void,
    /// Executes an MRS.
    pub read: Option<unsafe extern "C" fn(context: *mut c_void, iss: u32) -> u64>,
    /// Executes an MSR and an ISB.
    pub write: Option<unsafe extern "C" fn(context: *mut c_void, iss: u32, value: u64)>,
}

/// [`VpmuRegisters`] of which both functions are there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    context: *mut c_void,
    read: unsafe extern "C" fn(*mut c_void, u32) -> u64,
    write: unsafe extern "C" fn(*mut c_void, u32, u64),
}

impl Registers {
    /// `None`: a function is missing.
    pub(crate) fn new(registers: &VpmuRegisters) -> Option<Self> {
        Some(Self {
            context: registers.context,
            read: registers.read?,
            write: registers.write?,
        })
    }
}

impl PmuRegisters for Registers {
    fn read(&mut self, register: Register) -> u64 {
        // SAFETY: the caller of `vpmu_*_init` promised functions that may be called with its context.
        unsafe { (self.read)(self.context, register.encoding().to_iss()) }
    }

    fn write(&mut self, register: Register, value: u64) {
        // SAFETY: as in `read`.
        unsafe { (self.write)(self.context, register.encoding().to_iss(), value) }
    }
}

/// The register that a trapped MRS or MSR names, and whether it is written, by ESR_ELx.ISS of
/// exception class 0x18. Bit 0 is the direction: 1 is a read.
pub(crate) fn decode(iss: u32) -> Option<(Register, bool)> {
    Register::decode(Encoding::from_iss(iss)).map(|register| (register, iss & 1 == 0))
}
