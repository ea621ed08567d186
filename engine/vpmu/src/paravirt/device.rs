//! The host's half of one vCPU's page.

use core::fmt;

use super::offer::{BadOffer, Offer};
use super::page::{self, Page, TAG, command, flag, state, word};
use super::samples::Samples;
use super::wish::Wish;
use crate::counter::{
    Bank, Counter, CounterHost, CounterSet, CounterState, Model, Policy, Report, Slots, Statistics,
};
use crate::x86::{CounterConfig, Outcome};

/// One vCPU's device: copies of the guest's wishes, and the host events that fulfil them.
///
/// The integration knows where the page is, and hands the page to each call. `None` stands for a page that is not in
/// the guest's memory (any more): such a page asks for nothing. No call panics, whatever is in the page.
///
/// ```
/// # use core::cell::RefCell;
/// # use core::num::NonZeroU64;
/// # use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report};
/// # #[derive(Default)]
/// # struct Host(u64);
/// # impl CounterHost<vpmu::x86::CounterConfig> for Host {
/// #     fn create(&mut self, _: Counter, _: &vpmu::x86::CounterConfig) -> Result<(), Lost> { Ok(()) }
/// #     fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
/// #     fn resume(&mut self, _: CounterSet) {}
/// #     fn pause(&mut self, _: CounterSet) {}
/// #     fn read(&mut self, _: Counter) -> u64 { self.0 }
/// #     fn release(&mut self, _: Counter) {}
/// # }
/// # struct Memory(RefCell<[u64; 512]>);
/// # impl vpmu::paravirt::Page for Memory {
/// #     fn load(&self, word: usize) -> u64 { self.0.borrow()[word] }
/// #     fn store(&self, word: usize, value: u64) { self.0.borrow_mut()[word] = value }
/// #     fn fence(&self) {}
/// # }
/// use vpmu::paravirt::{Device, GuestHalf, Offer, command, flag, word};
/// use vpmu::x86::{EventFilter, Outcome};
///
/// let offer = Offer { counters: 4, events: 0b11, rings: true, raw: false, filter: EventFilter::default() };
/// let (mut device, mut host) = (Device::new(offer)?, Host::default());
///
/// // The guest prepares a page and tells the host where it is.
/// let page = Memory(RefCell::new([0; 512]));
/// let mut guest = GuestHalf::new();
/// guest.prepare(&page);
/// device.attach(&mut host, &page)?;
///
/// // The guest wants a sample every 1000 instructions, and rings.
/// let counter = Counter::at::<0>();
/// guest.wish(&page, counter, 0xc0, flag::USER | flag::KERNEL | flag::INTERRUPT, 1000, 1000);
/// guest.want(&page, counter.alone());
/// assert_eq!(device.doorbell(command::APPLY, &mut host, Some(&page)), Outcome::Done);
///
/// // The host has counted them, and says so.
/// host.0 = 1000;
/// device.overflow(counter, Report::Due, &mut host, Some(&page));
/// assert!(device.take_nmi(), "inject it");
///
/// // The guest's handler reads memory.
/// assert_eq!(guest.interrupt(&page), Some(counter.alone()));
/// assert_eq!(page.0.borrow()[word::count(counter)], 1000);
/// assert_eq!(guest.interrupt(&page), None, "not from here");
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Device {
    pub(super) offer: Offer,
    pub(super) bank: Bank<CounterConfig, ()>,
    pub(super) wishes: Slots<Wish>,
    /// Counters that shall count, as last applied.
    pub(super) wanted: CounterSet,
    /// Nothing counts until the next application.
    pub(super) frozen: bool,
    pub(super) attached: bool,
    /// Interrupts requested.
    pub(super) seq: u64,
    /// The last of them has not been taken.
    pub(super) nmi_due: bool,
    /// The shortest period, in events.
    pub(super) floor: u64,
    /// Counters whose words are not up to date.
    pub(super) changed: CounterSet,
    /// A counter has overflowed, and the guest has no report of it yet.
    pub(super) overflowed: bool,
    /// What the host samples, and where the records go.
    pub(super) samples: Samples,
}

/// The memory has no [`TAG`], so no guest has prepared it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAPage;

impl fmt::Display for NotAPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("share memory that has no tag")
    }
}

impl core::error::Error for NotAPage {}

impl Device {
    /// Makes a device without a page, for a vCPU that runs (see [`put`](Self::put)).
    ///
    /// # Errors
    ///
    /// Refuses an offer that no page has room for.
    pub fn new(offer: Offer) -> Result<Self, BadOffer> {
        offer.check()?;
        Ok(Self {
            bank: Bank::new(Policy::ReusePaused, CounterSet::first(offer.counters), ()),
            offer,
            wishes: Slots::default(),
            wanted: CounterSet::EMPTY,
            frozen: false,
            attached: false,
            seq: 0,
            nmi_due: false,
            floor: 1,
            changed: CounterSet::EMPTY,
            overflowed: false,
            samples: Samples::default(),
        })
    }

