//! One vCPU's PMU on KVM, over the VMM's descriptors.
//!
//! # What KVM hands over
//!
//! With an MSR filter, RDMSR and WRMSR of the PMU's MSRs come to the VMM. The local APIC stays in
//! the kernel, so LVTPC is read there when there is an interrupt to deliver, and what LVTPC asks for is
//! delivered. RDPMC never comes: the guest's kernel has been rewritten to execute
//! `out 0xe6, al` instead (`vpmu-kernel`), which does.
//!
//! LVTPC's mask bit is not set with the delivery as an Intel processor would (SDM vol. 3A,
//! 11.5.1): the only way to is KVM_SET_LAPIC, which writes the whole APIC and could lose an
//! interrupt that another vCPU sends meanwhile. Between delivery and the handler's write of LVTPC a
//! second PMI may thus be delivered. It is an NMI that the guest's processor keeps until the first
//! one's handler is through, and that finds nothing to do.
//!
//! # A fault of a rewritten RDPMC
//!
//! KVM completes a port write in one of two ways: where its emulator has decoded the instruction, RIP is behind it
//! at the exit; else KVM steps over it when KVM_RUN is called again. A fault injected before would then have the
//! wrong RIP. So the next KVM_RUN, which is the VMM's, is kept from entering the guest by `immediate_exit`; RIP tells
//! which way it was, and the fault is injected. The VMM sees EINTR, which it knows. Its own wishes stay: this crate
//! sets the byte to 2 where it is 0, and takes nothing but a 2 back.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vpmu::counter::{CounterHost, CounterState};
use vpmu::x86::{Capability, CounterConfig};
use vpmu_perf::{Backing, Flag, KICKED, Kick, PerfHost, PerfOptions};

use crate::error::Error;
use crate::guest::{self, VcpuGuest};
use crate::host::Host;
use crate::lapic::{self, Lapic, Pmi};
use crate::options::{self, Options};
use crate::pmu::{Core, Gp, State};
use crate::run::{Returned, RunPage};
use crate::{Exit, Statistics, sys};

/// A rewritten RDPMC writes to this port. Two bytes of code, as RDPMC: `e6 e6`.
pub const RDPMC_PORT: u16 = 0xe6;
const RDPMC_LENGTH: u64 = 2;

/// Time for which a host event is kept for a guest that does not use it.
const SLICE: Duration = Duration::from_millis(100);
/// Runs between two looks at the clock.
const LOOK_AT_CLOCK: u32 = 64;

/// One vCPU's PMU, counted by perf events of the vCPU's thread.
///
/// The thread is the one that calls [`before_run`](Self::before_run). Another thread that calls this function later
/// takes the PMU over. All other functions may be called from any thread while the vCPU does not run.
#[derive(Debug)]
pub struct VcpuPmu {
    core: Core<Host>,
    backing: Backing,
    kvm: Option<OnKvm>,
    options: Options,
    perf: PerfOptions,
    slice: Slice,
}

impl VcpuPmu {
    /// Attaches a PMU, out of reset, to a vCPU of KVM's. Installs the handler of the overflows' signal. From here on, a
    /// vCPU's thread makes no other calls than [`SYSCALLS`](crate::SYSCALLS). The descriptors are duplicated.
    ///
    /// # Errors
    ///
    /// When this process may not count guests, the host cannot count what `options` offer, or KVM refuses.
    pub fn attach(vm: &impl AsRawFd, vcpu: &impl AsRawFd, options: Options) -> Result<Self, Error> {
        let kvm = OnKvm::new(vm, vcpu)?;
        let tsc_hz = match options.tsc_hz {
            Some(hz) => hz,
            None => u64::from(sys::tsc_khz(&kvm.vcpu)?) * 1000,
        };
        let kick = options.kick.clone();
        let kick = kick.unwrap_or_else(|| options::flag(&kvm.run));
        Self::with(options, Some(kvm), tsc_hz, kick)
    }

