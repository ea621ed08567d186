//! Saved states as bytes.

use vpmu::{arm, x86};

use crate::VpmuStatus;
use crate::room::{self, promised};

/// No saved state is longer, in bytes.
pub const VPMU_STATE_SIZE: usize = 4096;

/// A state that can be written to bytes and read from them.
pub(crate) trait Bytes: Sized {
    fn write(&self, to: &mut [u8]) -> Option<usize>;
    fn read(from: &[u8]) -> Option<Self>;
}

macro_rules! bytes {
    ($state:ty) => {
        impl Bytes for $state {
            fn write(&self, to: &mut [u8]) -> Option<usize> {
                postcard::to_slice(self, to)
                    .ok()
                    .map(|written| written.len())
            }

            fn read(from: &[u8]) -> Option<Self> {
                // Bytes that are left over belong to another state.
                postcard::take_from_bytes(from)
                    .ok()
                    .filter(|(_, rest)| rest.is_empty())
                    .map(|(state, _)| state)
            }
        }
    };
}

bytes!(arm::PmuState);
bytes!(x86::PmuState);
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
bytes!(Saved);

/// A vCPU, and the places in its VM's guest by which RDPMC comes to the VMM at run time. Each vCPU is saved with all of
/// them, so that nobody has to know which is restored first.
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
pub(crate) type Saved = (vpmu_kvm::State, Option<vpmu_kvm::RdpmcState>);

/// Writes the state that `save` gives to the `room` bytes at `buffer` and their number to `length`.
///
/// # Safety
///
/// `buffer` is null or has `room` writable bytes; `length` is null or may be written.
pub(crate) unsafe fn save<S: Bytes>(
    save: impl FnOnce() -> S,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    // No state is longer, so that what is said of the rest of the buffer does not matter.
    let room = room.min(VPMU_STATE_SIZE);
    let (Some(to), Some(length)) = promised!((
        room::slice_mut(buffer, room, VPMU_STATE_SIZE),
        room::out(length)
    )) else {
        return VpmuStatus::Misuse;
    };
    let Some(written) = save().write(to) else {
        return VpmuStatus::Room;
    };
    *length = written;
    VpmuStatus::Ok
}

/// Has `go_on` go on from the state in the `length` bytes at `buffer`.
///
/// # Safety
///
/// `buffer` is null or has `length` readable bytes.
pub(crate) unsafe fn restore<S: Bytes>(
    buffer: *const u8,
    length: usize,
    go_on: impl FnOnce(&S) -> VpmuStatus,
) -> VpmuStatus {
    if buffer.is_null() {
        return VpmuStatus::Misuse;
    }
    let state = promised!(read(buffer, length));
    state.map_or(VpmuStatus::State, |state| go_on(&state))
}

/// Returns the state in the `length` bytes at `buffer`, if they are one.
///
/// # Safety
///
/// `buffer` is null or has `length` readable bytes.
pub(crate) unsafe fn read<S: Bytes>(buffer: *const u8, length: usize) -> Option<S> {
    S::read(promised!(room::slice(buffer, length, VPMU_STATE_SIZE))?)
}
