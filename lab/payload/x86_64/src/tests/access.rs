//! Tests of which MSRs exist, beside those of the table.

use super::{Context, Test};
use crate::fault::Fault;
use crate::instructions::{rdmsr, rdmsr_rcx, wrmsr, wrmsr_rcx};
use crate::msr::*;
use vpmu_payload_harness::{Deviation, Failure, Pass, Text, Verdict, check_or};

pub(super) const TESTS: &[Test] = &[
    ("access.counters", counters),
    ("access.neighbours", neighbours),
    ("access.upper_half_of_rcx", upper_half_of_rcx),
];

/// Checks that the last counter that CPUID names exists, and the one after it
/// does not: neither its value, nor its select, nor its alias.
fn counters(cx: &Context) -> Verdict {
    let c = cx.pmu.0;
    let last = c.general - 1;
    for (first, there) in [(PMC, true), (PERFEVTSEL, true), (A_PMC, c.full_width())] {
        expect(first + last, there)?;
        for n in c.general..GENERAL_ADDRESSES {
            expect(first + n, false)?;
        }
    }
    for n in 0..FIXED_ADDRESSES {
        expect(FIXED_CTR + n, c.fixed >> n & 1 != 0)?;
    }
    expect(GLOBAL_STATUS_SET, c.version >= 4)?;
    expect(GLOBAL_INUSE, c.version >= 4)?;
    Ok(Pass::Ok)
}

/// Checks MSRs that no processor with this PMU has: performance metrics, LBR, PEBS unless it is offered, and unused
/// addresses in between.
fn neighbours(cx: &Context) -> Verdict {
    for address in [PEBS_ENABLE, PEBS_DATA_CFG] {
        expect(address, cx.pmu.0.has_pebs())?;
    }
    for address in [
        0x329,  // PERF_METRICS
        0x14ce, // LBR_CTL
        0x38c, 0x4c0, 0x4c9,
    ] {
        expect(address, false)?;
    }
    Ok(Pass::Ok)
}

/// QEMU 10.0's SVM looks up the intercept of an MSR with all of RCX, and finds
/// none. The access is then that of the hypervisor's own processor.
const RCX: Deviation = Deviation(
    "QEMU: accesses to MSRs with bits in RCX's upper half are not intercepted by a hypervisor",
);

/// Checks that the address is ECX (SDM vol. 2B, RDMSR and WRMSR).
fn upper_half_of_rcx(_: &Context) -> Verdict {
    let (value, other) = (0x1_2345, 0x1_2346);
    let mut pass = Pass::Ok;
    for n in [1, 2, 1 << 31] {
        let rcx = n << 32 | u64::from(PERFEVTSEL);
        let what = format_args!("bits {n:#x} above ECX");
        wrmsr(PERFEVTSEL, value)?;
        pass = pass.and(check_or(what, rdmsr_rcx(rcx)?, value, (0, RCX))?);
        wrmsr_rcx(rcx, other)?;
        pass = pass.and(check_or(what, rdmsr(PERFEVTSEL)?, other, (value, RCX))?);
    }
    Ok(pass)
}

/// Fails unless reading `address` gives a value, or, where it is not `there`,
/// both ways give #GP(0).
fn expect(address: u32, there: bool) -> Result<(), Failure> {
    let got = rdmsr(address);
    let is_right = if there {
        got.is_ok()
    } else {
        got == Err(Fault::GP) && wrmsr(address, 0) == Err(Fault::GP)
    };
    if is_right {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "MSR {address:#x} (got {got:x?} want {})",
        if there { "a value" } else { "#GP(0) both ways" }
    ))))
}
