//! What can go wrong between the engine and KVM.

use vpmu::x86::intel::ConfigError;

/// What can go wrong between the engine and KVM.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM is too old.
    #[error("this KVM cannot hand MSRs to a VMM: it needs Linux 5.10 or newer")]
    NoUserSpaceMsr,
    /// KVM said no.
    #[error("KVM: {0} failed: {1}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// The host has no timer to give.
    #[error("timerfd: {0}")]
    Timer(#[source] std::io::Error),
    /// A saved deadline that cannot go on here.
    #[error("{0}")]
    Deadline(#[source] lazy_deadline::RestoreError),
    /// The vCPU's TSC was given another rate than the host's.
    #[error(
        "a lazy deadline needs a TSC as fast as the host's, {host} kHz, and the guest's has {guest}"
    )]
    ScaledTsc {
        /// The guest's rate, kHz.
        guest: u32,
        /// The host's.
        host: u32,
    },
    /// There can be no such PMU.
    #[error("PMU: {0}")]
    Config(ConfigError),
}

pub(crate) fn kvm<T>(what: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Error> {
    result.map_err(|error| Error::Kvm(what, error))
}
