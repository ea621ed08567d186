//! The counters of a PMU, and all that counting changes: values, overflow bits, the gate, the PMI, and the records that
//! overflows ask for. They are the [`Model`] of their bank: registers only [control](Control) them.

mod held;

use core::mem;
use core::num::NonZeroU64;

use super::registers::{Control, Counted, Freeze, Registers};
use super::{CounterConfig, EventFilter, lbr, pebs, status};
use crate::counter::{
    Bank, Counter, CounterHost, CounterSet, Events, FAR, Lost, Model, Policy, Slots, Statistics,
};

/// The counters of one PMU. What they do is in their [`Control`]s, as the registers said when these were last
/// [`adopted`](Self::adopt): registers that were written since do not change what is counted before.
#[derive(Clone, Debug)]
pub(super) struct Counters<V> {
    bank: Bank<CounterConfig, V>,
    filter: EventFilter,
    controls: Slots<Control>,
    /// Writes PEBS records, where the guest has them.
    pub(super) pebs: Option<pebs::Unit>,
    /// How the host samples each counter that the unit has it sample.
    pub(super) sampled: Slots<pebs::Sampled>,
    /// The last branch records, where the guest has them.
    pub(super) lbr: Option<lbr::Unit>,
    /// Counters that the global control register lets count.
    gate: CounterSet,
    /// Counters' bits in the global status register.
    overflowed: CounterSet,
    /// The other bits of the global status register.
    status: u64,
    /// An overflow has requested a PMI that nobody has taken.
    pmi_due: bool,
    /// A PMI waits until the guest has been followed. It has not been requested.
    pmi_held: bool,
    /// Counters whose PEBS record waits for the same.
    records_held: CounterSet,
    /// Whether PMIs and records have to wait for that.
    holds_pmis: bool,
    /// What the request of a PMI stops the counters by.
    freezing: Option<Freeze>,
    /// Whether the request of a PMI stops the last branch records.
    freezes_branches: bool,

    // What the controls say, as sets.
    /// Counters that the guest has enabled by their own controls.
    enabled: CounterSet,
    /// Counters that ask for an interrupt.
    interrupting: CounterSet,
    /// Counters that ask for a PEBS record, and so for no interrupt of their own.
    recording: CounterSet,
    /// Those of them that have overflowed and wait for it: none between two calls of the PMU.
    unrecorded: CounterSet,
}

impl<V: Events> Counters<V> {
    /// Returns the counters of a PMU with these registers out of reset. They do nothing until they
    /// [adopt](Self::adopt) controls.
    pub(super) fn new<R: Registers>(
        registers: &R,
        filter: EventFilter,
        policy: Policy,
        events: V,
    ) -> Self {
        Self {
            bank: Bank::new(policy, registers.counters(), events),
            filter,
            controls: Slots::filled(Control::NONE),
            pebs: registers.pebs().map(pebs::Unit::new),
            sampled: Slots::default(),
            lbr: registers.lbr(),
            gate: registers.gate_at_reset(),
            overflowed: CounterSet::EMPTY,
            status: 0,
            pmi_due: false,
            pmi_held: false,
            records_held: CounterSet::EMPTY,
            holds_pmis: false,
            freezing: None,
            freezes_branches: false,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            recording: CounterSet::EMPTY,
            unrecorded: CounterSet::EMPTY,
        }
    }

    /// All counters are zero, without a host event, and those of `gate` are let count.
    pub(super) fn reset<H: CounterHost<CounterConfig>>(&mut self, gate: CounterSet, host: &mut H) {
        self.bank.reset(host);
        if let Some(pebs) = &mut self.pebs {
            pebs.reset();
        }
        if let Some(lbr) = &mut self.lbr {
            lbr.reset();
        }
        self.restore(&Counted {
            gate,
            ..Counted::default()
        });
    }

    /// Returns what a guest can see.
    pub(super) fn counted(&self) -> Counted {
        let mut values = Slots::default();
        for n in self.bank.existing {
            values[n] = self.bank.counters[n].value;
        }
        Counted {
            values,
            gate: self.gate,
            overflowed: self.overflowed,
            status: self.status,
            pmi_due: self.pmi_due,
        }
    }

    /// The other way round.
    pub(super) fn restore(&mut self, counted: &Counted) {
        for n in self.bank.existing {
            self.bank.counters[n].value = counted.values[n];
        }
        self.gate = counted.gate;
        self.overflowed = counted.overflowed;
        self.status = counted.status;
        self.pmi_due = counted.pmi_due;
        // The branches that were waited for would have been those of the machine before.
        self.pmi_held = false;
        self.records_held = CounterSet::EMPTY;
    }

    /// From now on counter `n` does what `control` says.
    pub(super) fn adopt(&mut self, n: Counter, control: Control) {
        self.controls[n] = control;
        // A counter of no ring counts nothing, and needs no host event.
        let counts = control.event.user || control.event.kernel;
        self.enabled.put(n, control.on && counts);
        // Records take the place of the interrupt (SDM vol. 3B, 20.9): the buffer's threshold interrupts.
        self.interrupting
            .put(n, control.interrupts && !control.records);
        self.recording.put(n, control.records);
    }

