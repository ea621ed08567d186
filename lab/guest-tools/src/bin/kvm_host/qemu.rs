//! Runs stock QEMU as the guest's VMM.
//!
//! The guest's second serial port carries the dialogue of `meter --sync`: meter says begin or end
//! and waits for a line, and meanwhile the host takes a snapshot of its statistics.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use vpmu_guest_tools::files::{self, Lines};
use vpmu_guest_tools::program;
use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::{self, Errno, Fd, flags};
use vpmu_measure::{Disturb, HostJob, Kvm, MARK, Record, Snapshot};

use super::disturb;
use super::host::{KERNEL, busybox, ended, report};
use super::monitor::{self, Monitor};
use super::stats::HostStats;

/// The name of the two pipes for QEMU, without the endings.
const SYNC: &str = "/run/sync";
const FROM_GUEST: &str = "/run/sync.out";
const TO_GUEST: &str = "/run/sync.in";
const VERSION: &str = "/run/version";
/// The initrd that is made of its parts.
const INITRD: &str = "/guest/initrd";

/// The dialogue.
struct Talk<'a> {
    process: Process,
    job: &'a HostJob,
    /// The words that start QEMU.
    words: &'a [&'a str],
    from_guest: Fd,
    to_guest: Fd,
    stats: &'a HostStats,
    /// The monitor of a QEMU whose guest has the PMU.
    monitor: Option<Monitor>,
    disturb: Option<Disturb>,
}

/// The results of the dialogue.
#[derive(Default)]
struct Dialogue {
    begin: Option<Snapshot>,
    end: Option<Snapshot>,
    /// meter's own record, with its mark.
    record: Option<String>,
    status: i32,
}

/// Runs the guest to its end and reports. `qemu` are the words that start QEMU.
pub(crate) fn run(
    process: Process,
    job: &HostJob,
    qemu: &[&str],
    initrd: &[&str],
    stats: &HostStats,
    patched: Option<Option<Disturb>>,
) -> Result<(), Errno> {
    busybox(process, &format!("mkfifo {TO_GUEST} {FROM_GUEST}"));
    // The host opens both pipes in both directions. So QEMU, which may end at any time, is never
    // the only one to have a pipe open.
    let from_guest = files::open(FROM_GUEST, flags::READ_WRITE)?;
    let to_guest = files::open(TO_GUEST, flags::READ_WRITE)?;
    let mut words = qemu.to_vec();
    words.extend(job.options.iter().map(String::as_str));
    words.extend(boot(process, job, initrd)?);
    let sync = format!("pipe,id=sync,path={SYNC}");
    words.extend(["-serial", "stdio"]);
    words.extend(["-chardev", &sync, "-serial", "chardev:sync"]);
    let mut monitor = None;
    if patched.is_some() {
        words.extend(monitor::OPTIONS);
        monitor = Some(Monitor::new(process)?);
    }
    start(process, &words, from_guest)?;
    let found = Talk {
        process,
        job,
        words: &words,
        from_guest,
        to_guest,
        stats,
        monitor,
        disturb: patched.flatten(),
    }
    .finish()?;
    ended(&version(process, qemu)?, found.status);
    if let Some(record) = found.record {
        Fd::STDOUT.say(format_args!("{record}"));
    }
    if let (Some(begin), Some(end)) = (found.begin, found.end) {
        report(&Record::Kvm(Box::new(Kvm { begin, end })));
    }
    Ok(())
}

/// Returns QEMU's options for what the guest boots.
pub(crate) fn boot<'a>(
    process: Process,
    job: &'a HostJob,
    initrd: &[&str],
) -> Result<Vec<&'a str>, Errno> {
    let mut words = Vec::new();
    if !job.boots_disk {
        words.extend(["-kernel", KERNEL, "-append", &job.append]);
    }
    if !initrd.is_empty() {
        make_initrd(process, initrd)?;
        words.extend(["-initrd", INITRD]);
    }
    Ok(words)
}

