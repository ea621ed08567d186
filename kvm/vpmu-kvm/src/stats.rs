//! The cost of a vCPU: exits to the VMM, by kind.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vpmu::counter;
use vpmu::x86::{amd, intel, lbr, pebs};

/// The reason of an exit to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// RDMSR of this MSR.
    MsrRead(u32),
    /// WRMSR of this MSR.
    MsrWrite(u32),
    /// RDPMC, in its rewritten form.
    Rdpmc,
    /// A signal: a host event has overflowed.
    Kick,
    /// A breakpoint by which the guest is followed for its last branch records, or a call of KVM's that completed an
    /// instruction of the guest's and did no more.
    Follow,
    /// A port, read or written.
    Port(u16),
    /// Access to an address without memory.
    Memory,
    /// Anything else.
    Other,
}

impl Exit {
    /// Returns a number that stands for this reason alone.
    const fn number(self) -> u64 {
        let (kind, place) = match self {
            Self::MsrRead(index) => (0, index),
            Self::MsrWrite(index) => (1, index),
            Self::Rdpmc => (2, 0),
            Self::Kick => (3, 0),
            Self::Port(port) => (4, port as u32),
            Self::Memory => (5, 0),
            Self::Other => (6, 0),
            Self::Follow => (7, 0),
        };
        kind << 32 | place as u64
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MsrRead(index) => write!(f, "msr:read:{index:#x}"),
            Self::MsrWrite(index) => write!(f, "msr:write:{index:#x}"),
            Self::Rdpmc => f.write_str("rdpmc"),
            Self::Kick => f.write_str("kick"),
            Self::Follow => f.write_str("follow"),
            Self::Port(port) => write!(f, "io:{port:#x}"),
            Self::Memory => f.write_str("mmio"),
            Self::Other => f.write_str("other"),
        }
    }
}

/// The number of exits of each kind. To count an exit is a search among numbers: every exit pays for that.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Exits(Vec<(u64, Exit, u64)>);

/// The kinds that were counted: there is room for hundreds.
impl fmt::Debug for Exits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = self.iter().filter(|&(_, count)| count > 0);
        f.debug_map()
            .entries(counted.map(|(exit, count)| (exit.to_string(), count)))
            .finish()
    }
}

impl Exits {
    /// Returns the kinds that have been counted, or have room, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Exit, u64)> {
        self.0.iter().map(|&(_, exit, count)| (exit, count))
    }

    /// Returns how many there were of this kind.
    pub fn get(&self, exit: Exit) -> u64 {
        self.find(exit).map_or(0, |at| self.0[at].2)
    }

    fn find(&self, exit: Exit) -> Result<usize, usize> {
        let number = exit.number();
        self.0.binary_search_by_key(&number, |&(number, ..)| number)
    }

    fn add(&mut self, exit: Exit, more: u64) {
        match self.find(exit) {
            Ok(at) => self.0[at].2 += more,
            // Sorted, because a search among numbers is what each exit pays for.
            Err(at) => self.0.insert(at, (exit.number(), exit, more)),
        }
    }
}

impl FromIterator<(Exit, u64)> for Exits {
    fn from_iter<T: IntoIterator<Item = (Exit, u64)>>(counts: T) -> Self {
        let mut exits = Self::default();
        for (exit, count) in counts {
            exits.add(exit, count);
        }
        exits
    }
}

/// The searches for the guest's handler of #GP: [`Rdpmc`](crate::Rdpmc).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arming {
    /// The searches.
    pub searches: u64,
    /// Those that found no handler of a known form: the guest finds no PMU.
    pub refused: u64,
    /// Time of all searches, nanoseconds.
    pub ns: u64,
    /// Time of the longest search. Over a span of time this is still the longest of all.
    pub longest_ns: u64,
}

/// The statistics of one vCPU, which its thread writes and any thread may read.
#[derive(Clone, Debug)]
pub(crate) struct Shared(Arc<Mutex<Statistics>>);

impl Shared {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Statistics::new())))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Statistics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the statistics for the VMM.
    pub(crate) fn share(&self) -> Arc<Mutex<Statistics>> {
        Arc::clone(&self.0)
    }
}

/// The replays: instructions that were executed for a guest with last branch records, so that neither its branches at a PMI
/// nor its handler's reads of them are exits ([`Options::lbr`](crate::Options::lbr)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replays {
    /// Replays that count: the guest went on behind them.
    pub committed: u64,
    /// Replays that were dropped, because memory had changed meanwhile.
    pub dropped: u64,
    /// The reads among them, none of which was an exit.
    pub reads: u64,
    /// The branches that were taken, and recorded.
    pub branches: u64,
    /// All instructions that were executed.
    pub instructions: u64,
    /// How often a guest was followed no further, because the time, the exits or the room for it were used up.
    pub overruns: u64,
}

