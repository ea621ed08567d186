//! Runs the guest of the job: prepares the host, chooses the VMM, and watches both.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;

use vpmu_guest_tools::files;
use vpmu_guest_tools::kvm::watch::{INTERVAL_S, Watch};
use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::{self, Fd};
use vpmu_measure::{Host, HostJob, HostVmm, Record};

use super::host::{busybox, power_off, report, set};
use super::stats::HostStats;
use super::{exec, ours, qemu, theirs, tracing};

/// The guest's job as an archive, when the guest comes from the lab.
const JOB: &str = "/guest/job.cpio";
/// The guest's own initrd.
const OWN: &str = "/guest/own.cpio";
/// The file tree that the lab's guests share.
const GUEST: &str = "/guest/guest.cpio";

/// Whether KVM hands the PMU over.
const MEDIATES: &str = "/sys/module/kvm_amd/parameters/enable_mediated_pmu";

/// Runs the guest and powers off. Returns only when that fails, which the
/// kernel answers with a panic that the lab reports.
pub(crate) fn run(process: Process) -> i32 {
    let Err(reason) = serve(process);
    Fd::STDERR.say(format_args!("kvm-host: {reason}"));
    1
}

fn serve(process: Process) -> Result<core::convert::Infallible, String> {
    let path = format!("/{}", HostJob::PATH);
    let job = files::read(&path).map_err(|errno| format!("failed to read {path}: {errno}"))?;
    let job: HostJob = serde_json::from_str(&job).map_err(|error| format!("{path}: {error}"))?;
    prepare(process, &job);
    if job.mediates && files::read(MEDIATES).as_deref().map(str::trim) != Ok("Y") {
        return Err("KVM hands no PMU over on this processor: it needs PerfMonV2".to_owned());
    }
    if job.skew {
        // The kernel charges a whole tick to whatever the tick interrupts. Host and guest tick at
        // the same rate, so the host would look at the same moment of the guest's tick every time.
        // With a clock that is 1.4 % fast, the host looks at all moments in turn. Only shares are
        // taken from this clock.
        busybox(process, "adjtimex -q -t 10137");
    }
    share_processors(job.vcpus);
    let stats = HostStats::find();
    if (files::exists(JOB) || job.boots_disk) && stats.tell_interrupts() {
        watch(process, &job, &stats);
    }
    let initrd = initrd();
    sys::sleep_ms(job.settle_ms);
    match &job.vmm {
        HostVmm::Qemu(name) => {
            let qemu = format!("/usr/bin/{name}");
            qemu::run(process, &job, &[&qemu], initrd, &stats, None)
        }
        HostVmm::Patched { name, disturb } => {
            let qemu = format!("/vpmu/{name}");
            let words = [&ours::LOADER[..], &[&qemu]].concat();
            qemu::run(process, &job, &words, initrd, &stats, Some(*disturb))
        }
        HostVmm::Exec { qemu, options } => exec::run(process, &job, qemu, options, initrd),
        HostVmm::Theirs { program, exec } => {
            theirs::run(process, &job, program, exec.as_deref(), initrd, &stats)
        }
        HostVmm::Ours { save, restore } => {
            let saved = save.as_deref().map(|path| (path, restore.as_slice()));
            let run = || ours::run(process, &job, saved, initrd);
            match job.trace {
                true => tracing::run(process, run),
                false => run(),
            }
        }
    }
    .map_err(|errno| format!("failed to run the VMM: {errno}"))?;
    power_off(process)
}

fn prepare(process: Process, job: &HostJob) {
    for command in [
        "mount -t proc proc /proc",
        "mount -t sysfs sysfs /sys",
        "mount -t devtmpfs devtmpfs /dev",
        "mount -t debugfs debugfs /sys/kernel/debug",
        "stty -opost -echo",
    ] {
        busybox(process, command);
    }
    // Kernel messages stay out of the guest's console; a panic is still printed.
    set("/proc/sys/kernel/printk", "1");
    // On x86, KVM is not part of the kernel. The names of its modules begin with their order.
    for module in files::names("/vpmu/modules") {
        let option = match job.mediates && module.contains("kvm-amd") {
            true => " enable_mediated_pmu=1",
            false => "",
        };
        busybox(process, &format!("insmod /vpmu/modules/{module}{option}"));
    }
}

/// Lets vCPUs take turns quickly where the host has fewer processors than they.
fn share_processors(vcpus: u32) {
    let last = vcpus.saturating_sub(1);
    if files::exists(&format!("/sys/devices/system/cpu/cpu{last}")) {
        return;
    }
    // A vCPU that polls takes the other's time.
    set("/sys/module/kvm/parameters/halt_poll_ns", "0");
    // A vCPU that wakes another holds the lock of the other's run queue. If the other preempted it, the other would wait
    // for that lock at once, in a PAUSE loop, which QEMU executes very slowly. So the other waits until the vCPU halts,
    // or until the end of a slice, which is short because a vCPU may also spin until the other answers.
    let scheduler = "/sys/kernel/debug/sched";
    set(&format!("{scheduler}/features"), "NO_WAKEUP_PREEMPTION");
    set(&format!("{scheduler}/features"), "HRTICK");
    set(&format!("{scheduler}/base_slice_ns"), "100000");
}

/// Returns the parts of the initrd for the guest: its own, or the lab's and the job.
fn initrd() -> &'static [&'static str] {
    if files::exists(OWN) {
        &[OWN]
    } else if files::exists(JOB) {
        &[GUEST, JOB]
    } else {
        &[]
    }
}

/// Watches the guest from another process, and ends the host when the guest is stuck.
fn watch(process: Process, job: &HostJob, stats: &HostStats) {
    let Ok(None) = sys::fork() else { return };
    let mut watch = Watch::default();
    loop {
        sys::sleep_ms(INTERVAL_S * 1000);
        if watch.look(&stats.snapshot()) {
            stuck(process, job);
        }
    }
}

/// Reports that the guest is stuck, and powers off.
fn stuck(process: Process, job: &HostJob) -> ! {
    let vmm = match &job.vmm {
        HostVmm::Qemu(name) | HostVmm::Patched { name, .. } | HostVmm::Exec { qemu: name, .. } => {
            name
        }
        HostVmm::Theirs { program, .. } => theirs::name(program),
        HostVmm::Ours { .. } => ours::NAME,
    };
    report(&Record::Host(Host {
        vmm: vmm.to_owned(),
        status: 1,
        stuck: true,
    }));
    power_off(process)
}
