//! The lazy TSC deadline, where the VMM offers it. It keeps time with the vCPU's TSC, whatever
//! value the guest has given the TSC. docs/how/lazy-deadline.md has the registers and the slot.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::Test;
use crate::apic;
use crate::instructions::{cpuid, interruptible, rdmsr, tsc, wrmsr};
use crate::percpu;
use crate::pmu::wait;
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("deadline.as_it_is", |_| on_a_tsc(None)),
    ("deadline.young_tsc", |_| on_a_tsc(Some(0))),
    ("deadline.old_tsc", |_| on_a_tsc(Some(1 << 62))),
    ("deadline.half_way", |_| {
        on_a_tsc(Some((1 << 63) - 5 * AHEAD / 2))
    }),
    ("deadline.about_to_wrap", |_| wrapping()),
];

const IA32_TSC: u32 = 0x10;
const SLOT: u32 = 0x4b56_4d56;
const DEADLINE: u32 = 0x4b56_4d57;
const TAG: u64 = 0x7670_6d75_5453_4301;
const VECTOR: u8 = 0xec;
const TSC_DEADLINE: u32 = 0b10 << 17;
/// Ticks from now to a deadline: some milliseconds.
const AHEAD: u64 = 10_000_000;

/// Ticks before the wrap at which a test begins.
const LEAD: u64 = 1 << 28;
/// The most by which a TSC is read later than it was set: enough for a busy host.
const LATE: u64 = 1 << 30;

/// A CPU's slot: the tests use it one CPU after another.
#[repr(C, align(64))]
struct Slot {
    armed: AtomicU64,
    pending: AtomicU64,
    tag: AtomicU64,
    reserved: [AtomicU64; 5],
}

static SHARED: Slot = Slot {
    armed: AtomicU64::new(0),
    pending: AtomicU64::new(0),
    tag: AtomicU64::new(0),
    reserved: [const { AtomicU64::new(0) }; 5],
};

/// Runs `test` with a shared slot, on a TSC that begins at `begin`. Memory is mapped one to one.
fn with_slot(begin: Option<u64>, test: impl FnOnce() -> Result<(), Failure>) -> Verdict {
    let [_, b, c, d] = cpuid(0x4000_0100, 0);
    let offered = [b, c, d].map(u32::to_le_bytes).as_flattened() == b"vpmuvpmuvpmu"
        && cpuid(0x4000_0101, 0)[0] & 1 != 0;
    if !offered {
        return Ok(Pass::Skip("the VMM does not offer a lazy deadline"));
    }
    let (before, at) = (tsc(), begin.unwrap_or_else(tsc));
    if begin.is_some() {
        wrmsr(IA32_TSC, at)?;
        if tsc().wrapping_sub(at) > LATE {
            return Ok(Pass::Skip("this KVM gives guests the host's own TSC"));
        }
    }
    apic::set_lvt_timer(TSC_DEADLINE | u32::from(VECTOR));
    SHARED.armed.store(0, SeqCst);
    SHARED.pending.store(0, SeqCst);
    SHARED.tag.store(TAG, SeqCst);
    wrmsr(SLOT, (&raw const SHARED).addr() as u64 | 1)?;
    let done = test();
    set(0)?;
    wrmsr(SLOT, 0)?;
    SHARED.tag.store(0, SeqCst);
    apic::set_lvt_timer(apic::LVT_MASKED);
    if begin.is_some() {
        let passed = tsc().wrapping_sub(at);
        wrmsr(IA32_TSC, before.wrapping_add(passed))?;
    }
    done.map(|()| Pass::Ok)
}

/// Does the guest's half, without the look at `armed`.
fn set(deadline: u64) -> Result<(), Failure> {
    SHARED.pending.store(deadline, SeqCst);
    Ok(wrmsr(DEADLINE, deadline)?)
}

fn wait_for(interrupts: u64) -> Result<(), Failure> {
    let mut came = Ok(());
    interruptible(|| came = wait(|| Ok(percpu::this().taken(VECTOR) >= interrupts)));
    came
}

fn on_a_tsc(begin: Option<u64>) -> Verdict {
    with_slot(begin, || {
        let first = tsc() + AHEAD;
        set(first)?;
        check("read", rdmsr(DEADLINE)?, first)?;
        wait_for(1)?;
        check_range("TSC at the interrupt", tsc(), first, u64::MAX)?;
        check("afterwards", rdmsr(DEADLINE)?, 0)?;
        // The deadline moves later without an exit. One interrupt comes, at the later deadline.
        let armed = tsc() + AHEAD;
        let later = armed + AHEAD;
        set(armed)?;
        SHARED.pending.store(later, SeqCst);
        wait_for(2)?;
        check_range("TSC at the later", tsc(), later, u64::MAX)?;
        // A deadline in the past fires at once.
        set(tsc() - 1)?;
        wait_for(3)?;
        // A write of 0 withdraws a deadline. The deadline is so far ahead that no busy host reaches it first.
        set(tsc() + 1000 * AHEAD)?;
        set(0)?;
        check("taken back", rdmsr(DEADLINE)?, 0)?;
        check("interrupts", percpu::this().taken(VECTOR), 3)
    })
}

/// Checks that no deadline is lost when the TSC goes from 2^64 - 1 to 0 while deadlines just before that are handled.
fn wrapping() -> Verdict {
    for before in [0, 1, 1000] {
        percpu::this().reset();
        let verdict = with_slot(Some(u64::MAX - LEAD), || {
            let deadline = u64::MAX - before;
            set(deadline)?;
            wait_for(1)?;
            // The interrupt does not come early: the TSC has wrapped, or is past the deadline.
            let now = tsc();
            let late = now.wrapping_sub(deadline);
            check_range("ticks late", late, 0, u64::MAX / 2)?;
            check("pending", SHARED.pending.load(Relaxed), 0)?;
            // The next deadline is after the wrap.
            let next = tsc().wrapping_add(AHEAD);
            set(next)?;
            wait_for(2)?;
            check_range("TSC after all", tsc(), next, u64::MAX / 2)
        });
        match verdict? {
            Pass::Ok => {}
            other => return Ok(other),
        }
    }
    Ok(Pass::Ok)
}
