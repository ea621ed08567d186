//! One command under one design: what is booted, and what came of it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::supervise::{self, Limits, Stage, Streams};
use crate::backend::boot_file;
use crate::backend::qemu::{Boot, Machine, guest_command_line, vmm_arguments};
use crate::error::STUCK;
use crate::host::cancel::Cancel;
use crate::host::tool;
use crate::image::archive::concatenate;
use crate::image::artifacts;
use crate::image::cache::{Cache, RunDir};
use crate::image::images::Images;
use crate::image::job::{HostJob, Job, Notify, Output, OwnProgram, Vmm};
use crate::report::record::{Host, Monitor, Record};
use crate::report::result::{Run, Settings, has_fair_shares};
use crate::run::console::Transcript;
use crate::spec::arch::Arch;
use crate::spec::command::{Command, quote};
use crate::spec::design::{Design, Pmu};
use crate::{Error, Result};

/// Memory that a KVM host needs beside its guest's, MiB: its own file tree,
/// twice while it is unpacked, and the guest's.
const KVM_HOST_MEMORY: u32 = 1024;
/// Less does not hold a guest's file tree, MiB.
const LEAST_MEMORY: u32 = 384;
/// More is not in vpmu-vmm's memory map, MiB.
const MOST_VMM_MEMORY: u32 = 3 << 10;
/// A stopped machine is called so after this.
const QUIET: Duration = Duration::from_secs(20);

/// What to run, on what.
#[derive(Debug, Clone)]
pub struct Experiment {
    /// The machine; for `kvm`, the guest in it.
    pub machine: Machine,
    /// Counters that a partitioning monitor keeps.
    pub host_counters: u32,
    /// `None`: the kernel runs by itself until it powers off.
    pub command: Option<Command>,
    /// How often the command runs; times and counts are means of that.
    pub runs: u32,
    /// Instead of Debian's kernel.
    pub kernel: Option<PathBuf>,
    /// Instead of our file tree; goes with no command.
    pub initrd: Option<PathBuf>,
    /// More words for the kernel command line.
    pub append: Option<String>,
    /// Files for `/root`.
    pub add: Vec<PathBuf>,
    /// Names of programs that stand beside `vpmu` and that the command calls.
    pub programs: Vec<&'static str>,
    /// At which moment of the kernel's ticks the command begins, and a KVM
    /// host's guest.
    pub phase: u32,
    /// Wall-clock limit for one design.
    pub timeout: Duration,
    /// Wall-clock limit for the boot.
    pub boot_timeout: Duration,
    /// Where logs are kept, a folder for each design.
    pub keep: Option<PathBuf>,
    /// The command itself marks the parts that are to be measured (`meter
    /// --doorbell`), each with some rest behind it, and the KVM host counts by
    /// tracepoints meanwhile.
    pub marked: bool,
    /// In the lab's own KVM host even where this machine's KVM could run the
    /// guest.
    pub nested: bool,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// The figures; `None` when no command ran.
    pub run: Option<Run>,
    /// What the monitor said, when there is one.
    pub monitor: Option<Monitor>,
    /// Wall-clock time of the whole.
    pub wall: Duration,
    /// Wall-clock time until the command began.
    pub boot_wall: Option<Duration>,
}

/// How the command's output is treated.
pub struct Sink {
    /// Whether it is kept until the command is over.
    pub output: Output,
    /// Where it goes.
    pub to: Box<dyn Write + Send>,
}

impl Experiment {
    /// Whether Debian packages are needed for it.
    pub fn needs_images(&self, designs: &[Design]) -> bool {
        self.command.is_some()
            || self.kernel.is_none()
            || designs.iter().any(|design| self.has_kvm_host(design.pmu))
    }

    /// Whether the machine holds a KVM host that starts the guest.
    fn has_kvm_host(&self, pmu: Pmu) -> bool {
        match self.machine.arch {
            Arch::Aarch64 => pmu == Pmu::Kvm,
            Arch::X86_64 => pmu != Pmu::Native && !self.is_direct(pmu),
        }
    }

    /// Whether its time is counted instructions.
    fn is_counted(&self, pmu: Pmu) -> bool {
        !self.machine.realtime && !self.is_direct(pmu)
    }

