//! Records of samples that the host has taken by itself.
//!
//! # Why
//!
//! A record of the basic group needs an address, a ring and a time. A host that can sample its guest into memory of its
//! own has these without an exit. So the embedder takes a counter's first overflow, and hundreds that follow are
//! [samples](crate::counter::CounterHost::sample), which become records when the guest next accesses its PMU or the
//! buffer is due.
//!
//! # The rules
//!
//! - A counter is sampled if its records have only the basic group, its reset value makes a period that the host can
//!   sample with, and the buffer has room for many records up to its threshold. The first overflow is taken by an exit,
//!   so that the host's period begins where the counter's does.
//! - The counter's value is the host event's, never the samples': a host drops samples, and still counts.
//! - Sampling stops when the guest changes the period, because the host still samples with the old one: another value of
//!   the counter or of its reset field, another event, other groups. The next overflow is then an exit again. So a counter
//!   whose value changes with each switch of tasks loses no sample, however short the slices are. The reset field is
//!   read with the next records, so these still have the old period.
//! - A host that takes less than half of its samples is not believed, and the next overflow is an exit again.
//! - A report is asked for after as many overflows as the buffer has records left up to its threshold.

use core::num::NonZeroU64;

use super::Counters;
use crate::counter::{Counter, CounterHost, CounterSet, Events, FAR, Model, count};
use crate::x86::pebs::{Area, BASIC, BATCH, Fault, MANY, NOWHERE, Sample, basic};
use crate::x86::{CounterConfig, intel};

