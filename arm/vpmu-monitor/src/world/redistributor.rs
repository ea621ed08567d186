//! The GIC's redistributors as the guest reaches them: every access to their frames is served here.
//!
//! Two things in them must not be the guest's. In the SGI frame are the enable bits and priorities of
//! the PPIs, and some PPIs belong to the monitor: its maintenance interrupt always, the PMU's when the
//! PMU is emulated or the host samples by it. Linux disables every PPI when it starts, so the guest has a view of its own of those.
//! In the control frame are the addresses of the LPI tables, which the redistributor writes by physical
//! address and so past stage 2. LPIs are therefore not offered: the frame says that there are none.
//!
//! Registers, widths and reset values: Arm IHI 0069, "The GIC Redistributor register map".

use alloc::vec::Vec;
use core::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed},
};

/// Groups, bit n = INTID n.
pub const IGROUPR0: u64 = 0x080;
/// Enables, likewise.
pub const ISENABLER0: u64 = 0x100;
/// Disables, likewise.
pub const ICENABLER0: u64 = 0x180;
/// Makes pending, likewise.
pub const ISPENDR0: u64 = 0x200;
/// Makes no longer pending, likewise.
pub const ICPENDR0: u64 = 0x280;
/// Makes active, likewise.
pub const ISACTIVER0: u64 = 0x300;
/// Makes inactive, likewise.
pub const ICACTIVER0: u64 = 0x380;
/// Priorities, byte n = INTID n.
pub const IPRIORITYR0: u64 = 0x400;
pub(super) const ICFGR0: u64 = 0xc00;
/// How PPIs are triggered, bits 2n and 2n + 1 = INTID 16 + n.
pub const ICFGR1: u64 = 0xc04;
/// Behind these four begin the bits of other kinds: security and non-maskable interrupts.
const CONFIGURATION_END: u64 = 0xd00;

/// Control frame: state of the frame.
pub const CTLR: u64 = 0x000;
pub(super) const IIDR: u64 = 0x004;
pub(super) const TYPER: u64 = 0x008;
pub(super) const TYPER_HIGH: u64 = 0x00c;
pub(super) const WAKER: u64 = 0x014;
/// The registers that identify a frame, the last of each.
const IDENTIFICATION: Range<u64> = 0xffd0..0x1_0000;

/// GICR_CTLR: a write is on its way (to other CPUs, to the distributor).
const CTLR_PENDING: u64 = 1 << 31 | CTLR_RWP;
/// GICR_CTLR.RWP: one to the distributor.
pub const CTLR_RWP: u64 = 1 << 3;
/// GICR_CTLR.EnableLPIs.
pub const CTLR_ENABLE_LPIS: u64 = 1;
/// GICR_TYPER without LPIs in any form. `VLPIS` stays: it says how far it is to the next redistributor.
const TYPER_OFFERED: u64 = TYPER_AFFINITY | 0x1f << 27 | 0xffff << 8 | TYPER_LAST | TYPER_VLPIS;
const TYPER_AFFINITY: u64 = 0xffff_ffff << 32;
pub(super) const TYPER_LAST: u64 = 1 << 4;
const TYPER_VLPIS: u64 = 1 << 1;
pub(super) const WAKER_PROCESSOR_SLEEP: u64 = 1 << 1;
pub(super) const WAKER_CHILDREN_ASLEEP: u64 = 1 << 2;

pub use crate::regs::GIC_FRAME as FRAME;

/// Whether the registers of an interrupt controller's frame have an access of `bytes` bytes at `offset`.
///
/// All have words; priorities can be accessed by the byte as well. What an access of another width or
/// alignment does is not defined, so it does nothing: then no byte of a register is reached but through
/// the filter that knows the register.
pub(super) fn is_defined(offset: u64, bytes: u8) -> bool {
    match bytes {
        4 => offset.is_multiple_of(4),
        1 => (IPRIORITYR0..IPRIORITYR0 + 0x400).contains(&offset),
        _ => false,
    }
}

