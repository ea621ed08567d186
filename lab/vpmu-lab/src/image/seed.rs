//! A command for a system that the lab did not make.
//!
//! The image of a user's guest stays as it is. But cloud-init, which the images of distributions have, looks for a file
//! system named `cidata` at boot and does what its `user-data` says (the data source NoCloud). The machine's second disk
//! is such a file system: it has the job's files, and a script that puts them into the guest and starts them as
//! the lab's own guests do.

use std::fs::File;
use std::io;
use std::path::Path;

use itertools::Itertools;

use super::archive::Archive;
use super::fat::Volume;
use crate::{Error, Result};

/// The console of a user's system, which the lab listens to. `/dev/console` may be a screen there.
pub(crate) const CONSOLE: &str = "/dev/ttyS0";

/// The name that cloud-init looks for.
const LABEL: &[u8; 11] = b"CIDATA     ";

/// The job's files are below this folder, at their places in the guest.
const FILES: &str = "files";

const USER_DATA: &str = "#cloud-config\n\
    runcmd:\n\
    - mkdir -p /run/vpmu\n\
    - mount -o ro /dev/disk/by-label/CIDATA /run/vpmu\n\
    - sh /run/vpmu/start\n";

/// cloud-init does its work once for each name of an instance.
const META_DATA: &str = "instance-id: vpmu\nlocal-hostname: vpmu\n";

/// Writes the disk with this job to `path`.
pub(crate) fn write(job: &Archive, path: &Path) -> Result<()> {
    let volume = volume(job)?;
    let written = File::create(path).and_then(|mut disk| io::copy(&mut { volume }, &mut disk));
    written.map(drop).map_err(Error::file("write", path))
}

fn volume(job: &Archive) -> Result<File> {
    /// Room for the file system's own tables, and for the last cluster of each file.
    const ROOM: u64 = 4 << 20;
    let files = job
        .files()
        .map(|(place, _, contents)| Ok((place, contents.open()?)));
    let files = files.collect::<Result<Vec<_>>>()?;
    // A byte in eight more: a large file system has large clusters.
    let sizes = files.iter().map(|(_, (_, size))| size + size / 8);
    let size = ROOM + sizes.sum::<u64>();
    let disk = || Error::file("make", "the seed disk");
    let volume = Volume::new(size.next_multiple_of(1 << 20), *LABEL).map_err(disk())?;
    let texts = [
        ("user-data", USER_DATA),
        ("meta-data", META_DATA),
        ("start", &start(job)),
    ];
    for (name, text) in texts {
        volume.add(name, text.as_bytes()).map_err(disk())?;
    }
    for (place, (bytes, _)) in files {
        let place = format!("{FILES}/{place}");
        volume.add(&place, bytes).map_err(disk())?;
    }
    volume.finish().map_err(disk())
}

/// Returns the script that cloud-init starts.
fn start(job: &Archive) -> String {
    /// SIGRTMIN + 21: systemd shows no more of its units' news on the console.
    const QUIET: u8 = 34 + 21;
    let programs = job.files().filter(|(_, mode, _)| mode & 0o111 != 0);
    let programs = programs.map(|(place, ..)| place).join(" ");
    format!(
        "cp -r /run/vpmu/{FILES}/. /\n\
         cd / && chmod 755 {programs}\n\
         # Neither a login nor news of units comes between the command's lines.\n\
         if [ -d /run/systemd/system ]; then\n\
         systemctl stop serial-getty@ttyS0.service\n\
         kill -{QUIET} 1\n\
         fi\n\
         export HOME=/root TERM=dumb LC_ALL=C\n\
         exec setsid sh /init < {CONSOLE} > {CONSOLE} 2>&1\n"
    )
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_seed_has_the_jobs_files_and_starts_them() {
        let mut job = Archive::default();
        let large = tempfile::NamedTempFile::new().unwrap();
        large.as_file().set_len(9 << 20).unwrap();
        job.bytes("init", 0o755, "echo")
            .copy("usr/bin/a-long-name", 0o755, large.path())
            .bytes("vpmu/job", 0o644, "x=1\n");
        let system =
            fatfs::FileSystem::new(volume(&job).unwrap(), fatfs::FsOptions::new()).unwrap();
        assert_eq!(system.volume_label_as_bytes(), b"CIDATA");
        let read = |path: &str| {
            let mut text = Vec::new();
            let file = system.root_dir().open_file(path);
            file.unwrap().read_to_end(&mut text).unwrap();
            text
        };
        assert_eq!(read("files/vpmu/job"), b"x=1\n");
        assert_eq!(read("files/usr/bin/a-long-name").len(), 9 << 20);
        let start = String::from_utf8(read("start")).unwrap();
        assert!(
            start.contains("chmod 755 init usr/bin/a-long-name\n"),
            "{start}"
        );
        assert!(read("user-data").starts_with(b"#cloud-config\n"));
    }
}
