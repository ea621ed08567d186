//! How a process ended.

/// The end of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The process returned this status, 0..=255.
    Exited(i32),
    /// This signal killed the process.
    Signaled(i32),
}

impl End {
    /// Decodes the kernel's wait status.
    pub fn from_wait_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self::Exited(status >> 8 & 0xff),
            signal => Self::Signaled(signal),
        }
    }

    /// Returns the status that a shell would show: 128 + signal for a killed
    /// process.
    pub fn status(self) -> i32 {
        match self {
            Self::Exited(status) => status,
            Self::Signaled(signal) => 128 + signal,
        }
    }

    /// Returns the signal that killed the process.
    pub fn signal(self) -> Option<i32> {
        match self {
            Self::Exited(_) => None,
            Self::Signaled(signal) => Some(signal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_statuses() {
        let end = End::from_wait_status(3 << 8);
        assert_eq!((end.status(), end.signal()), (3, None));
        // The kernel has dumped the core.
        let end = End::from_wait_status(0x80 | 9);
        assert_eq!((end.status(), end.signal()), (137, Some(9)));
    }
}
