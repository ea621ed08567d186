//! RDPMC in the text of a module, `guest/counter_reader`: served at each fault, then as RDMSR, and after the module has
//! gone and another has come to its memory.
//!
//! Needs gcc 12 and make, too.

use std::process::Command;

use vpmu_lab::image::module::Kernel;

use crate::support::{Compared, NO_SYMBOLS, compared, modules, nested_vpmu, number, said, turn};

/// A counter runs meanwhile. `NOBODYS` is an index that no counter has: the module's own #GP. More modules come and go
/// than there is room for.
const SCRIPT: &str = r#"
cat > inside <<'END'
r=/sys/module/counter_reader/parameters
reads() { sed "s/^/$1 /" $r/reads; }
insmod /root/counter_reader.ko counter=COUNTER; reads first
echo NOBODYS > $r/counter; reads rewritten
rmmod counter_reader
insmod /root/counter_reader.ko counter=NOBODYS; reads nobodys
echo COUNTER > $r/counter; reads then
rmmod counter_reader
for n in $(seq 80); do
    insmod /root/counter_reader.ko counter=COUNTER count=10; cat $r/reads; rmmod counter_reader
done | sort | uniq -c | awk '{ $1 = "many " $1; print }'
END
perf stat -x, -a -o stat -e cycles -- sh inside
awk -F, '/cycles/ { print "counted", $1 }' stat
echo "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
true"#;

fn check(kernel: Kernel, model: &str, counter: u32) {
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(", and a vCPU of its own reads its own counters") else {
        return;
    };
    let Some(modules) = modules(kernel) else {
        return;
    };
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", model])
            .args(["--append", "kaslr", "--kernel"])
            .arg(modules.kernel())
            .arg("--add")
            .arg(modules.counter_reader());
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let script = script
        .replace("COUNTER", &counter.to_string())
        .replace("NOBODYS", "0x12345");
    let Compared { console, run, .. } = compared(&mut vpmu, options, &script);
    // The instruction faults once.
    let served = "read 1000 refused 0 backwards 0 code 0f 32";
    assert_eq!(said(&console, "first"), served);
    let refused = "read 0 refused 1000 backwards 0 code 0f";
    assert_eq!(said(&console, "rewritten"), format!("{refused} 32"));
    assert_eq!(said(&console, "nobodys"), format!("{refused} 33"));
    assert_eq!(said(&console, "then"), served);
    let many = "80 read 10 refused 0 backwards 0 code 0f 32";
    assert_eq!(said(&console, "many"), many);
    assert!(number::<u64>(&console, "counted") > 1_000_000, "{console}");
    assert_eq!(number::<u64>(&console, "complaints"), 0, "{console}");
    assert!(run["exits"]["rdpmc"].as_u64() > Some(2800), "{run}");
}

#[test]
#[ignore = "long: script/test --long"]
fn a_module_reads_counters() {
    check(Kernel::Bookworm, "amd", 0);
}

/// Cycles are Intel's fixed counter 1.
#[test]
#[ignore = "as the one above, another kernel and PMU: script/test --long"]
fn a_module_of_a_newer_kernel_reads_fixed_counters() {
    check(Kernel::Backports, "intel", 1 << 30 | 1);
}
