//! EL2's control registers at boot: open what the guest is offered, trap what it is not.
//!
//! After reset, and after a bootloader, most of them are UNKNOWN. So each that a CPU has is written, by the
//! features that its ID registers show.

use vpmu::arm::partition::TrapRegisters;

use crate::boot::words::Interrupts;
use crate::regs::{
    CNTHCTL_EL1_PHYSICAL, CPTR_TTA, CptrEl2, HcrEl2, HcrxEl2, HfgitrEl2, Hfgrtr2El2, HfgrtrEl2,
    HfgwtrEl2, IdAa64dfr0El1 as Dfr0, IdAa64mmfr0El1 as Mmfr0, IdAa64mmfr1El1 as Mmfr1,
    IdAa64mmfr3El1 as Mmfr3, IdAa64pfr0El1 as Pfr0, IdAa64pfr1El1 as Pfr1, MdcrEl2, Mpam2El2,
    SMCR_OPEN, VECTOR_LENGTH,
};

/// The ID registers of a CPU that say which control registers EL2 has there; by default nothing beyond Armv8.0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Machine {
    /// `ID_AA64PFR0_EL1`.
    pub pfr0: u64,
    /// `ID_AA64PFR1_EL1`.
    pub pfr1: u64,
    /// `ID_AA64DFR0_EL1`.
    pub dfr0: u64,
    /// `ID_AA64MMFR0_EL1`.
    pub mmfr0: u64,
    /// `ID_AA64MMFR1_EL1`.
    pub mmfr1: u64,
    /// `ID_AA64MMFR3_EL1`.
    pub mmfr3: u64,
}

const fn has(register: u64, shift: u32) -> bool {
    register >> shift & 0xf != 0
}

impl Machine {
    /// FEAT_FGT: fine-grained traps.
    pub const fn fgt(&self) -> bool {
        has(self.mmfr0, Mmfr0::FGT_SHIFT)
    }

    /// FEAT_FGT2: the second set of them.
    pub const fn fgt2(&self) -> bool {
        self.mmfr0 >> Mmfr0::FGT_SHIFT & 0xf >= 2
    }

    /// EL3 exists, with firmware that decides what EL2 may use.
    pub const fn el3(&self) -> bool {
        has(self.pfr0, Pfr0::EL3_SHIFT)
    }

    /// FEAT_MPAM.
    pub const fn mpam(&self) -> bool {
        has(self.pfr0, Pfr0::MPAM_SHIFT) || has(self.pfr1, Pfr1::MPAM_FRAC_SHIFT)
    }

    /// FEAT_SPE.
    pub const fn spe(&self) -> bool {
        has(self.dfr0, Dfr0::PMSVER_SHIFT)
    }

    /// FEAT_TRBE.
    pub const fn trbe(&self) -> bool {
        has(self.dfr0, Dfr0::TRACEBUFFER_SHIFT)
    }
}

/// Calls `$each!` with the control registers of EL2 (or of EL1, where its reset value is UNKNOWN) that the monitor writes at boot,
/// as `Name = "name";`. Those that an assembler may not know are named by their operands.
#[macro_export]
macro_rules! control_registers {
    ($each:ident) => {
        $each! {
            ActlrEl2 = "actlr_el2";
            CptrEl2 = "cptr_el2";
            HstrEl2 = "hstr_el2";
            HacrEl2 = "hacr_el2";
            CnthctlEl2 = "cnthctl_el2";
            CnthpCtlEl2 = "cnthp_ctl_el2";
            CnthvCtlEl2 = "s3_4_c14_c3_1";
            ZcrEl2 = "s3_4_c1_c2_0";
            SmcrEl2 = "s3_4_c1_c2_6";
            HcrxEl2 = "s3_4_c1_c2_2";
            Sctlr2El2 = "s3_4_c1_c0_3";
            Tcr2El2 = "s3_4_c2_c0_3";
            HfgrtrEl2 = "s3_4_c1_c1_4";
            HfgwtrEl2 = "s3_4_c1_c1_5";
            HfgitrEl2 = "s3_4_c1_c1_6";
            HafgrtrEl2 = "s3_4_c3_c1_6";
            Hfgrtr2El2 = "s3_4_c3_c1_2";
            Hfgwtr2El2 = "s3_4_c3_c1_3";
            Hfgitr2El2 = "s3_4_c3_c1_7";
            Hdfgrtr2El2 = "s3_4_c3_c1_0";
            Hdfgwtr2El2 = "s3_4_c3_c1_1";
            TrfcrEl1 = "s3_0_c1_c2_1";
            TrfcrEl2 = "s3_4_c1_c2_1";
            BrbcrEl1 = "s2_1_c9_c0_0";
            BrbcrEl2 = "s2_4_c9_c0_0";
            Mpam2El2 = "s3_4_c10_c5_0";
        }
    };
}

