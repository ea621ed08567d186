//! The host: perf events behind guest counters.
//!
//! # One-shot reports from periodic events
//!
//! The engine asks for one report, but a perf event overflows again and again. Stopping it after
//! the first overflow (PERF_EVENT_IOC_REFRESH) would stop its counting too, and would cost a system
//! call to undo. So the event continues. The guest's handler usually gives it another period at
//! once. Only if a second overflow comes that nobody waits for is the period made endless.

mod idle;
mod rings;
pub(crate) mod sampling;
mod slot;
mod units;

use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;

use vpmu::counter::{CounterHost, CounterSet, Lost, Report, Taken};
use vpmu::x86::pebs::Place;
use vpmu::x86::{ArchEvent, CounterConfig};

use crate::choose::{Backing, Chooser, Vendor};
use crate::error::PerfError;
use crate::event::{COUNTERS, ENDLESS, PerfEvent, Rings};
use crate::group::Group;
use crate::kick::Kick;
use crate::notes::Notes;
use crate::options::{self, PerfOptions};
use rings::{Watch, Whereabouts};
use slot::Slot;

const NS: u64 = 1_000_000_000;

/// Returns the reason why there is no perf event.
fn lost(error: &io::Error) -> Lost {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL) => Lost::Unsupported,
        Some(libc::EMFILE | libc::ENFILE | libc::EBUSY | libc::ENOSPC) => Lost::Busy,
        _ => Lost::Failed,
    }
}

/// A [`CounterHost`] of the thread that made it. Another thread may use it while that thread does not run
/// its guest, and drop it.
#[derive(Debug)]
pub struct PerfHost {
    chooser: Chooser,
    tsc_hz: u64,
    signal: i32,
    repeating: bool,
    /// Whether the kernel may sample the guest, and has not refused.
    sampling: bool,
    slots: [Option<Slot>; COUNTERS],
    /// The group of all their events, made with the first of them.
    group: Option<Group>,
    /// The samples of the thread, while there is a counter of one ring.
    watch: Option<Watch>,
    whereabouts: Whereabouts,
    notes: Arc<Notes>,
    /// The target of the handler's kick, kept alive.
    _kick: Kick,
}

impl PerfHost {
    /// The shortest distance between overflows, in a clock's ns. With several perf events, the distance of each is as
    /// many times as long, or their timers together would leave no time for anything else, the guest included. An
    /// emulated host takes half of that for one overflow. A hardware event does not know time, and takes the number as
    /// events: at 4 GHz and one event a cycle, that is a quarter of the time.
    pub const FLOOR: u64 = 50_000;

    /// Makes a host for the guest that the calling thread runs. Does the work of [`prepare`](crate::prepare), unless
    /// that is done.
    ///
    /// # Errors
    ///
    /// Says why perf events are not available, and what to do.
    pub fn new(options: PerfOptions) -> Result<Self, PerfError> {
        Self::counting(options, true)
    }

    /// Like [`PerfHost::new`], but counts the thread itself, which runs no guest: to try and to
    /// measure this machine's perf events.
    ///
    /// # Errors
    ///
    /// As for [`PerfHost::new`].
    pub fn of_thread(options: PerfOptions) -> Result<Self, PerfError> {
        Self::counting(options, false)
    }

