//! One vCPU's PMU: what the models of Intel and AMD have in common, which is all but the registers.

mod model;

pub use super::registers::PmuConfig;
pub(crate) use super::registers::{Control, Registers};
use super::{ArchEvent, CounterConfig, EventFilter, Outcome, Ring, pebs};
use crate::counter::{
    Bank, CounterHost, CounterSet, CounterState, Events, Model, Report, Statistics,
};

/// One vCPU's PMU with the registers `R`: [`intel::Pmu`](super::intel::Pmu) or
/// [`amd::Pmu`](super::amd::Pmu). `V` is told what happens; by default nobody is.
///
/// No call panics, whatever a guest writes and whatever a host answers.
#[derive(Clone, Debug)]
pub struct Pmu<R: Registers, V = ()> {
    pub(super) registers: R,
    filter: EventFilter,
    events: V,
    pub(super) bank: Bank<CounterConfig>,
    /// Counters' bits in the global status register.
    pub(super) overflowed: CounterSet,
    /// An overflow has requested a PMI that nobody has taken.
    pub(super) pmi_due: bool,

    /// Counters that the guest has enabled by their own controls.
    enabled: CounterSet,
    /// Counters that ask for an interrupt.
    pub(super) interrupting: CounterSet,
    /// Counters that ask for a PEBS record, and so for no interrupt of their own.
    pub(super) recording: CounterSet,
    /// Those of them that have overflowed and wait for it: none between two calls.
    pub(super) unrecorded: CounterSet,
    /// Those that the host samples.
    pub(super) sampling: pebs::Sampling,
    pub(super) pebs: pebs::Statistics,
}

impl<R: Registers, V: Events> Pmu<R, V> {
    pub(super) fn build(config: PmuConfig<R::Capability>, events: V) -> Self {
        let mut pmu = Self {
            registers: R::power_on(config.capability),
            filter: config.filter,
            events,
            bank: Bank::new(config.policy),
            overflowed: CounterSet::EMPTY,
            pmi_due: false,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            recording: CounterSet::EMPTY,
            unrecorded: CounterSet::EMPTY,
            sampling: pebs::Sampling::default(),
            pebs: pebs::Statistics::default(),
        };
        pmu.classify(pmu.implemented());
        pmu
    }