    /// Makes the PMU of a vCPU that the VMM reaches by an abstraction of its own. The VMM hands over each access
    /// ([`rdmsr`](Self::rdmsr), [`wrmsr`](Self::wrmsr), [`rdpmc`](Self::rdpmc)) and delivers each interrupt
    /// ([`take_pmi`](Self::take_pmi)). `options` say how fast the guest's TSC is, and how an overflow keeps the vCPU
    /// from running.
    ///
    /// # Errors
    ///
    /// As for [`attach`](Self::attach), and when `options` say too little.
    pub fn without_descriptors(options: Options) -> Result<Self, Error> {
        let tsc_hz = options.tsc_hz.ok_or(Error::Missing("the guest's TSC"))?;
        let kick = options.kick.clone().ok_or(Error::Missing("a kick"))?;
        Self::with(options, None, tsc_hz, kick)
    }

    fn with(options: Options, kvm: Option<OnKvm>, tsc_hz: u64, kick: Kick) -> Result<Self, Error> {
        let (capability, backing) = options::offer(&options)?;
        let pebs = options::has_pebs(&capability);
        if pebs && (kvm.is_none() || options.memory.is_none()) {
            return Err(Error::NoMemory);
        }
        let perf = PerfOptions {
            // A guest does not write a counter anew for each record that the counter makes.
            repeating: pebs,
            sampling: pebs && options::samples(&options)?,
            ..options.perf(kick, tsc_hz)
        };
        vpmu_perf::prepare(&perf)?;
        Ok(Self {
            core: Core::new(capability, options.policy, Host::Unbound)?,
            backing,
            kvm,
            options,
            perf,
            slice: Slice::new(),
        })
    }

    /// Returns the PMU that the guest is offered.
    pub fn capability(&self) -> Capability {
        self.core.pmu().capability()
    }

