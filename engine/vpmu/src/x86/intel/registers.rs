//! The registers of one PMU by name (SDM vol. 4, table 2-2, "IA-32 Architectural MSRs"), and what accesses of them mean.
//!
//! A set bit that is reserved, an MSR that the capability lacks, and a write of a read-only MSR are
//! #GP(0), as the SDM has it for WRMSR and RDMSR. Only the high half of a write to IA32_PMCx is
//! ignored: the SDM replaces it by copies of bit 31 (20.2.8).

use super::capability::{FIXED, MAX_FIXED, MAX_GENERAL, when};
use super::{Capability, Version, debugctl, fixed_ctrl, global_status};
use crate::counter::{Counter, CounterSet, Lost, Slots};
use crate::x86::counters::{Control, Effect, Source};
use crate::x86::msr::msrs;
use crate::x86::status::Freeze;
use crate::x86::{EventKind, RawPerfEvtSel, pebs};

msrs! {
    /// An MSR that belongs to the PMU. The index in a register's number may name a counter that does not exist. Those
    /// [of PEBS](Self::is_of_pebs) exist only where PEBS is offered.
    Msr
    [each]
    /// IA32_PERFEVTSELx: what general counter x counts.
    PerfEvtSel = "IA32_PERFEVTSEL", 0x186 + 1 * MAX_GENERAL;
    /// IA32_PMCx: general counter x. Writes have 32 bits, and bit 31 is extended.
    Pmc = "IA32_PMC", 0xc1 + 1 * MAX_GENERAL;
    /// IA32_A_PMCx: general counter x. Writes have the counter's width.
    FullWidthPmc = "IA32_A_PMC", 0x4c1 + 1 * MAX_GENERAL;
    /// IA32_FIXED_CTRx: fixed counter x.
    FixedCtr = "IA32_FIXED_CTR", 0x309 + 1 * MAX_FIXED;
    [single]
    /// IA32_FIXED_CTR_CTRL: four bits for each fixed counter.
    FixedCtrCtrl = "IA32_FIXED_CTR_CTRL", 0x38d;
    /// IA32_PERF_GLOBAL_STATUS: who has overflowed.
    GlobalStatus = "IA32_PERF_GLOBAL_STATUS", 0x38e;
    /// IA32_PERF_GLOBAL_CTRL: who may count.
    GlobalCtrl = "IA32_PERF_GLOBAL_CTRL", 0x38f;
    /// IA32_PERF_GLOBAL_OVF_CTRL, from version 4 on IA32_PERF_GLOBAL_STATUS_RESET: clears bits of
    /// IA32_PERF_GLOBAL_STATUS.
    GlobalOvfCtrl = "IA32_PERF_GLOBAL_OVF_CTRL", 0x390;
    /// IA32_PERF_GLOBAL_STATUS_SET: sets bits of IA32_PERF_GLOBAL_STATUS. From version 4 on.
    GlobalStatusSet = "IA32_PERF_GLOBAL_STATUS_SET", 0x391;
    /// IA32_PERF_GLOBAL_INUSE: which counters are configured. From version 4 on.
    GlobalInuse = "IA32_PERF_GLOBAL_INUSE", 0x392;
    /// IA32_PERF_CAPABILITIES.
    PerfCapabilities = "IA32_PERF_CAPABILITIES", 0x345;
    /// IA32_DEBUGCTL, which the PMU shares with the debug facilities.
    DebugCtl = "IA32_DEBUGCTL", 0x1d9;
    /// IA32_PEBS_ENABLE: whose overflows write records.
    PebsEnable = "IA32_PEBS_ENABLE", 0x3f1;
    /// MSR_PEBS_DATA_CFG: what is in an adaptive record.
    PebsDataCfg = "MSR_PEBS_DATA_CFG", 0x3f2;
    /// IA32_DS_AREA: where the buffer is described.
    DsArea = "IA32_DS_AREA", 0x600;
}

impl Msr {
    /// Returns whether the MSR exists only with [`pebs`](crate::x86::pebs).
    pub const fn is_of_pebs(self) -> bool {
        matches!(self, Self::PebsEnable | Self::PebsDataCfg | Self::DsArea)
    }
}

/// The fixed counter that `counter` of a [`CounterSet`] is; `None`: it is a general one.
const fn fixed_index(counter: Counter) -> Option<u8> {
    counter.number().checked_sub(FIXED)
}

/// Returns counters as the global registers show them: general ones from bit 0, fixed ones from bit 32.
pub(in crate::x86) const fn to_global(counters: CounterSet) -> u64 {
    let bits = counters.bits();
    (bits & 0xffff) as u64 | ((bits >> FIXED) as u64) << 32
}

/// The other way round. Bits that are no counter's are dropped.
pub(super) const fn from_global(bits: u64) -> CounterSet {
    CounterSet::from_bits(bits as u32 & 0xffff | ((bits >> 32) as u32 & 0xffff) << FIXED)
}

