//! Stock arm64 guests with small jobs: under each design, and beside the machine itself.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{NO_SYMBOLS, compare, text, turn, vpmu};

/// `--no-bpf-event` spares perf a thread that wakes once a second. With that thread, real time would be rounded up to
/// whole seconds.
const FIFTEEN_EVENTS: &str = "perf record --no-bpf-event -F 1000 -e cycles,cycles:u,cycles:k,cycles,cycles:u,\
    cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k \
    -o perf.data -- gzip -c random.bin > /dev/null";
/// The same with a fixed period, so that the number of samples is no matter of when the kernel steers the period.
const FIXED_EVENTS: &str = "perf record --no-bpf-event -c 1000000 -e cycles,cycles:u,cycles:k,cycles,cycles:u,\
    cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k \
    -o perf.data -- gzip -c random.bin > /dev/null";
const SIX_EVENTS: &str = "perf record --no-bpf-event -F 1000 -e cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k \
    -o perf.data -- gzip -c random.bin > /dev/null";

/// Compares the designs and returns the written file. Figures are means of `runs`. perf finds no symbols of the kernel.
fn compare_quickly(designs: &str, runs: u32, command: &str, json: &Path) -> Option<String> {
    let runs = runs.to_string();
    let options = ["--pmu", designs, "--runs", &runs];
    compare("aarch64", &options, &format!("{NO_SYMBOLS}{command}"), json)
}

fn row<'a>(results: &'a Value, pmu: &str) -> &'a Value {
    results["runs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|run| run["pmu"] == pmu)
        .unwrap()
}

fn number(run: &Value, field: &str) -> f64 {
    run[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field} is {} in {run}", run[field]))
}

/// The kernel throttles for certain: it may take four samples between two ticks. The watchdog takes a counter, and is there
/// because the user says so.
#[test]
fn a_user_hears_of_throttling_and_has_the_watchdog() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let command = format!(
        "{NO_SYMBOLS}sysctl -w kernel.perf_event_max_sample_rate=1000 kernel.perf_cpu_time_max_percent=0 && \
         [ $(cat /proc/sys/kernel/watchdog) = 1 ] && mkdir -p /tmp/a && \
         perf record --no-bpf-event -q -e cycles -c 20000 -o /tmp/a/d -- workload --scale 300"
    );
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let output = vpmu
        .args([
            "run",
            "--arch",
            "aarch64",
            "--pmu",
            "native",
            "--append",
            "nmi_watchdog=1",
        ])
        .arg("--json")
        .arg(&json)
        .args(["--", &command])
        .output()
        .unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("throttled events"), "{said}");
    let results: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let run = &results["runs"][0];
    assert!(number(run, "throttled") > 0.0, "{run}");
    assert!(number(run, "samples") > 0.0, "{run}");
}

/// The promises of perf events, on a kernel's own driver of a hardware PMU: this one is QEMU's, without a virtual machine.
/// Also where the kernel throttles what overflows too often.
#[test]
#[ignore = "as the self-test, on Arm: script/test --long"]
fn a_hosts_promises_on_a_hardware_pmu() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/aarch64-unknown-linux-musl/release/vpmu-reprogram");
    if !program.exists() {
        eprintln!(
            "skipped: no vpmu-reprogram for arm64, which script/test builds where rustc has the library"
        );
        return;
    }
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    // QEMU's counters count the instructions of every processor, so the promises are about one. Threads move between two.
    const SCRIPT: &str = "chmod +x vpmu-reprogram
./vpmu-reprogram --check --backing hardware | grep 'wherever it runs'
echo 0 > /sys/devices/system/cpu/cpu1/online || exit
./vpmu-reprogram --check --backing hardware || exit
echo 2000 > /proc/sys/kernel/perf_event_max_sample_rate
./vpmu-reprogram --check --backing hardware";
    let options = [
        "run", "--arch", "aarch64", "--pmu", "native", "--vcpus", "2", "--add",
    ];
    let output = vpmu
        .args(options)
        .arg(program)
        .args(["--", SCRIPT])
        .output()
        .unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let moved = "ok       a thread is counted by itself";
    assert!(
        said.contains(moved) && said.contains("on 2 processors in turn"),
        "{said}"
    );
    // That one, and fifteen promises twice: none that could not be tried.
    let kept = said.lines().filter(|line| line.starts_with("ok ")).count();
    assert_eq!(kept, 31, "{said}");
}

