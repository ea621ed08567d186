//! Runs of guests: under supervision, with retries, several side by side.

mod activity;
mod clock;
pub mod compare;
mod console;
mod guest;
mod kept;
mod second;
pub mod selftest;
mod supervise;

use std::io::Write;
use std::time::Duration;

pub use guest::{check, once_more, run};
pub use second::SecondOutcome;
pub use supervise::Stage;

use crate::Result;
use crate::host::qemu::Version;
use crate::image::cache::Session;
use crate::image::debian::Selection;
use crate::image::disk::BootDisk;
use crate::image::extras::Extras;
use crate::image::host_kernel::HostKernel;
use crate::image::images::Images;
use crate::image::job::Output;
use crate::image::module::{Kernel, Modules};
use crate::report::host_profile::HostProfile;
use crate::report::result::Run;
use crate::spec::Spec;
use vpmu_measure::Monitor;

/// The kernel of guests that have a module of this project's.
const MODULES_KERNEL: Kernel = Kernel::Backports;

/// The resources that runs of guests share.
#[derive(Debug)]
pub struct Lab<'a> {
    /// What to run.
    pub(crate) spec: &'a Spec,
    /// The version of the QEMU that runs the guests; `None` when this machine's own KVM runs them.
    pub(crate) qemu: Option<Version>,
    /// What everything works with.
    pub(crate) session: &'a Session<'a>,
    /// Images of Debian packages; `None` when they are not needed.
    pub(crate) images: Option<Images>,
    /// This project's modules for guests, with their kernel; `None` when no guest has one.
    pub(crate) modules: Option<Modules>,
    /// The kernel of hosts whose KVM hands the PMU over; `None` when no guest has such a host.
    pub(crate) host_kernel: Option<HostKernel>,
    /// What guests have beside them of Debian packages; `None` where that is nothing.
    pub(crate) extras: Option<Extras>,
    /// The disk that guests boot from; `None` when the lab loads their kernel.
    pub(crate) disk: Option<BootDisk>,
}

impl<'a> Lab<'a> {
    /// Downloads packages and makes images, as far as `spec` needs them and they are missing.
    ///
    /// # Errors
    ///
    /// When packages cannot be downloaded or lack something, or QEMU is missing.
    pub fn prepare(spec: &'a Spec, session: &'a Session<'a>) -> Result<Self> {
        let images = spec
            .needs_images()
            .then(|| Images::prepare(spec.request.machine.arch, session))
            .transpose()?;
        let modules = spec
            .needs_modules()
            .then(|| Modules::prepare(MODULES_KERNEL, session))
            .transpose()?;
        let host_kernel = spec
            .needs_newest_kernel()
            .then(|| HostKernel::prepare(session))
            .transpose()?;
        let disk = (spec.request.disk.as_ref().zip(images.as_ref()))
            .map(|(disk, images)| BootDisk::prepare(disk, images, session))
            .transpose()?;
        let extras = Extras::prepare(&spec.request, &kernel_of(spec), session)?;
        Ok(Self {
            spec,
            qemu: spec.qemu()?,
            session,
            images,
            modules,
            host_kernel,
            extras,
            disk,
        })
    }
}

/// Selects the package of the kernel of Debian's that the guests boot.
fn kernel_of(spec: &Spec) -> Selection {
    let arch = spec.request.machine.arch;
    match &spec.request.disk {
        Some(disk) => Selection::kernel(disk.release),
        None if spec.needs_modules() => {
            Selection::kernel_with_headers(MODULES_KERNEL.release(), arch)
        }
        None => Selection::guests(arch),
    }
}

/// The treatment of the command's output.
pub struct Sink {
    /// Whether the output is kept until the command is over.
    pub output: Output,
    /// Where the output goes.
    pub to: Box<dyn Write + Send>,
}

/// The result of one guest.
#[derive(Debug)]
pub struct Outcome {
    /// The figures; `None` when no command ran.
    pub run: Option<Run>,
    /// The monitor's report, when there is a monitor.
    pub monitor: Option<Monitor>,
    /// The profile that the monitor took of the guest, where one was asked for.
    pub host_profile: Option<HostProfile>,
    /// The result of the guest beside it, where there was one.
    pub second: Option<SecondOutcome>,
    /// Wall-clock time of the whole.
    pub wall: Duration,
}
