//! Guest software from Debian's archive: downloaded once, checked, kept.
//!
//! A *pool* is a folder of package files with a manifest that names each file
//! and its sha256. The manifest is written last, so a pool with a manifest is
//! whole, and needs no network from then on. It is resolved anew only when
//! the list of wanted packages changes, or when the user deletes it.

pub mod apt;
pub mod sources;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use itertools::Itertools;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::host::cancel::Cancel;
use crate::host::digest;
use crate::host::files::write_json;
use crate::host::tool::Tool;
use crate::image::cache::{Cache, Session};
use crate::spec::arch::Arch;
use crate::{Error, Result};
use apt::{Apt, Package};

/// The machine's dpkg-deb.
pub const DPKG_DEB: Tool = Tool {
    program: "dpkg-deb",
    fix: "apt-get install dpkg",
    hint: "the package may be damaged: delete the cache folder and try again",
};

/// The Debian release of guests, unless a bench says otherwise.
pub const RELEASE: &str = "trixie";

/// The contents of a pool.
#[derive(Debug, Clone)]
pub struct Selection {
    release: &'static str,
    arch: Arch,
    /// Debian's name of the packages' architecture.
    architecture: &'static str,
    /// Tells the pool from others of the same release.
    purpose: String,
    packages: Vec<String>,
    /// Tells by its name whether the pool keeps a package that apt names.
    keeps: fn(&str) -> bool,
}

impl Selection {
    fn new(
        release: &'static str,
        arch: Arch,
        purpose: &str,
        packages: &[&str],
        keeps: fn(&str) -> bool,
    ) -> Self {
        Self {
            release,
            arch,
            architecture: arch.debian(),
            purpose: purpose.to_owned(),
            packages: packages.iter().map(|&name| name.to_owned()).collect(),
            keeps,
        }
    }

    /// Selects the packages of the guests of `arch` and the KVM host.
    pub fn guests(arch: Arch) -> Self {
        let is_needed = |name: &str| !begins(name, &NOT_NEEDED);
        Self::new(RELEASE, arch, "", &arch.packages(), is_needed)
    }

    /// Selects a kernel of `release` and the headers for its modules. The compiler,
    /// a dependency of the headers, is the machine's own.
    pub fn kernel_with_headers(release: &'static str, arch: Arch) -> Self {
        const KINDS: [&str; 3] = ["linux-headers-", "linux-image-", "linux-kbuild-"];
        let packages = ["linux-headers-cloud-amd64", "linux-image-cloud-amd64"];
        Self::new(release, arch, "", &packages, |name| begins(name, &KINDS))
    }

    /// Selects what makes a PC boot from a disk: GRUB, and UEFI's firmware.
    pub fn boot() -> Self {
        // The libraries are those of grub-mkimage.
        const KINDS: [&str; 8] = [
            "grub-",
            "libc6",
            "libdevmapper",
            "liblzma",
            "libpcre2",
            "libselinux",
            "libudev",
            "ovmf",
        ];
        let packages = ["grub-common", "grub-efi-amd64-bin", "grub-pc-bin", "ovmf"];
        let keeps = |name: &str| begins(name, &KINDS);
        Self::new(RELEASE, Arch::X86_64, "-boot", &packages, keeps)
    }

    /// Selects a kernel of `release` with its modules, for a PC.
    pub fn kernel(release: &'static str) -> Self {
        // The newest packages have kernel and modules apart.
        const KINDS: [&str; 3] = ["linux-binary-", "linux-image-", "linux-modules-"];
        let packages = ["linux-image-cloud-amd64"];
        let keeps = |name: &str| begins(name, &KINDS);
        Self::new(release, Arch::X86_64, "-kernel", &packages, keeps)
    }

    /// Selects a package and all that it depends on, for a guest of `arch`.
    pub fn package(name: &str, arch: Arch) -> Self {
        let purpose = format!("-package-{name}");
        Self::new(RELEASE, arch, &purpose, &[name], |_| true)
    }

    /// Selects the last kernel of 32 bits that Debian has for a PC, and its programs.
    pub fn kernel_of_32_bits() -> Self {
        let packages = ["busybox-static", "linux-image-686"];
        let keeps = |name: &str| begins(name, &["busybox-static", "linux-image-"]);
        Self {
            architecture: "i386",
            ..Self::new("bookworm", Arch::X86_64, "-kernel", &packages, keeps)
        }
    }
}

/// Tells whether a package's name begins as one of these.
fn begins(name: &str, kinds: &[&str]) -> bool {
    kinds.iter().any(|kind| name.starts_with(kind))
}

/// Large dependencies that no program of the lab loads: scripts, data, and libraries that programs
/// open at run time when there is a screen.
const NOT_NEEDED: [&str; 8] = [
    "libllvm",
    "libpython3.13-stdlib",
    "libx11-data",
    "libz3-",
    "mesa-",
    "perl-modules-",
    "python3",
    "systemd",
];

