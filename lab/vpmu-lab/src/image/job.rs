//! The job that one run adds to a guest's images, as a second archive.

use std::path::{Path, PathBuf};

use vpmu_measure::HostVmm;

use super::artifacts;
use super::disk::BootDisk;
use super::extras::Extras;
use super::host_kernel::HostKernel;
use super::program::{LOADER, OwnProgram};
use super::theirs::{self, TheirProgram};
use crate::Result;
use crate::image::archive::{Archive, add_file};
use crate::spec::arch::Arch;
use crate::spec::command::{Command, quote};
use crate::spec::{OurVmm, Request, disturbance};

const GUEST_INIT: &str = include_str!("init.sh");
const RECORDINGS: &str = include_str!("recordings.sh");

/// Options for the VMM that restores a saved guest. No other VMM gets them.
const RESTORING: &[&str] = &["--drop-paravirt"];

/// The console of a system of the lab's.
pub(crate) const CONSOLE: &str = "/dev/console";

/// The treatment of the command's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// The output is printed as it comes.
    Stream,
    /// The output is kept, and printed afterwards.
    Buffer,
}

/// The way in which `meter` tells the world outside that the command begins and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notify {
    /// `meter` tells nobody.
    Nobody,
    /// `meter` rings the doorbell of this project's hypervisor.
    Doorbell,
    /// `meter` tells the KVM host, through the second serial port.
    KvmHost,
    /// `meter` rings a doorbell that perhaps nobody has, which the KVM host sees by its tracepoints.
    Tracepoints,
}

/// One job for a guest.
#[derive(Debug, Clone)]
pub(crate) struct Job<'a> {
    pub(crate) command: &'a Command,
    /// What surrounds the command.
    pub(crate) request: &'a Request,
    /// Linux modules of this project's that are loaded before the command.
    pub(crate) modules: &'a [PathBuf],
    /// More of Debian's packages.
    pub(crate) extras: Option<&'a Extras>,
    pub(crate) output: Output,
    /// The terminal that the lab listens to.
    pub(crate) console: &'a str,
    /// The recipient of `meter`'s messages.
    pub(crate) notify: Notify,
    /// Selects the moment of the kernel's ticks at which the command begins: each
    /// number is another moment.
    pub(crate) phase: u32,
    /// Whether the guest's machine may have no switch to power off.
    pub(crate) resets: bool,
}

