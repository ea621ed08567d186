//! AMD's PMU: its description in CPUID, every register, counting, and the interrupt. APM vol. 2, 13.2; the PPRs.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Context, Test};
use crate::amd::*;
use crate::apic::{self, LVT_MASKED, LVT_NMI};
use crate::fault::Fault;
use crate::instructions::{cpuid, interruptible, rdmsr, rdpmc, wrmsr};
use crate::percpu;
use crate::pmu::{COUNT, EN, INT, SOME, pass, read, wait, write};
use crate::random::Random;
use crate::vectors::{NMI, PMI};
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("amd.cpuid", identity),
    ("amd.reset", reset_values),
    ("amd.bits", bits),
    ("amd.aliases", aliases),
    ("amd.rdpmc", rdpmc_indices),
    ("amd.counts", counts),
    ("amd.gate", gate),
    ("amd.host_and_guest_only", host_and_guest_only),
    ("amd.merge", merge),
    ("amd.nmi", |_| by(LVT_NMI, NMI)),
    ("amd.vector", |_| by(PMI.into(), PMI)),
    ("amd.without_int", without_int),
    ("amd.lvtpc_masked", lvtpc_masked),
    ("amd.lvtpc_stays_open", lvtpc_stays_open),
    ("amd.stopped_after_overflow", stopped),
    ("amd.one_for_each_overflow", one_each),
    ("amd.status", status),
    ("amd.storm", storm),
    ("amd.hostile", hostile),
    // This test is last: the next CPU must find its own registers as after reset.
    ("amd.leave_all_bits", leave_all_bits),
];

/// Core cycles.
pub(super) const CYCLES: u64 = 0x76;
/// Overflows of a storm.
const STORM: u64 = 50;
/// Cycles, enough for an interrupt that comes though it should not.
const A_WHILE: u64 = 200_000;
/// As many as the rows of [`rows`].
const ROWS: usize = 24;
/// The value of each MSR before the first write; `NOT_READ`: #GP.
static RESET: [AtomicU64; ROWS] = [const { AtomicU64::new(0) }; ROWS];
const NOT_READ: u64 = !0;

/// Returns whether the processor is AMD's.
pub(super) fn is_here() -> bool {
    let [_, ebx, ecx, edx] = cpuid(0, 0);
    (ebx, edx, ecx) == (0x6874_7541, 0x6974_6e65, 0x444d_4163)
}

fn capability() -> Capability {
    const V2: u32 = 0x8000_0022;
    let [last, ..] = cpuid(0x8000_0000, 0);
    let [eax, ebx, ..] = if last >= V2 { cpuid(V2, 0) } else { [0; 4] };
    let [_, _, features, _] = cpuid(0x8000_0001, 0);
    Capability::new(features, [eax, ebx])
}

fn counters() -> core::ops::Range<u32> {
    0..capability().counters
}

pub(super) fn ctl(n: u32) -> u32 {
    if capability().core {
        PERF_CTL + 2 * n
    } else {
        LEGACY + n
    }
}

pub(super) fn ctr(n: u32) -> u32 {
    if capability().core {
        PERF_CTR + 2 * n
    } else {
        LEGACY + 4 + n
    }
}

/// Reads every MSR before the first write.
pub(super) fn note_reset() {
    for (row, noted) in rows(capability()).zip(&RESET) {
        let address = row.map_or_else(|address| address, |row| row.address);
        noted.store(rdmsr(address).unwrap_or(NOT_READ), Relaxed);
    }
}

/// Sets the PMU to a known state: all off, all zero.
pub(super) fn reset() -> Result<(), Fault> {
    apic::set_lvtpc(LVT_MASKED);
    for n in counters() {
        wrmsr(ctl(n), 0)?;
        wrmsr(ctr(n), 0)?;
    }
    if capability().v2 {
        wrmsr(GLOBAL_CTL, !0)?;
        wrmsr(GLOBAL_STATUS_CLR, !0)?;
    }
    Ok(())
}

