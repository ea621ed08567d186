//! PEBS: records in this program's memory, and the PMI at the buffer's threshold. SDM vol. 3B, 20.9; 18.4.9 for the DS
//! save area. Skipped where IA32_PERF_CAPABILITIES does not offer the baseline.

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Context, Test};
use crate::apic::{self, LVT_NMI};
use crate::fault::Fault;
use crate::instructions::{cpuid, rdmsr, tsc};
use crate::msr::*;
use crate::percpu::{self, PmiAction};
use crate::pmu::{COUNT, Counter, SOME, USR, pass, read, wait, write};
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("pebs.offered", |cx| with_pebs(cx, offered)),
    ("pebs.groups", |cx| with_pebs(cx, groups)),
    ("pebs.basic_only", |cx| with_pebs(cx, basic_only)),
    ("pebs.every_counter", |cx| with_pebs(cx, every_counter)),
    ("pebs.reload", |cx| with_pebs(cx, reload)),
    ("pebs.threshold", |cx| with_pebs(cx, threshold)),
    ("pebs.full", |cx| with_pebs(cx, full)),
    ("pebs.other_ring", |cx| with_pebs(cx, other_ring)),
    ("pebs.hostile_area", |cx| with_pebs(cx, hostile_area)),
    ("pebs.addresses", |cx| with_pebs(cx, addresses)),
];

const MISC_ENABLE: u32 = 0x1a0;
/// BTS and PEBS are not available.
const UNAVAILABLE: [u64; 2] = [1 << 11, 1 << 12];
const OVF_BUF: u64 = 1 << 62;

/// Words of the DS save area.
const BASE: usize = 4;
const INDEX: usize = 5;
const MAXIMUM: usize = 6;
const THRESHOLD: usize = 7;
const RESET: usize = 8;
const FIXED_RESET: usize = 16;

static AREA: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];
static BUFFER: [AtomicU64; 512] = [const { AtomicU64::new(0) }; 512];

/// Number of events to an overflow in the tests that wait: enough for a host to notice each overflow.
const PERIOD: u64 = 10 * SOME;

fn with_pebs(cx: &Context, test: fn(&Context) -> Verdict) -> Verdict {
    if !cx.pmu.0.has_pebs() {
        return Ok(Pass::Skip("no PEBS"));
    }
    // The program's addresses are both linear and physical.
    let (area, buffer) = (address(&AREA[0]), address(&BUFFER[0]));
    for word in AREA.iter().chain(&BUFFER) {
        word.store(0, Relaxed);
    }
    for (word, value) in [
        (BASE, buffer),
        (INDEX, buffer),
        (MAXIMUM, buffer + 8 * BUFFER.len() as u64),
        (THRESHOLD, u64::MAX),
    ] {
        AREA[word].store(value, Relaxed);
    }
    write(DS_AREA, area)?;
    let verdict = test(cx);
    cx.pmu.reset()?;
    verdict
}

fn address(word: &AtomicU64) -> u64 {
    ptr::from_ref(word).addr() as u64
}

/// Returns the number of bytes of records.
fn written() -> u64 {
    AREA[INDEX].load(Relaxed) - address(&BUFFER[0])
}

fn word(n: usize) -> u64 {
    BUFFER[n].load(Relaxed)
}

/// Returns the place of the counter's reset value.
fn reset_word(counter: Counter) -> usize {
    match counter {
        Counter::General(n) => RESET + n as usize,
        Counter::Fixed(n) => FIXED_RESET + n as usize,
    }
}

/// Makes `counter` write a record every `period` events, with these bits of its event select.
fn start(cx: &Context, counter: Counter, bits: u64, period: u64) -> Result<(), Failure> {
    let value = period.wrapping_neg() & cx.pmu.mask(counter);
    AREA[reset_word(counter)].store(value, Relaxed);
    cx.pmu.set(counter, value)?;
    cx.pmu.configure(counter, bits & !ADAPTIVE)?;
    if bits & ADAPTIVE != 0 {
        let (address, adaptive) = match counter {
            Counter::General(n) => (PERFEVTSEL + n, ADAPTIVE),
            Counter::Fixed(n) => (FIXED_CTR_CTRL, 1 << (32 + 4 * n)),
        };
        write(address, read(address)? | adaptive)?;
    }
    write(PEBS_ENABLE, counter.bit())?;
    cx.pmu.enable(counter.bit())?;
    Ok(())
}