macro_rules! define {
    ($($name:ident = $register:literal;)*) => {
        /// One of the [`control_registers`](crate::control_registers).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "each is the register of its name")]
        pub enum Control {
            $($name,)*
        }
    };
}
control_registers!(define);

/// Cache maintenance by set and way traps, because it reaches lines of others, and never invalidates without cleaning.
const SET_WAY: HcrEl2 = HcrEl2::TSW.union(HcrEl2::SWIO);

/// EL1 is AArch64, and stage 2 is on; firmware calls come to EL2, reads of ID registers, and the implementer's own registers
/// (TIDCP), which reach caches, clocks and errors of the whole machine on some cores.
const HCR: HcrEl2 = HcrEl2::RW
    .union(HcrEl2::VM)
    .union(HcrEl2::TSC)
    .union(HcrEl2::TID3)
    .union(HcrEl2::TIDCP)
    .union(SET_WAY);

/// What else a guest alone may use does not trap: pointer authentication, allocation tags, SCXTNUM, RAS fault injection.
const HCR_ALONE: HcrEl2 = HcrEl2::APK
    .union(HcrEl2::API)
    .union(HcrEl2::FIEN)
    .union(HcrEl2::ENSCXT)
    .union(HcrEl2::ATA);

/// Whether a guest has the machine's features to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// One guest, which is offered all that the machine has.
    #[default]
    Alone,
    /// Two guests. What is not switched between them is neither's: it traps ([`shared_id_register`]).
    ///
    /// [`shared_id_register`]: super::shared_id_register
    Two,
}

/// Where two guests share the machine, neither has what is not switched. Locality regions, error records and ACTLR_EL1 trap, too.
const HCR_SHARED: HcrEl2 = HcrEl2::TLOR.union(HcrEl2::TERR).union(HcrEl2::TACR);

/// `MDCR_EL2`: no guest reaches the debug registers, which are not switched.
const MDCR_SHARED: MdcrEl2 = MdcrEl2::TDA.union(MdcrEl2::TDRA).union(MdcrEl2::TDOSA);

/// Physical interrupts of both groups come to EL2, the guest's are virtual, and its SGIs trap.
const HCR_INTERRUPTS: HcrEl2 = HcrEl2::FMO.union(HcrEl2::IMO);

/// `HCR_EL2` while the guest runs.
pub const fn hcr(interrupts: Interrupts, sharing: Sharing) -> HcrEl2 {
    let hcr = HCR.union(match sharing {
        Sharing::Alone => HCR_ALONE,
        Sharing::Two => HCR_SHARED,
    });
    match interrupts {
        Interrupts::Virtual => hcr.union(HCR_INTERRUPTS),
        Interrupts::Direct => hcr,
    }
}

/// Features whose instructions and registers trap where the bit is 0.
const HCRX_OPEN: HcrxEl2 = HcrxEl2::ENAS0
    .union(HcrxEl2::ENALS)
    .union(HcrxEl2::ENASR)
    .union(HcrxEl2::MSCEN)
    .union(HcrxEl2::TCR2EN)
    .union(HcrxEl2::SCTLR2EN)
    .union(HcrxEl2::D128EN)
    .union(HcrxEl2::ENIDCP128)
    .union(HcrxEl2::GCSEN)
    .union(HcrxEl2::ENFPM)
    .union(HcrxEl2::PACMEN);

/// Fine-grained traps whose 0 traps; their names begin with n. `HFGWTR_EL2` has the same.
const HFGRTR_OPEN: HfgrtrEl2 = HfgrtrEl2::NACCDATA_EL1
    .union(HfgrtrEl2::NGCS_EL0)
    .union(HfgrtrEl2::NGCS_EL1)
    .union(HfgrtrEl2::NSMPRI_EL1)
    .union(HfgrtrEl2::NTPIDR2_EL0)
    .union(HfgrtrEl2::NRCWMASK_EL1)
    .union(HfgrtrEl2::NPIRE0_EL1)
    .union(HfgrtrEl2::NPIR_EL1)
    .union(HfgrtrEl2::NPOR_EL0)
    .union(HfgrtrEl2::NPOR_EL1)
    .union(HfgrtrEl2::NMAIR2_EL1)
    .union(HfgrtrEl2::NAMAIR2_EL1);
const HFGWTR_OPEN: HfgwtrEl2 = HfgwtrEl2::from_bits_retain(HFGRTR_OPEN.bits());
const HFGITR_OPEN: HfgitrEl2 = HfgitrEl2::NGCSPUSHM_EL1
    .union(HfgitrEl2::NGCSSTR_EL1)
    .union(HfgitrEl2::NGCSEPP);