/// The prefix of the names of temporary folders in a pool's folder.
const TEMPORARY: &str = "temporary-";

/// The files that make up a pool, whose release and architecture its folder's name has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    wanted: Vec<String>,
    /// The packages in the order of their file names.
    pub(crate) packages: Vec<Package>,
}

/// A complete pool of packages.
#[derive(Debug)]
pub struct Pool {
    /// The architecture of the guests made from the pool.
    pub(crate) arch: Arch,
    folder: PathBuf,
    pub(crate) manifest: Manifest,
}

impl Pool {
    /// Returns the pool if it was fetched before. `None` means that the network is needed first.
    pub fn fetched(cache: &Cache, selection: &Selection) -> Option<Self> {
        let folder = folder(cache, selection);
        let text = fs::read(folder.join("manifest.json")).ok()?;
        let manifest: Manifest = serde_json::from_slice(&text).ok()?;
        let fits = manifest.wanted == selection.packages;
        let packages = folder.join("packages");
        let mut files = manifest.packages.iter();
        let whole = files.all(|package| is_whole(&packages.join(&package.file), package.size));
        (fits && whole).then_some(Self {
            arch: selection.arch,
            folder,
            manifest,
        })
    }

    /// Returns the pool, downloaded first where it is missing. The caller holds the
    /// cache's lock.
    ///
    /// # Errors
    ///
    /// When apt is missing or fails, or a file differs from the index.
    pub fn fetch(selection: &Selection, session: &Session<'_>) -> Result<Self> {
        if let Some(pool) = Self::fetched(&session.cache, selection) {
            return Ok(pool);
        }
        let folder = folder(&session.cache, selection);
        let packages = folder.join("packages");
        fs::create_dir_all(&packages).map_err(Error::file("create", &packages))?;

        let task = session.progress.task("reading Debian's package index");
        let (release, architecture) = (selection.release, selection.architecture);
        let apt = Apt::new(&folder.join("apt"), release, architecture)?;
        apt.update(session.cancel)?;
        let mut plan = apt.plan(&selection.packages, session.cancel)?;
        plan.retain(|package| (selection.keeps)(&package.name));
        plan.sort_by(|a, b| a.file.cmp(&b.file));
        task.done();

        download(&apt, &plan, &packages, session)?;
        remove_others(&packages, &plan);
        let manifest = Manifest {
            wanted: selection.packages.clone(),
            packages: plan,
        };
        write_json(&folder.join("manifest.json"), &manifest)?;
        Ok(Self {
            arch: selection.arch,
            folder,
            manifest,
        })
    }

    /// Returns the folder for what is made of all packages and of `more`: `prefix` with the digest of both. Where it is there,
    /// no other vpmu removes it until this process ends.
    pub(crate) fn derived<'a>(
        &'a self,
        prefix: &str,
        more: impl IntoIterator<Item = &'a str>,
    ) -> PathBuf {
        let packages = self.manifest.packages.iter();
        let mut all = packages.map(|package| package.sha256.as_str()).chain(more);
        let key = digest::of_bytes(all.join(" ").as_bytes());
        let folder = self.folder.join(format!("{prefix}{}", &key[..16]));
        keep(&folder);
        folder
    }

    /// Makes `folder`, which is [`Self::derived`], in place of those of other packages. `fill` gets a scratch folder and the
    /// folder to fill.
    pub(crate) fn derive(
        &self,
        prefix: &str,
        folder: &Path,
        fill: impl FnOnce(&Path, &Path) -> Result<()>,
    ) -> Result<()> {
        // The unfinished files of killed runs: there is one at a time.
        remove_folders(&self.folder, TEMPORARY);
        let scratch = temporary(&self.folder)?;
        let made = scratch.path().join("made");
        fs::create_dir(&made).map_err(Error::file("create", &made))?;
        fill(scratch.path(), &made)?;
        remove_folders(&self.folder, prefix);
        // What has this name was found damaged, whoever keeps it.
        let _ = fs::remove_dir_all(folder);
        fs::rename(&made, folder).map_err(Error::file("create", folder))?;
        keep(folder);
        Ok(())
    }

    /// Returns the error for what no package has.
    pub(crate) fn missing(&self, what: impl Display) -> Error {
        Error::Other(format!(
            "{what} is in none of the downloaded packages; delete {} to fetch the current ones",
            self.folder.display()
        ))
    }

    /// Unpacks the packages whose names begin with `kind` into `root`.
    ///
    /// # Errors
    ///
    /// When dpkg-deb is missing or fails, or a package's file was changed.
    pub fn unpack(&self, kind: &str, root: &Path, cancel: &Cancel) -> Result<()> {
        let packages = self.manifest.packages.iter();
        for package in packages.filter(|package| package.name.starts_with(kind)) {
            let path = self.folder.join("packages").join(&package.file);
            verify(&path, package)?;
            let mut command = DPKG_DEB.command()?;
            command.arg("-x").arg(path).arg(root);
            DPKG_DEB.run(command, cancel, &|| ())?;
        }
        Ok(())
    }
}

