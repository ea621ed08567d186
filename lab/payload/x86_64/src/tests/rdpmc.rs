//! RDPMC and its indices (SDM vol. 2B, RDPMC), and the rights of ring 3.

use super::{Context, Test};
use crate::fault::Fault;
use crate::instructions::{rdpmc, set_pce};
use crate::msr::*;
use crate::pmu::{COUNT, pass, write};
use crate::user;
use vpmu_payload_harness::{Deviation, Failure, Pass, Text, Verdict, check, check_or, check_range};

pub(super) const TESTS: &[Test] = &[
    ("rdpmc.every_counter", every_counter),
    ("rdpmc.while_it_counts", while_it_counts),
    ("rdpmc.upper_half_of_rcx", upper_half),
    ("rdpmc.out_of_range", out_of_range),
    ("rdpmc.other_types", other_types),
    ("rdpmc.rdmsr_of_indices", rdmsr_of_indices),
    ("user.rdpmc_without_pce", user_without_pce),
    ("user.rdpmc_with_pce", user_with_pce),
    ("user.rdpmc_port", user_port),
    ("user.msrs", user_msrs),
];

/// KVM completes RDPMC itself and has no PMU. A VMM that rewrites kernels at load has only theirs: docs/how/rdpmc.md.
const USER_RDPMC: Deviation =
    Deviation("RDPMC of ring 3 is not the VMM's to complete: #GP also with CR4.PCE");

/// An RDPMC that has faulted once is an RDMSR: docs/how/rdpmc.md.
const REWRITTEN: Deviation =
    Deviation("a rewritten RDPMC of a counter that does not exist reads the MSR of its number");
const RCX: Deviation = Deviation(
    "QEMU: a rewritten RDPMC with bits in RCX's upper half is not intercepted by a hypervisor",
);

/// Checks that RDPMC in ring 0 gives all bits that RDMSR gives, CR4.PCE or not,
/// and clears the upper halves of its registers.
fn every_counter(cx: &Context) -> Verdict {
    for pce in [false, true] {
        set_pce(pce);
        for (n, counter) in (0..).zip(cx.pmu.counters()) {
            let value = (0xa5a5_8765_9abc_4300 | n) & cx.pmu.mask(counter);
            cx.pmu.set(counter, value)?;
            let (low, high) = rdpmc(counter.rdpmc_index())?;
            check(format_args!("{counter} RAX"), low, value & 0xffff_ffff)?;
            check(format_args!("{counter} RDX"), high, value >> 32)?;
        }
    }
    set_pce(false);
    Ok(Pass::Ok)
}