impl Arming {
    pub(crate) fn note(&mut self, is_refused: bool, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.searches += 1;
        self.refused += u64::from(is_refused);
        self.ns = self.ns.saturating_add(ns);
        self.longest_ns = self.longest_ns.max(ns);
    }
}

/// The cost of one vCPU, or of several together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Exits to the VMM.
    pub exits: Exits,
    /// PMIs delivered to the guest.
    pub pmis: u64,
    /// PMIs that found LVTPC masked.
    pub masked_pmis: u64,
    /// The engine's calls to its host.
    pub host: counter::Statistics,
    /// The longest time, in nanoseconds, for which a counter of cycles stood still between its reads although its host event
    /// ran. Over a span of time this is still the longest of all. See [`PerfHost::longest_stuck_ns`].
    ///
    /// [`PerfHost::longest_stuck_ns`]: vpmu_perf::PerfHost::longest_stuck_ns
    pub longest_stuck_ns: u64,
    /// The outcome of the overflows that ask for PEBS records.
    pub pebs: pebs::Statistics,
    /// The outcome of the branches that were handed over for last branch records.
    pub lbr: lbr::Statistics,
    /// The reads of branch records that were no exits.
    pub replays: Replays,
    /// The searches for the guest's handler of #GP, through which RDPMC comes here.
    pub arming: Arming,
    /// The outcome of the lazy deadlines, by the names of [`lazy_deadline::HostStatistics`].
    pub deadline: BTreeMap<&'static str, u64>,
}

impl Statistics {
    /// Returns statistics without any count. They have room for every exit of a PMU, so that
    /// counting these takes no memory.
    pub fn new() -> Self {
        let amd = amd::Msr::all().map(amd::Msr::address);
        // Under a seccomp filter the vCPU's thread may not be able to ask for memory.
        let msrs = intel::Msr::all().map(intel::Msr::address).chain(amd);
        let msrs = msrs.chain(lbr::intel::msrs()).chain(lbr::amd::msrs());
        let exits = msrs.flat_map(|index| [Exit::MsrRead(index), Exit::MsrWrite(index)]);
        let exits = exits.chain([Exit::Rdpmc, Exit::Kick, Exit::Follow]);
        Self {
            exits: exits.map(|exit| (exit, 0)).collect(),
            ..Self::default()
        }
    }

    /// Counts one more exit.
    pub fn count(&mut self, exit: Exit) {
        self.exits.add(exit, 1);
    }

    /// Adds the statistics of another vCPU.
    pub fn add(&mut self, other: &Self) {
        for (exit, count) in other.exits.iter() {
            self.exits.add(exit, count);
        }
        add(&mut self.deadline, &other.deadline);
        self.pmis += other.pmis;
        self.masked_pmis += other.masked_pmis;
        self.host = combine(self.host, other.host, u64::wrapping_add);
        self.longest_stuck_ns = self.longest_stuck_ns.max(other.longest_stuck_ns);
        self.pebs = combine_pebs(self.pebs, other.pebs, u64::wrapping_add);
        self.lbr = combine_lbr(self.lbr, other.lbr, u64::wrapping_add);
        self.replays = combine_replays(self.replays, other.replays, u64::wrapping_add);
        self.arming = combine_arming(self.arming, other.arming, u64::wrapping_add);
    }

    /// Adds the statistics of a vCPU's lazy deadline.
    pub fn add_deadline(&mut self, deadline: &lazy_deadline::HostStatistics) {
        let counts = [
            ("writes", deadline.writes),
            ("overtaken", deadline.overtaken),
            ("direct", deadline.direct),
            ("expiries", deadline.expiries),
            ("moved", deadline.moved),
            ("cancelled", deadline.cancelled),
            ("stale", deadline.stale),
            ("injected", deadline.injected),
            ("masked", deadline.masked),
            ("abandoned", deadline.abandoned),
        ];
        add(&mut self.deadline, &counts.into());
    }

    /// Returns the statistics since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            exits: self
                .exits
                .iter()
                .map(|(exit, count)| (exit, count.saturating_sub(before.exits.get(exit))))
                .filter(|&(_, count)| count != 0)
                .collect(),
            deadline: since(&self.deadline, &before.deadline),
            pmis: self.pmis.saturating_sub(before.pmis),
            masked_pmis: self.masked_pmis.saturating_sub(before.masked_pmis),
            host: combine(self.host, before.host, u64::saturating_sub),
            longest_stuck_ns: self.longest_stuck_ns,
            pebs: combine_pebs(self.pebs, before.pebs, u64::saturating_sub),
            lbr: combine_lbr(self.lbr, before.lbr, u64::saturating_sub),
            replays: combine_replays(self.replays, before.replays, u64::saturating_sub),
            arming: combine_arming(self.arming, before.arming, u64::saturating_sub),
        }
    }
}