    /// Returns the backing that counts.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Returns the state of `counter`, or `None` if there is no such counter. Counters are numbered as in the engine.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        self.core.pmu().counter_state(counter)
    }

    /// Returns the PMU's cost, which any thread may look into.
    pub fn statistics(&self) -> Arc<Mutex<Statistics>> {
        self.core.shared_statistics()
    }

    /// Takes the overflows and delivers the interrupt that is due. Call this on the vCPU's thread right before each
    /// KVM_RUN, also before one that only completes an exit. Nothing may clear the kick's flag in between.
    ///
    /// # Errors
    ///
    /// When perf or KVM refuses.
    pub fn before_run(&mut self) -> Result<(), Error> {
        if !self.core.host.is_here() {
            self.bind()?;
        }
        self.core.host.forget_guest();
        // The kick is taken back before the look for overflows, so that no overflow is without its kick.
        take_back(&self.perf.kick);
        if self.slice.has_ended() {
            self.core.end_slice();
        }
        self.core.take_overflows();
        match &mut self.kvm {
            None => Ok(()),
            Some(kvm) => kvm.before_run(&mut self.core),
        }
    }

    /// Completes the exit if it is one of the PMU's. Call this right after each KVM_RUN, however it ended. `false`: the
    /// exit, or the interruption by a signal, is the VMM's, and is as KVM has made it.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn after_run(&mut self) -> Result<bool, Error> {
        self.core.host.forget_guest();
        // Events up to this exit count before the access.
        self.core.take_overflows();
        match &mut self.kvm {
            None => Ok(false),
            Some(kvm) => kvm.after_run(&mut self.core),
        }
    }

    /// Performs RDMSR of `index`. `None`: no MSR of the PMU.
    pub fn rdmsr(&mut self, index: u32) -> Option<Result<u64, Gp>> {
        self.core.take_overflows();
        self.core.rdmsr(index)
    }

    /// Performs WRMSR of `index`. `None`: no MSR of the PMU.
    pub fn wrmsr(&mut self, index: u32, value: u64) -> Option<Result<(), Gp>> {
        self.core.take_overflows();
        self.core.wrmsr(index, value)
    }

    /// Returns the value that RDPMC gives the guest's kernel with `index` in ECX.
    ///
    /// # Errors
    ///
    /// When there is no such counter.
    pub fn rdpmc(&mut self, index: u32) -> Result<u64, Gp> {
        self.core.take_overflows();
        self.core.rdpmc(index)
    }

    /// Returns whether a PMI is due, so that the VMM has to look at LVTPC.
    pub fn pmi_is_due(&self) -> bool {
        self.core.pmi_is_due()
    }

    /// Takes the PMI that is due, for the VMM to deliver as `lvtpc` says. `None`: no PMI is due, or LVTPC masks it.
    /// [`before_run`](Self::before_run) does both where it has descriptors.
    pub fn take_pmi(&mut self, lvtpc: u32) -> Option<Pmi> {
        self.core.take_pmi(lvtpc)
    }

    /// Returns the PMU's state up to this moment, in which the guest does not run. Nothing stops: the guest can go on.
    pub fn save(&mut self) -> State {
        self.core.take_overflows();
        self.core.save()
    }

    /// Continues from `state`, with the PMU that its guest was offered, in place of the present state. The statistics
    /// stay.
    ///
    /// # Errors
    ///
    /// When this host cannot count the events that the guest was offered, or the state is none of such a PMU. The PMU
    /// then stays as it was.
    pub fn restore(&mut self, state: &State) -> Result<(), Error> {
        if options::has_pebs(&state.capability) != options::has_pebs(&self.capability()) {
            return Err(Error::OtherPebs);
        }
        if state.capability != self.capability() {
            options::check_host(&self.options, &state.capability)?;
        }
        // As in `reset`, overflows until now stay untaken.
        let loaded = matches!(self.core.host, Host::Bound(..));
        self.core.restore(state, loaded)
    }

    /// Resets the PMU, as its vCPU is reset, and drops an interrupt that is due. The statistics stay.
    pub fn reset(&mut self) {
        // Overflows until now stay untaken: their records would go into what may be the next guest's memory.
        self.core.reset();
        if let Some(kvm) = &mut self.kvm
            && kvm.fault.take().is_some()
        {
            unset(&*kvm.run);
        }
    }

    /// Makes the calling thread the one whose perf events count.
    fn bind(&mut self) -> Result<(), Error> {
        if matches!(self.core.host, Host::Bound(..)) {
            self.core.unbind();
        }
        let guest = match (&self.kvm, &self.options.memory) {
            (Some(kvm), Some(memory)) => {
                let (vcpu, run) = (Arc::clone(&kvm.vcpu), Arc::clone(&kvm.run));
                Some(VcpuGuest::new(vcpu, run, Arc::clone(memory)))
            }
            _ => None,
        };
        let mut host = PerfHost::new(self.perf.clone())?;
        if let Some(kvm) = &self.kvm {
            let vcpu = Arc::clone(&kvm.vcpu);
            host.set_ring(move || guest::ring_of(&vcpu));
        }
        self.core.host = Host::Bound(host, guest);
        self.core.load();
        Ok(())
    }
}

/// Decides when a scheduling slice of a vCPU is over, by its runs and, seldom, by the clock.
#[derive(Debug)]
pub(crate) struct Slice {
    begun: Instant,
    runs: u32,
}

impl Slice {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            runs: 0,
        }
    }

    /// Returns whether a slice has ended. The next slice then begins. Call this before each run.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.runs = self.runs.wrapping_add(1);
        let ended = self.runs.is_multiple_of(LOOK_AT_CLOCK) && self.begun.elapsed() >= SLICE;
        if ended {
            self.begun = Instant::now();
        }
        ended
    }
}

/// Takes back the kick that an overflow has left behind.
pub(crate) fn take_back(kick: &Kick) {
    if let Kick::Flag(flag) = kick {
        unset(&**flag);
    }
}

/// Takes back the value that this crate has set, and no other.
fn unset(flag: &dyn Flag) {
    let _ = flag
        .flag()
        .compare_exchange(KICKED, 0, Ordering::SeqCst, Ordering::Relaxed);
}