fn folder(cache: &Cache, selection: &Selection) -> PathBuf {
    let (release, purpose) = (selection.release, &selection.purpose);
    let architecture = selection.architecture;
    let name = format!("debian-{release}-{architecture}{purpose}");
    cache.root.join(name)
}

/// Downloads the files that are missing. A file moves into `packages` only after
/// its digest was found right, so an interrupted download continues with the
/// files it lacks.
fn download(apt: &Apt, plan: &[Package], packages: &Path, session: &Session<'_>) -> Result<()> {
    let is_missing = |package: &&Package| !is_whole(&packages.join(&package.file), package.size);
    let missing: Vec<Package> = plan.iter().filter(is_missing).cloned().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let incoming = temporary(packages.parent().unwrap_or(packages))?;
    let total = missing.iter().map(|package| package.size).sum();
    let task = session.progress.bytes("downloading guest packages", total);
    // The downloads are small, so that finished ones survive an interruption.
    let mut finished = 0;
    for piece in missing.chunks(16) {
        apt.download(piece, incoming.path(), session.cancel, &|| {
            task.set(finished + folder_size(incoming.path()));
        })?;
        for package in piece {
            let path = incoming.path().join(&package.file);
            verify(&path, package)?;
            fs::rename(&path, packages.join(&package.file)).map_err(Error::file("move", &path))?;
            finished += package.size;
        }
        task.set(finished);
    }
    Ok(())
}

/// Tells whether a file is there, with all its bytes.
pub(super) fn is_whole(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.len() == size)
}

fn verify(path: &Path, package: &Package) -> Result<()> {
    let found = digest::of_file(path)?;
    if found == package.sha256 {
        return Ok(());
    }
    let (file, expected, path) = (&package.file, &package.sha256, path.display());
    Err(Error::Other(format!(
        "package {file} has sha256 {found}, expected {expected}; delete {path} and try again"
    )))
}

fn folder_size(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
    sizes.sum()
}

fn temporary(folder: &Path) -> Result<tempfile::TempDir> {
    let made = tempfile::TempDir::with_prefix_in(TEMPORARY, folder);
    made.map_err(Error::file("write in", folder))
}

/// Keeps a folder from removal by another vpmu, whose sources or packages differ, until this process ends.
fn keep(folder: &Path) {
    if let Ok(file) = File::open(folder)
        && flock(&file, FlockOperation::NonBlockingLockShared).is_ok()
    {
        // A guest may run from the folder for as long as the process lives.
        Box::leak(Box::new(file));
    }
}

/// Removes the folders whose names begin with `prefix`, and which no process [keeps](keep).
fn remove_folders(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        if flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK) {
            // A folder that stays only costs disk space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn remove_others(packages: &Path, plan: &[Package]) {
    let wanted: BTreeSet<&str> = plan.iter().map(|package| package.file.as_str()).collect();
    for entry in fs::read_dir(packages).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.to_str().is_some_and(|name| wanted.contains(name)) {
            // A file that stays only costs disk space.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_folder_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let pool = Pool {
            arch: Arch::X86_64,
            folder: folder.path().to_owned(),
            manifest: Manifest {
                wanted: Vec::new(),
                packages: Vec::new(),
            },
        };
        let images = pool.derived("images-", ["sources"]);
        fs::create_dir(&images).unwrap();
        fs::write(images.join("kernel"), "half").unwrap();
        // It is this process that keeps it.
        assert_eq!(pool.derived("images-", ["sources"]), images);
        let fill = |_: &Path, made: &Path| {
            fs::write(made.join("kernel"), "whole").map_err(Error::file("write", made))
        };
        pool.derive("images-", &images, fill).unwrap();
        assert_eq!(fs::read(images.join("kernel")).unwrap(), b"whole");
    }

    #[test]
    fn a_folder_in_use_stays() {
        let pool = tempfile::tempdir().unwrap();
        let at = |name: &str| pool.path().join(name);
        let names = ["images-used", "images-old", "temporary-killed", "apt"];
        for name in names {
            fs::create_dir(at(name)).unwrap();
        }
        keep(&at("images-used"));
        remove_folders(pool.path(), "images-");
        remove_folders(pool.path(), TEMPORARY);
        let left = names.map(|name| at(name).is_dir());
        assert_eq!(left, [true, false, false, true]);
    }
}
