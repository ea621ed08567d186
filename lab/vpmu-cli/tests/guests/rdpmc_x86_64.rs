//! RDPMC of stock guests whose kernels nobody has rewritten: KASLR, user space, two processors, and a guest that cannot
//! be served.

use std::fs;
use std::process::Command;

use vpmu_lab::spec::arch::Arch;

use crate::payload::program;
use crate::support::{
    Compared, NO_SYMBOLS, compared, images, nested_vpmu, number, said, turn, vpmu,
};

/// Each line that a test reads begins with a word of its own.
const SCRIPT: &str = r#"
echo "text $(grep -m1 -w _text /proc/kallsyms)"
echo 1 > /proc/sys/kernel/kptr_restrict
echo "vmalloc $(head -n 1 /proc/vmallocinfo)"
echo "isolated $(dmesg | grep -c 'page tables isolation: enabled')"
echo "driver $(dmesg | grep -c 'PMU driver')"
echo "unavailable $(dmesg | grep -c 'PMU not available due to virtualization')"
chmod +x self-monitor; ./self-monitor; echo "monitored $?"
mount -o bind /dev/null /proc/kallsyms
perf stat -x, -o stat -e cycles workload --scale 300
awk -F, '/cycles/ { print "counted", $1 }' stat
perf record --no-bpf-event -q -a -e cycles -c 500000 -o a -- workload --scale 300
echo "sampled $(perf report -i a --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }')"
perf stat -x, -o slept -e cycles workload --scale 3000 & sleep 0.05
echo disk > /sys/power/state || echo "no swap to hibernate into"; wait
awk -F, '/cycles/ { print "slept", $1 }' slept
echo "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
true"#;

/// Returns whether the kernel's addresses are what page tables of four levels can have: KASLR chooses among all of them.
fn is_of_four_levels(console: &str) -> bool {
    let address = said(console, "vmalloc").strip_prefix("0x").unwrap();
    let (begin, _) = address.split_once('-').unwrap();
    u64::from_str_radix(begin, 16).unwrap() >= 0xffff_8000_0000_0000
}

/// Runs the script with a bzImage as Debian packs it, at an address that the kernel chooses.
fn check(model: &str, kernel_options: &str) -> Option<Compared> {
    let (mut vpmu, monitor) = (vpmu("x86_64")?, program("x86_64/self-monitor")?);
    let kernel = images(Arch::X86_64).kernel();
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", model, "--vcpus", "2"])
            .args(["--append", kernel_options, "--kernel"])
            .arg(&kernel)
            .arg("--add")
            .arg(&monitor);
    };
    let compared = compared(&mut vpmu, options, SCRIPT);
    let Compared { console, run, .. } = &compared;
    let number = |word| number::<u64>(console, word);
    assert!(
        !said(console, "text").starts_with("ffffffff81000000"),
        "{console}"
    );
    assert_eq!((number("driver"), number("unavailable")), (1, 0));
    assert_eq!(number("monitored"), 0, "{console}");
    let monitored = said(console, "self-monitor:");
    assert!(monitored.starts_with("rdpmc 2000 backwards 0 outside 0 fallbacks 0"));
    // The work is thirty million instructions, a cycle each where instructions are counted time.
    assert!(number("counted") > 1_000_000 && number("sampled") > 10);
    // The guest's second processor went and came back meanwhile.
    assert!(console.contains("no swap to hibernate into"), "{console}");
    assert!(number("slept") > 10 * number("counted") / 2, "{console}");
    assert_eq!(number("complaints"), 0, "{console}");
    assert!(run["exits"]["rdpmc"].as_u64() > Some(4000), "{run}");
    // Each vCPU searches for the handler at its first access, and again at controls written more than 100 ms later: each
    // perf command is one, and no PMI is.
    let arming = &run["vmm"]["total"]["arming"];
    assert!(
        (2..50).contains(&arming["searches"].as_u64().unwrap()),
        "{run}"
    );
    assert_eq!(arming["refused"], 0, "{run}");
    Some(compared)
}

