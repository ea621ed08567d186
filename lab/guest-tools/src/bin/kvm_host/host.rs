//! What each part of the host needs of it: its programs, its files, its console, its end.

use alloc::borrow::ToOwned;
use alloc::vec::Vec;

use vpmu_guest_tools::files;
use vpmu_guest_tools::program;
use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::{self, Errno, Fd, flags};
use vpmu_measure::{Host, Record};

/// The guest's kernel.
pub(crate) const KERNEL: &str = "/guest/kernel";

/// Powers off at once.
pub(crate) fn power_off(process: Process) -> ! {
    busybox(process, "poweroff -f");
    loop {
        sys::sleep_ms(1000);
    }
}

/// Prints a record.
pub(crate) fn report(record: &Record) {
    // Nobody is left to hear about a console that fails.
    let _ = Fd::STDOUT.write_all(record.line().as_bytes());
}

/// Reports how the VMM ended.
pub(crate) fn ended(vmm: &str, status: i32) {
    report(&Record::Host(Host {
        vmm: vmm.to_owned(),
        status,
        stuck: false,
    }));
}

/// Runs a program without input to its end, and returns its status.
pub(crate) fn run_silent(process: Process, words: &[&str]) -> Result<i32, Errno> {
    let nothing = files::open("/dev/null", flags::READ)?;
    let status = program::run(process, words, Some(nothing), None);
    nothing.close();
    status
}

/// Writes `text` into a file of the kernel's. A kernel without that file keeps its default.
pub(crate) fn set(path: &str, text: &str) {
    let _ = files::write(path, flags::CREATE, text);
}

/// Runs a busybox applet, without a shell. The applet prints the reason of a failure itself.
pub(crate) fn busybox(process: Process, command: &str) {
    let mut words: Vec<&str> = command.split(' ').collect();
    words.insert(0, "/usr/bin/busybox");
    if let Err(errno) = program::run(process, &words, None, None) {
        Fd::STDERR.say(format_args!("kvm-host: failed to run {command}: {errno}"));
    }
}
