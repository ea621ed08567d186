//! Keeps QEMU from saving its guest or taking it elsewhere: its streams have neither AMD's counters nor the places in the
//! guest's code by which RDPMC comes here (docs/how/rdpmc.md), and the guest would die of the first.
//!
//! QEMU has a list of reasons for that, which its modules reach by exported functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::{Mutex, PoisonError};

use crate::inside::say;
use crate::next;

const REASON: &CStr =
    c"vpmu exec: QEMU does not know the state of the guest's PMU, which would be lost";

/// QEMU's `error_setg_internal`.
type SetError =
    unsafe extern "C" fn(*mut *mut c_void, *const c_char, c_int, *const c_char, *const c_char, ...);
/// QEMU's `migrate_add_blocker` since 8.2: the reason, and why it cannot be added.
type AddBlocker = unsafe extern "C" fn(*mut *mut c_void, *mut *mut c_void) -> c_int;

/// The reason, as QEMU has it: an `Error`.
static ERROR: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Blocks migration and snapshots of a QEMU. Further calls do nothing.
///
/// # Errors
///
/// When the user has asked QEMU for a guest that can migrate.
pub(crate) fn block() -> Result<(), &'static str> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::replace(&mut *done, true) || !next::program().starts_with("qemu-system-") {
        return Ok(());
    }
    // Only with the second function beside it, the first takes what is given here.
    let (Some(add), Some(_), Some(set)) = (
        next::of_program(c"migrate_add_blocker"),
        next::of_program(c"migrate_add_blocker_modes"),
        next::of_program(c"error_setg_internal"),
    ) else {
        say(
            "this QEMU has no option that keeps its guest: do not migrate it, and make no snapshots",
        );
        return Ok(());
    };
    let mut why = ptr::null_mut();
    // SAFETY: QEMU's functions of these names have these types in each version that has all three. QEMU makes vCPUs under
    // its own lock, which both calls ask for. The reason's place is static, and `why` is a local.
    let failed = unsafe {
        let set: SetError = std::mem::transmute(set);
        let add: AddBlocker = std::mem::transmute(add);
        let (file, function) = (c"vpmu".as_ptr(), c"exec".as_ptr());
        set(
            ERROR.as_ptr(),
            file,
            0,
            function,
            c"%s".as_ptr(),
            REASON.as_ptr(),
        );
        add(ERROR.as_ptr(), &mut why)
    };
    match failed < 0 {
        false => Ok(()),
        true => Err("a guest with this PMU cannot be migrated: leave QEMU's -only-migratable out"),
    }
}
