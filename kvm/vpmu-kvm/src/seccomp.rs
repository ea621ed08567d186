//! The system calls that a vCPU's thread makes for its PMU, for the VMM's seccomp filter.

#[cfg(feature = "seccompiler")]
mod types;

use std::fmt::Write;

use crate::sys;
pub use setup::SETUP_SYSCALLS;
#[cfg(feature = "seccompiler")]
pub use types::add_seccomp_rules;

/// A system call, allowed where all arguments have the given values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syscall {
    /// Its name in the kernel's table.
    pub name: &'static str,
    /// Its number on x86-64.
    pub number: i64,
    /// The arguments' values. Arguments that are not named may be anything.
    pub arguments: &'static [Argument],
    /// The purpose of the call.
    pub why: &'static str,
}

/// The low 32 bits of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    /// The argument's index: 0 to 5.
    pub index: u8,
    /// The argument's value.
    pub value: u32,
}

const fn argument(index: u8, value: u32) -> Argument {
    Argument { index, value }
}

macro_rules! call {
    ($number:ident, $why:expr $(, $argument:expr)*) => {
        Syscall {
            name: stringify!($number).split_at("SYS_".len()).1,
            number: libc::$number,
            arguments: &[$($argument),*],
            why: $why,
        }
    };
}

macro_rules! kvm {
    ($request:ident, $why:literal) => {
        call!(
            SYS_ioctl,
            concat!("KVM_", stringify!($request), ": ", $why),
            argument(1, sys::$request.number as u32)
        )
    };
}

macro_rules! perf {
    ($request:ident, $why:literal) => {
        call!(
            SYS_ioctl,
            concat!("PERF_EVENT_IOC_", stringify!($request), ": ", $why),
            argument(1, perf::$request as u32)
        )
    };
}

macro_rules! fcntl {
    ($why:literal, $($argument:expr),+) => {
        call!(SYS_fcntl, $why, $($argument),+)
    };
}

// Behind the macros that it uses.
mod setup;

/// perf's requests.
mod perf {
    const TYPE: u32 = b'$' as u32;
    pub(super) const ENABLE: libc::Ioctl = libc::_IO(TYPE, 0);
    pub(super) const DISABLE: libc::Ioctl = libc::_IO(TYPE, 1);
    pub(super) const PERIOD: libc::Ioctl = libc::_IOW::<u64>(TYPE, 4);
}

const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;

/// The calls of a vCPU's thread for its PMU after [`Vcpu::attach`](crate::Vcpu::attach), beside KVM_RUN and those
/// of its memory allocator. Everything else comes before: [`detect`](crate::detect), `attach` (rt_sigaction, mmap,
/// fcntl) and, with a state of another host, [`Vcpu::restore`](crate::Vcpu::restore).
pub const SYSCALLS: &[Syscall] = &[
    // Any CPU, PERF_FLAG_FD_CLOEXEC. A clock's events are a group.
    call!(
        SYS_perf_event_open,
        "a guest's counter begins to count",
        argument(2, u32::MAX),
        argument(4, 8)
    ),
    fcntl!(
        "the counter's overflows go to the thread",
        argument(1, F_SETOWN_EX)
    ),
    fcntl!(
        "the counter's overflows are a signal",
        argument(1, F_SETSIG)
    ),
    fcntl!(
        "the counter's overflows are reported",
        argument(1, libc::F_SETFL as u32),
        argument(2, (libc::O_ASYNC | libc::O_NONBLOCK) as u32)
    ),
    perf!(ENABLE, "a counter counts"),
    perf!(DISABLE, "a counter stands still"),
    perf!(PERIOD, "events to the next overflow"),
    call!(
        SYS_mmap,
        "a clock's group, whose page has the time; samples: with Pebs::Buffer or Auto, and where a clock counts one ring"
    ),
    call!(SYS_munmap, "what was mapped is given back"),
    call!(SYS_read, "a counter is read"),
    call!(SYS_close, "a counter is given back"),
    call!(SYS_rt_sigreturn, "an overflow's signal"),
    call!(
        SYS_rt_sigaction,
        "the thread's first run: whose handler the overflows' signal has",
        argument(1, 0)
    ),
    call!(
        SYS_rt_sigprocmask,
        "the thread's first run: the overflows' signal is unblocked",
        argument(0, libc::SIG_UNBLOCK as u32)
    ),
    kvm!(GET_TSC_KHZ, "the thread's first run, and each slice"),
    // Asked once and kept: the signal's handler sends a kick to this thread without asking.
    call!(SYS_getpid, "the thread's first run"),
    call!(SYS_gettid, "the thread's first run"),
    kvm!(GET_LAPIC, "LVTPC is read for a PMI"),
    kvm!(NMI, "a PMI is delivered"),
    kvm!(SIGNAL_MSI, "a PMI is delivered as a vector"),
    kvm!(
        GET_REGS,
        "an RDPMC faults, or a counter of one ring overflows"
    ),
    kvm!(
        GET_SREGS,
        "a PEBS record, or a counter of one ring overflows"
    ),
    kvm!(GET_MSRS, "a PEBS record"),
    kvm!(
        GET_DEVICE_ATTR,
        "with Pebs::Buffer or Auto, the time of a PEBS record"
    ),
    kvm!(
        GET_XSAVE,
        "a PEBS record with XMM registers; with Options::lbr, user space has protection keys"
    ),
    kvm!(SET_REGS, "an RDPMC faults"),
    kvm!(GET_MP_STATE, "with Options::lbr, a PMI waits for branches"),
    kvm!(GET_VCPU_EVENTS, "an RDPMC faults"),
    kvm!(SET_VCPU_EVENTS, "an RDPMC faults"),
    call!(SYS_timerfd_settime, "with a lazy deadline only"),
    call!(
        SYS_timerfd_gettime,
        "with a lazy deadline only: the thread that waits for it"
    ),
    kvm!(
        GET_CPUID2,
        "with Vcpu::set_rdpmc, an MSR that might be of Hyper-V's; with Options::lbr, as above"
    ),
    kvm!(
        GET_DEBUGREGS,
        "with Vcpu::set_rdpmc, a single step over an RDPMC"
    ),
    kvm!(
        SET_DEBUGREGS,
        "with Vcpu::set_rdpmc, a single step over an RDPMC"
    ),
    #[cfg(feature = "lbr")]
    kvm!(SET_GUEST_DEBUG, "with Options::lbr, a guest is followed"),
    #[cfg(feature = "lbr")]
    call!(SYS_timer_create, "with Options::lbr only"),
    #[cfg(feature = "lbr")]
    call!(SYS_timer_settime, "with Options::lbr only"),
    #[cfg(feature = "lbr")]
    call!(SYS_timer_delete, "with Options::lbr only"),
    call!(SYS_tgkill, "with Kick::Signal only"),
    call!(SYS_write, "with Kick::EventFd only"),
    fcntl!(
        "each close, in builds with debug assertions only",
        argument(1, libc::F_GETFD as u32)
    ),
    call!(SYS_futex, "another thread reads the statistics"),
    call!(
        SYS_clock_gettime,
        "a slice ends, on hosts whose vDSO cannot tell the time; with Options::lbr, a guest is followed"
    ),
];

