//! The frame of an exception in 64-bit mode (SDM vol. 3A, 6.14.2), and whether an RDPMC caused this one.

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;

use super::code::Code;
use vpmu_x86::paging::{Access, Mode};

pub(super) const RDPMC: [u8; 2] = [0x0f, 0x33];
pub(super) const LENGTH: u64 = RDPMC.len() as u64;

/// RFLAGS: single step.
pub(super) const TF: u64 = 1 << 8;
/// RFLAGS: the resume flag, which the completion of an instruction clears.
const RF: u64 = 1 << 16;
const VM: u64 = 1 << 17;
/// RFLAGS: what IRET loads at CPL 0, without RF and VM.
const LOADED: u64 = 0x3c_7fd5;
const FIXED: u64 = 1 << 1;

/// Offsets in the frame.
const RIP: u64 = 8;
const RFLAGS: u64 = 24;

/// The frame at the entry of the handler: the error code is at RSP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) rip: u64,
    pub(super) rflags: u64,
    pub(super) rsp: u64,
    pub(super) ring: Ring,
}

impl Frame {
    /// Returns the frame of a vCPU at the entry of its handler, if an RDPMC that may be executed there has caused it.
    /// Everything else is the guest's own #GP.
    pub(super) fn of_rdpmc(sregs: &kvm_sregs, regs: &kvm_regs, code: Code<'_>) -> Option<Self> {
        const CR4_PCE: u64 = 1 << 8;
        const RPL: u64 = 3;
        const LDT: u64 = 1 << 2;
        // The processor has written the frame itself.
        let words: [u8; 48] = code.bytes(regs.rsp, Access::Load, Mode::Implicit)?;
        let (words, _) = words.as_chunks();
        let [error, rip, cs, rflags, rsp, ss] = words else {
            return None;
        };
        let [error, rip, cs, rflags, rsp, ss] =
            [error, rip, cs, rflags, rsp, ss].map(|word| u64::from_le_bytes(*word));
        let ring = match cs & RPL {
            0 => Ring::Kernel,
            _ => Ring::User,
        };
        let may_read = match ring {
            // The handler's own code segment: the vCPU goes on in the interrupted one without loading it.
            Ring::Kernel => cs & 0xffff == u64::from(sregs.cs.selector),
            // IRETQ loads the segments. From a stack segment of 16 bits the handler returns by a way of its own.
            Ring::User => sregs.cr4 & CR4_PCE != 0 && cs & LDT == 0 && ss & LDT == 0,
        };
        let is_rdpmc = || {
            // CPL 1 and 2 are the supervisor's, too.
            let bytes = match cs & RPL {
                RPL => code.bytes(rip, Access::Fetch, Mode::User),
                _ => code.kernels(rip),
            };
            bytes == Some(RDPMC)
        };
        let behind = rip.wrapping_add(LENGTH);
        let is_ours = error == 0
            && rflags & VM == 0
            && may_read
            && code.paging.is_canonical(behind)
            && is_rdpmc();
        is_ours.then_some(Self {
            rip,
            rflags,
            rsp,
            ring,
        })
    }

    /// Returns RFLAGS after the instruction.
    pub(super) fn flags(&self) -> u64 {
        // Bit 1 is 1 on every processor (SDM vol. 1, 3.4.3).
        self.rflags & LOADED | FIXED
    }

    /// Makes the frame at `rsp` one that returns behind the instruction.
    pub(super) fn step_over(&self, rsp: u64, code: Code<'_>) -> bool {
        let behind = self.rip.wrapping_add(LENGTH);
        // Else a breakpoint of the guest's on the next instruction would not be taken.
        let rflags = self.rflags & !RF;
        let at = |offset| rsp.wrapping_add(offset);
        code.write(at(RIP), &behind.to_le_bytes()) && code.write(at(RFLAGS), &rflags.to_le_bytes())
    }
}
