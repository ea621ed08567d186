//! Finds the shared libraries that programs need.
//!
//! A guest holds programs from packages, but not the packages: only the programs and the closure of
//! their `DT_NEEDED` entries. The closure excludes libraries that a program opens by itself at run
//! time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, elf};

use crate::{Error, Result};

/// Returns the libraries that `programs` need, and those that libraries need,
/// by path relative to `root`, each with the file that holds it. Searches
/// `folders`, which are relative to `root`, too.
pub(crate) fn closure(
    root: &Path,
    folders: &[&str],
    programs: &[PathBuf],
    missing: impl Fn(String) -> Error,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut open: Vec<PathBuf> = programs.to_vec();
    while let Some(path) = open.pop() {
        let needed = needed(&path)?;
        let own = needed.folders(root, &path);
        let libraries = needed.libraries.into_iter().map(|name| (name, None));
        // The kernel opens the interpreter under its full path, the
        // interpreter for everything else in its folders.
        let interpreter = needed.interpreter.map(|path| {
            let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
            let place = path.trim_start_matches('/').trim_start_matches("usr/");
            (name, Some(format!("usr/{place}")))
        });
        for (name, place) in libraries.chain(interpreter) {
            if !seen.insert((name.clone(), place.clone())) {
                continue;
            }
            let (found_place, file) = own
                .iter()
                .map(String::as_str)
                .chain(folders.iter().copied())
                .find_map(|folder| {
                    let place = format!("{folder}/{name}");
                    Some((place.clone(), fs::canonicalize(root.join(&place)).ok()?))
                })
                .ok_or_else(|| {
                    let program = path.file_name().unwrap_or_default().display();
                    missing(format!("{name}, needed by {program},"))
                })?;
            open.push(file.clone());
            found.insert(place.unwrap_or(found_place), file);
        }
    }
    Ok(found)
}

/// The names that an ELF file asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Needed {
    /// The program interpreter, a full path.
    pub interpreter: Option<String>,
    /// The names in `DT_NEEDED`.
    pub libraries: Vec<String>,
    /// The folders in `DT_RUNPATH` and `DT_RPATH`, as they stand there.
    pub runpath: Vec<String>,
}

impl Needed {
    /// Returns the folders of `runpath` relative to `root`, for the file at `path`.
    fn folders(&self, root: &Path, path: &Path) -> Vec<String> {
        let origin = path.parent().unwrap_or(Path::new(""));
        let origin = origin.strip_prefix(root).unwrap_or(origin);
        let origin = origin.to_string_lossy();
        let expand = |folder: &String| {
            let folder = folder.replace("${ORIGIN}", "$ORIGIN");
            folder.replace("$ORIGIN", &origin)
        };
        let folders = self.runpath.iter().map(expand);
        folders
            .map(|folder| folder.trim_start_matches('/').to_owned())
            .collect()
    }
}

/// Reads the names for which the ELF file at `path` asks.
///
/// # Errors
///
/// When the file cannot be read or is not a 64-bit ELF file.
pub fn needed(path: &Path) -> Result<Needed> {
    let data = fs::read(path).map_err(Error::file("read", path))?;
    parse(&data).map_err(|error| Error::format(path, format!("not a usable ELF program: {error}")))
}

/// Returns the architecture that a program is for, where that is known and not x86-64.
pub(super) fn other_machine(program: &[u8]) -> Option<&'static str> {
    if !program.starts_with(&elf::ELFMAG) {
        return None;
    }
    let machine = u16::from_le_bytes(program.get(18..20)?.try_into().ok()?);
    match elf::Machine(machine) {
        elf::EM_X86_64 => None,
        elf::EM_AARCH64 => Some("aarch64"),
        elf::EM_386 => Some("32-bit x86"),
        elf::EM_RISCV => Some("riscv"),
        _ => Some("another architecture"),
    }
}

fn parse(data: &[u8]) -> object::Result<Needed> {
    let file = ElfFile64::<Endianness>::parse(data)?;
    let endian = file.endian();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut needed = Needed::default();
    for segment in file.elf_header().program_headers(endian, data)? {
        if let Some(interpreter) = segment.interpreter(endian, data)? {
            needed.interpreter = Some(text(interpreter));
        }
    }
    let sections = file.elf_section_table();
    if let Some((entries, strings)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, strings)?;
        for entry in entries {
            let offset = u32::try_from(entry.d_val.get(endian)).unwrap_or(u32::MAX);
            let value = || strings.get(offset).map(text).unwrap_or_default();
            match entry.d_tag.get(endian) {
                elf::DT_NEEDED => needed.libraries.push(value()),
                elf::DT_RUNPATH | elf::DT_RPATH => {
                    let value = value();
                    let folders = value.split(':').filter(|folder| !folder.is_empty());
                    needed.runpath.extend(folders.map(str::to_owned));
                }
                _ => {}
            }
        }
    }
    Ok(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_elf() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(needed(&path).unwrap_err().to_string().contains("ELF"));
        assert!(needed(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_runpath_is_relative_to_the_root_and_to_the_file() {
        let needed = Needed {
            runpath: ["/opt/lib", "$ORIGIN/../lib", "${ORIGIN}"]
                .map(str::to_owned)
                .into(),
            ..Needed::default()
        };
        let folders = needed.folders(Path::new("/root"), Path::new("/root/usr/bin/program"));
        assert_eq!(folders, ["opt/lib", "usr/bin/../lib", "usr/bin"]);
        let folders = needed.folders(Path::new("/"), Path::new("/home/me/program"));
        assert_eq!(folders, ["opt/lib", "home/me/../lib", "home/me"]);
    }

    #[test]
    fn this_test_needs_libc() {
        let needed = needed(&std::env::current_exe().unwrap()).unwrap();
        assert!(
            needed
                .libraries
                .iter()
                .any(|name| name.starts_with("libc.so")),
            "{needed:?}"
        );
        assert!(needed.interpreter.unwrap().starts_with('/'));
    }
}