/// Returns the calls of [`SETUP_SYSCALLS`] as a JSON array, each once, in the form of [`seccomp_rules`]. A call that a
/// filter allows without conditions needs no rule with conditions. A rule without conditions allows its call for all
/// arguments.
pub fn seccomp_setup_rules() -> String {
    let mut calls: Vec<Syscall> = Vec::new();
    for call in SETUP_SYSCALLS.iter().flat_map(|(_, calls)| *calls) {
        let is_same =
            |other: &Syscall| (other.number, other.arguments) == (call.number, call.arguments);
        // A filter that has the same rule twice is larger, and slower for each call.
        if !calls.iter().any(is_same) {
            calls.push(*call);
        }
    }
    rules(&calls)
}

/// Returns [`SYSCALLS`] as a JSON array, in the form that seccompiler and the filters of microVM monitors have. Add it
/// to the `filter` of a vCPU thread whose `filter_action` is `allow`.
pub fn seccomp_rules() -> String {
    rules(SYSCALLS)
}

fn rules(calls: &[Syscall]) -> String {
    let mut text = String::from("[");
    for (n, call) in calls.iter().enumerate() {
        let comma = if n == 0 { "" } else { "," };
        // Names and reasons come from this crate, and need no escapes in JSON.
        let (name, why) = (call.name, call.why);
        let _ = write!(
            text,
            "{comma}\n{{\"syscall\":\"{name}\",\"comment\":\"{why}\""
        );
        for (n, Argument { index, value }) in call.arguments.iter().enumerate() {
            text.push_str(if n == 0 { ",\"args\":[" } else { "," });
            let _ = write!(
                text,
                "{{\"index\":{index},\"type\":\"dword\",\"op\":\"eq\",\"val\":{value}}}"
            );
        }
        text.push_str(if call.arguments.is_empty() { "}" } else { "]}" });
    }
    text.push_str("\n]\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_json() {
        let rules: serde_json::Value = serde_json::from_str(&seccomp_rules()).unwrap();
        let rules = rules.as_array().unwrap();
        assert_eq!(rules.len(), SYSCALLS.len());
        for (rule, call) in rules.iter().zip(SYSCALLS) {
            assert_eq!(rule["syscall"], call.name);
            assert_eq!(rule["comment"], call.why);
            let arguments = rule["args"].as_array().map_or(0, Vec::len);
            assert_eq!(arguments, call.arguments.len());
        }
    }

    #[test]
    fn a_call_of_several_functions_has_one_rule() {
        let rules: serde_json::Value = serde_json::from_str(&seccomp_setup_rules()).unwrap();
        let rules = rules.as_array().unwrap();
        let count = |name| rules.iter().filter(|rule| rule["syscall"] == name).count();
        assert_eq!((count("close"), count("perf_event_open")), (1, 1));
        assert_eq!(count("ioctl"), 17);
        assert_eq!(count("fcntl"), 3);
    }
}
