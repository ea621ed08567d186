//! Room in the caller's memory for a value whose layout C does not know.

use core::slice as core_slice;

use crate::status::{VpmuOutcome, VpmuStatus};

/// Evaluates what is safe as far as the caller in C keeps the promise of the crate's page.
macro_rules! promised {
    ($given:expr) => {{
        // SAFETY: a pointer is null or points to what its type says, of the stated length, which nobody else uses during
        // the call: the caller of each exported function promises that. Null, misaligned and unfilled memory is found.
        unsafe { $given }
    }};
}

pub(crate) use promised;

/// Memory of the caller's that a C struct describes as opaque words.
pub(crate) trait Room: Sized {
    /// What is kept there.
    type Value;

    /// Marks room that holds a [`Value`](Self::Value), so that a PMU that was never initialized is
    /// told from one that was.
    const MARK: u64;

    /// Returns what the caller may read of the value without a call.
    fn note(_: &Self::Value) -> u64 {
        0
    }
}

/// A PMU with its host counters, or with the registers of the CPU.
#[derive(Debug)]
pub(crate) struct Held<P, H> {
    pub(crate) pmu: P,
    pub(crate) host: H,
}

/// What the room really holds.
#[repr(C)]
struct Filled<T> {
    mark: u64,
    note: u64,
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

/// Makes a value in `room`, where it stays: PMUs are larger than a hypervisor's stack. Room that holds nothing gets `vacant`
/// first, which the compiler copies there from read-only data. `init` makes of it, or of the value that was there, the
/// value that is wanted. Room that held nothing still does where `init` fails.
///
/// # Safety
///
/// `room` may be read and written, or is null.
pub(crate) unsafe fn init<R: Room>(
    room: *mut R,
    vacant: impl FnOnce(*mut R::Value),
    init: impl FnOnce(&mut R::Value) -> VpmuStatus,
) -> VpmuStatus {
    const {
        assert!(size_of::<Filled<R::Value>>() <= size_of::<R>());
        assert!(align_of::<Filled<R::Value>>() <= align_of::<R>());
    }
    if room.is_null() || !room.is_aligned() {
        return VpmuStatus::Misuse;
    }
    if promised!(value(room)).is_some() {
        return promised!(with(room, init));
    }
    let filled = room.cast::<Filled<R::Value>>();
    // SAFETY: the room is large and aligned enough, as asserted above, and the caller's to write.
    let value = unsafe { &raw mut (*filled).value };
    vacant(value);
    // SAFETY: `vacant` has written a value, and nobody else has the room.
    let value = unsafe { &mut *value };
    let status = init(value);
    if status == VpmuStatus::Ok {
        let note = R::note(value);
        // SAFETY: as above.
        unsafe {
            (&raw mut (*filled).note).write(note);
            (&raw mut (*filled).mark).write(R::MARK);
        }
    }
    status
}

/// Puts `value` into `room`. What was there before ends by `end`.
///
/// # Safety
///
/// `room` may be read and written, or is null.
#[cfg(feature = "x86")]
pub(crate) unsafe fn fill<R: Room>(
    room: *mut R,
    value: R::Value,
    end: impl FnOnce(&mut R::Value),
) -> VpmuStatus {
    if let Some(before) = promised!(self::value(room)) {
        end(before);
        *before = value;
        return VpmuStatus::Ok;
    }
    // SAFETY: `init` passes room for a value.
    let put = |at: *mut R::Value| unsafe { at.write(value) };
    promised!(init(room, put, |_| VpmuStatus::Ok))
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
    let Some(held) = promised!(value(room)) else {
        return A::MISUSE;
    };
    let answer = act(held);
    let note = R::note(held);
    // SAFETY: `value` has found a value in the room, which the caller's promise makes ours.
    unsafe { (*room.cast::<Filled<R::Value>>()).note = note };
    answer
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
    promised!(with(room, act))
}

/// Returns what `room` holds, or `None` where that is nothing.
///
/// # Safety
///
/// As for [`with`], during `'a`.
pub(crate) unsafe fn value<'a, R: Room>(room: *mut R) -> Option<&'a mut R::Value> {
    if room.is_null() || !room.is_aligned() {
        return None;
    }
    // SAFETY: the mark is the first word, and any word is a u64.
    if unsafe { room.cast::<u64>().read() } != R::MARK {
        return None;
    }
    // SAFETY: only `fill` writes the mark, and a value with it.
    Some(unsafe { &mut (*room.cast::<Filled<R::Value>>()).value })
}

/// Returns what `pointer` points to, for a result, or `None` for a null or misaligned pointer.
///
/// # Safety
///
/// `pointer` is null or points to a `T` that nobody else uses during `'a`.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T) -> Option<&'a mut T> {
    if !pointer.is_aligned() {
        return None;
    }
    promised!(pointer.as_mut())
}

/// Returns what `pointer` points to, or `None` for a null or misaligned pointer.
///
/// # Safety
///
/// `pointer` is null or points to a `T` that nobody changes during `'a`.
pub(crate) unsafe fn given<'a, T>(pointer: *const T) -> Option<&'a T> {
    if !pointer.is_aligned() {
        return None;
    }
    promised!(pointer.as_ref())
}

/// Returns the size that a struct says in its first word, or `None` for a null or misaligned pointer. Another library's
/// struct may be shorter than this one's, and is no `T` to be read whole.
///
/// # Safety
///
/// `pointer` is null or points to such a struct.
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
pub(crate) unsafe fn size<T>(pointer: *const T) -> Option<usize> {
    promised!(given(pointer.cast::<usize>())).copied()
}

/// Returns `count` values, or `None` for more than `most` of them, and for a null or misaligned pointer to any.
///
/// # Safety
///
/// `pointer` is null or points to so many values that nobody changes during `'a`.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, count: usize, most: usize) -> Option<&'a [T]> {
    if count == 0 {
        return Some(&[]);
    }
    if pointer.is_null() || !pointer.is_aligned() || count > most {
        return None;
    }
    Some(promised!(core_slice::from_raw_parts(pointer, count)))
}

/// As [`slice`], for values that this call changes.
///
/// # Safety
///
/// `pointer` is null or points to so many values that nobody else uses during `'a`.
pub(crate) unsafe fn slice_mut<'a, T>(
    pointer: *mut T,
    count: usize,
    most: usize,
) -> Option<&'a mut [T]> {
    if pointer.is_null() || !pointer.is_aligned() || count > most {
        return None;
    }
    Some(promised!(core_slice::from_raw_parts_mut(pointer, count)))
}

/// Writes `numbers`, as many as there is `room` for, to `to`, and how many there are to `count`.
///
/// # Safety
///
/// `to` is null or has room for so many; `count` is null or may be written.
#[cfg(feature = "x86")]
pub(crate) unsafe fn list(
    numbers: impl Iterator<Item = u32>,
    to: *mut u32,
    room: usize,
    count: *mut usize,
) -> VpmuStatus {
    let Some(count) = promised!(out(count)) else {
        return VpmuStatus::Misuse;
    };
    if room > 0 && (to.is_null() || !to.is_aligned()) {
        return VpmuStatus::Misuse;
    }
    *count = 0;
    for number in numbers {
        if *count < room {
            promised!(to.add(*count).write(number));
        }
        *count += 1;
    }
    if *count > room {
        VpmuStatus::Room
    } else {
        VpmuStatus::Ok
    }
}
