//! The reasons why there can be no perf events.

use std::sync::OnceLock;
use std::{fmt, io};

/// The reason why there can be no perf events. Each text ends with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PerfError {
    /// The kernel forbids perf events. Holds the value of `perf_event_paranoid`, where it can be
    /// read.
    Forbidden(Option<i32>),
    /// KVM gives the PMU to guests by itself (mediated vPMU).
    Mediated,
    /// This kernel has no perf.
    NoPerf,
    /// This kernel's perf has no hardware event, as in a virtual machine without a PMU.
    NoHardware,
    /// The system refuses for another reason; its error number.
    Open(i32),
    /// The ring buffer of samples takes more memory than the kernel lets this user lock.
    Locked,
    /// The process may not open as many files as its guests' counters take.
    Descriptors {
        /// The descriptors that this vCPU's counters may take.
        needed: u64,
        /// The descriptors that the counters of the process's other vCPUs may take.
        promised: u64,
        /// The descriptors that are free, or were made for such counters: fewer than `needed` and `promised` together.
        free: u64,
        /// The limit (RLIMIT_NOFILE, soft).
        limit: u64,
    },
    /// Samples cannot have the guest's time, because perf's clock is not made of the TSC.
    NoTsc,
    /// The signal cannot carry overflows.
    Signal(i32),
    /// The signal has another handler already.
    SignalTaken(i32),
    /// The calling thread has a host already, which takes the thread's overflows.
    Taken,
    /// The guest's TSC frequency is 0, so a clock would stand still.
    NoFrequency,
}

// Written by hand: a derive would bring six packages into each VMM.
impl fmt::Display for PerfError {
    #[rustfmt::skip]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Debian's kernels have a level above Linux's highest, and ask for CAP_SYS_ADMIN there.
            Self::Forbidden(Some(level)) if *level > 2 => write!(f,
                "the kernel does not let this user count the guest's kernel (perf_event_paranoid is {level}, where \
                 CAP_PERFMON is not enough): run as root, or write 2 to /proc/sys/kernel/perf_event_paranoid and give the \
                 program CAP_PERFMON, or write 1 there"),
            Self::Forbidden(level) => {
                let level = level.map(|level| format!(" (perf_event_paranoid is {level})"));
                write!(f,
                    "the kernel does not let this user count the guest's kernel{}: run as root, give the program \
                     CAP_PERFMON, or write 1 to /proc/sys/kernel/perf_event_paranoid", level.unwrap_or_default())
            }
            Self::Mediated => f.write_str(
                "the host's PMU is taken: KVM gives it to guests itself (mediated vPMU); switch that off with the module \
                 parameter enable_mediated_pmu=0 of kvm_intel or kvm_amd, or use KVM's PMU"),
            Self::NoPerf => f.write_str(
                "this kernel has no perf events, or a container forbids them: use a kernel with CONFIG_PERF_EVENTS, and \
                 allow perf_event_open in the container's seccomp profile"),
            Self::NoHardware => f.write_str(
                "this host has no hardware counters, as a virtual machine without a PMU has none: count the thread's time \
                 instead (--backing clock, or auto, which does so by itself), or give this host a PMU"),
            Self::Open(errno) => write!(f,
                "perf_event_open: {}; see perf_event_open(2) for its reasons", io::Error::from_raw_os_error(*errno)),
            Self::Locked => f.write_str(
                "the kernel does not let this user have memory for perf's samples: raise \
                 /proc/sys/kernel/perf_event_mlock_kb, or give the program CAP_IPC_LOCK"),
            Self::Descriptors { needed, promised, free, limit } => write!(f,
                "this vCPU's counters take up to {needed} descriptors, the vCPUs before it {promised}, and of the limit \
                 of {limit} only {free} are free for them: raise RLIMIT_NOFILE (ulimit -n) by at least {needed} for each \
                 vCPU"),
            Self::NoTsc => f.write_str(
                "perf's clock is not made of the TSC here, so samples cannot be given the guest's time: boot the host \
                 with a TSC that it finds stable (tsc=reliable), or collect without the ring buffer (--pebs exit)"),
            Self::Signal(signal) => write!(f,
                "signal {signal} cannot report overflows: give a real-time signal, which queues"),
            Self::SignalTaken(signal) => write!(f,
                "signal {signal} has a handler already: give another real-time signal for overflows"),
            Self::Taken => f.write_str(
                "this thread has a PerfHost already: drop it first, or use another thread"),
            Self::NoFrequency => f.write_str(
                "a TSC frequency of 0: give the guest's, for example from KVM_GET_TSC_KHZ"),
        }
    }
}

impl std::error::Error for PerfError {}

impl PerfError {
    pub(crate) fn from_open(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => Self::Forbidden(paranoia()),
            // The second error comes while a guest has the PMU.
            Some(libc::EBUSY | libc::EOPNOTSUPP) => Self::Mediated,
            Some(libc::ENOSYS) => Self::NoPerf,
            Some(libc::ENOENT) => Self::NoHardware,
            errno => Self::Open(errno.unwrap_or(libc::EINVAL)),
        }
    }
}

/// Returns the kernel's setting when this was first asked; `None` where /proc is not visible, as in a jail.
// Read once, by `support`: on a vCPU's thread the VMM's seccomp filter may end the process for it.
pub(crate) fn paranoia() -> Option<i32> {
    static LEVEL: OnceLock<Option<i32>> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let level = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?;
        level.trim().parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_cannot_be_read_is_not_printed() {
        let text = PerfError::Forbidden(None).to_string();
        assert!(text.contains("guest's kernel: run as root"), "{text}");
        let text = PerfError::Forbidden(Some(2)).to_string();
        assert!(text.contains("(perf_event_paranoid is 2): run"), "{text}");
    }

    #[test]
    fn a_level_of_debian_s_is_not_mended_by_cap_perfmon_alone() {
        let text = PerfError::Forbidden(Some(3)).to_string();
        assert!(
            text.contains("is 3, where CAP_PERFMON is not enough): run as root, or write 2"),
            "{text}"
        );
    }

    #[test]
    fn a_host_without_counters_has_a_way_out() {
        let error = PerfError::from_open(&io::Error::from_raw_os_error(libc::ENOENT));
        let text = error.to_string();
        assert!(text.contains("--backing clock"), "{text}");
    }
}
