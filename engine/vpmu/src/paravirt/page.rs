//! The page: its words, and who writes them.

use crate::counter::{CounterState, Lost};

/// No page has more counters.
pub const MAX_COUNTERS: u8 = 16;
/// Bytes of a page, and its alignment.
pub const PAGE_SIZE: usize = 4096;
/// What [`word::TAG`] holds while a page is shared: "vpmuPMU", layout 1. The host neither believes nor writes
/// memory without it.
pub const TAG: u64 = 0x7670_6d75_504d_5501;
/// Records in a buffer. Record *n* since the page was shared is at `n % RECORDS`.
pub const RECORDS: u64 = 512;
/// Bytes of a record: words for the address, the guest's TSC, the events in the period that the sample ended, and the counter
/// in bits 7:0 with bit 8 set at CPL 1 to 3.
pub const RECORD: usize = 32;

/// A shared page, as 512 words of 64 bits.
///
/// Any word may change at any time, by any vCPU of the guest. A word above 511 must not be asked for.
// No references into the page: other vCPUs write it meanwhile, and a reference would promise that nobody does.
pub trait Page {
    /// A word, in one piece. No later load or store of this thread comes before it.
    fn load(&self, word: usize) -> u64;

    /// Stores a word in one piece. No earlier load or store of this thread comes after it.
    fn store(&self, word: usize, value: u64);

    /// A full barrier: stores before it are visible before loads after it are performed.
    fn fence(&self);

    /// Writes `bytes` to the guest's memory at this physical address, a multiple of 8. No later store of this thread comes
    /// before it. `false`: not all of that is RAM, and the records of samples find no room.
    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let _ = (address, bytes);
        false
    }
}

/// Numbers of words in the page. Byte offsets are eight times as large.
pub mod word {
    use crate::counter::Counter;

    /// Guest: [`TAG`](super::TAG) while the page is shared.
    pub const TAG: usize = 0;
    /// Guest: the last [`SEQ`] that its handler has seen.
    pub const ACK: usize = 1;
    /// Guest: bit *n*: counter *n* is to count. Read by the host at [`command::APPLY`](super::command::APPLY).
    pub const WANTED: usize = 2;
    /// Guest: the physical address of the buffer for [`RECORDS`](super::RECORDS), a multiple of 4096; 0: there is none. Read
    /// by the host at [`command::APPLY`](super::command::APPLY).
    pub const BUFFER: usize = 3;
    /// Guest: records that it has taken since the page was shared.
    pub const TAIL: usize = 4;
    /// Host: interrupts sent since the page was shared.
    // The host's words begin a cache line of their own: the handler's store to ACK does not take it from the host.
    pub const SEQ: usize = 8;
    /// Host: [`state::HERE`](super::state::HERE), or [`state::GONE`](super::state::GONE) when nothing counts
    /// any more and the doorbell is #GP.
    pub const DEVICE: usize = 9;
    /// Host: the shortest period now. A shorter wish is stretched to it.
    pub const FLOOR: usize = 10;
    /// Host: records that it has written since the page was shared.
    pub const HEAD: usize = 11;

    /// The first word of a counter, and words in each.
    // A stride of two cache lines of 64 bytes: one is the guest's, the other the host's.
    const COUNTERS: usize = 32;
    const STRIDE: usize = 16;

    const fn of(counter: Counter, word: usize) -> usize {
        // A page has no counter 16: the remainder keeps any counter inside.
        COUNTERS + (counter.index() % super::MAX_COUNTERS as usize) * STRIDE + word
    }

