//! FAT file systems: what firmware and cloud-init read.

use std::fs::File;
use std::io::{self, Read, Seek, Write};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};

/// A label as the file system keeps it: spaces behind the name.
pub(super) type Label = [u8; 11];

/// A file system that is being made, in a temporary file.
pub(super) struct Volume {
    system: FileSystem<File>,
    file: File,
}

impl Volume {
    /// Makes an empty file system of `size` bytes.
    pub(super) fn new(size: u64, label: Label) -> io::Result<Self> {
        let mut file = tempfile::tempfile()?;
        file.set_len(size)?;
        // Fixed, so that the same files make the same volume.
        let options = FormatVolumeOptions::new()
            .volume_id(0x7670_6d75)
            .volume_label(label);
        fatfs::format_volume(&mut file, options)?;
        let system = FileSystem::new(file.try_clone()?, FsOptions::new())?;
        Ok(Self { system, file })
    }

    /// Adds a file, and the folders in its path.
    pub(super) fn add(&self, path: &str, mut contents: impl Read) -> io::Result<()> {
        let root = self.system.root_dir();
        for (end, _) in path.match_indices('/') {
            root.create_dir(&path[..end])?;
        }
        let mut file = root.create_file(path)?;
        io::copy(&mut contents, &mut file)?;
        file.flush()
    }

    /// Returns the finished file system, from its beginning.
    pub(super) fn finish(self) -> io::Result<File> {
        self.system.unmount()?;
        let mut file = self.file;
        file.rewind()?;
        Ok(file)
    }
}
