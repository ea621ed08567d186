//! The example runs the bare-metal test program, which finds a PMU as good as under `vpmu-vmm`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs::File;
use std::path::Path;
use std::process::Command;

#[test]
fn the_test_program_finds_its_pmu() {
    let program =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/x86_64/payload.elf");
    if !program.exists() {
        eprintln!("skipped: no {}: script/setup builds it", program.display());
        return;
    }
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = kvm {
        eprintln!("skipped: /dev/kvm: {error}");
        return;
    }
    // A guest that goes astray may run for ever.
    let output = Command::new("timeout")
        .args(["300", env!("CARGO_BIN_EXE_vpmu-example-vmm")])
        .arg(program)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    // As `Debug` has them, which `main` returns.
    for absent in ["NoUserSpaceMsr", "Forbidden", "NoPerf"] {
        if error.contains(absent) {
            eprintln!("skipped: {error}");
            return;
        }
    }
    assert!(output.status.success(), "{error}{said}");
    let failed: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("FAIL"))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let summary = said.lines().find(|line| line.contains(" passed, 0 failed"));
    assert!(summary.is_some(), "{said}");
    assert!(!error.starts_with("0 PMIs"), "{error}");
}
