//! What guest and host share for one vCPU: a cache line of guest memory.

use core::fmt;

use super::sync::{AtomicU64, Ordering};

/// One vCPU's shared cache line, in the guest's memory.
///
/// # Layout 1
///
/// Little-endian 64-bit words, at an address that is a multiple of 64:
///
/// | offset | word | written by | meaning |
/// |---|---|---|---|
/// | 0x00 | `armed` | host | the host reads `pending` when the guest's TSC gets there; 0: only if the guest writes the MSR |
/// | 0x08 | `pending` | guest; host, from a deadline that fired to 0 | the deadline that the guest wants; 0: none |
/// | 0x10 | `tag` | guest | [`Slot::TAG`] while this memory is a slot |
/// | 0x18 | | nobody | reserved, 0 |
///
/// Deadlines are values of the guest's TSC. Any bits are a valid slot: a host that has mapped guest
/// memory may refer to it as one, if it shares that mapping with nothing but atomic accesses.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Slot {
    armed: AtomicU64,
    pending: AtomicU64,
    tag: AtomicU64,
    reserved: [AtomicU64; 5],
}

#[cfg(not(all(test, loom)))]
const _: () = {
    assert!(size_of::<Slot>() == Slot::SIZE);
    assert!(core::mem::offset_of!(Slot, armed) == Slot::ARMED);
    assert!(core::mem::offset_of!(Slot, pending) == Slot::PENDING);
    assert!(core::mem::offset_of!(Slot, tag) == Slot::TAG_WORD);
};

impl Slot {
    /// The value of `tag`: "vpmuTSC" and the layout's number, 1. Memory that has found another use
    /// is unlikely to hold it, so that a host can tell.
    pub const TAG: u64 = 0x7670_6d75_5453_4301;
    /// The size and the alignment of a slot in bytes.
    pub const SIZE: usize = 64;
    /// Byte offset of `armed`.
    pub const ARMED: usize = 0x00;
    /// Byte offset of `pending`.
    pub const PENDING: usize = 0x08;
    /// Byte offset of `tag`.
    pub const TAG_WORD: usize = 0x10;

    /// A slot of zeros: nothing armed, nothing wanted, not yet tagged.
    #[cfg(not(all(test, loom)))]
    pub const fn new() -> Self {
        Self {
            armed: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            tag: AtomicU64::new(0),
            reserved: [const { AtomicU64::new(0) }; 5],
        }
    }

    /// The words of this slot.
    pub fn words(&self) -> SlotRef<'_> {
        SlotRef {
            armed: &self.armed,
            pending: &self.pending,
            tag: &self.tag,
        }
    }
}

/// The words of a slot, wherever they are: of a [`Slot`], or one by one from a library that maps
/// guest memory and hands out references to atomics (rust-vmm's `get_atomic_ref`).
#[derive(Clone, Copy, Debug)]
pub struct SlotRef<'a> {
    /// The word at [`Slot::ARMED`].
    pub armed: &'a AtomicU64,
    /// The word at [`Slot::PENDING`].
    pub pending: &'a AtomicU64,
    /// The word at [`Slot::TAG_WORD`].
    pub tag: &'a AtomicU64,
}

impl SlotRef<'_> {
    pub(super) fn load_tag(self) -> u64 {
        self.tag.load(Ordering::Relaxed)
    }
}

/// Why a host does not share a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The guest named memory that is no slot of a layout this engine knows.
    Tag {
        /// What stands where the tag should.
        found: u64,
    },
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag { found } => write!(
                f,
                "share a deadline slot: its tag is {found:#x}, this engine knows {:#x}",
                Slot::TAG
            ),
        }
    }
}

impl core::error::Error for AttachError {}
