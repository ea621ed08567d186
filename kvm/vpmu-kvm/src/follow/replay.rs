//! What a guest executes from one access of its PMU to the next, executed for it ([`vpmu_x86::replay`]).
//!
//! Each access is an exit, and a handler's accesses lie some ten to hundred instructions apart. From one that has exited, the
//! instructions up to the next one are executed here, that one is performed, and so on as long as the gaps are short. KVM
//! completes the first access when it is called again, and is asked to do no more. Then the replay is made, and the guest
//! goes on behind all of it.
//!
//! # What pays
//!
//! The time of an exit of this host is measured when the first vCPU is made ([`worth`](super::worth)), and that of each gap
//! whenever it is executed. Each *site*, an access by its address, register and kind of value, remembers what was gained: at
//! those where nothing is, a replay neither begins nor goes on, but for a try now and then.

#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvm_bindings::kvm_vcpu_events;
use vpmu::x86::{Outcome, Ring, lbr};
use vpmu_perf::{Flag, KICKED, PerfHost};
use vpmu_x86::replay::{Access, Accesses, Chained, Code, Goal, Performed, Replayer, Start};
use vpmu_x86::{Executed, cpu};

use super::worth::Worth;
use crate::error::Error;
use crate::guest::{kvm_registers, registers, system};
use crate::kvm::{OnKvm, RDPMC_PORT};
use crate::memory::GuestMemory;
use crate::offer::Offer;
use crate::options::{Follow, Options, Replay};
use crate::pmu::VcpuPmu;
use crate::run::Returned;
use crate::sys::debug;
use crate::thread::unset;

/// Most instructions of a replay: twice as many as Linux 6.12 executes to read 32 records; and where interrupts are not
/// blocked.
const MOST: u32 = 8192;
const MOST_INTERRUPTIBLE: u32 = 2048;
/// Most instructions from one branch, or one read of a branch record, to the next.
pub(super) const MOST_BETWEEN: u32 = 256;
/// Most instructions from one access to the next: a longer gap takes longer than any host's exit.
const MOST_GAP: u32 = 128;
/// Most accesses without a replay before the next try, as a power of two: a try costs about two exits.
const RAREST: u32 = 10;
/// Sites that are remembered.
const SITES: usize = 512;

/// Returns how many instructions may be executed, for which the guest's interrupts wait.
pub(super) const fn most(rflags: u64) -> u32 {
    const IF: u64 = 1 << 9;
    match rflags & IF {
        0 => MOST,
        _ => MOST_INTERRUPTIBLE,
    }
}

/// An access by its place in the guest, as far as it tells what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site(u64);

impl Site {
    /// A Linux that can be a guest of Xen's has one WRMSR for all, so that the register is a part; and what stops a counter
    /// leads elsewhere than what starts one.
    const fn of(at: u64, access: Access, is_first: bool) -> Self {
        /// Enables a counter, with Intel's PMU as with AMD's.
        const ENABLE: u64 = 1 << 22;
        let (kind, number) = match access {
            Access::Rdmsr(msr) => (1, msr),
            Access::Wrmsr(msr, 0) => (2, msr),
            Access::Wrmsr(msr, value) if value & ENABLE == 0 => (3, msr),
            Access::Wrmsr(msr, _) => (4, msr),
            Access::Out(port, index) => (5 + ((port as u64) << 8), index),
        };
        let mixed = (at ^ (number as u64) << 32 ^ kind << 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(mixed << 1 | is_first as u64)
    }
}

/// What was gained behind a site.
#[derive(Clone, Copy, Debug)]
struct Gain {
    site: Site,
    /// The mean of the last ones, nanoseconds.
    mean: i32,
    failures: u32,
    /// Accesses until the next try.
    rest: u32,
}

#[derive(Debug)]
struct Gains(Box<[Option<Gain>; SITES]>);

impl Gains {
    fn of(&mut self, site: Site) -> &mut Option<Gain> {
        let known = &mut self.0[(site.0 >> 40) as usize % SITES];
        if known.is_some_and(|gain| gain.site != site) {
            *known = None;
        }
        known
    }