#[test]
fn a_bzimage_with_kaslr_has_rdpmc_in_the_kernel_and_in_user_space() {
    let _turn = turn(1);
    // QEMU's most capable processor has page tables of five levels.
    if let Some(Compared { console, .. }) = check("auto", "kaslr") {
        let is_deep = !is_of_four_levels(&console);
        assert!(is_deep || Arch::X86_64.has_hardware_kvm(), "{console}");
    }
}

/// Page tables of four levels, and others for user space (KPTI).
#[test]
#[ignore = "long: script/test --long"]
fn so_has_an_intel_guest_with_other_page_tables() {
    let _turn = turn(1);
    if let Some(Compared { console, .. }) = check("intel", "kaslr pti=on no5lvl") {
        assert_eq!(said(&console, "isolated"), "1");
        assert!(is_of_four_levels(&console), "{console}");
    }
}

/// Compares both ways of the same work: they take the same exits for a PMI, and the same samples.
#[test]
#[ignore = "as two benches: script/test --long"]
fn rdpmc_at_run_time_costs_what_rewriting_at_load_costs() {
    let _turn = turn(2);
    // The guest's kernel throttles by the time that its samples take. Where it does, neither way's samples are known.
    let script = format!(
        "{NO_SYMBOLS}perf record --no-bpf-event -q -e cycles -c 300000 -- workload --scale 3000"
    );
    let run = |way: &str| {
        let mut vpmu = nested_vpmu(": time is not counted in instructions there")?;
        let options = |vpmu: &mut Command| {
            vpmu.args(["--pmu", "emulated"])
                .arg(format!("--vmm-arg=--rdpmc={way}"));
        };
        let run = compared(&mut vpmu, options, &script).run;
        let figure = |name: &str| run[name].as_f64().unwrap();
        assert_eq!(run["throttled"], 0, "{run}");
        Some((figure("pmu_exits_per_pmi"), figure("samples")))
    };
    let ways = std::thread::scope(|scope| {
        let load = scope.spawn(|| run("load"));
        (run("run"), load.join().unwrap())
    });
    let (Some(run), Some(load)) = ways else {
        return;
    };
    assert!((run.0 - load.0).abs() < 0.05, "{run:?} {load:?}");
    assert!((run.1 / load.1 - 1.0).abs() < 0.02, "{run:?} {load:?}");
}

/// A kernel whose handlers of exceptions begin in another way: it finds no PMU, says so, and goes on.
#[test]
#[ignore = "long: script/test --long"]
fn a_guest_of_an_unknown_form_is_told_that_it_has_no_pmu() {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    const NOP: [u8; 4] = [0x0f, 0x1f, 0x40, 0x00];
    let _turn = turn(1);
    let (Some(mut vpmu), Some(monitor)) = (vpmu("x86_64"), program("x86_64/self-monitor")) else {
        return;
    };
    let mut kernel = fs::read(images(Arch::X86_64).boot_kernel(Arch::X86_64).unwrap()).unwrap();
    // Entries begin at multiples of 16. None needs the instruction here: the processor tracks no indirect branches.
    for entry in kernel.as_chunks_mut::<16>().0 {
        if entry.starts_with(&ENDBR64) {
            entry[..4].copy_from_slice(&NOP);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel");
    fs::write(&path, kernel).unwrap();
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--kernel"])
            .arg(&path)
            .arg("--add")
            .arg(&monitor);
    };
    let Compared { console, run, .. } = compared(&mut vpmu, options, SCRIPT);
    let number = |word| number::<u64>(&console, word);
    assert_eq!((number("driver"), number("unavailable")), (0, 1));
    assert_eq!(said(&console, "counted"), "<not supported>");
    assert_eq!((number("monitored"), number("complaints")), (1, 0));
    let arming = &run["vmm"]["total"]["arming"];
    assert_eq!(arming["refused"], arming["searches"], "{run}");
    assert_ne!(arming["refused"], 0, "{run}");
}