/// Where one CPU's redistributor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redistributor {
    /// All its frames: control and SGI, and with virtual LPIs two more.
    pub frames: Range<u64>,
    /// The CPU's affinity, as MPIDR_EL1 has it.
    pub affinity: u64,
}

/// The redistributors in `regions`, found by what they say of themselves. `stride` is the distance
/// between two when the device tree states it; `typer` reads the GICR_TYPER at an address.
pub fn find(
    regions: &[Range<u64>],
    stride: Option<u64>,
    typer: impl Fn(u64) -> u64,
) -> Vec<Redistributor> {
    let mut found = Vec::new();
    for region in regions {
        let fits = |at: &u64| {
            at.checked_add(2 * FRAME)
                .is_some_and(|end| end <= region.end)
        };
        let mut next = Some(region.start);
        while let Some(at) = next.filter(fits) {
            let kind = typer(at + TYPER);
            let frames = if kind & TYPER_VLPIS != 0 { 4 } else { 2 } * FRAME;
            let affinity = kind >> 32;
            found.push(Redistributor {
                frames: at..at.saturating_add(frames).min(region.end),
                affinity: (affinity & 0xff00_0000) << 8 | affinity & 0x00ff_ffff,
            });
            if kind & TYPER_LAST != 0 {
                break;
            }
            // A stride may be any number.
            next = at.checked_add(stride.unwrap_or(frames).max(frames));
        }
    }
    found
}

impl Redistributor {
    /// Address of the SGI frame.
    pub fn sgi_frame(&self) -> u64 {
        self.frames.start + FRAME
    }
}

/// The guest's view of one CPU's redistributor.
#[derive(Debug, Default)]
pub struct View {
    /// The monitor's INTIDs, bit n = INTID n.
    pub owned: u32,
    /// The guest's enable bits of those.
    enabled: AtomicU32,
    /// The guest's priorities of those, by INTID.
    priorities: [AtomicU8; 32],
    /// GICR_WAKER.ProcessorSleep.
    asleep: AtomicBool,
}

impl View {
    /// A redistributor in which the INTIDs of `owned` (bit n = INTID n, below 32) are the monitor's.
    pub fn new(owned: u32) -> Self {
        Self {
            owned,
            ..Self::default()
        }
    }

    /// Whether `intid` is the monitor's.
    pub const fn owns(&self, intid: u32) -> bool {
        intid < 32 && self.owned >> intid & 1 != 0
    }

    /// Whether the guest has enabled the owned interrupt `intid`.
    pub fn enabled(&self, intid: u32) -> bool {
        self.enabled.load(Relaxed) >> (intid & 31) & 1 != 0
    }

    /// The priority that the guest has given the owned interrupt `intid`.
    pub fn priority(&self, intid: u32) -> u8 {
        self.priorities[intid as usize % 32].load(Relaxed)
    }

    /// What the guest reads from `bytes` bytes at `offset` of its frames; `machine` reads the same there.
    pub fn read(&self, offset: u64, bytes: u8, machine: impl FnOnce() -> u64) -> u64 {
        match (offset / FRAME, offset % FRAME) {
            (0, TYPER) if bytes == 8 => machine() & TYPER_OFFERED,
            (0, register) if is_defined(register, bytes) => self.read_control(register, machine),
            (1, register) if is_defined(register, bytes) => self.read_sgi(register, bytes, machine),
            // Virtual LPIs.
            _ => 0,
        }
    }

    /// What the machine gets for the guest's write of `value`; `None`: nothing. `machine` reads what is
    /// at the same place.
    pub fn write(
        &self,
        offset: u64,
        bytes: u8,
        value: u64,
        machine: impl FnOnce() -> u64,
    ) -> Option<u64> {
        match (offset / FRAME, offset % FRAME) {
            (0, WAKER) if bytes == 4 => {
                // The redistributor stays awake: the monitor needs its interrupts.
                self.asleep
                    .store(value & WAKER_PROCESSOR_SLEEP != 0, Relaxed);
                None
            }
            (1, register) if is_defined(register, bytes) => {
                self.write_sgi(register, bytes, value, machine)
            }
            _ => None,
        }
    }