fn add(counts: &mut BTreeMap<&'static str, u64>, more: &BTreeMap<&'static str, u64>) {
    for (&kind, count) in more {
        *counts.entry(kind).or_default() += count;
    }
}

fn since(
    now: &BTreeMap<&'static str, u64>,
    before: &BTreeMap<&'static str, u64>,
) -> BTreeMap<&'static str, u64> {
    let old = |kind| before.get(kind).copied().unwrap_or_default();
    now.iter()
        .map(|(kind, count)| (*kind, count.saturating_sub(old(kind))))
        .filter(|(_, count)| *count != 0)
        .collect()
}

fn combine(
    a: counter::Statistics,
    b: counter::Statistics,
    f: fn(u64, u64) -> u64,
) -> counter::Statistics {
    counter::Statistics {
        creates: f(a.creates, b.creates),
        set_periods: f(a.set_periods, b.set_periods),
        resumes: f(a.resumes, b.resumes),
        pauses: f(a.pauses, b.pauses),
        reads: f(a.reads, b.reads),
        releases: f(a.releases, b.releases),
        lost: f(a.lost, b.lost),
        unsupported: f(a.unsupported, b.unsupported),
        reports: f(a.reports, b.reports),
        spurious_reports: f(a.spurious_reports, b.spurious_reports),
    }
}

fn combine_pebs(
    a: pebs::Statistics,
    b: pebs::Statistics,
    f: fn(u64, u64) -> u64,
) -> pebs::Statistics {
    pebs::Statistics {
        records: f(a.records, b.records),
        lost: f(a.lost, b.lost),
        filtered: f(a.filtered, b.filtered),
        sampled: f(a.sampled, b.sampled),
        outside: f(a.outside, b.outside),
        skipped: f(a.skipped, b.skipped),
    }
}

fn combine_lbr(a: lbr::Statistics, b: lbr::Statistics, f: fn(u64, u64) -> u64) -> lbr::Statistics {
    lbr::Statistics {
        recorded: f(a.recorded, b.recorded),
        filtered: f(a.filtered, b.filtered),
        full: f(a.full, b.full),
        short: f(a.short, b.short),
    }
}

fn combine_replays(a: Replays, b: Replays, f: fn(u64, u64) -> u64) -> Replays {
    Replays {
        committed: f(a.committed, b.committed),
        dropped: f(a.dropped, b.dropped),
        reads: f(a.reads, b.reads),
        branches: f(a.branches, b.branches),
        instructions: f(a.instructions, b.instructions),
        overruns: f(a.overruns, b.overruns),
    }
}

fn combine_arming(a: Arming, b: Arming, f: fn(u64, u64) -> u64) -> Arming {
    Arming {
        searches: f(a.searches, b.searches),
        refused: f(a.refused, b.refused),
        ns: f(a.ns, b.ns),
        // No sum and no difference of maxima tells anything.
        longest_ns: a.longest_ns.max(b.longest_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_the_difference_of_two_moments() {
        let mut before = Statistics::default();
        before.count(Exit::Rdpmc);
        let mut after = before.clone();
        after.count(Exit::MsrRead(0x38e));
        after.pmis = 3;
        after.host.reads = 2;
        (before.longest_stuck_ns, after.longest_stuck_ns) = (5, 9);
        before.arming.note(true, Duration::from_micros(7));
        after.arming = before.arming;
        after.arming.note(false, Duration::from_micros(5));
        let span = after.since(&before);
        let only = [(Exit::MsrRead(0x38e), 1)];
        assert_eq!(span.exits, only.into_iter().collect());
        assert_eq!((span.pmis, span.host.reads), (3, 2));
        assert_eq!(span.longest_stuck_ns, 9);
        before.add(&after);
        assert_eq!(before.longest_stuck_ns, 9);
        let expected = Arming {
            searches: 1,
            refused: 0,
            ns: 5000,
            longest_ns: 7000,
        };
        assert_eq!(span.arming, expected);
    }

    #[test]
    fn only_what_was_counted_is_printed() {
        let mut statistics = Statistics::new();
        statistics.count(Exit::MsrWrite(0x38f));
        let printed = format!("{:?}", statistics.exits);
        assert_eq!(printed, r#"{"msr:write:0x38f": 1}"#);
    }

    #[test]
    fn a_pmus_exits_take_no_memory() {
        let mut statistics = Statistics::new();
        let kinds = statistics.exits.0.len();
        statistics.count(Exit::MsrWrite(0x38f));
        statistics.count(Exit::MsrWrite(0xc001_0201));
        statistics.count(Exit::Kick);
        assert_eq!(statistics.exits.0.len(), kinds);
    }
}
