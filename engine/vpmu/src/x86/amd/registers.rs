//! The registers of one PMU by name (the PPRs' lists of MSRs; APM vol. 2, appendix A), and what accesses of them mean.
//!
//! An MSR that the capability does not have is #GP(0). Nothing else is: AMD's processors ignore what is written to
//! reserved bits, and to PerfCntrGlobalStatus, which is read-only (the PPRs' register descriptions).

use super::{Capability, Interface, MAX_COUNTERS, PmuState};
use crate::counter::{Counter, CounterSet, Events, Lost, Slots};
use crate::x86::counters::{Control, Counters, Effect, Global, Source};
use crate::x86::msr::msrs;
use crate::x86::restore::{fits, layout_fits, lbr_fits};
use crate::x86::{EventKind, RawPerfEvtSel, RestoreError, lbr};

const LEGACY: u8 = 4;

msrs! {
    /// An MSR that belongs to the PMU. The number of one that is there several times may be of a counter that does
    /// not exist. The old names reach the same counters on every interface.
    Msr
    [each]
    // Four controls, then four counters: the pairs came with the core extension.
    /// PERF_LEGACY_CTL: another name of [`Ctl`](Self::Ctl) 0 to 3.
    LegacyCtl = "PERF_LEGACY_CTL", 0xc001_0000 + 1 * LEGACY;
    /// PERF_LEGACY_CTR: another name of [`Ctr`](Self::Ctr) 0 to 3.
    LegacyCtr = "PERF_LEGACY_CTR", 0xc001_0004 + 1 * LEGACY;
    /// PERF_CTL: what a counter counts. From the core extension on.
    Ctl = "PERF_CTL", 0xc001_0200 + 2 * MAX_COUNTERS;
    /// PERF_CTR: a counter. From the core extension on.
    Ctr = "PERF_CTR", 0xc001_0201 + 2 * MAX_COUNTERS;
    [single]
    /// PerfCntrGlobalStatus: who has overflowed. PerfMonV2, as all that follow.
    GlobalStatus = "PerfCntrGlobalStatus", 0xc000_0300;
    /// PerfCntrGlobalCtl: who may count.
    GlobalCtl = "PerfCntrGlobalCtl", 0xc000_0301;
    /// PerfCntrGlobalStatusClr: clears bits of PerfCntrGlobalStatus.
    GlobalStatusClr = "PerfCntrGlobalStatusClr", 0xc000_0302;
    /// PerfCntrGlobalStatusSet: sets bits of PerfCntrGlobalStatus.
    GlobalStatusSet = "PerfCntrGlobalStatusSet", 0xc000_0303;
}

/// Bits of PERF_CTL that Intel's register does not have (APM vol. 2, 13.2.1).
pub mod perf_ctl {
    /// Count events of the guest's own guests only.
    pub const GUEST_ONLY: u64 = 1 << 40;
    /// Count events of none of the guest's own guests.
    pub const HOST_ONLY: u64 = 1 << 41;
    /// Bits that keep what is written. Writes of the others are ignored.
    // Without bits 19 and 21: pin control and AnyThread are Intel's.
    pub const EXISTING: u64 = 0x0000_030f_ffd7_ffff;
    /// The event of an odd counter that makes its even neighbour wider: families 17H and later.
    pub const MERGE: u16 = 0xfff;
}

/// Which bits of a counter exist.
// No CPUID leaf says the width. Linux takes 48 bits for granted (arch/x86/events/amd/core.c, `cntval_bits`).
const COUNTER: u64 = (1 << 48) - 1;

/// The registers that are AMD's.
#[derive(Clone, Debug)]
pub(in crate::x86) struct Registers {
    pub(in crate::x86) capability: Capability,
    /// PERF_CTL.
    selects: Slots<RawPerfEvtSel>,
}

/// AMD's event select has 12 bits.
fn select(raw: RawPerfEvtSel) -> u16 {
    u16::from(raw.select()) | (raw.0 >> 24) as u16 & 0xf00
}

