//! One guest: constructs it, starts it, watches it to its end, and takes its figures.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::console::Transcript;
use super::kept::Kept;
use super::supervise::{self, Limits, Stage, Streams};
use super::{Lab, Outcome, SecondOutcome, Sink};
use crate::backend::monitor::SECOND_CONSOLE;
use crate::backend::{self, Backend, Parts};
use crate::host::qemu::Version;
use crate::image::artifacts;
use crate::image::disk::BootDisk;
use crate::image::job::{CONSOLE, Job, Notify, Output};
use crate::image::module::Modules;
use crate::image::seed;
use crate::report::host_profile::{HostProfile, Symbols};
use crate::report::result::Run;
use crate::spec::design::Pmu;
use crate::spec::{Guest, Request, Spec, Vmm, Way};
use crate::{Error, Failure, Result};
use vpmu_measure::Record;

/// Time after which a machine that does not run counts as stopped.
const QUIET: Duration = Duration::from_secs(20);

/// Number of attempts to run a guest on a QEMU that breaks some.
const TRIES: u32 = 5;

/// Checks, before anything is downloaded, that the programs that the guests of `spec` need are
/// present.
///
/// # Errors
///
/// When a program is missing.
pub fn check(spec: &Spec) -> Result<()> {
    let request = &spec.request;
    if request.command.is_some() {
        artifacts::find(request.machine.arch, artifacts::METER)?;
        for program in &request.programs {
            artifacts::find_beside(program)?;
        }
    }
    if spec.needs_modules() {
        Modules::check()?;
    }
    if request.disk.is_some() {
        BootDisk::check()?;
    }
    for guest in &spec.guests {
        backend::of(request, guest).check()?;
    }
    Ok(())
}

/// Boots `guest` of the lab's spec, runs the command, and returns the figures. Each
/// `phase` is another moment of the kernel's ticks at which the command begins.
///
/// # Errors
///
/// When the lab or the guest fails. A command that fails is no error.
pub fn run(
    lab: &Lab<'_>,
    guest: &Guest,
    phase: u32,
    sink: Sink,
    stage: &mut dyn FnMut(Stage),
) -> Result<Outcome> {
    let spec = lab.spec;
    let backend = backend::of(&spec.request, guest);
    let run_dir = lab.session.cache.run_dir()?;
    let folder = run_dir.path();
    let parts = parts(lab, guest, backend.notify(), phase, sink.output, folder)?;
    let mut launch = backend.construct(&parts, folder)?;
    let loses = backend.loses_interrupts();
    let clock = Clock::in_folder(folder).filter(|_| loses);
    if let Some(clock) = &clock {
        launch.arguments.extend(clock.arguments());
    }
    let kept = Kept::new(spec, guest.design, &launch)?;

    let has_command = spec.request.command.is_some();
    let limits = Limits {
        total: spec.request.timeout,
        boot: has_command.then_some(spec.request.boot_timeout),
        quiet: (guest.is_counted(&spec.request.machine)).then_some(QUIET),
        clock,
    };
    let streams = Streams {
        output: sink.to,
        log: kept.console()?,
        raw: !has_command,
    };
    let program = launch.program.display().to_string();
    let start = Instant::now();
    let ran = supervise::run(
        launch.into_command()?,
        &program,
        streams,
        limits,
        lab.session.cancel,
        stage,
    );
    let explain = |error| match error {
        Error::Guest { failure, console } if !is_mended(lab.qemu.as_ref()) => {
            backend.explain(failure).with(console)
        }
        error => error,
    };
    let transcript = ran.map_err(explain)?;
    let records = serde_json::to_vec_pretty(&transcript.records);
    kept.write("records.json", records.expect("records are plain data"))?;
    let second = fs::read(folder.join(SECOND_CONSOLE)).ok();
    (second.iter()).try_for_each(|console| kept.write("second.log", console))?;
    let host_profile = HostProfile::of(&transcript.records, || symbols(spec, &parts));
    (host_profile.iter()).try_for_each(|profile| kept.host_profile(profile))?;
    let run = figures(lab.qemu.as_ref(), spec, guest, &*backend, &transcript);
    let mut run = run.map_err(explain)?;
    let second = second
        .map(|console| SecondOutcome::of(console, spec.request.second_command()))
        .transpose()?;
    if let Some(run) = &mut run {
        run.host_profile = host_profile.as_ref().map(HostProfile::folded);
        let figures = second.as_ref().and_then(|second| second.command.as_ref());
        run.second = figures.map(|(_, figures)| figures.clone());
    }
    Ok(Outcome {
        run,
        host_profile,
        second,
        monitor: (transcript.records.into_iter()).find_map(|record| match record {
            Record::VpmuMonitor(monitor) => Some(*monitor),
            _ => None,
        }),
        wall: start.elapsed(),
    })
}

/// Tells whether QEMU's faults are mended, so that they neither explain nor excuse a failure.
fn is_mended(qemu: Option<&Version>) -> bool {
    qemu.is_some_and(Version::is_mended)
}

