//! Initramfs archives (cpio, `newc`), with the same bytes for the same contents.
//!
//! A guest that boots from different bytes takes a different number of
//! instructions, and with `-icount` that changes every later figure. So
//! order, inode numbers, owners and times are fixed. Archives may be
//! concatenated: the kernel unpacks one after the other.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cpio::newc::{Builder, Reader, trailer};
use rustix::fs::FileType;

use crate::{Error, Result};

/// 2026-01-01 00:00 UTC. The time is not zero, because gzip warns about files from 1970.
pub const MTIME: u32 = 1_767_225_600;

/// A file tree, in memory or on the disk until it is written.
#[derive(Debug, Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    kind: FileType,
    mode: u32,
    /// Of a link, its target.
    contents: Contents,
}

/// The source of a file's bytes.
#[derive(Debug)]
pub(crate) enum Contents {
    /// Bytes in memory.
    Bytes(Vec<u8>),
    /// A file, read when the archive is written.
    Disk(PathBuf),
}

impl Contents {
    /// Returns the bytes, from the first one, and their number.
    pub(crate) fn open(&self) -> Result<(Box<dyn Read + '_>, u64)> {
        Ok(match self {
            Self::Bytes(bytes) => (Box::new(bytes.as_slice()), bytes.len() as u64),
            Self::Disk(path) => {
                let file = File::open(path).map_err(Error::file("open", path))?;
                let size = file.metadata().map_err(Error::file("read", path))?.len();
                (Box::new(file), size)
            }
        })
    }
}

impl Archive {
    /// Adds a folder and its parent folders. `path` has no leading slash.
    pub fn folder(&mut self, path: &str) -> &mut Self {
        let ends = path.match_indices('/').map(|(index, _)| index);
        for end in ends.chain([path.len()]) {
            self.entries.entry(path[..end].to_owned()).or_insert(Entry {
                kind: FileType::Directory,
                mode: 0o755,
                contents: Contents::Bytes(Vec::new()),
            });
        }
        self
    }

    /// Adds a file of these bytes with permissions `mode`, and its parent folders.
    pub fn bytes(&mut self, path: &str, mode: u32, bytes: impl Into<Vec<u8>>) -> &mut Self {
        let contents = Contents::Bytes(bytes.into());
        self.add(path, FileType::RegularFile, mode, contents)
    }

    /// Adds the file at `from` likewise, which is read when the archive is written.
    pub fn copy(&mut self, path: &str, mode: u32, from: impl Into<PathBuf>) -> &mut Self {
        let contents = Contents::Disk(from.into());
        self.add(path, FileType::RegularFile, mode, contents)
    }

    /// Adds a symbolic link, and its parent folders.
    pub fn link(&mut self, path: &str, target: &str) -> &mut Self {
        let contents = Contents::Bytes(target.into());
        self.add(path, FileType::Symlink, 0o777, contents)
    }

    fn add(&mut self, path: &str, kind: FileType, mode: u32, contents: Contents) -> &mut Self {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        let entry = Entry {
            kind,
            mode,
            contents,
        };
        self.entries.insert(path.to_owned(), entry);
        self
    }

    /// Returns each file's path, permissions and contents, in the order of the paths.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, u32, &Contents)> {
        let files = self.entries.iter();
        files
            .filter(|(_, entry)| entry.kind == FileType::RegularFile)
            .map(|(path, entry)| (path.as_str(), entry.mode, &entry.contents))
    }

    /// Writes the archive. An error calls `out` by the name `place`.
    fn write(&self, out: &mut impl Write, place: &Path) -> Result<()> {
        for (index, (path, entry)) in self.entries.iter().enumerate() {
            let inode = u32::try_from(index + 1).expect("fewer than 2^32 files");
            // A folder has itself by the name `.`, too.
            let links = 1 + u32::from(entry.kind == FileType::Directory);
            let builder = Builder::new(path).ino(inode).mtime(MTIME).nlink(links);
            let builder = builder.mode(entry.kind.as_raw_mode() | entry.mode);
            let (bytes, size) = entry.contents.open()?;
            put(builder, out, bytes, size).map_err(Error::file("write", place))?;
        }
        trailer(&mut *out).map_err(Error::file("write", place))?;
        Ok(())
    }

    /// Writes the archive to a new file.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or is larger than 4 GiB, or `path` cannot be written.
    pub fn write_file(&self, path: &Path) -> Result<()> {
        let file = File::create(path).map_err(Error::file("create", path))?;
        let mut out = io::BufWriter::with_capacity(1 << 20, file);
        self.write(&mut out, path)?;
        out.flush().map_err(Error::file("write", path))
    }
}

