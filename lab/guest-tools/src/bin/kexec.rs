//! `kexec KERNEL INITRD COMMAND-LINE`
//!
//! Starts another kernel in place of the running one, at once: file systems stay as they are. Returns 1 when that
//! fails. x86-64 only.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
vpmu_guest_tools::start!(run);

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("kexec: built for a guest, does nothing on the host");
}

#[cfg(all(target_os = "none", not(target_arch = "x86_64")))]
fn run(_: vpmu_guest_tools::start::Process) -> i32 {
    1
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
fn run(process: vpmu_guest_tools::start::Process) -> i32 {
    use vpmu_guest_tools::files;
    use vpmu_guest_tools::kexec;
    use vpmu_guest_tools::sys::{Fd, flags};

    let mut words = process.arguments().skip(1);
    let (Some(kernel), Some(initrd), Some(line)) = (words.next(), words.next(), words.next())
    else {
        Fd::STDERR.say(format_args!("usage: kexec KERNEL INITRD COMMAND-LINE"));
        return 2;
    };
    let open = |path: &core::ffi::CStr| files::open(path.to_str().unwrap_or_default(), flags::READ);
    let error = match open(kernel).and_then(|kernel| Ok((kernel, open(initrd)?))) {
        Ok((kernel, initrd)) => kexec::start(kernel, initrd, line),
        Err(error) => error,
    };
    Fd::STDERR.say(format_args!("kexec: {error}"));
    1
}
