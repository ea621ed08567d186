//! Files that others read, written whole or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Error, Result};

/// Writes `contents` to `path`, or to the file that a link names, so that a reader sees all of it or none.
///
/// # Errors
///
/// When the folder of `path` cannot be written.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<()> {
    let Some(path) = replaceable(path) else {
        return fs::write(path, contents).map_err(Error::file("write", path));
    };
    let folder = folder_of(&path);
    let file = tempfile::NamedTempFile::new_in(folder).map_err(Error::file("write in", folder))?;
    fs::write(file.path(), contents).map_err(Error::file("write", &path))?;
    publish(file, &path)
}

/// Writes `value`, which is plain data, as JSON in the same way.
///
/// # Errors
///
/// When the folder of `path` cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(value).expect("plain data is JSON");
    text.push(b'\n');
    write_whole(path, &text)
}

/// Returns the file that stands at `path`, behind links. `None`: a terminal, a pipe or another device, which no file may
/// replace.
fn replaceable(path: &Path) -> Option<PathBuf> {
    match fs::metadata(path) {
        Ok(about) if !about.is_file() => None,
        _ => Some(fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())),
    }
}

fn folder_of(path: &Path) -> &Path {
    let folder = path.parent();
    let named = folder.filter(|folder| !folder.as_os_str().is_empty());
    named.unwrap_or(Path::new("."))
}

/// Gives a finished temporary file its name, readable as a created file is.
pub(crate) fn publish(file: tempfile::NamedTempFile, path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let readable = fs::Permissions::from_mode(0o644);
    let set = file.as_file().set_permissions(readable);
    set.and_then(|()| file.as_file().sync_data())
        .map_err(Error::file("write", path))?;
    file.persist(path)
        .map_err(|error| Error::file("write", path)(error.error))?;
    Ok(())
}

/// Checks, before long work, that its result can be written to `path`.
///
/// # Errors
///
/// When `path` cannot be written.
pub fn check_writable(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Err(Error::format(path, "is a folder; name a file"));
    }
    // Without opening it: whoever reads a pipe would take the check for its end.
    if path.exists() {
        rustix::fs::access(path, rustix::fs::Access::WRITE_OK)
            .map_err(|errno| Error::file("write", path)(errno.into()))?;
    }
    if let Some(path) = replaceable(path) {
        let folder = folder_of(&path);
        tempfile::tempfile_in(folder).map_err(Error::file("write in", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_whole(&path, b"1").unwrap();
        write_whole(&path, b"2").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_whole(&folder.path().join("no/such"), b"").is_err());
    }

    #[test]
    fn links_are_followed_and_devices_stay() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), b"1").unwrap();
        symlink("file", at("link")).unwrap();
        write_whole(&at("link"), b"2").unwrap();
        assert_eq!(fs::read(at("file")).unwrap(), b"2");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());

        let null = Path::new("/dev/null");
        check_writable(null).unwrap();
        symlink(null, at("device")).unwrap();
        write_whole(&at("device"), b"3").unwrap();
        let about = fs::metadata(at("device")).unwrap();
        assert!(about.file_type().is_char_device());
    }

    #[test]
    fn a_check_is_not_the_end_of_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        // Nobody reads: to open it would wait.
        check_writable(&pipe).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write_whole(&pipe, b"4").unwrap();
        assert_eq!(reader.join().unwrap(), b"4");
    }

    #[test]
    fn writable_is_found_out_early() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_writable(&folder.path().join("a.json")).is_ok());
        assert!(check_writable(&folder.path().join("no/a.json")).is_err());
        assert!(check_writable(folder.path()).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