/// Writes `parts` one after the other, each at a multiple of four bytes, where
/// the kernel expects the next archive.
pub(crate) fn concatenate(parts: &[&Path], path: &Path) -> Result<()> {
    let mut out = File::create(path).map_err(Error::file("create", path))?;
    for part in parts {
        let mut file = File::open(part).map_err(Error::file("open", part))?;
        let size = io::copy(&mut file, &mut out).map_err(Error::file("write", path))?;
        let padding = (4 - size % 4) % 4;
        out.write_all(&[0; 3][..padding as usize])
            .map_err(Error::file("write", path))?;
    }
    Ok(())
}

/// Unpacks the archive at `path`, of which nothing follows, into `folder`.
pub(crate) fn extract(path: &Path, folder: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    extract_from(io::BufReader::new(file), folder).map_err(Error::file("unpack", path))
}

fn extract_from(mut archive: impl Read, folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::symlink;
    loop {
        let mut reader = Reader::new(archive)?;
        let (place, mode) = (folder.join(reader.entry().name()), reader.entry().mode());
        if reader.entry().is_trailer() {
            return Ok(());
        }
        match FileType::from_raw_mode(mode) {
            FileType::Directory => fs::create_dir_all(&place)?,
            FileType::Symlink => symlink(io::read_to_string(&mut reader)?, &place)?,
            _ => {
                io::copy(&mut reader, &mut File::create(&place)?)?;
                fs::set_permissions(&place, fs::Permissions::from_mode(mode & 0o777))?;
            }
        }
        archive = reader.finish()?;
    }
}

/// Adds the user's own file under `folder`, with the same permission to be executed.
pub(crate) fn add_file(archive: &mut Archive, folder: &str, path: &Path) -> Result<()> {
    let metadata = fs::metadata(path).map_err(Error::file("open", path))?;
    if !metadata.is_file() {
        return Err(Error::format(
            path,
            "not a regular file; add files one by one",
        ));
    }
    File::open(path).map_err(Error::file("open", path))?;
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .ok_or_else(|| Error::format(path, "the name is not UTF-8; rename it"))?;
    let mode = if metadata.permissions().mode() & 0o111 == 0 {
        0o644
    } else {
        0o755
    };
    archive.copy(&format!("{folder}/{name}"), mode, path);
    Ok(())
}

/// Adds what is below `root` but for what only a reader wants, where the lab's file tree has it: programs in `usr/bin` and
/// the rest below `usr`, whatever links a package expects.
pub(crate) fn add_tree(archive: &mut Archive, root: &Path) -> Result<()> {
    const NOT_NEEDED: [&str; 4] = [
        "usr/share/doc",
        "usr/share/info",
        "usr/share/locale",
        "usr/share/man",
    ];
    const MERGED: [(&str, &str); 5] = [
        ("bin", "usr/bin"),
        ("sbin", "usr/bin"),
        ("usr/sbin", "usr/bin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
    ];
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).map_err(Error::file("read", &folder))? {
            let path = entry.map_err(Error::file("read", &folder))?.path();
            let Some(place) = path.strip_prefix(root).ok().and_then(Path::to_str) else {
                return Err(Error::format(path, "the name is not UTF-8"));
            };
            if NOT_NEEDED.contains(&place) {
                continue;
            }
            let merged = MERGED.iter().find_map(|(old, new)| {
                let rest = place.strip_prefix(old)?.strip_prefix('/')?;
                Some(format!("{new}/{rest}"))
            });
            let is_merged = MERGED.iter().any(|(old, _)| place == *old);
            let place = merged.unwrap_or_else(|| place.to_owned());
            let metadata = fs::symlink_metadata(&path).map_err(Error::file("read", &path))?;
            if metadata.is_symlink() {
                let target = fs::read_link(&path).map_err(Error::file("read", &path))?;
                if !is_merged {
                    archive.link(&place, &target.to_string_lossy());
                }
            } else if metadata.is_dir() {
                if !is_merged {
                    archive.folder(&place);
                }
                open.push(path);
            } else if metadata.is_file() {
                let mode = metadata.permissions().mode() & 0o7777;
                archive.copy(&place, mode, path);
            }
        }
    }
    Ok(())
}

