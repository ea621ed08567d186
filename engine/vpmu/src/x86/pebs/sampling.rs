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
//! - The guest ends the sampling by what makes the host's period another than the counter's: another value of the
//!   counter or of its reset field, another event, other groups. The next overflow is then an exit again. So a counter
//!   whose value changes with each switch of tasks loses no sample, however short the slices are. The reset field is
//!   read with the next records, so these still have the old period.
//! - A host that takes less than half of its samples is not believed, and the next overflow is an exit again.
//! - A report is asked for after as many overflows as the buffer has records left up to its threshold.

use core::num::NonZeroU64;

use super::area::Area;
use super::record::{BASIC, basic};
use super::{Fault, Sample, Unit};
use crate::counter::{
    Counter, CounterHost, CounterSet, Events, FAR, Model, Slots, TakenSamples, count,
};
use crate::x86::counters::Counters;
use crate::x86::{CounterConfig, Ring, intel, status};

/// The least number of records up to the threshold for which sampling pays. Linux has one where it wants an interrupt
/// for each record, and else hundreds.
const MANY: u64 = 16;

/// Samples that are converted at once.
const BATCH: usize = 32;

/// A counter that the host samples.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::x86) struct Sampled {
    /// The period that the host samples with, in events.
    period: u64,
    /// The host's report is due with the overflow of this number, counted from the next.
    ahead: u64,
    /// How many samples the host keeps.
    capacity: u64,
    /// Periods since the last division of the room that are over, and those of them that the host has sampled.
    passed: u64,
    seen: u64,
}

impl Sampled {
    /// `passed` periods are over.
    fn pass(&mut self, passed: u64) {
        self.ahead = self.ahead.saturating_sub(passed);
        self.passed = self.passed.saturating_add(passed);
    }

    /// Returns the periods of which the host has taken no sample, if it misses more than it takes.
    fn missed(&self) -> Option<u64> {
        let missed = self.passed.saturating_sub(self.seen);
        (missed > self.seen && missed >= MANY).then_some(missed)
    }
}

/// The counters that the host samples.
#[derive(Clone, Debug, Default)]
pub(super) struct SampledCounters {
    counters: CounterSet,
    /// Records that fit up to the threshold, as far as is known.
    room: u64,
}

impl SampledCounters {
    /// Counters that are sampled.
    pub(super) const fn counters(&self) -> CounterSet {
        self.counters
    }

    /// In how many events a report of `n` is due, whose next overflow comes after `distance`.
    fn due(&self, n: Counter, distance: u64, sampled: &Sampled) -> u64 {
        if !self.counters.contains(n) {
            return distance;
        }
        let &Sampled { period, ahead, .. } = sampled;
        let more = period.saturating_mul(ahead.saturating_sub(1));
        distance.saturating_add(more)
    }

    /// Whether the room up to the threshold must be divided anew: a counter has used up what it was given.
    fn is_used_up(&self, sampled: &Slots<Sampled>) -> bool {
        self.counters.iter().any(|n| sampled[n].ahead == 0)
    }

    /// Divides the room up to the threshold among the counters.
    fn divide(&self, sampled: &mut Slots<Sampled>) {
        let portion = self.room / u64::from(self.counters.len().max(1));
        for n in self.counters {
            let slot = &mut sampled[n];
            // The host's samples find room for a quarter more: its period is not exactly the counter's.
            let most = (slot.capacity / 4 * 3).min(FAR / slot.period.max(1));
            slot.ahead = portion.min(most).max(1);
            (slot.passed, slot.seen) = (0, 0);
        }
    }
}

impl Unit {
    /// Returns in how many events a report of `n` is due, whose next overflow comes after `distance`.
    pub(in crate::x86) fn report_due(&self, n: Counter, distance: u64, sampled: &Sampled) -> u64 {
        self.sampling.due(n, distance, sampled)
    }