    /// Defines a counter's words by their places.
    macro_rules! words {
        ($($(#[$about:meta])* $name:ident = $place:literal;)*) => {
            $($(#[$about])*
            pub const fn $name(counter: Counter) -> usize {
                of(counter, $place)
            })*
        };
    }

    words! {
        /// Guest: what is counted, as the event part of IA32_PERFEVTSELx: bits 7:0, 15:8, 18 (edge), 23 (invert),
        /// 31:24 (counter mask). All others are 0.
        config = 0;
        /// Guest: [`flag`](super::flag)s.
        flags = 1;
        /// Guest: events to the first overflow.
        left = 2;
        /// Guest: events from each overflow to the next. The only wish that may change without a new generation: it
        /// holds from the next overflow on, and where overflows become records about from the next doorbell on.
        period = 3;
        /// Guest: a new number, which is not 0, makes the counter anew, from a count of 0. With the old number it
        /// goes on.
        generation = 4;
        /// Host: events counted in this generation.
        count = 8;
        /// Host: overflows in this generation.
        overflows = 9;
        /// Host: events in the period that the last overflow ended.
        last_period = 10;
        /// Host: the count at which the next overflow is.
        next = 11;
        /// Host: the generation that the other words of this half are about.
        made = 12;
        /// Host: a [`state`](super::state).
        state = 13;
        /// Host: records that found no room since the page was shared.
        lost = 14;
    }
}

/// Bits of [`word::flags`].
pub mod flag {
    /// Count while the guest is at CPL 1 to 3.
    pub const USER: u64 = 1 << 0;
    /// Count while the guest is at CPL 0.
    pub const KERNEL: u64 = 1 << 1;
    /// Interrupt at each overflow. Without it there are none.
    pub const INTERRUPT: u64 = 1 << 2;
    /// With [`INTERRUPT`]: an overflow may become a record instead of an interrupt. The host reads this flag at each
    /// interrupt, too: the guest's `perf -F` sets it when its period has settled, which interrupts do fastest.
    pub const RECORD: u64 = 1 << 3;
}

/// Bits that are written to the doorbell. Several are done in this order; all others are #GP.
pub mod command {
    /// Stop all counters, until [`APPLY`], and bring their counts back.
    // Here in the order in which they are done, which is not that of the bits.
    pub const FREEZE: u64 = 1 << 2;
    /// Bring all counts back.
    pub const READ: u64 = 1 << 1;
    /// Bring all counts back, then make all counters what is wished.
    pub const APPLY: u64 = 1 << 0;
    /// Interrupt once more if the last interrupt was not acknowledged.
    pub const INJECT: u64 = 1 << 3;
    /// All of them.
    pub const ALL: u64 = FREEZE | READ | APPLY | INJECT;
}

/// Values of [`word::DEVICE`] and [`word::state`].
pub mod state {
    /// The device serves the page.
    pub const HERE: u64 = 1;
    /// The device has left its guest.
    pub const GONE: u64 = 2;

    /// The counter does not count, and is not to.
    pub const OFF: u64 = 0;
    /// The counter counts.
    pub const COUNTING: u64 = 1;
    /// The counter is to count and does not: the host has no such event.
    pub const UNSUPPORTED: u64 = 2;
    /// The same: the host's counters are taken.
    pub const BUSY: u64 = 3;
    /// The count is too low: the host counts part of the time, or has stopped the counter for a while.
    pub const MULTIPLEXED: u64 = 4;
    /// The counter is to count and does not, for a reason of the host's own.
    pub const FAILED: u64 = 5;
}

/// What [`word::state`] says of a counter.
pub(super) const fn state_of(counter: CounterState) -> u64 {
    match counter {
        CounterState::Counting => state::COUNTING,
        CounterState::Paused => state::OFF,
        CounterState::Lost(Lost::Unsupported) => state::UNSUPPORTED,
        CounterState::Lost(Lost::Busy) => state::BUSY,
        // The guest's perf can say no more of either than that the count is too low.
        CounterState::Lost(Lost::Multiplexed | Lost::Throttled) => state::MULTIPLEXED,
        CounterState::Lost(Lost::Failed) => state::FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counter::Counter;

    #[test]
    fn every_word_is_in_the_page() {
        for counter in Counter::all() {
            assert!(word::lost(counter) < PAGE_SIZE / 8, "{counter}");
        }
        assert_eq!(word::config(Counter::at::<0>()) * 8, 0x100);
        assert_eq!(word::count(Counter::at::<1>()) * 8, 0x1c0);
    }
}
