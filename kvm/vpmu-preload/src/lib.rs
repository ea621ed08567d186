//! The library that `vpmu exec` puts into a VMM that nobody changes (docs/use/qemu-pmu.md).
//!
//! The dynamic linker takes `ioctl`, `close` and the functions of exec(3) that QEMU and shells call from here first. A VM gets the PMU's MSR filter when it is made, each of its
//! vCPUs a [`vpmu_kvm::Vcpu`] when it is made, and each KVM_RUN is repeated here as long as its exits are the PMU's. The
//! program sees the exits that it knows.
//!
//! - `inside`: this library's work and words; `next`: the functions that were meant; `settings`: the options of `vpmu exec`; `start`: before and after `main`
//! - `objects`: VMs and vCPUs by their descriptors; `vm`, `vcpu`: their calls
//! - `cpuid`, `msrs`, `filter`: calls whose structures are changed on their way
//! - `memory`: the guest's memory, as KVM has it; `page`: `kvm_run`, where the guest may measure
//! - `migration`: keeps QEMU from taking the guest elsewhere without its PMU
//!
//! UNSAFETY: stands between a C program and the C library: raw descriptors and pointers, as the program gives them.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![expect(unsafe_code, reason = "see UNSAFETY above")]

mod cpuid;
mod filter;
mod inside;
mod memory;
mod migration;
mod msrs;
mod next;
mod objects;
mod page;
mod requests;
mod settings;
mod start;
mod vcpu;
mod vm;

use std::ffi::{c_char, c_int, c_ulong, c_void};

use inside::Inside;
use next::Words;

/// The C library's ioctl, which is variadic there: on x86-64 its third argument comes where that of a function with three
/// comes, and is any value where the caller gives none.
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let request = requests::read(request);
    // Nearly all calls of other programs are not KVM's.
    if !requests::is_kvms(request) {
        return next::ioctl(fd, request, argument);
    }
    let Some(inside) = Inside::enter() else {
        return next::ioctl(fd, request, argument);
    };
    let answer = match objects::find(fd) {
        Some(object) => object.ioctl(fd, request, argument),
        None => vm::system_ioctl(fd, request, argument),
    };
    // What ends here may read errno, which belongs to the call.
    let errno = next::errno();
    drop(inside);
    next::set_errno(errno);
    answer
}

/// The C library's close.
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    // Before the descriptor is free: another thread may be given its number at once.
    if let Some(inside) = Inside::enter() {
        objects::forget(fd);
        drop(inside);
    }
    next::close(fd)
}

/// The C library's execve. This library is not in the program that follows.
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, words: Words, environment: Words) -> c_int {
    if next::may_execute(path) {
        start::report_no_vm();
    }
    next::exec(&next::EXECVE, path, words, environment)
}

/// The C library's execv; see [`execve`].
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, words: Words) -> c_int {
    if next::may_execute(path) {
        start::report_no_vm();
    }
    next::exec(&next::EXECV, path, words, std::ptr::null())
}

/// The C library's execvp; see [`execve`].
///
/// # Safety
///
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(name: *const c_char, words: Words) -> c_int {
    start::report_no_vm();
    next::exec(&next::EXECVP, name, words, std::ptr::null())
}