/// The VMM of a guest in the KVM host.
#[derive(Debug, Clone)]
pub(crate) enum Vmm {
    /// Stock QEMU of this name, from the host's packages.
    Qemu(&'static str),
    /// The same, under `vpmu exec`.
    Exec { qemu: &'static str, exec: Exec },
    /// A QEMU that embeds the PMU.
    Patched(OwnProgram),
    /// This project's x86 VMM.
    Ours(OwnProgram),
    /// The user's VMM.
    Theirs {
        program: TheirProgram,
        /// `vpmu exec`, where the program runs under it.
        exec: Option<Exec>,
    },
}

/// `vpmu exec` in the KVM host.
#[derive(Debug, Clone)]
pub(crate) struct Exec {
    options: Vec<String>,
    vpmu: OwnProgram,
    preload: OwnProgram,
}

/// The settings that the KVM host gets for its guest.
#[derive(Debug, Clone)]
pub(crate) struct HostJob<'a> {
    pub(crate) arch: Arch,
    pub(crate) vmm: Vmm,
    /// What the host itself reads.
    pub(crate) settings: vpmu_measure::HostJob,
    /// The guest's own job, an archive on the disk. Without a job, the guest has no initrd from the
    /// lab.
    pub(crate) guest: Option<&'a Path>,
    /// The user's initrd for the guest, instead of the lab's.
    pub(crate) initrd: Option<&'a Path>,
    /// A kernel for the guest instead of the host's own.
    pub(crate) kernel: Option<&'a Path>,
    /// The guest's kernel as an ELF file, where the VMM asks for one.
    pub(crate) unpacked: Option<&'a Path>,
    /// The host's kernel, where that hands the PMU over to the guest.
    pub(crate) mediates: Option<&'a HostKernel>,
    /// The disk that the guest boots from, instead of a kernel.
    pub(crate) disk: Option<&'a BootDisk>,
}

/// The places of UEFI's code and variables in the KVM host.
pub(crate) const HOST_UEFI: [&str; 2] = ["guest/uefi-code.fd", "guest/uefi-variables.fd"];

/// Milliseconds of rest after a boot. Under `-icount` an idle machine
/// skips to the next event, so this costs next to nothing.
const SETTLE: u32 = 1000;
/// Milliseconds between two phases. The number is no multiple of a tick.
const PHASE: u32 = 37;

impl Job<'_> {
    /// Makes the archive with this job.
    pub(crate) fn archive(&self) -> Result<Archive> {
        let arch = self.request.machine.arch;
        let (meter, control) = match self.notify {
            Notify::Nobody => ("", self.console.to_owned()),
            Notify::Doorbell => ("--doorbell", self.console.to_owned()),
            Notify::Tracepoints => ("--ring", self.console.to_owned()),
            Notify::KvmHost => ("--sync", format!("/dev/{}", arch.serial(1))),
        };
        let (output, place) = match self.output {
            Output::Stream => ("stream", self.console),
            Output::Buffer => ("buffer", "/vpmu/output"),
        };
        let program = |name| artifacts::find(arch, name);
        let settings = format!(
            "output={output}\nmeter={meter}\ncontrol={control}\nsettle={:.3}\nprofile={}\nreset={}\n",
            f64::from(settle_ms(self.phase)) / 1000.0,
            if self.request.profile { "yes" } else { "" },
            if self.resets { "yes" } else { "" },
        );
        let mut archive = Archive::default();
        if let Some(extras) = self.extras {
            extras.put(&mut archive)?;
        }
        archive
            .bytes("init", 0o755, GUEST_INIT)
            .copy("usr/bin/meter", 0o755, program(artifacts::METER)?)
            .copy("usr/bin/workload", 0o755, program(artifacts::WORKLOAD)?)
            .bytes("vpmu/job", 0o644, settings)
            .bytes("vpmu/recordings.sh", 0o644, RECORDINGS)
            .bytes("vpmu/run", 0o644, self.script(place));
        for path in self.modules {
            add_file(&mut archive, "vpmu/modules", path)?;
        }
        for path in &self.request.add {
            add_file(&mut archive, "root", path)?;
        }
        for name in &self.request.programs {
            OwnProgram::find(name)?.put(&mut archive);
            let script = format!(
                "#!/usr/bin/busybox sh\nexec /vpmu/lib/{LOADER} --library-path /vpmu/lib /vpmu/{name} \"$@\"\n"
            );
            archive.bytes(&format!("usr/bin/{name}"), 0o755, script);
        }
        Ok(archive)
    }

    /// Returns the script that meter runs. A single run costs no process beside the command's own
    /// shell. For several runs, the script sets what each has recorded aside.
    fn script(&self, output: &str) -> String {
        let redirect = format!("exec < /dev/null > {output} 2>&1");
        let command = self.command.as_line();
        let Some(more @ 1..) = self.request.runs.checked_sub(1) else {
            return format!("{redirect}\n{command}\n");
        };
        format!(
            "{redirect}\n\
             . /vpmu/recordings.sh\n\
             for run in $(seq {more}); do\n\
             sh -c {line} || exit\n\
             [ $run -gt 1 ] || recordings > /vpmu/recordings\n\
             while read -r file; do mv \"$file\" /vpmu/perf.$((aside += 1)); done < /vpmu/recordings\n\
             done\n\
             {command}\n",
            line = quote(command)
        )
    }
}

impl Vmm {
    /// Finds the VMM of this project that was built on this machine.
    pub(crate) fn ours() -> Result<Self> {
        OwnProgram::find(artifacts::VMM).map(Self::Ours)
    }

    /// Finds the QEMU that embeds the PMU.
    pub(crate) fn patched() -> Result<Self> {
        let program = artifacts::find_patched_qemu()?;
        OwnProgram::at(artifacts::PATCHED_QEMU, program).map(Self::Patched)
    }

    /// Returns what the host reads of the VMM, which takes from `options` those that are the host's.
    pub(crate) fn in_host(&self, options: &mut Vec<String>) -> HostVmm {
        let save = options.iter().find_map(|word| word.strip_prefix("--save="));
        let save = save.map(str::to_owned);
        let is_restoring = |word: &mut String| RESTORING.contains(&word.as_str());
        let restore = options.extract_if(.., |word| save.is_some() && is_restoring(word));
        let restore = restore.collect();
        let disturb = options.iter().find_map(|word| disturbance(word));
        options.retain(|word| disturbance(word).is_none());
        match self {
            Self::Qemu(name) => HostVmm::Qemu((*name).to_owned()),
            Self::Exec { qemu, exec } => HostVmm::Exec {
                qemu: (*qemu).to_owned(),
                options: exec.options.clone(),
            },
            Self::Patched(program) => HostVmm::Patched {
                name: program.name.to_owned(),
                disturb,
            },
            Self::Ours(_) => HostVmm::Ours { save, restore },
            Self::Theirs { program, exec } => HostVmm::Theirs {
                program: program.place(),
                exec: exec.as_ref().map(|exec| exec.options.clone()),
            },
        }
    }
}

