//! The host: perf events behind guest counters.
//!
//! [`PerfHost`] puts the parts together, each of which has its own state and knows none of the others:
//!
//! - [`Events`]: the perf events, which of them count, and their totals;
//! - [`Slot`], for each counter:
//!   - [`Period`]: what is asked of its overflows,
//!   - [`PortionTime`](crate::portion::PortionTime) where it has a portion of a clock's time: one privilege ring's, or the guest's,
//!   - [`CounterSampler`](crate::sampler::CounterSampler) where its overflows become records.

use std::fmt::Debug;
use std::mem;
use std::num::NonZeroU64;
use std::sync::Arc;

use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report, Slots};
use vpmu::x86::pebs::{self, Fault, Guest, Sample, TakenSamples};
use vpmu::x86::{ArchEvent, CounterConfig, Ring};

use crate::choose::Chooser;
use crate::error::PerfError;
use crate::events::Events;
use crate::kernel::{Kernel, Linux};
use crate::kind::{ENDLESS, Rings, probe};
use crate::notes::Notes;
use crate::options::{Backing, PerfOptions};
use crate::pace::{FLOOR, Pace};
use crate::portion::{Portion, TimeUp};
use crate::processor::Vendor;
use crate::rings::{LONGEST, RingSampler};
use crate::sampler::{self, CounterSampler};
use crate::slot::{Overflow, Period, Slot, Units};
use crate::support::prepare;

/// The guest of a host's thread, which does not run it now.
pub trait SampledGuest: Guest + Debug + Send {
    /// Forgets what the guest's registers and memory held, because the guest may run.
    fn forget(&mut self);

    /// Returns the guest's TSC less the host's, modulo 2^64.
    ///
    /// # Errors
    ///
    /// When the guest's cannot be read.
    fn tsc_offset(&mut self) -> Result<u64, Fault>;

    /// Returns the ring in which the guest is.
    ///
    /// # Errors
    ///
    /// When the VMM cannot tell.
    fn ring(&mut self) -> Result<Ring, Fault>;
}

/// The guest, if there is one. Most runs ask it nothing, and then it has nothing to forget.
#[derive(Debug, Default)]
struct AskedGuest {
    guest: Option<Box<dyn SampledGuest>>,
    /// Whether it was asked since it was last to forget.
    is_asked: bool,
}

impl AskedGuest {
    fn ask(&mut self) -> Option<&mut dyn SampledGuest> {
        self.is_asked = true;
        Some(&mut **self.guest.as_mut()?)
    }
}

/// The [`CounterHost`] of the thread that made it. Another thread may use the host while that thread does not run its
/// guest, and may drop it.
#[derive(Debug)]
pub struct PerfHost {
    kernel: &'static dyn Kernel,
    chooser: Chooser,
    units: Units,
    /// The bound on the overflows of hardware events. A clock has none.
    pace: Option<Pace>,
    /// Its kick is the target of the handler, kept alive. `sampling`: the kernel may sample the guest, and has not refused.
    options: PerfOptions,
    /// The counters that this thread's events and samplers may take together. `None`: a clock serves any number.
    counters: Option<u8>,
    /// Counters whose sampler has been stopped for another event, and whose user has to hear of it.
    unsampled: CounterSet,
    slots: Slots<Slot>,
    events: Events,
    /// The samples of the thread, while there is a counter of a portion of its clock's time.
    ring_sampler: Option<RingSampler>,
    guest: AskedGuest,
    notes: Arc<Notes>,
    longest_stuck_ns: u64,
}

impl PerfHost {
    /// The shortest distance between overflows, ns. With *n* perf events, the distance of each is *n* times as long.
    /// Otherwise their timers together would leave no time for anything else, the guest included. An emulated host
    /// takes half of that distance for one overflow. Hardware events keep the distance on average: their periods are as
    /// the guest asks as long as their overflows are rare enough, and longer where they are not.
    pub const FLOOR: u64 = FLOOR;

    /// Makes a host for the guest that the calling thread runs. Does the work of [`prepare`](crate::prepare), unless
    /// that is done.
    ///
    /// # Errors
    ///
    /// Says why perf events are not available, and what to do.
    pub fn new(options: PerfOptions) -> Result<Self, PerfError> {
        prepare(&options)?;
        Self::counting(&Linux, options, true)
    }

