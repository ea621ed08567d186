//! The registers of one PMU, without its counters.

use super::{Capability, Interface, Msr, Pmu};
use crate::counter::{CounterHost, CounterSet, Events, Lost, Slots};
use crate::x86::{Control, CounterConfig, EventKind, RawPerfEvtSel, pmu};

/// Bits of PERF_CTL that Intel's register does not have (APM vol. 2, 13.2.1).
pub mod perf_ctl {
    /// Count events of the guest's own guests only.
    pub const GUEST_ONLY: u64 = 1 << 40;
    /// Count events of none of the guest's own guests.
    pub const HOST_ONLY: u64 = 1 << 41;
    /// Bits that keep what is written. Writes of the others are ignored.
    pub const EXISTING: u64 = 0x0000_030f_ffd7_ffff;
    /// The event of an odd counter that makes its even neighbour wider: families 17H and later.
    pub const MERGE: u16 = 0xfff;
}

/// Which bits of a counter exist.
pub(super) const COUNTER: u64 = (1 << 48) - 1;

/// The registers that are AMD's.
#[derive(Clone, Debug)]
pub struct Registers {
    pub(super) capability: Capability,
    /// PERF_CTL.
    pub(super) selects: Slots<RawPerfEvtSel>,
    /// PerfCntrGlobalCtl: all counters, where there is none.
    pub(super) global: CounterSet,
}

/// AMD's event select has 12 bits.
fn select(raw: RawPerfEvtSel) -> u16 {
    u16::from(raw.select()) | (raw.0 >> 24) as u16 & 0xf00
}

impl Registers {
    /// Whether `n` is a counter that exists.
    pub(super) fn existing(&self, n: u8) -> Option<u8> {
        (n < self.capability.count()).then_some(n)
    }

    /// Whether the counter pair that `n` is of is made one by the odd one's event.
    fn is_merged(&self, n: u8) -> bool {
        let odd = self.selects[n | 1];
        select(odd) == perf_ctl::MERGE && odd.has(RawPerfEvtSel::EN)
    }
}

impl pmu::Registers for Registers {
    type Capability = Capability;
    type Msr = Msr;

    /// Every counter is enabled globally, everything else is zero.
    fn power_on(capability: Capability) -> Self {
        Self {
            selects: Slots::default(),
            global: capability.counters(),
            capability,
        }
    }

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
        u8::try_from(ecx).ok().and_then(|n| self.existing(n))
    }

    fn capability(&self) -> &Capability {
        &self.capability
    }

    fn counters(&self) -> CounterSet {
        self.capability.counters()
    }

    fn counter_mask(&self, _: u8) -> u64 {
        COUNTER
    }

    fn control(&self, n: u8) -> Control {
        let raw = self.selects[n];
        let (select, umask) = (select(raw), raw.umask());
        let mut event = raw.counts(EventKind::Amd { select, umask });
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
            unsupported: (merged || absent).then_some(Lost::Unsupported),
        }
    }

    fn gate(&self) -> CounterSet {
        self.global
    }

    fn has_status(&self) -> bool {
        self.capability.interface >= Interface::V2
    }
}
