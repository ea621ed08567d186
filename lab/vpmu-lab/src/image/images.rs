//! Guest images made from packages: the kernel, the file tree of a guest, and
//! that of a KVM host with a guest in it.
//!
//! Images hold everything that runs share and are made once for each set of
//! packages. A run adds a second small archive ([`super::job`]), which the kernel
//! unpacks over the first.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vpmu_kernel::Kernel;

use super::elf;
use super::kernel_module::{ModuleFiles, find_kernel};
use crate::host::cancel::Cancel;
use crate::host::files::{write_json, write_whole};
use crate::image::archive::Archive;
use crate::image::cache::{Cache, Session};
use crate::image::debian::{Pool, Selection, is_whole};
use crate::spec::arch::Arch;
use crate::{Error, Result};

/// The version of the images' contents. It changes with any code below that changes them.
const LAYOUT: &str = "layout 3";

/// Programs in every guest, each from the package of a similar name.
const GUEST_PROGRAMS: [&str; 4] = ["busybox", "gzip", "perf", "stress-ng"];

/// Kernel modules of an x86 KVM host, in the order in which they need each other. On Arm, KVM is
/// part of the kernel.
pub(super) const KVM_MODULES: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];

/// The files that stock QEMU loads into an x86 guest before the kernel.
const FIRMWARE: [&str; 3] = [
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
];

/// Bytes of `/root/random.bin`, which cannot be compressed.
const RANDOM_BYTES: usize = 4 << 20;

/// A complete set of images.
#[derive(Debug, Clone)]
pub struct Images {
    folder: PathBuf,
    contents: Index,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Index {
    kernel_release: String,
    sizes: Vec<(String, u64)>,
}

const PREFIX: &str = "images-";
const KERNEL: &str = "kernel";
const UNPACKED: &str = "kernel.elf";
const GUEST: &str = "guest.cpio";
const KVM_HOST: &str = "kvm-host.cpio";

impl Images {
    /// Returns the images, downloaded and made first where they are missing.
    ///
    /// # Errors
    ///
    /// When packages cannot be downloaded or lack a file.
    pub fn prepare(arch: Arch, session: &Session<'_>) -> Result<Self> {
        if let Some(images) = Self::ready(&session.cache, arch) {
            return Ok(images);
        }
        let _lock = session.lock()?;
        // Another vpmu may have made them while this one waited.
        if let Some(images) = Self::ready(&session.cache, arch) {
            return Ok(images);
        }
        let pool = Pool::fetch(&Selection::guests(arch), session)?;
        let _task = session.progress.task("building guest images");
        let folder = pool.derived(PREFIX, [LAYOUT]);
        pool.derive(PREFIX, &folder, |scratch, made| {
            build(&pool, scratch, made, session.cancel)
        })?;
        Self::in_folder(folder).ok_or_else(|| pool.missing("the images' list"))
    }

    /// Returns the images if they were made before.
    pub fn ready(cache: &Cache, arch: Arch) -> Option<Self> {
        let pool = Pool::fetched(cache, &Selection::guests(arch))?;
        Self::in_folder(pool.derived(PREFIX, [LAYOUT]))
    }

    fn in_folder(folder: PathBuf) -> Option<Self> {
        let index = fs::read(folder.join("index.json")).ok()?;
        let contents: Index = serde_json::from_slice(&index).ok()?;
        let mut files = contents.sizes.iter();
        let whole = files.all(|(name, size)| is_whole(&folder.join(name), *size));
        whole.then_some(Self { folder, contents })
    }

    /// Returns the kernel as Debian packs it: a raw arm64 `Image`, or a bzImage.
    pub fn kernel(&self) -> PathBuf {
        self.folder.join(KERNEL)
    }

    /// Returns the kernel as a machine of `arch` boots it. QEMU starts an unpacked x86-64 kernel at its PVH entry, which
    /// spares an emulated processor the unpacking. The first call makes the file.
    ///
    /// # Errors
    ///
    /// When the kernel cannot be unpacked, or the file not be written.
    pub fn boot_kernel(&self, arch: Arch) -> Result<PathBuf> {
        if arch == Arch::Aarch64 {
            return Ok(self.kernel());
        }
        let path = self.folder.join(UNPACKED);
        if !path.exists() {
            unpack_kernel(&self.kernel(), &path)?;
        }
        Ok(path)
    }

    /// Returns the kernel's release, for example `6.12.107+deb13-arm64`.
    pub fn kernel_release(&self) -> &str {
        &self.contents.kernel_release
    }

    /// Returns the file tree of a guest.
    pub fn guest(&self) -> PathBuf {
        self.folder.join(GUEST)
    }

