//! A kernel and its modules in a Debian package: where they are, and which modules each needs.
//!
//! Guests have no folder of modules: a kernel's has some thousand, and a report needs one or two. They come with the
//! modules that they need, and process 1 loads them before the command.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use lzma_rust2::XzReader;
use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection};

use crate::{Error, Result};

/// Bytes of the largest module that is read for its dependencies.
const LARGEST: u64 = 64 << 20;

/// The files in a kernel's folder of modules.
pub(super) struct ModuleFiles(Vec<PathBuf>);

impl ModuleFiles {
    pub(super) fn of(tree: &Path) -> Result<Self> {
        // Debian 12 and older have /lib apart from /usr.
        let folders = ["usr/lib/modules", "lib/modules"].map(|folder| tree.join(folder));
        let mut folders = folders.into_iter().filter(|folder| folder.is_dir());
        let files = folders.next().map(|folder| files_below(&folder));
        files.unwrap_or_else(|| Ok(Vec::new())).map(Self)
    }

    /// Returns the module's file. `-` and `_` are the same in a module's name.
    pub(super) fn find(&self, name: &str) -> Option<PathBuf> {
        let plain = |name: &str| name.replace('-', "_");
        let is_wanted = |file: &str| {
            file.split_once(".ko")
                .is_some_and(|(module, _)| plain(module) == plain(name))
        };
        let mut files = self.0.iter();
        files
            .find(|path| file_name(path).is_some_and(is_wanted))
            .cloned()
    }

    /// Returns the kernel in `tree`. The newest packages put it beside its modules.
    pub(super) fn kernel_of(&self, tree: &Path) -> Option<PathBuf> {
        let mut beside = (self.0.iter()).filter(|path| file_name(path) == Some("vmlinuz"));
        let in_boot = find_kernel(tree).map(|(path, _)| path);
        in_boot.or_else(|| beside.next().cloned())
    }

    /// Tells whether the module is part of the kernel itself.
    fn is_built_in(&self, name: &str) -> bool {
        let list = self.0.iter();
        let list = list.filter(|path| file_name(path) == Some("modules.builtin"));
        let text = list.filter_map(|path| fs::read_to_string(path).ok());
        let paths: Vec<PathBuf> = text
            .flat_map(|text| text.lines().map(PathBuf::from).collect::<Vec<_>>())
            .collect();
        Self(paths).find(name).is_some()
    }

    /// Appends the files of the module and of those that it needs to `files`, each behind what it needs.
    pub(super) fn add(&self, name: &str, files: &mut Vec<PathBuf>) -> Result<bool> {
        let Some(path) = self.find(name) else {
            return Ok(self.is_built_in(name));
        };
        if files.contains(&path) {
            return Ok(true);
        }
        for needed in needs(&path)? {
            if !self.add(&needed, files)? {
                let problem = format!("needs {needed}, which the kernel's package lacks");
                return Err(Error::format(&path, problem));
            }
        }
        files.push(path);
        Ok(true)
    }
}

/// Returns the kernel below `boot` of a package's tree, and its release.
pub(super) fn find_kernel(tree: &Path) -> Option<(PathBuf, String)> {
    fs::read_dir(tree.join("boot"))
        .ok()?
        .flatten()
        .find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((entry.path(), name.strip_prefix("vmlinuz-")?.to_owned()))
        })
}

/// Returns all files below a folder.
pub(super) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::file("read", folder))? {
        let path = entry.map_err(Error::file("read", folder))?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

pub(super) fn file_name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// Returns the names of the modules that the one at `path` needs.
fn needs(path: &Path) -> Result<Vec<String>> {
    let mut module = fs::read(path).map_err(Error::file("read", path))?;
    if path.extension().is_some_and(|kind| kind == "xz") {
        let mut unpacked = Vec::new();
        let reader = XzReader::new(module.as_slice(), false);
        let read = reader.take(LARGEST).read_to_end(&mut unpacked);
        read.map_err(Error::file("unpack", path))?;
        module = unpacked;
    }
    let refused = |error| Error::format(path, format!("not a usable module: {error}"));
    let file = ElfFile64::<Endianness>::parse(&*module).map_err(refused)?;
    let Some(section) = file.section_by_name(".modinfo") else {
        return Ok(Vec::new());
    };
    Ok(depends(section.data().map_err(refused)?))
}

/// Returns the names in `depends=` of a module's information, strings that each end with a zero.
fn depends(information: &[u8]) -> Vec<String> {
    let mut entries = information.split(|&byte| byte == 0);
    let list = entries.find_map(|entry| entry.strip_prefix(b"depends="));
    let list = String::from_utf8_lossy(list.unwrap_or_default());
    let names = list.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_found_by_either_spelling_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("lib/modules/6.1/kernel");
        fs::create_dir_all(&place).unwrap();
        for name in ["kvm-amd.ko.xz", "kvm.ko", "modules.builtin"] {
            fs::write(place.join(name), "kernel/fs/ext4/ext4.ko\n").unwrap();
        }
        let tree = ModuleFiles::of(folder.path()).unwrap();
        for name in ["kvm-amd", "kvm_amd"] {
            assert_eq!(tree.find(name), Some(place.join("kvm-amd.ko.xz")), "{name}");
        }
        assert_eq!(tree.find("kvm_intel"), None);
        assert!(tree.is_built_in("ext4") && !tree.is_built_in("kvm"));
        let damaged = tree.add("kvm", &mut Vec::new()).unwrap_err().to_string();
        assert!(damaged.contains("kvm.ko: not a usable module"), "{damaged}");
    }

    #[test]
    fn the_kernel_says_its_release() {
        let root = tempfile::tempdir().unwrap();
        assert!(find_kernel(root.path()).is_none());
        let boot = root.path().join("boot");
        fs::create_dir(&boot).unwrap();
        fs::write(boot.join("config-6.1.0-1-cloud-amd64"), "").unwrap();
        fs::write(boot.join("vmlinuz-6.1.0-1-cloud-amd64"), "").unwrap();
        let (_, release) = find_kernel(root.path()).unwrap();
        assert_eq!(release, "6.1.0-1-cloud-amd64");
    }

    #[test]
    fn needs_are_read_from_a_modules_information() {
        let information = b"license=GPL\0depends=kvm,ccp\0name=x\0";
        assert_eq!(depends(information), ["kvm", "ccp"]);
        assert!(depends(b"depends=\0name=x\0").is_empty());
        assert!(depends(b"").is_empty());
    }
}
