//! The functions that this library stands before.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::requests;

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
/// The words of a program, or of its environment.
pub(crate) type Words = *const *const c_char;
type Execute = unsafe extern "C" fn(*const c_char, Words, Words) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;

/// A function behind this library.
pub(crate) struct Function {
    name: &'static CStr,
    place: AtomicPtr<c_void>,
}

static IOCTL: Function = Function::new(c"ioctl");
static CLOSE: Function = Function::new(c"close");
pub(crate) static EXECV: Function = Function::new(c"execv");
pub(crate) static EXECVE: Function = Function::new(c"execve");
pub(crate) static EXECVP: Function = Function::new(c"execvp");

impl Function {
    const fn new(name: &'static CStr) -> Self {
        let place = AtomicPtr::new(std::ptr::null_mut());
        Self { name, place }
    }

    /// Returns the function; `None`: there is none.
    fn find(&self) -> Option<*mut c_void> {
        let mut found = self.place.load(Ordering::Relaxed);
        if found.is_null() {
            // SAFETY: searches for a name.
            found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.place.store(found, Ordering::Relaxed);
        }
        (!found.is_null()).then_some(found)
    }
}

/// Returns the program's own function of this name, if it exports that.
pub(crate) fn of_program(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: searches for a name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Makes the calls below work on any thread, at any time.
pub(crate) fn prepare() {
    // A child of vfork may call those that execute, and then must not search.
    for function in [&IOCTL, &CLOSE, &EXECV, &EXECVE, &EXECVP] {
        function.find();
    }
}

/// Returns whether there is such a program: shells try each folder of PATH.
pub(crate) fn may_execute(path: *const c_char) -> bool {
    // SAFETY: the caller's path; the kernel answers a bad pointer with an error.
    unsafe { libc::access(path, libc::X_OK) == 0 }
}

/// Makes the process another program, by one of the functions for that. Only `execve` reads the environment.
pub(crate) fn exec(
    which: &Function,
    path: *const c_char,
    words: Words,
    environment: Words,
) -> c_int {
    let Some(found) = which.find() else {
        return fail(libc::ENOSYS);
    };
    // SAFETY: the C library's function of this name has this signature, but for the last argument, which execv and execvp
    // do not take, and do not look at on x86-64. The arguments are the caller's.
    unsafe { std::mem::transmute::<*mut c_void, Execute>(found)(path, words, environment) }
}

pub(crate) fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(found) = IOCTL.find() else {
        return fail(libc::ENOSYS);
    };
    // SAFETY: the C library's function of this name has this signature on x86-64, but for the dots. The caller's caller has
    // made the call for this descriptor with this argument, or is this library with an argument of its own that the request
    // asks for.
    unsafe { std::mem::transmute::<*mut c_void, Ioctl>(found)(fd, request, argument) }
}

pub(crate) fn close(fd: c_int) -> c_int {
    let Some(found) = CLOSE.find() else {
        return fail(libc::ENOSYS);
    };
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
