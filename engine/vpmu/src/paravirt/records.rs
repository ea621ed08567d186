//! Samples that the host takes by itself, as records in the guest's memory.
//!
//! # The rules
//!
//! They are those of [PEBS](crate::x86::pebs) with such samples, but that no reset value is in memory:
//!
//! - A counter whose wish has [`flag::RECORD`](super::flag::RECORD) is sampled from its first overflow on, which is an
//!   interrupt: the host's period then begins where the counter's does. A host that cannot sample goes on with interrupts.
//! - The counter's value and its overflows are the host event's, never the samples': a host drops samples, and still counts.
//! - A new wish ends the sampling. A new period has the host sample anew, from the next doorbell or report on, if it differs
//!   by more than a part in 32: Linux's `-F` changes it a little at each tick.
//! - A host that takes less than half of its samples is not believed, and the next overflow is an interrupt again.
//! - A report is asked for after as many overflows as half of the buffer has records. The other half is the time that the
//!   guest has to take them.

use core::mem;
use core::num::NonZeroU64;

use super::device::Device;
use super::page::{Page, RECORD, RECORDS, word};
use crate::counter::{Counter, CounterHost, CounterSet, FAR, Model};
use crate::x86::pebs::{BATCH, MANY, NOWHERE, Sample, Statistics};
use crate::x86::{CounterConfig, Ring};

impl Device {
    /// Returns what became of the samples of counters that are recorded.
    pub const fn record_statistics(&self) -> Statistics {
        self.samples.statistics
    }

