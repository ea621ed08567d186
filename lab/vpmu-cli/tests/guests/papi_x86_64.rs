//! PAPI's and libpfm's own tests in stock guests: programs that count themselves, and read with RDPMC.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Compared, compared, nested_vpmu, number, skipped, turn};

/// Those of PAPI's tests that do not pass here: they need an event of floating-point instructions, and nothing but
/// cycles, and instructions approximately, can be counted without hardware counters.
const WITHOUT_THEIR_EVENT: [&str; 5] = [
    "derived",
    "inherit",
    "overflow_pthreads",
    "overflow_twoevents",
    // Says by itself that the events are missing.
    "tenth",
];

const PAPI: &str = r#"
tar xzf counter-tests.tar.gz; cd counter-tests/papi; PATH=$PATH:.
for name in *; do
    timeout 100 ./$name TESTS_QUIET > ../out 2>&1; status=$?
    grep -q PASSED ../out && status="$status PASSED"
    echo "papi $name $status"
done
true"#;

/// EVENTS: what can be counted.
const LIBPFM: &str = r#"
tar xzf counter-tests.tar.gz; cd counter-tests/libpfm
check() { name=$1; shift; timeout 100 "$@" > out 2>&1; echo "libpfm $name $?"; }
check check_events ./check_events
check self ./self
check self_basic ./self_basic
check self_pipe ./self_pipe -e EVENTS
check notify_self ./notify_self
check self_smpl_multi ./self_smpl_multi -t 2
check task ./task -e EVENTS workload --scale 100
# It samples with a period that its event names, and with none refuses.
check task_smpl ./task_smpl -e cycles:period=1000000 workload --scale 100
echo "samples $(grep -c IIP out)"
check syst_count ./syst_count -d 1 -e EVENTS
check self_count ./self_count
# An endless loop of this program's makes as many lines as fit its ten seconds. Each is a difference of two RDPMCs.
awk '/cycles/ { n++; if (n > 1 && ($1 < 1000000 || $1 > 10000000000)) odd++ } END { print "lines", n; print "odd", odd + 0 }' out
true"#;

fn programs() -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../script/papi");
    let output = Command::new(script).output().unwrap();
    if !output.status.success() {
        skipped(&String::from_utf8_lossy(&output.stderr));
        return None;
    }
    let path = String::from_utf8(output.stdout).unwrap();
    Some(PathBuf::from(path.trim()))
}

/// Runs `script` in a guest of this model, and returns what it has found.
fn found(model: &[&str], script: &str) -> Option<Compared> {
    let (mut vpmu, programs) = (nested_vpmu(": its counters count all")?, programs()?);
    let own = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--timeout", "1800"])
            .args(model)
            .arg("--vmm-arg=--approximate-instructions")
            .arg("--add")
            .arg(programs);
    };
    Some(compared(&mut vpmu, own, script))
}

/// A processor that libpfm knows; PAPI counts on no other.
const MILAN: [&str; 4] = ["--model", "amd", "--cpu", "EPYC-Milan,-pcid"];

#[test]
#[ignore = "long: script/test --long"]
fn papis_own_tests_pass() {
    let _turn = turn(1);
    let Some(Compared { console, run, .. }) = found(&MILAN, PAPI) else {
        return;
    };
    let results = console
        .lines()
        .filter_map(|line| line.strip_prefix("papi "));
    let results: Vec<&str> = results.map(str::trim).collect();
    assert_eq!(results.len(), 39, "{console}");
    for result in results {
        let (name, result) = result.split_once(' ').unwrap();
        // It is a helper of the others', and says nothing.
        let has_passed = result == "0 PASSED" || name == "attach_target";
        let expected = !WITHOUT_THEIR_EVENT.contains(&name);
        assert_eq!(has_passed, expected, "{name} {result}");
    }
    assert!(run["exits"]["rdpmc"].as_u64() > Some(1000), "{run}");
}

fn libpfm(model: &[&str], events: &str) {
    let _turn = turn(1);
    let script = LIBPFM.replace("EVENTS", events);
    let Some(Compared { console, .. }) = found(model, &script) else {
        return;
    };
    let failed = console.lines().filter(|line| {
        line.strip_prefix("libpfm ")
            .is_some_and(|result| !result.trim().ends_with(" 0"))
    });
    assert_eq!(failed.collect::<Vec<_>>(), Vec::<&str>::new(), "{console}");
    assert_eq!(console.matches("libpfm ").count(), 10, "{console}");
    let number = |word| number::<u64>(&console, word);
    // Ten million instructions at least, a cycle each where instructions are counted time.
    assert!((10..20).contains(&number("samples")), "{console}");
    assert!(number("lines") > 20, "{console}");
    assert_eq!(number("odd"), 0, "{console}");
}

#[test]
#[ignore = "long: script/test --long"]
fn libpfms_own_programs_count_on_amd() {
    libpfm(&MILAN, "cycles,instructions");
}

/// libpfm finds what each processor with Intel's architectural PMU has.
#[test]
#[ignore = "long: script/test --long"]
fn libpfms_own_programs_count_on_intel() {
    libpfm(&["--model", "intel"], "cycles,UNHALTED_CORE_CYCLES");
}
