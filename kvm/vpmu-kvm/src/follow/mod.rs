//! Follows a guest from an overflow on, until a PMI that waits for branches has them ([`vpmu::x86::lbr`]).
//!
//! No host that KVM runs on hands its branches to a VMM. So the guest is stopped where it has taken some, and what it did
//! in between is known: its code is decoded ahead from RIP, and executed on copies of its registers and its memory
//! ([`vpmu_x86::predict`]) as far as that goes. Nothing of that changes the guest. It only tells where the guest is going
//! ([`walk`]), and a breakpoint tells that it has come there: a place that its trace passes once, and last. A branch whose
//! condition comes from memory may go the other way when the guest takes it. Then that way has a breakpoint, too: a processor
//! has four. Whichever the guest reaches first, it has taken exactly the branches that lead there.
//!
//! Where each instruction is one that is executed exactly ([`replay`]), the guest need not be stopped: it is executed for it.
//!
//! # Why a record is never wrong
//!
//! - Interrupts, NMIs and SMIs wait while the guest is followed (KVM_GUESTDBG_BLOCKIRQ), for [`LONGEST`] at most.
//! - An instruction that may fault is executed alone, with breakpoints at the handlers of #DE, #GP and #PF. All memory that
//!   others reach has been looked up in the guest's page tables. A #PF that comes all the same changes CR2.
//! - Where the guest stops, RIP, CR3, the ring and each general register that is known must be what they were to be.
//! - System calls and their returns, and IRET, are followed. HLT, MWAIT, INT, far branches, and code that is not 64-bit
//!   end a run with the records that there are. So does a guest that uses debug registers or TF itself, an access of the
//!   PMU, and the bound of [`MOST`] exits.
//! - Where the guest is seen where it was not to be, the branches before are not its last ones. They are forgotten, and it
//!   is followed from there.
//!
//! What one vCPU reads may be changed by another between the prediction and the read. A changed condition is seen, as above. A
//! changed target of an indirect branch, where the guest then comes to the expected place with the expected registers all
//! the same, is not.

mod calls;
mod guard;
mod replay;
#[cfg(test)]
mod tests;
mod trace;
mod walk;

use std::fs;
use std::mem;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu_perf::{Flag, KICKED};

use crate::error::Error;
use crate::guest::{registers, ring, system};
use crate::offer::Offer;
use crate::options::{Follow, Options};
use crate::pmu::VcpuPmu;
use crate::run::{Kvm, Returned};
use crate::stats::Exit;
use crate::sys;
use crate::sys::debug;
use crate::sys::keys::Keys;
use crate::thread::unset;
use calls::Calls;
use guard::Guard;
use replay::Replays;
use trace::{Places, Trace};
use vpmu_x86::predict::Predictor;
use walk::{Resume, Start, TF, walk};

/// Most exits of a run, and where each is an instruction's.
const MOST: u32 = 160;
const MOST_STEPS: u32 = 1024;
/// The longest run, by the time of the vCPU's thread. Interrupts of the guest wait as long.
const LONGEST: Duration = Duration::from_millis(5);

const IA32_LSTAR: u32 = 0xc000_0082;

/// Follows one vCPU.
pub(crate) struct Follower {
    signal: i32,
    /// Made by the thread that runs the vCPU.
    guard: Option<Guard>,
    predictor: Predictor,
    /// Most instructions of a trace.
    longest: usize,
    /// Most exits of a run.
    most: u32,
    /// What the guest executes, or did last.
    trace: Trace,
    /// Whether the last exit has left an instruction half done, which KVM_RUN completes.
    is_between: bool,
    /// Whether the vCPU was asked to complete that, and no more.
    is_asked: bool,
    resume: Resume,
    run: Option<Run>,
    /// Whether the guest's counters stand still until the PMI that waits for branches has them.
    is_held: bool,
    /// `None`: each read of a record is an exit.
    replays: Option<Replays>,
    keys: Keys,
    calls: Calls,
}