impl Registers {
    /// Returns `n`, if it is a counter that exists.
    fn existing(&self, n: u8) -> Option<Counter> {
        Counter::new(n).filter(|_| n < self.capability.count())
    }

    /// Returns whether the event of the odd counter merges the pair of counters that `n` belongs to.
    fn is_merged(&self, n: Counter) -> bool {
        let odd = self.selects[n.odd()];
        select(odd) == perf_ctl::MERGE && odd.has(RawPerfEvtSel::EN)
    }

    /// `None`: the interface does not have `msr`.
    fn check_interface(&self, msr: Msr) -> Option<()> {
        let since = match msr {
            Msr::LegacyCtl(_) | Msr::LegacyCtr(_) => Interface::Legacy,
            Msr::Ctl(_) | Msr::Ctr(_) => Interface::Core,
            Msr::GlobalStatus | Msr::GlobalCtl | Msr::GlobalStatusClr | Msr::GlobalStatusSet => {
                Interface::V2
            }
        };
        (self.capability.interface >= since).then_some(())
    }

    pub(in crate::x86) fn power_on(capability: Capability) -> Self {
        Self {
            selects: Slots::default(),
            capability,
        }
    }

    pub(in crate::x86) fn read(&self, msr: Msr) -> Option<Source> {
        self.check_interface(msr)?;
        Some(match msr {
            Msr::LegacyCtl(n) | Msr::Ctl(n) => Source::Register(self.selects[self.existing(n)?].0),
            Msr::LegacyCtr(n) | Msr::Ctr(n) => Source::Counter(self.existing(n)?),
            Msr::GlobalStatus => Source::Status,
            Msr::GlobalCtl => Source::Gate,
            Msr::GlobalStatusClr | Msr::GlobalStatusSet => Source::Register(0),
        })
    }

    pub(in crate::x86) fn write(&mut self, msr: Msr, value: u64) -> Option<Effect> {
        self.check_interface(msr)?;
        // Bits of counters that do not exist are ignored, as all reserved bits.
        let counters = CounterSet::from_bits(value as u32) & self.capability.counters();
        let others = value & self.capability.status_bits();
        Some(match msr {
            Msr::LegacyCtl(n) | Msr::Ctl(n) => {
                let n = self.existing(n)?;
                self.selects[n] = RawPerfEvtSel(value & perf_ctl::EXISTING);
                // An odd one may change what its even neighbour is.
                Effect::Configure(n.alone() | n.even().alone())
            }
            Msr::LegacyCtr(n) | Msr::Ctr(n) => Effect::Counter(self.existing(n)?, value & COUNTER),
            // Read-only, and AMD's processors ignore such a write.
            Msr::GlobalStatus => Effect::Nothing,
            Msr::GlobalCtl => Effect::Gate(counters),
            Msr::GlobalStatusClr => Effect::ClearStatus(counters, others),
            Msr::GlobalStatusSet => Effect::SetStatus(counters, others),
        })
    }

    pub(in crate::x86) fn indexed(&self, ecx: u32) -> Option<Counter> {
        u8::try_from(ecx).ok().and_then(|n| self.existing(n))
    }

    pub(in crate::x86) fn control(&self, n: Counter) -> Control {
        let raw = self.selects[n];
        let (select, umask) = (select(raw), raw.umask());
        let mut event = raw.counts(EventKind::Amd { select, umask });
        // Linux pairs counters for events that happen more than 15 times a cycle. No host event backs a pair.
        let merged = self.is_merged(n) || select == perf_ctl::MERGE;
        if merged {
            // Merge takes no rings: without any it would pass for a counter that stands still.
            (event.user, event.kernel) = (true, true);
        }
        let absent = event
            .event
            .architectural()
            .is_some_and(|event| !self.capability.has_event(event));
        // With either bit, a counter counts only while EFER.SVME is set, which no guest with this PMU can.
        let restricted = raw.0 & (perf_ctl::GUEST_ONLY | perf_ctl::HOST_ONLY) != 0;
        Control {
            event,
            on: raw.has(RawPerfEvtSel::EN) && !restricted,
            interrupts: raw.has(RawPerfEvtSel::INT),
            records: false,
            adaptive: false,
            unsupported: (merged || absent).then_some(Lost::Unsupported),
            mask: COUNTER,
        }
    }