const HFGRTR2_OPEN: Hfgrtr2El2 = Hfgrtr2El2::NRCWSMASK_EL1.union(Hfgrtr2El2::NERXGSR_EL1);

/// The bits of the PMU's trap registers that are not the PMU's. Profiling and trace trap, and their buffers (E2PB and
/// E2TB = 0) belong to EL2, which leaves them off. Bits of `HDFGRTR_EL2` and `HDFGWTR_EL2` whose 0 traps are branch records'.
pub fn traps(machine: &Machine, sharing: Sharing) -> TrapRegisters {
    let mut mdcr = match sharing {
        Sharing::Alone => MdcrEl2::empty(),
        Sharing::Two => MDCR_SHARED,
    };
    mdcr.set(MdcrEl2::TPMS, machine.spe());
    mdcr.set(MdcrEl2::TTRF, has(machine.dfr0, Dfr0::TRACEFILT_SHIFT));
    TrapRegisters {
        mdcr_el2: mdcr.bits(),
        ..TrapRegisters::default()
    }
}

/// Says what is written to each control register that `machine` has. Not among them are [`hcr`], those of
/// translation, of interrupts, and of the PMU (`MDCR_EL2`, `HDFGRTR_EL2`, `HDFGWTR_EL2`), which change while the guest runs,
/// and of buffers that may be a higher exception level's.
pub fn controls(machine: &Machine, sharing: Sharing, mut write: impl FnMut(Control, u64)) {
    let alone = sharing == Sharing::Alone;
    let open = |bits: u64| if alone { bits } else { 0 };
    let Machine {
        pfr0,
        pfr1,
        dfr0,
        mmfr1,
        mmfr3,
        ..
    } = *machine;
    let mut cptr = CptrEl2::RES1;
    cptr.set(CptrEl2::TAM, has(pfr0, Pfr0::AMU_SHIFT));
    cptr.set(CptrEl2::TZ.union(CptrEl2::TSM), !alone);
    write(Control::CptrEl2, cptr.bits() | CPTR_TTA);
    // On Arm's cores each bit opens registers of the implementer's to EL1, beside HCR_EL2.TIDCP.
    write(Control::ActlrEl2, 0);
    write(Control::HstrEl2, 0);
    write(Control::HacrEl2, 0);
    // CNTHCTL_EL2.ECV is 0, so CNTPOFF_EL2 shifts nothing and is not written: firmware at EL3 may keep that register from
    // EL2 (SCR_EL3.ECVEn), and nothing at EL2 says whether it does.
    write(Control::CnthctlEl2, CNTHCTL_EL1_PHYSICAL);
    write(Control::CnthpCtlEl2, 0);
    if has(mmfr1, Mmfr1::VH_SHIFT) {
        write(Control::CnthvCtlEl2, 0);
    }
    // Where CPTR_EL2 traps them, it traps EL2's own accesses, too.
    if alone && has(pfr0, Pfr0::SVE_SHIFT) {
        write(Control::ZcrEl2, VECTOR_LENGTH);
    }
    if alone && has(pfr1, Pfr1::SME_SHIFT) {
        write(Control::SmcrEl2, SMCR_OPEN | VECTOR_LENGTH);
    }
    if has(mmfr1, Mmfr1::HCX_SHIFT) {
        let mut hcrx = HcrxEl2::from_bits_retain(open(HCRX_OPEN.bits()));
        hcrx.set(HcrxEl2::TALLINT, has(pfr1, Pfr1::NMI_SHIFT));
        write(Control::HcrxEl2, hcrx.bits());
    }
    if has(mmfr3, Mmfr3::SCTLRX_SHIFT) {
        write(Control::Sctlr2El2, 0);
    }
    if has(mmfr3, Mmfr3::TCRX_SHIFT) {
        write(Control::Tcr2El2, 0);
    }
    if machine.fgt() {
        write(Control::HfgrtrEl2, open(HFGRTR_OPEN.bits()));
        write(Control::HfgwtrEl2, open(HFGWTR_OPEN.bits()));
        write(Control::HfgitrEl2, open(HFGITR_OPEN.bits()));
        if has(pfr0, Pfr0::AMU_SHIFT) {
            write(Control::HafgrtrEl2, 0);
        }
    }
    if machine.fgt2() {
        write(Control::Hfgrtr2El2, open(HFGRTR2_OPEN.bits()));
        write(Control::Hfgwtr2El2, open(HFGRTR2_OPEN.bits()));
        write(Control::Hfgitr2El2, 0);
        write(Control::Hdfgrtr2El2, 0);
        write(Control::Hdfgwtr2El2, 0);
    }
    if has(dfr0, Dfr0::TRACEFILT_SHIFT) {
        write(Control::TrfcrEl1, 0);
        write(Control::TrfcrEl2, 0);
    }
    if has(dfr0, Dfr0::BRBE_SHIFT) {
        write(Control::BrbcrEl1, 0);
        write(Control::BrbcrEl2, 0);
    }
    if machine.mpam() {
        // Partition 0 for EL2; the guest's own registers trap.
        let traps = Mpam2El2::TRAPMPAM0EL1.union(Mpam2El2::TRAPMPAM1EL1);
        write(Control::Mpam2El2, traps.bits());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::regs::HdfgrtrEl2;

    /// A machine that has everything.
    const EVERYTHING: Machine = Machine {
        pfr0: 0x1111_1111_1111_1111,
        pfr1: 0x1111_1111_1111_1111,
        dfr0: 0x1111_1111_1111_1911,
        mmfr0: 0x2211_1111_1111_1111,
        mmfr1: 0x1111_1111_1111_1111,
        mmfr3: 0x1111_1111_1111_1111,
    };

    fn written(machine: &Machine) -> HashMap<Control, u64> {
        let mut written = HashMap::new();
        controls(machine, Sharing::Alone, |control, value| {
            assert_eq!(written.insert(control, value), None, "{control:?} twice");
        });
        written
    }

    #[test]
    fn what_is_hidden_traps() {
        let registers = written(&EVERYTHING);
        let traps = traps(&EVERYTHING, Sharing::Alone);
        assert_eq!(traps.mdcr_el2, (MdcrEl2::TPMS | MdcrEl2::TTRF).bits());
        let cptr = registers[&Control::CptrEl2];
        assert_eq!(cptr & CPTR_TTA, CPTR_TTA);
        assert_eq!(cptr & CptrEl2::TAM.bits(), CptrEl2::TAM.bits());
        for zero in [
            Control::Hdfgrtr2El2,
            Control::Hdfgwtr2El2,
            Control::Hfgitr2El2,
            Control::TrfcrEl2,
            Control::BrbcrEl2,
        ] {
            assert_eq!(registers[&zero], 0, "{zero:?}");
        }
        let branch_records = HdfgrtrEl2::NBRBIDR | HdfgrtrEl2::NBRBCTL | HdfgrtrEl2::NBRBDATA;
        assert_eq!(traps.hdfgrtr_el2 & branch_records.bits(), 0);
        assert_eq!(
            registers[&Control::HfgitrEl2] & (HfgitrEl2::NBRBINJ | HfgitrEl2::NBRBIALL).bits(),
            0
        );
        assert_eq!(registers[&Control::Mpam2El2], 0b11 << 48);
        assert_ne!(
            registers[&Control::HcrxEl2] & HcrxEl2::TALLINT.bits(),
            0,
            "ALLINT"
        );
        for interrupts in [Interrupts::Virtual, Interrupts::Direct] {
            assert!(
                hcr(interrupts, Sharing::Alone)
                    .contains(HcrEl2::TID3 | HcrEl2::VM | HcrEl2::TSC | SET_WAY)
            );
        }
    }

    #[test]
    fn direct_interrupts_do_not_come_to_el2() {
        let hcr = |interrupts| hcr(interrupts, Sharing::Alone);
        let difference = hcr(Interrupts::Virtual) ^ hcr(Interrupts::Direct);
        assert_eq!(difference, HcrEl2::IMO | HcrEl2::FMO);
        assert!(hcr(Interrupts::Virtual).contains(difference));
    }

    #[test]
    fn what_two_guests_do_not_switch_traps() {
        let mut written = HashMap::new();
        controls(&EVERYTHING, Sharing::Two, |control, value| {
            written.insert(control, value);
        });
        for zero in [Control::HfgrtrEl2, Control::HfgwtrEl2, Control::HfgitrEl2] {
            assert_eq!(written[&zero], 0, "{zero:?}");
        }
        assert_eq!(written[&Control::HcrxEl2], HcrxEl2::TALLINT.bits());
        let vectors = (CptrEl2::TZ | CptrEl2::TSM).bits();
        assert_eq!(written[&Control::CptrEl2] & vectors, vectors);
        let hcr = hcr(Interrupts::Virtual, Sharing::Two);
        assert!(hcr.contains(SET_WAY));
        assert!(!hcr.intersects(HcrEl2::API | HcrEl2::APK | HcrEl2::ATA | HcrEl2::ENSCXT));
        let mdcr = traps(&EVERYTHING, Sharing::Two).mdcr_el2;
        assert_eq!(mdcr & MDCR_SHARED.bits(), MDCR_SHARED.bits());
    }

    #[test]
    fn no_register_is_written_that_the_machine_lacks() {
        let registers = written(&Machine::default());
        assert_eq!(registers.len(), 6, "{registers:?}");
        let registers = written(&EVERYTHING);
        assert_eq!(registers.len(), 26, "every one, where all exist");
    }
}
