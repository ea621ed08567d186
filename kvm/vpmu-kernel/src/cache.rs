//! Kernels that were unpacked and rewritten before.
//!
//! Unpacking takes more than a second where booting takes less. What was made of a bzImage is kept
//! under the SHA-256 of the image and of what was done with it, with the SHA-256 of the result, which
//! is compared before the result is used: a file that has decayed, or was cut short, is made again.
//! Whoever may write into the folder could replace a guest's kernel, so a folder that others may
//! write to, or that is another user's, is not used. Nothing that goes wrong with the cache is an
//! error: the kernel is then unpacked.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::{Error, Kernel, LARGEST_UNPACKED, is_bzimage, read};

/// Changes with everything that changes what is kept: unpacking, rewriting, the file's format.
const FORMAT: &[u8] = b"vpmu-kernel cache 1\n";
const DIGEST: usize = 32;
/// Files that are kept; the ones used longest ago go.
const MOST_FILES: usize = 8;
/// Bytes that are kept.
const MOST_BYTES: u64 = 512 << 20;

/// A folder of kernels, at most 8 and 512 MiB.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// In `folder`, which is made when there is something to keep.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// In the calling user's cache folder: `$XDG_CACHE_HOME/vpmu/kernels`, or
    /// `~/.cache/vpmu/kernels`. `None` where there is neither.
    pub fn of_user() -> Option<Self> {
        let absolute = |name| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        let caches =
            absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(Self::at(caches.join("vpmu/kernels")))
    }

    /// Does what [`Kernel::open`] and, where `rewrite`, [`Kernel::rewrite_rdpmc`] do, or takes what
    /// they gave before. An ELF file is as quickly rewritten as found, and never kept.
    ///
    /// # Errors
    ///
    /// Those of the two.
    pub fn open(&self, path: &Path, rewrite: bool) -> Result<Kernel, Error> {
        let image = super::read_file(path)?;
        if !is_bzimage(&image) {
            return prepare(image, rewrite);
        }
        let mut key = Sha256::new();
        key.update(FORMAT);
        key.update([u8::from(rewrite)]);
        key.update(&image);
        let name = hex(&key.finalize());
        if let Some(kernel) = self.take(&name) {
            return Ok(kernel);
        }
        let kernel = prepare(image, rewrite)?;
        // A full disk, or a home that cannot be written: the next boot takes as long as this one.
        let _ = self.keep(&name, kernel.elf());
        Ok(kernel)
    }

    fn take(&self, name: &str) -> Option<Kernel> {
        self.is_ours().then_some(())?;
        let mut file = File::open(self.folder.join(name)).ok()?;
        let mut begin = [0; FORMAT.len() + DIGEST];
        file.read_exact(&mut begin).ok()?;
        let (format, digest) = begin.split_at(FORMAT.len());
        let elf = read(&mut file, LARGEST_UNPACKED).ok()?;
        if format != FORMAT || Sha256::digest(&elf).as_slice() != digest {
            return None;
        }
        // Used now, so it is the last to go.
        let _ = file.set_modified(SystemTime::now());
        Kernel::from_bytes(elf).ok()
    }

    fn keep(&self, name: &str, elf: &[u8]) -> io::Result<()> {
        if let Some(parent) = self.folder.parent() {
            fs::create_dir_all(parent)?;
        }
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if !self.is_ours() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(FORMAT)?;
        file.write_all(&Sha256::digest(elf))?;
        file.write_all(elf)?;
        file.persist(self.folder.join(name))?;
        self.shrink()
    }

    /// Removes what was used longest ago, until the rest is within bounds.
    fn shrink(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, u64, OsString)> = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let about = entry.metadata()?;
            files.push((about.modified()?, about.len(), entry.file_name()));
        }
        files.sort();
        let mut bytes: u64 = files.iter().map(|(_, size, _)| size).sum();
        let mut left = files.len();
        for (_, size, name) in files {
            if left <= MOST_FILES && bytes <= MOST_BYTES {
                break;
            }
            fs::remove_file(self.folder.join(name))?;
            (bytes, left) = (bytes - size, left - 1);
        }
        Ok(())
    }

    /// Whether nobody but this user writes into the folder.
    fn is_ours(&self) -> bool {
        let others_write = 0o022;
        fs::metadata(&self.folder).is_ok_and(|about| {
            about.uid() == rustix::process::geteuid().as_raw()
                && about.permissions().mode() & others_write == 0
        })
    }
}

fn prepare(image: Vec<u8>, rewrite: bool) -> Result<Kernel, Error> {
    let mut kernel = Kernel::from_bytes(image)?;
    if rewrite {
        kernel.rewrite_rdpmc()?;
    }
    Ok(kernel)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
