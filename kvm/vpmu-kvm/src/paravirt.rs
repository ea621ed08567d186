//! One vCPU's paravirtual PMU on KVM. The protocol is [`vpmu::paravirt`]'s.
//!
//! The device runs on the vCPU's thread, between two KVM_RUNs: at a doorbell, and when a perf event's signal has
//! taken the vCPU out of the guest. So guest and device never use the page at the same time, unless another vCPU
//! writes it. The interrupt is an NMI of KVM's, which asks the local APIC nothing.

use std::sync::Arc;

use vpmu::counter::{Counter, CounterHost, CounterState, Report};
use vpmu::paravirt::{Device, DeviceState, Offer, PAGE_SIZE};
use vpmu::x86::{CounterConfig, EventFilter, Outcome};

use crate::error::Error;
use crate::memory::{GuestMemory, SharedPage, with_page};

/// A write shares the page at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const PMU_PAGE_MSR: u32 = 0x4b56_4d58;
/// The doorbell.
pub const PMU_DOORBELL_MSR: u32 = 0x4b56_4d59;
/// In a write of [`PMU_PAGE_MSR`]: share the page at this address.
const PAGE_ENABLE: u64 = 1;

/// The device, and the place of its page.
#[derive(Debug)]
pub(crate) struct Paravirtual {
    memory: Arc<dyn GuestMemory>,
    /// The page's address in the guest's memory.
    page: Option<u64>,
    pub(crate) device: Device,
    /// The device has left its guest, and takes no page any more.
    left: bool,
}

impl Paravirtual {
    /// Makes a device without a page, on a vCPU that does not run.
    pub(crate) fn new(offer: Offer, memory: Arc<dyn GuestMemory>) -> Result<Self, Error> {
        Ok(Self {
            memory,
            page: None,
            device: Device::new(offer).map_err(Error::Offer)?,
            left: false,
        })
    }

    fn with<R>(&mut self, body: impl FnOnce(&mut Device, Option<&SharedPage<'_>>) -> R) -> R {
        // The page is looked up each time: memory may have left the guest since.
        let device = &mut self.device;
        with_page(&*self.memory, self.page, |page| body(device, page))
    }

    pub(crate) fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) {
        self.with(|device, page| device.overflow(counter, report, host, page));
    }

    pub(crate) fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.with(|device, page| device.end_slice(host, page));
    }

    pub(crate) fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.with(|device, page| device.load(host, page));
    }

    pub(crate) fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.with(|device, page| device.put(host, page));
    }

    /// Lets go of the page, as a reset of the vCPU does.
    pub(crate) fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.device.detach(host);
        self.page = None;
    }

    /// Leaves the guest: its page says so, and one NMI makes the guest read the page.
    pub(crate) fn leave<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.with(|device, page| device.leave(host, page));
        self.left = true;
    }

    pub(crate) fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> ParavirtState {
        let device = self.with(|device, page| device.save(host, page));
        let offer = self.device.offer();
        ParavirtState {
            page: self.page,
            counters: offer.counters,
            events: offer.events,
            rings: offer.rings,
            raw: offer.raw,
            device,
        }
    }

    /// Continues from `state`. An error leaves everything as it was.
    pub(crate) fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &ParavirtState,
        host: &mut H,
    ) -> Result<(), Error> {
        let device = &mut self.device;
        with_page(&*self.memory, state.page, |page| {
            device.restore(&state.device, host, page)
        })
        .map_err(Error::Paravirt)?;
        self.page = state.page;
        Ok(())
    }

    pub(crate) fn rdmsr<H: CounterHost<CounterConfig>>(&self, index: u32, _: &mut H) -> Outcome {
        match index {
            PMU_PAGE_MSR => Outcome::Value(self.page.map_or(0, |at| at | PAGE_ENABLE)),
            // A request has no value to read.
            PMU_DOORBELL_MSR => Outcome::GeneralProtection,
            _ => Outcome::NotHandled,
        }
    }

    pub(crate) fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        index: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        match index {
            PMU_PAGE_MSR if self.share(value, host) => Outcome::Done,
            PMU_PAGE_MSR => Outcome::GeneralProtection,
            PMU_DOORBELL_MSR => self.with(|device, page| device.doorbell(value, host, page)),
            _ => Outcome::NotHandled,
        }
    }

    /// Shares the page that `value` names, or none. A page that cannot be shared leaves all as it was.
    fn share<H: CounterHost<CounterConfig>>(&mut self, value: u64, host: &mut H) -> bool {
        let at = value & !PAGE_ENABLE;
        if value != 0 && (value & PAGE_ENABLE == 0 || !at.is_multiple_of(PAGE_SIZE as u64)) {
            return false;
        }
        // An unloaded driver, kexec and the crash kernel take the page away by this write: its memory gets another use.
        if value == 0 {
            self.reset(host);
            return true;
        }
        // The guest has seen its PMU go, and a second driver is not to find one.
        if self.left {
            return false;
        }
        let device = &mut self.device;
        let shared = with_page(&*self.memory, Some(at), |page| {
            page.is_some_and(|page| device.attach(host, page).is_ok())
        });
        if shared {
            self.page = Some(at);
        }
        shared
    }

    pub(crate) fn pmi_due(&self) -> bool {
        self.device.nmi_due()
    }

    pub(crate) fn take_pmi(&mut self) -> bool {
        self.device.take_nmi()
    }

    pub(crate) fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        self.device.counter_state(counter)
    }
}

/// One vCPU's paravirtual PMU as a value. The page goes with the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ParavirtState {
    /// The page's address in the guest's memory.
    // The address alone: what is in the page is the guest's memory, which is saved with the guest.
    page: Option<u64>,
    counters: u8,
    events: u32,
    rings: bool,
    raw: bool,
    device: DeviceState,
}

impl ParavirtState {
    pub(crate) fn offer(&self) -> Offer {
        Offer {
            counters: self.counters,
            events: self.events,
            rings: self.rings,
            raw: self.raw,
            // The host's events are the filter: what it cannot count was never offered.
            filter: EventFilter::default(),
        }
    }
}
