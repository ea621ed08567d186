//! Debian's newest kernel for the KVM host of a guest that is handed the processor's PMU (mediated vPMU, since Linux 7.0).

use std::fs;
use std::path::{Path, PathBuf};

use super::images::{self, KVM_MODULES};
use super::kernel_module::{ModuleFiles, files_below};
use crate::host::cancel::Cancel;
use crate::image::archive::Archive;
use crate::image::cache::Session;
use crate::image::debian::{Pool, Selection};
use crate::{Error, Result};

/// The Debian release of the kernel.
const RELEASE: &str = "trixie-backports";

const PREFIX: &str = "host-kernel-";
const KERNEL: &str = "kernel.elf";

/// A host's kernel, unpacked, with KVM's modules.
#[derive(Debug, Clone)]
pub(crate) struct HostKernel(PathBuf);

impl HostKernel {
    /// Returns the kernel, downloaded and unpacked first where it is missing.
    pub(crate) fn prepare(session: &Session<'_>) -> Result<Self> {
        let _lock = session.lock()?;
        let pool = Pool::fetch(&Selection::kernel(RELEASE), session)?;
        let folder = pool.derived(PREFIX, []);
        if !folder.is_dir() {
            let _task = session.progress.task("unpacking the host's kernel");
            pool.derive(PREFIX, &folder, |scratch, made| {
                build(&pool, scratch, made, session.cancel)
            })?;
        }
        Ok(Self(folder))
    }

    /// Returns the kernel, an ELF file.
    pub(crate) fn kernel(&self) -> PathBuf {
        self.0.join(KERNEL)
    }

    /// Puts KVM's modules in the place of those of the other kernel.
    pub(crate) fn put_modules(&self, archive: &mut Archive) -> Result<()> {
        for path in files_below(&self.0)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name != KERNEL {
                archive.copy(&format!("vpmu/modules/{name}"), 0o644, &path);
            }
        }
        Ok(())
    }
}

fn build(pool: &Pool, scratch: &Path, made: &Path, cancel: &Cancel) -> Result<()> {
    let root = scratch.join("root");
    fs::create_dir(&root).map_err(Error::file("create", &root))?;
    pool.unpack("", &root, cancel)?;
    let modules = ModuleFiles::of(&root)?;
    let vmlinuz = modules.kernel_of(&root);
    let vmlinuz = vmlinuz.ok_or_else(|| pool.missing("the kernel"))?;
    images::unpack_kernel(&vmlinuz, &made.join(KERNEL))?;
    for (number, name) in KVM_MODULES.into_iter().enumerate() {
        let path = modules.find(name);
        let path = path.ok_or_else(|| pool.missing(format!("kernel module {name}")))?;
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let copied = fs::copy(&path, made.join(format!("{number}-{file}")));
        copied.map_err(Error::file("copy", &path))?;
    }
    Ok(())
}