    /// Like [`PerfHost::new`], but counts the thread itself, which runs no guest: to try and to
    /// measure this machine's perf events.
    ///
    /// # Errors
    ///
    /// As for [`PerfHost::new`].
    pub fn of_thread(options: PerfOptions) -> Result<Self, PerfError> {
        prepare(&options)?;
        Self::counting(&Linux, options, false)
    }

    fn counting(
        kernel: &'static dyn Kernel,
        options: PerfOptions,
        guest: bool,
    ) -> Result<Self, PerfError> {
        if options.tsc_hz == 0 {
            return Err(PerfError::NoFrequency);
        }
        let chooser = Chooser::new(kernel, &options, guest)?;
        let notes = Notes::claim(&options.kick).ok_or(PerfError::Taken)?;
        // A group of hardware events counts nothing while one of them has no counter.
        let grouped = chooser.backing == Backing::Clock;
        // A clock that is given each of its periods needs no log: the next starts it where it was throttled.
        let logged = !grouped || options.repeating;
        let signal = options.overflow_signal();
        let units = Units::new(chooser.backing, options.tsc_hz);
        Ok(Self {
            kernel,
            chooser,
            units,
            // A clock's period is a time, which the floor alone bounds.
            pace: (units == Units::Events).then(Pace::new),
            // Asked only where it matters: the question opens some tens of events.
            counters: match options.sampling {
                true => chooser.free_counters(),
                false => None,
            },
            unsampled: CounterSet::EMPTY,
            slots: Slots::from_fn(Slot::default),
            events: Events::new(kernel, Arc::clone(&notes), signal, grouped, logged),
            ring_sampler: None,
            guest: AskedGuest::default(),
            notes,
            longest_stuck_ns: 0,
            options,
        })
    }

    /// Returns the backing that counts.
    pub fn backing(&self) -> Backing {
        self.chooser.backing
    }

    /// Returns whether `event` can be counted, so that CPUID may offer it.
    pub fn counts(&self, event: ArchEvent) -> bool {
        self.chooser.counts(event)
    }

    /// Sets the guest whose state PEBS records hold, and whose memory has them. Without it every record is lost. It is also
    /// asked for its ring where a counter of one ring is to overflow. Without it the host believes the last sample, which is
    /// some 50 microseconds old.
    pub fn set_guest(&mut self, guest: impl SampledGuest + 'static) {
        self.guest.guest = Some(Box::new(guest));
    }

    /// Has the guest [forget](SampledGuest::forget) what it was. Call this before and after each run of the guest.
    pub fn forget_guest(&mut self) {
        if mem::take(&mut self.guest.is_asked)
            && let Some(guest) = &mut self.guest.guest
        {
            guest.forget();
        }
    }

    /// Returns whether the calling thread is the one that made this host.
    pub fn is_here(&self) -> bool {
        self.notes.is_here()
    }

    /// Returns whether overflows have been signalled since the last [`take_overflows`](Self::take_overflows), by
    /// reading memory alone.
    pub fn has_overflows(&self) -> bool {
        self.notes.any() || !self.unsampled.is_empty()
    }

    /// Takes the overflows that have been signalled since the last call. Reads memory alone where there are none.
    pub fn take_overflows(&mut self) -> impl Iterator<Item = (Counter, Report)> + use<> {
        let mut due = CounterSet::EMPTY;
        let mut unsure = CounterSet::EMPTY;
        for counter in self.notes.take() {
            match self.overflow(counter) {
                Some(Report::Due) => due.insert(counter),
                Some(_) => unsure.insert(counter),
                None => {}
            }
        }
        let mut asked = mem::take(&mut self.unsampled) & self.events.open_events();
        // The user's queue of signals was full, and SIGIO names no event: any that is awaited may have overflowed.
        if self.notes.take_overrun() {
            asked |= self.which(Slot::is_awaited);
        }
        for counter in asked {
            if self.may_have_overflowed(counter) {
                unsure.insert(counter);
            }
        }
        let due = due.iter().map(|counter| (counter, Report::Due));
        due.chain(unsure.iter().map(|counter| (counter, Report::Unsure)))
    }

