//! The job that one run adds to a guest's images, as a second archive.

use std::path::PathBuf;

use super::artifacts;
use super::extras::Extras;
use super::program::{LOADER, put_own};
use crate::Result;
use crate::image::archive::{Archive, add_file};
use crate::spec::Request;
use crate::spec::command::{Command, quote};

const GUEST_INIT: &str = include_str!("init.sh");
const RECORDINGS: &str = include_str!("recordings.sh");

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
            put_own(&mut archive, name)?;
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

/// Returns the milliseconds to wait before the command or the guest begins.
pub(crate) fn settle_ms(phase: u32) -> u32 {
    SETTLE + PHASE * phase % 1000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::arch::Arch;

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