#[test]
fn close_to_native() {
    let _turn = turn(usize::MAX);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let designs = "native,partitioned,direct";
    let Some(text) = compare_quickly(designs, 1, FIXED_EVENTS, &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(results["schema"], 1);
    let native = row(&results, "native");
    for pmu in ["partitioned", "direct"] {
        let run = row(&results, pmu);
        assert_eq!(run["status"], 0, "{run}");
        assert_eq!(run["guest_counters"], 6, "{run}");
        assert_eq!(run["deterministic"], true);
        let real = number(run, "real_s") / number(native, "real_s");
        assert!(real <= 1.02, "{pmu}: real_s is {real} of native's");
        // The sum is exact. The kernel divides it between the two by 250 ticks a second, whose moments each build draws
        // anew: native's own part of the system's time has differed by a fifth.
        let busy = |run| number(run, "user_s") + number(run, "sys_s");
        let ratio = busy(run) / busy(native);
        assert!(
            ratio <= 1.02,
            "{pmu}: user_s + sys_s is {ratio} of native's"
        );
        let samples = number(run, "samples") / number(native, "samples");
        assert!((0.98..=1.02).contains(&samples), "{pmu}: {samples}");
        assert!(number(run, "pmis") > 500.0, "{run}");
        assert!(number(run, "exits_per_pmi") <= 2.0, "{run}");
        assert!(number(run, "host_share") < 0.01, "{run}");
        for kind in run["exits"].as_object().unwrap().keys() {
            for register in ["PMCR", "PMCNTEN", "PMINTEN", "PMCCNTR", "PMEVCNTR"] {
                assert!(!kind.contains(register), "{pmu} trapped {kind}");
            }
        }
    }
    assert!(native["exits"].is_null(), "{native}");
    // Only the doorbell that begins the measurement exits, once for all runs.
    let direct = row(&results, "direct");
    assert_eq!(
        direct["monitor"]["measured"]["exits"],
        serde_json::json!({ "data_abort:doorbell": 1 })
    );
}

#[test]
#[ignore = "long: script/test --long"]
fn emulated_beats_kvm() {
    let _turn = turn(2);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let Some(text) = compare_quickly("kvm,emulated", 1, FIFTEEN_EVENTS, &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    let (kvm, emulated) = (row(&results, "kvm"), row(&results, "emulated"));
    for run in [kvm, emulated] {
        assert_eq!(run["status"], 0, "{run}");
        assert_eq!(run["guest_counters"], 6, "{run}");
        assert!(number(run, "samples") > 500.0, "{run}");
    }
    for figure in ["real_s", "exits_per_pmi", "host_share"] {
        let (kvm, ours) = (number(kvm, figure), number(emulated, figure));
        assert!(ours < kvm, "{figure}: {ours} emulated, {kvm} KVM");
    }
}

/// Runs script/demo's command, symbols included, at the rate that costs most. The registers that the hardware answers
/// do not trap: QEMU's `max` has FEAT_FGT.
#[test]
#[ignore = "as script/demo, with bounds: script/test --long"]
fn emulated_is_close_to_native() {
    let _turn = turn(2);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let command = FIFTEEN_EVENTS.replace("-F 1000", "-F 4000");
    let Some(text) = compare("aarch64", &["--pmu", "native,emulated"], &command, &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    let (native, emulated) = (row(&results, "native"), row(&results, "emulated"));
    let real = number(emulated, "real_s") / number(native, "real_s");
    assert!(real <= 1.04, "real_s is {real} of native's");
    assert!(number(emulated, "exits_per_pmi") <= 7.0, "{emulated}");
    for kind in emulated["exits"].as_object().unwrap().keys() {
        for untrapped in [
            "PMCR_EL0:r",
            "PMEVCNTR",
            "PMCCNTR",
            "PMOVSCLR_EL0:r",
            "PMUSERENR",
        ] {
            assert!(!kind.contains(untrapped), "trapped {kind}: {emulated}");
        }
    }
}

/// Checks that a host that keeps counters for itself costs the guest no exit, where the machine keeps them apart. The guest's
/// own ticks are not the PMU's: with fewer counters there are fewer PMIs beside as many ticks.
#[test]
#[ignore = "long: script/test --long"]
fn counters_of_the_host_s_cost_no_exit() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let command = FIFTEEN_EVENTS.replace("-F 1000", "-F 4000");
    for host_counters in ["0", "2"] {
        let options = ["--pmu", "partitioned", "--host-counters", host_counters];
        let quick = format!("{NO_SYMBOLS}{command}");
        let Some(text) = compare("aarch64", &options, &quick, &json) else {
            return;
        };
        let results: Value = serde_json::from_str(&text).unwrap();
        let run = row(&results, "partitioned");
        let exits = number(run, "pmu_exits_per_pmi");
        // Debian's QEMU 10.0 does not, so that each access traps there.
        let apart = run["monitor"]["isolation"]["partition"] == true || host_counters == "0";
        assert_eq!(exits <= 1.01, apart, "{host_counters}: {exits} exits a PMI");
    }
}

/// Checks that each PMI is a sample on every CPU, idle or busy. What the kernel throttles on a CPU without ticks makes none.
#[test]
fn cpus_that_idle_lose_no_sample() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let command = "perf record -a --no-bpf-event -e cycles -F 1000 -o perf.data -- workload";
    for design in ["emulated", "partitioned"] {
        let options = ["--pmu", design, "--vcpus", "4"];
        let Some(text) = compare("aarch64", &options, command, &json) else {
            return;
        };
        let results: Value = serde_json::from_str(&text).unwrap();
        let run = row(&results, design);
        // A CPU that idles counts no cycles: the workload's 100 ms, and what perf does on each CPU.
        assert!(number(run, "pmis") > 100.0, "{run}");
        // One may come when perf has just stopped the event.
        let ratio = number(run, "samples") / number(run, "pmis");
        assert!((0.99..=1.0).contains(&ratio), "{run}");
    }
}

/// Checks that a page is asked for and has the guest's own profile: every sample, under the names of the functions.
#[test]
fn the_page_has_the_guest_s_profile() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let options = ["--pmu", "partitioned", "--html", page.to_str().unwrap()];
    let command =
        "perf record --no-bpf-event -q -F 2000 -e cycles -o perf.data workload --scale 2000";
    let json = folder.path().join("results.json");
    let Some(text) = compare("aarch64", &options, command, &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    let run = row(&results, "partitioned");
    let folded = run["guest_profile"]["folded"].as_object().unwrap();
    let samples = |count: &Value| count.as_u64().unwrap();
    let all: u64 = folded.values().map(samples).sum();
    assert_eq!(Some(all), run["samples"].as_u64(), "{folded:?}");
    let foo = samples(&folded["workload;foo"]) as f64 / all as f64;
    assert!((0.4..0.6).contains(&foo), "{foo}: {folded:?}");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("partitioned: the guest&#39;s own profile"));
}

