//! What becomes of each system register of EL1 and EL0 where two guests take turns on a CPU.
//!
//! A register that one guest can write and the other can read carries one guest's value into the other. So each has a
//! [`Verdict`], and the switch is made from the same list: [`switched_registers`](crate::switched_registers). A program in
//! both guests writes every encoding that it may write, and finds its values again after the other's turns (`switch.registers`
//! of the payload).
//!
//! Source: Arm ARM DDI 0487 L.a, C5.2 and D24 (encodings), and the pages of the registers of EL2 that trap.

use vpmu::arm::Encoding;

/// Calls `$each!` with the registers that a switch saves and loads, as `name = op1 CRn CRm op2;` of op0 = 3: those that every
/// CPU has, and after `[ras]` that of FEAT_RAS.
#[macro_export]
macro_rules! switched_registers {
    ($each:ident) => {
        $each! {
            sctlr_el1 = 0 1 0 0;
            cpacr_el1 = 0 1 0 2;
            ttbr0_el1 = 0 2 0 0;
            ttbr1_el1 = 0 2 0 1;
            tcr_el1 = 0 2 0 2;
            spsr_el1 = 0 4 0 0;
            elr_el1 = 0 4 0 1;
            sp_el0 = 0 4 1 0;
            afsr0_el1 = 0 5 1 0;
            afsr1_el1 = 0 5 1 1;
            esr_el1 = 0 5 2 0;
            far_el1 = 0 6 0 0;
            par_el1 = 0 7 4 0;
            mair_el1 = 0 10 2 0;
            amair_el1 = 0 10 3 0;
            vbar_el1 = 0 12 0 0;
            contextidr_el1 = 0 13 0 1;
            tpidr_el1 = 0 13 0 4;
            cntkctl_el1 = 0 14 1 0;
            csselr_el1 = 2 0 0 0;
            tpidr_el0 = 3 13 0 2;
            tpidrro_el0 = 3 13 0 3;
            cntp_cval_el0 = 3 14 2 2;
            cntv_cval_el0 = 3 14 3 2;
            cntp_ctl_el0 = 3 14 2 1;
            cntv_ctl_el0 = 3 14 3 1;
            [ras] disr_el1 = 0 12 1 1;
        }
    };
}

