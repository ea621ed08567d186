//! Runs stock QEMU under `vpmu exec` as the guest's VMM.
//!
//! The library in QEMU takes the snapshots of the host's statistics, when the guest rings the doorbell.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::Errno;
use vpmu_measure::HostJob;

use super::host::{ended, run_silent};
use super::ours::LOADER;
use super::qemu;

/// The command.
pub(crate) const VPMU: &str = "/vpmu/vpmu";

/// Runs the guest to its end and reports.
pub(crate) fn run(
    process: Process,
    job: &HostJob,
    name: &str,
    options: &[String],
    initrd: &[&str],
) -> Result<(), Errno> {
    let qemu = format!("/usr/bin/{name}");
    let mut words = Vec::from(LOADER);
    words.extend([VPMU, "exec"]);
    words.extend(options.iter().map(String::as_str));
    words.extend(["--", &qemu]);
    words.extend(job.options.iter().map(String::as_str));
    words.extend(qemu::boot(process, job, initrd)?);
    words.extend(["-serial", "stdio"]);
    let status = run_silent(process, &words)?;
    ended(&qemu::version(process, &[&qemu])?, status);
    Ok(())
}
