//! The first instruction of a guest's handler of #GP.

use kvm_bindings::kvm_sregs;

use super::code::{Code, exchange};
use crate::memory::GuestMemory;
use vpmu_x86::paging::{Access, Mode, PAGE};

/// The first instruction of the guest's #GP handler writes to this port. The port is the guest's own everywhere else.
pub(crate) const ENTRY_PORT: u16 = 0xe7;

/// ENDBR64, which stays: with CET's indirect branch tracking an exception has to arrive there.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
/// `out ENTRY_PORT, al`.
const OUT: [u8; 2] = [0xe6, ENTRY_PORT as u8];
const IRETQ: [u8; 2] = [0x48, 0xcf];
/// Pages that are searched for an IRETQ, in each direction. Linux has its own within 4 KiB of the entry.
const NEAR: u64 = 4;
/// The interrupt vector of #GP.
const GP: u64 = 13;

/// The instruction of three bytes whose first two are the exit's. The third stays where it is, and names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) enum Displaced {
    /// CLAC: Linux on a processor with SMAP.
    Clac,
    /// A NOP of three bytes: Linux on others.
    Nop,
}

impl Displaced {
    pub(super) const LENGTH: u64 = 3;

    const fn bytes(self) -> [u8; 3] {
        match self {
            Self::Clac => [0x0f, 0x01, 0xca],
            Self::Nop => [0x0f, 0x1f, 0x00],
        }
    }

    const fn original(self) -> [u8; 2] {
        [self.bytes()[0], self.bytes()[1]]
    }

    /// Returns the instruction that `code` begins with, and whether its exit is there already.
    fn of(code: [u8; 3]) -> Option<(Self, bool)> {
        [Self::Clac, Self::Nop].into_iter().find_map(|displaced| {
            let third = displaced.bytes()[2];
            match code {
                [a, b, c] if [a, b] == OUT && c == third => Some((displaced, true)),
                code if code == displaced.bytes() => Some((displaced, false)),
                _ => None,
            }
        })
    }
}

/// The entry of a handler of #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(super) struct Entry {
    /// Linear address of the exit.
    pub(super) at: u64,
    /// Its physical address.
    pub(super) physical: u64,
    pub(super) displaced: Displaced,
    /// Linear address of an IRETQ, which exists under the page tables of user space too.
    pub(super) iretq: u64,
}

/// The reason why a guest's RDPMC cannot come to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The vCPU is not in 64-bit mode, or delivers events by FRED.
    Mode,
    /// The IDT has no gate for #GP that 64-bit mode takes, or is not in RAM.
    Gate,
    /// The handler's first instruction is none of those that can be displaced, or lies across two words.
    Code,
    /// No IRETQ is near.
    Return,
    /// The handler's bytes cannot be changed.
    Memory,
}

impl Entry {
    /// Finds the handler of a vCPU with these registers, and whether its exit is there already. Nothing is changed.
    pub(super) fn find(sregs: &kvm_sregs, code: Code<'_>) -> Result<(Self, bool), Refusal> {
        const EFER_LMA: u64 = 1 << 10;
        const CR4_FRED: u64 = 1 << 32;
        // Gates and frames of the other modes are laid out otherwise, and no 32-bit kernel is served. With FRED no exception
        // takes a gate.
        if sregs.efer & EFER_LMA == 0 || sregs.cs.l == 0 || sregs.cr4 & CR4_FRED != 0 {
            return Err(Refusal::Mode);
        }
        let handler = handler(sregs, code).ok_or(Refusal::Gate)?;
        let start: [u8; 4] = code.kernels(handler).ok_or(Refusal::Gate)?;
        let at = match start {
            ENDBR64 => handler.wrapping_add(ENDBR64.len() as u64),
            _ => handler,
        };
        let first = code.kernels(at).ok_or(Refusal::Code)?;
        let (displaced, is_armed) = Displaced::of(first).ok_or(Refusal::Code)?;
        // Both bytes change in one store to one word.
        if at % 8 > 6 {
            return Err(Refusal::Code);
        }
        let entry = Self {
            at,
            physical: code.kernels_place(at).ok_or(Refusal::Code)?,
            displaced,
            iretq: iretq(handler, code).ok_or(Refusal::Return)?,
        };
        Ok((entry, is_armed))
    }

    /// Makes the handler's first instruction an exit.
    pub(super) fn arm(&self, code: Code<'_>) -> bool {
        exchange(code.memory, self.physical, self.displaced.original(), OUT)
    }

    /// Brings the handler's own bytes back.
    pub(super) fn disarm(&self, memory: &dyn GuestMemory) -> bool {
        exchange(memory, self.physical, OUT, self.displaced.original())
    }

    /// Returns the physical address of the exit, as the tables have it now.
    pub(super) fn place(&self, code: Code<'_>) -> Option<u64> {
        code.kernels_place(self.at)
    }

    /// Returns whether the guest still has an IRETQ there.
    pub(super) fn can_return(&self, code: Code<'_>) -> bool {
        code.kernels(self.iretq) == Some(IRETQ)
    }

    /// Returns whether a vCPU whose write to the port has exited is at this entry. KVM leaves RIP at the instruction or
    /// behind it, as it has emulated it.
    pub(super) fn is_at(&self, rip: u64) -> bool {
        rip == self.at || rip == self.at.wrapping_add(OUT.len() as u64)
    }
}

/// Returns the address in gate 13 of the IDT: an interrupt or trap gate of 64-bit mode (SDM vol. 3A, figure 6-8).
fn handler(sregs: &kvm_sregs, code: Code<'_>) -> Option<u64> {
    const SIZE: u64 = 16;
    const PRESENT: u8 = 1 << 7;
    let offset = GP * SIZE;
    (u64::from(sregs.idt.limit) >= offset + SIZE - 1).then_some(())?;
    let gate: [u8; SIZE as usize] = {
        let at = sregs.idt.base.checked_add(offset)?;
        code.bytes(at, Access::Load, Mode::Implicit)?
    };
    // 64-bit mode has no other gates in the IDT; an absent one has no handler at this address.
    let is_gate = gate[5] & PRESENT != 0 && matches!(gate[5] & 0x1f, 0x0e | 0x0f);
    is_gate.then(|| {
        u64::from_le_bytes([
            gate[0], gate[1], gate[6], gate[7], gate[8], gate[9], gate[10], gate[11],
        ])
    })
}

/// Returns the address of an IRETQ near `handler`, in whichever instruction its bytes are.
fn iretq(handler: u64, code: Code<'_>) -> Option<u64> {
    let page = handler - handler % PAGE;
    let after = (0..NEAR).map(|n| page.checked_add(n * PAGE));
    let before = (1..=NEAR).map(|n| page.checked_sub(n * PAGE));
    after.chain(before).flatten().find_map(|page| {
        let bytes: [u8; PAGE as usize] = code.kernels(page)?;
        let at = bytes.windows(IRETQ.len()).position(|pair| pair == IRETQ)?;
        Some(page + at as u64)
    })
}