    /// Returns the file tree of a KVM host, with the kernel and the file tree of its guest.
    pub fn kvm_host(&self) -> PathBuf {
        self.folder.join(KVM_HOST)
    }
}

/// Fills `made` with images.
fn build(pool: &Pool, scratch: &Path, made: &Path, cancel: &Cancel) -> Result<()> {
    let tree = scratch.join("tree");
    fs::create_dir(&tree).map_err(Error::file("create", &tree))?;
    pool.unpack("", &tree, cancel)?;
    let missing = |what| pool.missing(what);
    let (vmlinuz, kernel_release) = find_kernel(&tree).ok_or_else(|| pool.missing("the kernel"))?;
    let kernel = made.join(KERNEL);
    fs::copy(&vmlinuz, &kernel).map_err(Error::file("write", &kernel))?;
    guest_tree(pool.arch, &tree, &missing)?.write_file(&made.join(GUEST))?;
    cancel.check()?;
    let mut host = host_tree(pool.arch, &tree, &missing)?;
    host.copy("guest/kernel", 0o644, kernel);
    host.copy("guest/guest.cpio", 0o644, made.join(GUEST));
    host.write_file(&made.join(KVM_HOST))?;

    let size = |name: &str| {
        let path = made.join(name);
        let metadata = fs::metadata(&path).map_err(Error::file("read", &path))?;
        Ok((name.to_owned(), metadata.len()))
    };
    let contents = Index {
        kernel_release,
        sizes: [KERNEL, GUEST, KVM_HOST]
            .into_iter()
            .map(size)
            .collect::<Result<_>>()?,
    };
    write_json(&made.join("index.json"), &contents)
}

/// Writes the kernel in `packed`, a bzImage or an ELF file, as an ELF file.
pub(crate) fn unpack_kernel(packed: &Path, path: &Path) -> Result<()> {
    let refused = |error: vpmu_kernel::Error| Error::format(packed, error.to_string());
    let kernel = Kernel::open(packed).map_err(refused)?;
    write_whole(path, kernel.elf())
}

fn host_tree(arch: Arch, tree: &Path, missing: &impl Fn(String) -> Error) -> Result<Archive> {
    let mut archive = programs(arch, tree, &["busybox", arch.qemu().program], missing)?;
    if arch == Arch::X86_64 {
        let modules = ModuleFiles::of(tree)?;
        for (number, name) in KVM_MODULES.into_iter().enumerate() {
            let path = modules.find(name);
            let path = path.ok_or_else(|| missing(format!("kernel module {name}")))?;
            // Process 1 of the host loads modules in the order of their names.
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            archive.copy(&format!("vpmu/modules/{number}-{file}"), 0o644, &path);
        }
        for place in FIRMWARE {
            let path = fs::canonicalize(tree.join(place)).map_err(|_| missing(place.to_owned()))?;
            archive.copy(place, 0o644, path);
        }
    }
    Ok(archive)
}

fn guest_tree(arch: Arch, tree: &Path, missing: &impl Fn(String) -> Error) -> Result<Archive> {
    let mut archive = programs(arch, tree, &GUEST_PROGRAMS, missing)?;
    archive
        .bytes("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\n")
        .bytes("etc/group", 0o644, "root:x:0:\n")
        .bytes("root/random.bin", 0o644, random_bytes(RANDOM_BYTES));
    Ok(archive)
}

/// Makes a file tree with the programs `names` and the libraries they need.
fn programs(
    arch: Arch,
    tree: &Path,
    names: &[&str],
    missing: &impl Fn(String) -> Error,
) -> Result<Archive> {
    let mut archive = Archive::default();
    for folder in [
        "dev",
        "proc",
        "sys",
        "tmp",
        "run",
        "root",
        "usr/bin",
        "usr/lib",
        "usr/lib64",
    ] {
        archive.folder(folder);
    }
    archive
        .link("bin", "usr/bin")
        .link("sbin", "usr/bin")
        .link("lib", "usr/lib")
        .link("lib64", "usr/lib64")
        .link("usr/bin/sh", "busybox");
    let mut paths = Vec::new();
    for &name in names {
        let path = fs::canonicalize(tree.join("usr/bin").join(name));
        let path = path.map_err(|_| missing(name.to_owned()))?;
        archive.copy(&format!("usr/bin/{name}"), 0o755, &path);
        paths.push(path);
    }
    let folders = [arch.libraries(), "usr/lib", "usr/lib64"];
    for (place, path) in elf::closure(tree, &folders, &paths, missing)? {
        archive.copy(&place, 0o755, path);
    }
    Ok(archive)
}

/// Returns the first bytes of a fixed pseudo-random sequence (SplitMix64 from 42).
fn random_bytes(count: usize) -> Vec<u8> {
    let mut state = 42u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_are_fixed() {
        let bytes = random_bytes(20);
        assert_eq!(bytes.len(), 20);
        assert_eq!(bytes[..8], 0xbdd7_3226_2feb_6e95_u64.to_le_bytes());
    }

    #[test]
    fn a_missing_program_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = programs(Arch::Aarch64, folder.path(), &["perf"], &Error::Usage).unwrap_err();
        assert_eq!(error.to_string(), "perf");
    }
}
