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
use crate::spec::{Request, SecondPayload, SecondRequest};
use crate::{Error, Result};

/// The monitor and its guest in one boot file.
pub(super) struct Monitor<'a> {
    pub(super) request: &'a Request,
    /// The monitor's design.
    pub(super) pmu: Pmu,
}

/// The file in a guest's folder to which the second guest's serial port is written.
pub(crate) const SECOND_CONSOLE: &str = "second";

impl Monitor<'_> {
    /// Returns the monitor's words on the kernel command line. The monitor takes them out.
    fn words(&self) -> String {
        let mut words = match self.pmu {
            Pmu::Direct => "vpmu.pmu=partitioned vpmu.interrupts=direct".to_owned(),
            pmu => format!("vpmu.pmu={pmu}"),
        };
        if let Some(count) = self.request.kept_counters(self.pmu) {
            words += &format!(" vpmu.host_counters={count}");
        }
        if let Some(profile) = self.request.profile_of(self.pmu) {
            words += &format!(" vpmu.host_profile={profile}");
            if profile.borrow {
                words += " vpmu.borrow";
            }
        }
        if let Some(second) = &self.request.second {
            words.extend((second.slice).map(|slice| format!(" vpmu.slice={slice}")));
            if second.eager {
                words += " vpmu.switch=eager";
            }
        }
        words
    }
}

impl Backend for Monitor<'_> {
    fn check(&self) -> Result<()> {
        artifacts::find(self.request.machine.arch, artifacts::MONITOR)?;
        qemu::check(&self.request.machine)
    }

    fn notify(&self) -> Notify {
        Notify::Doorbell
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let machine = &self.request.machine;
        let arch = machine.arch;
        let mut boot = parts.boot(arch, folder)?;
        let monitor = artifacts::find(arch, artifacts::MONITOR)?;
        let second = self.request.second.as_ref().map(|second| {
            let boot = second_boot(second, parts, arch, folder)?;
            Ok((boot, second.memory()))
        });
        let second = second.transpose()?;
        let file = boot_file::build(&monitor, &boot.kernel, second.as_ref())?;
        boot.kernel = folder.join("boot");
        fs::write(&boot.kernel, file).map_err(Error::file("write", &boot.kernel))?;
        boot.append = format!("{} {}", self.words(), boot.append)
            .trim()
            .to_owned();
        let mut launch = qemu::launch(machine, machine.memory, boot.options());
        if second.is_some() {
            let mut file = OsString::from("file:");
            file.push(folder.join(SECOND_CONSOLE));
            launch.arguments.extend(["-serial".into(), file]);
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

    #[test]
    fn words_for_the_monitor() {
        let words = |pmu, host_counters, host_profile| {
            let request = &Request {
                host_counters,
                host_profile,
                ..Request::new(Arch::Aarch64)
            };
            Monitor { request, pmu }.words()
        };
        assert_eq!(words(Pmu::Emulated, 0, None), "vpmu.pmu=emulated");
        assert_eq!(
            words(Pmu::Direct, 0, None),
            "vpmu.pmu=partitioned vpmu.interrupts=direct vpmu.host_counters=0"
        );
        assert_eq!(
            words(Pmu::Partitioned, 2, "1000".parse().ok()),
            "vpmu.pmu=partitioned vpmu.host_counters=2 vpmu.host_profile=1000,0x11"
        );
    }
}