impl Exec {
    /// Finds `vpmu` and its library, for a guest with this PMU.
    pub(crate) fn find(vmm: &OurVmm) -> Result<Self> {
        let mut options = vec![
            format!("--pmu={}", vmm.model.name()),
            format!("--policy={}", vmm.policy.name()),
            // With the VMM's own output, as the guest's console is.
            "--statistics=-".to_owned(),
        ];
        options.extend((vmm.backing).map(|backing| format!("--backing={}", backing.name())));
        options.extend(vmm.perfmon.map(|version| format!("--perfmon={version}")));
        Ok(Self {
            options,
            vpmu: OwnProgram::find(artifacts::VPMU)?,
            preload: OwnProgram::at(artifacts::PRELOAD, artifacts::find_preload()?)?,
        })
    }

    fn put(&self, archive: &mut Archive, arch: Arch) {
        self.vpmu.put(archive);
        self.preload.put(archive);
        // The C library of the VMM serves the library in it. What else it needs is on each Debian.
        self.preload.put_library(archive, "libgcc_s.so.1", arch);
    }
}

impl HostJob<'_> {
    /// Makes the archive with this job.
    pub(crate) fn archive(&self) -> Result<Archive> {
        let init = artifacts::find(self.arch, artifacts::KVM_HOST)?;
        let mut archive = Archive::default();
        archive.copy("init", 0o755, init).bytes(
            vpmu_measure::HostJob::PATH,
            0o644,
            self.settings.to_json(),
        );
        match &self.vmm {
            Vmm::Qemu(_) => {}
            Vmm::Exec { exec, .. } => exec.put(&mut archive, self.arch),
            Vmm::Theirs { program, exec } => {
                if let Some(exec) = exec {
                    exec.put(&mut archive, self.arch);
                }
                program.put(&mut archive, self.arch)?;
            }
            Vmm::Patched(program) | Vmm::Ours(program) => program.put(&mut archive),
        }
        if let Some(kernel) = self.mediates {
            kernel.put_modules(&mut archive)?;
        }
        if let Some(disk) = self.disk {
            // The host loads modules in the order of their names.
            archive.copy("vpmu/modules/9-virtio_blk.ko.xz", 0o644, &disk.driver);
            for (place, path) in HOST_UEFI.into_iter().zip(disk.uefi.iter().flatten()) {
                archive.copy(place, 0o644, path);
            }
        }
        let files = [
            ("guest/job.cpio", self.guest),
            ("guest/own.cpio", self.initrd),
            ("guest/kernel", self.kernel),
            (theirs::UNPACKED_PLACE, self.unpacked),
        ];
        for (place, path) in files {
            if let Some(path) = path {
                archive.copy(place, 0o644, path);
            }
        }
        Ok(archive)
    }
}

/// Returns the milliseconds to wait before the command or the guest begins.
pub(crate) fn settle_ms(phase: u32) -> u32 {
    SETTLE + PHASE * phase % 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_valid_shell() {
        let script = |runs| {
            let request = Request {
                runs,
                profile: true,
                ..Request::new(Arch::Aarch64)
            };
            let job = Job {
                command: &Command::from_words(&["echo 'it'".to_owned()]).unwrap(),
                request: &request,
                modules: &[],
                extras: None,
                output: Output::Buffer,
                console: CONSOLE,
                notify: Notify::Nobody,
                phase: 0,
                resets: false,
            };
            job.script("/vpmu/output")
        };
        let (once, thrice) = (script(1), script(3));
        assert_eq!(once, "exec < /dev/null > /vpmu/output 2>&1\necho 'it'\n");
        assert!(thrice.contains("$(seq 2)"), "{thrice}");
        for script in [GUEST_INIT, &once, &thrice] {
            let status = std::process::Command::new("sh")
                .args(["-n", "-c", script])
                .status()
                .unwrap();
            assert!(status.success());
        }
    }
}