    /// Returns whether to execute what follows the site.
    fn is_due(&mut self, site: Site) -> bool {
        let Some(gain) = self.of(site) else {
            return true;
        };
        gain.rest = gain.rest.saturating_sub(1);
        gain.mean >= 0 || gain.rest == 0
    }

    /// Notes what was gained, nanoseconds.
    fn note(&mut self, site: Site, gained: i32, exit: i32) {
        // The thread may have been taken away meanwhile.
        let gained = gained.max(-2 * exit);
        let known = self.of(site);
        let gain = known.get_or_insert(Gain {
            site,
            mean: gained,
            failures: 0,
            rest: 0,
        });
        gain.mean += gained.saturating_sub(gain.mean) / 4;
        gain.failures = match gain.mean < 0 {
            true => RAREST.min(gain.failures + 1),
            false => 0,
        };
        gain.rest = 1 << gain.failures;
    }
}

/// What a replay asks for its guest.
trait Host {
    /// Returns the value of a branch record's register, whose RDMSR has no effect.
    fn record(&mut self, msr: u32) -> Option<u64>;

    /// Counts what was executed since the last access.
    fn count(&mut self, executed: Executed);

    /// Performs an access, and returns what it reads. `Err`: the guest is to execute it.
    fn access(&mut self, at: u64, access: Access) -> Result<Option<u64>, ()>;

    /// Returns whether something is to be delivered to the guest, or is asked of the vCPU's thread.
    fn is_interrupted(&mut self) -> bool;

    /// Counts a replay.
    fn note(&mut self, is_made: bool, is_dropped: bool, vain: u32);
}

/// A replay at work.
struct Chain<'a, H> {
    host: &'a mut H,
    gains: &'a mut Gains,
    worth: i32,
    /// The site behind which instructions are executed, and since when.
    site: Site,
    since: Instant,
    /// What was gained, nanoseconds.
    gained: i32,
    /// Branch records that are left to be read, and how many were read.
    records: u32,
    read: u32,
    /// Whether there were as many the last time. All or none are read then, which keeps the registers once.
    is_known: bool,
    is_all: bool,
    is_over: bool,
}

impl<H: Host> Goal for Chain<'_, H> {
    fn is_reached(&self) -> bool {
        self.is_over || self.records == 0
    }

    fn may_end(&self) -> bool {
        !self.is_known || self.is_reached()
    }

    fn read(&mut self, msr: u32) -> Option<u64> {
        let value = self.host.record(msr)?;
        self.records = self.records.checked_sub(1)?;
        self.read += 1;
        self.gained = self.gained.saturating_add(self.worth);
        Some(value)
    }
}

impl<H: Host> Accesses for Chain<'_, H> {
    fn wants(&mut self) -> bool {
        self.is_all && !self.host.is_interrupted()
    }

    fn perform(&mut self, at: u64, access: Access, executed: Executed) -> Option<Performed> {
        self.host.count(executed);
        let gained = self.worth - nanoseconds(self.since);
        // That takes as long after an exit.
        let value = self.host.access(at, access).ok()?;
        self.gained = self.gained.saturating_add(gained);
        self.gains.note(self.site, gained, self.worth);
        self.site = Site::of(at, access, false);
        self.is_over = self.host.is_interrupted() || !self.gains.is_due(self.site);
        self.since = Instant::now();
        let next = if self.is_over { 0 } else { MOST_GAP };
        Some(Performed { value, next })
    }
}

/// How far a replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// None is wanted.
    Idle,
    /// From this access, once KVM has completed it.
    Wanted(u64, Access),
    /// KVM has.
    Ready(u64, Access),
}

/// Replays for one vCPU. Their room is made once: a vCPU's thread may not be able to ask for memory.
pub(crate) struct Replays {
    memory: Arc<dyn GuestMemory>,
    code: Code,
    replayer: Replayer,
    gains: Gains,
    /// Whether all accesses are replayed, and not reads of branch records alone.
    is_all: bool,
    worth: Worth,
    stage: Stage,
    /// The register of a branch record that the last replay of such began with, and how many it read. The next one that begins
    /// there reads as many.
    last: (u32, u32),
}

