//! The functions that this library stands before.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::requests;

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;

static IOCTL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static CLOSE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the function of this name behind this library.
fn find(place: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = place.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: searches for a name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    place.store(found, Ordering::Relaxed);
    found
}

/// Returns the program's own function of this name, if it exports that.
pub(crate) fn of_program(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: searches for a name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Makes the calls below work on any thread, at any time.
pub(crate) fn prepare() {
    find(&IOCTL, c"ioctl");
    find(&CLOSE, c"close");
}

pub(crate) fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let found = find(&IOCTL, c"ioctl");
    if found.is_null() {
        set_errno(libc::ENOSYS);
        return -1;
    }
    // SAFETY: the C library's function of this name has this signature on x86-64, but for the dots. The caller's caller has
    // made the call for this descriptor with this argument, or is this library with an argument of its own that the request
    // asks for.
    unsafe { std::mem::transmute::<*mut c_void, Ioctl>(found)(fd, request, argument) }
}

pub(crate) fn close(fd: c_int) -> c_int {
    let found = find(&CLOSE, c"close");
    if found.is_null() {
        set_errno(libc::ENOSYS);
        return -1;
    }
    // SAFETY: the C library's function of this name has this signature.
    unsafe { std::mem::transmute::<*mut c_void, Close>(found)(fd) }
}

/// Runs a vCPU.
pub(crate) fn run(fd: c_int) -> c_int {
    ioctl(fd, requests::RUN, std::ptr::null_mut())
}

/// Fails a call of the program's.
pub(crate) fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

pub(crate) fn errno() -> c_int {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// Ends the process at once, as a program does that could not be run.
pub(crate) fn give_up() -> ! {
    const FAILED: c_int = 125;
    // SAFETY: ends the process without its destructors: `main` has not begun.
    unsafe { libc::_exit(FAILED) }
}

/// Returns the name by which the program was started, without its folder.
pub(crate) fn program() -> String {
    unsafe extern "C" {
        static program_invocation_short_name: *const c_char;
    }
    // SAFETY: the C library sets the variable before any constructor runs, to a string that stays.
    let name = unsafe { program_invocation_short_name };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned()
}
