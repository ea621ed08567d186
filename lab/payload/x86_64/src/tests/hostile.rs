//! Any value to any MSR, thousands of times. Each write is taken or #GP(0) as
//! the table says, nothing else happens, and afterwards the PMU works.

use core::sync::atomic::Ordering::Relaxed;

use super::register::expect_write;
use super::{Context, Test};
use crate::apic::{self, LVT_MASKED, LVT_NMI};
use crate::instructions::{rdmsr, rdpmc};
use crate::msr::*;
use crate::percpu;
use crate::pmu::COUNT;
use crate::random::Random;
use crate::vectors::PMI;
use vpmu_payload_harness::{Pass, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("hostile.lvtpc_masked", |cx| hostile(cx, 1, LVT_MASKED)),
    ("hostile.nmi", |cx| hostile(cx, 2, LVT_NMI)),
    ("hostile.vector", |cx| hostile(cx, 3, PMI.into())),
];

const WRITES: u32 = 1_000;

pub(super) fn hostile(cx: &Context, seed: u64, lvtpc: u32) -> Verdict {
    let mut random = Random::new(seed);
    apic::set_lvtpc(lvtpc);
    let count = rows(cx.pmu.0).count();
    for _ in 0..WRITES {
        let Some(row) = rows(cx.pmu.0).nth(random.below(count)) else {
            continue;
        };
        let value = value(&mut random, &row);
        expect_write(&row, value)?;
        // The values of only some MSRs are known, but each must be readable.
        let read = rdmsr(row.address);
        check(
            format_args!("{} can be read", row.name),
            read.is_ok().into(),
            row.reset.is_some().into(),
        )?;
        if random.below(4) == 0 {
            // Any index gives a value or #GP(0).
            let _ = rdpmc(random.any() & 0xc000_000f);
        }
        apic::set_lvtpc(lvtpc);
    }
    cx.pmu.reset()?;
    let before = percpu::this().pmis.load(Relaxed);
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.count_some(counter)?;
    }
    check(
        "PMIs after the reset",
        percpu::this().pmis.load(Relaxed),
        before,
    )?;
    Ok(Pass::Ok)
}

/// Returns any value. Most values can be written, for otherwise all would be #GP, and counters are
/// often close to their end.
fn value(random: &mut Random, row: &Row) -> u64 {
    let writable = row.writable.unwrap_or(0);
    if row.address == DS_AREA {
        // The area is at an address without memory. Otherwise the counters would write records over
        // this program.
        return random.any() & writable | 1 << 45;
    }
    match random.below(8) {
        0 => random.any(),
        1 => writable,
        2 => 0,
        3 => random.any() & 0xffff,
        4 => !(random.any() & 0xffff) & writable,
        _ => random.any() & writable,
    }
}
