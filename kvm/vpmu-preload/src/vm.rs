//! A VM's calls, and those before there is a VM.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use vpmu_kvm::{Error, Options, Rdpmc};

use crate::filter::Filters;
use crate::inside::say;
use crate::objects::{self, Object};
use crate::start::{Choices, choices, note_vm};
use crate::vcpu::{OneVcpu, Shared};
use crate::{cpuid, migration, next, requests};

/// A VM whose guest has a PMU.
pub(crate) struct Vm {
    shared: Shared,
    filters: Filters,
}

/// Answers a request to a descriptor that is neither a VM nor a vCPU.
pub(crate) fn system_ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let Some(choices) = choices() else {
        return next::ioctl(fd, request, argument);
    };
    match request {
        requests::CREATE_VM => create(choices, fd, argument),
        // SAFETY: the request's argument.
        requests::GET_SUPPORTED_CPUID => unsafe { cpuid::supported(&choices.offer, fd, argument) },
        _ => next::ioctl(fd, request, argument),
    }
}

/// Makes a VM with the PMU's filter, or none.
fn create(choices: &'static Choices, system: c_int, argument: *mut c_void) -> c_int {
    let fd = next::ioctl(system, requests::CREATE_VM, argument);
    if fd < 0 {
        return fd;
    }
    note_vm();
    let made = Vm::new(choices, fd).map_err(|error| error.to_string());
    enter(fd, made)
}

/// Notes what was made for `fd`, which the program gets; or says why there is nothing, and closes `fd`.
fn enter<O: Object + 'static>(fd: c_int, made: Result<O, String>) -> c_int {
    let entered = made.and_then(|object| match objects::enter(fd, Box::new(object)) {
        true => Ok(()),
        false => Err("the program has more than 65536 open files".to_owned()),
    });
    match entered {
        Ok(()) => fd,
        Err(error) => {
            say(error);
            next::close(fd);
            next::fail(libc::ENOTSUP)
        }
    }
}

/// Returns a real-time signal that nobody handles. The lowest are those that programs take.
fn free_signal() -> Option<i32> {
    let mut signals = (libc::SIGRTMIN()..=libc::SIGRTMAX()).rev();
    signals.find(|&signal| {
        // SAFETY: all zeroes is a valid sigaction, and reads the present action alone.
        let mut present: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let error = unsafe { libc::sigaction(signal, std::ptr::null(), &mut present) };
        error == 0 && present.sa_sigaction == libc::SIG_DFL
    })
}

impl Vm {
    fn new(choices: &'static Choices, fd: c_int) -> Result<Self, Error> {
        let mut msrs = choices.offer.msrs();
        msrs.extend(Rdpmc::msrs(&choices.offer));
        // Not before `main`, which may become a daemon.
        if let Err(error) = vpmu_kvm::publish() {
            say(format_args!("vpmu top will not see this guest: {error}"));
        }
        if let Some(warning) = choices.offer.warning(&choices.settings.options) {
            say(warning);
        }
        Ok(Self {
            shared: Shared {
                choices,
                options: Options {
                    signal: free_signal(),
                    ..choices.settings.options.clone()
                },
                memory: Arc::default(),
                rdpmc: Arc::default(),
            },
            // At once: KVM's own PMU can be switched off before the first vCPU only.
            filters: Filters::begin(fd, msrs)?,
        })
    }

    /// Makes a vCPU with a PMU, or none.
    fn create_vcpu(&'static self, vm: c_int, argument: *mut c_void) -> c_int {
        if let Err(error) = migration::block() {
            say(error);
            return next::fail(libc::ENOTSUP);
        }
        let fd = next::ioctl(vm, requests::CREATE_VCPU, argument);
        if fd < 0 {
            return fd;
        }
        let made = OneVcpu::new(&self.shared, vm, fd).map_err(|error| match error {
            Error::NoLapic(_) => {
                "the interrupt controller is not KVM's: give QEMU kernel-irqchip=on or split, \
                                  or leave kernel-irqchip=off out"
                    .to_owned()
            }
            error => error.to_string(),
        });
        enter(fd, made)
    }
}

impl Object for Vm {
    fn ioctl(&'static self, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        match request {
            requests::CREATE_VCPU => self.create_vcpu(fd, argument),
            requests::SET_USER_MEMORY_REGION | requests::SET_USER_MEMORY_REGION2 => {
                let mut slots = self.shared.memory.change();
                let answer = next::ioctl(fd, request, argument);
                if answer == 0 {
                    // SAFETY: KVM has just read it. The second request's structure begins with the first's.
                    slots.set(unsafe { &*argument.cast::<kvm_userspace_memory_region>() });
                }
                answer
            }
            // SAFETY: the request's argument.
            requests::SET_MSR_FILTER => match unsafe { self.filters.set(fd, argument) } {
                Ok(()) => 0,
                Err(error) => {
                    say(format_args!("the program's own MSR filter: {error}"));
                    next::fail(libc::EINVAL)
                }
            },
            // SAFETY: the request's argument.
            requests::ENABLE_CAP => unsafe { self.filters.enable(fd, argument) },
            _ => next::ioctl(fd, request, argument),
        }
    }
}