    /// Has the host sample the counters that have just overflowed.
    pub(super) fn begin_wanted<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        for n in mem::take(&mut self.samples.wanted) {
            self.begin_sampling(n, host);
        }
        let used_up = self.samples.sampling.used_up();
        if !used_up.is_empty() {
            // A report is asked for from what has been counted, so all of them are read.
            for n in self.samples.sampling.counters - used_up {
                self.collect(n, host);
            }
            self.samples.sampling.room = RECORDS / 2;
            self.samples.sampling.divide();
        }
    }

    /// Has the host sample `n` from now on, whose period begins now, if it can.
    fn begin_sampling<H: CounterHost<CounterConfig>>(&mut self, n: Counter, host: &mut H) {
        let period = self.granted(self.wishes[n].period);
        let wish = NonZeroU64::new(period).filter(|period| period.get() < FAR);
        let capacity = match (wish, host.support_pebs()) {
            (Some(wish), Some(host)) if self.bank.hosted.backed().contains(n) => {
                host.begin_sampling(n, wish)
            }
            _ => 0,
        };
        // A host with little room would need a report for each of a few samples: an interrupt costs less.
        if capacity < MANY {
            return self.end_sampling(n.alone(), host);
        }
        self.samples.sampling.begin(n, period, capacity);
    }

    /// The next overflow of each of `concerned` is an interrupt again.
    pub(super) fn end_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        host: &mut H,
    ) {
        let ended = concerned & self.samples.sampling.counters;
        self.samples.sampling.end(ended);
        self.samples.wanted -= concerned;
        for n in ended & self.bank.hosted.backed() {
            if let Some(host) = host.support_pebs() {
                host.end_sampling(n);
            }
        }
    }

    /// The sampler of a host event that was released is gone.
    pub(super) fn forget_released(&mut self) {
        let released = self.samples.sampling.counters - self.bank.hosted.backed();
        self.samples.sampling.end(released);
    }

    /// Has the host sample with the periods that the guest wishes now. All that was counted has been taken.
    pub(super) fn follow_periods<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        for n in self.samples.sampling.counters {
            let (now, before) = (
                self.granted(self.wishes[n].period),
                self.samples.sampling.period(n),
            );
            if now.abs_diff(before) > before / 32 {
                // The host begins a whole period, and so does the counter.
                let wish = &mut self.wishes[n];
                wish.next = self.bank.counters[n].value.wrapping_add(now);
                wish.length = now;
                self.begin_sampling(n, host);
            }
        }
        self.begin_wanted(host);
    }

    /// Makes records of the samples that there are. Returns whether there are any.
    pub(super) fn write_records<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: &P,
    ) -> bool {
        let before = self.samples.head;
        for n in self.samples.sampling.counters {
            loop {
                let mut samples = [NOWHERE; BATCH];
                let sampling = &mut self.samples.sampling;
                let taken = sampling.take(n, host.support_pebs(), &mut samples);
                let statistics = &mut self.samples.statistics;
                statistics.outside = statistics.outside.wrapping_add(taken.outside);
                let samples = samples.get(..taken.samples).unwrap_or_default();
                let missing = self.append(n, samples, page).wrapping_add(taken.lost);
                if missing != 0 {
                    let statistics = &mut self.samples.statistics;
                    statistics.lost = statistics.lost.wrapping_add(missing);
                    // Only here: the word is as the guest has it, and a wrong one is its own.
                    let lost = page.load(word::lost(n)).wrapping_add(missing);
                    page.store(word::lost(n), lost);
                }
                if taken.ended {
                    self.end_sampling(n.alone(), host);
                }
                // A full batch may have more behind it.
                if taken.samples < BATCH {
                    break;
                }
            }
            // The counter knows better than a host that says that it samples.
            if let Some(missed) = self.samples.sampling.missed(n) {
                let statistics = &mut self.samples.statistics;
                statistics.skipped = statistics.skipped.wrapping_add(missed);
                self.end_sampling(n.alone(), host);
            }
        }
        before != self.samples.head
    }

    /// Writes records of these samples of `n`. Returns how many find no room.
    fn append<P: Page + ?Sized>(&mut self, n: Counter, samples: &[Sample], page: &P) -> u64 {
        let (config, period) = (self.event(n), self.samples.sampling.period(n));
        let mut bytes = [0; RECORD * BATCH];
        let (records, _) = bytes.as_chunks_mut::<RECORD>();
        let of_ring = samples
            .iter()
            .filter(|sample| config.counts_in(sample.ring));
        let mut number = 0;
        for (record, sample) in records.iter_mut().zip(of_ring) {
            let place = u64::from(n.number()) | u64::from(sample.ring == Ring::User) << 8;
            let (words, _) = record.as_chunks_mut::<8>();
            for (to, word) in words.iter_mut().zip([sample.ip, sample.tsc, period, place]) {
                *to = word.to_le_bytes();
            }
            number += 1;
        }
        let own = &mut self.samples;
        let statistics = &mut own.statistics;
        statistics.filtered = (statistics.filtered).wrapping_add(samples.len() as u64 - number);
        // A tail that the guest has not got from here leaves no room, or room that overwrites its own records.
        let unread = own.head.wrapping_sub(page.load(word::TAIL));
        let fits = number.min(RECORDS.saturating_sub(unread));
        let mut rest = bytes.get(..RECORD * fits as usize).unwrap_or_default();
        let mut written = 0;
        while !rest.is_empty() && own.buffer != 0 {
            let place = own.head.wrapping_add(written) % RECORDS;
            // In two pieces where the buffer's end is between.
            let length = rest.len().min((RECORDS - place) as usize * RECORD);
            let (piece, others) = rest.split_at_checked(length).unwrap_or_default();
            let at = own.buffer.checked_add(place * RECORD as u64);
            if !at.is_some_and(|at| page.write(at, piece)) {
                break;
            }
            written += (piece.len() / RECORD) as u64;
            rest = others;
        }
        if written != 0 {
            own.head = own.head.wrapping_add(written);
            statistics.records = statistics.records.wrapping_add(written);
            statistics.sampled = statistics.sampled.wrapping_add(written);
            // Behind the records: a guest that sees the head sees them.
            page.store(word::HEAD, own.head);
        }
        number - written
    }
}
