//! Runs the bare-metal x86-64 test program on vpmu-vmm, under every policy. Its findings must be the same everywhere.
//!
//! The program (`lab/payload/x86_64`) checks every PMU register, counting, overflows, PMIs, RDPMC, a
//! storm and hostile writes, on two CPUs, and that each has a PMU of its own. On a machine whose own
//! KVM cannot run guests it runs in a stock KVM host under QEMU.

use std::process::Command;
use std::thread;

use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::spec::arch::Arch;

use crate::amd_x86_64::INTELS;
use crate::payload::{passed, program};
use crate::support::{nested_vpmu, on_a_clock, skipped, turn, vpmu};

/// Returns the console of the payload with these options of vpmu, which blanks separate, started with `words`.
fn run(options: &str, words: &str) -> Option<String> {
    let mut vpmu = vpmu("x86_64")?;
    vpmu.args(["run", "--arch", "x86_64", "--pmu", "emulated"])
        .args(["--append", words])
        .args(options.split(' '));
    on_a_clock(&mut vpmu);
    let output = vpmu
        .arg("--kernel")
        .arg(program("x86_64/payload.elf")?)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    let console = format!("{text}{errors}");
    assert!(output.status.success(), "{options}:\n{console}");
    assert!(console.contains(" 0 failed,"), "{options}:\n{console}");
    Some(console)
}

#[test]
#[ignore = "long: script/test --long"]
fn every_policy_gives_the_same_pmu() {
    let _turn = turn(3);
    let policies = ["recreate", "reuse", "paused"];
    // All run at once: load does not change counted instructions.
    let consoles = thread::scope(|scope| {
        let options = |policy| format!("--model intel --policy {policy} --vcpus 2");
        let runs = policies.map(|policy| scope.spawn(move || run(&options(policy), "")));
        runs.map(|run| run.join().unwrap())
    });
    let [Some(first), Some(second), Some(third)] = consoles else {
        return;
    };
    let expected = passed(&first);
    for (policy, console) in policies.into_iter().zip([&first, &second, &third]) {
        let tests = passed(console);
        assert!(tests.len() > 150, "{policy}:\n{console}");
        assert!(tests.contains("isolation.counts"), "{policy}:\n{console}");
        assert!(!console.contains("no work is done"), "{policy}:\n{console}");
        assert_eq!(tests, expected, "{policy}");
    }
}

/// Checks that the machine intercepts an MSR by ECX, as `packaging/qemu` mends it: QEMU 10.0 looks at all of RCX.
#[test]
fn an_msr_is_intercepted_by_ecx() {
    let _turn = turn(1);
    if nested_vpmu(INTELS).is_none() {
        return;
    }
    let test = "access.upper_half_of_rcx";
    let Some(console) = run("--model intel", &format!("test={test}")) else {
        return;
    };
    assert!(passed(&console).contains(test), "{console}");
    let version = Qemu::chosen(None).version(&Arch::X86_64.qemu()).unwrap();
    let deviates = console.contains("deviates: QEMU: accesses to MSRs");
    assert_eq!(deviates, !version.is_mended(), "{version}:\n{console}");
}

/// Checks the registers of each version, freezing by CTR_FRZ, and the fixed counters that version 5 leaves out.
#[test]
#[ignore = "long: script/test --long"]
fn every_version_is_as_its_manual() {
    let _turn = turn(3);
    let consoles = thread::scope(|scope| {
        let options = |version| format!("--perfmon {version}");
        let runs = [3, 4, 5].map(|version| scope.spawn(move || run(&options(version), "")));
        runs.map(|run| run.join().unwrap())
    });
    for (version, console) in (3..).zip(consoles.iter().flatten()) {
        let tests = passed(console);
        assert!(tests.contains("pmi.freeze"), "{version}:\n{console}");
        for test in ["overflow.status_set", "register.in_use"] {
            assert_eq!(tests.contains(test), version >= 4, "{test}:\n{console}");
        }
    }
}

/// Checks fixed counter 0, and more events of the general counters.
#[test]
#[ignore = "as with counters of the hardware: script/test --long"]
fn instructions_by_approximation_are_a_counter_as_any_other() {
    let _turn = turn(1);
    let options = "--model intel --vcpus 2 --vmm-arg=--approximate-instructions";
    let Some(console) = run(options, "") else {
        return;
    };
    let tests = passed(&console);
    assert!(tests.contains("isolation.counts"), "{console}");
    assert!(!console.contains("no work is done"), "{console}");
}

