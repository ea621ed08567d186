//! Tests of every MSR: its value out of reset, its writable bits, the bits that
//! read back, and the MSRs that a write leaves alone. SDM vol. 4, table 2-2;
//! vol. 3B, 20.2. The reference is the table in [`crate::msr`].

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Context, Test};
use crate::fault::Fault;
use crate::instructions::{rdmsr, wrmsr};
use crate::msr::*;
use crate::pmu::{COUNT, Counter, INT, Pmu, read, write};
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("register.reset", reset),
    ("register.bits.perfevtsel", |cx| bits(cx, PERFEVTSEL, 8)),
    ("register.bits.pmc", |cx| bits(cx, PMC, 8)),
    ("register.bits.a_pmc", |cx| bits(cx, A_PMC, 8)),
    ("register.bits.fixed_ctr", |cx| bits(cx, FIXED_CTR, 7)),
    ("register.bits.fixed_ctr_ctrl", |cx| {
        bits(cx, FIXED_CTR_CTRL, 1)
    }),
    ("register.bits.global_status", |cx| {
        bits(cx, GLOBAL_STATUS, 1)
    }),
    ("register.bits.global_ctrl", |cx| bits(cx, GLOBAL_CTRL, 1)),
    ("register.bits.global_ovf_ctrl", |cx| {
        bits(cx, GLOBAL_OVF_CTRL, 1)
    }),
    ("register.bits.global_status_set", |cx| {
        bits(cx, GLOBAL_STATUS_SET, 1)
    }),
    ("register.bits.global_inuse", |cx| bits(cx, GLOBAL_INUSE, 1)),
    ("register.bits.perf_capabilities", |cx| {
        bits(cx, PERF_CAPABILITIES, 1)
    }),
    ("register.bits.debugctl", |cx| bits(cx, DEBUGCTL, 1)),
    ("register.all_bits", all_bits),
    ("register.independent", independent),
    ("register.in_use", in_use),
    ("register.legacy_write", legacy_write),
    ("register.full_width_write", full_width_write),
];

/// As many as the rows of [`rows`].
const ROWS: usize = (3 * GENERAL_ADDRESSES + FIXED_ADDRESSES + 8) as usize;
/// The value of each MSR before the first write; `NOT_READ`: #GP.
static RESET: [AtomicU64; ROWS] = [const { AtomicU64::new(0) }; ROWS];
/// No MSR of the PMU reads this out of reset.
const NOT_READ: u64 = !0;

/// Reads every MSR before the first write.
pub(super) fn note_reset() {
    if let Ok(pmu) = Pmu::identify() {
        for (row, noted) in rows(pmu.0).zip(&RESET) {
            noted.store(rdmsr(row.address).unwrap_or(NOT_READ), Relaxed);
        }
    }
}

/// Checks the values out of reset: SDM vol. 3A, table 10-1.
fn reset(cx: &Context) -> Verdict {
    for (row, noted) in rows(cx.pmu.0).zip(&RESET) {
        check(
            format_args!("{}{}", row.name, row.index),
            noted.load(Relaxed),
            row.reset.unwrap_or(NOT_READ),
        )?;
    }
    Ok(Pass::Ok)
}

/// Writes every bit of the MSRs from `first` on. A bit is taken and read back,
/// or refused with #GP(0), and then nothing has changed.
fn bits(cx: &Context, first: u32, count: u32) -> Verdict {
    for row in rows(cx.pmu.0).filter(|row| (first..first + count).contains(&row.address)) {
        let before = expect_read(&row)?;
        expect_write(&row, 0)?;
        for bit in 0..64 {
            expect_write(&row, 1 << bit)?;
            let Some(before) = before else {
                continue;
            };
            let got = read(row.address)?;
            if row.refuses(1 << bit) {
                let want = if row.writable.is_some() { 0 } else { before };
                check(
                    format_args!("{} after #GP at bit {bit}", row.name),
                    got,
                    want,
                )?;
            } else if row.keeps {
                check(format_args!("{} bit {bit}", row.name), got, 1 << bit)?;
            }
            if row.writable.is_some() {
                write(row.address, 0)?;
            }
        }
    }
    Ok(Pass::Ok)
}