    fn counting(options: PerfOptions, guest: bool) -> Result<Self, PerfError> {
        if options.tsc_hz == 0 {
            return Err(PerfError::NoFrequency);
        }
        options::prepare(&options)?;
        let chooser = Chooser::new(options.backing, guest, options.approximate_instructions)?;
        Ok(Self {
            chooser,
            tsc_hz: options.tsc_hz,
            signal: options::signal(&options),
            repeating: options.repeating,
            sampling: options.sampling,
            slots: [const { None }; COUNTERS],
            group: None,
            watch: None,
            whereabouts: Whereabouts::default(),
            notes: Notes::claim(&options.kick).ok_or(PerfError::Taken)?,
            _kick: options.kick,
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

    /// Returns whether the calling thread is the one that made this host.
    pub fn is_here(&self) -> bool {
        self.notes.is_here()
    }

    /// Returns whether overflows have been signalled since the last [`take_overflows`](Self::take_overflows): a look into
    /// memory.
    pub fn has_overflows(&self) -> bool {
        self.notes.any()
    }

    /// Takes the overflows that have been signalled since the last call. Costs a look into memory
    /// when there are none.
    pub fn take_overflows(&mut self) -> impl Iterator<Item = (u8, Report)> + use<> {
        let (mut due, mut unsure) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.notes.take() {
            if self.has_share(counter) {
                if self.is_up(counter) {
                    unsure.insert(counter);
                }
                continue;
            }
            let Some(slot) = self.slots.get_mut(usize::from(counter)) else {
                continue;
            };
            let Some(slot) = slot else {
                continue;
            };
            if slot.armed {
                slot.armed = self.repeating;
                let reports = if slot.certain { &mut due } else { &mut unsure };
                reports.insert(counter);
                // The engine reads an event that is not certain, and then knows where its period stands.
                slot.certain |= self.repeating;
            } else if !slot.endless {
                slot.endless = slot.event.set_period(ENDLESS);
            }
        }
        if self.notes.take_overrun() {
            for counter in 0..COUNTERS as u8 {
                if self.has_share(counter) && self.is_up(counter) {
                    unsure.insert(counter);
                }
            }
            for (counter, slot) in (0..).zip(&mut self.slots) {
                if let Some(slot) = slot
                    .as_mut()
                    .filter(|slot| slot.armed && slot.share.is_none())
                {
                    slot.armed = self.repeating;
                    unsure.insert(counter);
                }
            }
        }
        let due = due.iter().map(|counter| (counter, Report::Due));
        due.chain(unsure.iter().map(|counter| (counter, Report::Unsure)))
    }

    fn slot(&mut self, counter: u8) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(counter))?.as_mut()
    }

    /// Returns the counters whose perf event runs, or is about to.
    fn running(&self) -> CounterSet {
        self.which(|slot| slot.running)
    }

    /// Stops these counters. Returns whether they were stopped together, with no other that runs.
    fn pause_whole(&mut self, counters: CounterSet) -> bool {
        self.let_sample(counters, false);
        self.look();
        let running = self.running();
        let group = self.group.as_mut();
        let whole = group.is_some_and(|group| group.stop(counters, running));
        if whole {
            self.slots
                .iter_mut()
                .flatten()
                .for_each(|slot| slot.ahead = None);
        }
        for counter in counters {
            if !whole {
                self.disable(counter);
            }
            if let Some(slot) = self.slot(counter) {
                slot.running = false;
            }
        }
        whole
    }

    /// Stops the perf event by itself.
    fn disable(&mut self, counter: u8) {
        if let Some(slot) = self.slot(counter) {
            slot.event.disable();
            slot.ahead = None;
        }
        if let Some(group) = &mut self.group {
            group.note(counter, false);
        }
    }

    /// Takes the totals of all perf events of the group.
    fn read_group(&mut self) -> bool {
        let Some(Ok(totals)) = self.group.as_ref().map(Group::read) else {
            return false;
        };
        for (counter, total) in totals {
            if let Some(Some(slot)) = self.slots.get_mut(usize::from(counter)) {
                slot.take(total);
            }
        }
        true
    }

    /// Gives the perf event its period.
    fn program(&mut self, counter: u8, events: NonZeroU64) {
        let period = self.to_host(events.get());
        if let Some(slot) = self.slot(counter) {
            slot.asked = Some((events, period));
            slot.armed = slot.event.set_period(period.min(Self::longest(slot)));
            slot.endless = false;
        }
    }
}

impl Drop for PerfHost {
    fn drop(&mut self) {
        self.notes.retire();
    }
}

impl CounterHost<CounterConfig> for PerfHost {
    fn create(&mut self, counter: u8, config: &CounterConfig) -> Result<(), Lost> {
        let rings = Rings {
            user: config.user,
            kernel: config.kernel,
            guest: self.chooser.guest,
        };
        let raw = Vendor::of(config.event).zip(config.raw());
        let kind = self.chooser.kind(config.architectural(), raw, rings)?;
        if self.chooser.backing == Backing::Clock && self.group.is_none() {
            self.group = Some(Group::new(&self.notes).map_err(|error| lost(&error))?);
        }
        let share = self.share(config)?;
        let leader = self.group.as_ref().map(Group::leader);
        let event = PerfEvent::open(kind, &self.notes, self.signal, leader);
        let event = event.map_err(|error| lost(&error))?;
        let is_hardware = self.chooser.backing == Backing::Hardware;
        let slot = self
            .slots
            .get_mut(usize::from(counter))
            .ok_or(Lost::Unsupported)?;
        if let Some(group) = &mut self.group {
            group.add(counter);
        }
        self.notes.watch(counter, Some(event.fd()));
        *slot = Some(Slot {
            event,
            armed: false,
            certain: false,
            running: false,
            endless: true,
            multiplexed: false,
            total: 0,
            idle: false,
            skipped: 0,
            ahead: None,
            wanted: None,
            asked: None,
            samples: (is_hardware || config.user && config.kernel).then_some(kind),
            sampling: None,
            share,
        });
        Ok(())
    }