impl<V: Events> Counters<V> {
    /// The next overflow of each of `concerned` is an exit again, where the host has sampled it.
    pub(in crate::x86) fn end_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        host: &mut H,
    ) {
        let ended = concerned & self.pebs.sampling.counters;
        self.pebs.sampling.end(ended);
        for n in ended & self.bank.hosted.backed() {
            if let Some(host) = host.support_pebs() {
                host.end_sampling(n);
            }
        }
    }

    /// Ends the sampling of counters that must not be sampled any more, as the guest has changed registers.
    pub(in crate::x86) fn end_unfit_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        host: &mut H,
    ) {
        // A counter that stands still has no samples. Linux takes IA32_PEBS_ENABLE away and gives it back at each switch of
        // tasks.
        let fits = |n| self.recording.contains(n) || !self.enabled().contains(n);
        let sampled = self.pebs.sampling.counters;
        let unfit = sampled.filter(|n| !fits(n) || self.record_groups(n) != 0);
        self.end_sampling(unfit, host);
    }

    /// Has the host sample `n` from now on, which has just gone on from `reset`, if that is possible and pays.
    pub(super) fn begin_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        reset: u64,
        area: &Area,
        host: &mut H,
    ) {
        // The host's samples have an address, a ring and a time, and no registers.
        let pays = self.record_groups(n) == 0 && area.up_to_threshold() >= MANY;
        // A policy that makes events anew has taken this one away.
        if !pays || !self.bank.hosted.backed().contains(n) {
            return;
        }
        let period = self.period(n, reset).filter(|period| period.get() < FAR);
        let (Some(period), Some(host_pebs)) = (period, host.support_pebs()) else {
            return;
        };
        // A host with little room would need a report for each of a few samples: an exit costs less.
        let capacity = host_pebs.begin_sampling(n, period);
        if capacity < MANY {
            return;
        }
        self.pebs.sampling.begin(n, period.get(), capacity);
        self.pebs.sampling.room = area.left();
        self.divide_room(host);
    }

    /// Gives each sampled counter its share of the room, if one has none. A report is asked for from what has been
    /// counted, so all of them are read.
    fn divide_room<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let used_up = self.pebs.sampling.used_up();
        if !used_up.is_empty() {
            self.settle_sampled(self.pebs.sampling.counters - used_up, host);
            self.pebs.sampling.divide();
        }
    }

    /// Takes note of the periods of `concerned`, all of them sampled, that are over. What makes another of their period comes
    /// after that: samples report overflows before their counter is read.
    pub(in crate::x86) fn settle_sampled<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        host: &mut H,
    ) {
        for n in concerned {
            self.collect(n, host);
            if self.pebs.unrecorded.contains(n) {
                self.pebs.unrecorded.remove(n);
                self.pass_sampled(n);
            }
        }
    }

    /// The next overflow of `n`, which is sampled, is an exit again: its period has become another, or the host samples
    /// no more.
    fn leave_sampling<H: CounterHost<CounterConfig>>(&mut self, n: Counter, host: &mut H) {
        let only = n.alone() & self.pebs.sampling.counters;
        // Settled first: what is over was over under the period that the host samples with.
        self.settle_sampled(only, host);
        self.end_sampling(only, host);
    }

    /// Takes note of the overflow of `n`, which is sampled.
    pub(super) fn pass_sampled(&mut self, n: Counter) {
        let mask = self.controls[n].mask;
        let beyond = self.value(n);
        let period = self.pebs.sampling.period(n).max(1);
        self.pebs.sampling.pass(n, 1 + beyond / period);
        let reset = mask.wrapping_sub(period).wrapping_add(1);
        self.set_value(n, reset.wrapping_add(beyond % period) & mask);
    }

    /// Makes records of the samples that there are. `overflowed`: counters whose report has come.
    pub(super) fn convert<H: CounterHost<CounterConfig>>(
        &mut self,
        overflowed: CounterSet,
        host: &mut H,
    ) {
        for n in self.pebs.sampling.counters {
            loop {
                let mut samples = [NOWHERE; BATCH];
                let sampling = &mut self.pebs.sampling;
                let taken = sampling.take(n, host.support_pebs(), &mut samples);
                let statistics = &mut self.pebs.statistics;
                statistics.outside = statistics.outside.wrapping_add(taken.outside);
                statistics.lost = statistics.lost.wrapping_add(taken.lost);
                let samples = samples.get(..taken.samples).unwrap_or_default();
                let goes_on = self.append(n, samples, overflowed.contains(n), host);
                if taken.ended || !goes_on.unwrap_or(true) {
                    self.leave_sampling(n, host);
                }
                // A full batch may have more behind it.
                if taken.samples < BATCH {
                    break;
                }
            }
            // The counter knows better than a host that says that it samples.
            if let Some(missed) = self.pebs.sampling.missed(n) {
                let skipped = &mut self.pebs.statistics.skipped;
                *skipped = skipped.wrapping_add(missed);
                self.leave_sampling(n, host);
            }
        }
        self.divide_room(host);
    }

    /// Writes records of counter `n` of `samples`. Answers whether the host's period is still the counter's.
    fn append<H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        samples: &[Sample],
        reported: bool,
        host: &mut H,
    ) -> Result<bool, Fault> {
        if samples.is_empty() {
            return Ok(true);
        }
        let config = self.controls[n].event;
        let bits = intel::to_global(n.alone());
        let mut bytes = [0; BASIC * BATCH];
        let (records, _) = bytes.as_chunks_mut::<BASIC>();
        let of_ring = samples
            .iter()
            .filter(|sample| config.counts_in(sample.ring));
        let mut number = 0_u64;
        for (record, &sample) in records.iter_mut().zip(of_ring) {
            *record = basic(bits, sample);
            count(&mut number);
        }
        let pebs = &mut self.pebs;
        let statistics = &mut pebs.statistics;
        statistics.filtered = (statistics.filtered).wrapping_add(samples.len() as u64 - number);

        let at = pebs.registers.ds_area;
        let guest = host.support_pebs().and_then(|host| host.guest());
        let head = guest.ok_or(Fault).and_then(|guest| {
            let area = Area::read(guest, at)?;
            Ok((area.reset(guest, n)?, guest, area))
        });
        let Ok((reset, guest, mut area)) = head else {
            statistics.lost = statistics.lost.wrapping_add(number);
            return Err(Fault);
        };
        // The guest may have left the buffer beyond its threshold.
        let was_due = area.is_due();
        // What does not fit is lost, as on a processor whose buffer is full.
        let written = number.min(area.room());
        let bytes = bytes.get(..BASIC * written as usize).unwrap_or_default();
        let written = match written == 0 || area.append(guest, bytes).is_ok() {
            true => written,
            false => 0,
        };
        statistics.records = statistics.records.wrapping_add(written);
        statistics.sampled = statistics.sampled.wrapping_add(written);
        statistics.lost = statistics.lost.wrapping_add(number - written);
        pebs.sampling.room = area.left();
        let sampled = pebs.sampling.period(n);
        // A guest that reads its buffer meanwhile has had its PMI.
        if area.is_due() && (!was_due || reported) {
            self.request_buffer_pmi();
        }
        Ok(self
            .period(n, reset)
            .is_some_and(|now| now.get() == sampled))
    }

    /// Returns the period that `reset` makes of counter `n`; `None`: there is no reset value.
    fn period(&self, n: Counter, reset: u64) -> Option<NonZeroU64> {
        let mask = self.controls[n].mask;
        let period = (mask - (reset & mask)).wrapping_add(1);
        NonZeroU64::new(period).filter(|_| reset & mask != 0)
    }
}
