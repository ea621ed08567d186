//! The kick: the way in which an overflow keeps a vCPU from entering the guest.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

/// The value that an overflow gives a flag which was 0. A VMM's own 1 in the same flag is never
/// overwritten and never cleared.
pub const KICKED: u8 = 2;

/// A byte that a signal handler may write to as long as it is kept.
pub trait Flag: fmt::Debug + Send + Sync {
    /// Returns the byte.
    fn flag(&self) -> &AtomicU8;
}

impl Flag for AtomicU8 {
    fn flag(&self) -> &AtomicU8 {
        self
    }
}

/// What an overflow's signal does besides noting the overflow. Without a kick, a signal that comes between the last
/// check for overflows and the entry into the guest is seen only at the next exit, which may never come.
#[derive(Clone, Debug, Default)]
pub enum Kick {
    /// Nothing: for threads that run no guest.
    #[default]
    Nothing,
    /// Sets a flag to [`KICKED`] unless it is set: `kvm_run.immediate_exit`, or a byte that the VMM reads
    /// before it enters the guest.
    Flag(Arc<dyn Flag>),
    /// Adds 1 to an eventfd.
    EventFd(Arc<OwnedFd>),
    /// Sends this signal to the thread: the signal that the VMM itself uses to take a vCPU out of the guest.
    Signal(i32),
}
