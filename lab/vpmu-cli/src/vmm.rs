//! The options about the VMM below a guest.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct Vmm {
    /// Run the guest on this VMM of yours, a program for x86-64 KVM, in the lab's KVM host (vmm, and exec: under `vpmu exec`)
    ///
    /// The program, the libraries that it needs and each --vmm-file go into the KVM host, which starts it with each
    /// --vmm-arg. What it prints is the guest's console, so its first serial port (ttyS0) goes to standard output. In
    /// the arguments and in text files stand {kernel} (as Debian packs it, or --kernel), {vmlinux} (the same as an ELF
    /// file), {initrd}, {cmdline}, {vcpus}, {memory} (MiB) and {dir} (the folder of the program and its files).
    #[arg(long, value_name = "FILE")]
    pub(crate) vmm: Option<PathBuf>,
    /// Put a file beside that VMM, such as its configuration, with placeholders filled in (repeatable)
    #[arg(long, value_name = "FILE")]
    pub(crate) vmm_file: Vec<PathBuf>,
    /// Give the VMM one more argument (repeatable): that of --vmm; without it vpmu-vmm, or with exec QEMU in the KVM host
    /// (x86_64, emulated and exec)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) vmm_arg: Vec<String>,
}
