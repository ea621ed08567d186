//! Room in the caller's memory for a value whose layout C does not know.

use crate::{VpmuOutcome, VpmuStatus};

/// Memory of the caller's that a C struct describes as opaque words.
pub(crate) trait Room: Sized {
    /// What is kept there.
    type Value;

    /// Marks room that holds a [`Value`](Self::Value), so that a PMU that was never initialized is
    /// told from one that was.
    const MARK: u64;
}

/// What the room really holds.
#[repr(C)]
struct Filled<T> {
    mark: u64,
    value: T,
}

/// What a function answers when it is given no room, or room that holds nothing.
pub(crate) trait Answer {
    /// The answer to such a caller.
    const MISUSE: Self;
}

impl Answer for VpmuStatus {
    const MISUSE: Self = Self::Misuse;
}

impl Answer for VpmuOutcome {
    const MISUSE: Self = Self::Misuse;
}

impl Answer for bool {
    const MISUSE: Self = false;
}

impl Answer for i32 {
    const MISUSE: Self = VpmuStatus::Misuse as Self;
}

/// Puts `value` into `room`.
///
/// # Safety
///
/// `room` may be written, or is null.
pub(crate) unsafe fn fill<R: Room>(room: *mut R, value: R::Value) -> VpmuStatus {
    const {
        assert!(size_of::<Filled<R::Value>>() <= size_of::<R>());
        assert!(align_of::<Filled<R::Value>>() <= align_of::<R>());
    }
    if room.is_null() {
        return VpmuStatus::Misuse;
    }
    let filled = Filled {
        mark: R::MARK,
        value,
    };
    // SAFETY: large and aligned enough, as asserted above, and writable, as the caller promises.
    unsafe { room.cast::<Filled<R::Value>>().write(filled) };
    VpmuStatus::Ok
}

/// Answers what `act` does with what `room` holds.
///
/// # Safety
///
/// `room` is null or points to initialized memory of its size, and nobody else uses it meanwhile.
pub(crate) unsafe fn with<R: Room, A: Answer>(
    room: *mut R,
    act: impl FnOnce(&mut R::Value) -> A,
) -> A {
    // SAFETY: as the caller promises.
    unsafe { value(room) }.map_or(A::MISUSE, act)
}

/// [`with`], for what cannot fail.
///
/// # Safety
///
/// As for [`with`].
pub(crate) unsafe fn perform<R: Room>(room: *mut R, act: impl FnOnce(&mut R::Value)) -> VpmuStatus {
    let act = |held: &mut R::Value| {
        act(held);
        VpmuStatus::Ok
    };
    // SAFETY: as the caller promises.
    unsafe { with(room, act) }
}

/// What `room` holds; `None`: nothing, or there is no room.
///
/// # Safety
///
/// As for [`with`], during `'a`.
pub(crate) unsafe fn value<'a, R: Room>(room: *mut R) -> Option<&'a mut R::Value> {
    if room.is_null() {
        return None;
    }
    // SAFETY: the mark is the first word, and any word is a u64.
    if unsafe { room.cast::<u64>().read() } != R::MARK {
        return None;
    }
    // SAFETY: only `fill` writes the mark, and a value with it.
    Some(unsafe { &mut (*room.cast::<Filled<R::Value>>()).value })
}

/// What `pointer` points to.
///
/// # Safety
///
/// `pointer` is null or points to a `T` that nobody else uses during `'a`.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T) -> Option<&'a mut T> {
    // SAFETY: as the caller promises.
    unsafe { pointer.as_mut() }
}

/// Writes `numbers`, as many as there is `room` for, to `to`, and how many there are to `count`.
///
/// # Safety
///
/// `to` is null or has room for so many; `count` is null or may be written.
pub(crate) unsafe fn list(
    numbers: impl Iterator<Item = u32>,
    to: *mut u32,
    room: usize,
    count: *mut usize,
) -> VpmuStatus {
    // SAFETY: as the caller promises.
    let Some(count) = (unsafe { out(count) }) else {
        return VpmuStatus::Misuse;
    };
    if to.is_null() && room > 0 {
        return VpmuStatus::Misuse;
    }
    *count = 0;
    for number in numbers {
        if *count < room {
            // SAFETY: within the room, and as the caller promises.
            unsafe { to.add(*count).write(number) };
        }
        *count += 1;
    }
    if *count > room {
        VpmuStatus::Room
    } else {
        VpmuStatus::Ok
    }
}
