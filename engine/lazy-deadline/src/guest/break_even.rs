//! Whether the paravirtual mode pays: below a share of avoided writes it does not.
//!
//! A write of the host's register may cost more than one of IA32_TSC_DEADLINE, which many hosts serve without leaving the
//! kernel. `docs/how/lazy-deadline.md` has the share of avoided writes from which the mode pays. A guest learns its
//! share from its own deadlines, whichever register they are written to: what the shared slot would have avoided follows
//! from the deadlines and the clock alone.

use crate::count;

/// Requests after which the share is computed.
const WINDOW: u32 = 256;
/// Windows in a row that change the way. One burst of short sleeps is no rule, and a change costs two writes.
const WINDOWS: u32 = 2;
/// Percent by which the share must exceed the break-even to come back. Without a margin, a share beside the break-even would
/// change the way at each window.
const MARGIN: u32 = 5;

/// What to do with a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the deadline is set by nobody else"]
pub enum Way {
    /// [`ParavirtualTimer::set`](super::ParavirtualTimer::set).
    Lazy,
    /// Write IA32_TSC_DEADLINE, as a driver without a slot.
    Plain,
    /// `ParavirtualTimer::set` to 0, and then as [`Plain`](Self::Plain). The slot stays shared.
    FallBack,
    /// Write 0 to IA32_TSC_DEADLINE, and then as [`Lazy`](Self::Lazy).
    ComeBack,
}

/// What a [`BreakEven`] has decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BreakEvenStatistics {
    /// Deadlines that went to IA32_TSC_DEADLINE.
    pub plain: u64,
    /// Changes to IA32_TSC_DEADLINE.
    pub fell_back: u64,
    /// Changes to the slot.
    pub came_back: u64,
}

/// One CPU's choice between its slot and IA32_TSC_DEADLINE, used on that CPU with interrupts off.
#[derive(Clone, Debug)]
pub struct BreakEven {
    /// The least share of avoided requests that pays, percent.
    least: u32,
    /// When the host would look into the slot; 0: it would not. Also kept while the slot is not used.
    armed: u64,
    /// The last deadline; 0: cancelled.
    wanted: u64,
    asked: u32,
    avoided: u32,
    /// Windows in a row that speak against the present way.
    against: u32,
    is_plain: bool,
    statistics: BreakEvenStatistics,
}

impl BreakEven {
    /// Makes a choice that begins with the slot. `percent` of the requests must be avoided for it to pay; 0: the slot is
    /// used always.
    pub const fn new(percent: u8) -> Self {
        Self {
            least: if percent > 100 { 100 } else { percent as u32 },
            armed: 0,
            wanted: 0,
            asked: 0,
            avoided: 0,
            against: 0,
            is_plain: false,
            statistics: BreakEvenStatistics {
                plain: 0,
                fell_back: 0,
                came_back: 0,
            },
        }
    }

    /// Says what to do with a deadline, not 0, that is asked for at `now` of the TSC.
    pub fn choose(&mut self, deadline: u64, now: u64) -> Way {
        let is_avoided = self.note(deadline, now);
        let changes = self.learn(is_avoided);
        self.is_plain ^= changes;
        if self.is_plain {
            count(&mut self.statistics.plain);
        }
        match (self.is_plain, changes) {
            (false, false) => Way::Lazy,
            (true, false) => Way::Plain,
            (true, true) => {
                count(&mut self.statistics.fell_back);
                Way::FallBack
            }
            (false, true) => {
                count(&mut self.statistics.came_back);
                Way::ComeBack
            }
        }
    }

    /// Notes that the last deadline is wanted no more, by [`ParavirtualTimer::cancel`](super::ParavirtualTimer::cancel) or
    /// otherwise. The way stays.
    pub fn cancel(&mut self) {
        self.wanted = 0;
    }

    /// Returns whether deadlines go to IA32_TSC_DEADLINE now.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Returns what was decided so far.
    pub fn statistics(&self) -> BreakEvenStatistics {
        self.statistics
    }

    /// Returns whether the slot avoids the write, as [`ParavirtualTimer`](super::ParavirtualTimer) and a prompt host would.
    fn note(&mut self, deadline: u64, now: u64) -> bool {
        if self.armed <= now {
            // The host has looked: it has moved its timer to a later deadline, or fired.
            self.armed = if self.wanted > now { self.wanted } else { 0 };
        }
        self.wanted = deadline;
        let is_avoided = self.armed != 0 && self.armed <= deadline;
        if !is_avoided {
            self.armed = deadline;
        }
        is_avoided
    }

    /// Returns whether the way changes with this request.
    fn learn(&mut self, is_avoided: bool) -> bool {
        self.asked += 1;
        self.avoided += u32::from(is_avoided);
        if self.asked < WINDOW {
            return false;
        }
        // Percent of a window by products: a quotient would be rounded in favour of one way.
        let avoided = 100 * core::mem::take(&mut self.avoided);
        self.asked = 0;
        let is_against = match self.is_plain {
            // With a break-even near 100 the margin asks for all.
            true => avoided >= (self.least + MARGIN).min(100) * WINDOW,
            false => avoided < self.least * WINDOW,
        };
        self.against = if is_against { self.against + 1 } else { 0 };
        if self.against < WINDOWS {
            return false;
        }
        self.against = 0;
        true
    }
}