/// Checks that RDPMC between two RDMSRs gives a value between theirs.
fn while_it_counts(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.enable(counter.bit())?;
        for _ in 0..20 {
            let before = counter.value()?;
            let (low, high) = rdpmc(counter.rdpmc_index())?;
            let after = counter.value()?;
            check_range(counter, high << 32 | low, before, after)?;
        }
        cx.pmu.enable(0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that the index is ECX.
fn upper_half(cx: &Context) -> Verdict {
    let mut pass = Pass::Ok;
    for counter in cx.pmu.counters() {
        cx.pmu.set(counter, 0x1234)?;
        let (low, _) = rdpmc(counter.rdpmc_index() | 0xdead_beef << 32)?;
        pass = pass.and(check_or(counter, low, 0x1234, (0, RCX))?);
        cx.pmu.set(counter, 0)?;
    }
    Ok(pass)
}

/// Checks that counters that do not exist are #GP(0).
fn out_of_range(cx: &Context) -> Verdict {
    let c = cx.pmu.0;
    let general = (c.general..0x40).chain([0xff, 0x100, 0xffff]);
    let fixed = (0..0x40).chain([0xff, 0x100, 0xffff]);
    let fixed = fixed.filter(|&n| c.fixed.checked_shr(n).is_none_or(|bits| bits & 1 == 0));
    let mut pass = Pass::Ok;
    for index in general.chain(fixed.map(|n| 1 << 30 | n)) {
        pass = pass.and(refused(index)?);
    }
    Ok(pass)
}

/// Checks other types. ECX[31:16] is the type: 0 and 4000H are counters. 2000H
/// is performance metrics, and bit 31 the fast read of processors without
/// architectural performance monitoring. This PMU has neither.
fn other_types(cx: &Context) -> Verdict {
    let mut pass = Pass::Ok;
    for kind in (0..32).map(|bit| 1_u32 << bit).filter(|bit| *bit > 0xffff) {
        for n in 0..cx.pmu.0.general {
            if kind != 1 << 30 {
                pass = pass.and(refused(kind | n)?);
            }
            if kind != 1 << 30 {
                pass = pass.and(refused(1 << 30 | kind | n)?);
            }
        }
    }
    Ok(pass.and(refused(!0)?))
}

fn refused(index: u32) -> Verdict {
    match rdpmc(index.into()) {
        Err(Fault::GP) => Ok(Pass::Ok),
        // The TSC, the local APIC, the microcode's revision.
        Ok(_) if index < 0x100 => Ok(Pass::Deviates(REWRITTEN)),
        got => Err(Failure(Text::new(format_args!(
            "RDPMC {index:#x} (got {got:x?} want #GP(0))"
        )))),
    }
}

/// Reads a counter that has a value, in ring 3.
fn in_ring_3(cx: &Context, pce: bool) -> Result<Result<(u64, u64), Fault>, Failure> {
    let counter = crate::pmu::Counter::General(0);
    cx.pmu.set(counter, 0x1234)?;
    set_pce(pce);
    let got = user::run(user::RDPMC, counter.rdpmc_index());
    set_pce(false);
    Ok(got)
}

fn user_without_pce(cx: &Context) -> Verdict {
    refused_in_ring_3("RDPMC", in_ring_3(cx, false)?)?;
    Ok(Pass::Ok)
}

fn user_with_pce(cx: &Context) -> Verdict {
    match in_ring_3(cx, true)? {
        Ok((low, high)) => {
            check("RAX", low, 0x1234)?;
            check("RDX", high, 0)?;
            Ok(Pass::Ok)
        }
        Err(Fault::GP) => Ok(Pass::Deviates(USER_RDPMC)),
        Err(fault) => Err(fault.into()),
    }
}

/// Checks that ring 3 cannot use the ports of RDPMC.
fn user_port(cx: &Context) -> Verdict {
    cx.pmu.set(crate::pmu::Counter::General(0), 0x1234)?;
    set_pce(true);
    let got = [user::OUT, user::OUT_ENTRY].map(|out| user::run(out, 0));
    set_pce(false);
    got.into_iter()
        .try_for_each(|got| refused_in_ring_3("OUT", got))?;
    Ok(Pass::Ok)
}

/// Checks that RDMSR is no RDPMC: what MSRs there may be at the counters' indices hold no count.
fn rdmsr_of_indices(cx: &Context) -> Verdict {
    const HELD: u64 = 0x1234;
    for counter in cx.pmu.counters() {
        cx.pmu.set(counter, HELD)?;
        rdpmc(counter.rdpmc_index())?;
        let got = crate::instructions::rdmsr(counter.rdpmc_index() as u32);
        cx.pmu.set(counter, 0)?;
        match got {
            Err(Fault::GP) | Ok(0) => {}
            got => {
                return Err(Failure(Text::new(format_args!(
                    "RDMSR {:#x} (got {got:x?} want 0 or #GP(0))",
                    counter.rdpmc_index()
                ))));
            }
        }
    }
    Ok(Pass::Ok)
}

/// Checks that MSRs are ring 0's (SDM vol. 2B, RDMSR, WRMSR).
fn user_msrs(cx: &Context) -> Verdict {
    write(PERFEVTSEL, COUNT)?;
    for address in [PMC, PERFEVTSEL, FIXED_CTR, GLOBAL_CTRL, GLOBAL_STATUS] {
        refused_in_ring_3("RDMSR", user::run(user::RDMSR, address.into()))?;
        refused_in_ring_3("WRMSR", user::run(user::WRMSR, address.into()))?;
    }
    pass(1);
    let got = crate::pmu::read(PERFEVTSEL)?;
    check("PERFEVTSEL0 after", got, COUNT)?;
    check("general counters", (cx.pmu.0.general > 0).into(), 1)?;
    Ok(Pass::Ok)
}

fn refused_in_ring_3(what: &str, got: Result<(u64, u64), Fault>) -> Result<(), Failure> {
    if got == Err(Fault::GP) {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{what} in ring 3 (got {got:x?} want #GP(0))"
    ))))
}
