//! The registers of one PMU, without its counters.

use super::config::fixed_index;
use super::{Capability, FIXED, Msr, Pmu, Version, debugctl, fixed_ctrl, global_status, to_global};
use crate::counter::{CounterHost, CounterSet, Events, Lost, Slots};
use crate::x86::{Control, CounterConfig, EventKind, RawPerfEvtSel, pebs, pmu};

/// The registers that are Intel's.
#[derive(Clone, Debug)]
pub struct Registers {
    pub(in crate::x86) capability: Capability,
    /// IA32_PERFEVTSELx.
    pub(super) selects: Slots<RawPerfEvtSel>,
    /// IA32_FIXED_CTR_CTRL.
    pub(super) fixed_ctrl: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub(super) global: CounterSet,
    /// Bits in IA32_PERF_GLOBAL_STATUS that are no counter's.
    pub(super) status: u64,
    pub(super) debugctl: u64,
    pub(in crate::x86) pebs: pebs::Registers,
}

impl pmu::Registers for Registers {
    type Capability = Capability;
    type Msr = Msr;

    fn decode(address: u32) -> Option<Msr> {
        Msr::decode(address)
    }

    fn read<V: Events, H: CounterHost<CounterConfig>>(
        pmu: &mut Pmu<V>,
        msr: Msr,
        host: &mut H,
    ) -> Option<u64> {
        pmu.read_existing(msr, host)
    }

    fn write<V: Events, H: CounterHost<CounterConfig>>(
        pmu: &mut Pmu<V>,
        msr: Msr,
        value: u64,
        host: &mut H,
    ) -> Option<()> {
        pmu.write_existing(msr, value, host)
    }

    fn indexed(&self, ecx: u32) -> Option<u8> {
        match (ecx >> 16, u8::try_from(ecx & 0xffff)) {
            (0, Ok(n)) => self.general(n),
            (0x4000, Ok(n)) => self.fixed(n),
            _ => None,
        }
    }

    /// General counters are enabled globally (SDM vol. 3A, table 10-1), everything else is zero.
    fn power_on(capability: Capability) -> Self {
        Self {
            capability,
            selects: Slots::default(),
            fixed_ctrl: 0,
            global: CounterSet::first(capability.general),
            status: 0,
            debugctl: 0,
            pebs: pebs::Registers::default(),
        }
    }

    fn record<V: Events, H: CounterHost<CounterConfig>>(pmu: &mut Pmu<V>, host: &mut H) {
        pmu.record(host);
    }

    fn record_groups(&self, n: u8) -> u64 {
        let adaptive = match fixed_index(n) {
            Some(fixed) => self.fixed_ctrl & fixed_ctrl::adaptive(fixed) != 0,
            None => self.selects[n].has(RawPerfEvtSel::ADAPTIVE),
        };
        if adaptive { self.pebs.data_cfg } else { 0 }
    }

    fn capability(&self) -> &Capability {
        &self.capability
    }

    fn counters(&self) -> CounterSet {
        self.capability.counters()
    }

    fn counter_mask(&self, n: u8) -> u64 {
        self.capability.counter_mask(n)
    }

    fn control(&self, n: u8) -> Control {
        let (event, on, interrupts, any_thread) = match fixed_index(n) {
            Some(fixed) => {
                let has = |bit| fixed_ctrl::field(self.fixed_ctrl, fixed) & bit != 0;
                (
                    fixed_ctrl::config(self.fixed_ctrl, fixed),
                    true,
                    has(fixed_ctrl::PMI),
                    has(fixed_ctrl::ANY_THREAD),
                )
            }
            None => {
                let raw = self.selects[n];
                (
                    raw.config(self.capability.version),
                    raw.has(RawPerfEvtSel::EN),
                    raw.has(RawPerfEvtSel::INT),
                    raw.has(RawPerfEvtSel::ANY_THREAD),
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
            records: to_global(CounterSet::of(n)) & self.pebs.enable != 0,
            // The other threads of the core are not the guest's, whatever it is told.
            unsupported: (any_thread || absent).then_some(Lost::Unsupported),
        }
    }

    fn gate(&self) -> CounterSet {
        if self.status & global_status::CTR_FRZ != 0 {
            return CounterSet::EMPTY;
        }
        self.global
    }

    fn freezes(&self) -> bool {
        self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI != 0
    }

    /// SDM 19.4.7.
    fn freeze(&mut self) {
        if !self.freezes() {
            return;
        }
        if self.capability.version >= Version::V4 {
            self.status |= global_status::CTR_FRZ;
        } else {
            self.global = CounterSet::EMPTY;
        }
    }
}

impl Registers {
    /// The guest's PEBS buffer has filled up to its threshold.
    pub(in crate::x86) fn set_buffer_overflow(&mut self) {
        self.status |= global_status::OVF_BUF;
    }

    /// The number of general counter `n`, if it exists.
    pub(super) fn general(&self, n: u8) -> Option<u8> {
        (n < self.capability.general).then_some(n)
    }

    /// The number of fixed counter `n`, if it exists.
    pub(super) fn fixed(&self, n: u8) -> Option<u8> {
        let counter = n.checked_add(FIXED)?;
        self.capability
            .counters()
            .contains(counter)
            .then_some(counter)
    }
}
