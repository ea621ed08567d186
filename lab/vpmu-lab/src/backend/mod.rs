//! The ways to run a guest: each constructs the program to start, and judges how
//! the guest has ended.
//!
//! | way | what is started | below the guest |
//! |---|---|---|
//! | `native` | QEMU | nothing |
//! | `monitor` | QEMU | this project's EL2 monitor |
//! | `nested` | QEMU | a stock KVM host with stock QEMU or vpmu-vmm |
//! | `direct` | vpmu-vmm | this machine's own KVM |

mod boot_file;
mod direct;
mod disk;
pub(crate) mod monitor;
mod native;
mod nested;
mod parts;
mod qemu;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process;

use crate::Result;
use crate::error::Failure;
use crate::host::tool::bound_to_us;
use crate::image::job::Notify;
use crate::spec::{Guest, Request, Way};
use vpmu_measure::Record;

pub(crate) use parts::Parts;

/// One way to run a guest.
pub(crate) trait Backend {
    /// Checks, before anything is downloaded, that this machine has the programs.
    fn check(&self) -> Result<()>;

    /// Returns the recipient of the guest's messages that its command begins and ends.
    fn notify(&self) -> Notify {
        Notify::Nobody
    }

    /// Constructs the program to start, with files in `folder`.
    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch>;

    /// Tells how the guest failed, when neither its kernel nor a hypervisor complained. `None`: the guest powered off, or was
    /// reset.
    fn silent_end(&self, records: &[Record]) -> Option<Failure> {
        let _ = records;
        None
    }

    /// Tells whether QEMU is known to lose interrupts of this guest, or to deliver one twice.
    fn loses_interrupts(&self) -> bool {
        false
    }

    /// Renames a failure by its likely cause.
    fn explain(&self, failure: Failure) -> Failure {
        failure
    }
}

/// A program to start.
#[derive(Debug)]
pub(crate) struct Launch {
    /// The program's path, or its name in `PATH`.
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<OsString>,
}

/// Returns the backend that runs `guest` as `request` wants it.
pub(crate) fn of<'a>(request: &'a Request, guest: &'a Guest) -> Box<dyn Backend + 'a> {
    let design = guest.design;
    match guest.way {
        Way::Native => Box::new(native::Native(&request.machine)),
        Way::Monitor => Box::new(monitor::Monitor {
            request,
            pmu: design.pmu,
        }),
        Way::Nested(vmm) => Box::new(nested::Nested {
            request,
            guest,
            vmm,
        }),
        Way::Direct => Box::new(direct::Direct { request, design }),
    }
}

impl Launch {
    /// Returns the program with its arguments. The kernel ends the program when vpmu is killed.
    pub(crate) fn into_command(self) -> Result<process::Command> {
        let mut command = bound_to_us(&self.program)?;
        command.args(self.arguments);
        Ok(command)
    }
}