/// Checks all writable bits at once, and none.
fn all_bits(cx: &Context) -> Verdict {
    // Nothing may count meanwhile.
    write(GLOBAL_CTRL, 0)?;
    for row in rows(cx.pmu.0).filter(|row| row.keeps && row.address != GLOBAL_CTRL) {
        let Some(writable) = row.writable else {
            continue;
        };
        for value in [writable, 0, writable & 0x5555_5555_5555_5555] {
            write(row.address, value)?;
            let got = read(row.address)?;
            check(format_args!("{}{}", row.name, row.index), got, value)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that each MSR holds its own value, except the two addresses of one
/// counter.
fn independent(cx: &Context) -> Verdict {
    fill(cx)?;
    check_filled(cx)?;
    Ok(Pass::Ok)
}

/// Returns every MSR that keeps what is written, and a value for it that no
/// other gets. The global enables are not among them, so nothing counts.
fn kept(cx: &Context) -> impl Iterator<Item = (Row, u64)> + use<> {
    rows(cx.pmu.0)
        .filter(|row| row.keeps && row.address != GLOBAL_CTRL)
        .filter_map(|row| Some((row, row.writable? & (u64::from(row.address) * 0x3_0003))))
}

/// Writes a value to every MSR.
pub(super) fn fill(cx: &Context) -> Result<(), Failure> {
    kept(cx).try_for_each(|(row, value)| write(row.address, value))
}

/// Fails unless these values are still there, and no overflow has come.
pub(super) fn check_filled(cx: &Context) -> Result<(), Failure> {
    for (row, value) in kept(cx) {
        let got = read(row.address)?;
        check(format_args!("{}{}", row.name, row.index), got, value)?;
    }
    check("GLOBAL_CTRL", read(GLOBAL_CTRL)?, 0)?;
    check("GLOBAL_STATUS", read(GLOBAL_STATUS)?, 0)
}

/// Checks that IA32_PERF_GLOBAL_INUSE names the counters that have an event or an enable bit, and an interrupt (SDM
/// vol. 3B, 20.2.4.3).
fn in_use(cx: &Context) -> Verdict {
    const PMI: u64 = 1 << 63;
    if cx.pmu.0.version < 4 {
        return Ok(Pass::Skip("no IA32_PERF_GLOBAL_INUSE before version 4"));
    }
    check("of none", read(GLOBAL_INUSE)?, 0)?;
    for counter in cx.pmu.counters() {
        for (bits, asks) in [(COUNT, 0), (COUNT | INT, PMI)] {
            cx.pmu.configure(counter, bits)?;
            check(
                format_args!("of {counter}"),
                read(GLOBAL_INUSE)?,
                counter.bit() | asks,
            )?;
        }
        cx.pmu.reset()?;
    }
    check("at last", read(GLOBAL_INUSE)?, 0)?;
    Ok(Pass::Ok)
}

/// Checks that a write of IA32_PMCx takes 32 bits and copies bit 31 into the
/// others (SDM vol. 3B, 20.2.8).
fn legacy_write(cx: &Context) -> Verdict {
    let mask = cx.pmu.0.general_mask();
    for counter in cx.pmu.general() {
        for (written, extended) in [
            (0x7fff_ffff, 0x7fff_ffff),
            (0x8000_0000, 0xffff_ffff_8000_0000),
            (0xffff_fc18, 0xffff_ffff_ffff_fc18),
            (0x1234_5678_0000_0001, 1),
            (!0, !0),
        ] {
            write(counter.address(), written)?;
            let got = counter.value()?;
            check(
                format_args!("{counter} after {written:#x}"),
                got,
                extended & mask,
            )?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that IA32_A_PMCx takes all bits that the counter has, and is the same
/// register.
fn full_width_write(cx: &Context) -> Verdict {
    if !cx.pmu.0.full_width() {
        return Ok(Pass::Skip("no full-width writes"));
    }
    let mask = cx.pmu.0.general_mask();
    for n in 0..cx.pmu.0.general {
        for value in [mask, 1 << 31, 0x1_0000_0000, 0x1234_5678_9abc & mask] {
            write(A_PMC + n, value)?;
            check(format_args!("A_PMC{n}"), read(A_PMC + n)?, value)?;
            let got = Counter::General(n).value()?;
            check(format_args!("PMC{n} after A_PMC{n}"), got, value)?;
        }
        write(PMC + n, 5)?;
        check(format_args!("A_PMC{n} after PMC{n}"), read(A_PMC + n)?, 5)?;
    }
    Ok(Pass::Ok)
}

/// Reads, and fails unless the result is as the row says.
fn expect_read(row: &Row) -> Result<Option<u64>, Failure> {
    match (rdmsr(row.address), row.reset) {
        (Ok(value), Some(_)) => Ok(Some(value)),
        (Err(Fault::GP), None) => Ok(None),
        (got, _) => Err(Failure(Text::new(format_args!(
            "read of {}{} (got {got:x?} want {})",
            row.name,
            row.index,
            if row.reset.is_some() {
                "a value"
            } else {
                "#GP(0)"
            }
        )))),
    }
}

/// Writes, and fails unless the write is taken or refused as the row says.
pub(super) fn expect_write(row: &Row, value: u64) -> Result<(), Failure> {
    let want = if row.refuses(value) {
        Err(Fault::GP)
    } else {
        Ok(())
    };
    let got = wrmsr(row.address, value);
    if got == want {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "write of {value:#x} to {}{} (got {got:x?} want {want:x?})",
        row.name, row.index
    ))))
}