impl std::fmt::Debug for Replays {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replays")
            .field("worth", &self.worth)
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

impl Replays {
    /// Returns what replays a vCPU with an architectural PMU, where that is wanted.
    pub(crate) fn attach(
        offer: &Offer,
        memory: Arc<dyn GuestMemory>,
        options: &Options,
    ) -> Option<Self> {
        let is_all = options.replay == Replay::On && offer.capability().is_some();
        let is_wanted = (is_all || offer.has_lbr()) && options.follow == Follow::Ahead;
        is_wanted.then(|| Self {
            is_all,
            ..Self::new(memory, Worth::here())
        })
    }

    fn new(memory: Arc<dyn GuestMemory>, worth: Worth) -> Self {
        Self {
            memory,
            code: Code::new(),
            replayer: Replayer::new(),
            gains: Gains(Box::new([None; SITES])),
            is_all: true,
            worth,
            stage: Stage::Idle,
            last: (0, 0),
        }
    }

    /// Decides whether a replay begins behind an access that was completed here. Call this after each exit.
    pub(crate) fn note(&mut self, kvm: &OnKvm, pmu: &VcpuPmu<PerfHost>) {
        self.stage = Stage::Idle;
        let access = match kvm.run.returned() {
            _ if kvm.has_fault() || kvm.run.has_failed() => None,
            Returned::Rdmsr(msr) => Some(Access::Rdmsr(msr)),
            Returned::Wrmsr(msr, value) => Some(Access::Wrmsr(msr, value)),
            Returned::Out(port) if port == RDPMC_PORT => {
                let (rcx, _) = kvm.run.rcx_and_rip();
                Some(Access::Out(port as u8, rcx as u32))
            }
            _ => None,
        };
        // An interrupt that is due comes first.
        let Some(access) = access.filter(|_| !is_interrupted(kvm, pmu)) else {
            return;
        };
        let (_, at) = kvm.run.rcx_and_rip();
        let is_tried = self.is_all || is_record(access);
        if is_tried && self.gains.is_due(Site::of(at, access, true)) {
            self.stage = Stage::Wanted(at, access);
        }
    }

    /// The guest goes its own way.
    pub(crate) fn forget(&mut self) {
        self.stage = Stage::Idle;
    }

    /// Returns whether KVM is to complete an access and do no more.
    pub(crate) const fn is_wanted(&self) -> bool {
        matches!(self.stage, Stage::Wanted(..))
    }

    /// KVM has completed the access.
    pub(crate) fn completed(&mut self) {
        if let Stage::Wanted(at, access) = self.stage {
            self.stage = Stage::Ready(at, access);
        }
    }

    /// Makes the replay, if there is one to make. Call this right before the guest goes on.
    pub(crate) fn run(
        &mut self,
        kvm: &mut OnKvm,
        pmu: &mut VcpuPmu<PerfHost>,
    ) -> Result<(), Error> {
        let Stage::Ready(at, access) = std::mem::replace(&mut self.stage, Stage::Idle) else {
            return Ok(());
        };
        let (Some(regs), sregs, events) = (kvm.run.regs(), kvm.run.sregs(), kvm.run.events())
        else {
            return Ok(());
        };
        let is_free = super::are_over(&events) && !is_shadowed(&events) && !kvm.run.is_elsewhere();
        // What costs a call is asked last.
        if !is_free || is_interrupted(kvm, pmu) || debug::breakpoints(&kvm.vcpu)? != 0 {
            return Ok(());
        }
        let start = Start {
            registers: &registers(&regs),
            system: &system(&sregs),
            // A handler of a PMU's interrupt reaches user space seldom, and this would cost a call each time.
            pkru: &|| None,
        };
        let mut host = OnVcpu { kvm, pmu };
        if let Some(after) = self.replay(&start, (at, access), &mut host) {
            host.kvm.run.set_regs(&kvm_registers(&after));
        }
        Ok(())
    }

