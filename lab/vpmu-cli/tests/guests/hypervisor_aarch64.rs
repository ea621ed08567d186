//! `examples/el2`: a hypervisor of the public parts alone boots stock Linux, whose PMU costs what the documentation says.

use std::fs;
use std::path::Path;

use vpmu_lab::spec::arch::Arch;

use crate::payload::program;
use crate::support::{images, text, turn, vpmu};

/// The processor whose features the hypervisor lets its guest use.
const CPU: &str = "max,sve=off,sme=off";

/// Instructions of the command's `workload`, in user space, as on the bare machine.
const COUNT: &str = "perf stat -x, -e instructions:u workload 2>&1 | grep instructions";
const SAMPLE: &str = "perf record -q -F 10000 -e cycles -o /tmp/p workload";

/// Runs a command in stock Linux on `hypervisor`: what it prints, and the hypervisor's exits by the PMU and PMIs.
fn run(hypervisor: Option<&str>, command: &str) -> Option<(String, [f64; 2])> {
    let folder = tempfile::tempdir().unwrap();
    let mut run = vpmu("aarch64")?;
    run.args(["run", "--pmu", "native", "--cpu", CPU, "--memory", "1024M"]);
    run.arg("--keep").arg(folder.path());
    if let Some(hypervisor) = hypervisor {
        let image = program(&format!("aarch64/{hypervisor}"))?;
        let kernel = images(Arch::Aarch64).boot_kernel(Arch::Aarch64).unwrap();
        // The last -kernel counts: QEMU boots the hypervisor, and puts the guest behind it.
        run.arg("--qemu-arg=-kernel");
        run.arg(format!("--qemu-arg={}", image.display()));
        run.arg("--qemu-arg=-device");
        run.arg(format!(
            "--qemu-arg=loader,file={},addr=0x40400000,force-raw=on",
            kernel.display()
        ));
    }
    let output = run.args(["--", "sh", "-c", command]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let console = fs::read(folder.path().join("native/console.log")).unwrap();
    let console = String::from_utf8_lossy(&console);
    let said = console.lines().find_map(|line| line.strip_prefix("el2: "));
    let numbers = said.unwrap_or_default().split(' ');
    let mut numbers = numbers.filter_map(|word| word.parse().ok());
    let mut next = || numbers.next().unwrap_or(f64::NAN);
    let figures = [next(), next()];
    Some((
        String::from_utf8_lossy(&output.stdout).into_owned(),
        figures,
    ))
}

/// Checks what the guest's PMU costs on each of `hypervisors`, beside the most exits a PMI.
fn check(hypervisors: &[(&str, f64)]) {
    let _turn = turn(1);
    let Some((bare, _)) = run(None, COUNT) else {
        return;
    };
    let count = |said: &str| said.split(',').next().unwrap_or_default().to_owned();
    for &(hypervisor, most) in hypervisors {
        let in_c = hypervisor.starts_with("el2-c");
        let built = Path::new(env!("CARGO_BIN_EXE_vpmu")).ancestors().nth(2);
        let built = built.map(|target| target.join("guest/aarch64").join(hypervisor));
        if in_c && !built.is_some_and(|image| image.exists()) {
            println!("skipped: {hypervisor} needs aarch64-linux-gnu-gcc");
            continue;
        }
        let both = format!("{COUNT} && {SAMPLE}");
        let Some((counted, [exits, pmis])) = run(Some(hypervisor), &both) else {
            return;
        };
        assert_eq!(count(&counted), count(&bare), "{hypervisor}");
        println!("{hypervisor}: {exits} exits, {pmis} PMIs");
        assert!(pmis > 500.0, "{hypervisor}: {pmis} PMIs");
        assert!(exits / pmis <= most, "{hypervisor}: {exits} / {pmis}");
    }
}

#[test]
fn a_small_hypervisor_of_the_public_parts_has_a_pmu() {
    check(&[("el2.bin", 1.02), ("el2-c-emulated.bin", 5.1)]);
}

#[test]
#[ignore = "as the above, each in the other's language: script/test --long"]
fn so_has_each_in_the_other_language() {
    check(&[("el2-emulated.bin", 5.1), ("el2-c.bin", 1.02)]);
}
