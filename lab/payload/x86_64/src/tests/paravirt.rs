//! The paravirtual PMU, where the VMM offers it in place of an architectural one:
//! docs/how/paravirtual-pmu.md has the registers and the page.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use crate::instructions::{cpuid, interruptible, spin, wrmsr};
use crate::percpu::{self, PmiAction};
use crate::random::Random;
use crate::vectors::NMI;
use vpmu_payload_harness::{Failure, Pass, Verdict, check};

/// A test's name and function. It needs no context: there is no other PMU.
type Test = (&'static str, fn() -> Verdict);

pub(super) const TESTS: &[Test] = &[
    ("paravirt.sharing", sharing),
    ("paravirt.counts", counts),
    ("paravirt.overflow", overflow),
    ("paravirt.doorbells", doorbells),
    ("paravirt.dead_driver", dead_driver),
    ("paravirt.hostile", hostile),
];

const PAGE_MSR: u32 = 0x4b56_4d58;
const DOORBELL: u32 = 0x4b56_4d59;
const APPLY: u64 = 1;
const READ: u64 = 2;
const FREEZE: u64 = 4;
const TAG: u64 = 0x7670_6d75_504d_5501;
/// Words of the page.
const ACK: usize = 1;
const WANTED: usize = 2;
const SEQ: usize = 8;
/// Words of counter 0.
const CONFIG: usize = 32;
const FLAGS: usize = 33;
const LEFT: usize = 34;
const PERIOD: usize = 35;
const GENERATION: usize = 36;
const COUNT: usize = 40;
const OVERFLOWS: usize = 41;

const CYCLES: u64 = 0x3c;
const BOTH_RINGS: u64 = 0b11;
const INTERRUPT: u64 = 0b100;
/// More events than any host's shortest period has.
const EVENTS: u64 = 1_000_000;
/// Number of looks before a test gives up, each some microseconds apart.
const PATIENCE: u64 = 100_000;

#[repr(C, align(4096))]
struct Page([AtomicU64; 512]);

static PAGE: Page = Page([const { AtomicU64::new(0) }; 512]);
static ACKNOWLEDGES: AtomicBool = AtomicBool::new(true);

/// Returns whether the VMM offers the device.
pub(crate) fn is_offered() -> bool {
    let [_, b, c, d] = cpuid(0x4000_0100, 0);
    [b, c, d].map(u32::to_le_bytes).as_flattened() == b"vpmuvpmuvpmu"
        && cpuid(0x4000_0101, 0)[0] & 2 != 0
}

/// Handles the NMI with [`PmiAction::Page`].
pub(crate) fn acknowledge() {
    if ACKNOWLEDGES.load(SeqCst) {
        put(ACK, word(SEQ));
    }
}

fn word(n: usize) -> u64 {
    PAGE.0[n].load(SeqCst)
}

fn put(n: usize, value: u64) {
    PAGE.0[n].store(value, SeqCst);
}

fn address() -> u64 {
    // Memory is mapped one to one.
    (&raw const PAGE).addr() as u64
}

fn refused(what: &str, register: u32, value: u64) -> Result<(), Failure> {
    let faults = u64::from(wrmsr(register, value).is_err());
    check(format_args!("{what} is #GP"), faults, 1)
}

fn share() -> Result<(), Failure> {
    (0..512).for_each(|n| put(n, 0));
    put(0, TAG);
    Ok(wrmsr(PAGE_MSR, address() | 1)?)
}

/// Shares an empty page, and withdraws it afterwards.
fn with_page(test: impl FnOnce() -> Result<(), Failure>) -> Verdict {
    percpu::this().reset();
    percpu::this().set_pmi_action(PmiAction::Page);
    ACKNOWLEDGES.store(true, SeqCst);
    share()?;
    let done = test();
    wrmsr(PAGE_MSR, 0)?;
    done.map(|()| Pass::Ok)
}

/// Makes counter 0 count cycles.
fn count(flags: u64) -> Result<(), Failure> {
    let wishes = [CYCLES, BOTH_RINGS | flags, EVENTS, EVENTS];
    let words = [CONFIG, FLAGS, LEFT, PERIOD];
    for (n, wish) in words.into_iter().zip(wishes) {
        put(n, wish);
    }
    put(GENERATION, word(GENERATION) + 1);
    put(WANTED, 1);
    Ok(wrmsr(DOORBELL, APPLY)?)
}

fn sharing() -> Verdict {
    put(0, 0);
    refused("memory without a tag", PAGE_MSR, address() | 1)?;
    refused("a page that is not aligned", PAGE_MSR, (address() + 8) | 1)?;
    refused("what is no memory", PAGE_MSR, 1 << 51 | 1)?;
    refused("a doorbell without a page", DOORBELL, APPLY)?;
    with_page(|| {
        refused("an unknown command", DOORBELL, 1 << 7)?;
        put(0, 0);
        refused("another page without a tag", PAGE_MSR, address() | 1)?;
        Ok(wrmsr(DOORBELL, READ)?)
    })
}

fn counts() -> Verdict {
    with_page(|| {
        count(0)?;
        spin(10_000);
        check("counted before it is asked for", word(COUNT), 0)?;
        wrmsr(DOORBELL, READ)?;
        let first = word(COUNT);
        check("something was counted", u64::from(first > 0), 1)?;
        spin(10_000);
        wrmsr(DOORBELL, FREEZE)?;
        let frozen = word(COUNT);
        check("it counted on", u64::from(frozen > first), 1)?;
        spin(10_000);
        wrmsr(DOORBELL, READ)?;
        check("counted while it was frozen", word(COUNT), frozen)?;
        wrmsr(DOORBELL, APPLY)?;
        spin(10_000);
        wrmsr(DOORBELL, READ)?;
        check("it went on", u64::from(word(COUNT) > frozen), 1)
    })
}

/// Spins until `done`, or gives up after a long time.
fn until(done: impl Fn() -> bool) {
    interruptible(|| {
        for _ in 0..PATIENCE {
            if done() {
                break;
            }
            spin(100);
        }
    });
}

fn overflow() -> Verdict {
    with_page(|| {
        count(INTERRUPT)?;
        until(|| percpu::this().taken(NMI) >= 5);
        wrmsr(DOORBELL, FREEZE)?;
        let nmis = percpu::this().taken(NMI);
        check("NMIs came", u64::from(nmis >= 5), 1)?;
        check("each is the device's", word(SEQ), nmis)?;
        check("all are acknowledged", word(ACK), word(SEQ))?;
        let (overflows, counted) = (word(OVERFLOWS), word(COUNT));
        check(
            "an NMI for each overflow at most",
            u64::from(nmis <= overflows),
            1,
        )?;
        check("overflows are periods", overflows, counted / EVENTS)
    })
}

/// Checks all commands in turn, in a loop: each is done, and none takes from a count or interrupts.
fn doorbells() -> Verdict {
    with_page(|| {
        count(0)?;
        let mut last = 0;
        for round in 0..8_000 {
            wrmsr(DOORBELL, round % 16)?;
            let now = word(COUNT);
            check("the count went back", u64::from(now < last), 0)?;
            last = now;
        }
        check("something was counted", u64::from(last > 0), 1)?;
        check("NMIs", percpu::this().taken(NMI), 0)
    })
}

/// Checks that a driver that does not acknowledge gets one NMI. Its successor, of a crash kernel, begins with a page of
/// its own.
fn dead_driver() -> Verdict {
    with_page(|| {
        ACKNOWLEDGES.store(false, SeqCst);
        count(INTERRUPT)?;
        until(|| word(OVERFLOWS) >= 5);
        check("it overflows on", u64::from(word(OVERFLOWS) >= 5), 1)?;
        check("NMIs", percpu::this().taken(NMI), 1)?;
        ACKNOWLEDGES.store(true, SeqCst);
        share()?;
        interruptible(|| spin(1_000_000));
        check("counted for the dead driver", word(COUNT), 0)?;
        check("more NMIs", percpu::this().taken(NMI), 1)?;
        count(INTERRUPT)?;
        until(|| word(OVERFLOWS) >= 5);
        let nmis = u64::from(percpu::this().taken(NMI) > 3);
        check("NMIs for the new driver", nmis, 1)
    })
}

/// Checks arbitrary writes with counters at work. Afterwards the memory is the guest's again.
fn hostile() -> Verdict {
    let mut random = Random::new(14);
    with_page(|| {
        for round in 0..2_000 {
            if round % 50 == 0 {
                count(INTERRUPT)?;
            }
            put(random.below(512), random.any() >> random.below(64));
            if random.below(4) == 0 {
                wrmsr(DOORBELL, random.any() & 0xf)?;
            }
        }
        wrmsr(PAGE_MSR, 0)?;
        refused("a doorbell after the page", DOORBELL, READ)?;
        (0..512).for_each(|n| put(n, n as u64));
        interruptible(|| spin(1_000_000));
        let changed = (0..512).filter(|&n| word(n) != n as u64).count();
        check(
            "words written after the page was let go of",
            changed as u64,
            0,
        )
    })
}
