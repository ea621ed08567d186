//! The errors between the engine, KVM and perf.

use std::io;

use vpmu::x86::intel::ConfigError;
use vpmu::x86::{ArchEvent, RestoreError};
use vpmu_perf::{GuestsOnly, PerfError};

/// An error between the engine, KVM and perf. Each text ends with advice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// KVM is too old.
    #[error("this KVM cannot hand MSRs to a VMM: use Linux 5.10 or newer on the host")]
    NoUserSpaceMsr,
    /// KVM's own PMU cannot be switched off any more.
    #[error(
        "KVM's own PMU cannot be switched off once there is a vCPU: call intercept before \
         KVM_CREATE_VCPU"
    )]
    LateIntercept,
    /// The descriptor is no VM's.
    #[error(
        "this descriptor is no VM's ({errno}): pass what KVM_CREATE_VM has given",
        errno = io::Error::from_raw_os_error(*.0)
    )]
    NoVm(i32),
    /// The local APIC is not KVM's, or the descriptor is no vCPU's.
    #[error(
        "KVM does not give this vCPU's local APIC ({errno}): create the interrupt controller \
         (KVM_CREATE_IRQCHIP or KVM_CAP_SPLIT_IRQCHIP) before the vCPU, and pass the vCPU's descriptor",
        errno = io::Error::from_raw_os_error(*.0)
    )]
    NoLapic(i32),
    /// KVM refused a call: the call, and its error number.
    #[error(
        "KVM: {0} failed: {errno}; see Documentation/virt/kvm/api.rst for its reasons",
        errno = io::Error::from_raw_os_error(*.1)
    )]
    Kvm(&'static str, i32),
    /// No descriptor is left.
    #[error(
        "no descriptor is left for this vCPU ({errno}): raise the limit of open files (RLIMIT_NOFILE, ulimit -n)",
        errno = io::Error::from_raw_os_error(*.0)
    )]
    NoDescriptor(i32),
    /// The host has no timer to give.
    #[error(
        "timerfd: {errno}; raise the limit of open files (ulimit -n)",
        errno = io::Error::from_raw_os_error(*.0)
    )]
    Timer(i32),
    /// A saved deadline that cannot go on here.
    #[error("{0}; restore the guest's memory before its deadline")]
    Deadline(lazy_deadline::RestoreError),
    /// The vCPU's TSC was given another rate than the host's.
    #[error(
        "a lazy deadline needs a TSC as fast as the host's, {host} kHz, and the guest's has {guest}: \
         leave the TSC's rate alone, or offer no lazy deadline"
    )]
    ScaledTsc {
        /// The guest's rate, kHz.
        guest: u32,
        /// The host's rate.
        host: u32,
    },
    /// There can be no such PMU.
    #[error("{0}; use what detect() gives")]
    Config(ConfigError),
    /// perf refuses.
    #[error(transparent)]
    Perf(#[from] PerfError),
    /// Hardware counters that count what is not the guest's, or nothing.
    #[error(
        "this host's counters do not count guests alone ({} cycles of the host, {} of a guest), as in a VM of a cloud whose \
         KVM drops AMD's GuestOnly bit: let a clock count (Source::Clock)", .0.host, .0.guest
    )]
    GuestsOnly(GuestsOnly),
    /// The guest has been offered an event that this host cannot count.
    #[error(
        "this host cannot count {0:?}, which the guest is offered: use a host that can, or \
         Clock::Approximate if the guest was offered them so"
    )]
    Event(ArchEvent),
    /// An AMD processor was asked for on a host that is none.
    #[error(
        "this host's processor is not AMD's, and a guest's system calls, errata and events would not be AMD's \
         either: leave the model out, or choose Intel's"
    )]
    NoAmd,
    // Apart from `OtherOffer`: here the kind is right, and its registers are damaged.
    /// The registers are not those of the PMU that the guest is offered.
    #[error("{0}; restore the state of the same kind of PMU")]
    State(RestoreError),
    /// The state was saved by a later version of this crate.
    #[error("a saved PMU of version {0} is not known here: restore with the version that saved it")]
    StateVersion(u32),
    /// No paravirtual PMU can be offered so.
    #[error("{0}; use what detect() gives")]
    Offer(vpmu::paravirt::BadOffer),
    /// A saved paravirtual PMU that cannot go on here.
    #[error("{0}; restore with the version that saved it")]
    Paravirt(vpmu::paravirt::RestoreError),
    /// PEBS needs a vCPU's descriptor.
    #[error(
        "PEBS records need the guest's registers and memory: offer no PEBS, or attach by descriptors \
         (Vcpu::attach)"
    )]
    BarePebs,
    /// Last branch records cannot be offered: the reason.
    #[error("last branch records: {0}; offer none (Options::lbr)")]
    Lbr(&'static str),
    /// The saved guest was offered other parts than this vCPU has.
    #[error(
        "the saved guest was offered another kind of PMU, or another deadline: attach with what \
         State::offer() gives"
    )]
    OtherOffer,
}

impl Error {
    /// Returns the system's last error, of this call of KVM's.
    pub(crate) fn last(call: &'static str) -> Self {
        // A number, not an `io::Error`: errors can then be compared and cloned.
        Self::Kvm(call, io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}
