//! `vpmu exec`: an unchanged QEMU in the KVM host, whose guest has the PMU.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use vpmu_lab::image::module::Kernel;

use vpmu_lab::spec::arch::Arch;

use crate::support::{
    Compared, NO_SYMBOLS, compare, compared, images, modules, nested_vpmu, number, said, turn,
};

const IN_REAL_TIME: &str = ", under vpmu-vmm, and QEMU's are in the lab's KVM host";

/// Runs `script` in a guest of such a QEMU. `more` are QEMU's options.
fn run(options: &[&str], more: &[&str], script: &str) -> Option<Compared> {
    let mut vpmu = nested_vpmu(IN_REAL_TIME)?;
    let own = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "exec"]).args(options);
        vpmu.args(more.iter().map(|word| format!("--vmm-arg={word}")));
    };
    Some(compared(&mut vpmu, own, &[NO_SYMBOLS, script].concat()))
}

/// Runs the same command under this project's own VMM and under another, whose guest has the same PMU.
fn beside_our_vmm(design: &str) -> Option<[Value; 2]> {
    nested_vpmu(IN_REAL_TIME)?;
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let record =
        "perf record --no-bpf-event -q -e cycles -c 1000000 -o perf.data -- workload --scale 2500";
    let script = format!("{NO_SYMBOLS}{record}");
    let designs = format!("emulated,{design}");
    let text = compare("x86_64", &["--pmu", &designs], &script, &json)?;
    let results: Value = serde_json::from_str(&text).unwrap();
    let runs = [0, 1].map(|row| results["runs"][row].clone());
    for run in &runs {
        assert_eq!(run["status"], 0, "{run}");
        assert_eq!(run["samples"], run["pmis"], "{run}");
        assert!(run["samples"].as_u64() > Some(200), "{run}");
    }
    Some(runs)
}

fn figure(run: &Value, name: &str) -> f64 {
    run[name].as_f64().unwrap()
}

/// QEMU under `vpmu exec` takes the same exits for the PMU, and hardly longer.
#[test]
#[ignore = "long: script/test --long"]
fn a_sample_costs_as_much_as_under_a_vmm_that_embeds_the_pmu() {
    let _turn = turn(2);
    let Some([ours, qemu]) = beside_our_vmm("exec") else {
        return;
    };
    let exits = [&ours, &qemu].map(|run| figure(run, "pmu_exits_per_pmi"));
    assert!((exits[0] - exits[1]).abs() < 0.1, "{exits:?}");
    let per_sample = [&ours, &qemu].map(|run| figure(run, "real_s") / figure(run, "samples"));
    // Guest time is counted in instructions.
    assert!(per_sample[1] <= 1.3 * per_sample[0], "{per_sample:?}");
}

/// KASLR, a bzImage that the guest unpacks itself, two vCPUs, another machine, and QEMU's own filter of system calls.
#[test]
fn any_kernel_of_any_machine_counts_and_samples_on_each_vcpu() {
    // The period is no multiple of the workload's unit: each function has its share of the samples, wherever the first falls.
    const SCRIPT: &str = "
echo driver $(dmesg | grep -c 'Intel PMU driver')
taskset -c 1 perf stat -x, -o stat -e cycles -- workload
awk -F, '$3 == \"cycles\" { print \"counted\", $1 }' stat
perf record --no-bpf-event -q -a -e cycles -c 561803 -o perf.data -- workload --scale 2000
perf report -i perf.data --stdio --stdio-color never --no-children -F overhead,symbol 2> /dev/null |
    awk '/ (foo|bar|qux)$/ { sub(\"%\", \"\", $1); print $3, $1 }'
dmesg | grep -c -i -E 'unknown NMI|call trace|stall' > complaints; echo complaints $(cat complaints)";
    let _turn = turn(1);
    let options = ["--model", "intel", "--vcpus", "2", "--append", "kaslr"];
    let more = ["-machine", "q35", "-sandbox", "on"];
    let Some(Compared { console, run, .. }) = run(&options, &more, SCRIPT) else {
        return;
    };
    assert_eq!(number::<u64>(&console, "driver"), 1);
    assert!(number::<u64>(&console, "counted") > 1_000_000);
    assert_eq!(number::<u64>(&console, "complaints"), 0);
    assert!(run["samples"].as_u64() > Some(300), "{run}");
    assert_eq!(run["vmm"]["model"], "intel");
    let [foo, bar, qux] = ["foo", "bar", "qux"].map(|name| number::<f64>(&console, name));
    assert!(foo > bar && bar > qux && qux > 5.0, "{console}");
}

