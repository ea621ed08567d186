//! KVM's tracepoints, counted while the guest measures.
//!
//! The kernel's own histograms count. The guest's doorbell, a write of 1 or 2 to port 0x5650, is a
//! tracepoint, too, and switches the histograms. Only the order of two tracepoints tells which
//! interrupt woke which vCPU.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use vpmu_guest_tools::files::{self, Lines};
use vpmu_guest_tools::kvm::trace::{WakeUps, histogram_line};
use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::{self, Errno, Fd, flags};
use vpmu_measure::{Kvm, Record, Trace};

use super::host::{busybox, power_off, report, set};
use super::stats::HostStats;

const TRACING: &str = "/sys/kernel/tracing";
const KVM: &str = "/sys/kernel/tracing/events/kvm";
/// A separate instance, in which this program notices the doorbell.
const MARKS: &str = "/sys/kernel/tracing/instances/marks";

/// The tracepoints to count, with their keys.
const COUNTED: [(&str, &str); 4] = [
    ("kvm_exit", "exit_reason"),
    ("kvm_msr", "write,ecx"),
    ("kvm_inj_virq", "vector"),
    ("kvm_userspace_exit", "reason"),
];
const ORDERED: [&str; 2] = ["kvm_vcpu_wakeup", "kvm_inj_virq"];

const BEGIN: &str = "port == 0x5650 && val == 1";
const END: &str = "port == 0x5650 && val == 2";
const EITHER: &str = "port == 0x5650 && (val == 1 || val == 2)";
/// The end of the line of a doorbell that begins to measure (the tracepoint kvm_pio).
const BEGIN_MARK: &str = "val 0x1";

/// The line that this program's other process writes when the VMM has ended.
const GONE: &str = "gone";

/// Runs the guest by `vmm` to its end and reports a [`Trace`] of each measurement.
pub(crate) fn run(process: Process, vmm: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    begin(process)?;
    let mut taken = Vec::new();
    run_noticing(vmm, |_| {
        taken.push(Record::Trace(take()?));
        Ok(())
    })?;
    // The reports wait until now, because the console's exits would be counted, too.
    taken.iter().for_each(report);
    power_off(process)
}

/// Runs the guest by `vmm`, in another process, to its end. `notice` gets the line of each doorbell.
fn run_noticing(
    vmm: impl Fn() -> Result<(), Errno>,
    mut notice: impl FnMut(&str) -> Result<(), Errno>,
) -> Result<(), Errno> {
    if sys::fork()?.is_none() {
        let status = i32::from(vmm().is_err());
        set(&format!("{MARKS}/trace_marker"), GONE);
        sys::exit(status);
    }
    let marks = files::open(&format!("{MARKS}/trace_pipe"), flags::READ)?;
    for line in Lines::of(marks) {
        if line.ends_with(GONE) {
            break;
        }
        notice(&line)?;
    }
    Ok(())
}

fn begin(process: Process) -> Result<(), Errno> {
    busybox(process, &format!("mount -t tracefs tracefs {TRACING}"));
    set(&format!("{TRACING}/buffer_size_kb"), "16384");
    // An event takes one trigger of a kind, so the end has an event of its own.
    write(
        "dynamic_events",
        "e:vpmu/doorbell kvm/kvm_pio port=$port val=$val",
    )?;
    let begin = "events/kvm/kvm_pio/trigger";
    let end = "events/vpmu/doorbell/trigger";
    for (event, keys) in COUNTED {
        write(
            &format!("events/kvm/{event}/trigger"),
            &format!("hist:keys={keys}:pause"),
        )?;
        append(begin, &format!("enable_hist:kvm:{event} if {BEGIN}"))?;
        append(end, &format!("disable_hist:kvm:{event} if {END}"))?;
    }
    for event in ORDERED {
        write(&format!("events/kvm/{event}/enable"), "1")?;
    }
    write("tracing_on", "0")?;
    append(begin, &format!("traceon if {BEGIN}"))?;
    append(end, &format!("traceoff if {END}"))?;
    mark(process, END)
}

/// Begins to notice those doorbells for which `filter` is true.
fn mark(process: Process, filter: &str) -> Result<(), Errno> {
    busybox(process, &format!("mkdir {MARKS}"));
    write("instances/marks/events/kvm/kvm_pio/filter", filter)?;
    write("instances/marks/events/kvm/kvm_pio/enable", "1")
}

/// Runs the guest by `vmm` to its end, with a snapshot of the host's statistics at each doorbell, and reports a [`Kvm`].
/// The guest does not wait for the snapshot: this process takes the processor from it as soon as the doorbell has exited.
pub(crate) fn snapshots(
    process: Process,
    stats: &HostStats,
    vmm: impl Fn() -> Result<(), Errno>,
) -> Result<(), Errno> {
    busybox(process, &format!("mount -t tracefs tracefs {TRACING}"));
    mark(process, EITHER)?;
    let (mut begin, mut end) = (None, None);
    run_noticing(vmm, |line| {
        let taken = Some(stats.snapshot());
        match line.contains(BEGIN_MARK) {
            true => begin = taken,
            false => end = taken,
        }
        Ok(())
    })?;
    if let (Some(begin), Some(end)) = (begin, end) {
        report(&Record::Kvm(Box::new(Kvm { begin, end })));
    }
    Ok(())
}

/// Returns the counts since the last call. The guest leaves time for this before it begins anew.
fn take() -> Result<Trace, Errno> {
    let mut trace = Trace::new();
    for (event, keys) in COUNTED {
        let table = files::read(&format!("{KVM}/{event}/hist"))?;
        let counts = table.lines().filter_map(histogram_line).collect();
        trace.insert(event.to_owned(), counts);
        append(
            &format!("events/kvm/{event}/trigger"),
            &format!("hist:keys={keys}:clear"),
        )?;
    }
    let mut wake_ups = WakeUps::default();
    // The file is too long to be read whole.
    let events = files::open(&format!("{TRACING}/trace"), flags::READ)?;
    Lines::of(events).for_each(|line: String| wake_ups.line(&line));
    events.close();
    trace.insert("woken".to_owned(), wake_ups.finish());
    // A write empties the file.
    write("trace", "\n")?;
    Ok(trace)
}

fn write(file: &str, text: &str) -> Result<(), Errno> {
    put(file, flags::CREATE, text)
}

fn append(file: &str, text: &str) -> Result<(), Errno> {
    put(file, flags::APPEND, text)
}

fn put(file: &str, flags: usize, text: &str) -> Result<(), Errno> {
    files::write(&format!("{TRACING}/{file}"), flags, text).inspect_err(|errno| {
        Fd::STDERR.say(format_args!(
            "kvm-host: failed to write {text} to {file}: {errno}"
        ));
    })
}
