//! The caller's memory: what C's pointers point to, and room for a value whose layout C does not know.

use core::marker::PhantomData;
use core::slice;

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

/// A pointer to a `T` that is read, as C gives it: the promise of the crate's page holds for it, because C alone makes one.
#[repr(transparent)]
#[derive(Debug)]
pub struct Ref<'a, T>(*const T, PhantomData<&'a T>);

impl<'a, T> Ref<'a, T> {
    /// Takes a pointer of C's that is not an argument.
    ///
    /// # Safety
    ///
    /// It is null or points to a `T` that nobody changes during `'a`.
    #[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
    pub(crate) const unsafe fn of(pointer: *const T) -> Self {
        Self(pointer, PhantomData)
    }

    /// Returns what it points to, or `None` for a null or misaligned pointer.
    pub(crate) fn get(self) -> Option<&'a T> {
        if !self.0.is_aligned() {
            return None;
        }
        promised!(self.0.as_ref())
    }

    /// Answers what `act` does with what it points to.
    pub(crate) fn with<A: Answer>(self, act: impl FnOnce(&T) -> A) -> A {
        self.get().map_or(A::MISUSE, act)
    }

    /// Returns `count` values, or `None` for more than `most` of them, and for a null or misaligned pointer to any.
    ///
    /// # Safety
    ///
    /// The caller in C has stated this `count` with the pointer.
    pub(crate) unsafe fn slice(self, count: usize, most: usize) -> Option<&'a [T]> {
        if count == 0 {
            return Some(&[]);
        }
        if self.is_null() || !self.0.is_aligned() || count > most {
            return None;
        }
        Some(promised!(slice::from_raw_parts(self.0, count)))
    }

    pub(crate) const fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Returns the size that a struct says in its first word, or `None` for a null or misaligned pointer. Another library's
    /// struct may be shorter than this one's, and is no `T` to be read whole.
    #[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
    pub(crate) fn size(&self) -> Option<usize> {
        Ref(self.0.cast::<usize>(), PhantomData).get().copied()
    }
}

/// A pointer to a `T` that is changed, as C gives it: as [`Ref`], and nobody else uses the `T`.
#[repr(transparent)]
#[derive(Debug)]
pub struct Mut<'a, T>(*mut T, PhantomData<&'a mut T>);

impl<'a, T> Mut<'a, T> {
    /// Takes a pointer of C's that is not an argument.
    ///
    /// # Safety
    ///
    /// It is null or points to a `T` that nobody else uses during `'a`.
    #[cfg(all(feature = "el2", target_arch = "aarch64", target_os = "none"))]
    pub(crate) const unsafe fn of(pointer: *mut T) -> Self {
        Self(pointer, PhantomData)
    }

    /// Returns whether `other` points to the same `T`.
    #[cfg(feature = "arm")]
    pub(crate) fn is(&self, other: &Self) -> bool {
        core::ptr::eq(self.0, other.0)
    }

    /// Returns the same pointer, until this one is used again.
    pub(crate) const fn again(&mut self) -> Mut<'_, T> {
        Mut(self.0, PhantomData)
    }

    /// Returns what it points to, or `None` for a null or misaligned pointer.
    pub(crate) fn get(self) -> Option<&'a mut T> {
        if !self.0.is_aligned() {
            return None;
        }
        promised!(self.0.as_mut())
    }

    /// As [`Ref::with`].
    pub(crate) fn with<A: Answer>(self, act: impl FnOnce(&mut T) -> A) -> A {
        self.get().map_or(A::MISUSE, act)
    }

    /// As [`Ref::slice`], for values that this call changes.
    ///
    /// # Safety
    ///
    /// The caller in C has stated this `count` with the pointer.
    pub(crate) unsafe fn slice(self, count: usize, most: usize) -> Option<&'a mut [T]> {
        if self.0.is_null() || !self.0.is_aligned() || count > most {
            return None;
        }
        Some(promised!(slice::from_raw_parts_mut(self.0, count)))
    }

    /// As [`Ref::size`].
    #[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
    pub(crate) fn size(&self) -> Option<usize> {
        Ref(self.0, PhantomData).size()
    }
}

/// Memory of the caller's that a C struct describes as opaque words.
pub(crate) trait Room: Sized {
    /// The PMU that is kept there.
    type Pmu;
    /// Its host counters, or the registers of the CPU.
    type Host;

    /// Marks room that holds a PMU, so that a PMU that was never initialized is
    /// told from one that was.
    const MARK: u64;

