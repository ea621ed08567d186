//! What C holds of this library's objects: numbers that are never used again, so that a stale one is refused.

use core::ffi::c_char;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use vpmu_kvm::Error;

use crate::status::VpmuStatus;

/// Objects by their handles.
pub(crate) struct Table<T>(RwLock<BTreeMap<usize, Arc<T>>>);

/// Handles of all kinds have one sequence: that of another kind is not found.
static NEXT: AtomicUsize = AtomicUsize::new(1);

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new(BTreeMap::new()))
    }

    /// Keeps `object` and returns its handle.
    pub(crate) fn add<H>(&self, object: T) -> *mut H {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut objects = self.0.write().unwrap_or_else(PoisonError::into_inner);
        objects.insert(handle, Arc::new(object));
        ptr::without_provenance_mut(handle)
    }

    /// Returns the object of `handle`.
    pub(crate) fn find<H>(&self, handle: *const H) -> Result<Arc<T>, VpmuStatus> {
        let objects = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let found = objects.get(&handle.addr()).map(Arc::clone);
        found.ok_or_else(|| misuse("this handle was never given, or has been given back"))
    }

    /// Forgets the object of `handle`, which ends when the last call that uses the object does. NULL is left alone.
    pub(crate) fn remove<H>(&self, handle: *const H) -> VpmuStatus {
        if handle.is_null() {
            return VpmuStatus::Ok;
        }
        let mut objects = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let removed = objects.remove(&handle.addr());
        // Its end takes system calls: nobody else is to wait for them.
        drop(objects);
        match removed {
            Some(_) => VpmuStatus::Ok,
            None => misuse("this handle was never given, or has been given back"),
        }
    }
}

/// Bytes of a text, and the zero behind it.
const LONGEST: usize = 512;

thread_local! {
    // Of a type that needs no destructor: a thread's own destructors may be refused, and ask why.
    static IS_FATAL: Cell<bool> = const { Cell::new(false) };
    static LAST_ERROR: RefCell<[u8; LONGEST]> = const { RefCell::new([0; LONGEST]) };
}

/// Returns what was wrong with this thread's last refused call of `vpmu_kvm_*`, and what to do about it. The text is good
/// until the thread's next refused call.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_error() -> *const c_char {
    LAST_ERROR.with(|last| last.as_ptr().cast::<c_char>().cast_const())
}

/// Returns whether the vCPU whose `vpmu_kvm_before_run` or `vpmu_kvm_after_run` was this thread's last refused call cannot
/// go on: KVM has refused a call in the middle of an exit or of an interrupt, and the VM is to end. After any other refusal
/// of these functions the vCPU is as it was: once the cause is gone, call `vpmu_kvm_before_run` again before the vCPU runs.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_error_is_fatal() -> bool {
    IS_FATAL.get()
}

/// Keeps a text for `vpmu_kvm_error`.
fn explain(text: &str) {
    IS_FATAL.set(false);
    LAST_ERROR.with_borrow_mut(|last| {
        let whole = |&length: &usize| text.is_char_boundary(length);
        let length = (0..LONGEST).rev().find(whole).unwrap_or(0);
        last[..length].copy_from_slice(&text.as_bytes()[..length]);
        last[length] = 0;
    });
}

/// Answers as `act` ends: done, or refused.
pub(crate) fn answer(act: impl FnOnce() -> Result<(), VpmuStatus>) -> VpmuStatus {
    act().err().unwrap_or(VpmuStatus::Ok)
}

/// Returns what the caller has given, or refuses the call: it needs `what`.
pub(crate) fn needed<T>(given: Option<T>, what: &str) -> Result<T, VpmuStatus> {
    given.ok_or_else(|| misuse(what))
}

pub(crate) fn misuse(text: &str) -> VpmuStatus {
    explain(text);
    VpmuStatus::Misuse
}

/// Refuses a saved state, with the reason.
pub(crate) fn unsuitable(text: &str) -> VpmuStatus {
    explain(text);
    VpmuStatus::State
}

pub(crate) fn damaged() -> VpmuStatus {
    unsuitable("these bytes are no saved PMU of this version")
}

/// Refuses what the host's folders do not allow.
pub(crate) fn refused(error: std::io::Error) -> VpmuStatus {
    explain(&error.to_string());
    VpmuStatus::Host
}

/// Returns what an error is for C. Its text stays for `vpmu_kvm_error`.
pub(crate) fn failed(error: Error) -> VpmuStatus {
    explain(&error.to_string());
    IS_FATAL.set(error.is_fatal());
    match error {
        Error::State(_) | Error::StateVersion(_) | Error::OtherOffer => VpmuStatus::State,
        Error::Config(_) | Error::Event(_) | Error::NoAmd => VpmuStatus::Config,
        _ => VpmuStatus::Host,
    }
}