    /// Shares `page`, in place of another. Nothing counts before the next doorbell.
    ///
    /// # Errors
    ///
    /// The page has no tag. All is then as it was.
    pub fn attach<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: &P,
    ) -> Result<(), NotAPage> {
        if page.load(word::TAG) != TAG {
            return Err(NotAPage);
        }
        self.detach(host);
        self.attached = true;
        for n in CounterSet::first(page::MAX_COUNTERS) {
            self.write_counter(n, page);
        }
        page.store(word::FLOOR, self.floor);
        // The driver has begun the page with an ACK of 0: any other number would pass for an interrupt on its way.
        self.seq = 0;
        page.store(word::SEQ, self.seq);
        page.store(word::HEAD, 0);
        // Last: a guest that reads HERE finds the other words written.
        page.store(word::DEVICE, state::HERE);
        Ok(())
    }

    /// Lets go of the page. Nothing counts any more, and nothing is written there from now on.
    pub fn detach<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.bank.reset(host);
        self.wishes = Slots::default();
        self.wanted = CounterSet::EMPTY;
        self.frozen = false;
        self.attached = false;
        // An NMI about a page that is no longer shared would be nobody's.
        self.nmi_due = false;
        self.overflowed = false;
        self.samples.reset();
        self.reclassify(self.implemented());
    }

    /// Returns whether a page is shared.
    pub const fn is_attached(&self) -> bool {
        self.attached
    }

    /// Performs the [`command`]s whose bits the guest has written to its doorbell.
    pub fn doorbell<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        bits: u64,
        host: &mut H,
        page: Option<&P>,
    ) -> Outcome {
        let Some(page) = page else {
            // The memory has gone: so has all that was wished in it.
            self.detach(host);
            return Outcome::GeneralProtection;
        };
        if !self.attached || bits & !command::ALL != 0 {
            return Outcome::GeneralProtection;
        }
        // First: an overflow that is found below begins the period that the guest wrote before it rang.
        self.load_periods(Some(page));
        if bits & command::FREEZE != 0 {
            self.frozen = true;
            self.apply(host);
        }
        if bits & (command::FREEZE | command::READ | command::APPLY) != 0 {
            // What was counted belongs to the wishes so far.
            self.settle(self.unsettled(), host);
            // Before wishes change: these samples were taken under the present ones.
            self.write_records(host, page);
            self.follow_periods(host);
        }
        let before = self.wanted;
        if bits & command::APPLY != 0 {
            self.take_wishes(host, page);
        }
        self.apply(host);
        // The last count of a counter that is wanted no longer is shown, too.
        self.changed |= before | self.wanted;
        self.publish(page);
        if bits & command::INJECT != 0 && page.load(word::ACK) != self.seq {
            self.nmi_due = true;
        }
        Outcome::Done
    }

    /// Takes the host's report that `counter` has counted as far as was asked, also for a vCPU that does not run.
    pub fn overflow<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
        page: Option<&P>,
    ) {
        self.load_periods(page);
        let is_sampled = self.samples.period(counter).is_some();
        let report = self.samples.sampling.report(counter, report);
        self.report(counter, report, host);
        let Some(page) = page else { return };
        if is_sampled {
            self.overflowed |= self.write_records(host, page);
            self.apply(host);
        }
        self.publish(page);
    }

    /// Takes the interrupt that is due, if one is: the caller injects an NMI.
    #[must_use = "the interrupt is gone unless the caller injects it"]
    pub const fn take_nmi(&mut self) -> bool {
        core::mem::replace(&mut self.nmi_due, false)
    }

    /// Returns whether an interrupt is due.
    pub const fn nmi_due(&self) -> bool {
        self.nmi_due
    }

    /// Starts what the guest wants counted, as the vCPU starts to run. A guest that wants nothing counted costs no call
    /// of the host.
    pub fn load<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: Option<&P>,
    ) {
        self.find_floor(host);
        self.start_vcpu(host);
        self.publish_all(page);
    }

    /// Stops all counters, as the vCPU stops running, and puts what they have counted into the page. Ends the slice.
    pub fn put<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: Option<&P>,
    ) {
        self.load_periods(page);
        self.stop_vcpu(host);
        self.forget_released();
        self.publish_all(page);
    }

    /// Ends a scheduling slice: releases the host events that the guest did not use in it. A host that was too busy is
    /// asked again.
    pub fn end_slice<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: Option<&P>,
    ) {
        self.bank.hosted.end_slice(host);
        self.forget_released();
        self.ask_again();
        self.apply(host);
        self.publish_all(page);
    }

    /// Leaves the guest: nothing counts any more, the page says so, and an interrupt makes the guest read the page. An
    /// interrupt that is already on its way does this, too: the guest would take a second interrupt for another
    /// device's.
    pub fn leave<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: Option<&P>,
    ) {
        self.put(host, page);
        // Kept: to detach drops the interrupt that is due, and this guest must have one.
        let (attached, due) = (self.attached, self.nmi_due);
        self.detach(host);
        if let (true, Some(page)) = (attached, page) {
            self.nmi_due = due;
            page.store(word::DEVICE, state::GONE);
            self.interrupt(page);
        }
    }

    /// Returns what the guest finds.
    pub const fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns how often the host was called, and what it could not do.
    pub const fn statistics(&self) -> Statistics {
        self.bank.hosted.statistics()
    }

    /// Returns what `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        let exists = self.implemented().contains(counter);
        exists.then(|| self.bank.state(counter, false))
    }

    /// Loads the periods that the next overflows begin, and whether the overflows behind them may be records.
    pub(super) fn load_periods<P: Page + ?Sized>(&mut self, page: Option<&P>) {
        let Some(page) = page else { return };
        for n in self.reporting() {
            let wish = &mut self.wishes[n];
            wish.period = page.load(word::period(n));
            wish.flags = wish.flags & !flag::RECORD | page.load(word::flags(n)) & flag::RECORD;
        }
    }

    /// Takes over what the guest wishes. All that was counted has been taken.
    fn take_wishes<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: &P,
    ) {
        self.frozen = false;
        self.samples.share(page.load(word::BUFFER));
        // Counters are the low bits, of which those that exist are kept.
        self.wanted = CounterSet::from_bits(page.load(word::WANTED) as u32) & self.implemented();
        let mut new = CounterSet::EMPTY;
        for n in self.wanted {
            let generation = page.load(word::generation(n));
            // An unchanged wish keeps its count and its host event: a switch of tasks changes few wishes.
            if generation == self.wishes[n].generation {
                continue;
            }
            new.insert(n);
            self.wishes[n] = Wish {
                config: page.load(word::config(n)),
                flags: page.load(word::flags(n)),
                period: page.load(word::period(n)),
                generation,
                next: page.load(word::left(n)),
                ..Wish::default()
            };
            self.bank.counters[n].value = 0;
        }
        self.end_sampling(new, host);
        self.reclassify(new);
        // Before the periods are granted: how many counters report decides how short these may be.
        self.find_floor(host);
        page.store(word::FLOOR, self.floor);
        for n in new {
            // The floor depends on how many counters report, so the periods are granted once all wishes are known.
            let (left, period) = (self.wishes[n].next, self.wishes[n].period);
            let left = self.granted(left);
            self.wishes[n].next = left;
            self.wishes[n].length = self.granted(period).max(left);
        }
    }

    /// Writes the counters that have changed into the page, and interrupts the guest if any has overflowed.
    fn publish<P: Page + ?Sized>(&mut self, page: &P) {
        let changed = core::mem::take(&mut self.changed);
        // The memory may be anything by now.
        if !self.attached {
            return;
        }
        for n in changed {
            self.write_counter(n, page);
        }
        if core::mem::take(&mut self.overflowed) {
            self.interrupt(page);
        }
    }

    /// Interrupts the guest, so that it reads the page. Does nothing where an interrupt is on its way.
    fn interrupt<P: Page + ?Sized>(&mut self, page: &P) {
        // Pairs with the handler's, between its store of `ACK` and its read of the overflows and the device.
        page.fence();
        if page.load(word::ACK) == self.seq {
            self.seq = self.seq.wrapping_add(1);
            page.store(word::SEQ, self.seq);
            self.nmi_due = true;
        }
    }

    pub(super) fn publish_all<P: Page + ?Sized>(&mut self, page: Option<&P>) {
        self.changed |= self.wanted;
        if let Some(page) = page {
            self.publish(page);
        }
    }

    /// Writes what the guest may read of `n` into the page.
    fn write_counter<P: Page + ?Sized>(&self, n: Counter, page: &P) {
        let wish = &self.wishes[n];
        page.store(word::count(n), self.bank.counters[n].value);
        page.store(word::last_period(n), wish.last);
        page.store(word::next(n), wish.next);
        page.store(word::state(n), page::state_of(self.bank.state(n, false)));
        page.store(word::made(n), wish.generation);
        // Last: a guest that sees an overflow sees the rest.
        page.store(word::overflows(n), wish.overflows);
    }
}
