use core::fmt;

use super::EventKind;

/// The events that a guest may count, in the terms of KVM's KVM_SET_PMU_EVENT_FILTER: a list of masked events for
/// general counters, a bitmap of fixed counters, and one verdict for both. The default filter denies an empty list, so
/// it allows everything.
///
/// A counter of a denied event counts nothing; its registers keep what is written. Only the bitmap
/// decides about fixed counters: denying 0xc0 does not deny fixed counter 0.
///
/// ```
/// use vpmu::x86::{EventFilter, EventKind, MaskedEvent};
///
/// // All events are allowed, but of event 0x2e only the unit mask 0x4f.
/// let filter = EventFilter::deny_listed()
///     .with(MaskedEvent { select: 0x2e, mask: 0, value: 0, exclude: false })?
///     .with(MaskedEvent { select: 0x2e, mask: 0xff, value: 0x4f, exclude: true })?;
/// let event = |select, umask| EventKind::General { select, umask };
/// assert!(filter.allows(event(0xc0, 0)));
/// assert!(filter.allows(event(0x2e, 0x4f)));
/// assert!(!filter.allows(event(0x2e, 0x41)));
/// # Ok::<(), vpmu::x86::TooManyEvents>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventFilter {
    allow: bool,
    used: u8,
    events: [MaskedEvent; Self::MAX_EVENTS],
    fixed: u32,
}

/// Events of one event select: those whose unit mask is `value` under `mask`. With `exclude`, these
/// events are taken out of what the rest of the list names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaskedEvent {
    /// The event select: 8 bits of Intel's, 12 of AMD's.
    pub select: u16,
    /// Bits of the unit mask that matter.
    pub mask: u8,
    /// The value of those bits.
    pub value: u8,
    /// Whether the events are taken out of the list.
    pub exclude: bool,
}

impl MaskedEvent {
    /// Names one event: this event select with this unit mask.
    pub const fn one(select: u16, umask: u8) -> Self {
        Self {
            select,
            mask: 0xff,
            value: umask,
            exclude: false,
        }
    }

    /// Decodes KVM_PMU_ENCODE_MASKED_ENTRY. `None`: bits are set that mean nothing. An event select of more than
    /// 8 bits names nothing on Intel.
    pub const fn from_kvm(entry: u64) -> Option<Self> {
        const EXCLUDE: u64 = 1 << 55;
        // KVM has the mask in bits 63:56, exclude in 55, the select in 35:32 and 7:0, and the match in 15:8.
        if entry & !(0xff << 56 | EXCLUDE | 0xf << 32 | 0xffff) != 0 {
            return None;
        }
        Some(Self {
            select: entry as u16 & 0xff | (entry >> 24) as u16 & 0xf00,
            mask: (entry >> 56) as u8,
            value: (entry >> 8) as u8,
            exclude: entry & EXCLUDE != 0,
        })
    }

    const fn names(self, select: u16, umask: u8) -> bool {
        self.select == select && umask & self.mask == self.value
    }
}

impl EventFilter {
    /// The most masked events that a filter holds.
    // KVM takes 300. Each PMU holds its own list, as nothing can be allocated here.
    pub const MAX_EVENTS: usize = 64;

    /// Makes a filter that allows only what is listed: at first nothing.
    pub const fn allow_listed() -> Self {
        Self::new(true)
    }

    /// Makes a filter that denies only what is listed: at first nothing.
    pub const fn deny_listed() -> Self {
        Self::new(false)
    }

    const fn new(allow: bool) -> Self {
        Self {
            allow,
            used: 0,
            events: [MaskedEvent::one(0, 0); Self::MAX_EVENTS],
            fixed: 0,
        }
    }

    /// Lists `event`.
    ///
    /// # Errors
    ///
    /// [`TooManyEvents`] when [`MAX_EVENTS`](Self::MAX_EVENTS) are listed.
    pub fn with(mut self, event: MaskedEvent) -> Result<Self, TooManyEvents> {
        let place = self
            .events
            .get_mut(usize::from(self.used))
            .ok_or(TooManyEvents)?;
        *place = event;
        self.used += 1;
        Ok(self)
    }