/// A run: the guest is followed.
#[derive(Debug)]
struct Run {
    /// The thread's time when the run began.
    begun: Duration,
    since: Instant,
    exits: u32,
    /// Whether the guest has stopped at a breakpoint, where nothing is about to be delivered to it.
    is_calm: bool,
    /// Whether system registers come with exits for this run only.
    asks_sregs: bool,
    /// IA32_LSTAR, which no guest changes in a run, for its system calls.
    lstar: Option<u64>,
    /// The registers with which the guest set out, if it has, with CR2 and CR3.
    before: Option<(kvm_regs, (u64, u64))>,
    /// The places where the vCPU has breakpoints.
    places: Places,
}

impl Run {
    /// Returns whether the thread has run for longer than a run may take.
    fn is_late(&self) -> bool {
        // The thread's time takes a system call, and is no longer than this one, which takes none.
        self.since.elapsed() >= LONGEST && guard::time() >= self.begun + LONGEST
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower")
            .field("run", &self.run)
            .finish_non_exhaustive()
    }
}

impl Follower {
    /// Returns what follows a vCPU whose guest is offered last branch records.
    pub(crate) fn attach(
        kvm: &Kvm,
        offer: &Offer,
        options: &Options,
    ) -> Result<Option<Self>, Error> {
        if !offer.has_lbr() {
            return Ok(None);
        }
        if !debug::can_break(&kvm.vm) {
            return Err(Error::Lbr(
                "this KVM cannot keep interrupts from a guest at breakpoints: use Linux 5.16 or newer on the host",
            ));
        }
        let (longest, most, replays) = match options.follow {
            Follow::Ahead => (walk::LONGEST, MOST, sees_stores().then(Replays::new)),
            Follow::Steps => (1, MOST_STEPS, None),
        };
        Ok(Some(Self {
            signal: options.perf().overflow_signal(),
            guard: None,
            predictor: Predictor::new(),
            longest,
            most,
            trace: Trace::default(),
            is_between: false,
            is_asked: false,
            resume: Resume::Unknown,
            run: None,
            is_held: false,
            replays,
            keys: Keys::default(),
            calls: Calls::default(),
        }))
    }

    /// The vCPU has another thread, or its state is another's.
    pub(crate) fn forget(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) {
        let _ = self.stop(kvm, pmu);
        self.forget_replay();
        self.guard = None;
    }

    /// Lets the guest go on to where it is seen again, if a PMI waits for branches. Call this right before the delivery of the PMI that is
    /// due.
    pub(crate) fn before_run(
        &mut self,
        kvm: &Kvm,
        pmu: &mut VcpuPmu,
        has_fault: bool,
    ) -> Result<(), Error> {
        let wanted = pmu.branches_awaited();
        if wanted == 0 {
            self.stop(kvm, pmu)?;
            if !self.replays.as_ref().is_some_and(Replays::is_planned) {
                return Ok(());
            }
        } else if !self.is_held {
            // Before anything is done for the guest: a clock would count the time that this takes, and a period as short
            // would be over before the guest's handler runs.
            pmu.hold();
            self.is_held = true;
        }
        if self.is_between {
            // The registers are those of the instruction until KVM has completed it.
            let flag = kvm.run.flag();
            let asked = flag.compare_exchange(0, KICKED, Ordering::SeqCst, Ordering::Relaxed);
            self.is_asked = asked.is_ok();
            return Ok(());
        }
        // The guest goes on in the handler of the fault, and not where its registers are now.
        if has_fault {
            return Ok(());
        }
        if let Some(replays) = &mut self.replays {
            replays.commit(kvm, pmu);
        }
        if wanted == 0 {
            return Ok(());
        }
        // The PMI itself may be what is to wake it, and behind the HLT nothing is executed before.
        if kvm.run.returned() == Returned::NoExit && sys::is_halted(&kvm.vcpu)? {
            pmu.end_following();
            return self.stop(kvm, pmu);
        }
        if let Some(filter) = pmu.branch_filter().filter(|filter| filter.call_stack) {
            self.calls.fill(kvm, pmu, &self.keys, filter, wanted)?;
            return self.stop(kvm, pmu);
        }
        // The guard's signal comes late where the time goes by here, and not in the guest.
        let is_over =
            (self.run.as_ref()).is_some_and(|run| run.exits >= self.most || run.is_late());
        if is_over {
            kvm.statistics.lock().replays.overruns += 1;
        } else {
            self.take(kvm, pmu, wanted.into())?;
        }
        let wanted = pmu.branches_awaited();
        if wanted == 0 {
            return self.stop(kvm, pmu);
        }
        // Nobody follows a guest without a bound: the host may have no timer left.
        let is_begun = self.run.is_some() || self.begin(kvm).is_ok();
        let goes = !is_over && is_begun && self.predict(kvm, pmu, usize::from(wanted))?;
        if !goes {
            pmu.end_following();
            return self.stop(kvm, pmu);
        }
        Ok(())
    }

