//! The program's VMs and vCPUs, by their descriptors.
//!
//! A look-up takes no lock: a child between fork and exec closes descriptors while locks may be held that nobody there
//! gives back. An object that was entered stays in memory to the process's end, and its contents go when it is closed.

use std::ffi::{c_int, c_ulong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// What is behind a descriptor: a VM or a vCPU.
pub(crate) trait Object: Send + Sync {
    /// Answers the program's request.
    fn ioctl(&'static self, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;

    /// Gives back what others could use, as the descriptor is closed.
    fn end(&self) {}
}

/// An object, with the process that has made it.
struct Entered {
    process: u32,
    object: Box<dyn Object>,
}

/// Descriptors that can be known. A program with more open files gets its VM with a number below.
const MOST: usize = 1 << 16;

static OBJECTS: [AtomicPtr<Entered>; MOST] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST];

fn place(fd: c_int) -> Option<&'static AtomicPtr<Entered>> {
    OBJECTS.get(usize::try_from(fd).ok()?)
}

/// Returns the object behind this descriptor.
pub(crate) fn find(fd: c_int) -> Option<&'static dyn Object> {
    entered(place(fd)?).map(|entered| &*entered.object)
}

fn entered(place: &AtomicPtr<Entered>) -> Option<&'static Entered> {
    let object = place.load(Ordering::Acquire);
    // SAFETY: only `enter` writes pointers here, to objects that stay, and nobody has them by a mutable reference.
    unsafe { object.as_ref() }
}

/// Keeps `object` for this descriptor. Returns `false` where the number is too large.
pub(crate) fn enter(fd: c_int, object: Box<dyn Object>) -> bool {
    let Some(place) = place(fd) else {
        return false;
    };
    let process = std::process::id();
    let entered = Box::leak(Box::new(Entered { process, object }));
    place.store(entered, Ordering::Release);
    true
}

/// Ends what is behind this descriptor, which is about to be closed.
pub(crate) fn forget(fd: c_int) {
    let Some(place) = place(fd) else {
        return;
    };
    let Some(entered) = entered(place) else {
        return;
    };
    // A child closes its copies. After vfork its memory is the parent's.
    if entered.process != std::process::id() {
        return;
    }
    place.store(ptr::null_mut(), Ordering::Release);
    entered.object.end();
}
