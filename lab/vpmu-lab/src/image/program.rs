//! Programs of this machine for a guest or the KVM host, each with its own libraries.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::artifacts;
use super::elf;
use crate::image::archive::Archive;
use crate::spec::arch::Arch;
use crate::{Error, Result};

/// The program that starts programs of this machine. The lab needs only x86-64's.
pub(super) const LOADER: &str = "ld-linux-x86-64.so.2";

/// Libraries of this machine, by their places in Debian's file tree.
pub(crate) type Libraries = BTreeMap<String, PathBuf>;

/// Puts the program of this name that stands beside `vpmu` into `archive`, as [`put`] does.
pub(crate) fn put_own(archive: &mut Archive, name: &'static str) -> Result<()> {
    put(archive, name, &artifacts::find_beside(name)?).map(drop)
}

/// Puts a program of this machine into `archive` with the libraries that it needs, which it returns. The C library here may
/// differ from the guest's.
pub(crate) fn put(archive: &mut Archive, name: &str, program: &Path) -> Result<Libraries> {
    archive.copy(&format!("vpmu/{name}"), 0o755, program);
    let libraries = libraries(program)?;
    for (place, file) in &libraries {
        archive.copy(&format!("vpmu/lib/{}", library_name(place)), 0o755, file);
    }
    Ok(libraries)
}

/// Returns the name by which programs ask for the library at this place.
pub(crate) fn library_name(place: &str) -> &str {
    place.rsplit('/').next().unwrap_or(place)
}

/// Returns the libraries of this machine that `program` needs.
pub(crate) fn libraries(program: &Path) -> Result<Libraries> {
    // A program may have libraries of its own beside it.
    let beside = program.parent().unwrap_or(Path::new("")).to_string_lossy();
    let beside = beside.trim_start_matches('/');
    let system = [Arch::X86_64.libraries(), "usr/lib", "usr/lib64", "lib64"];
    let folders = [&[beside], &system[..]].concat();
    let programs = [program.to_owned()];
    elf::closure(Path::new("/"), &folders, &programs, |library| {
        Error::format(
            program,
            format!("{library} is not in this machine's folders of libraries"),
        )
    })
}
