//! The machine that QEMU emulates, as a command line.
//!
//! Deterministic by default: `-icount shift=0,sleep=off` makes one instruction
//! one nanosecond of virtual time and lets an idle machine skip to its next
//! event; the random seed and the clock's start are fixed; the guest kernel
//! does not randomise its addresses. The same files and options then give the
//! same run, whatever else this machine does.

use std::ffi::OsString;
use std::path::Path;

use super::Launch;
use super::parts::Boot;
use crate::Result;
use crate::spec::Machine;
use crate::spec::arch::Arch;

/// Finds out whether `machine` can be emulated here.
///
/// # Errors
///
/// When QEMU or setpriv is missing.
pub(super) fn check(machine: &Machine) -> Result<()> {
    machine.arch.qemu().command().map(drop)
}

/// QEMU that boots `boot` on `machine` with `memory` MiB.
///
/// # Errors
///
/// When QEMU or setpriv is missing.
pub(super) fn launch(machine: &Machine, memory: u32, boot: &Boot) -> Result<Launch> {
    let tool = machine.arch.qemu();
    let arguments = arguments(machine, memory, boot);
    Ok(Launch::new(tool.command()?, tool.program.into(), arguments))
}

/// An Armv9 machine with EL2 or a PC with SVM, the console on standard output.
fn arguments(machine: &Machine, memory: u32, boot: &Boot) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut push = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    match machine.arch {
        Arch::Aarch64 => push(&[
            "-M",
            "virt,virtualization=on,gic-version=3",
            "-cpu",
            // Pointer authentication with a cheap hash: QEMU computes it
            // in software, and the architected one is slow.
            "max,pauth-impdef=on",
        ]),
        Arch::X86_64 => push(&["-M", "pc", "-accel", "tcg", "-cpu", "max", "-vga", "none"]),
    }
    push(&["-nic", "none", "-display", "none", "-monitor", "none"]);
    push(&["-serial", "stdio", "-no-reboot"]);
    push(&["-smp", &machine.vcpus.to_string()]);
    push(&["-m", &format!("{memory}M")]);
    if !machine.realtime {
        push(&["-icount", "shift=0,sleep=off", "-seed", "42"]);
        push(&["-rtc", "base=2026-01-01T00:00:00,clock=vm"]);
    }
    push(&["-append", &boot.append]);
    let mut push_path = |option: &str, path: &Path| {
        arguments.extend([option.into(), path.as_os_str().to_owned()]);
    };
    push_path("-kernel", &boot.kernel);
    if let Some(initrd) = &boot.initrd {
        push_path("-initrd", initrd);
    }
    arguments.extend(machine.qemu_args.iter().map(OsString::from));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::parts::command_line;
    use crate::spec::Request;

    fn line(machine: &Machine) -> String {
        let boot = Boot {
            kernel: "Image".into(),
            initrd: Some("initrd".into()),
            append: command_line(machine.arch),
        };
        let arguments = arguments(machine, machine.memory, &boot);
        let words: Vec<&str> = arguments
            .iter()
            .map(|argument| argument.to_str().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn deterministic_unless_asked() {
        let mut machine = Request::new(Arch::Aarch64).machine;
        machine.vcpus = 2;
        machine.memory = 512;
        machine.qemu_args = vec!["-device".to_owned(), "x".to_owned()];
        let deterministic = line(&machine);
        assert!(deterministic.contains("-icount shift=0,sleep=off"));
        assert!(deterministic.contains("-smp 2 -m 512M"));
        assert!(deterministic.contains("rdinit=/init -kernel Image -initrd initrd"));
        assert!(deterministic.ends_with("-device x"));
        machine.realtime = true;
        assert!(!line(&machine).contains("icount"));
        machine.arch = Arch::X86_64;
        assert!(line(&machine).starts_with("-M pc -accel tcg -cpu max"));
        assert!(line(&machine).contains("console=ttyS0"));
    }
}