/// A vCPU of KVM's.
#[derive(Debug)]
pub(crate) struct OnKvm {
    vm: OwnedFd,
    vcpu: Arc<OwnedFd>,
    run: Arc<RunPage>,
    /// The RIP of an exited RDPMC that must fault, once KVM has stepped over it.
    fault: Option<u64>,
}

impl OnKvm {
    pub(crate) fn new(vm: &impl AsRawFd, vcpu: &impl AsRawFd) -> Result<Self, Error> {
        let (vm, vcpu) = (sys::duplicate(vm)?, sys::duplicate(vcpu)?);
        // Descriptors of other kinds do not have this call.
        sys::lapic(&vcpu).map_err(|error| match error {
            Error::Kvm(_, errno) => Error::NoLapic(errno),
            error => error,
        })?;
        Ok(Self {
            run: Arc::new(RunPage::map(&vcpu)?),
            vm,
            vcpu: Arc::new(vcpu),
            fault: None,
        })
    }

    pub(crate) fn before_run<H: CounterHost<CounterConfig>>(
        &mut self,
        core: &mut Core<H>,
    ) -> Result<(), Error> {
        if core.pmi_is_due() {
            let lapic = Lapic::of(&self.vcpu)?;
            match core.take_pmi(lapic.lvtpc()) {
                None => {}
                Some(Pmi::Nmi) => sys::nmi(&self.vcpu)?,
                Some(Pmi::Vector(vector)) => lapic::signal(&self.vm, lapic.id(), vector)?,
            }
        }
        self.run.before_run();
        if self.fault.is_some() {
            // The VMM's own request has the same effect.
            let flag = self.run.flag();
            let _ = flag.compare_exchange(0, KICKED, Ordering::SeqCst, Ordering::Relaxed);
            self.run.expect_regs();
        }
        Ok(())
    }

    pub(crate) fn after_run<H: CounterHost<CounterConfig>>(
        &mut self,
        core: &mut Core<H>,
    ) -> Result<bool, Error> {
        let result = match self.run.returned() {
            Returned::NoExit => {
                core.count(Exit::Kick);
                self.inject_fault()?;
                return Ok(false);
            }
            Returned::Rdmsr(index) => core.rdmsr(index),
            Returned::Wrmsr(index, value) => {
                let result = core.wrmsr(index, value);
                result.map(|done| done.map(|()| value))
            }
            Returned::Out(RDPMC_PORT) => {
                self.rdpmc(core);
                return Ok(true);
            }
            Returned::Out(_) | Returned::Other => return Ok(false),
        };
        Ok(self.run.complete_msr(result))
    }

    /// Completes a rewritten RDPMC. Only the guest's kernel was rewritten, and user space has no ports, so only the
    /// kernel executes it.
    fn rdpmc<H: CounterHost<CounterConfig>>(&mut self, core: &mut Core<H>) {
        let (rcx, rip) = self.run.rcx_and_rip();
        match core.rdpmc(rcx as u32) {
            Ok(value) => self.run.set_rax_and_rdx(value & 0xffff_ffff, value >> 32),
            Err(Gp) => self.fault = Some(rip),
        }
    }

    /// Injects #GP(0) in place of the RDPMC that KVM has stepped over.
    fn inject_fault(&mut self) -> Result<(), Error> {
        const GP: u8 = 13;
        let Some(at) = self.fault else {
            return Ok(());
        };
        if !self.run.has_regs() {
            // The VMM has not called KVM_RUN.
            return Ok(());
        }
        self.fault = None;
        unset(&*self.run);
        let mut regs = sys::regs(&self.vcpu)?;
        regs.rip = match regs.rip == at {
            true => at.wrapping_sub(RDPMC_LENGTH),
            false => at,
        };
        sys::set_regs(&self.vcpu, &regs)?;
        let mut events = sys::events(&self.vcpu)?;
        events.exception.injected = 1;
        events.exception.nr = GP;
        events.exception.has_error_code = 1;
        events.exception.error_code = 0;
        sys::set_events(&self.vcpu, &events)
    }
}

#[cfg(test)]
mod tests;
