//! Finds out what `MDCR_EL2.HPMN` really keeps apart on this machine.
//!
//! The architecture says that EL1 neither sees nor changes the counters from HPMN on. QEMU up to 10 lets
//! some registers through, and other machines may have errata, so the partition is tried before it is
//! trusted: with HPMN lowered, a few instructions at EL1 attack the topmost counter through each
//! register, and EL2 looks whether it changed.
//!
//! UNSAFETY: writes system registers and enters EL1. The guest does not exist yet.

use vpmu::arm::{
    PmuVersion, RawPmevtyper, Register,
    partition::{Features, Isolation, PmuRegisters},
    pmcr,
};

use super::{
    pmu_registers::PhysicalPmu,
    sysreg::{isb, write_sysreg},
};

unsafe extern "C" {
    /// Performs access `which` of the table in `entry.s` at EL1 and returns what it read.
    safe fn probe(which: u64, value: u64) -> u64;
}

/// The accesses of the table in `entry.s`.
mod access {
    pub(super) const READ_PMCNTEN: u64 = 0;
    pub(super) const CLEAR_PMCNTEN: u64 = 1;
    pub(super) const READ_PMINTEN: u64 = 2;
    pub(super) const CLEAR_PMINTEN: u64 = 3;
    pub(super) const READ_PMOVS: u64 = 4;
    pub(super) const CLEAR_PMOVS: u64 = 5;
    pub(super) const WRITE_PMCR: u64 = 6;
    pub(super) const WRITE_PMSWINC: u64 = 7;
    pub(super) const WRITE_PMXEVCNTR: u64 = 8;
    pub(super) const WRITE_PMXEVTYPER: u64 = 9;
    pub(super) const WRITE_PMSELR: u64 = 10;
    pub(super) const WRITE_PMEVCNTR: u64 = 11;
    pub(super) const WRITE_PMEVTYPER: u64 = WRITE_PMEVCNTR + 31;
}

const MDCR_HPME: u64 = 1 << 7;
const MDCR_HPMD: u64 = 1 << 17;
const MDCR_HCCD: u64 = 1 << 23;

const SW_INCR: u64 = 0;
const CPU_CYCLES: u64 = 0x11;

/// Tries the partition. Leaves every counter stopped and zero, and `MDCR_EL2` at `counters`.
pub(crate) fn isolation(counters: u8, features: &Features) -> Isolation {
    let pmu = &mut PhysicalPmu;
    let mut found = Isolation::NONE;
    found.el2_prohibited = counting_at_el2_can_be_stopped(pmu, counters, features);
    // Two counters at least: one for each side.
    if counters >= 2 {
        let top = counters - 1;
        set_mdcr(u64::from(top) | MDCR_HPME);
        probe_top(pmu, top, &mut found);
    }
    reset(pmu, counters);
    set_mdcr(counters.into());
    // SAFETY: the guest's own vectors, which the trial has borrowed.
    unsafe {
        write_sysreg!("vbar_el1", 0_u64);
    }
    found
}

fn probe_top(pmu: &mut PhysicalPmu, top: u8, found: &mut Isolation) {
    let bit = 1_u64 << top;
    let value = Register::Pmevcntr(top);
    let kind = Register::Pmevtyper(top);

    pmu.write(Register::PmcntenSet, bit);
    found.pmcnten = probe(access::READ_PMCNTEN, 0) & bit == 0;
    probe(access::CLEAR_PMCNTEN, bit);
    found.pmcnten &= pmu.read(Register::PmcntenSet) & bit != 0;

    pmu.write(Register::PmintenSet, bit);
    found.pminten = probe(access::READ_PMINTEN, 0) & bit == 0;
    probe(access::CLEAR_PMINTEN, bit);
    found.pminten &= pmu.read(Register::PmintenSet) & bit != 0;
    pmu.write(Register::PmintenClr, bit);

    pmu.write(Register::PmovsSet, bit);
    found.pmovs = probe(access::READ_PMOVS, 0) & bit == 0;
    probe(access::CLEAR_PMOVS, bit);
    found.pmovs &= pmu.read(Register::PmovsSet) & bit != 0;
    pmu.write(Register::PmovsClr, bit);

    pmu.write(kind, SW_INCR);
    pmu.write(value, 5);
    probe(access::WRITE_PMCR, pmcr::P);
    found.pmcr_p = pmu.read(value) == 5;

    pmu.write(value, 5);
    probe(access::WRITE_PMSWINC, bit);
    found.pmswinc = pmu.read(value) == 5;

    pmu.write(value, 5);
    probe(access::WRITE_PMSELR, top.into());
    probe(access::WRITE_PMXEVCNTR, 7);
    probe(access::WRITE_PMXEVTYPER, CPU_CYCLES);
    probe(access::WRITE_PMEVCNTR + u64::from(top), 7);
    probe(access::WRITE_PMEVTYPER + u64::from(top), CPU_CYCLES);
    found.indexed = pmu.read(value) == 5 && pmu.read(kind) & 0xffff == SW_INCR;
}

/// Whether HPMD and HCCD keep counters that ask to count at EL2 from doing so. The same counters must
/// count without them, else the trial says nothing and the answer is no.
fn counting_at_el2_can_be_stopped(
    pmu: &mut PhysicalPmu,
    counters: u8,
    features: &Features,
) -> bool {
    if features.version < PmuVersion::V3p5 || counters == 0 {
        return false;
    }
    let mut counts = |mdcr: u64| {
        set_mdcr(mdcr | u64::from(counters));
        pmu.write(Register::Pmevtyper(0), CPU_CYCLES | RawPmevtyper::NSH);
        pmu.write(Register::Pmccfiltr, RawPmevtyper::NSH);
        pmu.write(Register::PmcntenSet, 1 << 31 | 1);
        let read =
            |pmu: &mut PhysicalPmu| (pmu.read(Register::Pmevcntr(0)), pmu.read(Register::Pmccntr));
        pmu.write(Register::Pmcr, pmcr::E | pmcr::LC);
        let before = read(pmu);
        for _ in 0..64 {
            isb();
        }
        let after = read(pmu);
        pmu.write(Register::Pmcr, pmcr::LC);
        (before.0 != after.0, before.1 != after.1)
    };
    counts(0) == (true, true) && counts(MDCR_HPMD | MDCR_HCCD) == (false, false)
}

fn reset(pmu: &mut PhysicalPmu, counters: u8) {
    pmu.write(Register::PmcntenClr, 0xffff_ffff);
    pmu.write(Register::PmintenClr, 0xffff_ffff);
    pmu.write(Register::PmovsClr, 0xffff_ffff);
    pmu.write(Register::Pmccfiltr, 0);
    for n in 0..counters {
        pmu.write(Register::Pmevtyper(n), 0);
    }
    pmu.write(Register::Pmselr, 0);
    pmu.write(Register::Pmuserenr, 0);
    pmu.write(Register::Pmcr, pmcr::P | pmcr::C);
}

fn set_mdcr(value: u64) {
    // SAFETY: only the PMU's fields are set, and the guest does not run yet.
    unsafe {
        write_sysreg!("mdcr_el2", value);
    }
    isb();
}