    /// Takes note of the periods of the sampled counters that are over. What makes another of their period comes after
    /// that: samples tell of overflows before their counter is read.
    pub(in crate::x86) fn settle_sampled<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        self.settle_these(self.sampling.counters, counters, host);
    }

    /// The next overflow of each of `concerned` is an exit again. `backed`: the counters that have a host event.
    pub(in crate::x86) fn end_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        backed: CounterSet,
        host: &mut H,
    ) {
        let ended = concerned & self.sampling.counters;
        self.sampling.counters -= ended;
        for n in ended & backed {
            let _ = host.sample(n, None);
        }
    }

    /// Ends the sampling of counters that must not be sampled any more, as the guest has changed registers.
    pub(in crate::x86) fn end_unfit_sampling<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        counters: &Counters<V>,
        host: &mut H,
    ) {
        let mut unfit = CounterSet::EMPTY;
        for n in self.sampling.counters {
            // A counter that stands still has no samples. Linux takes IA32_PEBS_ENABLE away and gives it back at each
            // switch of tasks.
            let fits = counters.recording().contains(n) || !counters.enabled().contains(n);
            unfit.put(n, !fits || self.groups(n, counters) != 0);
        }
        self.end_sampling(unfit, counters.bank().hosted.backed(), host);
    }

    /// Has the host sample `n` from now on, which has just gone on from `reset`, if that is possible and pays.
    pub(super) fn begin_sampling<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        reset: u64,
        area: &Area,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        let pays = self.groups(n, counters) == 0 && area.up_to_threshold() >= MANY;
        // A policy that makes events anew has taken this one away.
        if !pays || !counters.bank().hosted.backed().contains(n) {
            return;
        }
        let Some(period) = period(n, reset, counters).filter(|period| period.get() < FAR) else {
            return;
        };
        // A host with little room would need a report for each of a few samples: an exit costs less.
        let capacity = host.sample(n, Some(period));
        if capacity < MANY {
            return;
        }
        self.sampling.counters.insert(n);
        counters.sampled[n] = Sampled {
            period: period.get(),
            capacity,
            ..Sampled::default()
        };
        self.sampling.room = area.left();
        self.divide_room(counters, host);
    }

    /// Gives each sampled counter its portion of the room, if one has none. A report is asked for from what has been
    /// counted, so all of them are read.
    fn divide_room<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        if !self.sampling.is_used_up(&counters.sampled) {
            return;
        }
        self.settle_sampled(counters, host);
        self.sampling.divide(&mut counters.sampled);
    }

    /// As [`settle_sampled`](Self::settle_sampled), for `concerned`, all of them sampled.
    fn settle_these<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        for n in concerned {
            counters.collect(n, host);
            if counters.take_unrecorded_of(n) {
                self.pass_sampled(n, counters);
            }
        }
    }

    /// The next overflow of `n`, which is sampled, is an exit again: its period has become another, or the host samples
    /// no more.
    fn leave_sampling<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        let only = n.alone() & self.sampling.counters;
        // Settled first: what is over was over under the period that the host samples with.
        self.settle_these(only, counters, host);
        self.end_sampling(only, counters.bank().hosted.backed(), host);
    }

    /// Takes note of the overflow of `n`, which is sampled.
    pub(super) fn pass_sampled<V: Events>(&mut self, n: Counter, counters: &mut Counters<V>) {
        let mask = counters.control(n).mask;
        let period = counters.sampled[n].period.max(1);
        let beyond = counters.value(n);
        let reset = mask.wrapping_sub(period).wrapping_add(1);
        counters.set_value(n, reset.wrapping_add(beyond % period) & mask);
        counters.sampled[n].pass(1 + beyond / period);
    }

    /// Makes records of the samples that there are. `overflowed`: counters whose report has come.
    pub(super) fn convert<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        overflowed: CounterSet,
        counters: &mut Counters<V>,
        host: &mut H,
    ) {
        const NOWHERE: Sample = Sample {
            ip: 0,
            ring: Ring::User,
            tsc: 0,
        };
        for n in self.sampling.counters {
            loop {
                let mut samples = [NOWHERE; BATCH];
                let TakenSamples {
                    samples: taken,
                    outside,
                    lost,
                    ended,
                } = host.take_samples(n, &mut samples);
                self.statistics.outside = self.statistics.outside.wrapping_add(outside);
                self.statistics.lost = self.statistics.lost.wrapping_add(lost);
                let slot = &mut counters.sampled[n];
                slot.seen = (slot.seen.saturating_add(taken as u64))
                    .saturating_add(outside)
                    .saturating_add(lost);
                let samples = samples.get(..taken).unwrap_or_default();
                let goes_on = self.append(n, samples, overflowed.contains(n), counters, host);
                if ended || !goes_on.unwrap_or(true) {
                    self.leave_sampling(n, counters, host);
                }
                // A full batch may have more behind it.
                if taken < BATCH {
                    break;
                }
            }
            // The counter knows better than a host that says that it samples.
            if let Some(missed) = counters.sampled[n].missed() {
                self.statistics.skipped = self.statistics.skipped.wrapping_add(missed);
                self.leave_sampling(n, counters, host);
            }
        }
        self.divide_room(counters, host);
    }

    /// Writes records of counter `n` of `samples`. Answers whether the host's period is still the counter's.
    fn append<V: Events, H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        samples: &[Sample],
        reported: bool,
        counters: &mut Counters<V>,
        host: &mut H,
    ) -> Result<bool, Fault> {
        if samples.is_empty() {
            return Ok(true);
        }
        let config = counters.control(n).event;
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
        self.statistics.filtered =
            (self.statistics.filtered).wrapping_add(samples.len() as u64 - number);

        let at = self.registers.ds_area;
        let guest = host.pebs().ok_or(Fault);
        let head = guest.and_then(|guest| {
            let area = Area::read(guest, at)?;
            Ok((area.reset(guest, n)?, guest, area))
        });
        let Ok((reset, guest, mut area)) = head else {
            self.statistics.lost = self.statistics.lost.wrapping_add(number);
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
        self.statistics.records = self.statistics.records.wrapping_add(written);
        self.statistics.sampled = self.statistics.sampled.wrapping_add(written);
        self.statistics.lost = self.statistics.lost.wrapping_add(number - written);
        // A guest that reads its buffer meanwhile has had its PMI.
        if area.is_due() && (!was_due || reported) {
            counters.set_status(CounterSet::EMPTY, status::BUFFER_OVERFLOW);
            counters.request_pmi();
        }
        self.sampling.room = area.left();
        let sampled = counters.sampled[n].period;
        Ok(period(n, reset, counters).is_some_and(|now| now.get() == sampled))
    }
}

/// Returns the period that `reset` makes of counter `n`; `None`: there is no reset value.
fn period<V: Events>(n: Counter, reset: u64, counters: &Counters<V>) -> Option<NonZeroU64> {
    let mask = counters.control(n).mask;
    let period = (mask - (reset & mask)).wrapping_add(1);
    NonZeroU64::new(period).filter(|_| reset & mask != 0)
}
