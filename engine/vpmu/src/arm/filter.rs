use core::fmt;
use core::ops::RangeInclusive;

use super::{CHAIN, SW_INCR};

/// The events that a guest may count: a default verdict, and rules. The last rule that names an event decides. The
/// default filter allows everything.
///
/// A denied event counts nothing, and its bit in PMCEID0/1_EL0 reads as zero, so the guest sees an
/// event that this PMU does not implement. [`CPU_CYCLES`](super::CPU_CYCLES) stands for the cycle
/// counter too. [`SW_INCR`] and [`CHAIN`] cannot be denied: they count nothing but what the guest
/// itself did to its PMU.
///
/// ```
/// use vpmu::arm::EventFilter;
///
/// let filter = EventFilter::deny_all().allow(0x08..=0x11)?.deny(0x10..=0x10)?;
/// assert!(filter.allows(0x11));
/// assert!(!filter.allows(0x10));
/// # Ok::<(), vpmu::arm::TooManyRules>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventFilter {
    // No map by event: 65,536 events would need 8 KiB in each vCPU's PMU.
    otherwise: bool,
    used: u8,
    /// Bit *n*: rule *n* allows.
    // Not a field of each rule: filters pass through the stacks of hypervisors.
    allows: u16,
    rules: [Rule; Self::MAX_RULES],
}

/// The first and the last event of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    first: u16,
    last: u16,
}

impl EventFilter {
    /// How many rules fit.
    pub const MAX_RULES: usize = 16;

    /// Makes a filter that allows every event, until rules deny some.
    pub const fn allow_all() -> Self {
        Self::new(true)
    }

    /// Makes a filter that denies every event, until rules allow some.
    pub const fn deny_all() -> Self {
        Self::new(false)
    }

    const fn new(otherwise: bool) -> Self {
        Self {
            otherwise,
            used: 0,
            allows: 0,
            rules: [Rule { first: 0, last: 0 }; Self::MAX_RULES],
        }
    }

    /// Allows these events, whatever earlier rules say of them.
    ///
    /// # Errors
    ///
    /// [`TooManyRules`] when [`MAX_RULES`](Self::MAX_RULES) are in use.
    pub fn allow(self, events: RangeInclusive<u16>) -> Result<Self, TooManyRules> {
        self.with_rule(events, true)
    }

    /// Denies these events, whatever earlier rules say of them.
    ///
    /// # Errors
    ///
    /// [`TooManyRules`] when [`MAX_RULES`](Self::MAX_RULES) are in use.
    pub fn deny(self, events: RangeInclusive<u16>) -> Result<Self, TooManyRules> {
        self.with_rule(events, false)
    }

    fn with_rule(mut self, events: RangeInclusive<u16>, allow: bool) -> Result<Self, TooManyRules> {
        self.add_rule(events, allow)?;
        Ok(self)
    }

    /// Allows these events, or denies them, as [`allow`](Self::allow) and [`deny`](Self::deny) do, in place.
    ///
    /// # Errors
    ///
    /// [`TooManyRules`] when [`MAX_RULES`](Self::MAX_RULES) are in use.
    pub fn add_rule(
        &mut self,
        events: RangeInclusive<u16>,
        allow: bool,
    ) -> Result<(), TooManyRules> {
        let rule = self
            .rules
            .get_mut(usize::from(self.used))
            .ok_or(TooManyRules)?;
        *rule = Rule {
            first: *events.start(),
            last: *events.end(),
        };
        self.allows |= u16::from(allow) << self.used;
        self.used += 1;
        Ok(())
    }

    /// The rules in use, each with its verdict.
    fn rules(&self) -> impl DoubleEndedIterator<Item = (&Rule, bool)> {
        let rules = self.rules.iter().take(usize::from(self.used));
        rules
            .enumerate()
            .map(|(n, rule)| (rule, self.allows >> n & 1 != 0))
    }

    /// Returns whether the guest may count `event`.
    pub fn allows(&self, event: u16) -> bool {
        // Software increments and carries show only what the guest did itself.
        if matches!(event, SW_INCR | CHAIN) {
            return true;
        }
        self.rules()
            // Backwards: of all rules that name the event the last one decides.
            .rev()
            .find(|(rule, _)| (rule.first..=rule.last).contains(&event))
            .map_or(self.otherwise, |(_, allow)| allow)
    }

    /// Returns whether every event is allowed. Then the guest's choice need not be checked.
    pub fn allows_all(&self) -> bool {
        self.otherwise && self.rules().all(|(_, allow)| allow)
    }

    /// Takes the denied events out of `[PMCEID0_EL0, PMCEID1_EL0]`.
    pub fn pmceid(&self, events: [u64; 2]) -> [u64; 2] {
        // PMCEID0 holds events 0x0000-0x001f and 0x4000-0x401f, PMCEID1 the next 32 of each.
        // A denied event must not be listed: a guest's perf would offer it and show 0.
        let masked = |bits: u64, first: u16| {
            (0..32_u16)
                .flat_map(|n| [(n, first + n), (n + 32, 0x4000 + first + n)])
                .filter(|&(_, event)| !self.allows(event))
                .fold(bits, |bits, (bit, _)| bits & !(1 << bit))
        };
        [masked(events[0], 0), masked(events[1], 32)]
    }
}

impl Default for EventFilter {
    fn default() -> Self {
        Self::allow_all()
    }
}

/// An [`EventFilter`] has no room for another rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRules;

impl fmt::Display for TooManyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "event filter has more than {} rules",
            EventFilter::MAX_RULES
        )
    }
}

impl core::error::Error for TooManyRules {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_decides() {
        let filter = EventFilter::allow_all()
            .deny(0x10..=0x20)
            .and_then(|f| f.allow(0x11..=0x11))
            .expect("two rules fit");
        assert!(!filter.allows(0x10) && filter.allows(0x11) && filter.allows(0x21));
        assert!(!filter.allows_all());
    }

    #[test]
    fn denied_events_vanish_from_pmceid() {
        let filter = EventFilter::deny_all()
            .allow(0x11..=0x11)
            .and_then(|f| f.allow(0x24..=0x24))
            .and_then(|f| f.allow(0x4004..=0x4004))
            .expect("three rules fit");
        let own = 1 << SW_INCR | 1 << CHAIN;
        assert_eq!(
            filter.pmceid([u64::MAX; 2]),
            [own | 1 << 0x11 | 1 << 36, 1 << 4]
        );
        assert_eq!(EventFilter::default().pmceid([5, 6]), [5, 6]);
    }

    #[test]
    fn a_full_filter_says_so() {
        let full = (0..16).try_fold(EventFilter::default(), |f, n| f.deny(n..=n));
        assert_eq!(full.and_then(|f| f.deny(99..=99)), Err(TooManyRules));
    }
}