/// Reports that a guest with this failure is tried again, and why: QEMU has faults that a later start avoids.
///
/// # Errors
///
/// Returns `error` where QEMU is not known to be the cause, or after `TRIES` attempts.
pub fn once_more(lab: &Lab<'_>, guest: &Guest, phase: u32, error: Error) -> Result<&'static str> {
    let tries = match is_mended(lab.qemu.as_ref()) {
        true => 1,
        false => TRIES,
    };
    again(tries, lab.spec, guest, phase, error)
}

/// Decides about [`once_more`], with at most this number of attempts.
fn again(tries: u32, spec: &Spec, guest: &Guest, phase: u32, error: Error) -> Result<&'static str> {
    let may_hang = || {
        let backend = backend::of(&spec.request, guest);
        backend.loses_interrupts() && spec.request.kernel.is_none()
    };
    let why = match error.failure() {
        Some(Failure::RepeatedInterrupt(_)) => {
            "QEMU seems to have delivered an interrupt twice, or not at all; once more, a bit later"
        }
        Some(Failure::HostReset) => "QEMU seems to have reset the KVM host; once more",
        Some(Failure::Boot(_)) if may_hang() => {
            "the boot hung, as when QEMU loses an interrupt; once more, a bit later"
        }
        _ => return Err(error),
    };
    match phase + 1 < tries {
        true => Ok(why),
        false => Err(error),
    }
}

/// Returns the guest's parts, with its job written into `folder`.
fn parts<'a>(
    lab: &'a Lab<'_>,
    guest: &Guest,
    notify: Notify,
    phase: u32,
    output: Output,
    folder: &Path,
) -> Result<Parts<'a>> {
    let modules = lab
        .modules
        .as_ref()
        .filter(|_| guest.design.pmu == Pmu::Paravirt)
        .map(Modules::pmu);
    let request = &lab.spec.request;
    let job = match &request.command {
        None => None,
        Some(command) => {
            let is_users = request
                .disk
                .as_ref()
                .is_some_and(|disk| disk.image.is_some());
            let job = Job {
                command,
                request,
                modules: modules.as_slice(),
                extras: lab.extras.as_ref(),
                output,
                console: match is_users {
                    true => seed::CONSOLE,
                    false => CONSOLE,
                },
                notify: if request.marked {
                    Notify::Nobody
                } else {
                    notify
                },
                phase,
                resets: matches!(guest.way, Way::Nested(Vmm::Theirs { .. })),
            };
            let archive = job.archive()?;
            let path = folder.join("job");
            match is_users {
                true => seed::write(&archive, &path)?,
                false => archive.write_file(&path)?,
            }
            Some(path)
        }
    };
    Ok(Parts {
        request,
        images: lab.images.as_ref(),
        kernel: lab.modules.as_ref().map(Modules::kernel),
        host_kernel: lab.host_kernel.as_ref(),
        disk: lab.disk.as_ref(),
        job,
        second_job: second_job(request, phase, folder)?,
        phase,
    })
}

/// Writes the job of the guest beside the `first` into `folder`, where there is one that runs a command.
fn second_job(first: &Request, phase: u32, folder: &Path) -> Result<Option<PathBuf>> {
    let Some(command) = first.second_command() else {
        return Ok(None);
    };
    let job = Job {
        command,
        request: &Request {
            add: first.add.clone(),
            ..Request::new(first.machine.arch)
        },
        modules: &[],
        extras: None,
        output: Output::Stream,
        console: CONSOLE,
        notify: Notify::Nobody,
        phase,
        resets: false,
    };
    let path = folder.join("second-job.cpio");
    job.archive()?.write_file(&path)?;
    Ok(Some(path))
}

/// Returns the names of the kernel's functions and of the workload's, which runs at fixed addresses.
fn symbols(spec: &Spec, parts: &Parts<'_>) -> Symbols {
    let arch = spec.request.machine.arch;
    let read = |path: PathBuf| fs::read(path).ok();
    let kernel = parts.boot_kernel(arch).ok();
    let program = artifacts::find(arch, artifacts::WORKLOAD).ok();
    Symbols::new(
        &kernel.and_then(read).unwrap_or_default(),
        &program.and_then(read).unwrap_or_default(),
    )
}

/// Returns the figures of a guest that came to a good end.
fn figures(
    qemu: Option<&Version>,
    spec: &Spec,
    guest: &Guest,
    backend: &dyn Backend,
    transcript: &Transcript,
) -> Result<Option<Run>> {
    let stuck = |record: &Record| matches!(record, Record::Host(host) if host.stuck);
    if transcript.records.iter().any(stuck) {
        return Err(transcript.failed(Failure::Stuck));
    }
    let records = &transcript.records;
    let bad_end = supervise::ended_badly(transcript).or_else(|| backend.silent_end(records));
    let has_meter = |record: &Record| matches!(record, Record::Meter(_));
    let complete = match spec.request.command {
        Some(_) => transcript.ended && records.iter().any(has_meter),
        None => bad_end.is_none(),
    };
    if !complete {
        let off = || Failure::NoReport("it powered off or was reset".to_owned());
        return Err(transcript.failed(bad_end.unwrap_or_else(off)));
    }
    Ok(Run::from_records(qemu, &spec.request, guest, records))
}

#[cfg(test)]
mod tests;
