//! What a plan must know of the machine: what its ID registers say, and what only a probe finds.

use crate::arm::PmuVersion;

/// What the ID registers of a CPU say about its PMU. All clusters of a machine may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Which PMUv3 (ID_AA64DFR0_EL1.PMUVer).
    pub version: PmuVersion,
    /// FEAT_FGT: HDFGRTR_EL2 and HDFGWTR_EL2 exist (ID_AA64MMFR0_EL1.FGT). Where there is an EL3,
    /// its SCR_EL3.FGTEn must allow them too: accesses of EL2 to them trap to EL3 otherwise.
    pub fgt: bool,
    /// FEAT_HPMN0: MDCR_EL2.HPMN may be 0 (ID_AA64DFR0_EL1.HPMN0).
    pub hpmn0: bool,
    /// PMEVTYPERn_EL0.MT may have an effect (ID_AA64DFR0_EL1.MTPMU is not 0b1111).
    pub mtpmu: bool,
    /// The CPU shares its core with another one, which MT would count too.
    pub multithreaded: bool,
}

impl Features {
    /// Decodes ID_AA64DFR0_EL1, ID_AA64MMFR0_EL1 and MPIDR_EL1. `cpus` are the affinities
    /// (MPIDR_EL1) of all CPUs of the machine, this one's included. `None`: the CPU has no PMUv3.
    pub fn from_registers(
        id_aa64dfr0: u64,
        id_aa64mmfr0: u64,
        mpidr: u64,
        cpus: impl IntoIterator<Item = u64>,
    ) -> Option<Self> {
        let version = PmuVersion::from_id_aa64dfr0(id_aa64dfr0)?;
        Some(Self {
            version,
            // 2 is FEAT_FGT2, which contains FEAT_FGT.
            fgt: id_aa64mmfr0 >> 56 & 0xf != 0,
            hpmn0: id_aa64dfr0 >> 60 & 0xf == 1,
            // 0 leaves open whether MT works; only 0b1111 makes it RES0.
            mtpmu: id_aa64dfr0 >> 48 & 0xf != 0xf,
            multithreaded: shares_its_core(mpidr, cpus),
        })
    }
}

/// Whether another CPU has the affinity of `mpidr` from level 1 up, where level 0 numbers threads
/// (MPIDR_EL1.MT). MT alone says little: cores of one thread each set it too (Cortex-A55, A76,
/// Neoverse N1: all of a DynamIQ Shared Unit).
fn shares_its_core(mpidr: u64, cpus: impl IntoIterator<Item = u64>) -> bool {
    const MT: u64 = 1 << 24;
    // Aff3 stands apart from the others, in bits 39:32.
    const CORE: u64 = 0xff_00ff_ff00;
    const THREAD: u64 = 0xff;
    mpidr & MT != 0
        && cpus
            .into_iter()
            // The list has this CPU, too, which is no other thread.
            .any(|other| (other ^ mpidr) & CORE == 0 && (other ^ mpidr) & THREAD != 0)
}

/// The architecture's promises that [`probe`](super::probe()) has seen a CPU keep. No ID register has them. A promise
/// that is not proven is `false`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Isolation {
    /// MDCR_EL2.HPMN divides the counters: nothing that executes below EL2 sees or changes those
    /// at or above it, through any register. QEMU up to at least 10.0 does not keep this.
    pub partition: bool,
    /// MDCR_EL2.HPMD keeps the guest's event counters from counting at EL2 (PMUv3p1).
    pub hpmd: bool,
    /// MDCR_EL2.HCCD keeps the cycle counter from counting at EL2 (PMUv3p5).
    pub hccd: bool,
}

impl Isolation {
    /// What the architecture promises, from PMUv3p5 on.
    pub const ALL: Self = Self {
        partition: true,
        hpmd: true,
        hccd: true,
    };

    /// Nothing is promised: what to assume before the probe has run.
    pub const NONE: Self = Self {
        partition: false,
        hpmd: false,
        hccd: false,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_come_from_their_fields() {
        let all = Features {
            version: PmuVersion::V3p5,
            fgt: true,
            hpmn0: true,
            mtpmu: true,
            multithreaded: true,
        };
        let (hpmn0, mtpmu, fgt, mt) = (1 << 60, 1 << 48, 1 << 56, 1 << 24);
        let version = 6 << 8;
        let threads = [mt | 0x100, mt | 0x101];
        assert_eq!(
            Features::from_registers(hpmn0 | mtpmu | version, fgt, mt | 0x100, threads),
            Some(all)
        );
        let none = Features {
            fgt: false,
            hpmn0: false,
            mtpmu: false,
            multithreaded: false,
            ..all
        };
        assert_eq!(
            Features::from_registers(0xf << 48 | version, !(0xf << 56), 0x100, [0x100, 0x101]),
            Some(none)
        );
        assert_eq!(Features::from_registers(0, fgt, mt, threads), None);
    }

    #[test]
    fn cores_of_one_thread_share_nothing() {
        // Cortex-A76: MT is set, and the number of the core is at level 1. A device tree has the
        // affinities alone.
        let mpidr = 0x8100_0100;
        assert!(!shares_its_core(mpidr, [0, 0x100, 0x200]));
        assert!(shares_its_core(mpidr, [0, 0x100, 0x101]));
        assert!(!shares_its_core(mpidr, [0x100, 0x1_0000_0101]));
    }
}