/// Returns the QEMU that embeds the PMU.
pub(crate) fn patched_qemu() -> Option<PathBuf> {
    let folder = std::env::var_os("VPMU_PATCHED_QEMU");
    if folder.is_none() {
        eprintln!(
            "skipped: VPMU_PATCHED_QEMU names no folder (script/qemu --vpmu builds that QEMU)"
        );
    }
    Some(PathBuf::from(folder?).join("qemu-system-x86_64-vpmu"))
}

/// A vCPU that comes later brings no PMU into a machine without.
#[test]
#[ignore = "long: script/test --long"]
fn the_patched_qemu_refuses_a_pmu_beside_vcpus_without() {
    const COMMANDS: &str = "
device_add qemu64-x86_64-cpu,id=with,socket-id=1,core-id=0,thread-id=0,vpmu=on
device_add qemu64-x86_64-cpu,id=without,socket-id=1,core-id=0,thread-id=0
info cpus
quit
";
    let Some(program) = patched_qemu() else {
        return;
    };
    let mut qemu = Command::new(program)
        .args([
            "-accel",
            "kvm",
            "-cpu",
            "qemu64",
            "-smp",
            "1,sockets=2,maxcpus=2",
        ])
        .args(["-display", "none", "-monitor", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut monitor = qemu.stdin.take().unwrap();
    monitor.write_all(COMMANDS.as_bytes()).unwrap();
    let output = qemu.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(
        said.contains("where the VM's first CPU has vpmu=off"),
        "{said}"
    );
    assert!(said.contains("CPU #1"), "{said}");
}

/// The QEMU that embeds the PMU: as many exits as under this project's own VMM, and hardly more time.
#[test]
#[ignore = "long: script/test --long"]
fn a_sample_costs_as_much_under_the_patched_qemu() {
    let _turn = turn(2);
    if patched_qemu().is_none() {
        return;
    }
    let Some([ours, qemu]) = beside_our_vmm("qemu") else {
        return;
    };
    let exits = |name| [&ours, &qemu].map(|run| figure(run, name));
    let [of_the_pmu, all] = [exits("pmu_exits_per_pmi"), exits("exits_per_pmi")];
    assert!(
        (of_the_pmu[0] - of_the_pmu[1]).abs() < 0.1,
        "{of_the_pmu:?}"
    );
    assert!((all[0] - all[1]).abs() < 1.0, "{all:?}");
    let per_sample = [&ours, &qemu].map(|run| figure(run, "real_s") / figure(run, "samples"));
    assert!(per_sample[1] <= 1.1 * per_sample[0], "{per_sample:?}");
}

/// A guest of that QEMU's goes to another process, back to an earlier state, or begins again, eight times each, while
/// perf samples all of it: once at each moment of the tick that the KVM host chooses (`work_ms`). Each PMI is a sample, and there are as many as in a guest that is left alone.
#[test]
#[ignore = "long: script/test --long"]
fn the_patched_qemu_loses_nothing_of_a_guest_that_moves_goes_back_or_is_reset() {
    // The guest's clock goes on while the guest is moved, within a PMI's handler, too. Its kernel would take that for a
    // slow handler, and throttle perf.
    const SCRIPT: &str = "
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent
perf record --no-bpf-event -q -a -e cycles -c 1000000 -o perf.data -- workload --scale 12000
dmesg | grep -c -i -E 'unknown NMI|call trace|stall|lockup|hung task' > complaints; echo complaints $(cat complaints)";
    let _turn = turn(2);
    if patched_qemu().is_none() {
        return;
    }
    let samples = |disturb: &str| -> Option<f64> {
        let mut vpmu = nested_vpmu(IN_REAL_TIME)?;
        let own = |vpmu: &mut Command| {
            vpmu.args(["--pmu", "qemu", "--model", "intel"]);
            if !disturb.is_empty() {
                vpmu.arg(format!("--vmm-arg=--disturb={disturb}"));
            }
        };
        let it = compared(&mut vpmu, own, &[NO_SYMBOLS, SCRIPT].concat());
        assert_eq!(number::<u64>(&it.console, "complaints"), 0, "{disturb}");
        let done = it.console.matches(": done ").count();
        let expected = match disturb.split_once(':') {
            // Another process resets the guest each time.
            Some(("reset", times)) => times.parse().unwrap(),
            _ => usize::from(!disturb.is_empty()),
        };
        assert_eq!(done, expected, "{disturb}");
        assert_eq!(it.run["samples"], it.run["pmis"], "{disturb}");
        assert_eq!(it.run["lost_samples"], 0, "{disturb}");
        it.run["samples"].as_f64()
    };
    let Some(alone) = samples("") else {
        return;
    };
    assert!(alone > 1000.0, "{alone}");
    for disturb in ["migrate:8", "loadvm:8", "reset:8"] {
        let disturbed = samples(disturb).unwrap();
        // What QEMU does for the guest on the vCPU's thread is in the clock that counts.
        let part = disturbed / alone;
        assert!(
            (0.995..1.05).contains(&part),
            "{disturb}: {disturbed} of {alone}"
        );
    }
}

/// A bzImage that `vpmu rewrite-kernel` has packed again boots as any other, at an address that it chooses, and counts.
fn a_rewritten_bzimage(kernel: &Path) {
    const SCRIPT: &str = "umount /proc/kallsyms
echo text $(grep -w _text /proc/kallsyms)
perf stat -x, -o stat -e cycles -- workload
awk -F, '$3 == \"cycles\" { print \"counted\", $1 }' stat
perf record --no-bpf-event -q -e cycles -c 2000000 -o perf.data -- workload --scale 1000";
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let rewritten = folder.path().join("bzImage");
    let done = Command::new(env!("CARGO_BIN_EXE_vpmu"))
        .args(["rewrite-kernel", "--bzimage"])
        .args([kernel, &rewritten])
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let path = rewritten.to_str().unwrap();
    let options = ["--model", "intel", "--append", "kaslr", "--kernel", path];
    let Some(Compared { console, run, .. }) = run(&options, &[], SCRIPT) else {
        return;
    };
    assert!(
        !said(&console, "text").starts_with("ffffffff81000000"),
        "{console}"
    );
    assert!(number::<u64>(&console, "counted") > 1_000_000, "{console}");
    assert!(run["samples"].as_u64() > Some(20), "{run}");
}

#[test]
#[ignore = "as the unit tests of vpmu-kernel, a whole kernel: script/test --long"]
fn a_rewritten_bzimage_of_zstd_boots() {
    a_rewritten_bzimage(&images(Arch::X86_64).kernel());
}

#[test]
#[ignore = "as the unit tests of vpmu-kernel, a whole kernel: script/test --long"]
fn a_rewritten_bzimage_of_lz4_boots() {
    if let Some(modules) = modules(Kernel::Bookworm) {
        a_rewritten_bzimage(&modules.kernel());
    }
}

/// likwid, which writes and reads the counters' registers by itself (/dev/cpu/0/msr and RDPMC): a model that it knows, the
/// module of that device, and Debian's package. An instruction is a cycle there.
#[test]
#[ignore = "downloads packages: script/test --long"]
fn likwid_counts_by_itself() {
    const SCRIPT: &str = "/usr/bin/setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'echo ids $(id -u):$(id -g)'
likwid-perfctr -f -O -C 0 -g CPU_CLOCKS_UNHALTED:PMC0 workload | awk -F, '/^CPU_CLOCKS/ { print \"counted\", $3 }'";
    let _turn = turn(1);
    let packages = ["likwid", "bash", "util-linux"];
    let options = packages.iter().flat_map(|name| ["--package", name]);
    let options = ["--cpu", "EPYC-Genoa", "--module", "msr"]
        .into_iter()
        .chain(options);
    let Some(Compared { console, .. }) = run(&options.collect::<Vec<_>>(), &[], SCRIPT) else {
        return;
    };
    assert_eq!(said(&console, "ids"), "1000:1000");
    let counted = number::<f64>(&console, "counted");
    // likwid starts the counters when the program has begun.
    assert!((95e6..115e6).contains(&counted), "{counted}");
}
