//! Runs each fuzz target on its kept inputs: `corpus/TARGET`, made by `fuzz/run TARGET` and `fuzz/keep TARGET`.
//!
//! A target is built as any program here, without coverage, so libFuzzer runs the given files once and ends.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The targets' inputs together are small enough to be kept in the tree, bytes.
const LARGEST: u64 = 300_000;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns the name of each target in Cargo.toml.
fn targets() -> BTreeSet<String> {
    let manifest = include_str!("../Cargo.toml");
    let names = manifest.split("[[bin]]\nname = \"").skip(1);
    names
        .map(|rest| rest.split('"').next().unwrap().to_owned())
        .collect()
}

#[test]
fn each_target_has_inputs() {
    let folders = files(&corpus()).into_iter();
    let found: BTreeSet<String> = folders
        .filter(|folder| !files(folder).is_empty())
        .map(|folder| folder.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(found, targets(), "fuzz/run TARGET, then fuzz/keep TARGET");
    let inputs = found.iter().flat_map(|target| files(&corpus().join(target)));
    let bytes: u64 = inputs.map(|input| input.metadata().unwrap().len()).sum();
    assert!(bytes < LARGEST, "{bytes} bytes");
}

#[test]
fn no_input_fails() {
    let programs = Path::new(env!("CARGO_BIN_EXE_kernel")).parent().unwrap();
    for target in targets() {
        let inputs = files(&corpus().join(&target));
        // A failure leaves a file, which is not to lie in the tree.
        let artifacts = format!("-artifact_prefix={}/", env!("CARGO_TARGET_TMPDIR"));
        let output = Command::new(programs.join(&target))
            .arg(artifacts)
            .args(&inputs)
            .output()
            .unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{target}: {log}");
        assert_eq!(log.matches("Executed ").count(), inputs.len(), "{target}: {log}");
    }
}
