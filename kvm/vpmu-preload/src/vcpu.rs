//! A vCPU's calls.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vpmu_kvm::{AfterRun, Error, Exit, Options, Rdpmc, Statistics, Vcpu};
use vpmu_measure::DOORBELL;

use crate::inside::say;
use crate::memory::Memory;
use crate::objects::Object;
use crate::page::Page;
use crate::start::Choices;
use crate::{cpuid, msrs, next, requests};

/// What the vCPUs of a VM share.
pub(crate) struct Shared {
    pub(crate) choices: &'static Choices,
    pub(crate) options: Options,
    pub(crate) memory: Arc<Memory>,
    pub(crate) rdpmc: Arc<Rdpmc>,
}

/// A vCPU whose guest has a PMU.
pub(crate) struct OneVcpu {
    vm: &'static Shared,
    /// `None` once the program has closed it.
    attached: Mutex<Option<Attached>>,
}

struct Attached {
    vcpu: Vcpu,
    statistics: Arc<Mutex<Statistics>>,
    /// The exits that are the program's; `None`: nobody measures.
    page: Option<Page>,
    /// Whether the program has just given the vCPU the segments of a reset.
    resets: bool,
}

impl OneVcpu {
    pub(crate) fn new(vm: &'static Shared, vm_fd: c_int, fd: c_int) -> Result<Self, Error> {
        let (choices, memory) = (vm.choices, Arc::clone(&vm.memory));
        let mut vcpu = Vcpu::attach(&vm_fd, &fd, &choices.offer, &vm.options, memory)?;
        vcpu.set_rdpmc(Arc::clone(&vm.rdpmc));
        let page = match choices.settings.measure {
            None => None,
            Some(_) => Some(Page::map(fd)?),
        };
        choices.measurement.add(&vcpu);
        if let Some(backing) = vcpu.backing() {
            let _ = choices.backing.set(backing);
        }
        Ok(Self {
            vm,
            attached: Mutex::new(Some(Attached {
                statistics: vcpu.statistics(),
                vcpu,
                page,
                resets: false,
            })),
        })
    }

    fn attached(&self) -> MutexGuard<'_, Option<Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the vCPU until an exit is the program's.
    fn run(&self, fd: c_int, attached: &mut Attached) -> c_int {
        let hides_kicks = self.vm.choices.settings.hides_kicks;
        loop {
            if let Err(error) = attached.vcpu.before_run() {
                say(error);
                return next::fail(libc::EIO);
            }
            let answer = next::run(fd);
            let errno = next::errno();
            match attached.vcpu.after_run() {
                Ok(AfterRun::Completed) => continue,
                // A program that was signalled at the same time, and does not write to `immediate_exit`, needs its EINTR.
                Ok(AfterRun::Kicked) if hides_kicks => continue,
                Ok(AfterRun::Kicked) => {}
                Ok(AfterRun::Vmm) => {
                    if answer == 0 && self.answers(attached) {
                        continue;
                    }
                }
                Err(error) => {
                    say(error);
                    return next::fail(libc::EIO);
                }
            }
            next::set_errno(errno);
            return answer;
        }
    }

    /// Counts an exit that is the program's. Returns whether it was the doorbell of measurements, and is over.
    fn answers(&self, attached: &Attached) -> bool {
        let Some(page) = &attached.page else {
            return false;
        };
        let exit = page.exit();
        let mut statistics = attached
            .statistics
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        statistics.count(exit);
        drop(statistics);
        exit == Exit::Port(DOORBELL) && page.answer(&self.vm.choices.measurement)
    }

    /// Answers KVM_SET_SIGNAL_MASK: the overflows' signal ends each KVM_RUN.
    ///
    /// # Safety
    ///
    /// `argument` is that request's.
    unsafe fn set_signal_mask(&self, fd: c_int, argument: *mut c_void) -> c_int {
        /// The kernel's set of signals.
        const SIZE: usize = size_of::<u64>();
        const HEAD: usize = size_of::<u32>();
        let (false, Some(signal)) = (argument.is_null(), self.vm.options.signal) else {
            return next::ioctl(fd, requests::SET_SIGNAL_MASK, argument);
        };
        let mut mask = [0_u8; HEAD + SIZE];
        // SAFETY: the caller's promise: a length, with so many bytes behind it.
        unsafe {
            let length: u32 = argument.cast::<u32>().read_unaligned();
            if length as usize != SIZE {
                return next::ioctl(fd, requests::SET_SIGNAL_MASK, argument);
            }
            argument
                .cast::<u8>()
                .copy_to_nonoverlapping(mask.as_mut_ptr(), HEAD + SIZE);
        }
        let bit = signal as usize - 1;
        mask[HEAD + bit / 8] &= !(1 << (bit % 8));
        next::ioctl(fd, requests::SET_SIGNAL_MASK, mask.as_mut_ptr().cast())
    }
}

impl Object for OneVcpu {
    /// Gives back the perf events.
    fn end(&self) {
        let ended = self.attached().take();
        drop(ended);
    }

    fn ioctl(&'static self, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        let mut attached = self.attached();
        let Some(attached) = attached.as_mut() else {
            return next::ioctl(fd, request, argument);
        };
        let offer = &self.vm.choices.offer;
        match request {
            requests::RUN => self.run(fd, attached),
            // SAFETY: the request's argument.
            requests::SET_CPUID2 => unsafe { cpuid::set(offer, fd, argument) },
            // SAFETY: the request's argument.
            requests::GET_MSRS => unsafe { msrs::get(&mut attached.vcpu, fd, argument) },
            // SAFETY: the request's argument.
            requests::SET_MSRS => unsafe { msrs::set(&mut attached.vcpu, offer, fd, argument) },
            // SAFETY: the request's argument.
            requests::SET_SIGNAL_MASK => unsafe { self.set_signal_mask(fd, argument) },
            _ => {
                let answer = next::ioctl(fd, request, argument);
                if answer == 0 {
                    // SAFETY: KVM has just read it.
                    unsafe { attached.notice_reset(request, argument) };
                }
                answer
            }
        }
    }
}

impl Attached {
    /// Resets the PMU where the program has given the vCPU the registers of a processor's reset (SDM vol. 3A, 10.1.4): no
    /// call of KVM's says so. QEMU does the same at the start, when the PMU is out of reset.
    ///
    /// # Safety
    ///
    /// `argument` is that of `request`.
    unsafe fn notice_reset(&mut self, request: c_ulong, argument: *mut c_void) {
        match request {
            requests::SET_SREGS | requests::SET_SREGS2 => {
                // SAFETY: the caller's promise. Both structures begin with CS.
                let cs = unsafe { argument.cast::<kvm_segment>().read_unaligned() };
                self.resets = (cs.base, cs.selector) == (0xffff_0000, 0xf000);
            }
            requests::SET_REGS => {
                // SAFETY: the caller's promise.
                let regs = unsafe { argument.cast::<kvm_regs>().read_unaligned() };
                if std::mem::take(&mut self.resets) && regs.rip == 0xfff0 {
                    self.vcpu.reset();
                }
            }
            _ => {}
        }
    }
}

const _: () = assert!(std::mem::offset_of!(kvm_sregs, cs) == 0);
const _: () = assert!(std::mem::offset_of!(kvm_bindings::kvm_sregs2, cs) == 0);
