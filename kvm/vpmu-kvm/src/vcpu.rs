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
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use vpmu::counter::{Counter, CounterHost, CounterState};
use vpmu::x86::{CounterConfig, Outcome, Ring};
use vpmu_perf::{Backing, Flag, KICKED, Kick, PerfHost};

use crate::deadline::Deadline;
use crate::error::Error;
use crate::follow::Follower;
use crate::guest::VcpuGuest;
use crate::lapic::{self, Lapic, Pmi};
use crate::memory::GuestMemory;
use crate::offer::{self, Offer, Pmu};
use crate::options::Options;
use crate::pmu::VcpuPmu;
use crate::publish;
use crate::rdpmc::{self, Rdpmc, VcpuRdpmc};
use crate::run::{Kvm, Returned};
use crate::state::State;
use crate::stats::{Exit, Statistics};
use crate::sys;
use crate::thread::{Thread, unset};

/// A rewritten RDPMC writes to this port. Two bytes of code, as RDPMC: `e6 e6`.
pub const RDPMC_PORT: u16 = 0xe6;
const RDPMC_LENGTH: u64 = 2;

/// The way on after a KVM_RUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an exit that is the VMM's is to be handled"]
pub enum AfterRun {
    /// The exit was completed: run the vCPU again.
    Completed,
    /// There was no exit: an overflow has taken the vCPU out of the guest, or kept it from entering, and
    /// `immediate_exit` is not 1. Run the vCPU again. A signal of the VMM's own may have come at the same time.
    Kicked,
    /// The exit, or the interruption by a signal, is the VMM's, and is left as KVM has made it.
    Vmm,
}