fn identity(cx: &Context) -> Verdict {
    let c = capability();
    check("PerfCtrExtCore", c.core.into(), 1)?;
    // PerfMonV2 leaves those out that others of the host have.
    let want = if c.v2 { c.counters.clamp(1, 6) } else { 6 };
    check("counters", c.counters.into(), want.into())?;
    if cx.boot.native {
        return Ok(Pass::Ok);
    }
    // No virtual machine here has these: SVM, IBS, northbridge and L3 counters; branch sampling.
    let [_, _, ecx, _] = cpuid(0x8000_0001, 0);
    let absent = 1 << 2 | 1 << 10 | 1 << 24 | 1 << 28;
    check("8000_0001H ECX", u64::from(ecx & absent), 0)?;
    let [_, ebx, ..] = cpuid(0x8000_0008, 0);
    check("8000_0008H EBX", u64::from(ebx >> 31), 0)?;
    let [_, _, ecx, _] = cpuid(1, 0);
    check("PDCM", u64::from(ecx >> 15 & 1), 0)?;
    Ok(Pass::Ok)
}

fn reset_values(_: &Context) -> Verdict {
    for (row, noted) in rows(capability()).zip(&RESET) {
        let (address, want) = match row {
            Ok(row) => (row.address, row.reset),
            Err(address) => (address, NOT_READ),
        };
        check(format_args!("MSR {address:#x}"), noted.load(Relaxed), want)?;
    }
    Ok(Pass::Ok)
}

/// Checks each bit by itself, and all: kept or ignored, and never a fault. An MSR that does not exist is #GP(0) both
/// ways.
fn bits(_: &Context) -> Verdict {
    for row in rows(capability()) {
        let Row { address, keeps, .. } = match row {
            Ok(row) => row,
            Err(address) => {
                let both = (rdmsr(address), wrmsr(address, 0));
                if both != (Err(Fault::GP), Err(Fault::GP)) {
                    return Err(Failure(Text::new(format_args!("{address:#x}: {both:x?}"))));
                }
                continue;
            }
        };
        for value in (0..64).map(|bit| 1 << bit).chain([!0, 0]) {
            write(address, value)?;
            let got = read(address)?;
            check(
                format_args!("{address:#x} after {value:#x}"),
                got,
                value & keeps,
            )?;
            // No counter may count while other bits are tried.
            write(address, 0)?;
        }
        if address == GLOBAL_CTL {
            write(address, !0)?;
        }
    }
    Ok(Pass::Ok)
}

fn aliases(_: &Context) -> Verdict {
    for n in 0..4 {
        write(PERF_CTL + 2 * n, 0x0003_0076)?;
        check(
            format_args!("legacy CTL{n}"),
            read(LEGACY + n)?,
            0x0003_0076,
        )?;
        write(LEGACY + 4 + n, 0x1234_5678_9abc)?;
        check(
            format_args!("CTR{n}"),
            read(PERF_CTR + 2 * n)?,
            0x1234_5678_9abc,
        )?;
    }
    Ok(Pass::Ok)
}

fn rdpmc_indices(_: &Context) -> Verdict {
    for n in counters() {
        let value = 0x1234_8765_4300 + u64::from(n);
        write(ctr(n), value)?;
        let (low, high) = rdpmc(n.into())?;
        check(format_args!("RAX of {n}"), low, value & 0xffff_ffff)?;
        check(format_args!("RDX of {n}"), high, value >> 32)?;
    }
    for index in [6, 10, 0x100, 1 << 30, 1 << 31] {
        if rdpmc(index) != Err(Fault::GP) {
            return Err(Failure(Text::new(format_args!(
                "RDPMC of {index:#x}: no #GP"
            ))));
        }
    }
    Ok(Pass::Ok)
}

/// Checks that each counter counts, wraps at 48 bits, and stands still when it is off.
fn counts(_: &Context) -> Verdict {
    for n in counters() {
        write(ctr(n), COUNTER - SOME)?;
        write(ctl(n), COUNT | CYCLES)?;
        wait(|| Ok((SOME..COUNTER / 2).contains(&rdmsr(ctr(n))?)))?;
        write(ctl(n), (COUNT & !EN) | CYCLES)?;
        let stopped = read(ctr(n))?;
        pass(A_WHILE);
        check(format_args!("counter {n} off"), read(ctr(n))?, stopped)?;
    }
    check("interrupts", percpu::this().taken_any(), 0)?;
    Ok(Pass::Ok)
}

