//! The counters of a PMU, and all that counting changes: values, overflow bits, the gate, the PMI, and the records that
//! overflows ask for. They are the [`Model`] of their bank: registers only [control](Control) them, and ask for an
//! [`Effect`] when they are written.

mod records;
mod sampling;

use core::mem;
use core::num::NonZeroU64;

use super::status::Freeze;
use super::{CounterConfig, EventFilter, EventKind, RawPerfEvtSel, lbr, pebs, status};
use crate::counter::{
    Bank, Counter, CounterHost, CounterSet, Events, FAR, Lost, Model, Policy, Slots,
};

/// What the registers have one counter do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control {
    pub(super) event: CounterConfig,
    /// Enabled by its own register.
    pub(super) on: bool,
    /// Asks for an interrupt when it overflows.
    pub(super) interrupts: bool,
    /// Asks for a PEBS record when it overflows, in place of an interrupt.
    pub(super) records: bool,
    /// Its PEBS records have more groups than the basic one.
    pub(super) adaptive: bool,
    /// Why no host can count it.
    pub(super) unsupported: Option<Lost>,
    /// Which bits of the counter exist.
    pub(super) mask: u64,
}

impl Control {
    /// A counter that does not exist.
    pub(super) const NONE: Self = Self {
        // Any event will do: without a ring the counter gets no host event.
        event: RawPerfEvtSel(0).counts(EventKind::Fixed(0)),
        on: false,
        interrupts: false,
        records: false,
        adaptive: false,
        unsupported: None,
        mask: 0,
    };

    /// Whether a counter that did what `self` says is concerned when it does what `next` says. What is in its records is
    /// decided when they are written.
    pub(super) fn is_changed_by(&self, next: &Self) -> bool {
        // The groups of a record are looked up when it is written, so they disturb no counting.
        let adaptive = next.adaptive;
        Self { adaptive, ..*self } != *next
    }

    /// Whether the counter does something else, or stands still, with `next`: more than what its overflow asks for.
    pub(super) fn counts_otherwise(&self, next: &Self) -> bool {
        Self {
            interrupts: next.interrupts,
            records: next.records,
            adaptive: next.adaptive,
            ..*self
        } != *next
    }
}

/// Where the value of a register that is read comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The register as it was written, or a constant.
    Register(u64),
    /// The value of this counter, which exists.
    Counter(Counter),
    /// The global status register: the bits of counters, and the others.
    Status,
    /// The global control register. An overflow can change it where it freezes the counters.
    Gate,
}

/// What the write of a register does to the counters. The register has its new value already; counts that the host
/// holds are still to be taken as the old value wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing: no counter is concerned.
    Nothing,
    /// The [`Control`] of these counters may have changed.
    Configure(CounterSet),
    // Apart from `Configure`: a handler closes and opens the gate for each sample, and no count is taken for that.
    /// The global control register now lets these counters count, and no other.
    Gate(CounterSet),
    /// This counter, which exists, has this value.
    Counter(Counter, u64),
    /// The guest clears bits of the global status register: those of counters, and others.
    ClearStatus(CounterSet, u64),
    /// The guest sets bits of the global status register: those of counters, and others.
    SetStatus(CounterSet, u64),
    // Not the new answer: the overflows so far have to be taken under the old one.
    /// The answer of the registers' `freezing` may have changed.
    Freezing,
    /// What an adaptive PEBS record holds has changed.
    RecordGroups,
    /// PEBS records go elsewhere.
    RecordArea,
}

/// The counters of one PMU. What they do is in their [`Control`]s, as the registers said when these were last
/// [`adopted`](Self::adopt): registers that were written since do not change what is counted before.
#[derive(Clone, Debug)]
pub(super) struct Counters<V> {
    pub(super) bank: Bank<CounterConfig, V>,
    pub(super) filter: EventFilter,
    pub(super) controls: Slots<Control>,
    /// The global control and status registers, and the PMI.
    pub(super) global: Global,
    /// What the request of a PMI stops the counters by, and whether it stops the last branch records.
    pub(super) freezing: (Option<Freeze>, bool),
    /// PEBS. Without it, no counter asks for a record.
    pub(super) pebs: pebs::Unit,
    /// The last branch records.
    pub(super) lbr: lbr::Unit,