    /// Executes from behind an access. Returns where the guest goes on, if that is elsewhere.
    fn replay(
        &mut self,
        start: &Start<'_>,
        (at, access): (u64, Access),
        host: &mut impl Host,
    ) -> Option<cpu::Registers> {
        let first = Site::of(at, access, true);
        let Worth { exit, call } = self.worth;
        let record = match access {
            Access::Rdmsr(msr) if is_record(access) => Some(msr),
            _ => None,
        };
        let is_known = record.is_some_and(|msr| msr == self.last.0);
        let mut chain = Chain {
            host,
            gains: &mut self.gains,
            worth: exit,
            site: Site::of(at, access, false),
            since: Instant::now(),
            gained: 0,
            records: if is_known { self.last.1 } else { MOST },
            is_all: self.is_all,
            read: 0,
            is_known,
            is_over: false,
        };
        let most = most(start.registers.rflags);
        let limits = (most, MOST_GAP);
        let chained =
            (self.replayer).chain(start, &*self.memory, &mut self.code, limits, &mut chain);
        let Chain {
            site,
            since,
            gained,
            read,
            is_over,
            ..
        } = chain;
        let Chained {
            registers,
            executed,
            vain,
            is_dropped,
        } = chained;
        if let Some(msr) = record {
            // The next replay from there may be shorter.
            self.last = if read > 0 { (msr, read) } else { (0, 0) };
        }
        if !is_over && vain > 0 {
            self.gains.note(site, -nanoseconds(since), exit);
        }
        let all = gained
            .saturating_sub(nanoseconds(since))
            .saturating_sub(call);
        // Any read that is spared pays: a gap between two is some thirty instructions, mostly the same ones.
        let all = if read > 0 { all.max(exit) } else { all };
        self.gains.note(first, all, exit);
        host.count(executed);
        host.note(registers.is_some(), is_dropped, vain);
        registers
    }
}

const fn is_record(access: Access) -> bool {
    matches!(access, Access::Rdmsr(msr) if lbr::is_record(msr))
}

fn nanoseconds(since: Instant) -> i32 {
    // A second is more than any gain.
    since.elapsed().as_nanos().min(1_000_000_000) as i32
}

/// Returns whether an interrupt is due to the guest, or the vCPU's thread is asked for.
fn is_interrupted(kvm: &OnKvm, pmu: &VcpuPmu<PerfHost>) -> bool {
    pmu.pmi_is_due() || pmu.branches_awaited() != 0 || kvm.run.flag().load(Ordering::SeqCst) != 0
}

/// Returns whether interrupts wait for the guest's next instruction (STI, MOV SS).
const fn is_shadowed(events: &kvm_vcpu_events) -> bool {
    events.interrupt.shadow != 0
}

/// A vCPU that does not run.
struct OnVcpu<'a> {
    kvm: &'a mut OnKvm,
    pmu: &'a mut VcpuPmu<PerfHost>,
}

impl Host for OnVcpu<'_> {
    fn record(&mut self, msr: u32) -> Option<u64> {
        self.pmu.read_record(msr)
    }

    fn count(&mut self, executed: Executed) {
        self.pmu.count_executed(executed, Ring::Kernel);
    }

    fn access(&mut self, at: u64, access: Access) -> Result<Option<u64>, ()> {
        match self.kvm.replayed(at, access, self.pmu) {
            Outcome::Value(value) => Ok(Some(value)),
            Outcome::Done => Ok(None),
            Outcome::NotHandled | Outcome::GeneralProtection => Err(()),
        }
    }

    fn is_interrupted(&mut self) -> bool {
        // As right before the guest is run: the kick is taken back first, so that no overflow is without its own.
        if self.kvm.run.flag().load(Ordering::SeqCst) == KICKED {
            unset(&*self.kvm.run);
        }
        // Events up to an access count before it.
        self.pmu.take_overflows();
        is_interrupted(self.kvm, self.pmu)
    }

    fn note(&mut self, is_made: bool, is_dropped: bool, vain: u32) {
        self.pmu.note_replay(is_made, is_dropped, vain);
    }
}
