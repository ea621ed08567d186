//! Runs the user's VMM, by itself or under `vpmu exec`.
//!
//! The VMM need not know the doorbell: the host sees it by a tracepoint of KVM's, and takes the snapshots of its
//! statistics. Under `vpmu exec` the library in the VMM takes them.

use alloc::string::String;
use alloc::vec::Vec;

use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::Errno;
use vpmu_measure::HostJob;

use super::exec::VPMU;
use super::host::{ended, run_silent};
use super::ours::LOADER;
use super::stats::HostStats;
use super::{qemu, tracing};

/// Runs the guest to its end and reports.
pub(crate) fn run(
    process: Process,
    job: &HostJob,
    vmm: &str,
    exec: Option<&[String]>,
    initrd: &[&str],
    stats: &HostStats,
) -> Result<(), Errno> {
    if !initrd.is_empty() {
        qemu::make_initrd(process, initrd)?;
    }
    let mut words = Vec::new();
    if let Some(options) = exec {
        words.extend(LOADER);
        words.extend([VPMU, "exec", "--any"]);
        words.extend(options.iter().map(String::as_str));
        words.push("--");
    }
    words.push(vmm);
    words.extend(job.options.iter().map(String::as_str));
    let once = || {
        let status = run_silent(process, &words)?;
        ended(name(vmm), status);
        Ok(())
    };
    match exec {
        None => tracing::snapshots(process, stats, once),
        Some(_) => once(),
    }
}

/// Returns the name of the VMM at this path.
pub(crate) fn name(vmm: &str) -> &str {
    vmm.rsplit('/').next().unwrap_or(vmm)
}
