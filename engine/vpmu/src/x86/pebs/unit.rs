//! What becomes of an overflow whose counter asks for a record.

use core::num::NonZeroU64;

use super::area::Area;
use super::record::{Record, data_cfg};
use super::sampling::SampledCounters;
use super::{Fault, Guest, Registers, Statistics};
use crate::counter::{Counter, CounterHost, CounterSet, Events, count};
use crate::x86::counters::Counters;
use crate::x86::{CounterConfig, intel, lbr, status};

/// The part of a PMU that writes records: its registers, and which counters the host samples for it.
#[derive(Clone, Debug, Default)]
pub(in crate::x86) struct Unit {
    /// What the guest has written, as it was last adopted.
    pub(in crate::x86) registers: Registers,
    pub(super) sampling: SampledCounters,
    pub(super) statistics: Statistics,
}

/// A counter that has overflowed.
struct Overflow {
    counter: Counter,
    config: CounterConfig,
    /// The groups of its record.
    groups: u64,
}

impl Unit {
    pub(in crate::x86) fn new(registers: Registers) -> Self {
        Self {
            registers,
            ..Self::default()
        }
    }

    /// Goes back to power-on reset. The statistics go on.
    pub(in crate::x86) fn reset(&mut self) {
        *self = Self {
            statistics: self.statistics,
            ..Self::default()
        };
    }

    /// Returns whether the host samples a counter.
    pub(in crate::x86) fn is_sampling(&self) -> bool {
        !self.sampling.counters().is_empty()
    }

    /// Returns what became of the overflows of counters that ask for records.
    pub(in crate::x86) const fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Writes the records of the counters that have overflowed, lowest first, and before them those that the host has
    /// sampled.
    pub(in crate::x86) fn record<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        // Taken first: what follows can count, and overflow anew.
        let unrecorded = counters.take_unrecorded();
        let sampled = unrecorded & self.sampling.counters();
        for n in sampled {
            self.pass_sampled(n, counters);
        }
        if self.is_sampling() {
            self.convert(sampled, counters, host);
        }
        for n in unrecorded - sampled {
            let has_branches = self.groups(n, counters) & data_cfg::BRANCHES != 0;
            if !(has_branches && counters.hold_record(n)) {
                self.record_overflow(n, counters, host);
            }
        }
    }

    /// Writes the record of `n`, which has overflowed and is not sampled.
    fn record_overflow<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        let overflow = Overflow {
            counter: n,
            config: counters.control(n).event,
            groups: self.groups(n, counters),
        };
        // Read anew for each: the guest's handler empties the buffer between two overflows.
        let area = self.registers.ds_area;
        let head = match host.pebs() {
            Some(guest) => Area::read(guest, area)
                .and_then(|area| Ok((area.reset(guest, n)?, area)))
                .map(|(reset, area)| (guest, reset, area)),
            None => Err(Fault),
        };
        // Without an area there is no reset value either: the counter goes on as any other.
        let Ok((guest, reset, mut area)) = head else {
            count(&mut self.statistics.lost);
            return;
        };
        // Before the record, as the processor does it: a record that is lost costs one sample, not the period.
        self.reload(n, reset, counters);
        let branches = counters.lbr.as_ref().and_then(lbr::Unit::last);
        match overflow.write(guest, &mut area, branches) {
            Ok(true) => count(&mut self.statistics.records),
            Ok(false) => {
                count(&mut self.statistics.filtered);
                return;
            }
            Err(Fault) => count(&mut self.statistics.lost),
        }
        if area.is_due() {
            counters.set_status(CounterSet::EMPTY, status::BUFFER_OVERFLOW);
            counters.request_pmi();
        }
        self.begin_sampling(n, reset, &area, counters, host);
    }

    /// Returns the groups of a record of counter `n`, beyond the basic one.
    pub(super) fn groups<V: Events>(&self, n: Counter, counters: &Counters<V>) -> u64 {
        if counters.control(n).adaptive {
            self.registers.data_cfg
        } else {
            0
        }
    }

    /// Counter `n`, which has passed its end, goes on from `reset` with what it has counted since.
    fn reload<V: Events>(&mut self, n: Counter, reset: u64, counters: &mut Counters<V>) {
        let mask = counters.control(n).mask;
        let reset = reset & mask;
        // 1 to 2^63.
        let Some(period) = NonZeroU64::new((mask - reset).wrapping_add(1)) else {
            return;
        };
        let beyond = counters.value(n);
        counters.set_value(n, reset.wrapping_add(beyond % period) & mask);
        self.statistics.skipped = self.statistics.skipped.wrapping_add(beyond / period);
    }
}

impl Overflow {
    /// Writes its record. `false`: it is to have none.
    fn write(
        &self,
        guest: &mut dyn Guest,
        area: &mut Area,
        branches: Option<&lbr::Stack>,
    ) -> Result<bool, Fault> {
        let sample = guest.sample()?;
        if !self.config.counts_in(sample.ring) {
            return Ok(false);
        }
        let counters = intel::to_global(CounterSet::of(self.counter));
        let record = Record::new(guest, self.groups, counters, sample, branches)?;
        area.append(guest, record.bytes())?;
        Ok(true)
    }
}