/// The bits that the registers of a PMU lack. A write that sets one is #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Those of IA32_PERFEVTSELx.
    pub perfevtsel: u64,
    /// Those of IA32_FIXED_CTR_CTRL.
    pub fixed_ctrl: u64,
    /// Those of IA32_PERF_GLOBAL_CTRL, and of IA32_PEBS_ENABLE where that exists.
    pub global_ctrl: u64,
    /// Those of IA32_PERF_GLOBAL_OVF_CTRL.
    pub ovf_ctrl: u64,
    /// Those of IA32_PERF_GLOBAL_STATUS_SET.
    pub status_set: u64,
    /// Those of IA32_DEBUGCTL.
    pub debugctl: u64,
}

impl Capability {
    /// Returns the bits that this PMU's registers lack.
    pub const fn reserved(&self) -> Reserved {
        let counters = to_global(self.counters());
        let full = global_status::OVF_BUF | global_status::COND_CHGD;
        // LBR_FRZ can be cleared, as any version-4 handler may try to. Without LBR nothing sets it.
        let without = when(self.lbr.is_none(), global_status::LBR_FRZ);
        let frozen = self.freeze_bits() & !without;
        // Software finds freezing by PDCM and a version of 2 or later (SDM 18.4.7).
        let freeze = when(self.pdcm, debugctl::FREEZE_PERFMON_ON_PMI);
        let smm = when(self.freeze_while_smm, debugctl::FREEZE_WHILE_SMM);
        // Without records there is nothing to freeze: a guest that tries gets a fault, as on a processor without them.
        let branches = when(self.lbr.is_some(), debugctl::FREEZE_LBRS_ON_PMI);
        let adaptive = when(self.pebs.is_some(), RawPerfEvtSel::ADAPTIVE);
        Reserved {
            perfevtsel: RawPerfEvtSel::reserved(self.version) & !adaptive,
            fixed_ctrl: !self.fixed_ctrl_bits(),
            global_ctrl: !counters,
            ovf_ctrl: !(counters | full | self.freeze_bits()),
            status_set: !(counters | global_status::OVF_BUF | frozen),
            debugctl: !(freeze | smm | branches | self.other_debugctl),
        }
    }

    /// Bits of IA32_FIXED_CTR_CTRL that exist.
    const fn fixed_ctrl_bits(&self) -> u64 {
        let each = match self.version {
            Version::V2 | Version::V5 => fixed_ctrl::OS | fixed_ctrl::USR | fixed_ctrl::PMI,
            // AnyThread came with version 3, and went with version 5.
            Version::V3 | Version::V4 => 0xf,
        };
        let mut exist = 0;
        // By hand: iterators are not const.
        let mut n = 0;
        while n < MAX_FIXED {
            if self.fixed >> n & 1 != 0 {
                exist |=
                    fixed_ctrl::place(each, n) | when(self.pebs.is_some(), fixed_ctrl::adaptive(n));
            }
            n += 1;
        }
        exist
    }

    /// Bits of IA32_PERF_GLOBAL_STATUS that can be set and are no counter's.
    pub(super) const fn status_bits(&self) -> u64 {
        let counters = to_global(self.counters());
        !self.reserved().status_set & !counters | global_status::COND_CHGD
    }

    /// Status bits that came with version 4.
    const fn freeze_bits(&self) -> u64 {
        match self.version {
            Version::V2 | Version::V3 => 0,
            Version::V4 | Version::V5 => global_status::LBR_FRZ | global_status::CTR_FRZ,
        }
    }
}

/// The registers that are Intel's.
#[derive(Clone, Debug)]
pub(in crate::x86) struct Registers {
    pub(in crate::x86) capability: Capability,
    /// What the capability says, once for all writes.
    reserved: Reserved,
    /// IA32_PERFEVTSELx.
    pub(super) selects: Slots<RawPerfEvtSel>,
    /// IA32_FIXED_CTR_CTRL.
    pub(super) fixed_ctrl: u64,
    pub(super) debugctl: u64,
    /// Those of PEBS. Without it they do not exist, and are zero.
    pub(in crate::x86) pebs: pebs::Registers,
}

impl Registers {
    pub(in crate::x86) fn power_on(capability: Capability) -> Self {
        Self {
            capability,
            reserved: capability.reserved(),
            selects: Slots::default(),
            fixed_ctrl: 0,
            debugctl: 0,
            pebs: pebs::Registers::default(),
        }
    }

