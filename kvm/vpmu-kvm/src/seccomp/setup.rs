//! The system calls that a VMM's thread makes for the PMU of a VM that it makes, ends or restores.

use super::{Syscall, argument, perf};
use crate::sys;

const OPEN: Syscall = call!(
    SYS_perf_event_open,
    "which events this host counts",
    argument(2, u32::MAX),
    argument(4, 8)
);

/// musl asks twice, for kernels that do not know the first way.
const CLOSE_ON_EXEC: Syscall = fcntl!(
    "a new descriptor is closed on exec, where the C library is musl",
    argument(1, libc::F_SETFD as u32),
    argument(2, libc::FD_CLOEXEC as u32)
);

/// The calls of the thread that makes VMs, by the function that it calls: [`detect`](crate::detect),
/// [`intercept`](crate::intercept), [`Vcpu::attach`](crate::Vcpu::attach), [`Vcpu::restore`](crate::Vcpu::restore) and
/// the end of a [`Vcpu`](crate::Vcpu). The list has all functions except `save` and `reset` of a vCPU that no thread
/// has run, which make no calls. Functions of a vCPU that a thread has run make calls of [`SYSCALLS`](super::SYSCALLS),
/// too. Those of the memory allocator are missing, as there.
pub const SETUP_SYSCALLS: &[(&str, &[Syscall])] = &[
    (
        "detect",
        &[
            // Each event that a guest may be offered is opened once.
            OPEN,
            call!(SYS_close, "an event was tried"),
            call!(
                SYS_openat,
                "/proc/cpuinfo, and the level of perf_event_paranoid, where the C library is glibc"
            ),
            call!(SYS_open, "the same files, where the C library is musl"),
            CLOSE_ON_EXEC,
            call!(SYS_statx, "the same file, where the C library is glibc"),
            call!(SYS_fstat, "the same file, where the C library is musl"),
            call!(SYS_read, "the same file"),
            call!(
                SYS_mmap,
                "where PEBS may be sampled, and for the try of counters"
            ),
            call!(
                SYS_munmap,
                "where PEBS may be sampled, and for the try of counters"
            ),
            perf!(ENABLE, "where there are hardware counters to try"),
            kvm!(CREATE_VM, "the guest that tries them, where there are"),
            kvm!(CREATE_VCPU, "the same guest, where there is"),
            kvm!(SET_USER_MEMORY_REGION, "the same guest, where there is"),
            kvm!(GET_SREGS, "the same guest, where there is"),
            kvm!(SET_SREGS, "the same guest, where there is"),
            kvm!(SET_REGS, "the same guest, where there is"),
            kvm!(RUN, "the same guest, where there is"),
        ],
    ),
    (
        "intercept",
        &[
            kvm!(GET_CLOCK, "whether this is a VM"),
            kvm!(CHECK_EXTENSION, "whether KVM can hand MSRs over"),
            kvm!(ENABLE_CAP, "MSRs are handed over, and KVM has no PMU"),
            kvm!(X86_SET_MSR_FILTER, "which MSRs are handed over"),
        ],
    ),
    (
        "attach",
        &[
            kvm!(GET_CLOCK, "whether this is a VM"),
            kvm!(GET_LAPIC, "whether this is a vCPU"),
            kvm!(GET_TSC_KHZ, "for a deadline"),
            kvm!(GET_DEVICE_ATTR, "for a deadline"),
            kvm!(
                GET_MSRS,
                "for a deadline, where KVM reports the TSC's offset"
            ),
            fcntl!(
                "the VMM's descriptors are duplicated",
                argument(1, libc::F_DUPFD_CLOEXEC as u32)
            ),
            CLOSE_ON_EXEC,
            OPEN,
            call!(SYS_close, "an event was tried"),
            fcntl!(
                "how many descriptors are free for counters; each close, in builds with debug assertions",
                argument(1, libc::F_GETFD as u32)
            ),
            call!(
                SYS_prlimit64,
                "the limit of open files, which counters will need"
            ),
            call!(SYS_mmap, "kvm_run"),
            call!(SYS_munmap, "where PEBS may be sampled"),
            call!(SYS_rt_sigaction, "the overflows' signal"),
            call!(SYS_timerfd_create, "for a deadline"),
            call!(
                SYS_openat,
                "the level of perf_event_paranoid, where nobody has called detect; KVM's way of paging, where Options::lbr is on"
            ),
            call!(
                SYS_open,
                "the same files, where the C library is musl and nobody has called detect"
            ),
            call!(SYS_statx, "the same file, where nobody has called detect"),
            call!(SYS_fstat, "the same file, where nobody has called detect"),
            call!(SYS_read, "the same file, where nobody has called detect"),
            call!(
                SYS_fallocate,
                "room for the statistics of each eighth vCPU, where they are published"
            ),
        ],
    ),
    (
        "restore",
        &[
            kvm!(GET_TSC_KHZ, "for a deadline"),
            kvm!(GET_DEVICE_ATTR, "for a deadline"),
            kvm!(GET_MSRS, "for a deadline, where Linux is older than 5.16"),
            kvm!(SIGNAL_MSI, "where the deadline is over"),
            call!(SYS_timerfd_settime, "where a deadline was armed"),
            Syscall {
                why: "where the state is another host's",
                ..OPEN
            },
            call!(SYS_close, "where the state is another host's"),
        ],
    ),
    (
        "drop",
        &[
            call!(SYS_close, "descriptors are given back"),
            call!(SYS_munmap, "kvm_run is given back"),
            fcntl!(
                "each close, in builds with debug assertions only",
                argument(1, libc::F_GETFD as u32)
            ),
        ],
    ),
];