    /// Whether the guest runs in this machine's own KVM.
    fn is_direct(&self, pmu: Pmu) -> bool {
        self.machine.arch.has_hardware_kvm() && pmu == Pmu::Emulated && !self.marked && !self.nested
    }

    /// Whether all do: others are not to be compared with one that does.
    pub fn are_direct(&self, designs: &[Design]) -> bool {
        designs.iter().all(|design| self.is_direct(design.pmu))
    }

    fn saves(&self) -> bool {
        let saves = |word: &String| word.starts_with("--save");
        self.machine.vmm_args.iter().any(saves)
    }

    /// Checks what can be checked before anything is downloaded or booted.
    ///
    /// # Errors
    ///
    /// When options contradict each other or a file is missing.
    pub fn check(&self, designs: &[Design]) -> Result<()> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        let arch = self.machine.arch;
        let any = |pmu: Pmu| designs.iter().any(|design| design.pmu == pmu);
        if let Some(design) = designs
            .iter()
            .find(|design| !arch.designs().contains(&design.pmu))
        {
            let names: Vec<&str> = arch.designs().iter().map(|pmu| pmu.name()).collect();
            return Err(Error::Usage(format!(
                "--pmu {} does not exist on {arch}; there are {}",
                design.pmu,
                names.join(", ")
            )));
        }
        if arch == Arch::Aarch64 && designs.iter().any(|design| design.policy.is_some()) {
            return usage("--policy is about --arch x86_64 --pmu emulated");
        }
        let has_vmm = arch == Arch::X86_64 && any(Pmu::Emulated);
        if !has_vmm && !self.machine.vmm_args.is_empty() {
            return usage("--vmm-arg is about --arch x86_64 --pmu emulated");
        }
        if let Some(word) = self
            .machine
            .vmm_args
            .iter()
            .find(|word| word.contains(char::is_whitespace))
        {
            return Err(Error::Usage(format!(
                "--vmm-arg takes one word, without a space in it: {word}"
            )));
        }
        let mut words = self.machine.vmm_args.iter();
        if words.any(|word| word == "--save" || word.starts_with("--restore")) {
            return usage(
                "--vmm-arg takes --save=FILE as one word; vpmu-vmm --restore runs by itself only",
            );
        }
        if has_vmm && self.machine.memory > MOST_VMM_MEMORY {
            return usage("--memory is too large: vpmu-vmm's guests have at most 3G");
        }
        let words = || {
            self.append
                .iter()
                .flat_map(|words| words.split_whitespace())
        };
        if let Some(word) = words().find(|word| word.starts_with("vpmu.")) {
            return Err(Error::Usage(format!(
                "--append {word} would contradict --pmu and --host-counters: use those"
            )));
        }
        if self.are_direct(designs) && !self.machine.qemu_args.is_empty() {
            return usage("--qemu-arg: this machine's own KVM runs the guest, without QEMU");
        }
        if self.are_direct(designs) && self.saves() {
            return usage(
                "--vmm-arg=--save=FILE goes on with the saved guest in the lab's own KVM host only; here \
                 run vpmu-vmm itself",
            );
        }
        if self.command.is_none() && self.kernel.is_none() {
            return usage("nothing to run: give a command after --, or --kernel FILE");
        }
        if self.command.is_some() && self.initrd.is_some() {
            return usage("a command runs in vpmu's own initrd: give either --initrd or a command");
        }
        if self.command.is_none() && any(Pmu::Kvm) {
            return usage("kvm needs a command: its machine holds a host that starts the guest");
        }
        if self.command.is_none() && !self.add.is_empty() {
            return usage("--add puts files into vpmu's own initrd: it needs a command");
        }
        if self.command.is_none() && self.runs > 1 {
            return usage("--runs repeats a command: give one after --");
        }
        if !(1..=8).contains(&self.machine.vcpus) {
            return usage("--vcpus takes a number from 1 to 8");
        }
        if !(1..=100).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 100");
        }
        if self.command.is_some() && self.machine.memory < LEAST_MEMORY {
            return Err(Error::Usage(format!(
                "--memory is too small for a guest: give at least {LEAST_MEMORY}M"
            )));
        }
        if self.host_counters > 0 && !any(Pmu::Partitioned) {
            return usage("--host-counters is about --pmu partitioned");
        }
        for path in self.kernel.iter().chain(&self.initrd).chain(&self.add) {
            let file = File::open(path).map_err(Error::file("open", path))?;
            if file.metadata().is_ok_and(|file| file.is_dir()) {
                return Err(Error::Usage(format!("{} is a folder", path.display())));
            }
        }
        if self.command.is_some() {
            artifacts::find(arch, artifacts::METER)?;
        }
        for program in &self.programs {
            artifacts::find_beside(program)?;
        }
        if designs.iter().any(|design| design.pmu.is_ours()) {
            match arch {
                Arch::Aarch64 => artifacts::find(arch, artifacts::MONITOR)?,
                Arch::X86_64 => artifacts::find_beside(artifacts::VMM)?,
            };
        }
        if self.are_direct(designs) {
            return Ok(());
        }
        supervise::qemu_command(arch, &[]).map(drop)
    }

    /// Boots the machine under `design`, runs the command, and gives the
    /// figures. `images` is there when [`Experiment::needs_images`] says so.
    ///
    /// # Errors
    ///
    /// When the lab or the guest fails; never because the command did.
    pub fn run(
        &self,
        design: Design,
        cache: &Cache,
        images: Option<&Images>,
        sink: Sink,
        cancel: &Cancel,
        stage: &mut dyn FnMut(Stage),
    ) -> Result<Outcome> {
        let folder = cache.run_dir()?;
        let (program, arguments, command) = if self.is_direct(design.pmu) {
            let boot = self.direct(&folder, images, sink.output)?;
            let program = artifacts::find_beside(artifacts::VMM)?;
            let arguments = boot.vmm_arguments(&self.machine, design.policy.unwrap_or_default());
            let mut command = tool::bound_to_us(&program)?;
            command.args(&arguments);
            (program, arguments, command)
        } else {
            let (machine, boot) = self.boot(design, &folder, images, sink.output)?;
            let arguments = machine.arguments(&boot);
            let command = supervise::qemu_command(machine.arch, &arguments)?;
            (machine.arch.qemu().program.into(), arguments, command)
        };
        let keep = self.keep_folder(design)?;
        if let Some(keep) = &keep {
            let words: Vec<String> = std::iter::once(program.display().to_string())
                .chain(arguments.iter().map(|word| quote(&word.to_string_lossy())))
                .collect();
            let path = keep.join("command.txt");
            fs::write(&path, words.join(" ") + "\n").map_err(Error::file("write", &path))?;
        }
        let log = keep
            .as_ref()
            .map(|keep| {
                let path = keep.join("console.log");
                File::create(&path).map_err(Error::file("create", &path))
            })
            .transpose()?;

        let start = Instant::now();
        let mut boot_wall = None;
        let ran = supervise::run(
            command,
            &program.display().to_string(),
            Streams {
                output: sink.to,
                log,
                raw: self.command.is_none(),
            },
            self.limits(design),
            cancel,
            &mut |now| {
                if now == Stage::Command {
                    boot_wall = Some(start.elapsed());
                }
                stage(now);
            },
        );
        let transcript = ran.map_err(|error| self.explain(design, error))?;
        if let Some(keep) = &keep {
            keep_records(keep, &transcript.records)?;
        }
        Ok(Outcome {
            run: self
                .figures(design, &transcript)
                .map_err(|error| self.explain(design, error))?,
            monitor: transcript
                .records
                .into_iter()
                .find_map(|record| match record {
                    Record::VpmuMonitor(monitor) => Some(*monitor),
                    _ => None,
                }),
            wall: start.elapsed(),
            boot_wall,
        })
    }

    fn limits(&self, design: Design) -> Limits {
        Limits {
            total: self.timeout,
            boot: self.command.is_some().then_some(self.boot_timeout),
            quiet: self.is_counted(design.pmu).then_some(QUIET),
        }
    }

    /// Names what is known to go wrong in QEMU and is not the guest's fault.
    fn explain(&self, design: Design, error: Error) -> Error {
        let counted = self.is_counted(design.pmu);
        let nested = self.machine.arch == Arch::X86_64 && design.pmu != Pmu::Native;
        match error {
            // What comes of a register restored twice; other panics say what they are.
            Error::Panic { line, console }
                if counted && nested && line.contains("Fatal exception") =>
            {
                Error::RepeatedInterrupt { line, console }
            }
            Error::Stuck { console } if counted && nested => Error::RepeatedInterrupt {
                line: STUCK.to_owned(),
                console,
            },
            error => error,
        }
    }

    /// What this machine's own KVM boots.
    fn direct(&self, folder: &RunDir, images: Option<&Images>, output: Output) -> Result<Boot> {
        let arch = self.machine.arch;
        let kernel = match (&self.kernel, images) {
            (Some(kernel), _) => kernel.clone(),
            (None, Some(images)) => images.kernel(),
            (None, None) => unreachable!("check() asks for a kernel"),
        };
        let Some((command, images)) = self.command.as_ref().zip(images) else {
            return Ok(Boot {
                kernel,
                initrd: self.initrd.clone(),
                append: self.append.clone().unwrap_or_default(),
            });
        };
        let job = folder.path().join("job.cpio");
        self.job(command, output, Notify::Doorbell)?
            .archive()?
            .write_file(&job)?;
        let initrd = folder.path().join("initrd");
        concatenate(&[&images.guest(), &job], &initrd)?;
        Ok(Boot {
            kernel,
            initrd: Some(initrd),
            append: guest_command_line(arch, self.append.as_deref()),
        })
    }

    fn job(&self, command: &Command, output: Output, notify: Notify) -> Result<Job> {
        let programs = self.programs.iter();
        Ok(Job {
            arch: self.machine.arch,
            command: command.clone(),
            runs: self.runs,
            output,
            notify,
            add: self.add.clone(),
            programs: programs
                .map(|name| OwnProgram::find(name))
                .collect::<Result<_>>()?,
            phase: self.phase,
        })
    }

    /// Puts together what QEMU boots.
    fn boot(
        &self,
        design: Design,
        folder: &RunDir,
        images: Option<&Images>,
        output: Output,
    ) -> Result<(Machine, Boot)> {
        let mut machine = self.machine.clone();
        let arch = machine.arch;
        let pmu = design.pmu;
        let kernel = match (&self.kernel, images) {
            (Some(kernel), _) => kernel.clone(),
            (None, Some(images)) => images.kernel(),
            (None, None) => unreachable!("check() asks for a kernel"),
        };
        let mut append = match &self.command {
            Some(_) => guest_command_line(arch, self.append.as_deref()),
            None => self.append.clone().unwrap_or_default(),
        };
        let mut initrd = self.initrd.clone();
        let mut job_file = None;
        if let Some(command) = &self.command {
            let notify = match pmu {
                _ if self.marked => Notify::Nobody,
                Pmu::Native => Notify::Nobody,
                Pmu::Kvm => Notify::KvmHost,
                Pmu::Emulated | Pmu::Partitioned | Pmu::Untrapped => Notify::Doorbell,
            };
            let path = folder.path().join("job.cpio");
            self.job(command, output, notify)?
                .archive()?
                .write_file(&path)?;
            job_file = Some(path);
        }
        let whole = folder.path().join("initrd");
        let kernel = match images {
            Some(images) if self.has_kvm_host(pmu) => {
                let (vmm, options) = if pmu == Pmu::Kvm {
                    (Vmm::Qemu(arch.qemu().program), machine.kvm_arguments())
                } else {
                    let policy = design.policy.unwrap_or_default();
                    (Vmm::ours()?, vmm_arguments(&machine, policy))
                };
                let host_file = folder.path().join("host.cpio");
                HostJob {
                    vmm,
                    options: &options,
                    append: &append,
                    vcpus: machine.vcpus,
                    skew: has_fair_shares(arch, pmu, !machine.realtime),
                    trace: self.marked,
                    phase: self.phase,
                    guest: job_file,
                    initrd: initrd.take(),
                    kernel: self.kernel.clone(),
                }
                .archive()
                .write_file(&host_file)?;
                concatenate(&[&images.kvm_host(), &host_file], &whole)?;
                initrd = Some(whole);
                // A saved guest is a file, beside the guest that is made of it.
                if self.saves() {
                    machine.memory *= 3;
                }
                machine.memory += KVM_HOST_MEMORY;
                append = guest_command_line(arch, None);
                images.kernel()
            }
            _ => {
                if let Some((job_file, images)) = job_file.zip(images) {
                    concatenate(&[&images.guest(), &job_file], &whole)?;
                    initrd = Some(whole);
                }
                if pmu.is_ours() {
                    let path = folder.path().join("boot");
                    let monitor = artifacts::find(arch, artifacts::MONITOR)?;
                    let file = boot_file::build(&monitor, &kernel)?;
                    fs::write(&path, file).map_err(Error::file("write", &path))?;
                    append = format!("{} {append}", self.monitor_words(pmu));
                    path
                } else {
                    kernel
                }
            }
        };
        Ok((
            machine,
            Boot {
                kernel,
                initrd,
                append: append.trim().to_owned(),
            },
        ))
    }

    fn monitor_words(&self, design: Pmu) -> String {
        let words = format!("vpmu.pmu={design}");
        if design == Pmu::Partitioned {
            format!("{words} vpmu.host_counters={}", self.host_counters)
        } else {
            words
        }
    }

    fn keep_folder(&self, design: Design) -> Result<Option<PathBuf>> {
        let Some(keep) = &self.keep else {
            return Ok(None);
        };
        let folder = keep.join(design.to_string());
        fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
        Ok(Some(folder))
    }

    fn figures(&self, design: Design, transcript: &Transcript) -> Result<Option<Run>> {
        let stuck = |record: &Record| matches!(record, Record::Host(host) if host.stuck);
        if transcript.records.iter().any(stuck) {
            return Err(Error::Stuck {
                console: transcript.last_lines(),
            });
        }
        let bad_end = supervise::ended_badly(transcript);
        let complete = match self.command {
            Some(_) => transcript.ended && has_meter(&transcript.records),
            None => bad_end.is_none() && self.host_is_content(design, transcript),
        };
        if !complete {
            return Err(bad_end.unwrap_or_else(|| self.silent_end(design, transcript)));
        }
        let Some(command) = &self.command else {
            return Ok(None);
        };
        let settings = Settings {
            arch: self.machine.arch,
            design,
            vcpus: self.machine.vcpus,
            runs: self.runs,
            deterministic: self.is_counted(design.pmu),
            direct: self.is_direct(design.pmu),
            command: command.as_line(),
        };
        Ok(Run::from_records(&settings, &transcript.records))
    }

    /// Whether the machine's KVM host, if it has one, says that its VMM ended well.
    fn host_is_content(&self, design: Design, transcript: &Transcript) -> bool {
        !self.has_kvm_host(design.pmu) || host(transcript).is_some_and(|host| host.status == 0)
    }

    /// What an end without figures is that nobody complained about.
    fn silent_end(&self, design: Design, transcript: &Transcript) -> Error {
        let console = transcript.last_lines();
        let how = match host(transcript) {
            None if self.has_kvm_host(design.pmu) => {
                return Error::HostReset { console };
            }
            Some(Host { vmm, status, .. }) if *status != 0 => {
                format!("{vmm} ended with status {status}")
            }
            _ => "it powered off or was reset".to_owned(),
        };
        Error::NoReport { how, console }
    }
}

/// What the KVM host said.
fn host(transcript: &Transcript) -> Option<&Host> {
    transcript.records.iter().find_map(|record| match record {
        Record::Host(host) => Some(host),
        _ => None,
    })
}

fn has_meter(records: &[Record]) -> bool {
    records
        .iter()
        .any(|record| matches!(record, Record::Meter(_)))
}

fn keep_records(folder: &Path, records: &[Record]) -> Result<()> {
    let path = folder.join("records.json");
    let text = serde_json::to_vec_pretty(records).expect("records are plain data");
    fs::write(&path, text).map_err(Error::file("write", &path))
}

#[cfg(test)]
mod tests;
