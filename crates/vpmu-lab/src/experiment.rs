//! One command under one design: what is booted, and what came of it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::archive::concatenate;
use crate::cache::{Cache, RunDir};
use crate::cancel::Cancel;
use crate::console::Transcript;
use crate::design::Pmu;
use crate::guest::artifacts;
use crate::guest::images::Images;
use crate::guest::job::{Command, HostJob, Job, Notify, Output, quote};
use crate::machine::{Boot, Machine, QEMU, guest_command_line};
use crate::record::{Monitor, Record};
use crate::result::{Run, Settings};
use crate::supervise::{self, Limits, Stage, Streams};
use crate::{Error, Result, boot_file};

/// Memory that a KVM host needs beside its guest's, MiB: its own file tree,
/// twice while it is unpacked, and the guest's.
const KVM_HOST_MEMORY: u32 = 1024;
/// Less does not hold a guest's file tree, MiB.
const LEAST_MEMORY: u32 = 384;
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
    /// Wall-clock limit for one design.
    pub timeout: Duration,
    /// Wall-clock limit for the boot.
    pub boot_timeout: Duration,
    /// Where logs are kept, a folder for each design.
    pub keep: Option<PathBuf>,
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
    pub fn needs_images(&self, designs: &[Pmu]) -> bool {
        self.command.is_some() || self.kernel.is_none() || designs.contains(&Pmu::Kvm)
    }

    /// Checks what can be checked before anything is downloaded or booted.
    ///
    /// # Errors
    ///
    /// When options contradict each other or a file is missing.
    pub fn check(&self, designs: &[Pmu]) -> Result<()> {
        let usage = |text: &str| Err(Error::Usage(text.to_owned()));
        if self.command.is_none() && self.kernel.is_none() {
            return usage("nothing to run: give a command after --, or --kernel FILE");
        }
        if self.command.is_some() && self.initrd.is_some() {
            return usage("a command runs in vpmu's own initrd: give either --initrd or a command");
        }
        if self.command.is_none() && designs.contains(&Pmu::Kvm) {
            return usage("kvm needs a command: its machine holds a host that starts the guest");
        }
        if self.command.is_none() && !self.add.is_empty() {
            return usage("--add puts files into vpmu's own initrd: it needs a command");
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
        if self.host_counters > 0 && !designs.contains(&Pmu::Partitioned) {
            return usage("--host-counters is about --pmu partitioned");
        }
        for path in self.kernel.iter().chain(&self.initrd).chain(&self.add) {
            File::open(path).map_err(Error::file("open", path))?;
        }
        if self.command.is_some() {
            artifacts::find(artifacts::METER)?;
        }
        if designs.iter().any(|design| design.has_monitor()) {
            artifacts::find(artifacts::MONITOR)?;
        }
        supervise::qemu_command(&[]).map(drop)
    }

    /// Boots the machine under `design`, runs the command, and gives the
    /// figures. `images` is there when [`Experiment::needs_images`] says so.
    ///
    /// # Errors
    ///
    /// When the lab or the guest fails; never because the command did.
    pub fn run(
        &self,
        design: Pmu,
        cache: &Cache,
        images: Option<&Images>,
        sink: Sink,
        cancel: &Cancel,
        stage: &mut dyn FnMut(Stage),
    ) -> Result<Outcome> {
        let folder = cache.run_dir()?;
        let (machine, boot) = self.boot(design, &folder, images, sink.output)?;
        let arguments = machine.arguments(&boot);
        let keep = self.keep_folder(design)?;
        if let Some(keep) = &keep {
            let words: Vec<String> = std::iter::once(QEMU.to_owned())
                .chain(arguments.iter().map(|word| quote(&word.to_string_lossy())))
                .collect();
            let path = keep.join("qemu-command.txt");
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
        let transcript = supervise::run(
            supervise::qemu_command(&arguments)?,
            Streams {
                output: sink.to,
                log,
                raw: self.command.is_none(),
            },
            self.limits(),
            cancel,
            &mut |now| {
                if now == Stage::Command {
                    boot_wall = Some(start.elapsed());
                }
                stage(now);
            },
        )?;
        if let Some(keep) = &keep {
            keep_records(keep, &transcript.records)?;
        }
        Ok(Outcome {
            run: self.figures(design, &transcript)?,
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

    fn limits(&self) -> Limits {
        Limits {
            total: self.timeout,
            boot: self.command.is_some().then_some(self.boot_timeout),
            quiet: (!self.machine.realtime).then_some(QUIET),
        }
    }

    /// Puts together what QEMU boots.
    fn boot(
        &self,
        design: Pmu,
        folder: &RunDir,
        images: Option<&Images>,
        output: Output,
    ) -> Result<(Machine, Boot)> {
        let mut machine = self.machine.clone();
        let kernel = match (&self.kernel, images) {
            (Some(kernel), _) => kernel.clone(),
            (None, Some(images)) => images.kernel(),
            (None, None) => unreachable!("check() asks for a kernel"),
        };
        let mut append = match &self.command {
            Some(_) => guest_command_line(self.append.as_deref()),
            None => self.append.clone().unwrap_or_default(),
        };
        let mut initrd = self.initrd.clone();
        if let (Some(command), Some(images)) = (&self.command, images) {
            let job = Job {
                command: command.clone(),
                runs: self.runs,
                output,
                notify: match design {
                    Pmu::Native => Notify::Nobody,
                    Pmu::Kvm => Notify::KvmHost,
                    Pmu::Emulated | Pmu::Partitioned | Pmu::Untrapped => Notify::Monitor,
                },
                add: self.add.clone(),
            };
            let job_file = folder.path().join("job.cpio");
            job.archive()?.write_file(&job_file)?;
            let whole = folder.path().join("initrd");
            if design == Pmu::Kvm {
                let host_file = folder.path().join("host.cpio");
                HostJob {
                    qemu: &machine.kvm_arguments(),
                    append: &append,
                    vcpus: machine.vcpus,
                    guest: job_file,
                    kernel: self.kernel.clone(),
                }
                .archive()
                .write_file(&host_file)?;
                concatenate(&[&images.kvm_host(), &host_file], &whole)?;
                machine.memory += KVM_HOST_MEMORY;
                append = guest_command_line(None);
            } else {
                concatenate(&[&images.guest(), &job_file], &whole)?;
            }
            initrd = Some(whole);
        }
        let kernel = match (design, images) {
            (Pmu::Native, _) => kernel,
            (Pmu::Kvm, Some(images)) => images.kernel(),
            (Pmu::Kvm, None) => unreachable!("check() asks for a command"),
            (Pmu::Emulated | Pmu::Partitioned | Pmu::Untrapped, _) => {
                let path = folder.path().join("boot");
                let file = boot_file::build(&artifacts::find(artifacts::MONITOR)?, &kernel)?;
                fs::write(&path, file).map_err(Error::file("write", &path))?;
                append = format!("{} {append}", self.monitor_words(design));
                path
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

    fn keep_folder(&self, design: Pmu) -> Result<Option<PathBuf>> {
        let Some(keep) = &self.keep else {
            return Ok(None);
        };
        let folder = keep.join(design.name());
        fs::create_dir_all(&folder).map_err(Error::file("create", &folder))?;
        Ok(Some(folder))
    }

    fn figures(&self, design: Pmu, transcript: &Transcript) -> Result<Option<Run>> {
        let Some(command) = &self.command else {
            return supervise::ended_badly(transcript).map_or(Ok(None), Err);
        };
        let complete = transcript.ended && has_meter(&transcript.records);
        if !complete {
            return Err(
                supervise::ended_badly(transcript).unwrap_or_else(|| Error::NoReport {
                    what: "what the command did",
                    console: transcript.last_lines(),
                }),
            );
        }
        let settings = Settings {
            pmu: design,
            vcpus: self.machine.vcpus,
            runs: self.runs,
            deterministic: !self.machine.realtime,
            command: command.as_line(),
        };
        Ok(Run::from_records(&settings, &transcript.records))
    }
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