    /// Returns the ns for which the perf event behind `counter` has counted, and the ns for which it should have, both
    /// by the last total that was read. They differ where the counter is
    /// [`Lost::Multiplexed`]. `None`: there is no event.
    pub fn times(&self, counter: Counter) -> Option<(u64, u64)> {
        Some(self.events.last(counter)?.times)
    }

    /// Returns the longest time, in ns, for which the total of a counter of cycles did not advance although its perf event
    /// was running, and the guest was in its ring as far as samples show. It is found at reads, and costs no system call.
    ///
    /// This time is some ms where all is well. It includes the time for which this thread has worked for its guest
    /// without running it, because a hardware event then runs, too, and does not count. With a counter that no longer
    /// counts, the time grows at each read.
    pub fn longest_stuck_ns(&self) -> u64 {
        self.longest_stuck_ns
    }

    /// The event behind `counter` has signalled an overflow. Returns the report for the engine.
    fn overflow(&mut self, counter: Counter) -> Option<Report> {
        let slot = &mut self.slots[counter];
        if slot.is_portion() {
            // A portion's total is known by samples alone, so that its report vouches for nothing.
            return self.is_time_up(counter).then_some(Report::Unsure);
        }
        let asked = slot.period;
        match slot.period.overflow(self.options.repeating) {
            Overflow::Report(report) if self.pace.is_some() => {
                return Some(self.paced(counter, asked, report));
            }
            // A clock's overflows come no faster than it was asked to report them.
            Overflow::Report(report) => {
                if self.options.repeating {
                    self.restart(counter, asked);
                }
                return Some(report);
            }
            Overflow::Unwanted if self.events.set_period(counter, ENDLESS) => {
                slot.period = Period::Endless;
            }
            Overflow::Unwanted | Overflow::Late => {}
        }
        None
    }

    /// Starts a clock that the kernel has throttled, so that no tick does: Linux from 6.9 on starts no member of a group
    /// again, and a processor of `nohz_full` has no ticks.
    fn restart(&mut self, counter: Counter, asked: Period) {
        if let Period::Set { events, .. } = asked
            && self.events.take_overflows(counter).throttled
        {
            self.program(counter, events, self.events.counting());
        }
    }

    /// The overflow of a hardware event's period that was `asked` for. Lengthens the period if overflows come too fast.
    /// Returns the report for the engine.
    fn paced(&mut self, counter: Counter, asked: Period, report: Report) -> Report {
        let counting = self.events.counting();
        let sharing = self.sharing(counting);
        let (Period::Set { events, period, .. }, Some(pace)) = (asked, &mut self.pace) else {
            return report;
        };
        let (overflows, now) = (self.events.take_overflows(counter), self.kernel.now());
        let number = overflows.number;
        let too_fast = pace.overflowed(counter, number, period, sharing, now);
        if too_fast || overflows.throttled {
            // The event would go on at its old pace, or stand still until the next tick.
            if self.slots[counter].is_awaited() {
                self.program(counter, events, counting);
            } else if self.events.set_period(counter, ENDLESS) {
                self.slots[counter].period = Period::Endless;
            }
        }
        // A lengthened period is of more events than the report vouches for.
        match number <= 1 && period == events.get() {
            true => report,
            false => Report::Unsure,
        }
    }

    /// Signals have been lost, perhaps one of `counter`, or its samples have ended. Returns whether to report the counter.
    fn may_have_overflowed(&mut self, counter: Counter) -> bool {
        let slot = &mut self.slots[counter];
        if slot.is_portion() {
            return self.is_time_up(counter);
        }
        slot.period.doubt(self.options.repeating);
        true
    }