    /// Plans a replay behind a read of a branch record. Call this when an exit has been completed.
    pub(crate) fn replay(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) -> Result<(), Error> {
        match &mut self.replays {
            Some(replays) if self.run.is_none() => replays.replay(kvm, pmu),
            _ => Ok(()),
        }
    }

    /// Takes branches for the guest, as many as are `wanted` and as can be. Nothing is left for KVM to complete.
    fn take(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu, wanted: usize) -> Result<(), Error> {
        let (Some(replays), Some(filter)) = (&mut self.replays, pmu.branch_filter()) else {
            return Ok(());
        };
        let sregs = match &self.run {
            Some(run) if run.exits > 0 => kvm.run.sregs(),
            _ => sys::GET_SREGS.get(&kvm.vcpu)?,
        };
        replays.take(kvm, pmu, &self.keys, &sregs, filter, wanted)
    }

    /// Begins a run.
    fn begin(&mut self, kvm: &Kvm) -> Result<(), Error> {
        let guard = match &self.guard {
            Some(guard) => guard,
            None => self.guard.insert(Guard::new(self.signal)?),
        };
        guard.set(LONGEST)?;
        self.predictor.forget_pages();
        self.run = Some(Run {
            begun: guard::time(),
            since: Instant::now(),
            exits: 0,
            is_calm: false,
            asks_sregs: kvm.run.expect_sregs(true),
            lstar: None,
            before: None,
            places: Places::default(),
        });
        Ok(())
    }

    /// Finds what the guest is going to execute, and puts breakpoints there. `false`: it cannot be followed from here.
    fn predict(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu, wanted: usize) -> Result<bool, Error> {
        let (Some(filter), Some(run)) = (pmu.branch_filter(), &mut self.run) else {
            return Ok(false);
        };
        let regs = kvm.regs()?;
        let sregs = match run.exits == 0 {
            true => sys::GET_SREGS.get(&kvm.vcpu)?,
            false => kvm.run.sregs(),
        };
        let is_calm = run.is_calm || debug::is_untouched(&kvm.vcpu, true)?;
        if !is_calm || !can_follow(&regs, &sregs) {
            return Ok(false);
        }
        let ring = ring(&sregs, &regs);
        // Only user space makes system calls.
        if ring == Ring::User && run.lstar.is_none() {
            run.lstar = sys::msr(&kvm.vcpu, IA32_LSTAR).ok();
        }
        let start = Start {
            registers: &registers(&regs),
            system: &system(&sregs),
            sregs: &sregs,
            ring,
            lstar: run.lstar,
            filter,
            wanted,
            resume: self.resume,
            longest: self.longest,
        };
        let goes = walk(&start, &*kvm.memory, &mut self.predictor, &mut self.trace);
        if self.trace.is_cut {
            kvm.statistics.lock().replays.overruns += 1;
        }
        if !goes {
            return Ok(false);
        }
        let places = self.trace.places();
        // A loop stops where it has stopped before.
        if places != run.places {
            debug::break_at(&kvm.vcpu, &places)?;
            run.places = places;
        }
        // A breakpoint where the guest is: the next time, not now. Set for an earlier trace, the flag would hide others.
        let rflags = match places.contains(&Some(regs.rip)) {
            true => regs.rflags | walk::RF,
            false => regs.rflags & !walk::RF,
        };
        if rflags != regs.rflags {
            kvm.run.set_regs(&kvm_regs { rflags, ..regs });
        }
        run.before = Some((regs, (sregs.cr2, sregs.cr3)));
        run.exits += 1;
        Ok(true)
    }