/// Checks every register of AMD's PMU, with both interfaces, on two processors each.
#[test]
fn amds_pmu_is_as_its_manual() {
    let _turn = turn(2);
    if nested_vpmu(INTELS).is_none() {
        return;
    }
    let models = ["amd", "amd-v2"];
    let consoles = thread::scope(|scope| {
        let options = |model| format!("--model {model} --vcpus 2");
        let runs = models.map(|model| scope.spawn(move || run(&options(model), "test=amd")));
        runs.map(|run| run.join().unwrap())
    });
    for (model, console) in models.into_iter().zip(consoles.iter().flatten()) {
        let tests = passed(console);
        assert!(tests.len() > 30, "{model}:\n{console}");
        assert!(tests.contains("cpu1.amd.hostile"), "{model}:\n{console}");
        let skipped = console.contains("no PerfMonV2");
        assert_eq!(skipped, model == "amd", "{model}:\n{console}");
    }
}

/// Checks the PMU of the machine itself, which `packaging/qemu` adds: every register, exact counts beside a busy CPU, rings,
/// HLT, and what a hypervisor needs of SVM beside it. Without counted instructions only cycles are counted.
#[test]
fn the_machine_s_own_pmu_is_as_amds_manual() {
    let _turn = turn(1);
    let version = Qemu::chosen(None).version(&Arch::X86_64.qemu()).unwrap();
    if !version.is_mended() {
        return skipped(&format!(
            "QEMU {version} has no x86 PMU; script/qemu builds one that has"
        ));
    }
    let Some(kernel) = program("x86_64/payload.elf") else {
        return;
    };
    for (cpu, more) in [
        // The core extension, which this model has by itself.
        ("EPYC-Genoa", &[][..]),
        ("max,perfctr-core=on,perfmon-v2=on", &[]),
        ("max,perfctr-core=on,perfmon-v2=on", &["--realtime"]),
        // An instruction takes two nanoseconds.
        (
            "max,perfctr-core=on,perfmon-v2=on",
            &["--qemu-arg=-icount", "--qemu-arg=shift=1"],
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vpmu"))
            .args([
                "run", "--arch", "x86_64", "--pmu", "native", "--vcpus", "2", "--append", "busy",
            ])
            .args(["--cpu", cpu])
            .args(more)
            .arg("--kernel")
            .arg(&kernel)
            .output()
            .unwrap();
        let console = String::from_utf8_lossy(&output.stdout).replace('\r', "");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            console.contains(" 0 failed,"),
            "{cpu} {more:?}:\n{console}{errors}"
        );
        let tests = passed(&console);
        assert!(tests.contains("cpu1.amd.hostile"), "{cpu}:\n{console}");
        assert!(tests.contains("cpu1.svm.next_rip"), "{cpu}:\n{console}");
        assert_eq!(
            tests.contains("cpu1.native.branches"),
            more != ["--realtime"],
            "{cpu} {more:?}:\n{console}"
        );
        assert_eq!(
            tests.contains("amd.status"),
            cpu.contains("v2"),
            "{cpu}:\n{console}"
        );
    }
}

/// Checks deadlines of a guest that sets its TSC to 0, to 2^62, and close to where it wraps: each fires once, in time.
#[test]
fn the_lazy_deadline_keeps_time_with_any_tsc() {
    let _turn = turn(1);
    let options = "--model intel --vcpus 2 --vmm-arg=--lazy-deadline";
    let Some(console) = run(options, "test=deadline") else {
        return;
    };
    let tests = passed(&console);
    assert!(tests.contains("deadline.as_it_is"), "{console}");
    assert!(tests.contains("cpu1.deadline.as_it_is"), "{console}");
}

/// Checks the paravirtual PMU: a shared page in place of all registers, and one NMI for a driver that has died.
#[test]
fn the_paravirtual_pmu_does_what_its_page_says() {
    let _turn = turn(1);
    let Some(console) = run("--vmm-arg=--paravirt", "") else {
        return;
    };
    let tests = passed(&console);
    for test in ["counts", "overflow", "doorbells", "dead_driver", "hostile"] {
        assert!(tests.contains(&*format!("paravirt.{test}")), "{console}");
    }
}