    fn set_period(&mut self, counter: u8, events: Option<NonZeroU64>) {
        self.expect(counter, events);
        let Some(slot) = self.slot(counter) else {
            return;
        };
        if slot.running {
            match events {
                Some(events) => {
                    self.program(counter, events);
                    // A signal of the previous period is noted by the time the system call ends. A noted signal may
                    // also be of the new period.
                    let certain = !self.notes.has(counter);
                    if let Some(slot) = self.slot(counter) {
                        slot.certain = certain;
                    }
                }
                // If a signal comes all the same, it is ignored, and it is the last.
                None => slot.armed = false,
            }
        } else {
            slot.wanted = events;
            slot.armed = events.is_some();
            slot.certain = true;
            // A signal of the previous period has come by now, and does not matter.
            self.notes.forget(counter);
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        self.wake(counters);
        self.let_sample(counters, true);
        self.look();
        for counter in counters {
            if let Some(slot) = self.slot(counter) {
                slot.running = true;
            }
        }
        for counter in counters {
            if let Some(wanted) = self.slot(counter).and_then(|slot| slot.wanted.take()) {
                self.program(counter, wanted);
            }
            self.look_at_times(counter);
        }
        self.spread(counters);
        let (stale, fresh) = match &self.group {
            Some(group) => group.changes(self.running(), self.idle_counters()),
            None => (CounterSet::EMPTY, counters),
        };
        stale.iter().for_each(|counter| self.disable(counter));
        for counter in fresh {
            if let Some(slot) = self.slot(counter) {
                slot.running = slot.event.enable();
                slot.ahead = None;
                let running = slot.running;
                if let Some(group) = &mut self.group {
                    group.note(counter, running);
                }
            }
        }
        if let Some(group) = &mut self.group {
            group.start();
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        self.pause_whole(counters);
    }

    fn read(&mut self, counter: u8) -> u64 {
        self.look();
        let total = self.total(counter);
        // An event in an error state reads nothing: it stands still.
        if let (Some(slot), Some(total)) = (self.slot(counter), total) {
            slot.take(total);
        }
        self.value(counter)
    }

    fn release(&mut self, counter: u8) {
        self.notes.watch(counter, None);
        if let Some(slot) = self.slots.get_mut(usize::from(counter)) {
            *slot = None;
        }
        self.end_watch();
        if let Some(group) = &mut self.group {
            group.remove(counter);
        }
    }

    /// Makes at most two system calls for a group, and for each event outside it, but counts one operation: a guest that
    /// stops a counter reads it next, and then the total is known.
    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut [u64; 32]) -> bool {
        let whole = self.idle(counters) || self.pause_whole(counters) && self.read_group();
        for counter in counters {
            if let Some(total) = totals.get_mut(usize::from(counter)) {
                *total = match whole {
                    true => self.value(counter),
                    false => self.read(counter),
                };
            }
        }
        true
    }

    fn sample(&mut self, counter: u8, events: Option<NonZeroU64>) -> u64 {
        match events {
            Some(events) => self.begin_sampling(counter, events),
            None => {
                self.end_sampling(counter);
                0
            }
        }
    }

    /// A place's TSC is the host's.
    fn take_samples(&mut self, counter: u8, places: &mut [Place]) -> Taken {
        self.taken(counter, places)
    }

    fn repeats(&self) -> bool {
        self.repeating
    }

    fn shortest_period(&self, sharing: u32) -> u64 {
        let floor = Self::FLOOR * u64::from(sharing);
        match self.chooser.backing {
            Backing::Hardware => floor,
            Backing::Clock => {
                let cycles = u128::from(floor) * u128::from(self.tsc_hz);
                u64::try_from(cycles.div_ceil(u128::from(NS))).unwrap_or(ENDLESS)
            }
        }
    }

    /// Returns true: the signal is the vCPU thread's own, and the VMM looks for it at each exit.
    fn reports_promptly(&self) -> bool {
        true
    }

    fn deficit(&self, counter: u8) -> Option<Lost> {
        let slot = self.slots.get(usize::from(counter))?.as_ref()?;
        if slot.share.is_some() && self.is_blind() {
            return Some(Lost::Unsupported);
        }
        slot.multiplexed.then_some(Lost::Multiplexed)
    }
}