fn gate(_: &Context) -> Verdict {
    if !capability().v2 {
        return Ok(Pass::Skip("no PerfMonV2"));
    }
    write(GLOBAL_CTL, 0b10)?;
    for n in 0..2 {
        write(ctl(n), COUNT | CYCLES)?;
    }
    wait(|| Ok(rdmsr(ctr(1))? >= SOME))?;
    check("counter 0", read(ctr(0))?, 0)?;
    write(GLOBAL_CTL, 0)?;
    let stopped = read(ctr(1))?;
    pass(A_WHILE);
    check("counter 1", read(ctr(1))?, stopped)?;
    write(GLOBAL_CTL, !0)?;
    wait(|| Ok(rdmsr(ctr(0))? >= SOME))?;
    Ok(Pass::Ok)
}

/// Checks that without EFER.SVME a counter with either bit counts nothing.
fn host_and_guest_only(_: &Context) -> Verdict {
    for bits in [1 << 40, 1 << 41, 3 << 40] {
        write(ctl(0), COUNT | CYCLES | bits)?;
        pass(A_WHILE);
        check(format_args!("with {bits:#x}"), read(ctr(0))?, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that a pair stands still, and that its even counter counts again without its neighbour.
fn merge(_: &Context) -> Verdict {
    write(ctl(3), 0xf_0000_00ff | EN)?;
    write(ctl(2), COUNT | CYCLES)?;
    pass(A_WHILE);
    check("the even one", read(ctr(2))?, 0)?;
    check("the odd one", read(ctr(3))?, 0)?;
    write(ctl(3), 0)?;
    wait(|| Ok(rdmsr(ctr(2))? >= SOME))?;
    Ok(Pass::Ok)
}

/// Makes counter `n` overflow soon, with these bits.
fn arm(n: u32, bits: u64) -> Result<(), Failure> {
    write(ctr(n), COUNTER + 1 - SOME)?;
    write(ctl(n), CYCLES | bits)
}

fn wait_for(interrupts: u64) -> Result<(), Failure> {
    wait(|| Ok(percpu::this().taken_any() >= interrupts))
}

fn by(lvtpc: u32, vector: u8) -> Verdict {
    let cpu = percpu::this();
    for n in counters() {
        cpu.reset();
        apic::set_lvtpc(lvtpc);
        arm(n, COUNT | INT)?;
        let mut came = Ok(());
        interruptible(|| {
            came = wait_for(1);
            pass(A_WHILE);
        });
        came?;
        write(ctl(n), 0)?;
        check(format_args!("interrupts of {n}"), cpu.taken_any(), 1)?;
        check("vector", cpu.taken(vector), 1)?;
        check_range(format_args!("counter {n}"), read(ctr(n))?, 0, COUNTER / 2)?;
    }
    Ok(Pass::Ok)
}

fn without_int(_: &Context) -> Verdict {
    apic::set_lvtpc(LVT_NMI);
    arm(0, COUNT)?;
    wait(|| Ok((SOME..COUNTER / 2).contains(&rdmsr(ctr(0))?)))?;
    check("interrupts", percpu::this().taken_any(), 0)?;
    Ok(Pass::Ok)
}

/// Checks that an overflow that finds LVTPC masked is lost, and that the next is not.
fn lvtpc_masked(_: &Context) -> Verdict {
    apic::set_lvtpc(LVT_NMI | LVT_MASKED);
    arm(0, COUNT | INT)?;
    wait(|| Ok((SOME..COUNTER / 2).contains(&rdmsr(ctr(0))?)))?;
    apic::set_lvtpc(LVT_NMI);
    pass(A_WHILE);
    check("interrupts", percpu::this().taken_any(), 0)?;
    write(ctr(0), COUNTER + 1 - SOME)?;
    wait_for(1)?;
    Ok(Pass::Ok)
}

/// Checks that the next overflow interrupts, too: AMD's local APIC does not mask LVTPC when it delivers (APM vol. 2,
/// 16.4).
fn lvtpc_stays_open(_: &Context) -> Verdict {
    apic::set_lvtpc(LVT_NMI);
    arm(0, COUNT | INT)?;
    wait_for(1)?;
    check("LVTPC", apic::lvtpc().into(), LVT_NMI.into())?;
    write(ctr(0), COUNTER + 1 - SOME)?;
    wait_for(2)?;
    Ok(Pass::Ok)
}

/// Checks that a counter that has overflowed interrupts even if it is stopped at once: Linux waits for that interrupt.
fn stopped(_: &Context) -> Verdict {
    for round in 1..=20 {
        apic::set_lvtpc(LVT_NMI);
        write(ctr(0), COUNTER)?;
        write(ctl(0), CYCLES | COUNT | INT)?;
        write(ctl(0), CYCLES | (COUNT & !EN) | INT)?;
        if read(ctr(0))? == COUNTER {
            return Ok(Pass::Skip("nothing is counted between two writes"));
        }
        wait_for(round)?;
    }
    pass(A_WHILE);
    check("interrupts", percpu::this().taken_any(), 20)?;
    Ok(Pass::Ok)
}

/// Checks that each overflow is one interrupt when nobody acknowledges anything.
fn one_each(_: &Context) -> Verdict {
    apic::set_lvtpc(LVT_NMI);
    arm(0, COUNT | INT)?;
    for round in 1..=10 {
        wait_for(round)?;
        pass(A_WHILE);
        check("interrupts", percpu::this().taken_any(), round)?;
        write(ctr(0), COUNTER + 1 - SOME)?;
    }
    wait_for(11)?;
    Ok(Pass::Ok)
}

fn status(_: &Context) -> Verdict {
    if !capability().v2 {
        return Ok(Pass::Skip("no PerfMonV2"));
    }
    for n in counters() {
        arm(n, COUNT)?;
        wait(|| Ok(rdmsr(GLOBAL_STATUS)? == 1 << n))?;
        write(ctl(n), 0)?;
        write(ctr(n), 0)?;
        check("after a write", read(GLOBAL_STATUS)?, 1 << n)?;
        write(GLOBAL_STATUS, 0)?;
        check("it is read-only", read(GLOBAL_STATUS)?, 1 << n)?;
        write(GLOBAL_STATUS_CLR, !(1 << n))?;
        check("others cleared", read(GLOBAL_STATUS)?, 1 << n)?;
        write(GLOBAL_STATUS_CLR, 1 << n)?;
        check("cleared", read(GLOBAL_STATUS)?, 0)?;
    }
    write(GLOBAL_STATUS_SET, !0)?;
    let all = capability().all();
    check("all set", read(GLOBAL_STATUS)?, all)?;
    check("interrupts", percpu::this().taken_any(), 0)?;
    Ok(Pass::Ok)
}

/// Overflows at the next event, again and again.
fn storm(_: &Context) -> Verdict {
    apic::set_lvtpc(LVT_NMI);
    for round in 1..=STORM {
        for n in counters() {
            write(ctr(n), COUNTER)?;
            write(ctl(n), CYCLES | COUNT | INT)?;
        }
        wait_for(round)?;
    }
    Ok(Pass::Ok)
}

/// Writes any value to any MSR. No write is a fault, and afterwards the PMU works.
fn hostile(cx: &Context) -> Verdict {
    let mut random = Random::new(1);
    apic::set_lvtpc(LVT_NMI);
    for _ in 0..2_000 {
        let Some(Ok(row)) = rows(capability()).nth(random.below(ROWS)) else {
            continue;
        };
        // Half of the values are near a counter's end.
        let near = COUNTER - (random.any() & 0xfff);
        let value = if random.below(2) == 0 {
            random.any()
        } else {
            near
        };
        write(row.address, value)?;
        let _ = rdmsr(row.address)?;
        let _ = rdpmc(random.any() & 0xf);
    }
    reset()?;
    percpu::this().reset();
    counts(cx)
}

fn leave_all_bits(_: &Context) -> Verdict {
    for row in rows(capability()).flatten() {
        write(row.address, row.keeps)?;
    }
    Ok(Pass::Ok)
}