    /// The clock of a counter of a portion of its clock's time has reached its period. Returns whether the counter overflows. If not, the
    /// clock gets another period.
    fn is_time_up(&mut self, counter: Counter) -> bool {
        self.divide_time();
        let total = self.events.read(counter);
        let last = self.ring_sampler.as_ref().and_then(RingSampler::last);
        let slot = &mut self.slots[counter];
        let Some(time) = &mut slot.portion else {
            return false;
        };
        let value = self.units.to_guest(time.own(total));
        let guest = &mut self.guest;
        let here = || guest.ask().and_then(|guest| guest.ring().ok()).or(last);
        let wait = match time.is_up(value, self.options.repeating, here) {
            TimeUp::Overflow => {
                slot.period.pass(self.options.repeating);
                return true;
            }
            TimeUp::Early(events) => self.units.to_count(events).min(LONGEST),
            TimeUp::Away(ns) => ns,
            TimeUp::Unwanted => {
                // The clock would report each of its old periods, while the guest is on its way to write the counter.
                self.events.set_period(counter, LONGEST);
                return false;
            }
        };
        let ns = wait.max(FLOOR * self.sharing(self.events.counting()));
        self.events.set_period(counter, ns);
        false
    }

    /// Hands the samples so far to the counters of a portion that count. Called before any counter starts or stops.
    fn divide_time(&mut self) {
        let Some(sampler) = &mut self.ring_sampler else {
            return;
        };
        let samples = sampler.take();
        for counter in self.events.counting() {
            if let Some(time) = &mut self.slots[counter].portion {
                time.note(samples);
            }
        }
    }

    /// Stops the samplers of these counters, or lets them go on: before the counters, both times, so that what a call
    /// takes cancels out.
    fn run_samplers(&mut self, counters: CounterSet, counts: bool) {
        for counter in counters {
            if let Some(sampler) = &mut self.slots[counter].sampler {
                sampler.run(counts);
            }
        }
    }

    /// Returns the number of counters whose overflows share the host's time while `counting` count.
    fn sharing(&self, counting: CounterSet) -> u64 {
        // Counters that only count interrupt nobody. Which one-shot reports come back is not known.
        let sharing = match self.options.repeating {
            true => self.which(Slot::is_awaited) & counting,
            false => self.events.open_events(),
        };
        sharing.len().max(1).into()
    }

    /// Returns the period of the perf event for so many of the guest's events, which leaves others time.
    fn host_period(&self, counter: Counter, events: NonZeroU64, counting: CounterSet) -> u64 {
        match &self.pace {
            Some(pace) => pace.period(counter, events),
            None => self.units.period(events, self.sharing(counting)),
        }
    }

    /// Gives the perf event its period, while `counting` count.
    fn program(&mut self, counter: Counter, events: NonZeroU64, counting: CounterSet) {
        let period = self.host_period(counter, events, counting);
        if let Some(pace) = &mut self.pace {
            // They are of the period before, and would give a wrong rate with the next report's. Those of a storm come
            // before the system call returns.
            let late = self.events.take_overflows(counter);
            pace.charge(late.number, self.kernel.now());
        }
        let slot = &mut self.slots[counter];
        // The samples that divide a clock's time have room for so long.
        let longest = if slot.is_portion() { LONGEST } else { ENDLESS };
        let certain = !matches!(slot.period, Period::Set { certain: false, .. });
        slot.period = match self.events.set_period(counter, period.min(longest)) {
            true => Period::Set {
                events,
                period,
                certain,
            },
            false => Period::Stale,
        };
    }

    /// Gives the counters that count, `begun` the last of them, the periods that as many may have. Where periods repeat,
    /// nobody asks for them again.
    fn spread(&mut self, begun: CounterSet, counting: CounterSet) {
        let awaited = self.which(Slot::is_awaited);
        if !self.options.repeating || (begun & awaited).is_empty() {
            return;
        }
        for counter in awaited & counting {
            if let Period::Set { events, period, .. } = self.slots[counter].period
                && self.host_period(counter, events, counting) != period
            {
                self.program(counter, events, counting);
            }
        }
    }

    /// Returns the guest's events that the last total of `counter` stands for.
    fn value(&mut self, counter: Counter) -> u64 {
        let (event, slot) = (self.events.last(counter), &mut self.slots[counter]);
        let (total, stuck_ns) = event.map_or((0, 0), |event| (event.total, event.stuck_ns));
        let value = slot.value(total, self.units);
        let portion = slot.portion.as_mut();
        let portion_ns = portion.map_or(0, |time| time.stuck_ns(total));
        self.longest_stuck_ns = self.longest_stuck_ns.max(stuck_ns).max(portion_ns);
        value
    }

