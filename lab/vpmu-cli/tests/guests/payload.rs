//! Helpers for the tests of the bare-metal programs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support::skipped;

/// Returns the path of the program `name`, which `script/setup` puts beside `target/release`. Where the program is
/// missing, the function says so and returns `None`.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_vpmu")).ancestors().nth(2)?;
    let path = target.join("guest").join(name);
    if path.exists() {
        return Some(path);
    }
    skipped(&format!("no {}; run script/setup", path.display()));
    None
}

/// Returns the names of the tests that passed, including those with a listed deviation.
pub(crate) fn passed(console: &str) -> BTreeSet<&str> {
    console
        .lines()
        .filter_map(|line| line.strip_prefix("ok ")?.split(" (").next())
        .collect()
}
