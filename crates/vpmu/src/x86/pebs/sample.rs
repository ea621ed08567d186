//! What becomes of an overflow.

use core::num::NonZeroU64;

use super::area::Area;
use super::record::Record;
use super::{Fault, Guest, Statistics};
use crate::counter::{CounterHost, CounterSet, Events, Model, count};
use crate::x86::pmu::Registers;
use crate::x86::{CounterConfig, Pmu, intel};

/// A counter that has overflowed.
struct Overflow {
    counter: u8,
    config: CounterConfig,
    /// The groups of its record.
    groups: u64,
}

impl<V: Events> intel::Pmu<V> {
    /// Writes the records of the counters that have overflowed, lowest first, and before them those that the host has
    /// sampled.
    pub(in crate::x86) fn record<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let unrecorded = core::mem::take(&mut self.unrecorded);
        let sampled = unrecorded & self.sampling.counters();
        for n in sampled {
            self.pass_sampled(n);
        }
        if !self.sampling.counters().is_empty() {
            self.convert(sampled, host);
        }
        for n in unrecorded - sampled {
            let overflow = Overflow {
                counter: n,
                config: self.event(n),
                groups: self.registers.record_groups(n),
            };
            let area = self.registers.pebs.ds_area;
            let head = match host.pebs() {
                Some(guest) => Area::read(guest, area)
                    .and_then(|area| Ok((area.reset(guest, n)?, area)))
                    .map(|(reset, area)| (guest, reset, area)),
                None => Err(Fault),
            };
            // Without an area there is no reset value either: the counter goes on as any other.
            let Ok((guest, reset, mut area)) = head else {
                count(&mut self.pebs.lost);
                continue;
            };
            self.reload(n, reset);
            match overflow.write(guest, &mut area) {
                Ok(true) => count(&mut self.pebs.records),
                Ok(false) => {
                    count(&mut self.pebs.filtered);
                    continue;
                }
                Err(Fault) => count(&mut self.pebs.lost),
            }
            if area.is_due() {
                self.registers.set_buffer_overflow();
                self.request_pmi();
            }
            self.begin_sampling(n, reset, &area, host);
        }
    }

    /// Counter `n`, which has passed its end, goes on from `reset` with what it has counted since.
    fn reload(&mut self, n: u8, reset: u64) {
        let mask = self.registers.capability.counter_mask(n);
        let reset = reset & mask;
        // 1 to 2^63.
        let Some(period) = NonZeroU64::new((mask - reset).wrapping_add(1)) else {
            return;
        };
        let beyond = self.bank.counters[n].value;
        self.bank.counters[n].value = reset.wrapping_add(beyond % period) & mask;
        self.pebs.skipped = self.pebs.skipped.wrapping_add(beyond / period);
    }
}

impl Overflow {
    /// Writes its record. `false`: it is to have none.
    fn write(&self, guest: &mut dyn Guest, area: &mut Area) -> Result<bool, Fault> {
        let place = guest.place()?;
        if !self.config.counts_in(place.ring) {
            return Ok(false);
        }
        let counters = intel::to_global(CounterSet::of(self.counter));
        let record = Record::new(guest, self.groups, counters, place)?;
        area.append(guest, record.bytes())?;
        Ok(true)
    }
}

impl<R: Registers, V> Pmu<R, V> {
    /// What became of the overflows of counters that ask for PEBS records.
    pub const fn pebs_statistics(&self) -> Statistics {
        self.pebs
    }
}