    /// Stops the samples that show the guest's ring unless a counter needs them.
    fn end_ring_sampler(&mut self) {
        if self.which(Slot::is_portion).is_empty() {
            self.ring_sampler = None;
        }
    }

    /// Returns whether the processor has a counter for each event and each sampler, and for one more. Otherwise the kernel
    /// would let each count for a part of the time.
    fn has_room(&self) -> bool {
        let taken = self.events.open_events().len() + self.which(Slot::is_sampled).len();
        self.counters.is_none_or(|all| taken < all.into())
    }

    /// Returns the counters whose slot is as `wanted`.
    fn which(&self, wanted: impl Fn(&Slot) -> bool) -> CounterSet {
        let open = self.events.open_events();
        open.filter(|counter| wanted(&self.slots[counter]))
    }
}

impl Drop for PerfHost {
    fn drop(&mut self) {
        self.notes.retire();
    }
}

impl CounterHost<CounterConfig> for PerfHost {
    fn create(&mut self, counter: Counter, config: &CounterConfig) -> Result<(), Lost> {
        let rings = Rings {
            user: config.user,
            kernel: config.kernel,
            guest: self.chooser.guest,
        };
        let raw = Vendor::of(config.event).zip(config.raw());
        let kind = self.chooser.kind(config.architectural(), raw, rings)?;
        let is_clock = self.chooser.backing == Backing::Clock;
        let portion = Portion::of(config, self.options.freeze).filter(|_| is_clock);
        let slot = Slot::new(kind, portion);
        // One sampler serves all of them: a sample shows where the thread is, whatever is counted.
        if slot.is_portion() && self.ring_sampler.is_none() {
            self.ring_sampler = Some(RingSampler::start(self.kernel, self.notes.target())?);
        }
        // A count comes before samples, which can be had by interrupts.
        while !self.has_room()
            && let Some(sampled) = self.which(Slot::is_sampled).iter().next()
        {
            pebs::Host::end_sampling(self, sampled);
            self.unsampled.insert(sampled);
        }
        // Any other event may stand still while the guest runs, and nothing is wrong.
        let is_steady = kind == probe(self.chooser.backing, self.chooser.guest);
        match self.events.open(counter, kind, is_steady) {
            Ok(counted) => {
                self.slots[counter] = slot;
                if let Some(pace) = &mut self.pace {
                    pace.begin(counter, counted, self.kernel.now());
                }
                Ok(())
            }
            Err(error) => {
                self.end_ring_sampler();
                Err(self.chooser.lost(kind, &error))
            }
        }
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        let slot = &mut self.slots[counter];
        if let Some(time) = &mut slot.portion {
            time.expect(events);
        }
        if !self.events.counts(counter) {
            slot.period.plan(events);
            // A signal of the previous period has come by now, and does not matter.
            self.notes.forget(counter);
            return;
        }
        let Some(events) = events else {
            // The event keeps its period, as to end it takes a system call: a stray signal is rarer.
            slot.period.drop_wish();
            return;
        };
        self.program(counter, events, self.events.counting());
        // A signal of the previous period is noted by the time the system call ends. A noted signal may also be of the
        // new period.
        if let Period::Set { certain, .. } = &mut self.slots[counter].period {
            *certain = !self.notes.has(counter);
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        self.run_samplers(counters, true);
        self.divide_time();
        let counting = self.events.counting() | counters;
        for counter in counters {
            if let Some(events) = self.slots[counter].period.planned() {
                self.program(counter, events, counting);
            }
            let slot = &mut self.slots[counter];
            if slot.is_portion()
                && slot.period == Period::Endless
                && self.events.set_period(counter, LONGEST)
            {
                slot.period = Period::Stale;
            }
        }
        self.spread(counters, counting);
        self.events.resume(counters);
    }

    fn pause(&mut self, counters: CounterSet) {
        self.run_samplers(counters, false);
        self.divide_time();
        self.events.stop(counters);
    }

    fn read(&mut self, counter: Counter) -> u64 {
        self.divide_time();
        self.events.read(counter);
        self.value(counter)
    }

    fn release(&mut self, counter: Counter) {
        self.events.close(counter);
        self.slots[counter] = Slot::default();
        self.end_ring_sampler();
    }

    /// Makes at most two system calls for a group, and for each event outside it, but counts one operation: a guest that
    /// stops a counter reads it next, and then the total is known.
    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        let only_counts = |counter| self.slots[counter].only_counts();
        let only_count = counters.iter().all(only_counts);
        // Stopping a group has the kernel schedule all events of the thread anew, twice at each switch of tasks.
        let known = if only_count && self.events.stand_by(counters) {
            true
        } else {
            self.run_samplers(counters, false);
            self.divide_time();
            self.events.stop(counters) && self.events.read_group()
        };
        for counter in counters {
            totals[counter] = match known {
                true => self.value(counter),
                false => self.read(counter),
            };
        }
        true
    }