/// Checks that designs take exactly the samples that native takes, with a fixed period and user-space events.
#[test]
fn samples_agree() {
    let _turn = turn(3);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let command = "perf record -c 100000 -e cycles:u,instructions:u,cycles:u,instructions:u \
        -o perf.data -- workload";
    let designs = "emulated,partitioned,direct";
    let Some(text) = compare_quickly(designs, 1, command, &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    // The guest runs 100,000,078 instructions of one cycle each, and samples four events.
    for pmu in designs.split(',') {
        let run = row(&results, pmu);
        assert_eq!(run["samples"], 4000, "{run}");
        assert_eq!(run["lost_samples"], 0, "{run}");
    }
}

#[test]
#[ignore = "long: script/test --long"]
fn two_runs_are_one() {
    let _turn = turn(3);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.json");
    let designs = "native,emulated,partitioned";
    let Some(first) = compare_quickly(designs, 1, SIX_EVENTS, &path) else {
        return;
    };
    let second = compare_quickly(designs, 1, SIX_EVENTS, &path).unwrap();
    assert_eq!(first, second);
}

#[test]
fn run_passes_bytes_and_status() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let added = folder.path().join("added.txt");
    fs::write(&added, "added\n").unwrap();
    let output = vpmu
        .args(["run", "--add"])
        .arg(&added)
        .args(["--", r"cat added.txt; printf 'a\r\nb\000\036\377'; exit 7"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", text(&output));
    assert_eq!(output.stdout, b"added\na\r\nb\0\x1e\xff");
}

#[test]
fn a_killed_command_has_its_signal_in_the_status() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let output = vpmu.args(["run", "--", "kill -9 $$"]).output().unwrap();
    assert_eq!(output.status.code(), Some(137), "{}", text(&output));
}

#[test]
fn a_panic_is_reported() {
    let _turn = turn(1);
    for pmu in ["kvm", "partitioned"] {
        let Some(mut vpmu) = vpmu("aarch64") else {
            return;
        };
        let output = vpmu
            .args(["run", "--pmu", pmu, "--", "echo c > /proc/sysrq-trigger"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(125), "{}", text(&output));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("kernel gave up"), "{pmu}: {errors}");
        assert!(errors.contains("Kernel panic"), "{pmu}: {errors}");
    }
}

#[test]
fn the_time_limit_works() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let output = vpmu
        .args(["run", "--timeout", "2", "--", "while :; do :; done"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{errors}");
    assert!(errors.contains("--timeout"), "{errors}");
}

#[test]
fn no_qemu_stays_behind() {
    let _turn = turn(1);
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let Some(mut vpmu) = vpmu("aarch64") else {
            return;
        };
        let mut child = vpmu
            .args(["run", "--", "echo here; while :; do :; done"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let mut line = [0; 5];
        stdout.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"here\n");
        let qemus = children(&child);
        assert_eq!(qemus.len(), 1);
        kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), signal).unwrap();
        let status = child.wait().unwrap();
        if signal != Signal::KILL {
            assert_eq!(status.code(), Some(130));
        }
        let gone = || qemus.iter().all(|qemu| !is_running(qemu));
        let start = Instant::now();
        while !gone() {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{qemus:?} after {signal:?}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the /proc folders of a process's children, whichever thread started them.
fn children(parent: &Child) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{}/task", parent.id())).unwrap();
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|pids| {
            pids.split_whitespace()
                .map(|pid| PathBuf::from("/proc").join(pid))
                .collect::<Vec<_>>()
        })
        .collect()
}

fn is_running(process: &Path) -> bool {
    fs::read_to_string(process.join("stat")).is_ok_and(|stat| !stat.contains(") Z "))
}
