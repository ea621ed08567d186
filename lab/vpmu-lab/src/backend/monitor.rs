//! A guest on this project's EL2 monitor, on the machine that QEMU emulates.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use super::parts::{Boot, command_line};
use super::{Backend, Launch, Parts, boot_file, qemu};
use crate::image::archive::concatenate;
use crate::image::artifacts;
use crate::image::job::Notify;
use crate::spec::arch::Arch;
use crate::spec::design::Pmu;
use crate::spec::{Machine, OurMonitor, SecondPayload, SecondRequest};
use crate::{Error, Result};

/// The monitor and its guest in one boot file.
pub(super) struct Monitor<'a> {
    pub(super) machine: &'a Machine,
    /// The monitor's design.
    pub(super) pmu: Pmu,
    pub(super) monitor: &'a OurMonitor,
}

/// The file in a guest's folder to which the second guest's serial port is written.
pub(crate) const SECOND_CONSOLE: &str = "second";

impl Monitor<'_> {
    /// Returns the monitor's words on the kernel command line. The monitor takes them out.
    fn words(&self, second: Option<&SecondRequest>) -> String {
        let mut words = match self.pmu {
            Pmu::Direct => "vpmu.pmu=partitioned vpmu.interrupts=direct".to_owned(),
            pmu => format!("vpmu.pmu={pmu}"),
        };
        if let Some(count) = self.monitor.host_counters {
            words += &format!(" vpmu.host_counters={count}");
        }
        if let Some(profile) = &self.monitor.profile {
            words += &format!(" vpmu.host_profile={profile}");
            if profile.borrow {
                words += " vpmu.borrow";
            }
        }
        if let Some(slice) = second.and_then(|second| second.slice) {
            words += &format!(" vpmu.slice={slice}");
        }
        if second.is_some_and(|second| second.eager) {
            words += " vpmu.switch=eager";
        }
        words
    }
}

impl Backend for Monitor<'_> {
    fn check(&self) -> Result<()> {
        artifacts::find(self.machine.arch, artifacts::MONITOR)?;
        qemu::check(self.machine)
    }

    fn notify(&self) -> Notify {
        Notify::Doorbell
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let arch = self.machine.arch;
        let mut boot = parts.boot(arch, folder)?;
        let monitor = artifacts::find(arch, artifacts::MONITOR)?;
        let request = parts.request.second.as_ref();
        let second = request.map(|second| {
            let boot = second_boot(second, parts, arch, folder)?;
            Ok((boot, second.memory()))
        });
        let second = second.transpose()?;
        let file = boot_file::build(&monitor, &boot.kernel, second.as_ref())?;
        boot.kernel = folder.join("boot");
        fs::write(&boot.kernel, file).map_err(Error::file("write", &boot.kernel))?;
        boot.append = format!("{} {}", self.words(request), boot.append)
            .trim()
            .to_owned();
        let mut launch = qemu::launch(self.machine, self.machine.memory, boot.options())?;
        if second.is_some() {
            let mut file = OsString::from("file:");
            file.push(folder.join(SECOND_CONSOLE));
            launch.add(["-serial".into(), file]);
        }
        Ok(launch)
    }
}

/// Returns the files and the command line that the second guest boots, with its initrd written into `folder`.
fn second_boot(
    second: &SecondRequest,
    parts: &Parts<'_>,
    arch: Arch,
    folder: &Path,
) -> Result<Boot> {
    match (&second.payload, &parts.second_job, parts.images) {
        (SecondPayload::Image { image, initrd }, _, _) => Ok(Boot {
            kernel: image.clone(),
            initrd: initrd.clone(),
            append: second.append.clone(),
        }),
        (SecondPayload::Linux, Some(job), Some(images)) => {
            let initrd = folder.join("second-initrd");
            concatenate(&[&images.guest(), job], &initrd)?;
            Ok(Boot {
                kernel: images.boot_kernel(arch)?,
                initrd: Some(initrd),
                append: format!("{} {}", command_line(arch), second.append)
                    .trim()
                    .to_owned(),
            })
        }
        (SecondPayload::Linux, _, _) => unreachable!("the lab's Linux has a job, and images"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Request;

    #[test]
    fn words_for_the_monitor() {
        let machine = Request::new(Arch::Aarch64).machine;
        let words = |pmu, host_counters, profile| {
            let monitor = OurMonitor {
                host_counters,
                profile,
            };
            let (machine, monitor) = (&machine, &monitor);
            Monitor {
                machine,
                pmu,
                monitor,
            }
            .words(None)
        };
        assert_eq!(words(Pmu::Emulated, None, None), "vpmu.pmu=emulated");
        assert_eq!(
            words(Pmu::Direct, Some(0), None),
            "vpmu.pmu=partitioned vpmu.interrupts=direct vpmu.host_counters=0"
        );
        assert_eq!(
            words(Pmu::Partitioned, Some(2), "1000".parse().ok()),
            "vpmu.pmu=partitioned vpmu.host_counters=2 vpmu.host_profile=1000,0x11"
        );
    }
}