    /// Returns what the caller may read of the PMU without a call.
    fn note(_: &Self::Pmu) -> u64 {
        0
    }
}

/// What is kept in a room.
#[derive(Debug)]
pub(crate) struct Held<P, H> {
    pub(crate) pmu: P,
    pub(crate) host: H,
}

/// What is kept in `R`.
pub(crate) type Value<R> = Held<<R as Room>::Pmu, <R as Room>::Host>;

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
pub(crate) fn init<R: Room>(
    mut room: Mut<'_, R>,
    vacant: impl FnOnce(*mut Value<R>),
    init: impl FnOnce(&mut Value<R>) -> VpmuStatus,
) -> VpmuStatus {
    const {
        assert!(size_of::<Filled<Value<R>>>() <= size_of::<R>());
        assert!(align_of::<Filled<Value<R>>>() <= align_of::<R>());
    }
    if room.0.is_null() || !room.0.is_aligned() {
        return VpmuStatus::Misuse;
    }
    if value(room.again()).is_some() {
        return with(room, init);
    }
    let filled = room.0.cast::<Filled<Value<R>>>();
    // SAFETY: the room is large and aligned enough, as asserted above, and the caller's to write.
    let value = unsafe { &raw mut (*filled).value };
    vacant(value);
    // SAFETY: `vacant` has written a value, and nobody else has the room.
    let value = unsafe { &mut *value };
    let status = init(value);
    if status == VpmuStatus::Ok {
        let note = R::note(&value.pmu);
        // SAFETY: as above.
        unsafe {
            (&raw mut (*filled).note).write(note);
            (&raw mut (*filled).mark).write(R::MARK);
        }
    }
    status
}

/// Puts `value` into `room`. What was there before ends by `end`.
#[cfg(feature = "x86")]
pub(crate) fn fill<R: Room>(
    mut room: Mut<'_, R>,
    value: Value<R>,
    end: impl FnOnce(&mut Value<R>),
) -> VpmuStatus {
    if let Some(before) = self::value(room.again()) {
        end(before);
        *before = value;
        return VpmuStatus::Ok;
    }
    // SAFETY: `init` passes room for a value.
    let put = |at: *mut Value<R>| unsafe { at.write(value) };
    init(room, put, |_| VpmuStatus::Ok)
}

/// Answers what `act` does with what `room` holds.
pub(crate) fn with<R: Room, A: Answer>(
    room: Mut<'_, R>,
    act: impl FnOnce(&mut Value<R>) -> A,
) -> A {
    let filled = room.0.cast::<Filled<Value<R>>>();
    let Some(held) = value(room) else {
        return A::MISUSE;
    };
    let answer = act(held);
    let note = R::note(&held.pmu);
    // SAFETY: `value` has found a value in the room, which the caller's promise makes ours.
    unsafe { (*filled).note = note };
    answer
}

/// [`with`], for what cannot fail.
pub(crate) fn perform<R: Room>(room: Mut<'_, R>, act: impl FnOnce(&mut Value<R>)) -> VpmuStatus {
    with(room, |held| {
        act(held);
        VpmuStatus::Ok
    })
}

/// Returns what `room` holds, or `None` where that is nothing.
pub(crate) fn value<'a, R: Room>(room: Mut<'a, R>) -> Option<&'a mut Value<R>> {
    if room.0.is_null() || !room.0.is_aligned() {
        return None;
    }
    // SAFETY: the mark is the first word, and any word is a u64.
    if unsafe { room.0.cast::<u64>().read() } != R::MARK {
        return None;
    }
    // SAFETY: only `init` writes the mark, and a value with it.
    Some(unsafe { &mut (*room.0.cast::<Filled<Value<R>>>()).value })
}

/// Writes `numbers`, as many as there is `room` for, to `to`, and how many there are to `count`.
///
/// # Safety
///
/// The caller in C has stated this `room` with `to`.
#[cfg(feature = "x86")]
pub(crate) unsafe fn list(
    numbers: impl Iterator<Item = u32>,
    to: Mut<'_, u32>,
    room: usize,
    count: Mut<'_, usize>,
) -> VpmuStatus {
    count.with(|count| {
        if room > 0 && (to.0.is_null() || !to.0.is_aligned()) {
            return VpmuStatus::Misuse;
        }
        *count = 0;
        for number in numbers {
            if *count < room {
                promised!(to.0.add(*count).write(number));
            }
            *count += 1;
        }
        if *count > room {
            VpmuStatus::Room
        } else {
            VpmuStatus::Ok
        }
    })
}
