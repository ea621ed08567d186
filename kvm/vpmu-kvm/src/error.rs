//! The errors between the engine, KVM and perf.

use std::{fmt, io};

use vpmu::x86::intel::ConfigError;
use vpmu::x86::{ArchEvent, RestoreError};
use vpmu_perf::{GuestsOnly, PerfError};

/// An error between the engine, KVM and perf. Each text ends with advice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// KVM is too old.
    NoUserSpaceMsr,
    /// KVM's own PMU cannot be switched off any more.
    LateIntercept,
    /// The descriptor is not a VM's.
    NoVm(i32),
    /// The local APIC is not KVM's, or the descriptor is no vCPU's.
    NoLapic(i32),
    /// KVM refused a call: the call, and its error number.
    Kvm(&'static str, i32),
    /// No descriptor is left.
    NoDescriptor(i32),
    /// The host has no timer to give.
    Timer(i32),
    /// A saved deadline that cannot go on here.
    Deadline(lazy_deadline::RestoreError),
    /// The vCPU's TSC was given another rate than the host's.
    ScaledTsc {
        /// The guest's rate, kHz.
        guest: u32,
        /// The host's rate.
        host: u32,
    },
    /// There can be no such PMU.
    Config(ConfigError),
    /// perf refuses.
    Perf(PerfError),
    /// Hardware counters count more than the guest, or nothing.
    GuestsOnly(GuestsOnly),
    /// The guest has been offered an event that this host cannot count.
    Event(ArchEvent),
    /// An AMD processor was asked for on a host without one.
    NoAmd,
    // Apart from `OtherOffer`: here the kind is right, and its registers are damaged.
    /// The registers are not those of the PMU that the guest is offered.
    State(RestoreError),
    /// The state was saved by a later version of this crate.
    StateVersion(u32),
    /// A paravirtual PMU cannot be offered in this form.
    Offer(vpmu::paravirt::BadOffer),
    /// A saved paravirtual PMU that cannot go on here.
    Paravirt(vpmu::paravirt::RestoreError),
    /// PEBS records would be late.
    PebsSkid,
    /// Last branch records cannot be offered: the reason.
    Lbr(&'static str),
    /// The saved guest was offered other parts than this vCPU has.
    OtherOffer,
}

/// Returns the system's text for an error number.
fn text(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

// Written by hand: a derive would bring six packages into each VMM.
impl fmt::Display for Error {
    #[rustfmt::skip]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoUserSpaceMsr => f.write_str(
                "this KVM cannot hand MSRs to a VMM: use Linux 5.10 or newer on the host"),
            Self::LateIntercept => f.write_str(
                "KVM's own PMU cannot be switched off once there is a vCPU: call intercept before KVM_CREATE_VCPU"),
            Self::NoVm(errno) => write!(f,
                "this descriptor is no VM's ({}): pass what KVM_CREATE_VM has given", text(*errno)),
            Self::NoLapic(errno) => write!(f,
                "KVM does not give this vCPU's local APIC ({}): create the interrupt controller (KVM_CREATE_IRQCHIP or \
                 KVM_CAP_SPLIT_IRQCHIP) before the vCPU, and pass the vCPU's descriptor", text(*errno)),
            Self::Kvm(call, errno) => write!(f,
                "KVM: {call} failed: {}; see Documentation/virt/kvm/api.rst for its reasons", text(*errno)),
            Self::NoDescriptor(errno) => write!(f,
                "no descriptor is left for this vCPU ({}): raise the limit of open files (RLIMIT_NOFILE, ulimit -n)",
                text(*errno)),
            Self::Timer(errno) => write!(f,
                "timerfd: {}; raise the limit of open files (ulimit -n)", text(*errno)),
            Self::Deadline(error) => write!(f, "{error}; restore the guest's memory before its deadline"),
            Self::ScaledTsc { guest, host } => write!(f,
                "a lazy deadline needs a TSC as fast as the host's, {host} kHz, and the guest's has {guest}: leave the \
                 TSC's rate alone, or offer no lazy deadline"),
            Self::Config(error) => write!(f, "{error}; use what detect() gives"),
            Self::Perf(error) => error.fmt(f),
            Self::GuestsOnly(counted) => write!(f,
                "this host's counters do not count guests alone ({} cycles of the host, {} of a guest), as in a VM of a \
                 cloud whose KVM drops AMD's GuestOnly bit: let a clock count (Backing::Clock)",
                counted.host, counted.guest),
            Self::Event(event) => write!(f,
                "this host cannot count {event:?}, which the guest is offered: use a host that can, or \
                 Options::approximate_instructions if the guest was offered them so"),
            Self::NoAmd => f.write_str(
                "this host's processor is not AMD's, and a guest's system calls, errata and events would not be AMD's \
                 either: leave the model out, or choose Intel's"),
            Self::State(error) => write!(f, "{error}; restore the state of the same kind of PMU"),
            Self::StateVersion(version) => write!(f,
                "a saved PMU of version {version} is not known here: restore with the version that saved it"),
            Self::Offer(error) => write!(f, "{error}; use what detect() gives"),
            Self::Paravirt(error) => write!(f, "{error}; restore with the version that saved it"),
            Self::PebsSkid => f.write_str(
                "PEBS records would be some instructions late with this host's hardware counters, which no guest can be \
                 told: accept that (Skid::Accepted, --pebs-skid), let a clock count (Backing::Clock, --backing clock), or offer no \
                 PEBS"),
            Self::Lbr(reason) => write!(f, "last branch records: {reason}; offer none (Options::lbr, --lbr off)"),
            Self::OtherOffer => f.write_str(
                "the saved guest was offered another kind of PMU, or another deadline: attach with what State::offer() \
                 gives"),
        }
    }
}

impl std::error::Error for Error {}

impl From<PerfError> for Error {
    fn from(error: PerfError) -> Self {
        Self::Perf(error)
    }
}

impl Error {
    /// Returns whether the vCPU cannot go on after its `before_run` or `after_run` has failed with this error: KVM has
    /// refused a call in the middle of an exit or of an interrupt, which is then lost. End the VM then. After any other
    /// error of these functions the vCPU is as it was: once the cause is gone, call `before_run` again before the vCPU
    /// runs.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Kvm(..) | Self::NoLapic(_) => true,
            Self::NoUserSpaceMsr
            | Self::LateIntercept
            | Self::NoVm(_)
            | Self::NoDescriptor(_)
            | Self::Timer(_)
            | Self::Deadline(_)
            | Self::ScaledTsc { .. }
            | Self::Config(_)
            | Self::Perf(_)
            | Self::GuestsOnly(_)
            | Self::Event(_)
            | Self::NoAmd
            | Self::State(_)
            | Self::StateVersion(_)
            | Self::Offer(_)
            | Self::Paravirt(_)
            | Self::PebsSkid
            | Self::Lbr(_)
            | Self::OtherOffer => false,
        }
    }

    /// Returns the system's last error, of this call of KVM's.
    pub(crate) fn last(call: &'static str) -> Self {
        // A number, not an `io::Error`: errors can then be compared and cloned.
        Self::Kvm(call, io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}
