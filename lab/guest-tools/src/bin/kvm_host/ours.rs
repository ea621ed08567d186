//! Runs this project's x86 VMM as the guest's VMM.
//!
//! The VMM takes the snapshots of the host's statistics itself, when the guest rings its doorbell.

use alloc::string::String;
use alloc::vec::Vec;

use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::Errno;
use vpmu_measure::HostJob;

use super::host::{KERNEL, ended, run_silent};

/// The VMM's name.
pub(crate) const NAME: &str = "vpmu-vmm";

/// Runs a program with the libraries with which it was built, which may be older than this host.
pub(crate) const LOADER: [&str; 3] = [
    "/vpmu/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/vpmu/lib",
];

/// The exit status of a VMM that saved its guest.
const SAVED: i32 = 4;

/// The place of the saved guest, and more options of the VMM that restores it.
type Saved<'a> = (&'a str, &'a [String]);

/// Runs the guest to its end and reports.
pub(crate) fn run(
    process: Process,
    job: &HostJob,
    saved: Option<Saved<'_>>,
    initrd: &[&str],
) -> Result<(), Errno> {
    let mut words: Vec<&str> = job.options.iter().map(String::as_str).collect();
    words.extend(["--kernel", KERNEL]);
    words.extend(initrd.iter().flat_map(|file| ["--initrd", file]));
    words.extend(["--append", &job.append]);
    let mut status = run_once(process, &words)?;
    if let Some((path, more)) = saved {
        let mut words = Vec::from(["--save", path, "--restore", path]);
        words.extend(more.iter().map(String::as_str));
        while status == SAVED {
            status = run_once(process, &words)?;
        }
    }
    ended(NAME, status);
    Ok(())
}

fn run_once(process: Process, options: &[&str]) -> Result<i32, Errno> {
    let mut words = Vec::from(LOADER);
    words.push("/vpmu/vpmu-vmm");
    words.extend(options);
    run_silent(process, &words)
}