fn wait_for_bytes(bytes: u64) -> Result<(), Failure> {
    wait(|| Ok(written() >= bytes))
}

/// Checks that CPUID and the MSRs agree about PEBS.
fn offered(cx: &Context) -> Verdict {
    let [_, _, ecx, edx] = cpuid(1, 0);
    check("DTES64", (ecx >> 2 & 1).into(), 1)?;
    check("DS", (edx >> 21 & 1).into(), 1)?;
    let misc = read(MISC_ENABLE)?;
    let [bts, pebs] = UNAVAILABLE.map(|bit| u64::from(misc & bit != 0));
    check("BTS_UNAVAILABLE", bts, 1)?;
    check("PEBS_UNAVAILABLE", pebs, 0)?;
    // The fields are PEBS_TRAP, PEBS_ARCH_REG and format 4.
    let format = cx.pmu.0.perf_capabilities & 0xfc0;
    check("the format", format, 0x4c0)?;
    Ok(Pass::Ok)
}

/// Checks that each group has its place and its size.
fn groups(cx: &Context) -> Verdict {
    for groups in 0..16_u64 {
        // One last branch, of a stack that records nothing.
        let sizes = [32, 144, 256, 24];
        let chosen = (0..4).filter(|n| groups >> n & 1 != 0);
        let size = 32 + chosen.map(|n| sizes[n]).sum::<u64>();
        AREA[INDEX].store(address(&BUFFER[0]), Relaxed);
        write(PEBS_DATA_CFG, groups)?;
        let before = tsc();
        start(cx, Counter::General(0), COUNT | ADAPTIVE, PERIOD)?;
        wait_for_bytes(size)?;
        cx.pmu.enable(0)?;
        check("format and size", word(0), size << 48 | groups)?;
        check("counters", word(2), 1)?;
        check_range("TSC", word(3), before, tsc())?;
        let ip = word(1);
        // The program is in the lower half.
        check_range("IP", ip, 1, u64::MAX >> 1)?;
        if groups & 2 != 0 {
            let general = if groups & 1 != 0 { 8 } else { 4 };
            // RFLAGS has a bit that is always set.
            check("RFLAGS[1]", word(general) >> 1 & 1, 1)?;
            check("RIP", word(general + 1), ip)?;
            let stack = address(&AtomicU64::new(0));
            let rsp = word(general + 6);
            check_range("RSP", rsp, stack - 0x4000, stack + 0x4000)?;
        }
        if groups & 1 != 0 {
            check("memory access", word(4), 0)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that a counter that is not adaptive has the basic group.
fn basic_only(cx: &Context) -> Verdict {
    write(PEBS_DATA_CFG, 7)?;
    start(cx, Counter::General(0), COUNT, PERIOD)?;
    wait_for_bytes(1)?;
    cx.pmu.enable(0)?;
    check("format and size", word(0), 32 << 48)?;
    Ok(Pass::Ok)
}

/// Checks that each counter that counts writes its records, and names itself in them.
fn every_counter(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.reset()?;
        write(DS_AREA, address(&AREA[0]))?;
        AREA[INDEX].store(address(&BUFFER[0]), Relaxed);
        start(cx, counter, COUNT | ADAPTIVE, PERIOD)?;
        wait_for_bytes(32)?;
        cx.pmu.enable(0)?;
        check(counter, word(2), counter.bit())?;
        check("status", read(GLOBAL_STATUS)?, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that the counter goes on from its reset value, and writes the next record.
fn reload(cx: &Context) -> Verdict {
    let counter = Counter::General(0);
    start(cx, counter, COUNT, PERIOD)?;
    wait_for_bytes(3 * 32)?;
    cx.pmu.enable(0)?;
    let value = counter.value()?;
    let mask = cx.pmu.mask(counter);
    check_range("value", value, mask - PERIOD + 1, mask)?;
    for n in 0..3 {
        check(format_args!("record {n}"), word(4 * n), 32 << 48)?;
    }
    check_range("TSC", word(7), word(3), word(11))?;
    Ok(Pass::Ok)
}

/// Checks that one PMI comes when the buffer is full enough, with the buffer's status bit, and none before.
fn threshold(cx: &Context) -> Verdict {
    let cpu = percpu::this();
    AREA[THRESHOLD].store(address(&BUFFER[0]) + 4 * 32, Relaxed);
    // The handler acknowledges nothing, so that this test sees the bit.
    cpu.set_pmi_action(PmiAction::Leave);
    apic::set_lvtpc(LVT_NMI);
    start(cx, Counter::General(0), COUNT, PERIOD)?;
    wait(|| Ok(cpu.pmis.load(Relaxed) >= 1))?;
    cx.pmu.enable(0)?;
    let found = cpu.pmi_status.load(Relaxed);
    check("status in the PMI", found, OVF_BUF)?;
    check_range("bytes", written(), 4 * 32, u64::MAX)?;
    // Each record from the threshold on may have a PMI.
    let most = written() / 32 - 3;
    check_range("PMIs", cpu.pmis.load(Relaxed), 1, most)?;
    write(GLOBAL_OVF_CTRL, OVF_BUF)?;
    check("status after", read(GLOBAL_STATUS)?, 0)?;
    Ok(Pass::Ok)
}

/// Checks that nothing is written behind the buffer's end.
fn full(cx: &Context) -> Verdict {
    AREA[MAXIMUM].store(address(&BUFFER[0]) + 2 * 32, Relaxed);
    start(cx, Counter::General(0), COUNT, SOME)?;
    wait_for_bytes(2 * 32)?;
    pass(20 * SOME);
    cx.pmu.enable(0)?;
    check("bytes", written(), 2 * 32)?;
    check("behind", word(8), 0)?;
    Ok(Pass::Ok)
}

/// Checks that a counter of user space writes no address of this ring, where the host can count so at all.
fn other_ring(cx: &Context) -> Verdict {
    start(cx, Counter::General(0), USR | 1 << 22, SOME)?;
    pass(20 * SOME);
    cx.pmu.enable(0)?;
    check("bytes", written(), 0)?;
    Ok(Pass::Ok)
}

/// Checks areas and buffers that are nowhere, wrap, or overlap: the counter counts, and the machine goes on.
fn hostile_area(cx: &Context) -> Verdict {
    let (area, buffer) = (address(&AREA[0]), address(&BUFFER[0]));
    // The values are area, base, index and maximum.
    for (at, base, index, maximum) in [
        (1 << 46, buffer, buffer, u64::MAX),
        (u64::MAX, buffer, buffer, u64::MAX),
        (u64::MAX - 0x3f, buffer, buffer, u64::MAX),
        (area, 1 << 46, 1 << 46, u64::MAX),
        (area, 1 << 62, 1 << 62, u64::MAX),
        (area, u64::MAX - 31, u64::MAX - 31, u64::MAX),
        (area, buffer, buffer - 8, u64::MAX),
        (area, buffer, buffer, buffer + 31),
        (area, 0, 0, 0),
        // These are an I/O APIC and a local one: memory, but none that records may be written to.
        (area, 0xfec0_0000, 0xfec0_0000, u64::MAX),
        (area, 0xfee0_0000, 0xfee0_0000, u64::MAX),
        (0xfec0_0000, buffer, buffer, u64::MAX),
    ] {
        for (word, value) in [(BASE, base), (INDEX, index), (MAXIMUM, maximum)] {
            AREA[word].store(value, Relaxed);
        }
        write(DS_AREA, at)?;
        start(cx, Counter::General(0), COUNT, SOME)?;
        pass(4 * SOME);
        cx.pmu.enable(0)?;
        write(PEBS_ENABLE, 0)?;
        check(
            format_args!("index {at:#x}"),
            AREA[INDEX].load(Relaxed),
            index,
        )?;
        check(format_args!("buffer {at:#x}"), word(0), 0)?;
    }
    cx.pmu.reset()?;
    cx.pmu.configure(Counter::General(0), COUNT)?;
    cx.pmu.count_some(Counter::General(0))?;
    Ok(Pass::Ok)
}

/// Checks that IA32_DS_AREA takes canonical addresses.
fn addresses(_: &Context) -> Verdict {
    for (value, taken) in [
        (0xffff_8000_0000_0000, true),
        (u64::MAX, true),
        (1 << 62, false),
        (1 << 63, false),
    ] {
        let written = crate::instructions::wrmsr(DS_AREA, value);
        let want = if taken { Ok(()) } else { Err(Fault::GP) };
        check(format_args!("{value:#x}"), (written == want).into(), 1)?;
        if taken {
            check("DS_AREA", rdmsr(DS_AREA)?, value)?;
        }
    }
    Ok(Pass::Ok)
}
