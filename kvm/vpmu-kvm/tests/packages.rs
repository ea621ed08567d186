//! Test of what comes into a VMM with this crate: a VMM's authors look at each package.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::collections::BTreeSet;
use std::process::Command;

/// The number of packages beside this one stays below it.
const FEWER_THAN: usize = 12;

#[test]
fn few_packages_come_with_this_crate() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let tree = Command::new(cargo)
        .args([
            "tree",
            "--locked",
            "--offline",
            "--edges=normal",
            "--prefix=none",
            "--format={p}",
        ])
        .args(["--package=vpmu-kvm", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .unwrap();
    let text = String::from_utf8(tree.stdout).unwrap();
    assert!(
        tree.status.success(),
        "{}",
        String::from_utf8_lossy(&tree.stderr)
    );
    let mut packages: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(packages.remove("vpmu-kvm"), "{text}");
    assert!(
        packages.contains("vpmu") && packages.len() < FEWER_THAN,
        "{packages:?}"
    );
}
