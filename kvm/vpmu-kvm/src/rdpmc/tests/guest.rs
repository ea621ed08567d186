//! A small guest of pages: a handler, an IDT, a stack, and a process.

use kvm_bindings::{kvm_regs, kvm_sregs};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::super::Rdpmc;
use super::super::code::Code;
use super::super::entry::Refusal;
use super::super::frame::{self, Frame};
use crate::memory::GuestMemory;

pub(super) const ROOT: u64 = 0x1000;
/// Linear addresses, and the physical ones that they have.
pub(super) const TEXT: u64 = 0xffff_ffff_8100_0000;
pub(super) const TEXT_AT: u64 = 0x8_0000;
pub(super) const IDT: u64 = 0xffff_fe00_0000_0000;
pub(super) const IDT_AT: u64 = 0x9_0000;
pub(super) const STACK: u64 = 0xffff_c900_0000_0000;
pub(super) const STACK_AT: u64 = 0xa_0000;
pub(super) const USER: u64 = 0x40_0000;
pub(super) const USER_AT: u64 = 0xb_0000;

/// Flags of a page: present, writable, user, no execution.
pub(super) const P: u64 = 1 << 0;
pub(super) const W: u64 = 1 << 1;
pub(super) const U: u64 = 1 << 2;
pub(super) const NX: u64 = 1 << 63;

pub(super) const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
pub(super) const CLAC: [u8; 3] = [0x0f, 0x01, 0xca];
pub(super) const NOP: [u8; 3] = [0x0f, 0x1f, 0x00];
/// Where the handler is in its page, and its IRETQ.
pub(super) const HANDLER: u64 = 0xb30;
pub(super) const IRETQ: u64 = 0xc07;
/// The kernel's RDPMC.
pub(super) const SITE: u64 = 0x402;

pub(super) fn ram(size: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap()
}

pub(super) struct Guest {
    pub(super) ram: GuestMemoryMmap,
    pub(super) sregs: kvm_sregs,
    free: u64,
    levels: u32,
}

impl Guest {
    pub(super) fn new(handler: &[&[u8]]) -> Self {
        Self::with_tables(4, handler)
    }

    /// Makes a guest whose page tables have `levels` levels.
    pub(super) fn with_tables(levels: u32, handler: &[&[u8]]) -> Self {
        const LA57: u64 = 1 << 12;
        const TWO: u64 = 0x2000;
        let mut sregs = kvm_sregs {
            cr0: 0x8001_0033,
            cr3: ROOT,
            // PAE, SMAP.
            cr4: 1 << 5 | 1 << 21,
            efer: 0xd01,
            ..Default::default()
        };
        if levels == 5 {
            sregs.cr4 |= LA57;
        }
        sregs.cs.selector = 0x10;
        sregs.cs.l = 1;
        sregs.idt.base = IDT;
        sregs.idt.limit = 0xfff;
        let mut guest = Self {
            ram: ram(0x10_0000),
            sregs,
            free: ROOT + 0x1000,
            levels,
        };
        guest.map(TEXT, TEXT_AT, P);
        guest.map(IDT, IDT_AT, P | NX);
        guest.map(STACK, STACK_AT, P | W | NX);
        guest.map(STACK + 0x1000, STACK_AT + TWO, P | W | NX);
        guest.map(USER, USER_AT, P | U);
        guest.write(TEXT_AT + HANDLER, &handler.concat());
        guest.write(TEXT_AT + IRETQ, &[0x48, 0xcf]);
        guest.write(TEXT_AT + SITE, &frame::RDPMC);
        guest.write(USER_AT, &frame::RDPMC);
        guest.gate(TEXT + HANDLER, 0x8e);
        guest
    }

    pub(super) fn linux() -> Self {
        Self::new(&[&ENDBR64, &CLAC])
    }

    /// Goes on with empty page tables, and returns the root of those before.
    pub(super) fn new_tables(&mut self) -> u64 {
        let root = self.free;
        self.free += 0x1000;
        std::mem::replace(&mut self.sregs.cr3, root)
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        assert!(GuestMemory::write(&self.ram, at, bytes));
    }

    pub(super) fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(GuestMemory::read(&self.ram, at, &mut bytes));
        bytes
    }

    pub(super) fn all(&self) -> Vec<u8> {
        let mut bytes = vec![0; 0xf_fff8];
        assert!(GuestMemory::read(&self.ram, 0, &mut bytes));
        bytes
    }

    pub(super) fn map(&mut self, linear: u64, physical: u64, flags: u64) {
        let mut table = self.sregs.cr3;
        for level in (1..self.levels).rev() {
            let at = table + 8 * (linear >> (12 + 9 * level) & 0x1ff);
            let entry = u64::from_le_bytes(self.bytes(at));
            table = match entry & P {
                0 => {
                    let new = self.free;
                    self.free += 0x1000;
                    self.write(at, &(new | P | W | U).to_le_bytes());
                    new
                }
                _ => entry & !0xfff,
            };
        }
        let at = table + 8 * (linear >> 12 & 0x1ff);
        self.write(at, &(physical | flags).to_le_bytes());
    }

    pub(super) fn gate(&self, to: u64, kind: u8) {
        let to = to.to_le_bytes();
        let gate = [
            to[0], to[1], 0x10, 0, 0, kind, to[2], to[3], to[4], to[5], to[6], to[7], 0, 0, 0, 0,
        ];
        self.write(IDT_AT + 13 * 16, &gate);
    }

    pub(super) fn code(&self) -> Code<'_> {
        Code::of(&self.sregs, &self.ram)
    }

    pub(super) fn arm(&self, rdpmc: &Rdpmc) -> Result<(), Refusal> {
        rdpmc.arm(&self.sregs, &self.ram)
    }

    /// Returns the frame at `rsp` as the guest's handler finds it.
    pub(super) fn frame(&self, rsp: u64) -> Option<Frame> {
        let regs = kvm_regs {
            rsp,
            ..Default::default()
        };
        Frame::of_rdpmc(&self.sregs, &regs, self.code())
    }

    pub(super) fn push(&self, frame: [u64; 6]) {
        self.write(STACK_AT, &frame.map(u64::to_le_bytes).concat());
    }
}
