//! The folder for the files that the lab downloaded and built.
//!
//! Several `vpmu` may run at once, and any may be killed at any time. So a file gets its name only
//! once it is whole (written beside it, then renamed), and whoever adds something holds
//! [`Session::lock`]. The short-lived folder of a run has a lock that dies with its owner, so an
//! abandoned folder is recognised.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tempfile::TempDir;

use crate::host::cancel::Cancel;
use crate::host::progress::Progress;
use crate::{Error, Result};

const POLL: Duration = Duration::from_millis(50);

/// The cache in `$XDG_CACHE_HOME/vpmu` or `~/.cache/vpmu`.
#[derive(Debug, Clone)]
pub struct Cache {
    /// The folder itself.
    pub root: PathBuf,
}

/// What everything works with that takes long, and keeps what it makes.
#[derive(Debug)]
pub struct Session<'a> {
    /// The folder in which files are kept.
    pub cache: Cache,
    /// The user's wish to stop.
    pub cancel: &'a Cancel,
    /// The display of progress for the user.
    pub progress: Progress,
}

/// The right to add to the cache, released on drop.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held for its lock")] File);

/// A folder for the files of one run, removed on drop.
#[derive(Debug)]
pub struct RunDir {
    folder: TempDir,
    #[expect(dead_code, reason = "held for its lock")]
    lock: File,
}

impl Cache {
    /// Opens the user's cache folder, and creates it where it is missing.
    ///
    /// # Errors
    ///
    /// When there is no home folder, or it cannot be written.
    pub fn open() -> Result<Self> {
        let root = Self::location().ok_or_else(|| {
            Error::Other("no cache folder: set HOME or XDG_CACHE_HOME".to_owned())
        })?;
        Self::at(root)
    }

    /// Opens the cache in `root`.
    pub(crate) fn at(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(Error::file("create", &root))?;
        Ok(Self { root })
    }

    /// Returns the folder of [`Cache::open`], whether or not it exists.
    pub fn location() -> Option<PathBuf> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        variable("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")))
            .map(|folder| folder.join("vpmu"))
    }

    /// Makes a fresh folder for one run. Removes folders of killed runs first.
    ///
    /// # Errors
    ///
    /// When the folder cannot be made.
    pub fn run_dir(&self) -> Result<RunDir> {
        let runs = self.root.join("runs");
        fs::create_dir_all(&runs).map_err(Error::file("create", &runs))?;
        // This lock differs from the cache's, which may be held for minutes.
        let _lock = locked(&self.root.join("runs.lock"))?;
        remove_abandoned(&runs);
        let folder =
            TempDir::with_prefix_in("run-", &runs).map_err(Error::file("create", &runs))?;
        let lock = locked(&folder.path().join("lock"))?;
        Ok(RunDir { folder, lock })
    }
}

impl<'a> Session<'a> {
    /// Begins with the user's cache, created where it is missing.
    ///
    /// # Errors
    ///
    /// As [`Cache::open`].
    pub fn new(cancel: &'a Cancel, progress: Progress) -> Result<Self> {
        Ok(Self {
            cache: Cache::open()?,
            cancel,
            progress,
        })
    }

    /// Waits until no other `vpmu` adds to the cache, and keeps others out.
    ///
    /// # Errors
    ///
    /// When the lock file cannot be made, or the user wishes to stop.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.cache.root.join("lock");
        let file = File::create(&path).map_err(Error::file("create", &path))?;
        let mut waiting = None;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock(file)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(errno) => return Err(Error::file("lock", &path)(errno.into())),
            }
            self.cancel.check()?;
            waiting.get_or_insert_with(|| {
                let what = "waiting for another vpmu that prepares guests";
                self.progress.task(what)
            });
            thread::sleep(POLL);
        }
    }
}

/// Waits for the lock of a file that is locked only briefly, and returns the file.
fn locked(path: &Path) -> Result<File> {
    let file = File::create(path).map_err(Error::file("create", path))?;
    flock(&file, FlockOperation::LockExclusive)
        .map_err(|errno| Error::file("lock", path)(errno.into()))?;
    Ok(file)
}

impl RunDir {
    /// Returns the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn remove_abandoned(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let abandoned = match File::open(entry.path().join("lock")) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(_) => true,
        };
        if abandoned {
            // The next run tries again.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abandoned_runs_go_live_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let live = cache.run_dir().unwrap();
        let dead = folder.path().join("runs/run-dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("lock"), "").unwrap();

        let second = cache.run_dir().unwrap();
        assert!(live.path().exists());
        assert!(second.path().exists());
        assert!(!dead.exists());
        let path = live.path().to_owned();
        drop(live);
        assert!(!path.exists());
    }
}
