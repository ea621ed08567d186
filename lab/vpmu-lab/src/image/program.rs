//! Programs of this machine for a guest or the KVM host, each with its own libraries.

use std::path::{Path, PathBuf};

use super::artifacts;
use super::elf;
use crate::image::archive::Archive;
use crate::spec::arch::Arch;
use crate::{Error, Result};

/// The program that starts programs of this machine. The lab needs only x86-64's.
pub(super) const LOADER: &str = "ld-linux-x86-64.so.2";

/// A program of this machine with the libraries that it needs. The C library here may differ from
/// the guest's.
#[derive(Debug, Clone)]
pub(crate) struct OwnProgram {
    name: &'static str,
    program: PathBuf,
    libraries: Vec<Library>,
}

/// A library's file.
#[derive(Debug, Clone)]
pub(crate) struct Library {
    /// The name by which programs ask for it.
    pub(super) name: String,
    /// Its place in Debian's file tree.
    pub(super) place: String,
    pub(super) file: PathBuf,
}

impl Library {
    /// Returns the file by the name by which programs ask for it.
    pub(crate) fn link(&self) -> PathBuf {
        Path::new("/").join(&self.place)
    }
}

impl OwnProgram {
    /// Finds the program of this name beside `vpmu`.
    pub(crate) fn find(name: &'static str) -> Result<Self> {
        Self::at(name, artifacts::find_beside(name)?)
    }

    pub(crate) fn at(name: &'static str, program: PathBuf) -> Result<Self> {
        Ok(Self {
            name,
            libraries: libraries(&program)?,
            program,
        })
    }

    /// Puts the library of this name where programs of the archive's own find it.
    pub(crate) fn put_library(&self, archive: &mut Archive, name: &str, arch: Arch) {
        if let Some(library) = self.libraries.iter().find(|library| library.name == name) {
            let place = format!("{}/{name}", arch.libraries());
            archive.copy(&place, 0o755, &library.file);
        }
    }

    pub(crate) fn put(&self, archive: &mut Archive) {
        archive.copy(&format!("vpmu/{}", self.name), 0o755, &self.program);
        for library in &self.libraries {
            let place = format!("vpmu/lib/{}", library.name);
            archive.copy(&place, 0o755, &library.file);
        }
    }
}

/// Returns the libraries of this machine that `program` needs.
pub(crate) fn libraries(program: &Path) -> Result<Vec<Library>> {
    // A program may have libraries of its own beside it.
    let beside = program.parent().unwrap_or(Path::new("")).to_string_lossy();
    let beside = beside.trim_start_matches('/');
    let system = [Arch::X86_64.libraries(), "usr/lib", "usr/lib64", "lib64"];
    let folders = [&[beside], &system[..]].concat();
    let programs = [program.to_owned()];
    let libraries = elf::closure(Path::new("/"), &folders, &programs, |library| {
        Error::format(
            program,
            format!("{library} is not in this machine's folders of libraries"),
        )
    })?;
    let libraries = libraries.into_iter().map(|(place, file)| Library {
        name: place.rsplit('/').next().unwrap_or_default().to_owned(),
        place,
        file,
    });
    Ok(libraries.collect())
}