    fn support_pebs(&mut self) -> Option<&mut dyn pebs::Host> {
        Some(self)
    }

    fn repeats(&self) -> bool {
        self.options.repeating
    }

    fn shortest_period(&self, sharing: u32) -> u64 {
        match self.chooser.backing {
            Backing::Clock => self.units.to_guest_up(FLOOR * u64::from(sharing)),
            // What is too short for a hardware event is found out, and its report then vouches for nothing.
            Backing::Hardware => 1,
        }
    }

    /// Returns true: perf reports no branches of a guest, so an embedder that offers their records follows the guest.
    fn follows_branches(&self) -> bool {
        true
    }

    /// Returns true: the signal is the vCPU thread's own, and the VMM checks for it at each exit.
    fn reports_promptly(&self) -> bool {
        true
    }

    fn deficit(&self, counter: Counter) -> Option<Lost> {
        let sampler = self.ring_sampler.as_ref();
        // Time that no sample divides would be made up.
        if self.slots[counter].is_portion() && sampler.is_some_and(RingSampler::is_blind) {
            return Some(Lost::Unsupported);
        }
        self.events.last(counter)?.deficit
    }
}

impl pebs::Host for PerfHost {
    fn guest(&mut self) -> Option<&mut dyn Guest> {
        Some(self.guest.ask()?)
    }

    /// Returns 0 where the period is too short or the kernel refuses.
    fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        let period = self.units.to_count(events.get());
        let others = self.which(Slot::is_sampled) - counter.alone();
        let shortest = sampler::SHORTEST * u64::from(1 + others.len());
        let has_room = self.slots[counter].is_sampled() || self.has_room();
        let (thread, counts) = (self.notes.target(), self.events.counts(counter));
        let Slot {
            sampled: Some(kind),
            sampler,
            ..
        } = &mut self.slots[counter]
        else {
            return 0;
        };
        if !self.options.sampling || period < shortest || !has_room {
            return 0;
        }
        if sampler.is_none() {
            *sampler = CounterSampler::open(self.kernel, *kind, thread);
        }
        let begun = sampler
            .as_mut()
            .and_then(|sampler| sampler.begin(period, counts));
        // What the kernel refuses, it refuses again.
        self.options.sampling = begun.is_some();
        begun.unwrap_or(0)
    }

    fn end_sampling(&mut self, counter: Counter) {
        if let Some(sampler) = &mut self.slots[counter].sampler {
            sampler.end();
        }
    }

    /// The samples have the guest's time, or the host's where no guest is set.
    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        let Some(sampler) = &mut self.slots[counter].sampler else {
            return TakenSamples::NONE;
        };
        let mut taken = sampler.take(samples);
        let Some(guest) = self.guest.ask().filter(|_| taken.samples != 0) else {
            return taken;
        };
        // A record without the guest's time would be sorted wrongly among those with it: better none.
        let Ok(offset) = guest.tsc_offset() else {
            taken.lost += taken.samples as u64;
            taken.samples = 0;
            return taken;
        };
        for sample in &mut samples[..taken.samples] {
            sample.tsc = sample.tsc.wrapping_add(offset);
        }
        taken
    }
}

#[cfg(test)]
mod tests;