    pub(in crate::x86) fn save<V: Events>(&self, counters: &Counters<V>) -> PmuState {
        let interface = self.capability.interface;
        // What a guest cannot read is zero, so that equal guests have equal states. The engine's own note of who has
        // overflowed goes with it, which costs the next owner of the state a call and no count.
        let global = |counters: CounterSet| match interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => counters.bits().into(),
        };
        let mut state = PmuState {
            layout: PmuState::LAYOUT,
            interface,
            perf_ctl: [0; MAX_COUNTERS as usize],
            perf_ctr: [0; MAX_COUNTERS as usize],
            global_ctl: global(counters.global.gate),
            global_status: global(counters.global.overflowed) | counters.global.status,
            pmi_due: counters.global.pmi_due,
            lbr: counters.lbr.save_amd(),
        };
        for ((n, value), raw) in Counter::all()
            .zip(&mut state.perf_ctr)
            .zip(&mut state.perf_ctl)
        {
            *value = counters.value(n);
            *raw = self.selects[n].0;
        }
        state
    }

    pub(in crate::x86) fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        layout_fits(state.layout, PmuState::LAYOUT)?;
        if state.interface != self.capability.interface {
            return Err(RestoreError::Interface {
                saved: state.interface,
                offered: self.capability.interface,
            });
        }
        for ((n, &value), &raw) in Counter::all().zip(&state.perf_ctr).zip(&state.perf_ctl) {
            // No bit of a counter that does not exist.
            let (control, counter) = match self.capability.counters().contains(n) {
                true => (perf_ctl::EXISTING, COUNTER),
                false => (0, 0),
            };
            fits("PERF_CTL", raw, !control)?;
            // A value beyond the width would make the distance to an overflow negative.
            fits("PERF_CTR", value, !counter)?;
        }
        let global = match state.interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => self.capability.counters().bits().into(),
        };
        fits("PerfCntrGlobalCtl", state.global_ctl, !global)?;
        let status = global | self.capability.status_bits();
        fits("PerfCntrGlobalStatus", state.global_status, !status)?;
        let lbr = self.capability.offered_lbr();
        lbr_fits(state.lbr.as_ref(), lbr.as_ref(), lbr::amd::State::check)
    }

    pub(in crate::x86) fn restore<V: Events>(
        &mut self,
        state: &PmuState,
        counters: &mut Counters<V>,
    ) {
        let global = &mut counters.global;
        *global = Global {
            pmi_due: state.pmi_due,
            // Interfaces without the register let every counter count.
            gate: self.capability.counters(),
            ..Global::default()
        };
        if state.interface >= Interface::V2 {
            global.gate = CounterSet::from_bits(state.global_ctl as u32);
            global.overflowed = CounterSet::from_bits(state.global_status as u32);
            global.status = state.global_status & self.capability.status_bits();
        }
        for ((n, &value), &raw) in Counter::all().zip(&state.perf_ctr).zip(&state.perf_ctl) {
            counters.set_value(n, value);
            self.selects[n] = RawPerfEvtSel(raw);
        }
        if let Some(state) = &state.lbr {
            counters.lbr.restore_amd(state);
        }
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
        let near = (0xc000_0000..0xc000_2000).chain(0xc001_0000..0xc001_2000);
        let decoded = near.filter_map(Msr::decode).count();
        assert_eq!(decoded, Msr::all().count(), "nothing else is taken");
    }
}