    pub(in crate::x86) fn read(&self, msr: Msr) -> Option<Source> {
        Some(Source::Register(match msr {
            Msr::Pmc(n) => return Some(Source::Counter(self.general(n)?)),
            Msr::FullWidthPmc(n) => return Some(Source::Counter(self.full_width(n)?)),
            Msr::FixedCtr(n) => return Some(Source::Counter(self.fixed(n)?)),
            Msr::GlobalStatus => return Some(Source::Status),
            Msr::GlobalCtrl => return Some(Source::Gate),
            Msr::PerfEvtSel(n) => self.selects[self.general(n)?].0,
            Msr::FixedCtrCtrl => self.fixed_ctrl,
            // It keeps nothing: a write clears what it names.
            Msr::GlobalOvfCtrl => 0,
            Msr::GlobalStatusSet => self.since_v4(0)?,
            Msr::GlobalInuse => self.since_v4(self.in_use())?,
            Msr::PerfCapabilities => {
                let pdcm = self.capability.pdcm;
                pdcm.then(|| self.capability.perf_capabilities())?
            }
            Msr::DebugCtl => self.debugctl,
            Msr::PebsEnable => self.with_pebs(self.pebs.enable)?,
            Msr::PebsDataCfg => self.with_pebs(self.pebs.data_cfg)?,
            Msr::DsArea => self.with_pebs(self.pebs.ds_area)?,
        }))
    }

    pub(in crate::x86) fn write(&mut self, msr: Msr, value: u64) -> Option<Effect> {
        let capability = &self.capability;
        let reserved = self.reserved;
        let fits = |lacking: u64| (value & lacking == 0).then_some(());
        // Counters' bits anywhere in a global register, whether or not they exist.
        let others = value & !to_global(CounterSet::from_bits(u32::MAX));
        Some(match msr {
            Msr::PerfEvtSel(n) => {
                let n = self.general(n)?;
                fits(reserved.perfevtsel)?;
                self.selects[n] = RawPerfEvtSel(value);
                Effect::Configure(n.alone())
            }
            Msr::Pmc(n) => {
                let n = self.general(n)?;
                // Software before full-width writes sets a negative period by 32 bits.
                let extended = i64::from(value as u32 as i32) as u64;
                Effect::Counter(n, extended & capability.counter_mask(n))
            }
            Msr::FullWidthPmc(n) => self.counter(self.full_width(n)?, value)?,
            Msr::FixedCtr(n) => self.counter(self.fixed(n)?, value)?,
            Msr::FixedCtrCtrl => {
                fits(reserved.fixed_ctrl)?;
                self.fixed_ctrl = value;
                // All fixed counters share this register.
                Effect::Configure(from_global(!0 << 32))
            }
            Msr::GlobalCtrl => {
                fits(reserved.global_ctrl)?;
                Effect::Gate(from_global(value))
            }
            Msr::GlobalOvfCtrl => {
                fits(reserved.ovf_ctrl)?;
                Effect::ClearStatus(from_global(value), others)
            }
            Msr::GlobalStatusSet => {
                self.since_v4(0)?;
                fits(reserved.status_set)?;
                Effect::SetStatus(from_global(value), others)
            }
            Msr::DebugCtl => {
                fits(reserved.debugctl)?;
                match core::mem::replace(&mut self.debugctl, value) == value {
                    true => Effect::Nothing,
                    false => Effect::Freezing,
                }
            }
            Msr::PebsEnable => {
                self.with_pebs(0)?;
                fits(reserved.global_ctrl)?;
                self.pebs.enable = value;
                // Each bit decides about another counter.
                Effect::Configure(self.capability.counters())
            }
            Msr::PebsDataCfg => {
                fits(capability.pebs?.data_cfg_reserved())?;
                self.pebs.data_cfg = value;
                Effect::RecordGroups
            }
            Msr::DsArea => {
                capability.pebs?.is_linear(value).then_some(())?;
                self.pebs.ds_area = value;
                Effect::RecordArea
            }
            Msr::GlobalStatus | Msr::GlobalInuse | Msr::PerfCapabilities => return None,
        })
    }

    pub(in crate::x86) fn indexed(&self, ecx: u32) -> Option<Counter> {
        // The upper half chooses the kind of counter (SDM vol. 2B, RDPMC).
        match (ecx >> 16, u8::try_from(ecx & 0xffff)) {
            (0, Ok(n)) => self.general(n),
            (0x4000, Ok(n)) => self.fixed(n),
            _ => None,
        }
    }

