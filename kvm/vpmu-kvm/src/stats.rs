//! The cost of a vCPU: exits to the VMM, by kind.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vpmu::counter;
use vpmu::x86::{amd, intel, lbr, pebs};

use crate::slot::{COUNTS, STRIDE, Slot};

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
    /// The names of the kinds of reasons: those of all MSRs, and of all ports, are one kind.
    pub const KINDS: [&str; 8] = [
        "msr_read",
        "msr_write",
        "rdpmc",
        "kick",
        "port",
        "memory",
        "other",
        "follow",
    ];

    /// Returns the place of this reason's kind among [`Self::KINDS`].
    const fn kind(self) -> usize {
        (self.number() >> 32) as usize
    }

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
pub struct Exits {
    counts: Vec<(u64, Exit, u64)>,
    kinds: [u64; KINDS],
}

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
        self.counts.iter().map(|&(_, exit, count)| (exit, count))
    }

    /// Returns the counts of all kinds, as [`Exit::KINDS`] names them.
    pub fn kinds(&self) -> [u64; KINDS] {
        self.kinds
    }

    /// Returns counts of which the kinds alone are known.
    pub(crate) fn of_kinds(kinds: [u64; KINDS]) -> Self {
        let counts = Vec::new();
        Self { counts, kinds }
    }

    /// Returns how many there were of this kind.
    pub fn get(&self, exit: Exit) -> u64 {
        self.find(exit).map_or(0, |at| self.counts[at].2)
    }

    fn find(&self, exit: Exit) -> Result<usize, usize> {
        let number = exit.number();
        self.counts
            .binary_search_by_key(&number, |&(number, ..)| number)
    }

    fn add(&mut self, exit: Exit, more: u64) {
        self.kinds[exit.kind()] += more;
        match self.find(exit) {
            Ok(at) => self.counts[at].2 += more,
            // Sorted, because a search among numbers is what each exit pays for.
            Err(at) => self.counts.insert(at, (exit.number(), exit, more)),
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

/// The stacks of open calls, for a guest whose last branch records are in call-stack mode. Each PMI is one of the counts but
/// `calls`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallStacks {
    /// Stacks up to the outermost function.
    pub complete: u64,
    /// Stacks with more calls than there are records.
    pub full: u64,
    /// Stacks that were cut in code without call frame information (CFI).
    pub no_cfi: u64,
    /// Stacks that were cut because a page of CFI is not present in the guest.
    pub page_absent: u64,
    /// Stacks that were cut because a page of the stack itself is not present.
    pub stack_absent: u64,
    /// Stacks that were cut because of CFI that leads to no caller, or that is not understood.
    pub bad_cfi: u64,
    /// Stacks that were cut because they took too long.
    pub budget: u64,
    /// PMIs in 32-bit code: no calls.
    pub compatible: u64,
    /// PMIs in the kernel where the program's registers are not known: no calls.
    pub kernel: u64,
    /// The calls that were found.
    pub calls: u64,
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
    /// The stacks of open calls.
    pub call_stacks: CallStacks,
    /// The searches for the guest's handler of #GP, through which RDPMC comes here.
    pub arming: Arming,
    /// The vCPU's place in the published file.
    pub(crate) slot: Slot,
}

/// Lists the figures that are no exits. The order is that of the published file: new figures come
/// last.
macro_rules! figures {
    (@name $name:literal $($path:ident).+) => { $name };
    (@name $($path:ident).+) => { concat!($(".", stringify!($path)),+).split_at(1).1 };
    ($($($path:ident).+ $(as $name:literal)?,)*) => {
        /// The figures' names: the paths of the fields, or what no field can be called.
        const NAMES: [&str; FIGURES] = [$(figures!(@name $($name)? $($path).+)),*];

        impl Statistics {
            pub(crate) fn words(&self) -> [u64; FIGURES] {
                [$(self.$($path).+),*]
            }

            pub(crate) fn set_words(&mut self, words: [u64; FIGURES]) {
                [$(self.$($path).+),*] = words;
            }
        }
    };
}

/// The number of figures.
pub(crate) const FIGURES: usize = 44;
/// The number of kinds of exits.
pub(crate) const KINDS: usize = Exit::KINDS.len();
// In the published file, the figures stand behind the exits by kind.
const _: () = assert!(COUNTS + KINDS + FIGURES <= STRIDE);

/// The figures of which two vCPUs, or two moments, have the larger one: no sum and no difference of maxima says anything.
const MAXIMA: [&str; 2] = ["longest_stuck_ns", "arming.longest_ns"];

figures! {
    pmis,
    masked_pmis,
    longest_stuck_ns,
    host.creates,
    host.set_periods,
    host.resumes,
    host.pauses,
    host.reads,
    host.releases,
    host.lost,
    host.unsupported,
    host.reports,
    host.spurious_reports,
    pebs.records,
    pebs.lost,
    pebs.filtered,
    pebs.skipped,
    pebs.sampled,
    pebs.outside,
    lbr.recorded,
    lbr.filtered,
    lbr.full,
    lbr.short,
    replays.committed,
    replays.dropped,
    replays.reads,
    replays.branches,
    replays.instructions,
    replays.overruns,
    arming.searches,
    arming.refused,
    arming.ns,
    arming.longest_ns,
    call_stacks.complete,
    call_stacks.full,
    call_stacks.no_cfi,
    call_stacks.page_absent,
    call_stacks.stack_absent,
    call_stacks.bad_cfi,
    call_stacks.budget,
    call_stacks.compatible as "call_stacks.32_bit",
    call_stacks.kernel,
    call_stacks.calls,
    host.part_time,
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
        let kind = exit.kind();
        self.slot.show(kind, || [self.exits.kinds[kind]]);
    }

    /// Returns the figures beside the exits, by the paths of their fields: `pmis`, `host.lost`.
    pub fn figures(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        NAMES.into_iter().zip(self.words())
    }

    /// Publishes the figures as they are.
    pub(crate) fn publish(&self) {
        self.slot.show(KINDS, || self.words());
    }

    /// Adds the statistics of another vCPU.
    pub fn add(&mut self, other: &Self) {
        for (exit, count) in other.exits.iter() {
            self.exits.add(exit, count);
        }
        self.fold(other, u64::wrapping_add);
    }

    /// Returns the statistics since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut span = Self {
            exits: self
                .exits
                .iter()
                .map(|(exit, count)| (exit, count.saturating_sub(before.exits.get(exit))))
                .filter(|&(_, count)| count != 0)
                .collect(),
            ..Self::default()
        };
        span.set_words(self.words());
        span.fold(before, u64::saturating_sub);
        span
    }

    fn fold(&mut self, other: &Self, sum: fn(u64, u64) -> u64) {
        let mut words = self.words();
        for ((name, word), other) in NAMES.iter().zip(&mut words).zip(other.words()) {
            *word = match MAXIMA.contains(name) {
                true => (*word).max(other),
                false => sum(*word, other),
            };
        }
        self.set_words(words);
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
        let kinds = statistics.exits.counts.len();
        statistics.count(Exit::MsrWrite(0x38f));
        statistics.count(Exit::MsrWrite(0xc001_0201));
        statistics.count(Exit::Kick);
        assert_eq!(statistics.exits.counts.len(), kinds);
    }
}
