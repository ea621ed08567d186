//! Saved states as bytes.

use core::slice;

use vpmu::{arm, x86};

use crate::VpmuStatus;

/// No saved state is longer, in bytes.
pub const VPMU_STATE_SIZE: usize = 1024;

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
bytes!(vpmu_kvm::State);

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
    if buffer.is_null() || length.is_null() {
        return VpmuStatus::Misuse;
    }
    // SAFETY: as the caller promises.
    let to = unsafe { slice::from_raw_parts_mut(buffer, room) };
    let Some(written) = save().write(to) else {
        return VpmuStatus::Room;
    };
    // SAFETY: not null, and as the caller promises.
    unsafe { length.write(written) };
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
    // SAFETY: as the caller promises.
    let state = unsafe { read(buffer, length) };
    state.map_or(VpmuStatus::State, |state| go_on(&state))
}

/// Returns the state in the `length` bytes at `buffer`, if they are one.
///
/// # Safety
///
/// `buffer` has `length` readable bytes.
pub(crate) unsafe fn read<S: Bytes>(buffer: *const u8, length: usize) -> Option<S> {
    // SAFETY: as the caller promises.
    S::read(unsafe { slice::from_raw_parts(buffer, length) })
}
