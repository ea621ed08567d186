//! The machine that QEMU emulates, as a command line.
//!
//! Deterministic by default: `-icount shift=0,sleep=off` makes one instruction
//! one nanosecond of virtual time and lets an idle machine skip to its next
//! event; the random seed and the clock's start are fixed; the guest kernel
//! does not randomise its addresses. The same files and options then give the
//! same run, whatever else this machine does.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::spec::arch::Arch;
use crate::spec::design::Policy;

/// What a user chooses about the machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Of its processors.
    pub arch: Arch,
    /// Processors.
    pub vcpus: u32,
    /// Memory, MiB.
    pub memory: u32,
    /// Real time instead of counted instructions.
    pub realtime: bool,
    /// More options for QEMU.
    pub qemu_args: Vec<String>,
    /// More options for this project's x86 VMM.
    pub vmm_args: Vec<String>,
}

/// What is booted on it.
#[derive(Debug, Clone)]
pub struct Boot {
    /// QEMU's `-kernel`.
    pub kernel: PathBuf,
    /// QEMU's `-initrd`.
    pub initrd: Option<PathBuf>,
    /// QEMU's `-append`.
    pub append: String,
}

impl Machine {
    /// QEMU's arguments: an Armv9 machine with EL2 or a PC with SVM, the
    /// console on standard output.
    pub fn arguments(&self, boot: &Boot) -> Vec<OsString> {
        let machine: &[&str] = match self.arch {
            Arch::Aarch64 => &[
                "-M",
                "virt,virtualization=on,gic-version=3",
                "-cpu",
                // Pointer authentication with a cheap hash: QEMU computes it
                // in software, and the architected one is slow.
                "max,pauth-impdef=on",
            ],
            Arch::X86_64 => &["-M", "pc", "-accel", "tcg", "-cpu", "max", "-vga", "none"],
        };
        let mut arguments: Vec<OsString> = machine.iter().map(OsString::from).collect();
        let mut push = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
        push(&[
            "-nic",
            "none",
            "-display",
            "none",
            "-monitor",
            "none",
            "-serial",
            "stdio",
            "-no-reboot",
        ]);
        push(&["-smp", &self.vcpus.to_string()]);
        push(&["-m", &format!("{}M", self.memory)]);
        if !self.realtime {
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
        arguments.extend(self.qemu_args.iter().map(OsString::from));
        arguments
    }

    /// Arguments for the stock QEMU inside the KVM host, console and kernel
    /// left out.
    pub fn kvm_arguments(&self) -> Vec<String> {
        let machine = match self.arch {
            Arch::Aarch64 => "virt,gic-version=3",
            Arch::X86_64 => "pc",
        };
        [
            "-M",
            machine,
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-smp",
            &self.vcpus.to_string(),
            "-m",
            &format!("{}M", self.memory),
            "-nodefaults",
            "-display",
            "none",
            "-nic",
            "none",
            "-no-reboot",
            "-name",
            "guest,debug-threads=on",
            "-seed",
            "42",
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

impl Boot {
    /// Arguments for this project's x86 VMM on this machine's own KVM.
    pub fn vmm_arguments(&self, machine: &Machine, policy: Policy) -> Vec<OsString> {
        let options = vmm_arguments(machine, policy);
        let mut arguments: Vec<OsString> = options.iter().map(OsString::from).collect();
        arguments.extend(["--kernel".into(), self.kernel.as_os_str().to_owned()]);
        if let Some(initrd) = &self.initrd {
            arguments.extend(["--initrd".into(), initrd.as_os_str().to_owned()]);
        }
        arguments.extend(["--append".into(), OsString::from(&self.append)]);
        arguments
    }
}

/// Arguments for this project's x86 VMM, kernel and initrd left out.
pub fn vmm_arguments(machine: &Machine, policy: Policy) -> Vec<String> {
    let words = [
        "--vcpus",
        &machine.vcpus.to_string(),
        "--memory",
        &format!("{}M", machine.memory),
        "--policy",
        policy.name(),
    ];
    let words = words.into_iter().map(str::to_owned);
    words.chain(machine.vmm_args.iter().cloned()).collect()
}

/// The kernel command line of one of our guests, the user's words last.
///
/// - `cryptomgr.notests`: otherwise the kernel tests its ciphers in the
///   background for half a second, partly while the command runs.
/// - `panic=-1 oops=panic`: a broken kernel ends at once instead of hanging.
pub fn guest_command_line(arch: Arch, user: Option<&str>) -> String {
    let ours = format!(
        "console={} nokaslr quiet cryptomgr.notests panic=-1 oops=panic rdinit=/init",
        arch.serial(0)
    );
    match user {
        Some(user) => format!("{ours} {user}"),
        None => ours,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(machine: &Machine) -> String {
        let boot = Boot {
            kernel: "Image".into(),
            initrd: Some("initrd".into()),
            append: guest_command_line(machine.arch, Some("user")),
        };
        let arguments = machine.arguments(&boot);
        arguments
            .iter()
            .map(|argument| argument.to_str().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn deterministic_unless_asked() {
        let mut machine = Machine {
            arch: Arch::Aarch64,
            vcpus: 2,
            memory: 512,
            realtime: false,
            qemu_args: vec!["-device".to_owned(), "x".to_owned()],
            vmm_args: Vec::new(),
        };
        let deterministic = line(&machine);
        assert!(deterministic.contains("-icount shift=0,sleep=off"));
        assert!(deterministic.contains("-smp 2 -m 512M"));
        assert!(deterministic.contains("rdinit=/init user -kernel Image -initrd initrd"));
        assert!(deterministic.ends_with("-device x"));
        machine.realtime = true;
        assert!(!line(&machine).contains("icount"));
        machine.arch = Arch::X86_64;
        assert!(line(&machine).starts_with("-M pc -accel tcg -cpu max"));
        assert!(line(&machine).contains("console=ttyS0"));
    }
}
