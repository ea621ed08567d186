//! One vCPU's paravirtual PMU on KVM. The protocol is [`vpmu::paravirt`]'s.
//!
//! The device runs on the vCPU's thread, between two KVM_RUNs: at a doorbell, and when a perf event's signal has
//! taken the vCPU out of the guest. So guest and device never use the page at the same time, unless another vCPU
//! writes it. The interrupt is an NMI of KVM's, which asks the local APIC nothing.
#![expect(
    clippy::redundant_closure_for_method_calls,
    reason = "the methods take a page of one lifetime, the closures one of any"
)]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vpmu::counter::CounterState;
use vpmu::paravirt::{Device, DeviceState, Offer, PAGE_SIZE, Page};
use vpmu::x86::{EventFilter, Outcome};
use vpmu_perf::{Backing, PerfHost, PerfOptions};

use crate::error::Error;
use crate::host::Host;
use crate::options::{self, Options};
use crate::run::{Returned, RunPage};
use crate::vcpu::{Slice, take_back};
use crate::{Exit, Gp, Statistics, sys};

/// A write shares the page at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const PMU_PAGE_MSR: u32 = 0x4b56_4d58;
/// The doorbell.
pub const PMU_DOORBELL_MSR: u32 = 0x4b56_4d59;
/// In a write of [`PMU_PAGE_MSR`]: share the page at this address.
const PAGE_ENABLE: u64 = 1;

/// Counters that share a clock. More would do no harm, but would be useless: they all count the same.
const CLOCK_COUNTERS: u8 = 8;
/// Counters that nearly all processors have for their host's own use. More would be shared in time.
const HARDWARE_COUNTERS: u8 = 4;

/// The guest's memory, as far as a page needs it.
pub trait PageMemory {
    /// Hands over the page at this guest physical address, a multiple of [`PAGE_SIZE`]; `None` where no address is
    /// given, or the guest has no memory for all of a page.
    fn with_page<R>(&self, at: Option<u64>, body: impl FnOnce(Option<&dyn Page>) -> R) -> R;
}

/// Finds out which paravirtual PMU this host can back. May be called from any thread, before there is a VM.
///
/// # Errors
///
/// When this process may not count a guest's kernel, or the host has no perf events.
pub fn detect_paravirt(options: &Options) -> Result<Offer, Error> {
    let support = options::support(options)?;
    let hardware = support.backing == Backing::Hardware;
    Ok(Offer {
        counters: if hardware {
            HARDWARE_COUNTERS
        } else {
            CLOCK_COUNTERS
        },
        events: support.events,
        // A clock knows no rings, and counts nothing else.
        rings: hardware,
        raw: hardware,
        filter: EventFilter::default(),
    })
}

/// One vCPU's paravirtual PMU as a value. The page goes with the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParavirtState {
    /// The page's address in the guest's memory.
    page: Option<u64>,
    counters: u8,
    events: u32,
    rings: bool,
    raw: bool,
    approximate_instructions: bool,
    device: DeviceState,
}

impl ParavirtState {
    /// Returns the PMU that the guest was offered.
    pub fn offer(&self) -> Offer {
        Offer {
            counters: self.counters,
            events: self.events,
            rings: self.rings,
            raw: self.raw,
            filter: EventFilter::default(),
        }
    }

    /// Returns whether instructions are counted as cycles.
    pub fn approximate_instructions(&self) -> bool {
        self.approximate_instructions
    }
}

/// One vCPU's paravirtual PMU, counted by perf events of the vCPU's thread: the one that calls
/// [`before_run`](Self::before_run).
#[derive(Debug)]
pub struct VcpuParavirt<M> {
    memory: M,
    page: Option<u64>,
    device: Device,
    host: Host,
    backing: Backing,
    approximate_instructions: bool,
    vcpu: OwnedFd,
    run: Arc<RunPage>,
    /// `None`: the device has left its guest.
    perf: Option<PerfOptions>,
    statistics: Arc<Mutex<Statistics>>,
    slice: Slice,
}

