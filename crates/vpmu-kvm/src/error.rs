//! The errors between the engine, KVM and perf.

use std::io;

use vpmu::x86::intel::ConfigError;
use vpmu::x86::{ArchEvent, RestoreError};
use vpmu_perf::PerfError;

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
    /// The guest has been offered an event that this host cannot count.
    #[error(
        "this host cannot count {0:?}, which the guest is offered: use a host that can, or \
         Options::approximate_instructions if the guest was offered them so"
    )]
    Event(ArchEvent),
    /// An AMD processor was asked for on a host that is none.
    #[error(
        "this host's processor is not AMD's, and a guest's system calls, errata and events would not be AMD's \
         either: leave the model out, or choose Intel's"
    )]
    NoAmd,
    /// The registers are not those of the PMU that the guest is offered.
    #[error("{0}; restore the state of the same kind of PMU")]
    State(RestoreError),
    /// The state was saved by a later version of this crate.
    #[error("a saved PMU of version {0} is not known here: restore with the version that saved it")]
    StateVersion(u32),
    /// No paravirtual PMU can be offered so.
    #[error("{0}; use what detect_paravirt() gives")]
    Offer(vpmu::paravirt::BadOffer),
    /// A saved paravirtual PMU that cannot go on here.
    #[error("{0}; restore with the version that saved it")]
    Paravirt(vpmu::paravirt::RestoreError),
    /// A version of Intel's performance monitoring was asked for with AMD's PMU.
    #[error(
        "AMD's PMU has no version of architectural performance monitoring: leave Options::perfmon out, or \
         choose Intel's model"
    )]
    NoPerfmon,
    /// PEBS was asked for with AMD's PMU.
    #[error("PEBS is Intel's: leave Options::pebs out, or choose Intel's model")]
    NoPebs,
    /// PEBS needs the vCPU's descriptor, and the guest's memory.
    #[error(
        "PEBS records need the guest's registers and memory: attach by descriptors, and give \
         Options::memory"
    )]
    NoMemory,
    /// The saved guest has PEBS and this PMU has not, or the other way round.
    #[error(
        "PEBS was offered before and is not here, or is here and was not: offer what the saved guest has"
    )]
    OtherPebs,
    /// A PMU without descriptors was told too little.
    #[error("a PMU without descriptors cannot know {0}: give it in Options")]
    Missing(&'static str),
}

impl Error {
    /// Returns the system's last error, of this call of KVM's.
    pub(crate) fn last(call: &'static str) -> Self {
        Self::Kvm(call, io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}