    /// Returns how often the host was called, and what it could not do.
    pub(super) const fn statistics(&self) -> Statistics {
        self.bank.hosted.statistics()
    }

    /// Returns the observer given at the beginning.
    pub(super) const fn events(&mut self) -> &mut V {
        &mut self.bank.observer
    }

    pub(super) fn set_filter(&mut self, filter: EventFilter) {
        self.filter = filter;
    }

    pub(super) fn control(&self, n: Counter) -> &Control {
        &self.controls[n]
    }

    /// The global control register. A frozen PMU keeps it, where freezing is a status bit.
    pub(super) const fn gate(&self) -> CounterSet {
        self.gate
    }

    /// Counters that the global registers let count.
    pub(super) const fn open(&self) -> CounterSet {
        if self.status & status::COUNTERS_FROZEN != 0 {
            return CounterSet::EMPTY;
        }
        self.gate
    }

    pub(super) const fn set_gate(&mut self, gate: CounterSet) {
        self.gate = gate;
    }

    /// Counters that the guest has enabled by their own controls, whatever the global ones say.
    pub(super) const fn switched_on(&self) -> CounterSet {
        self.enabled
    }

    pub(super) const fn interrupting(&self) -> CounterSet {
        self.interrupting
    }

    pub(super) const fn recording(&self) -> CounterSet {
        self.recording
    }

    /// Counters whose overflow somebody waits for.
    pub(super) fn reported(&self) -> CounterSet {
        self.interrupting | self.recording
    }

    /// Counters whose overflow does something at once: it stops all of them, or writes to the guest's memory.
    pub(super) fn acting(&self) -> CounterSet {
        match self.freezing {
            Some(_) => self.recording | self.interrupting,
            None => self.recording,
        }
    }

    pub(super) const fn overflowed(&self) -> CounterSet {
        self.overflowed
    }

    /// Bits of the global status register that are no counter's.
    pub(super) const fn status(&self) -> u64 {
        self.status
    }

    pub(super) fn clear_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed -= counters;
        self.status &= !others;
    }

    pub(super) fn set_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed |= counters;
        self.status |= others;
    }

    pub(super) const fn set_freezing(&mut self, freezing: Option<Freeze>, branches: bool) {
        self.freezing = freezing;
        self.freezes_branches = branches;
    }

    /// Whether the last branch records are frozen.
    pub(super) const fn are_branches_frozen(&self) -> bool {
        self.status & status::BRANCHES_FROZEN != 0
    }

    pub(super) const fn pmi_due(&self) -> bool {
        self.pmi_due
    }

    pub(super) const fn take_pmi(&mut self) -> bool {
        mem::replace(&mut self.pmi_due, false)
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

    /// Whether the overflow of `n` waits for a PEBS record. Forgets that.
    pub(super) fn take_unrecorded_of(&mut self, n: Counter) -> bool {
        let waits = self.unrecorded.contains(n);
        self.unrecorded.remove(n);
        waits
    }

    /// Returns the counters whose overflow waits for a PEBS record, and forgets them.
    pub(super) const fn take_unrecorded(&mut self) -> CounterSet {
        mem::replace(&mut self.unrecorded, CounterSet::EMPTY)
    }

    /// Has the unit of PEBS work on these counters, where the host samples one or an overflow waits for its record.
    pub(super) fn with_pebs(&mut self, work: impl FnOnce(&mut pebs::Unit, &mut Self)) {
        let is_idle = self.unrecorded.is_empty();
        // Out of its place meanwhile, because it changes the counters that it is a part of. That is two copies for each
        // call, so what is large stays here.
        if let Some(mut pebs) = (self.pebs).take_if(|pebs| !is_idle || pebs.is_sampling()) {
            work(&mut pebs, self);
            self.pebs = Some(pebs);
        }
    }

    /// The next overflow of each of `concerned` is an exit again, where the host has sampled it.
    pub(super) fn end_sampling<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        host: &mut H,
    ) {
        if let Some(pebs) = &mut self.pebs {
            pebs.end_sampling(concerned, self.bank.hosted.backed(), host);
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
        self.open() & self.enabled
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
        let rewritten = self.overflowed | self.recording;
        if rewritten.contains(n) && distance >= FAR {
            return None;
        }
        let due = match &self.pebs {
            Some(pebs) => pebs.report_due(n, distance, &self.sampled[n]),
            None => distance,
        };
        NonZeroU64::new(due)
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
                self.unrecorded.insert(n);
                return true;
            }
            self.overflowed.insert(n);
            if self.interrupting.contains(n) {
                self.request_pmi();
            }
        }
        overflows
    }

    /// Writes the records that overflows ask for.
    fn follow_up<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.with_pebs(|pebs, counters| pebs.record(counters, host));
    }
}