    /// Lists these fixed counters, bit *n* for counter *n*, in place of those listed before.
    #[must_use]
    pub const fn with_fixed(mut self, fixed: u32) -> Self {
        self.fixed = fixed;
        self
    }

    /// Tells whether the guest may count `event`.
    pub fn allows(&self, event: EventKind) -> bool {
        let listed = match event {
            EventKind::General { select, umask } => self.lists(select.into(), umask),
            EventKind::Amd { select, umask } => self.lists(select, umask),
            // An unchecked shift by 32 or more would panic, and `n` is anybody's.
            EventKind::Fixed(n) => self.fixed.checked_shr(n.into()).unwrap_or(0) & 1 != 0,
        };
        listed == self.allow
    }

    fn lists(&self, select: u16, umask: u8) -> bool {
        let named = |exclude| {
            self.events
                .iter()
                .take(usize::from(self.used))
                .any(|event| event.exclude == exclude && event.names(select, umask))
        };
        // Wherever it stands in the list, an exclusion wins: KVM's list is sorted, and has no order of its own.
        named(false) && !named(true)
    }
}

impl Default for EventFilter {
    fn default() -> Self {
        Self::deny_listed()
    }
}

/// An [`EventFilter`] has no room for another event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyEvents;

impl fmt::Display for TooManyEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "filter more than {} masked events",
            EventFilter::MAX_EVENTS
        )
    }
}

impl core::error::Error for TooManyEvents {}

#[cfg(test)]
mod tests {
    use super::*;

    const fn event(select: u8, umask: u8) -> EventKind {
        EventKind::General { select, umask }
    }

    #[test]
    fn an_allow_list_allows_what_it_lists() {
        let filter = EventFilter::allow_listed()
            .with(MaskedEvent::one(0xc0, 0))
            .expect("one event fits")
            .with_fixed(0b10);
        assert!(filter.allows(event(0xc0, 0)));
        assert!(!filter.allows(event(0xc0, 1)) && !filter.allows(event(0x3c, 0)));
        assert!(filter.allows(EventKind::Fixed(1)));
        assert!(!filter.allows(EventKind::Fixed(0)) && !filter.allows(EventKind::Fixed(200)));
    }

    #[test]
    fn a_deny_list_denies_what_it_lists() {
        let filter = EventFilter::default()
            .with(MaskedEvent::one(0xc0, 0))
            .expect("one event fits")
            .with_fixed(0b10);
        assert!(!filter.allows(event(0xc0, 0)) && filter.allows(event(0xc0, 1)));
        assert!(!filter.allows(EventKind::Fixed(1)) && filter.allows(EventKind::Fixed(0)));
    }

    #[test]
    fn a_masked_entry_of_kvm_is_understood() {
        let entry = 0xf0 << 56 | 1 << 55 | 0x40 << 8 | 0x2e;
        let event = MaskedEvent::from_kvm(entry).expect("an entry of Intel's");
        assert!(event.exclude && event.names(0x2e, 0x4f) && !event.names(0x2e, 0x5f));
        let wide = MaskedEvent::from_kvm(0xff << 56 | 1 << 32 | 0x20 | 1 << 8);
        assert_eq!(wide, Some(MaskedEvent::one(0x120, 1)), "AMD's");
        assert_eq!(MaskedEvent::from_kvm(1 << 36), None);
    }

    #[test]
    fn a_mask_that_the_value_contradicts_names_nothing() {
        let nothing = MaskedEvent {
            select: 1,
            mask: 0x0f,
            value: 0x10,
            exclude: false,
        };
        assert!((0..=255).all(|umask| !nothing.names(1, umask)));
    }

    #[test]
    fn a_full_filter_says_so() {
        let full = (0..64).try_fold(EventFilter::default(), |filter, n| {
            filter.with(MaskedEvent::one(n, 0))
        });
        assert_eq!(
            full.and_then(|filter| filter.with(MaskedEvent::one(99, 0))),
            Err(TooManyEvents)
        );
    }
}
