//! One vCPU of KVM's with the parts that its guest is offered.
//!
//! # What KVM hands over
//!
//! With an MSR filter, RDMSR and WRMSR of the parts' MSRs come to the VMM. The local APIC stays in the kernel, so LVTPC
//! is read there when there is an interrupt to deliver, and what LVTPC asks for is delivered. RDPMC is never an exit by
//! itself. It reaches the VMM through the guest's #GP (`rdpmc`), or the guest's kernel has been rewritten to execute
//! `out 0xe6, al` instead (`vpmu-kernel`), which exits.
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

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use vpmu::counter::{Counter, CounterState};
use vpmu::x86::Outcome;
use vpmu_perf::{Backing, Kick, PerfHost};

use crate::deadline::Deadline;
use crate::error::Error;
use crate::follow::Follower;
use crate::kvm::{AfterRun, OnKvm};
use crate::memory::GuestMemory;
use crate::offer::{self, Offer, Pmu};
use crate::options::{self, Options};
use crate::pmu::VcpuPmu;
use crate::publish;
use crate::rdpmc::{Rdpmc, VcpuRdpmc};
use crate::state::State;
use crate::stats::Statistics;
use crate::sys;
use crate::thread::Thread;

/// One vCPU of KVM's with the parts that its guest is offered. Its PMU is counted by perf events of the vCPU's thread.
///
/// The thread is the one that calls [`before_run`](Self::before_run). Another thread that calls this function later
/// takes the PMU over. All other functions may be called from any thread while the vCPU does not run.
#[derive(Debug)]
pub struct Vcpu {
    kvm: OnKvm,
    /// `None`: the guest has no PMU.
    pmu: Option<VcpuPmu<PerfHost>>,
    /// `None`: the guest has no last branch records.
    follower: Option<Follower>,
    /// `None`: nothing is asked of perf.
    thread: Option<Thread>,
    memory: Arc<dyn GuestMemory>,
    options: Options,
}

impl Vcpu {
    /// Gives a vCPU of KVM's the parts that `offer` names, out of reset. With a PMU, installs the handler of the
    /// overflows' signal. From here on, a vCPU's thread makes no other calls than [`SYSCALLS`](crate::SYSCALLS). The
    /// descriptors are duplicated. `memory` is the guest's.
    ///
    /// # Errors
    ///
    /// When this process may not count guests, the host cannot count what is offered, or KVM refuses.
    pub fn attach(
        vm: &impl AsRawFd,
        vcpu: &impl AsRawFd,
        offer: &Offer,
        options: &Options,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        // The descriptors are tried first: a wrong one is an error before perf is asked for anything.
        let kvm = OnKvm::new(vm, vcpu)?;
        let (pmu, thread) = match &offer.pmu {
            None => (None, None),
            Some(pmu) => {
                let (memory, statistics) = (Arc::clone(&memory), kvm.statistics.clone());
                let vcpu_pmu = VcpuPmu::new(pmu, options.policy, memory, statistics)?;
                // The TSC's rate is read when a thread begins to run the vCPU, and again with each slice.
                let thread = Thread::new(pmu, options, options::flag(&kvm.run), 0)?;
                (Some(vcpu_pmu), Some(thread))
            }
        };
        let follower = Follower::attach(&kvm, offer, Arc::clone(&memory), options)?;
        let this = Self::with(kvm, pmu, thread, offer.deadline, options.clone(), memory)?;
        this.kvm.statistics.lock().slot = publish::take_slot(&this.offer(), this.backing());
        Ok(Self { follower, ..this })
    }

    /// Continues a saved guest without its paravirtual PMU, for instance on a host without perf. The guest's page says
    /// so, and one NMI makes the guest read the page. perf is not used. Call this after the guest's memory, TSC and
    /// local APIC have been restored.
    ///
    /// # Errors
    ///
    /// When the state has no paravirtual PMU, or KVM refuses. No guest can lose another PMU.
    pub fn leave(
        vm: &impl AsRawFd,
        vcpu: &impl AsRawFd,
        state: &State,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        let (offer, options) = (state.offer(), Options::default());
        let Some(pmu @ Pmu::Paravirtual(_)) = &offer.pmu else {
            return Err(Error::OtherOffer);
        };
        let kvm = OnKvm::new(vm, vcpu)?;
        let statistics = kvm.statistics.clone();
        let pmu = VcpuPmu::new(pmu, options.policy, Arc::clone(&memory), statistics)?;
        let mut this = Self::with(kvm, Some(pmu), None, offer.deadline, options, memory)?;
        // Only with the page's address from the state can the device write there that it leaves.
        this.restore(state)?;
        if let Some(pmu) = &mut this.pmu {
            pmu.leave();
        }
        Ok(this)
    }

    fn with(
        mut kvm: OnKvm,
        pmu: Option<VcpuPmu<PerfHost>>,
        thread: Option<Thread>,
        deadline: bool,
        options: Options,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        if deadline {
            let (vm, vcpu) = (Arc::clone(&kvm.vm), Arc::clone(&kvm.vcpu));
            kvm.deadline = Some(Arc::new(Deadline::new(vm, vcpu, Arc::clone(&memory))?));
        }
        Ok(Self {
            kvm,
            pmu,
            follower: None,
            thread,
            memory,
            options,
        })
    }