impl<M: PageMemory> VcpuParavirt<M> {
    /// Attaches a device, with no page, to a vCPU of KVM's. Installs the handler of the overflows' signal. `offer` is
    /// the result of [`detect_paravirt`], or the guest's earlier offer.
    ///
    /// # Errors
    ///
    /// When this process may not count guests, the host cannot count the offered events, or KVM refuses.
    pub fn attach(
        vcpu: &impl AsRawFd,
        memory: M,
        offer: Offer,
        options: &Options,
    ) -> Result<Self, Error> {
        let support = options::support(options)?;
        options::check_events(support.events, |event| offer.has_event(event))?;
        let mut this = Self::without_host(vcpu, memory, offer)?;
        let khz = u64::from(sys::tsc_khz(&this.vcpu)?);
        let kick = options.kick.clone();
        let kick = kick.unwrap_or_else(|| options::flag(&this.run));
        let tsc_hz = options.tsc_hz.unwrap_or(khz * 1000);
        let perf = PerfOptions {
            repeating: true,
            ..options.perf(kick, tsc_hz)
        };
        vpmu_perf::prepare(&perf)?;
        this.perf = Some(perf);
        this.backing = support.backing;
        this.approximate_instructions = options.approximate_instructions;
        Ok(this)
    }

    /// Continues a saved guest that has no such device here. Its page says so, and one NMI makes the guest look. The
    /// device asks nothing of perf.
    ///
    /// # Errors
    ///
    /// When the state is none of such a device, or KVM refuses.
    pub fn leave(vcpu: &impl AsRawFd, memory: M, state: &ParavirtState) -> Result<Self, Error> {
        let mut this = Self::without_host(vcpu, memory, state.offer())?;
        this.restore(state)?;
        let Self {
            memory,
            device,
            host,
            page,
            ..
        } = &mut this;
        memory.with_page(*page, |page| device.leave(host, page));
        Ok(this)
    }

    fn without_host(vcpu: &impl AsRawFd, memory: M, offer: Offer) -> Result<Self, Error> {
        let vcpu = sys::duplicate(vcpu)?;
        let mut device = Device::new(offer).map_err(Error::Offer)?;
        device.put(&mut Host::Unbound, None::<&dyn Page>);
        Ok(Self {
            memory,
            page: None,
            device,
            host: Host::Unbound,
            backing: Backing::Clock,
            approximate_instructions: false,
            run: Arc::new(RunPage::map(&vcpu)?),
            vcpu,
            perf: None,
            statistics: Arc::new(Mutex::new(Statistics::new())),
            slice: Slice::new(),
        })
    }

    /// Returns the PMU that the guest is offered.
    pub fn offer(&self) -> &Offer {
        self.device.offer()
    }

