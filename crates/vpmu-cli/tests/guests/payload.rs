//! What the tests of the bare-metal programs share.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support::skipped;

/// Where `script/setup` puts the program `name`, beside `target/release`; none, said aloud, where it is not.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_vpmu")).ancestors().nth(2)?;
    let path = target.join("guest").join(name);
    if path.exists() {
        return Some(path);
    }
    skipped(&format!("no {}; run script/setup", path.display()));
    None
}

/// The names of the tests that passed, those with a listed deviation included.
pub(crate) fn passed(console: &str) -> BTreeSet<&str> {
    console
        .lines()
        .filter_map(|line| line.strip_prefix("ok ")?.split(" (").next())
        .collect()
}