    /// Performs RDMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn rdmsr<H: CounterHost<CounterConfig>>(&mut self, address: u32, host: &mut H) -> Outcome {
        match R::decode(address) {
            Some(msr) => self.read(msr, host),
            None => Outcome::NotHandled,
        }
    }

    /// Performs WRMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        match R::decode(address) {
            Some(msr) => self.write(msr, value, host),
            None => Outcome::NotHandled,
        }
    }

    /// Performs a read of `msr`.
    pub fn read<H: CounterHost<CounterConfig>>(&mut self, msr: R::Msr, host: &mut H) -> Outcome {
        match R::read(self, msr, host) {
            Some(value) => Outcome::Value(value),
            None => Outcome::GeneralProtection,
        }
    }

    /// Performs a write of `msr`.
    pub fn write<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: R::Msr,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        self.settle_acting(host);
        let written = R::write(self, msr, value, host);
        self.end_sampling(self.unfit(), host);
        self.apply(host);
        match written {
            Some(()) => Outcome::Done,
            None => Outcome::GeneralProtection,
        }
    }

    /// Performs RDPMC with this ECX. `ring` is who executes it, and `pce` is CR4.PCE: user space may read
    /// counters only with it.
    ///
    /// Intel's ECX\[31:16\] is the type: 0 for general counters, 0x4000 for fixed ones (SDM vol. 2B); AMD's ECX is
    /// the counter's number (APM vol. 3). Others, such as performance metrics or northbridge counters, are not there.
    pub fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        ecx: u32,
        ring: Ring,
        pce: bool,
        host: &mut H,
    ) -> Outcome {
        match self.registers.indexed(ecx) {
            Some(n) if ring == Ring::Kernel || pce => Outcome::Value(self.counter(n, host)),
            _ => Outcome::GeneralProtection,
        }
    }

    /// The host reports that `counter` has counted as far as was asked. Answers whether a PMI
    /// [is due](Self::pmi_due).
    ///
    /// With [`Report::Unsure`], reports may come late, early or for nothing. Works between
    /// [`put`](Self::put) and [`load`](Self::load) too, so that a report that arrives after its vCPU
    /// stopped still wakes it.
    pub fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: u8,
        report: Report,
        host: &mut H,
    ) -> bool {
        self.report(counter, report, host);
        self.pmi_due
    }

    /// The embedder has emulated instructions for the guest, and so did `times` times what `event`
    /// counts, in `ring`: no host event has seen it. Answers whether a PMI
    /// [is due](Self::pmi_due).
    ///
    /// A guest that has no such event enabled costs no call of the host.
    pub fn emulated<H: CounterHost<CounterConfig>>(
        &mut self,
        event: ArchEvent,
        times: u64,
        ring: Ring,
        host: &mut H,
    ) -> bool {
        self.settle_acting(host);
        let mut concerned = CounterSet::EMPTY;
        for n in self.enabled() & self.bank.countable {
            let config = self.event(n);
            let same = config.architectural() == Some(event) && config.counts_in(ring);
            if same && self.bank.counters[n].lost.is_none() && self.unsupported(n).is_none() {
                concerned.insert(n);
            }
        }
        if !concerned.is_empty() {
            // Only a counter whose report must move has to be read for it.
            self.settle(concerned & self.reported(), host);
            for n in concerned {
                self.take(n, times);
            }
            self.follow_up(host);
            self.apply(host);
        }
        self.pmi_due
    }

    /// Whether an overflow has requested a PMI that [`take_pmi`](Self::take_pmi) has not taken.
    /// Every call of this PMU that takes a host can set it.
    pub const fn pmi_due(&self) -> bool {
        self.pmi_due
    }

    /// Takes the PMI that is due, if one is. The caller delivers it as LVTPC says; if LVTPC is
    /// masked, it is lost, and the next overflow requests the next.
    ///
    /// Overflows that were counted since the last call are one PMI, as they are in a local APIC
    /// that has not delivered the first of them.
    #[must_use = "the PMI is gone unless the caller delivers it"]
    pub const fn take_pmi(&mut self) -> bool {
        core::mem::replace(&mut self.pmi_due, false)
    }

    /// The vCPU starts to run: what the guest has enabled counts again. No call of the host for a
    /// guest that has nothing enabled. A host that was too busy to back a counter is asked again.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.start_vcpu(host);
    }

    /// The vCPU stops running: nothing counts, and all that was counted is in the registers, so
    /// [`pmi_due`](Self::pmi_due) is exact. It is the end of a slice (see
    /// [`end_slice`](Self::end_slice)). No call of the host for a guest that uses no counter.
    ///
    /// Not needed where host events stop and start with the vCPU's thread by themselves.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.stop_vcpu(host);
    }

    /// A scheduling slice has ended: host events that the guest did not use in it are released, so a
    /// guest that stops profiling costs nothing again. For hosts that have no use for
    /// [`put`](Self::put), at any regular moment, minutes apart at most.
    pub fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_unreported(host);
        self.bank.hosted.end_slice(host);
        self.ask_again();
        self.apply(host);
    }

    /// Back to power-on reset, with every host event released: for a vCPU that is reset or goes
    /// away. INIT leaves a PMU as it is (SDM vol. 3A, table 10-1; APM vol. 2, table 14-1).
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.bank.reset(host);
        self.registers = R::power_on(*self.capability());
        self.overflowed = CounterSet::EMPTY;
        self.pmi_due = false;
        self.sampling = pebs::Sampling::default();
        self.classify(self.implemented());
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        self.settle_acting(host);
        self.filter = filter;
        self.classify(self.implemented());
        self.apply(host);
    }

    /// What the guest is told.
    pub fn capability(&self) -> &R::Capability {
        self.registers.capability()
    }

    /// How often the host was called, and what it could not do.
    pub const fn statistics(&self) -> Statistics {
        self.bank.hosted.statistics()
    }

    /// What `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        let exists = self.implemented().contains(counter);
        exists.then(|| self.bank.state(counter, false))
    }

    /// The observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.events
    }

    /// RDMSR or RDPMC of counter `n`, which exists.
    pub(super) fn counter<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) -> u64 {
        self.settle_acting(host);
        self.look(n, host);
        self.apply(host);
        self.bank.counters[n].value
    }

    /// WRMSR of counter `n`, which exists and has all bits of `value`.
    pub(super) fn set_counter<H: CounterHost<CounterConfig>>(
        &mut self,
        n: u8,
        value: u64,
        host: &mut H,
    ) {
        self.look(n, host);
        if self.bank.counters[n].value != value {
            self.end_sampling(CounterSet::of(n), host);
        }
        self.bank.counters[n].value = value;
        if !self.registers.has_status() {
            self.overflowed.remove(n);
        }
        self.rearm(n, host);
    }

    /// Changes registers by which the guest controls `concerned`.
    pub(super) fn configure<H: CounterHost<CounterConfig>>(
        &mut self,
        concerned: CounterSet,
        change: impl Fn(&mut R),
        host: &mut H,
    ) {
        let mut next = self.registers.clone();
        change(&mut next);
        let (mut changed, mut otherwise) = (CounterSet::EMPTY, CounterSet::EMPTY);
        let mut other_events = CounterSet::EMPTY;
        for n in concerned {
            let (before, after) = (self.registers.control(n), next.control(n));
            if before != after {
                changed.insert(n);
            }
            if (Control {
                interrupts: after.interrupts,
                records: after.records,
                ..before
            }) != after
            {
                otherwise.insert(n);
            }
            if before.event != after.event {
                other_events.insert(n);
            }
        }
        self.bank.hosted.touch(changed, host);
        self.bank.hosted.stop(otherwise, host);
        // Under the old registers, and after the pause, so that once is enough.
        self.settle(changed, host);
        // Not `next`: what was settled may have stopped all counters.
        change(&mut self.registers);
        self.end_sampling(other_events, host);
        self.classify(changed);
    }

    /// Lets `gate` count, by a global register that `change` writes.
    pub(super) fn open<H: CounterHost<CounterConfig>>(
        &mut self,
        gate: CounterSet,
        change: impl FnOnce(&mut R),
        host: &mut H,
    ) {
        let before = self.registers.gate();
        let changed = (gate - before) | (before - gate);
        self.bank.hosted.touch(changed & self.enabled, host);
        change(&mut self.registers);
    }

    /// Counters' bits in the global status register, as far as they may be of interest for the first time.
    pub(super) fn status<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> CounterSet {
        // A counter whose bit is set already cannot change anything, unless it has another one set.
        let clear = (self.implemented() - self.overflowed) | self.recording;
        self.settle(self.bank.hosted.in_doubt(clear, host), host);
        self.apply(host);
        self.overflowed
    }

    /// The guest clears these bits in the global status register.
    pub(super) fn clear_status<H: CounterHost<CounterConfig>>(
        &mut self,
        cleared: CounterSet,
        host: &mut H,
    ) {
        // What overflowed before this write is cleared by it, noticed or not.
        self.settle(self.bank.hosted.in_doubt(cleared, host), host);
        self.overflowed -= cleared;
    }

    /// The guest sets these bits in the global status register.
    pub(super) fn set_status<H: CounterHost<CounterConfig>>(
        &mut self,
        set: CounterSet,
        host: &mut H,
    ) {
        let new = set & (self.implemented() - self.overflowed);
        self.settle(new, host);
        self.overflowed |= new;
    }

    /// Finds out anew what the registers of `counters` say, now that they may have changed. Losses
    /// are forgotten: the host is asked again.
    pub(super) fn classify(&mut self, counters: CounterSet) {
        for n in counters {
            let control = self.registers.control(n);
            let counts = control.event.user || control.event.kernel;
            self.enabled.put(n, control.on && counts);
            self.interrupting
                .put(n, control.interrupts && !control.records);
            self.recording.put(n, control.records);
        }
        self.reclassify(counters);
    }

    /// An overflow that stops all counters, or writes to the guest's memory, must be known before anything that comes
    /// after it.
    pub(super) fn settle_acting<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let mut acting = self.recording;
        if self.registers.freezes() {
            acting |= self.interrupting;
        }
        self.settle(self.bank.hosted.in_doubt(acting, host), host);
    }

    /// Counters whose overflow somebody waits for.
    pub(super) fn reported(&self) -> CounterSet {
        self.interrupting | self.recording
    }

    /// An interrupt is requested. The request, not its delivery, stops the counters if the guest wants that (SDM
    /// 19.4.7): LVTPC may be masked.
    pub(super) fn request_pmi(&mut self) {
        self.pmi_due = true;
        self.registers.freeze();
    }

    /// Looks at the counters whose overflow the host has not been asked to report.
    fn settle_unreported<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        for n in self.interrupting & self.overflowed | self.recording {
            if self.bank.hosted.armed(n).is_none() {
                self.settle(CounterSet::of(n), host);
            }
        }
    }
}