    // What the controls say, as sets.
    /// Counters that the guest has switched on by their own controls, whatever the global registers say.
    pub(super) switched_on: CounterSet,
    /// Counters that ask for an interrupt.
    pub(super) interrupting: CounterSet,
    /// Counters that ask for a PEBS record, and so for no interrupt of their own.
    pub(super) recording: CounterSet,
}

impl<V: Events> Counters<V> {
    /// Returns these counters out of reset, without last branch records. They do nothing until a gate lets them
    /// and they [adopt](Self::adopt) controls.
    pub(super) fn new(
        existing: CounterSet,
        filter: EventFilter,
        policy: Policy,
        events: V,
    ) -> Self {
        Self {
            bank: Bank::new(policy, existing, events),
            filter,
            controls: Slots::filled(Control::NONE),
            global: Global::default(),
            freezing: (None, false),
            pebs: pebs::Unit::default(),
            lbr: lbr::Unit::none(),
            switched_on: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            recording: CounterSet::EMPTY,
        }
    }

    /// All counters are zero, without a host event, and those of `gate` are let count.
    pub(super) fn reset<H: CounterHost<CounterConfig>>(&mut self, gate: CounterSet, host: &mut H) {
        self.bank.reset(host);
        self.pebs.reset();
        self.lbr.reset();
        self.global = Global {
            gate,
            ..Global::default()
        };
    }

    /// From now on counter `n` does what `control` says.
    pub(super) fn adopt(&mut self, n: Counter, control: Control) {
        self.controls[n] = control;
        // A counter of no ring counts nothing, and needs no host event.
        let counts = control.event.user || control.event.kernel;
        self.switched_on.put(n, control.on && counts);
        // Records take the place of the interrupt (SDM vol. 3B, 20.9): the buffer's threshold interrupts.
        self.interrupting
            .put(n, control.interrupts && !control.records);
        self.recording.put(n, control.records);
    }

    /// Counters whose overflow somebody waits for.
    pub(super) fn reported(&self) -> CounterSet {
        self.interrupting | self.recording
    }

    /// Counters whose overflow does something at once: it stops all of them, or writes to the guest's memory.
    pub(super) fn acting(&self) -> CounterSet {
        match self.freezing.0.is_some() {
            true => self.recording | self.interrupting,
            false => self.recording,
        }
    }

    pub(super) fn value(&self, n: Counter) -> u64 {
        self.bank.counters[n].value
    }

    pub(super) fn set_value(&mut self, n: Counter, value: u64) {
        self.bank.counters[n].value = value;
    }

    /// Returns in how many events `n` overflows: 1 to 2^63.
    pub(super) fn distance(&self, n: Counter) -> u64 {
        // Nothing wraps: a counter has 63 bits at most, and no bits beyond its mask.
        (self.controls[n].mask - self.value(n)).wrapping_add(1)
    }

    /// Finds out anew whether PMIs and records have to wait for branches, and returns that. `follows`: the embedder follows
    /// its guest for them alone.
    // Branches are handed over only while something waits for them.
    pub(super) fn find_delays(&mut self, follows: bool) -> bool {
        let frozen = self.global.are_branches_frozen();
        self.lbr.find_delays(frozen, follows)
    }

    /// The guest has been followed: the records that have waited for it are written, and the PMI is requested.
    pub(super) fn end_delay<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // What comes of the records has its branches.
        self.lbr.delays = false;
        let recorded = mem::take(&mut self.lbr.records_delayed);
        self.pebs.unrecorded |= recorded;
        self.follow_up(host);
        for n in recorded {
            // Reading the host event again returns more than its last report.
            if self.due(n) != self.bank.hosted.armed(n) {
                self.settle(n.alone(), host);
            }
        }
        if self.lbr.end_run() {
            self.global.request_pmi(self.freezing);
        }
    }

    /// Requests a PMI, or has it wait until the guest has been followed.
    fn request_pmi(&mut self) {
        if !self.lbr.delay_pmi(self.global.pmi_due) {
            self.global.request_pmi(self.freezing);
        }
    }
}

impl<V: Events> Model for Counters<V> {
    type Event = CounterConfig;
    type Observer = V;

    fn bank(&self) -> &Bank<CounterConfig, V> {
        &self.bank
    }