    /// Changes the way in which an overflow keeps the vCPU from entering the guest. Without this call the overflow sets
    /// `kvm_run.immediate_exit`. Call this before the first run.
    pub fn set_kick(&mut self, kick: Kick) {
        if let Some(thread) = &mut self.thread {
            // A host keeps the kick that it was made with, so that this comes too late for a thread that has one.
            thread.perf.kick = kick;
        }
    }

    /// Serves RDPMC without a rewritten kernel, through `rdpmc`, which all vCPUs of the VM share. Needs [`Rdpmc::msrs`]
    /// among the MSRs of [`intercept`](crate::intercept). Call this before the first run.
    pub fn set_rdpmc(&mut self, rdpmc: Arc<Rdpmc>) {
        let memory = Arc::clone(&self.memory);
        let statistics = self.kvm.statistics.clone();
        self.kvm.rdpmc = Some(VcpuRdpmc::new(rdpmc, memory, statistics));
    }

    /// Returns the parts that the guest is offered.
    pub fn offer(&self) -> Offer {
        Offer {
            pmu: self.pmu.as_ref().map(VcpuPmu::offer),
            deadline: self.kvm.deadline.is_some(),
        }
    }

    /// Returns the backing that counts. `None`: nothing counts.
    pub fn backing(&self) -> Option<Backing> {
        self.thread.as_ref().map(|thread| thread.backing)
    }

