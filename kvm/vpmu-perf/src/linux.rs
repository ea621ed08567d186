//! The kernel of this machine.
//!
//! UNSAFETY: perf_event_open, its ioctls, fcntl and mmap are C interfaces.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::hint;
use std::io;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::time::Instant;

use perf_event_open_sys::bindings::{self, PERF_FLAG_FD_CLOEXEC, perf_event_attr};
use perf_event_open_sys::{ioctls, perf_event_open};

use crate::kernel::Kernel;
use crate::processor::Processor;
use crate::trial;

/// How often the trial of an event spins: some ms.
const SPINS: u32 = 100_000;

/// Perf events of this process that are open.
pub(crate) static OPEN: AtomicU64 = AtomicU64::new(0);

/// The kernel of this machine.
#[derive(Debug)]
pub(crate) struct Linux;

impl Kernel for Linux {
    fn processor(&self) -> Processor {
        static PROCESSOR: OnceLock<Processor> = OnceLock::new();
        let work = || (0..SPINS).for_each(|_| hint::spin_loop());
        *PROCESSOR.get_or_init(|| Processor::of_host(|| trial::p0_cycles_count(&Self, work)))
    }

    fn open(
        &self,
        mut attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<RawFd>,
    ) -> io::Result<RawFd> {
        attr.size = size_of::<perf_event_attr>() as u32;
        // A program that the VMM starts is not to have its guests' counters.
        let (group, flags) = (leader.unwrap_or(-1), PERF_FLAG_FD_CLOEXEC.into());
        // SAFETY: `attr` is initialised and its size is in it.
        match unsafe { perf_event_open(&mut attr, thread, -1, group, flags) } {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => {
                OPEN.fetch_add(1, Ordering::Relaxed);
                Ok(fd)
            }
        }
    }

    fn close(&self, event: RawFd) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: takes no memory. The caller owns the descriptor.
        unsafe { libc::close(event) };
    }

    fn signal(&self, event: RawFd, thread: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETOWN_EX: libc::c_int = 15;
        const F_SETSIG: libc::c_int = 10;
        const F_OWNER_TID: libc::c_int = 0;
        let owner = Owner {
            kind: F_OWNER_TID,
            pid: thread,
        };
        const ASYNC: libc::c_int = libc::O_ASYNC | libc::O_NONBLOCK;
        // SAFETY: none of these takes memory but F_SETOWN_EX, which reads `owner`.
        let done = unsafe {
            // To the thread and not to the process: each vCPU's overflows take that vCPU out of its guest.
            libc::fcntl(event, F_SETOWN_EX, &raw const owner) == 0
                // Without a signal of its own it would be SIGIO, which is not queued and names no event.
                && libc::fcntl(event, F_SETSIG, signal) == 0
                // The call itself: musl's fcntl adds O_LARGEFILE, which the rules for seccomp filters do not allow.
                && libc::syscall(libc::SYS_fcntl, event, libc::F_SETFL, ASYNC) == 0
        };
        match done {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }

    fn enable(&self, event: RawFd) -> bool {
        // SAFETY: an ioctl of an open perf event; it takes no memory.
        unsafe { ioctls::ENABLE(event, 0) == 0 }
    }

    fn disable(&self, event: RawFd) -> bool {
        // SAFETY: as above.
        unsafe { ioctls::DISABLE(event, 0) == 0 }
    }

    fn set_period(&self, event: RawFd, period: u64) -> bool {
        // The crate's wrapper does not fit: it hands over the number where the kernel wants its address.
        // A request is an unsigned long for glibc and an int for musl. This one is positive as both.
        let request = bindings::PERIOD.cast_signed() as libc::Ioctl;
        // SAFETY: the kernel reads `period`.
        unsafe { libc::ioctl(event, request, &raw const period) == 0 }
    }

    fn read(&self, event: RawFd, totals: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the kernel writes no more than the length of `totals`.
        let read = unsafe { libc::read(event, totals.as_mut_ptr().cast(), totals.len()) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    fn now(&self) -> u64 {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        // Differences alone are used, and 64 bits of ns last for centuries.
        START.elapsed().as_nanos() as u64
    }

    fn map(&self, event: RawFd, length: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, event, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    unsafe fn unmap(&self, buffer: NonNull<u8>, length: usize) {
        // SAFETY: the caller promises that the mapping is whole and unused.
        unsafe { libc::munmap(buffer.as_ptr().cast(), length) };
    }
}