fn put(builder: Builder, out: &mut impl Write, mut from: impl Read, size: u64) -> io::Result<()> {
    let size = u32::try_from(size)
        .map_err(|_| io::Error::new(io::ErrorKind::FileTooLarge, "more than 4 GiB"))?;
    let mut writer = builder.write(out, size);
    io::copy(&mut from, &mut writer)?;
    writer.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(archive: &Archive) -> Vec<u8> {
        let mut out = Vec::new();
        archive.write(&mut out, Path::new("memory")).unwrap();
        out
    }

    #[test]
    fn same_contents_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        fs::write(&path, "disk").unwrap();

        let mut first = Archive::default();
        first
            .bytes("usr/bin/b", 0o755, b"disk".to_vec())
            .link("bin", "usr/bin")
            .folder("proc");
        let mut second = Archive::default();
        second
            .folder("proc")
            .link("bin", "usr/bin")
            .copy("usr/bin/b", 0o755, path);
        assert_eq!(bytes(&first), bytes(&second));
    }

    #[test]
    fn extracted_as_it_was() {
        let mut archive = Archive::default();
        archive
            .bytes("a/b", 0o755, b"hello".to_vec())
            .link("c", "a/b");
        let folder = tempfile::tempdir().unwrap();
        extract_from(bytes(&archive).as_slice(), folder.path()).unwrap();
        assert_eq!(fs::read(folder.path().join("c")).unwrap(), b"hello");
        let mut again = Archive::default();
        add_file(&mut again, "a", &folder.path().join("a/b")).unwrap();
        assert_eq!(again.link("c", "a/b").entries.len(), archive.entries.len());
        assert!(
            bytes(&again).starts_with(&bytes(&archive)[..110]),
            "permissions, too"
        );
        assert!(extract_from(&bytes(&archive)[..200], folder.path()).is_err());
    }

    #[test]
    fn parents_come_first() {
        let mut archive = Archive::default();
        archive.bytes("a/b/c", 0o644, b"hello".to_vec());
        let data = bytes(&archive);
        let mut names = Vec::new();
        let mut rest = data.as_slice();
        loop {
            let reader = Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            assert_eq!(reader.entry().mtime(), MTIME);
            assert_eq!((reader.entry().uid(), reader.entry().gid()), (0, 0));
            names.push((reader.entry().name().to_owned(), reader.entry().mode()));
            rest = reader.finish().unwrap();
        }
        assert_eq!(
            names,
            [
                ("a".to_owned(), 0o40755),
                ("a/b".to_owned(), 0o40755),
                ("a/b/c".to_owned(), 0o100_644),
            ]
        );
        assert_eq!(data.len() % 4, 0);
    }

    #[test]
    fn concatenated_parts_are_aligned() {
        let folder = tempfile::tempdir().unwrap();
        let part = folder.path().join("part");
        fs::write(&part, "12345").unwrap();
        let all = folder.path().join("all");
        concatenate(&[&part, &part], &all).unwrap();
        assert_eq!(fs::read(&all).unwrap(), b"12345\0\0\x0012345\0\0\0");
    }

    #[test]
    fn a_packages_tree_goes_where_the_guest_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("lib/x86_64-linux-gnu");
        for path in [
            "usr/sbin/a",
            "lib/x86_64-linux-gnu/b.so.1",
            "usr/share/doc/c",
            "etc/d",
        ] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        std::os::unix::fs::symlink("b.so.1", libraries.join("b.so")).unwrap();
        let mut archive = Archive::default();
        add_tree(&mut archive, folder.path()).unwrap();
        let files: Vec<_> = archive.files().map(|(path, _, _)| path).collect();
        let expected = ["etc/d", "usr/bin/a", "usr/lib/x86_64-linux-gnu/b.so.1"];
        assert_eq!(files, expected);
        // The guest's own links to /usr stay.
        for place in ["lib", "usr/sbin", "usr/share/doc"] {
            assert!(!archive.entries.contains_key(place), "{place}");
        }
        let link = archive.entries.get("usr/lib/x86_64-linux-gnu/b.so");
        let target = &link.unwrap().contents;
        assert!(matches!(target, Contents::Bytes(target) if target == b"b.so.1"));
    }

    #[test]
    fn added_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        assert!(add_file(&mut archive, "root", folder.path()).is_err());
        assert!(add_file(&mut archive, "root", &folder.path().join("none")).is_err());
        fs::write(folder.path().join("data"), "1").unwrap();
        add_file(&mut archive, "root", &folder.path().join("data")).unwrap();
        assert!(archive.entries.contains_key("root/data"));
    }
}
