//! The registers of one PMU, and what accesses of them mean.
//!
//! A set bit that is reserved, an MSR that the capability lacks, and a write of a read-only MSR are
//! #GP(0), as the SDM has it for WRMSR and RDMSR. Only the high half of a write to IA32_PMCx is
//! ignored: the SDM replaces it by copies of bit 31 (20.2.8).

use super::msr::{fixed_index, from_global};
use super::{Capability, FIXED, Msr, Reserved, Version, debugctl, fixed_ctrl, to_global};
use crate::counter::{Counter, CounterSet, Lost, Slots};
use crate::x86::registers::{Control, Effect, Source};
use crate::x86::status::Freeze;
use crate::x86::{EventKind, RawPerfEvtSel, pebs};

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
    /// There where the capability has PEBS.
    pub(in crate::x86) pebs: Option<pebs::Registers>,
}

impl Registers {
    pub(in crate::x86) fn power_on(capability: Capability) -> Self {
        Self {
            capability,
            reserved: capability.reserved(),
            selects: Slots::default(),
            fixed_ctrl: 0,
            debugctl: 0,
            pebs: capability.pebs.map(|_| pebs::Registers::default()),
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
            Msr::PebsEnable => self.pebs.as_ref()?.enable,
            Msr::PebsDataCfg => self.pebs.as_ref()?.data_cfg,
            Msr::DsArea => self.pebs.as_ref()?.ds_area,
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
                // Each bit decides about another counter.
                let all = capability.counters();
                let registers = self.pebs.as_mut()?;
                fits(reserved.global_ctrl)?;
                registers.enable = value;
                Effect::Configure(all)
            }
            Msr::PebsDataCfg => {
                fits(capability.pebs?.data_cfg_reserved())?;
                self.pebs.as_mut()?.data_cfg = value;
                Effect::RecordGroups
            }
            Msr::DsArea => {
                capability.pebs?.is_linear(value).then_some(())?;
                self.pebs.as_mut()?.ds_area = value;
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
        let recorded = self.pebs.map_or(0, |pebs| pebs.enable);
        Control {
            event,
            on,
            interrupts,
            records: to_global(n.alone()) & recorded != 0,
            adaptive,
            // The other threads of the core are not the guest's, whatever CPUID says.
            unsupported: (any_thread || absent).then_some(Lost::Unsupported),
            mask: self.capability.counter_mask(n),
        }
    }

    /// SDM 18.4.7.
    pub(in crate::x86) fn freezing(&self) -> Option<Freeze> {
        let style = match self.capability.version {
            Version::V2 | Version::V3 => Freeze::Gate,
            Version::V4 | Version::V5 => Freeze::Status,
        };
        (self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI != 0).then_some(style)
    }

    pub(in crate::x86) fn freezes_branches(&self) -> bool {
        self.debugctl & debugctl::FREEZE_LBRS_ON_PMI != 0
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
