//! Which time counts where a clock does: with the host's work for the guest's exits, or without.

use std::process::Command;

use crate::payload::program;
use crate::support::{Compared, NO_SYMBOLS, compared, nested_vpmu, number, turn};

/// RDPMC of user space is an exit to the VMM. `self-monitor` executes 2,000, and compares each value with the kernel's.
const SCRIPT: &str = r#"
cycles() { awk -F, -v what=$1 '$3 ~ /^cycles/ { print what, $1 }' stat; }
perf stat -x, -o stat -e cycles workload --scale 840; cycles computing
chmod +x self-monitor
perf stat -x, -o stat -e cycles ./self-monitor; echo "monitored $?"; cycles exiting
perf stat -x, -o stat -e cycles:k ./self-monitor; cycles kernel
perf record --no-bpf-event -q -c 1000000 -e cycles -o p workload --scale 840
perf script -i p -F ip 2> /dev/null | awk '{ n++ } END { print "samples", n + 0 }'
dmesg | grep -c -i -E 'unknown NMI|call trace|stall' > complaints; echo complaints $(cat complaints)
true"#;

struct Counted {
    computing: f64,
    exiting: f64,
    kernel: f64,
    samples: f64,
}

fn run(freeze: &str) -> Option<Counted> {
    let mut vpmu = nested_vpmu(", in real time, where an exit takes as long as the machine likes")?;
    let monitor = program("x86_64/self-monitor")?;
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", "amd", "--freeze", freeze])
            .arg("--add")
            .arg(&monitor);
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let Compared { console, run, .. } = compared(&mut vpmu, options, &script);
    assert_eq!(run["vmm"]["freeze"], freeze);
    assert_eq!(number::<u64>(&console, "complaints"), 0);
    assert_eq!(number::<u64>(&console, "monitored"), 0);
    Some(Counted {
        computing: number(&console, "computing"),
        exiting: number(&console, "exiting"),
        kernel: number(&console, "kernel"),
        samples: number(&console, "samples"),
    })
}

#[test]
#[ignore = "long: script/test --long"]
fn a_loop_of_exits_counts_with_the_hosts_work_or_without() {
    let _turn = turn(1);
    let Some(vm) = run("vm") else {
        return;
    };
    let guest = run("guest").unwrap();
    // Nearly all of that loop's time is the host's, and hardly any of the computation's.
    assert!(
        guest.exiting * 3.0 < vm.exiting,
        "{} {}",
        guest.exiting,
        vm.exiting
    );
    assert!(
        guest.kernel * 3.0 < vm.kernel,
        "{} {}",
        guest.kernel,
        vm.kernel
    );
    // The samples that divide the time interrupt the guest, and find it running.
    let computing = guest.computing / vm.computing;
    assert!((0.95..=1.08).contains(&computing), "{computing}");
    // A sample for each period that was counted.
    let samples = guest.samples / guest.computing * 1e6;
    assert!((0.85..=1.15).contains(&samples), "{samples}");
}