    pub(in crate::x86) fn control(&self, n: Counter) -> Control {
        let (event, on, interrupts, any_thread, adaptive) = match fixed_index(n) {
            Some(fixed) => {
                let has = |bit| fixed_ctrl::field(self.fixed_ctrl, fixed) & bit != 0;
                (
                    fixed_ctrl::config(self.fixed_ctrl, fixed),
                    // A fixed counter has no enable bit of its own: without a ring it stands still.
                    true,
                    has(fixed_ctrl::PMI),
                    has(fixed_ctrl::ANY_THREAD),
                    self.fixed_ctrl & fixed_ctrl::adaptive(fixed) != 0,
                )
            }
            None => {
                let raw = self.selects[n];
                (
                    raw.config(self.capability.version),
                    raw.has(RawPerfEvtSel::EN),
                    raw.has(RawPerfEvtSel::INT),
                    raw.has(RawPerfEvtSel::ANY_THREAD),
                    raw.has(RawPerfEvtSel::ADAPTIVE),
                )
            }
        };
        // With a condition it is no other event, unless that makes cycles of it.
        let named = event.architectural().or(event.event.architectural());
        let absent = match (event.event, named) {
            (EventKind::General { .. }, Some(event)) => !self.capability.has_event(event),
            _ => false,
        };
        Control {
            event,
            on,
            interrupts,
            records: to_global(n.alone()) & self.pebs.enable != 0,
            adaptive,
            // The other threads of the core are not the guest's, whatever CPUID says.
            unsupported: (any_thread || absent).then_some(Lost::Unsupported),
            mask: self.capability.counter_mask(n),
        }
    }

    /// Returns how the request of a PMI stops the counters, and whether it stops the last branch records: SDM 18.4.7.
    pub(in crate::x86) fn freezing(&self) -> (Option<Freeze>, bool) {
        let style = match self.capability.version {
            Version::V2 | Version::V3 => Freeze::Gate,
            Version::V4 | Version::V5 => Freeze::Status,
        };
        let has = |bit| self.debugctl & bit != 0;
        (
            has(debugctl::FREEZE_PERFMON_ON_PMI).then_some(style),
            has(debugctl::FREEZE_LBRS_ON_PMI),
        )
    }

    /// Returns the number of general counter `n`, if it exists.
    fn general(&self, n: u8) -> Option<Counter> {
        Counter::new(n).filter(|_| n < self.capability.general)
    }

    /// Returns the number of fixed counter `n`, if it exists.
    fn fixed(&self, n: u8) -> Option<Counter> {
        let counter = Counter::new(n.checked_add(FIXED)?)?;
        self.capability
            .counters()
            .contains(counter)
            .then_some(counter)
    }

    /// Returns the number of general counter `n`, if it exists and can be written in full width.
    fn full_width(&self, n: u8) -> Option<Counter> {
        self.general(n)
            .filter(|_| self.capability.full_width_writes)
    }

    /// Says what it does to write all of counter `n`.
    fn counter(&self, n: Counter, value: u64) -> Option<Effect> {
        let fits = value & !self.capability.counter_mask(n) == 0;
        fits.then_some(Effect::Counter(n, value))
    }

    fn with_pebs(&self, value: u64) -> Option<u64> {
        self.capability.pebs.map(|_| value)
    }

    fn since_v4(&self, value: u64) -> Option<u64> {
        (self.capability.version >= Version::V4).then_some(value)
    }

    /// Returns IA32_PERF_GLOBAL_INUSE: counters with an event select or an enable field that is not
    /// zero, and bit 63 if a counter asks for an interrupt or for records (SDM 20.2.4.3).
    fn in_use(&self) -> u64 {
        let mut used = CounterSet::EMPTY;
        let mut reported = false;
        for n in self.capability.counters() {
            let is_used = match fixed_index(n) {
                Some(fixed) => {
                    let field = fixed_ctrl::field(self.fixed_ctrl, fixed);
                    field & (fixed_ctrl::OS | fixed_ctrl::USR) != 0
                }
                None => self.selects[n].select() != 0,
            };
            used.put(n, is_used);
            let control = self.control(n);
            reported |= control.interrupts || control.records;
        }
        to_global(used) | u64::from(reported) << 63
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_each_others_inverse() {
        for msr in Msr::all() {
            assert_eq!(Msr::decode(msr.address()), Some(msr));
        }
        let decoded = (0..0x2000).filter_map(Msr::decode).count();
        assert_eq!(decoded, Msr::all().count(), "nothing else is taken");
    }

    #[test]
    fn the_neighbours_are_left_alone() {
        for address in [
            0xc0,
            0xc9,
            0x185,
            0x18e,
            0x198,
            0x308,
            0x310,
            0x38c,
            0x393,
            0x3f0,
            0x3f3,
            0x3f6,
            0x4c0,
            0x4c9,
            0x5ff,
            0x601,
            u32::MAX,
        ] {
            assert_eq!(Msr::decode(address), None, "{address:#x}");
        }
    }

    #[test]
    fn counters_have_their_places_in_the_global_registers() {
        let some = CounterSet::from_bits(1 << 3 | 1 << (FIXED + 2));
        assert_eq!(to_global(some), 1 << 3 | 1 << 34);
        assert_eq!(from_global(1 << 3 | 1 << 34 | 1 << 59 | 1 << 20), some);
    }
}