/// One vCPU of KVM's with the parts that its guest is offered. Its PMU is counted by perf events of the vCPU's thread.
///
/// The thread is the one that calls [`before_run`](Self::before_run). Another thread that calls this function later
/// takes the PMU over. All other functions may be called from any thread while the vCPU does not run.
#[derive(Debug)]
pub struct Vcpu {
    exits: Completer,
    /// `None`: the guest has no PMU.
    pmu: Option<VcpuPmu>,
    /// `None`: the guest has no last branch records.
    follower: Option<Follower>,
    /// `None`: nothing is asked of perf.
    thread: Option<Thread>,
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
        let mut this = Self::new(vm, vcpu, offer, options, memory)?;
        if let Some(pmu) = &offer.pmu {
            let kick = Kick::Flag(this.exits.kvm.run.clone());
            this.thread = Some(Thread::new(pmu, options, kick)?);
        }
        this.follower = Follower::attach(&this.exits.kvm, offer, options)?;
        this.exits.kvm.statistics.lock().slot = publish::take_slot(&this.offer(), this.backing());
        Ok(this)
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
        let offer = state.offer();
        if !matches!(offer.pmu, Some(Pmu::Paravirtual(_))) {
            return Err(Error::OtherOffer);
        }
        let mut this = Self::new(vm, vcpu, &offer, &Options::default(), memory)?;
        // Only with the page's address from the state can the device write there that it leaves.
        this.restore(state)?;
        if let Some(pmu) = &mut this.pmu {
            pmu.leave();
        }
        Ok(this)
    }

    fn new(
        vm: &impl AsRawFd,
        vcpu: &impl AsRawFd,
        offer: &Offer,
        options: &Options,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        // The descriptors are tried first: a wrong one is an error before perf is asked for anything.
        let kvm = Kvm::new(vm, vcpu, memory)?;
        let pmu = offer.pmu.as_ref().map(|pmu| {
            let (memory, statistics) = (Arc::clone(&kvm.memory), kvm.statistics.clone());
            VcpuPmu::new(pmu, options.policy, memory, statistics)
        });
        let pmu = pmu.transpose()?;
        let deadline = offer.deadline.then(|| Deadline::new(&kvm).map(Arc::new));
        Ok(Self {
            exits: Completer {
                fault: None,
                rdpmc: None,
                deadline: deadline.transpose()?,
                kvm,
            },
            pmu,
            follower: None,
            thread: None,
            options: options.clone(),
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
        self.exits.rdpmc = Some(VcpuRdpmc::new(rdpmc));
    }

    /// Returns the parts that the guest is offered.
    pub fn offer(&self) -> Offer {
        Offer {
            pmu: self.pmu.as_ref().map(VcpuPmu::offer),
            deadline: self.exits.deadline.is_some(),
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
        self.exits.kvm.statistics.share()
    }

    /// Returns the lazy deadline, if the guest is offered one, for the thread that waits for it.
    pub fn deadline(&self) -> Option<Arc<Deadline>> {
        self.exits.deadline.clone()
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
            let tsc_hz = || Ok(u64::from(sys::tsc_khz(&self.exits.kvm.vcpu)?) * 1000);
            thread.before_run(pmu, tsc_hz, |perf| {
                self.exits.kvm.statistics.lock().slot.show_thread();
                let mut host = PerfHost::new(perf)?;
                host.set_guest(VcpuGuest::new(self.exits.kvm.clone()));
                Ok(host)
            })?;
        }
        if let Some(deadline) = &self.exits.deadline {
            deadline.before_run()?;
        }
        if let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu) {
            follower.before_run(&self.exits.kvm, pmu, self.exits.fault.is_some())?;
        }
        self.exits.before_run(&mut self.pmu)
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
            && follower.after_run(&self.exits.kvm, pmu)?
        {
            return Ok(AfterRun::Completed);
        }
        let after = self.exits.after_run(&mut self.pmu, overflowed)?;
        if after == AfterRun::Completed
            && let (Some(follower), Some(pmu)) = (&mut self.follower, &mut self.pmu)
        {
            follower.replay(&self.exits.kvm, pmu)?;
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
            follower.forget(&self.exits.kvm, pmu);
        }
    }

    /// Returns the state of all parts up to this moment, in which the guest does not run. Nothing stops: the guest can
    /// go on. If the guest goes on elsewhere, its deadline must not expire here any more.
    pub fn save(&mut self) -> State {
        let pmu = self.pmu.as_mut().map(|pmu| {
            pmu.take_overflows();
            pmu.save()
        });
        let deadline = self.exits.deadline.as_ref();
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
        self.exits.reset();
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
        match (&self.exits.deadline, &state.deadline) {
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
        match self.exits.deadline.as_ref()?.rdmsr(index) {
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
        let deadline = self.exits.deadline.as_ref();
        deadline.map_or(Outcome::NotHandled, |deadline| deadline.wrmsr(index, value))
    }

    /// Resets the parts, as their vCPU is reset, and drops an interrupt that is due. The statistics stay.
    pub fn reset(&mut self) {
        if let Some(pmu) = &mut self.pmu {
            // Overflows until now stay untaken: their records would go into what may be the next guest's memory.
            pmu.reset();
        }
        if let Some(deadline) = &self.exits.deadline {
            deadline.reset();
        }
        self.stop_following();
        self.exits.reset();
    }
}

/// Completes the exits of a vCPU of KVM's, by what answers its guest's accesses beside the PMU.
#[derive(Debug)]
struct Completer {
    kvm: Kvm,
    /// The RIP of an exited RDPMC that must fault, once KVM has stepped over it.
    fault: Option<u64>,
    /// The way of RDPMC to the VMM where no kernel is rewritten.
    rdpmc: Option<VcpuRdpmc>,
    /// `None`: the guest has no lazy deadline.
    deadline: Option<Arc<Deadline>>,
}

impl Completer {
    /// Delivers the interrupt that is due, and prepares the page for the next KVM_RUN.
    fn before_run<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<(), Error> {
        if let Some(pmu) = pmu
            && pmu.pmi_is_due()
        {
            // A paravirtual PMU's interrupt is an NMI, whatever LVTPC says.
            let lapic = match pmu.is_architectural() {
                true => Some(Lapic::of(&self.kvm.vcpu)?),
                false => None,
            };
            let lvtpc = lapic.as_ref().map_or(lapic::NMI, Lapic::lvtpc);
            match (pmu.take_pmi(lvtpc), lapic) {
                // KVM_NMI asks no local APIC, so that it also reaches a vCPU whose APIC is disabled.
                (Some(Pmi::Nmi), _) => sys::NMI.call(&self.kvm.vcpu, 0).map(drop)?,
                (Some(Pmi::Vector(vector)), Some(lapic)) => {
                    lapic::signal(&self.kvm.vm, lapic.id(), vector)?;
                }
                (Some(Pmi::Vector(_)), None) | (None, _) => {}
            }
        }
        self.kvm.run.before_run();
        if self.fault.is_some() {
            // The VMM's own request has the same effect.
            let flag = self.kvm.run.flag();
            let _ = flag.compare_exchange(0, KICKED, Ordering::SeqCst, Ordering::Relaxed);
            self.kvm.run.expect_regs();
        }
        Ok(())
    }

    /// Completes the exit if it is one of the parts'. `overflowed`: an overflow was signalled during the run.
    fn after_run<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
        overflowed: bool,
    ) -> Result<AfterRun, Error> {
        let completed = match self.kvm.run.returned() {
            Returned::NoExit => {
                self.kvm.statistics.lock().count(Exit::Kick);
                return self.no_exit(overflowed);
            }
            // An access that no part knows stays as KVM has made it, so that the VMM's own handler finds it untouched.
            Returned::Rdmsr(index) => {
                let outcome = self.access(index, None, pmu)?;
                self.kvm.run.complete_msr(outcome)
            }
            Returned::Wrmsr(index, value) => {
                let outcome = self.access(index, Some(value), pmu)?;
                self.kvm.run.complete_msr(outcome)
            }
            Returned::Out(RDPMC_PORT) => self.rdpmc(pmu)?,
            Returned::Out(rdpmc::ENTRY_PORT) => match &self.rdpmc {
                Some(rdpmc) => rdpmc.entered(&self.kvm, pmu)?,
                None => false,
            },
            Returned::Out(_) | Returned::Debug | Returned::Other => false,
        };
        Ok(match completed {
            true => AfterRun::Completed,
            false => AfterRun::Vmm,
        })
    }

    /// Forgets the last exit: the vCPU goes on elsewhere. A fault that was to be injected belongs to an instruction that it
    /// does not execute, and the registers in `kvm_run` are not its registers any more.
    fn reset(&mut self) {
        if self.fault.take().is_some() {
            unset(&*self.kvm.run);
        }
        self.kvm.run.expect_regs();
    }

    fn no_exit(&mut self, overflowed: bool) -> Result<AfterRun, Error> {
        // Read before a fault takes its own request back.
        let flag = self.kvm.run.flag().load(Ordering::SeqCst);
        self.inject_fault()?;
        Ok(match flag {
            KICKED => AfterRun::Kicked,
            // Another kick than the flag's leaves no trace there.
            // A 1 is the VMM's, whatever else has happened: it must see EINTR, or its pause would be lost.
            0 if overflowed => AfterRun::Kicked,
            _ => AfterRun::Vmm,
        })
    }

    /// Performs RDMSR, or WRMSR of the value that is `written`.
    fn access<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: u32,
        written: Option<u64>,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<Outcome, Error> {
        if let Some(rdpmc) = &mut self.rdpmc {
            // Only with RDPMC the guest has a PMU.
            if !rdpmc.permits(msr, &self.kvm)? {
                return Ok(Outcome::GeneralProtection);
            }
            if written.is_none() {
                let outcome = rdpmc.rdmsr(msr, &self.kvm, pmu);
                if outcome != Outcome::NotHandled {
                    return Ok(outcome);
                }
            }
        }
        // The PMU is asked first, as nearly all accesses are for it, and counts its own.
        let outcome = pmu.as_mut().map(|pmu| match written {
            None => pmu.rdmsr(msr),
            Some(value) => pmu.wrmsr(msr, value),
        });
        let (None | Some(Outcome::NotHandled), Some(deadline)) = (outcome, &self.deadline) else {
            return Ok(outcome.unwrap_or(Outcome::NotHandled));
        };
        let (outcome, exit) = match written {
            None => (deadline.rdmsr(msr), Exit::MsrRead(msr)),
            Some(value) => (deadline.wrmsr(msr, value), Exit::MsrWrite(msr)),
        };
        if outcome != Outcome::NotHandled {
            self.kvm.statistics.lock().count(exit);
        }
        Ok(outcome)
    }

    /// Completes a rewritten RDPMC. Only the guest's kernel was rewritten: from a process that has been given ports (iopl,
    /// ioperm) the write is none, and CR4.PCE does not matter. Returns `false` for it, and where no PMU has RDPMC: the port
    /// is the VMM's.
    fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<bool, Error> {
        let Some(pmu) = pmu else {
            return Ok(false);
        };
        let (rcx, rip) = self.kvm.run.rcx_and_rip();
        // Processes have the lower half. The question would take a system call for each RDPMC of a kernel.
        let is_upper = rip >> 63 != 0;
        if !is_upper && sys::GET_SREGS.get(&self.kvm.vcpu)?.ss.dpl != 0 {
            return Ok(false);
        }
        // RDPMC takes ECX, whatever the high half of RCX holds (SDM vol. 2B).
        match pmu.rdpmc(rcx as u32, Ring::Kernel) {
            Outcome::NotHandled => return Ok(false),
            // RDPMC clears the high halves of RAX and RDX in 64-bit mode.
            Outcome::Value(value) => self
                .kvm
                .run
                .set_rax_and_rdx(value & 0xffff_ffff, value >> 32),
            Outcome::Done | Outcome::GeneralProtection => self.fault = Some(rip),
        }
        Ok(true)
    }

    /// Injects #GP(0) in place of the RDPMC that KVM has stepped over.
    fn inject_fault(&mut self) -> Result<(), Error> {
        const GP: u8 = 13;
        let Some(at) = self.fault else {
            return Ok(());
        };
        if !self.kvm.run.has_regs() {
            // The VMM has not called KVM_RUN.
            return Ok(());
        }
        self.fault = None;
        unset(&*self.kvm.run);
        let mut regs = sys::GET_REGS.get(&self.kvm.vcpu)?;
        // Where KVM's emulator has decoded the port write, RIP was behind the instruction at the exit already, and has not
        // moved since; else KVM has stepped over it in the KVM_RUN that has just returned.
        regs.rip = match regs.rip == at {
            true => at.wrapping_sub(RDPMC_LENGTH),
            false => at,
        };
        sys::SET_REGS.set(&self.kvm.vcpu, &regs)?;
        sys::inject(&self.kvm.vcpu, GP, Some(0))
    }
}

#[cfg(test)]
mod tests;
