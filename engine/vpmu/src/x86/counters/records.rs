//! Overflows whose counters ask for a PEBS record.

use core::mem;
use core::num::NonZeroU64;

use super::Counters;
use crate::counter::{Counter, CounterHost, CounterSet, Events, count};
use crate::x86::pebs::{Area, Fault, Guest, Record, data_cfg};
use crate::x86::{CounterConfig, intel, lbr, status};

impl<V: Events> Counters<V> {
    /// Writes the records of the counters that have overflowed, lowest first, and before them those that the host has
    /// sampled.
    pub(super) fn write_records<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // Taken first: what follows can count, and overflow anew.
        let unrecorded = mem::take(&mut self.pebs.unrecorded);
        let sampled = unrecorded & self.pebs.sampling.counters;
        for n in sampled {
            self.pass_sampled(n);
        }
        self.convert(sampled, host);
        for n in unrecorded - sampled {
            let has_branches = self.record_groups(n) & data_cfg::BRANCHES != 0;
            if !(has_branches && self.lbr.delay_record(n, self.global.pmi_due)) {
                self.write_record(n, host);
            }
        }
    }

    /// Writes the record of `n`, which has overflowed and is not sampled.
    fn write_record<H: CounterHost<CounterConfig>>(&mut self, n: Counter, host: &mut H) {
        let overflow = Overflow {
            counter: n,
            config: self.controls[n].event,
            groups: self.record_groups(n),
        };
        // Read anew for each: the guest's handler empties the buffer between two overflows.
        let at = self.pebs.registers.ds_area;
        let guest = host.support_pebs().and_then(|host| host.guest());
        let head = guest.ok_or(Fault).and_then(|guest| {
            let area = Area::read(guest, at)?;
            Ok((area.reset(guest, n)?, guest, area))
        });
        // Without an area there is no reset value either: the counter goes on as any other.
        let Ok((reset, guest, mut area)) = head else {
            count(&mut self.pebs.statistics.lost);
            return;
        };
        // Before the record, as the processor does it: a record that is lost costs one sample, not the period.
        self.reload(n, reset);
        let branches = self.lbr.last();
        let written = overflow.write(guest, &mut area, branches);
        let statistics = &mut self.pebs.statistics;
        count(match written {
            Ok(true) => &mut statistics.records,
            // The guest has changed its ring since: its address is not the overflow's.
            Ok(false) => &mut statistics.filtered,
            Err(Fault) => &mut statistics.lost,
        });
        if written == Ok(false) {
            return;
        }
        if area.is_due() {
            self.request_buffer_pmi();
        }
        // Only after a record by an exit: the host's period then begins where the counter's does.
        self.begin_sampling(n, reset, &area, host);
    }

    /// The buffer has filled up to its threshold.
    pub(super) fn request_buffer_pmi(&mut self) {
        (self.global).set_status(CounterSet::EMPTY, status::BUFFER_OVERFLOW);
        self.request_pmi();
    }

    /// Returns the groups of a record of counter `n`, beyond the basic one.
    pub(super) fn record_groups(&self, n: Counter) -> u64 {
        match self.controls[n].adaptive {
            true => self.pebs.registers.data_cfg,
            false => 0,
        }
    }

    /// Counter `n`, which has passed its end, goes on from `reset` with what it has counted since.
    fn reload(&mut self, n: Counter, reset: u64) {
        let mask = self.controls[n].mask;
        let reset = reset & mask;
        // 1 to 2^63.
        let Some(period) = NonZeroU64::new((mask - reset).wrapping_add(1)) else {
            return;
        };
        let beyond = self.value(n);
        self.set_value(n, reset.wrapping_add(beyond % period) & mask);
        let skipped = &mut self.pebs.statistics.skipped;
        *skipped = skipped.wrapping_add(beyond / period);
    }
}

/// A counter that has overflowed.
struct Overflow {
    counter: Counter,
    config: CounterConfig,
    /// The groups of its record.
    groups: u64,
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