/// What becomes of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Each guest has its own, which a switch saves and loads.
    Switched,
    /// Each guest has its own, which is part of another state that is switched: what.
    Within(&'static str),
    /// Neither guest has it. An access traps, and is undefined or reads as zero: by what.
    Traps(&'static str),
    /// Both may read it, and no guest can write it: why.
    Constant(&'static str),
    /// No CPU that the monitor runs on has it: why.
    Absent(&'static str),
}
use Verdict::{Absent, Constant, Traps, Within};

/// Any value of a field.
const ANY: (u8, u8) = (0, 15);
const fn is(value: u8) -> (u8, u8) {
    (value, value)
}

/// Encodings: op0, and from where to where each of op1, CRn, CRm and op2 reaches.
type Pattern = (u8, (u8, u8), (u8, u8), (u8, u8), (u8, u8));

const PMU: Verdict = Within("the PMU, which the engine switches");
const PSTATE: Verdict = Within("PSTATE, which is in SPSR_EL2");
const INTERRUPTS: Verdict =
    Within("the virtual interface: ICH_VMCR_EL2, ICH_AP0R<n>_EL2 and ICH_AP1R<n>_EL2");
const EXTENDED: Verdict = Traps("HCRX_EL2 or HFGRTR_EL2, whose bits that open it are 0");
const COUNTS: Verdict = Constant("the same counter for all");

/// The registers that are not [`switched_registers`](crate::switched_registers). The first pattern counts.
#[rustfmt::skip]
const OTHERS: &[(Pattern, Verdict)] = &[
    // Debug, trace, branch records, system PMUs, snapshots of the PMU.
    ((2, ANY, ANY, ANY, ANY), Traps("MDCR_EL2.TDA, TDRA, TDOSA and EnSPM, CPTR_EL2.TTA, HDFGRTR_EL2, HDFGRTR2_EL2")),
    ((3, is(0), is(0), ANY, ANY), Constant("an ID register, which says what both guests are offered")),
    ((3, is(0), is(1), is(0), is(1)), Traps("HCR_EL2.TACR")),
    ((3, is(0), is(1), is(0), is(3)), EXTENDED), // SCTLR2_EL1
    ((3, is(0), is(1), is(0), (5, 6)), Traps("HCR_EL2.ATA = 0")), // RGSR_EL1, GCR_EL1
    ((3, is(0), is(1), is(2), is(0)), Traps("CPTR_EL2.TZ")), // ZCR_EL1
    ((3, is(0), is(1), is(2), (1, 3)), Traps("MDCR_EL2.TTRF")), // TRFCR_EL1, TRCITECR_EL1
    ((3, is(0), is(1), is(2), (4, 6)), Traps("CPTR_EL2.TSM")), // SMPRI_EL1, SMCR_EL1
    ((3, is(0), is(2), is(0), is(3)), EXTENDED), // TCR2_EL1
    ((3, is(0), is(2), (1, 3), ANY), Traps("HCR_EL2.APK = 0")), // the keys
    ((3, is(0), is(2), is(5), ANY), EXTENDED), // guarded control stacks
    ((3, is(0), is(4), (2, 3), ANY), PSTATE),
    ((3, is(0), is(4), is(6), is(0)), INTERRUPTS), // ICC_PMR_EL1
    ((3, is(0), is(5), (3, 5), ANY), Traps("HCR_EL2.TERR")),
    ((3, is(0), is(5), is(6), ANY), Traps("HCR_EL2.ATA = 0")), // TFSR_EL1, TFSRE0_EL1
    ((3, is(0), is(6), is(0), is(5)), EXTENDED), // PFAR_EL1
    ((3, is(0), is(6), (1, 15), ANY), Absent("of the R profile")),
    ((3, is(0), is(9), (9, 10), ANY), Traps("MDCR_EL2.TPMS and E2PB = 0")),
    ((3, is(0), is(9), is(11), ANY), Traps("MDCR_EL2.E2TB = 0")),
    ((3, is(0), is(9), (12, 14), ANY), PMU),
    ((3, is(0), is(10), (2, 3), (1, 7)), EXTENDED), // MAIR2_EL1, AMAIR2_EL1, permission indirection and overlays
    ((3, is(0), is(10), is(4), (0, 3)), Traps("HCR_EL2.TLOR")),
    ((3, is(0), is(10), is(4), is(4)), Traps("MPAMHCR_EL2")), // MPAMIDR_EL1
    ((3, is(0), is(10), is(4), is(7)), Traps("HCR_EL2.TLOR")), // LORID_EL1
    ((3, is(0), is(10), is(5), ANY), Traps("MPAM2_EL2")),
    ((3, is(0), is(12), is(0), (1, 2)), Absent("of the highest exception level, which EL1 is not")),
    ((3, is(0), is(12), is(1), is(0)), Constant("what is pending now")), // ISR_EL1
    ((3, is(0), is(12), is(11), (5, 7)), Traps("HCR_EL2.IMO and FMO")), // ICC_SGI1R_EL1 and its like
    ((3, is(0), is(12), is(12), is(5)), Constant("ICC_SRE_EL2.Enable is 0, and reads are answered")), // ICC_SRE_EL1
    ((3, is(0), is(12), (8, 12), ANY), INTERRUPTS),
    ((3, is(0), is(13), is(0), (3, 6)), EXTENDED), // RCWMASK_EL1, RCWSMASK_EL1, ACCDATA_EL1
    ((3, is(0), is(13), is(0), is(7)), Traps("HCR_EL2.EnSCXT = 0")),
    ((3, is(1), is(0), ANY, ANY), Constant("describes caches, tags or the processor")),
    ((3, is(3), is(0), ANY, ANY), Constant("describes caches")),
    ((3, is(3), is(2), is(4), ANY), Constant("random each time")),
    ((3, is(3), is(2), is(5), ANY), EXTENDED), // GCSPR_EL0
    ((3, is(3), is(4), is(2), is(2)), Traps("CPTR_EL2.TSM")), // SVCR
    ((3, is(3), is(4), is(2), ANY), PSTATE),
    ((3, is(3), is(4), is(4), (0, 1)), Within("the vector registers")), // FPCR, FPSR
    ((3, is(3), is(4), is(4), is(2)), EXTENDED), // FPMR
    ((3, is(3), is(4), is(5), ANY), Absent("of Debug state, which a guest is never in")),
    ((3, is(3), is(9), (4, 6), ANY), Traps("HDFGRTR2_EL2")), // PMICNTR_EL0, PMICFILTR_EL0
    ((3, is(3), is(9), (12, 14), ANY), PMU),
    ((3, is(3), is(10), is(2), is(4)), EXTENDED), // POR_EL0
    ((3, is(3), is(13), is(0), is(5)), EXTENDED), // TPIDR2_EL0
    ((3, is(3), is(13), is(0), is(7)), Traps("HCR_EL2.EnSCXT = 0")),
    ((3, is(3), is(13), (2, 15), ANY), Traps("CPTR_EL2.TAM")),
    ((3, is(3), is(14), is(0), ANY), COUNTS),
    ((3, is(3), is(14), (2, 3), is(0)), Within("CNTP_CVAL_EL0 and CNTV_CVAL_EL0")), // the timers' TVAL
    ((3, is(3), is(14), (8, 15), ANY), PMU),
    ((3, ANY, is(11), ANY, ANY), Traps("HCR_EL2.TIDCP")),
    ((3, ANY, is(15), ANY, ANY), Traps("HCR_EL2.TIDCP")),
];

macro_rules! encodings {
    ($($name:ident = $op1:literal $crn:literal $crm:literal $op2:literal;)*
     [ras] $ras:ident = $ras1:literal $ras2:literal $ras3:literal $ras4:literal;) => {
        &[
            $(Encoding::new(3, $op1, $crn, $crm, $op2),)*
            Encoding::new(3, $ras1, $ras2, $ras3, $ras4),
        ]
    };
}

/// The registers that a switch saves and loads.
const SWITCHED: &[Encoding] = switched_registers!(encodings);

/// What becomes of `register`; `None` where the architecture has none of this encoding, whose accesses are undefined.
pub fn verdict(register: Encoding) -> Option<Verdict> {
    if SWITCHED.contains(&register) {
        return Some(Verdict::Switched);
    }
    let within = |value: u8, (from, to): (u8, u8)| (from..=to).contains(&value);
    let matches = |&&((op0, op1, crn, crm, op2), _): &&(Pattern, Verdict)| {
        op0 == register.op0
            && within(register.op1, op1)
            && within(register.crn, crn)
            && within(register.crm, crm)
            && within(register.op2, op2)
    };
    OTHERS.iter().find(matches).map(|(_, verdict)| *verdict)
}

/// `ICC_SRE_EL1` as both guests read it: system registers are used (SRE), and interrupts are not bypassed (DFB, DIB).
pub const ICC_SRE: u64 = 0b111;

/// What both guests read in a register whose writes do nothing; `None`: it is no such register.
pub fn fixed(register: Encoding) -> Option<u64> {
    match register {
        // Of debug: Linux clears them at boot, whatever ID_AA64DFR0_EL1 says.
        Encoding { op0: 2, .. } => Some(0),
        _ => (register == Encoding::new(3, 0, 12, 12, 5)).then_some(ICC_SRE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and encodings of the registers of EL1 and EL0 (op0, op1, CRn, CRm, op2); a family of many registers has its first
    /// and its last.
    const ARCHITECTURE: &str = include_str!("registers.txt");

    #[test]
    fn each_register_of_the_architecture_has_a_verdict() {
        let mut count = 0;
        for line in ARCHITECTURE.lines() {
            let mut fields = line.split(' ');
            let mut field = || fields.next().unwrap().parse().unwrap();
            let register = Encoding::new(field(), field(), field(), field(), field());
            assert!(verdict(register).is_some(), "{line}");
            count += 1;
        }
        assert!(count > 300, "{count} registers");
    }

    #[test]
    fn deferred_interrupts_are_switched_and_no_pattern_hides_a_switched_register() {
        for &register in SWITCHED {
            assert_eq!(verdict(register), Some(Verdict::Switched));
        }
        let disr = Encoding::new(3, 0, 12, 1, 1);
        assert!(SWITCHED.contains(&disr));
        assert!(matches!(
            verdict(Encoding::new(3, 0, 1, 0, 1)),
            Some(Traps(_))
        ));
        // Unallocated.
        assert_eq!(verdict(Encoding::new(3, 0, 2, 6, 0)), None);
    }
}
