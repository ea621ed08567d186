//! The report of `meter`.

use vpmu_measure::{Meter, Record};

use crate::interrupts::Interrupts;

/// Everything measured about one command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// The end of the command.
    pub end: End,
    /// CLOCK_MONOTONIC around the command, nanoseconds.
    pub real_ns: u64,
    /// User time of the command and its children, microseconds.
    pub user_us: u64,
    /// Kernel time of the command and its children, microseconds.
    pub sys_us: u64,
    /// Interrupts that the machine took meanwhile; `None` when
    /// `/proc/interrupts` could not be read.
    pub interrupts: Option<Interrupts>,
}

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
}

impl From<Report> for Record {
    fn from(report: Report) -> Self {
        Self::Meter(Meter {
            status: report.end.status(),
            signal: match report.end {
                End::Exited(_) => None,
                End::Signaled(signal) => Some(signal),
            },
            real_ns: report.real_ns,
            user_us: report.user_us,
            sys_us: report.sys_us,
            pmis: report.interrupts.and_then(|counted| counted.pmu),
            interrupts: report.interrupts.map(|counted| counted.all),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let mut report = Report {
            end: End::from_wait_status(3 << 8),
            real_ns: 1,
            user_us: 2,
            sys_us: 3,
            interrupts: Some(Interrupts {
                all: 5,
                pmu: Some(4),
            }),
        };
        assert_eq!(
            Record::from(report).line(),
            "\x1e{\"meter\":{\"status\":3,\"signal\":null,\"real_ns\":1,\"user_us\":2,\
             \"sys_us\":3,\"pmis\":4,\"interrupts\":5}}\n"
        );
        report.end = End::from_wait_status(0x80 | 9);
        report.interrupts = None;
        assert_eq!(
            Record::from(report).line(),
            "\x1e{\"meter\":{\"status\":137,\"signal\":9,\"real_ns\":1,\"user_us\":2,\
             \"sys_us\":3,\"pmis\":null,\"interrupts\":null}}\n"
        );
    }
}
