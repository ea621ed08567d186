//! What an exit of this host takes.

use std::sync::OnceLock;

use crate::trial::exit_times;

/// Times of this host, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Worth {
    /// Of an exit to this process, and back.
    pub(super) exit: i32,
    /// Of a call of KVM's that does not enter the guest.
    pub(super) call: i32,
}

impl Worth {
    /// Returns the times of this host, measured once for the process.
    pub(super) fn here() -> Self {
        static FOUND: OnceLock<Worth> = OnceLock::new();
        // Where no guest can be run for it, those of a common server.
        const BELIEVED: Worth = Worth {
            exit: 2500,
            call: 700,
        };
        *FOUND.get_or_init(|| {
            exit_times().map_or(BELIEVED, |times| Worth {
                // What a VMM and this crate do at an exit takes half as long again, or more.
                exit: (times.exit.subsec_nanos() / 2 * 3) as i32,
                call: times.call.subsec_nanos() as i32,
            })
        })
    }
}
