//! The guest-side programs of this project, which script/setup has built.

use std::path::{Path, PathBuf};

use itertools::Itertools;

use crate::host::tool::{first_with, path};
use crate::spec::arch::Arch;
use crate::{Error, Result};

/// The environment variable that names the programs' folder.
pub const VARIABLE: &str = "VPMU_GUEST_DIR";

/// The program that measures a command inside the guest.
pub const METER: &str = "meter";
/// The workload of known weights.
pub const WORKLOAD: &str = "workload";
/// The program that is process 1 of the KVM host.
pub const KVM_HOST: &str = "kvm-host";
/// The EL2 monitor, a raw image.
pub const MONITOR: &str = "monitor.bin";
/// The bare-metal program that tests a PMU, a raw image for arm64.
pub const PAYLOAD: &str = "payload.bin";
/// The VMM for x86-64, a program of the machine that stands beside `vpmu`.
pub const VMM: &str = "vpmu-vmm";
/// The program that measures this machine's perf events; stands beside `vpmu`, too.
pub const REPROGRAM: &str = "vpmu-reprogram";

/// The command itself, which runs in the KVM host, too.
pub const VPMU: &str = "vpmu";
/// The library that `vpmu exec` puts into VMMs.
pub const PRELOAD: &str = "libvpmu_preload.so";

/// The QEMU whose guests may have the PMU.
pub const PATCHED_QEMU: &str = "qemu-system-x86_64-vpmu";
/// The environment variable that names its folder.
pub const PATCHED_VARIABLE: &str = "VPMU_PATCHED_QEMU";

/// Returns the path of one of these programs, for guests of `arch`.
///
/// # Errors
///
/// When the program was not built. The error names the folders that were searched.
pub fn find(arch: Arch, file: &'static str) -> Result<PathBuf> {
    let folders = folders().into_iter();
    let folders: Vec<PathBuf> = folders.map(|folder| folder.join(arch.name())).collect();
    first_with(&folders, file).ok_or_else(|| {
        let searched = folders.iter().map(|folder| folder.display()).join(" and ");
        Error::Other(format!(
            "{file} was not found in {searched}; build it with script/setup, or set {VARIABLE}"
        ))
    })
}

/// Returns the path of a program that is built with `vpmu` and stands beside it.
///
/// # Errors
///
/// When the program is not there.
pub fn find_beside(file: &'static str) -> Result<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    // Cargo puts tests one folder deeper than programs.
    let folders: Vec<PathBuf> = (program.ancestors().skip(1).take(2).map(PathBuf::from)).collect();
    first_with(&folders, file).ok_or_else(|| {
        let searched = folders.first().map(|folder| folder.display().to_string());
        let searched = searched.unwrap_or_default();
        Error::Other(format!(
            "{file} was not found beside vpmu in {searched}; build both with script/setup"
        ))
    })
}

/// Returns the QEMU whose guests may have the PMU: in the folder that [`PATCHED_VARIABLE`] names, else on `PATH`.
pub(crate) fn find_patched_qemu() -> Result<PathBuf> {
    let folders = match std::env::var_os(PATCHED_VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => vec![folder.into()],
        None => path(),
    };
    let fix = "script/qemu --vpmu builds it; VPMU_PATCHED_QEMU takes the folder that it says";
    first_with(&folders, PATCHED_QEMU).ok_or_else(|| Error::missing(PATCHED_QEMU, fix))
}

/// Returns the library that `vpmu exec` puts into VMMs: beside `vpmu`, or in an installation's `lib/vpmu`.
///
/// # Errors
///
/// When the library is not there.
pub fn find_preload() -> Result<PathBuf> {
    let program = std::env::current_exe().unwrap_or_default();
    let prefix = program.parent().and_then(Path::parent);
    let installed = prefix.map(|prefix| prefix.join("lib/vpmu").join(PRELOAD));
    match installed.filter(|path| path.exists()) {
        Some(path) => Ok(path),
        None => find_beside(PRELOAD),
    }
}

/// Returns `$VPMU_GUEST_DIR` alone when it is set, else the folders relative to
/// the running program: a build tree's `target/guest`, an installation's
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