/// Makes the initrd of its parts, for a VMM that takes a single file.
pub(crate) fn make_initrd(process: Process, parts: &[&str]) -> Result<(), Errno> {
    let whole = files::open(INITRD, flags::CREATE)?;
    for part in parts {
        files::append(part, whole)?;
        // The parts take memory that the guest may need.
        busybox(process, &format!("rm {part}"));
    }
    whole.close();
    Ok(())
}

/// Starts QEMU from another process, which waits for its end. That process
/// takes part in the dialogue: `pid NUMBER`, then `gone STATUS`.
fn start(process: Process, words: &[&str], dialogue: Fd) -> Result<(), Errno> {
    let Some(_) = sys::fork()? else {
        let nothing = files::open("/dev/null", flags::READ).ok();
        let status = program::start(process, words, nothing, None).and_then(|qemu| {
            dialogue.say(format_args!("pid {}", qemu.id()));
            qemu.wait()
        });
        let status = status.map_or(1, |ended| ended.end.status());
        dialogue.say(format_args!("gone {status}"));
        sys::exit(0)
    };
    Ok(())
}

impl Talk<'_> {
    fn finish(mut self) -> Result<Dialogue, Errno> {
        let mut found = Dialogue::default();
        let (mut qemu, mut begun, mut moves) = (None, 0, false);
        for line in Lines::of(self.from_guest) {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match (word, word.strip_prefix(char::from(MARK))) {
                (_, Some("begin")) => {
                    if let Some(qemu) = qemu {
                        pin(qemu, self.job.vcpus);
                    }
                    found.begin = Some(self.snapshot());
                    begun += 1;
                    self.disturb(begun);
                    self.to_guest.write_all(b"go\n")?;
                }
                (_, Some("end")) => {
                    found.end = Some(self.snapshot());
                    self.to_guest.write_all(b"go\n")?;
                }
                (_, Some(disturb::MOVES)) => moves = true,
                (_, Some(_)) => found.record = Some(line),
                ("pid", _) => qemu = rest.parse().ok(),
                ("gone", _) if moves => {
                    moves = false;
                    let words = [self.words, &disturb::INCOMING].concat();
                    start(self.process, &words, self.from_guest)?;
                }
                ("gone", _) => {
                    found.status = rest.parse().unwrap_or(1);
                    break;
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Returns the host's statistics, with the PMU's where the guest stays in one process.
    fn snapshot(&mut self) -> Snapshot {
        let mut snapshot = self.stats.snapshot();
        if let (None, Some(monitor)) = (self.disturb, &mut self.monitor) {
            match monitor.pmu() {
                Ok(pmu) => snapshot.pmu = pmu,
                Err(reason) => Fd::STDERR.say(format_args!("kvm-host: {reason}")),
            }
        }
        snapshot
    }

    fn disturb(&mut self, begun: u32) {
        if let Some(disturb) = self.disturb
            && let Some(monitor) = self.monitor.take()
        {
            self.monitor = Some(disturb::start(monitor, disturb, begun, self.from_guest));
        }
    }
}

/// Gives each of several vCPUs a processor of its own, where there are enough.
fn pin(qemu: usize, vcpus: u32) {
    let last = vcpus.saturating_sub(1);
    if last == 0 || !files::exists(&format!("/sys/devices/system/cpu/cpu{last}")) {
        return;
    }
    let tasks = format!("/proc/{qemu}/task");
    for task in files::names(&tasks) {
        // QEMU names the threads: "CPU 0/KVM".
        let name = files::read(&format!("{tasks}/{task}/comm")).unwrap_or_default();
        let cpu = name.trim().strip_prefix("CPU ");
        let cpu = cpu.and_then(|name| name.strip_suffix("/KVM"));
        if let (Some(Ok(cpu)), Ok(thread)) = (cpu.map(str::parse), task.parse()) {
            // Without the pinning, the figures are those of a busier host.
            let _ = sys::pin(thread, cpu);
        }
    }
}

/// Returns the first line of QEMU's version output.
pub(crate) fn version(process: Process, qemu: &[&str]) -> Result<String, Errno> {
    let file = files::open(VERSION, flags::CREATE)?;
    let words = [qemu, &["--version"]].concat();
    program::run(process, &words, None, Some(file))?;
    file.close();
    let text = files::read(VERSION)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