    /// Returns the state of `counter`, or `None` if there is no such counter. Counters are numbered as in the engine.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        self.pmu.as_ref()?.counter_state(counter)
    }

    /// Returns the vCPU's cost, which any thread may read. Calls of the host and PEBS records are those up to the
    /// last exit that was the VMM's, and at most 64 runs old. The deadline has its own statistics.
    pub fn statistics(&self) -> Arc<Mutex<Statistics>> {
        if let Some(pmu) = &self.pmu {
            pmu.publish_all();
        }
        self.kvm.statistics.share()
    }

    /// Returns the lazy deadline, if the guest is offered one, for the thread that waits for it.
    pub fn deadline(&self) -> Option<Arc<Deadline>> {
        self.kvm.deadline.clone()
    }

    /// Takes the overflows, delivers the interrupt that is due, and sets the deadline. Call this on the vCPU's thread
    /// right before each KVM_RUN, also before one that only completes an exit. Nothing may clear `immediate_exit`, or the
    /// kick's flag, in between.
    ///
    /// # Errors
    ///
    /// When perf refuses this thread its events, or the TSC's rate suits no lazy deadline: the vCPU is as it was. When
    /// KVM refuses: [`Error::is_fatal`].
    pub fn before_run(&mut self) -> Result<(), Error> {
        let followed = self.follower.as_ref().and(self.pmu.as_ref());
        let host = followed.and_then(|pmu| pmu.host.as_ref());
        if host.is_some_and(|host| !host.is_here()) {
            // The timer that bounds a run is the old thread's.
            self.stop_following();
        }
        if let (Some(pmu), Some(thread)) = (&mut self.pmu, &mut self.thread) {
            let tsc_hz = || Ok(u64::from(sys::tsc_khz(&self.kvm.vcpu)?) * 1000);
            thread.before_run(pmu, tsc_hz, |offer, perf| {
                self.kvm.statistics.lock().slot.show_thread();
                // Samples need the guest's TSC, and records its memory, too.
                let records = offer.has_pebs() || offer.capability().is_none();
                let memory = records.then(|| Arc::clone(&self.memory));
                self.kvm.host(perf, memory)
            })?;
        }
        if let Some(deadline) = &self.kvm.deadline {
            deadline.before_run()?;
        }
        if let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu) {
            follower.before_run(&self.kvm, pmu)?;
        }
        self.kvm.before_run(&mut self.pmu)
    }

    /// Completes the exit if it is one of the parts'. Call this right after each KVM_RUN, however it ended.
    ///
    /// # Errors
    ///
    /// When KVM refuses, which is fatal for the VM: the exit is half completed.
    pub fn after_run(&mut self) -> Result<AfterRun, Error> {
        let mut overflowed = false;
        if let Some(pmu) = &mut self.pmu {
            // The guest has run: registers and page tables that PEBS has read before are old.
            if let Some(host) = &mut pmu.host {
                host.forget_guest();
            }
            // Events up to this exit count before the access.
            overflowed = pmu.take_overflows();
        }
        if let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu)
            && follower.after_run(&self.kvm, pmu)?
        {
            return Ok(AfterRun::Completed);
        }
        let after = self.kvm.after_run(&mut self.pmu, overflowed)?;
        if after == AfterRun::Completed
            && let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu)
        {
            follower.replay(&self.kvm, pmu)?;
        }
        if after == AfterRun::Vmm
            && let Some(pmu) = &self.pmu
        {
            // What the VMM does next may be to read the statistics.
            pmu.publish_all();
        }
        Ok(after)
    }

    /// Gives back the perf events of the thread that runs the vCPU. The PMU then has all that they have counted. Call this
    /// at the end of that thread, where another thread saves the vCPU or runs it on.
    pub fn release_thread(&mut self) {
        // What was held counts again as long as it has a thread.
        self.stop_following();
        if let Some(pmu) = &mut self.pmu {
            pmu.unbind();
        }
    }

    /// Ends a run that follows the guest.
    fn stop_following(&mut self) {
        if let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu) {
            follower.forget(&self.kvm, pmu);
        }
    }

    /// Returns the state of all parts up to this moment, in which the guest does not run. Nothing stops: the guest can
    /// go on. If the guest goes on elsewhere, its deadline must not expire here any more.
    pub fn save(&mut self) -> State {
        let pmu = self.pmu.as_mut().map(|pmu| {
            pmu.take_overflows();
            pmu.save()
        });
        let deadline = self.kvm.deadline.as_ref();
        State::new(pmu, deadline.map(|deadline| deadline.save()))
    }

    /// Continues from `state`, in place of the present state, with the PMU that its guest was offered. The statistics
    /// stay. Call this after the guest's memory, TSC and local APIC have been restored.
    ///
    /// # Errors
    ///
    /// When this host cannot count the events that the guest was offered, or the state is none of such parts. The PMU
    /// then stays as it was. When a deadline cannot go on here; the vCPU may then not run.
    pub fn restore(&mut self, state: &State) -> Result<(), Error> {
        state.check()?;
        let told = state.offer();
        let here = self.offer();
        // The MSRs that KVM hands over and CPUID were made for the offer, so that the parts must be the same. Among PMUs of one
        // kind, a host may offer fewer events than the one that the guest comes from.
        let is_same_kind = told.pmu.is_some() == here.pmu.is_some()
            && told.has_pebs() == here.has_pebs()
            && told.has_lbr() == here.has_lbr()
            && told.deadline == here.deadline;
        if !is_same_kind {
            return Err(Error::OtherOffer);
        }
        self.stop_following();
        self.forget_exit();
        // The PMU goes first, because it can still refuse without a trace. A deadline may interrupt the guest at once.
        if let (Some(pmu), Some(saved)) = (&mut self.pmu, &state.pmu) {
            let told = saved.offer();
            if told != pmu.offer() {
                // Only another PMU of the same kind, perhaps with events that this host does not count.
                offer::check(&self.options, &told)?;
            }
            // As in `reset`, overflows until now stay untaken.
            pmu.restore(saved)?;
            if let Some(thread) = &mut self.thread {
                // The TSC was restored, too, perhaps with another rate.
                thread.is_unsure_of_rate = true;
            }
        }
        match (&self.kvm.deadline, &state.deadline) {
            (Some(deadline), Some(saved)) => deadline.restore(saved),
            _ => Ok(()),
        }
    }

    /// Returns the value of one of the parts' MSRs as KVM_GET_MSRS would, for a VMM that saves registers by number. `None`:
    /// the parts have no such MSR, or it cannot be read.
    pub fn msr(&mut self, index: u32) -> Option<u64> {
        if let Some(pmu) = &mut self.pmu {
            // A register is to be as it is now, not as it was at the last exit.
            pmu.take_overflows();
            if let Some(value) = pmu.msr(index) {
                return Some(value);
            }
        }
        match self.kvm.deadline.as_ref()?.rdmsr(index) {
            Outcome::Value(value) => Some(value),
            Outcome::NotHandled | Outcome::Done | Outcome::GeneralProtection => None,
        }
    }

    /// Sets one of the parts' MSRs as KVM_SET_MSRS would. `GeneralProtection`: the register has no such value. A counter
    /// is written whole, and a status register that a guest can only read is written, too. An interrupt that is due is
    /// no register: [`save`](Self::save) keeps it, and this does not.
    pub fn set_msr(&mut self, index: u32, value: u64) -> Outcome {
        if let Some(pmu) = &mut self.pmu {
            pmu.take_overflows();
            let outcome = pmu.set_msr(index, value);
            if outcome != Outcome::NotHandled {
                return outcome;
            }
        }
        let deadline = self.kvm.deadline.as_ref();
        deadline.map_or(Outcome::NotHandled, |deadline| deadline.wrmsr(index, value))
    }

    /// Resets the parts, as their vCPU is reset, and drops an interrupt that is due. The statistics stay.
    pub fn reset(&mut self) {
        if let Some(pmu) = &mut self.pmu {
            // Overflows until now stay untaken: their records would go into what may be the next guest's memory.
            pmu.reset();
        }
        if let Some(deadline) = &self.kvm.deadline {
            deadline.reset();
        }
        self.stop_following();
        self.forget_exit();
    }

    /// Forgets the last exit: the vCPU goes on elsewhere. A fault that was to be injected belongs to an instruction that it
    /// does not execute, and the registers in `kvm_run` are not its registers any more.
    fn forget_exit(&mut self) {
        self.kvm.reset();
        self.kvm.run.expect_regs();
    }
}