    fn read_control(&self, register: u64, machine: impl FnOnce() -> u64) -> u64 {
        match register {
            CTLR => machine() & CTLR_PENDING,
            TYPER => machine() & TYPER_OFFERED & 0xffff_ffff,
            IIDR | TYPER_HIGH => machine(),
            WAKER if self.asleep.load(Relaxed) => WAKER_PROCESSOR_SLEEP | WAKER_CHILDREN_ASLEEP,
            _ if IDENTIFICATION.contains(&register) => machine(),
            _ => 0,
        }
    }

    fn read_sgi(&self, register: u64, bytes: u8, machine: impl FnOnce() -> u64) -> u64 {
        let owned = u64::from(self.owned);
        match register {
            ISENABLER0 | ICENABLER0 => {
                machine() & !owned | u64::from(self.enabled.load(Relaxed)) & owned
            }
            ISPENDR0 | ICPENDR0 | ISACTIVER0 | ICACTIVER0 => machine() & !owned,
            _ if register < CONFIGURATION_END => (self.owned_priorities(register, bytes)).fold(
                machine(),
                |value, (shift, priority)| {
                    value & !(0xff << shift) | u64::from(priority.load(Relaxed)) << shift
                },
            ),
            _ if IDENTIFICATION.contains(&register) => machine(),
            _ => 0,
        }
    }

    fn write_sgi(
        &self,
        register: u64,
        bytes: u8,
        value: u64,
        machine: impl FnOnce() -> u64,
    ) -> Option<u64> {
        let owned = u64::from(self.owned);
        match register {
            ISENABLER0 => {
                self.enabled.fetch_or(value as u32 & self.owned, Relaxed);
            }
            ICENABLER0 => {
                self.enabled
                    .fetch_and(!(value as u32 & self.owned), Relaxed);
            }
            // The monitor takes its interrupts in group 1.
            IGROUPR0 => return Some(value | owned),
            ISPENDR0 | ICPENDR0 | ISACTIVER0 | ICACTIVER0 => {}
            ICFGR0 | ICFGR1 => {
                let bits = (self.owned >> ((register - ICFGR0) * 4)) as u16;
                let mask = u64::from(two_bits_each(bits));
                return Some(value & !mask | machine() & mask);
            }
            _ if register < CONFIGURATION_END => {
                let mut mask = 0;
                for (shift, priority) in self.owned_priorities(register, bytes) {
                    priority.store((value >> shift) as u8, Relaxed);
                    mask |= 0xff << shift;
                }
                let kept = if mask == 0 { 0 } else { machine() & mask };
                return Some(value & !mask | kept);
            }
            _ => return None,
        }
        Some(value & !owned)
    }

    /// The guest's priorities of the monitor's interrupts among the `bytes` bytes at `register`, each with its first bit there.
    fn owned_priorities(
        &self,
        register: u64,
        bytes: u8,
    ) -> impl Iterator<Item = (usize, &AtomicU8)> {
        let first = register.wrapping_sub(IPRIORITYR0) as usize;
        let all = self.priorities.iter().enumerate().skip(first);
        all.take(bytes.into())
            .filter(|(n, _)| self.owned >> n & 1 != 0)
            .map(move |(n, priority)| (8 * (n - first), priority))
    }
}

/// Each bit of `bits` twice.
pub fn two_bits_each(bits: u16) -> u32 {
    (0..16)
        .filter(|n| bits >> n & 1 != 0)
        .fold(0, |mask, n| mask | 3 << (2 * n))
}

#[cfg(test)]
mod tests;