    fn bank_mut(&mut self) -> &mut Bank<CounterConfig, V> {
        &mut self.bank
    }

    fn enabled(&self) -> CounterSet {
        self.global.open() & self.switched_on
    }

    fn event(&self, n: Counter) -> CounterConfig {
        self.controls[n].event
    }

    fn is_countable(&self, n: Counter) -> bool {
        // The rings are checked where a control is adopted.
        self.filter.allows(self.event(n).event)
    }

    fn unsupported(&self, n: Counter) -> Option<Lost> {
        self.controls[n].unsupported
    }

    /// 1 to 2^63 events.
    fn report_wanted(&self, n: Counter) -> Option<NonZeroU64> {
        if !self.is_awaited(n) {
            return None;
        }
        let distance = self.distance(n);
        // A counter that has just overflowed is about to be written by the guest's handler. Asking
        // the host for what nobody expects would be a call for each PMI: the end of a slice reads
        // it, which is soon enough.
        let rewritten = self.global.overflowed | self.recording;
        if rewritten.contains(n) && distance >= FAR {
            return None;
        }
        NonZeroU64::new(self.pebs.sampling.due(n, distance))
    }

    fn is_awaited(&self, n: Counter) -> bool {
        self.reported().contains(n)
    }

    fn advance(&mut self, n: Counter, events: u64) -> bool {
        let mask = self.controls[n].mask;
        let value = self.value(n);
        self.set_value(n, value.wrapping_add(events) & mask);
        let overflows = events > mask - value;
        if overflows {
            self.bank.observer.overflowed(n);
            // What was counted was counted while `n` was enabled and under the controls that are still here: every
            // change of them settles first.
            if self.recording.contains(n) {
                // The record is written when all counts are taken: it needs the host, and may begin another period.
                self.pebs.unrecorded.insert(n);
                return true;
            }
            self.global.set_status(n.alone(), 0);
            if self.interrupting.contains(n) {
                self.request_pmi();
            }
        }
        overflows
    }

    /// Writes the records that overflows ask for.
    fn follow_up<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // Asked here: without PEBS, or between two overflows, an access pays for no more than this.
        if !(self.pebs.unrecorded | self.pebs.sampling.counters).is_empty() {
            self.write_records(host);
        }
    }
}

/// The state behind the global control and status registers of one PMU, all of which a guest can see.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Global {
    /// The global control register: the counters that it lets count. A frozen PMU keeps it, where freezing is a status
    /// bit.
    pub(super) gate: CounterSet,
    /// Counters' bits in the global status register.
    pub(super) overflowed: CounterSet,
    /// The other bits of the global status register.
    pub(super) status: u64,
    /// An overflow has requested a PMI that nobody has taken.
    pub(super) pmi_due: bool,
}

impl Global {
    /// Counters that the global registers let count.
    pub(super) const fn open(&self) -> CounterSet {
        // The register itself keeps its value, which the guest finds again when it thaws the counters.
        if self.status & status::COUNTERS_FROZEN != 0 {
            return CounterSet::EMPTY;
        }
        self.gate
    }

    pub(super) fn clear_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed -= counters;
        self.status &= !others;
    }

    pub(super) fn set_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed |= counters;
        self.status |= others;
    }

    /// Whether the last branch records are frozen.
    pub(super) const fn are_branches_frozen(&self) -> bool {
        self.status & status::BRANCHES_FROZEN != 0
    }

    pub(super) const fn take_pmi(&mut self) -> bool {
        mem::replace(&mut self.pmi_due, false)
    }

    /// Requests a PMI, and stops what the guest wants stopped by it.
    pub(super) const fn request_pmi(&mut self, (counters, branches): (Option<Freeze>, bool)) {
        self.pmi_due = true;
        // The request, not its delivery, stops the counters (SDM 18.4.7): LVTPC may be masked.
        match counters {
            Some(Freeze::Gate) => self.gate = CounterSet::EMPTY,
            // Version 4 and later: the handler thaws by one write, which acknowledges the overflow, too.
            Some(Freeze::Status) => self.status |= status::COUNTERS_FROZEN,
            None => {}
        }
        if branches {
            self.status |= status::BRANCHES_FROZEN;
        }
    }
}