    /// Returns the backing that counts.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Returns the state of `counter`, or `None` if there is no such counter.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        self.device.counter_state(counter)
    }

    /// Returns the device's cost, which any thread may look into.
    pub fn statistics(&self) -> Arc<Mutex<Statistics>> {
        Arc::clone(&self.statistics)
    }

    fn stats(&self) -> MutexGuard<'_, Statistics> {
        self.statistics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `body` with the device, and notes its calls to the host.
    fn with<R>(&mut self, body: impl FnOnce(&mut Device, &mut Host, Option<&dyn Page>) -> R) -> R {
        let Self {
            memory,
            device,
            host,
            page,
            ..
        } = self;
        let result = memory.with_page(*page, |page| body(device, host, page));
        self.stats().host = self.device.statistics();
        result
    }

    fn take_overflows(&mut self) {
        for (counter, report) in self.host.overflows().into_iter().flatten() {
            self.with(|device, host, page| device.overflow(counter, report, host, page));
        }
    }

    /// Takes the overflows and injects the NMI that is due. Call this on the vCPU's thread right before each KVM_RUN.
    /// Nothing may clear the kick's flag in between.
    ///
    /// # Errors
    ///
    /// When perf or KVM refuses.
    pub fn before_run(&mut self) -> Result<(), Error> {
        if self.perf.is_some() && !self.host.is_here() {
            self.bind()?;
        }
        // This comes before the look for overflows, so that no overflow is without its kick.
        if let Some(perf) = &self.perf {
            take_back(&perf.kick);
        }
        if self.slice.has_ended() {
            self.with(|device, host, page| device.end_slice(host, page));
        }
        self.take_overflows();
        if self.device.take_nmi() {
            sys::nmi(&self.vcpu)?;
            self.stats().pmis += 1;
        }
        self.run.before_run();
        Ok(())
    }

    /// Completes the exit if it is one of the device's. Call this right after each KVM_RUN, however it ended. `false`:
    /// the exit, or the interruption by a signal, is the VMM's.
    pub fn after_run(&mut self) -> bool {
        // Events up to this exit count before the doorbell.
        self.take_overflows();
        let result = match self.run.returned() {
            Returned::NoExit => {
                self.stats().count(Exit::Kick);
                return false;
            }
            Returned::Rdmsr(index) => self.rdmsr(index),
            Returned::Wrmsr(index, value) => {
                let done = self.wrmsr(index, value);
                done.map(|done| done.map(|()| value))
            }
            Returned::Out(_) | Returned::Other => return false,
        };
        self.run.complete_msr(result)
    }

    /// Performs RDMSR of one of the two. `None`: another MSR.
    pub fn rdmsr(&mut self, index: u32) -> Option<Result<u64, Gp>> {
        let value = match index {
            PMU_PAGE_MSR => Ok(self.page.map_or(0, |at| at | PAGE_ENABLE)),
            PMU_DOORBELL_MSR => Err(Gp),
            _ => return None,
        };
        self.stats().count(Exit::MsrRead(index));
        Some(value)
    }

    /// Performs WRMSR of one of the two. `None`: another MSR.
    pub fn wrmsr(&mut self, index: u32, value: u64) -> Option<Result<(), Gp>> {
        let done = match index {
            PMU_PAGE_MSR => self.share(value),
            PMU_DOORBELL_MSR => {
                self.with(|device, host, page| device.doorbell(value, host, page)) == Outcome::Done
            }
            _ => return None,
        };
        self.stats().count(Exit::MsrWrite(index));
        Some(done.then_some(()).ok_or(Gp))
    }

    /// Shares the page that `value` names, or none. A page that cannot be shared leaves all as it was.
    fn share(&mut self, value: u64) -> bool {
        let at = value & !PAGE_ENABLE;
        if value != 0 && (value & PAGE_ENABLE == 0 || !at.is_multiple_of(PAGE_SIZE as u64)) {
            return false;
        }
        if value == 0 {
            self.with(|device, host, _| device.detach(host));
            self.page = None;
            return true;
        }
        // A device that has left takes no page.
        if self.perf.is_none() {
            return false;
        }
        let Self {
            memory,
            device,
            host,
            ..
        } = self;
        let shared = memory.with_page(Some(at), |page| {
            page.is_some_and(|page| device.attach(host, page).is_ok())
        });
        if shared {
            self.page = Some(at);
        }
        shared
    }

    /// Returns the device's state up to this moment, in which the guest does not run. Nothing stops: the guest can go
    /// on.
    pub fn save(&mut self) -> ParavirtState {
        self.take_overflows();
        let device = self.with(|device, host, page| device.save(host, page));
        let offer = self.device.offer();
        ParavirtState {
            page: self.page,
            counters: offer.counters,
            events: offer.events,
            rings: offer.rings,
            raw: offer.raw,
            approximate_instructions: self.approximate_instructions,
            device,
        }
    }

    /// Continues from `state`, after the guest's memory has been restored. The statistics stay.
    ///
    /// # Errors
    ///
    /// When the state is none of such a device. The device then stays as it was.
    pub fn restore(&mut self, state: &ParavirtState) -> Result<(), Error> {
        let Self {
            memory,
            device,
            host,
            ..
        } = self;
        let restored =
            memory.with_page(state.page, |page| device.restore(&state.device, host, page));
        restored.map_err(Error::Paravirt)?;
        self.page = state.page;
        Ok(())
    }

    /// Makes the calling thread the one whose perf events count.
    fn bind(&mut self) -> Result<(), Error> {
        let Some(perf) = self.perf.clone() else {
            return Ok(());
        };
        if matches!(self.host, Host::Bound(..)) {
            self.unbind();
        }
        self.host = Host::Bound(PerfHost::new(perf)?, None);
        self.with(|device, host, page| device.load(host, page));
        Ok(())
    }

    /// Releases the thread whose perf events count. The page then has all counts.
    fn unbind(&mut self) {
        self.take_overflows();
        let state = self.with(|device, host, page| {
            device.put(host, page);
            let state = device.save(host, page);
            device.detach(host);
            state
        });
        self.host = Host::Unbound;
        let restored = self.with(|device, host, page| device.restore(&state, host, page));
        debug_assert_eq!(restored, Ok(()), "it is its own");
    }
}