    /// Hands over the branches that the guest has taken. Call this right after KVM_RUN. Returns whether the exit was
    /// this one's.
    pub(crate) fn after_run(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) -> Result<bool, Error> {
        let returned = kvm.run.returned();
        if mem::take(&mut self.is_asked) {
            let is_ours = kvm.run.flag().load(Ordering::SeqCst) == KICKED;
            // The next check for overflows comes behind this, so that no overflow loses its kick.
            unset(&*kvm.run);
            if is_ours && returned == Returned::NoExit {
                self.is_between = false;
                kvm.statistics.lock().count(Exit::Follow);
                return Ok(true);
            }
        }
        self.forget_replay();
        self.is_between = !matches!(returned, Returned::NoExit | Returned::Debug);
        let Some(run) = &mut self.run else {
            return Ok(false);
        };
        // The vCPU may not have been run.
        let (Some((before, control)), Some(regs)) = (run.before.take(), kvm.run.regs()) else {
            return Ok(false);
        };
        let sregs = kvm.run.sregs();
        let is_ours = returned == Returned::Debug;
        if self.trace.is_opaque {
            self.predictor.forget_pages();
        }
        let taken = self.trace.taken(&regs, &sregs, control, is_ours);
        if is_ours && regs.rip == before.rip {
            match taken {
                Some(_) => self.resume = Resume::Works,
                None if registers(&before).general == registers(&regs).general => {
                    // The breakpoint was seen before the instruction was executed.
                    self.resume = Resume::Fails;
                    run.is_calm = true;
                    kvm.statistics.lock().count(Exit::Follow);
                    return Ok(true);
                }
                None => {}
            }
        }
        match taken {
            Some((branches, off)) => pmu.take_branches(branches.iter().chain(&off)),
            None => pmu.lose_branches(),
        }
        run.is_calm = is_ours;
        if is_ours {
            kvm.statistics.lock().count(Exit::Follow);
            if kvm.run.debug_hits() & 0xf == 0 {
                // The guest's own INT1, or a step that its IRET has begun.
                run.is_calm = false;
                sys::inject_debug(&kvm.vcpu, kvm.run.debug_hits())?;
            }
        }
        Ok(is_ours)
    }

    /// The guest goes its own way.
    fn forget_replay(&mut self) {
        if let Some(replays) = &mut self.replays {
            replays.forget();
        }
    }

    /// Ends the run, if there is one. The counters go on last.
    fn stop(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) -> Result<(), Error> {
        let stopped = self.run.take().map_or(Ok(()), |run| {
            if run.asks_sregs {
                kvm.run.expect_sregs(false);
            }
            if let Some(guard) = &self.guard {
                guard.set(Duration::ZERO)?;
            }
            debug::no_breaks(&kvm.vcpu)
        });
        if mem::take(&mut self.is_held) {
            pmu.load();
        }
        stopped
    }
}

/// Returns whether the guest's page tables are the processor's (EPT, nested paging). Where KVM shadows them, it learns of a
/// guest's change by a fault, and a store that is made for the guest makes none. Where /sys cannot be read, as in a jail, the
/// host is believed to be like nearly all.
fn sees_stores() -> bool {
    let files = [
        "/sys/module/kvm_intel/parameters/ept",
        "/sys/module/kvm_amd/parameters/npt",
    ];
    let is_on = |text: String| !text.starts_with(['N', '0']);
    files
        .iter()
        .all(|file| fs::read_to_string(file).map_or(true, is_on))
}

/// Returns whether the guest is in 64-bit code at CPL 0 or 3, and steps not itself.
fn can_follow(regs: &kvm_regs, sregs: &kvm_sregs) -> bool {
    const EFER_LMA: u64 = 1 << 10;
    /// CR0.EM and CR0.TS: vector instructions fault.
    const CR0_NO_FPU: u64 = 0b1100;
    sregs.efer & EFER_LMA != 0
        && sregs.cs.l != 0
        && matches!(sregs.ss.dpl, 0 | 3)
        && sregs.cr0 & CR0_NO_FPU == 0
        && regs.rflags & TF == 0
}
