//! The machine that QEMU emulates, as a command line.
//!
//! Deterministic by default: `-icount shift=0,sleep=off` makes one instruction
//! one nanosecond of virtual time and lets an idle machine skip to its next
//! event; the random seed and the clock's start are fixed; the guest kernel
//! does not randomise its addresses. The same files and options then give the
//! same run, whatever else this machine does.

use std::ffi::OsString;

use super::Launch;
use crate::host::cancel::Cancel;
use crate::host::qemu::X86_PMU;
use crate::spec::Machine;
use crate::spec::arch::Arch;
use crate::{Result, usage};

/// The processor model with every feature that QEMU emulates.
const MAX: &str = "max";

/// Checks that `machine` can be emulated here.
pub(super) fn check(machine: &Machine) -> Result<()> {
    let tool = machine.arch.qemu();
    let mut command = machine.qemu.command(&tool)?;
    let Some(cpu) = &machine.cpu else {
        return Ok(());
    };
    command.args(["-cpu", "help"]);
    let help = tool.run(command, &Cancel::default(), &|| ())?;
    let model = cpu.split(',').next().unwrap_or_default();
    if models(&help).any(|known| known == model) {
        return Ok(());
    }
    let program = tool.program;
    usage(format!(
        "--cpu {cpu}: {program} has no such model; `{program} -cpu help` lists its models"
    ))
}

/// Returns the processor models in the answer to `-cpu help`: the first word of
/// each line, up to the first empty line. QEMU 8 puts `x86` before x86's models.
fn models(help: &str) -> impl Iterator<Item = &str> {
    let lines = help.lines().skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            line.trim_start()
                .trim_start_matches("x86 ")
                .split_whitespace()
                .next()
        })
}

/// Returns the value of QEMU's option `-cpu`.
fn cpu(machine: &Machine) -> String {
    let cpu = machine.cpu.as_deref().unwrap_or(MAX);
    let (model, options) = cpu.split_once(',').unwrap_or((cpu, ""));
    let (feature, cheap) = match machine.arch {
        // Pointer authentication with a cheap hash: QEMU computes it in software,
        // and the architected one is slow.
        Arch::Aarch64 => ("pauth", "pauth-impdef=on"),
        // Linux copies and clears memory by the byte on processors that call bytes fast. In QEMU
        // each byte is an instruction, so a nested boot takes more than twice as long.
        Arch::X86_64 => ("erms", "-erms,-fsrm"),
    };
    let mut cpu = cpu.to_owned();
    if model == MAX && !options.contains(feature) {
        cpu = format!("{cpu},{cheap}");
    }
    if machine.has_pmu() {
        cpu = format!("{cpu},{X86_PMU}");
    }
    cpu
}

/// Returns whether the user's options name another board than `virt`.
fn has_another_board(machine: &Machine) -> bool {
    let mut words = machine.qemu_args.iter();
    let mut board = None;
    while let Some(word) = words.next() {
        if matches!(word.as_str(), "-M" | "-machine") {
            board = words.next();
        }
    }
    let named = board.and_then(|board| board.split(',').find(|word| !word.contains('=')));
    named.is_some_and(|name| name != "virt")
}

/// Returns a QEMU that boots `machine` with `memory` MiB by the options `boot`.
pub(super) fn launch(machine: &Machine, memory: u32, boot: Vec<OsString>) -> Launch {
    Launch {
        program: machine.qemu.program(&machine.arch.qemu()),
        arguments: arguments(machine, memory, boot),
    }
}

/// Returns the options of an Armv9 machine with EL2 or a PC with SVM, whose
/// console is standard output.
fn arguments(machine: &Machine, memory: u32, boot: Vec<OsString>) -> Vec<OsString> {
    let cpu = cpu(machine);
    let mut arguments: Vec<OsString> = Vec::new();
    let mut push = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    match machine.arch {
        // QEMU merges the options of several -M. Another board does not have these.
        Arch::Aarch64 if has_another_board(machine) => push(&["-cpu", &cpu]),
        Arch::Aarch64 => push(&["-M", "virt,virtualization=on,gic-version=3", "-cpu", &cpu]),
        Arch::X86_64 => push(&["-M", "pc", "-accel", "tcg", "-cpu", &cpu, "-vga", "none"]),
    }
    push(&["-nic", "none", "-display", "none", "-monitor", "none"]);
    push(&["-serial", "stdio"]);
    push(&["-smp", &machine.vcpus.to_string()]);
    push(&["-m", &format!("{memory}M")]);
    if !machine.realtime {
        push(&["-icount", "shift=0,sleep=off", "-seed", "42"]);
        push(&["-rtc", "base=2026-01-01T00:00:00,clock=vm"]);
    }
    arguments.extend(boot);
    arguments.extend(machine.qemu_args.iter().map(OsString::from));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::parts::{Boot, command_line};
    use crate::spec::Request;

    fn line(machine: &Machine) -> String {
        let boot = Boot {
            kernel: "Image".into(),
            initrd: Some("initrd".into()),
            append: command_line(machine.arch),
        };
        let arguments = arguments(machine, machine.memory, boot.options());
        let words: Vec<&str> = arguments
            .iter()
            .map(|argument| argument.to_str().unwrap())
            .collect();
        words.join(" ")
    }

    #[test]
    fn a_board_has_its_own_options() {
        let mut machine = Request::new(Arch::Aarch64).machine;
        let ours = "-M virt,virtualization=on,gic-version=3";
        for (option, is_ours) in [
            ("virt,its=off", true),
            ("its=off", true),
            ("xlnx-versal-virt", false),
        ] {
            machine.qemu_args = vec!["-M".to_owned(), option.to_owned()];
            assert_eq!(line(&machine).contains(ours), is_ours, "{option}");
        }
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
        assert!(line(&machine).starts_with("-M pc -accel tcg -cpu max,-erms,-fsrm "));
        assert!(line(&machine).contains("console=ttyS0"));
    }

    #[test]
    fn a_models_options_are_kept() {
        let of = |arch, name: Option<&str>| {
            let mut machine = Request::new(arch).machine;
            machine.cpu = name.map(str::to_owned);
            cpu(&machine)
        };
        assert_eq!(of(Arch::Aarch64, None), "max,pauth-impdef=on");
        let without = of(Arch::Aarch64, Some("max,sve=off"));
        assert_eq!(without, "max,sve=off,pauth-impdef=on");
        assert_eq!(of(Arch::Aarch64, Some("max,pauth=off")), "max,pauth=off");
        assert_eq!(of(Arch::Aarch64, Some("cortex-a72")), "cortex-a72");
        assert_eq!(of(Arch::X86_64, None), "max,-erms,-fsrm");
        assert_eq!(of(Arch::X86_64, Some("max,+erms")), "max,+erms");
        assert_eq!(of(Arch::X86_64, Some("EPYC")), "EPYC");
    }

    #[test]
    fn models_are_read_from_qemus_help() {
        let arm = "Available CPUs:\n  a64fx\n  max\n  pxa250 (deprecated)\n";
        assert_eq!(models(arm).collect::<Vec<_>>(), ["a64fx", "max", "pxa250"]);
        for x86 in [
            "Available CPUs:\n  EPYC  (alias)\n  max   All\n\nRecognized CPUID flags:\n  3dnow\n",
            "Available CPUs:\nx86 EPYC  (alias)\nx86 max   All\n\nRecognized CPUID flags:\n  3dnow\n",
        ] {
            assert_eq!(models(x86).collect::<Vec<_>>(), ["EPYC", "max"]);
        }
    }
}
