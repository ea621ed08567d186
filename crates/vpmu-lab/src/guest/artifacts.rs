//! The guest-side programs of this project, built beforehand by script/setup.

use std::fs;
use std::path::PathBuf;

use crate::{Error, Result};

/// The variable that names the folder in which they are.
pub const VARIABLE: &str = "VPMU_GUEST_DIR";

/// Measures the command inside the guest.
pub const METER: &str = "meter";
/// The workload of known weights.
pub const WORKLOAD: &str = "workload";
/// The EL2 monitor, a raw image.
pub const MONITOR: &str = "monitor.bin";

/// The path of one of them, for aarch64 guests.
///
/// # Errors
///
/// When it was not built; the error says where it was looked for.
pub fn find(file: &'static str) -> Result<PathBuf> {
    let folders = folders();
    folders
        .iter()
        .map(|folder| folder.join("aarch64").join(file))
        .find(|path| fs::metadata(path).is_ok_and(|metadata| metadata.is_file()))
        .ok_or_else(|| Error::MissingArtifact {
            file,
            searched: folders
                .iter()
                .map(|folder| folder.join("aarch64").display().to_string())
                .collect::<Vec<_>>()
                .join(" and "),
        })
}

/// `$VPMU_GUEST_DIR` alone when it is set, else the places relative to the
/// running program: a build tree's `target/guest`, an installation's
/// `lib/vpmu`.
fn folders() -> Vec<PathBuf> {
    if let Some(folder) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        return vec![folder.into()];
    }
    let program = std::env::current_exe().unwrap_or_default();
    let near = program.parent().and_then(|folder| folder.parent());
    near.map(|prefix| vec![prefix.join("guest"), prefix.join("lib/vpmu")])
        .unwrap_or_default()
}
