//! The statistics of this process's vCPUs in a file that other programs read while guests run.
//!
//! # The file
//!
//! `/run/vpmu/PID`, or `$XDG_RUNTIME_DIR/vpmu/PID`: words of 64 bits, little-endian. The first eight are [`MAGIC`],
//! [`VERSION`], the process's number in its own namespace, the offset of the first vCPU's words, the number of words of
//! a vCPU, the number of vCPUs' places that were ever taken, the number of kinds of exits and that of the other figures. The
//! words of a vCPU are its state (1: the others are valid), its thread, its backing (0: nothing counts; 1: hardware;
//! 2: a clock), its PMU (0: none; 1: Intel's; 2: AMD's; 3: paravirtual), its exits by kind ([`Exit::KINDS`](crate::Exit::KINDS)), and its
//! figures ([`Statistics::figures`]). A later library appends kinds and figures; whatever else changes has another version.
//!
//! Each word is stored whole, by the one thread that holds the vCPU's statistics, so that a writer makes no system call,
//! and a reader takes no lock. Two words may be of different moments.
//!
//! # Who lives
//!
//! The process holds a record lock on its file (F_SETLK), which ends with the process, is inherited by no child, and by
//! which the kernel names the process in the reader's own namespace of PIDs. A file that nobody has locked is a dead
//! process's.
//!
//! UNSAFETY: maps memory that other processes read, and calls atexit.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::env;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self, AtFlags, FlockOperation, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use vpmu::x86::Capability;
use vpmu_perf::Backing;

use crate::offer::{Offer, Pmu};
use crate::slot::{
    self, BACKING, COUNTS, FILE, HEADER, MODEL, Mapped, STATE, STRIDE, Slot, TAKEN_EVER, THREAD,
    VALID, WORDS,
};
use crate::stats::{Exits, FIGURES, KINDS, Statistics};

/// The first word: `VPMUSTAT`.
const MAGIC: u64 = u64::from_le_bytes(*b"VPMUSTAT");
/// The second word.
const VERSION: u64 = 1;

const BYTES: usize = WORDS * size_of::<u64>();
/// The end of what a reader takes of anybody's file.
const MOST_BYTES: u64 = 4 << 20;

const BACKINGS: [Option<Backing>; 3] = [None, Some(Backing::Hardware), Some(Backing::Clock)];
const MODELS: [&str; 4] = ["none", "intel", "amd", "paravirtual"];

/// The file of this process, by its name.
static PUBLISHED: Mutex<Option<Published>> = Mutex::new(None);

struct Published {
    folder: OwnedFd,
    path: PathBuf,
    process: u32,
}

/// Publishes the statistics of the vCPUs that are attached from now on ([`Vcpu::attach`](crate::Vcpu::attach)) in a file that `vpmu top` and `vpmu metrics` read: `/run/vpmu/PID` where this
/// process may write there (root makes the folder), else `$XDG_RUNTIME_DIR/vpmu/PID`. Its owner and its group may read
/// it. Returns its path, or `None` where there is no such folder. Further calls change nothing.
///
/// Call this after the process has become a daemon, and before its seccomp filter. An exit counts with a store to
/// memory. The file goes with the process.
///
/// # Errors
///
/// When the folder exists and the file cannot be made. Guests then run unpublished.
pub fn publish() -> io::Result<Option<PathBuf>> {
    let mut published = PUBLISHED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(published) = &*published {
        return Ok(Some(published.path.clone()));
    }
    let mut refused = None;
    for (folder, mode) in folders() {
        // Another mode of a folder that is there is its administrator's choice.
        let _ = fs::mkdir(&folder, mode.into());
        match make(&folder) {
            Ok((made, mapped)) => {
                let path = made.path.clone();
                *published = Some(made);
                // Nobody else sets it: the lock is held.
                let _ = FILE.set(mapped);
                // SAFETY: the function takes no argument, and stays.
                let _ = unsafe { libc::atexit(remove) };
                return Ok(Some(path));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => refused = Some((folder, error)),
        }
    }
    match refused {
        None => Ok(None),
        Some((folder, error)) => Err(io::Error::new(
            error.kind(),
            format!("statistics in {}: {error}", folder.display()),
        )),
    }
}

/// Returns the folders of published files, with the modes in which they are made.
fn folders() -> Vec<(PathBuf, u32)> {
    let of_user = env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let of_user = of_user.map(|folder| (Path::new(&folder).join("vpmu"), 0o700));
    // A user may not make /run/vpmu: packages make it for the group kvm.
    [(PathBuf::from("/run/vpmu"), 0o755)]
        .into_iter()
        .chain(of_user)
        .collect()
}

/// Makes the file in this folder, under the name of this process.
fn make(path: &Path) -> io::Result<(Published, Mapped)> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = fs::open(path, flags, Mode::empty())?;
    sweep(&folder);
    let process = std::process::id();
    let (name, unready) = (process.to_string(), format!(".{process}"));
    if let Ok(other) = open(&folder, &name)
        && owner(&other)?.is_some()
    {
        // Two containers may share the folder, each with a process of this number.
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let _ = fs::unlinkat(&folder, &unready, AtFlags::empty());
    // EXCL: whatever somebody has put there, a symbolic link above all, is not opened.
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let file = fs::openat(&folder, &unready, flags, 0o640.into())?;
    let made = begin(file, process).and_then(|mapped| {
        // The name appears when the file is whole and locked.
        fs::renameat(&folder, &unready, &folder, &name)?;
        Ok(mapped)
    });
    if made.is_err() {
        let _ = fs::unlinkat(&folder, &unready, AtFlags::empty());
    }
    let published = Published {
        folder,
        path: path.join(name),
        process,
    };
    Ok((published, made?))
}

/// Locks, sizes and maps the file, and writes its first words.
fn begin(file: OwnedFd, process: u32) -> io::Result<Mapped> {
    fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
    // Pages that no vCPU uses take no memory.
    fs::ftruncate(&file, BYTES as u64)?;
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let map = unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES, access, kind, &file, 0)? };
    // SAFETY: mapped until the process ends, at a multiple of a page, and zero. Only this process may write: the file has
    // this process's owner, who can shorten it, and then kills his own process by SIGBUS.
    let words = unsafe { std::slice::from_raw_parts(map.cast::<AtomicU64>(), WORDS) };
    let mapped = Mapped::new(file, words)?;
    let header = [
        MAGIC,
        VERSION,
        process.into(),
        HEADER as u64,
        STRIDE as u64,
        0,
        KINDS as u64,
        FIGURES as u64,
    ];
    slot::put(words, &header);
    Ok(mapped)
}

/// Removes the files of processes that were killed, as far as this process may.
fn sweep(folder: &OwnedFd) {
    for name in names(folder) {
        if open(folder, &name).is_ok_and(|file| matches!(owner(&file), Ok(None))) {
            let _ = fs::unlinkat(folder, &name, AtFlags::empty());
        }
    }
}

extern "C" fn remove() {
    // Whoever holds the lock leaves a file that the next process removes.
    if let Ok(mut published) = PUBLISHED.try_lock()
        && let Some(published) = published.take()
        // A child of fork runs the handlers of its parent.
        && published.process == std::process::id()
        && let Some(name) = published.path.file_name()
    {
        let _ = fs::unlinkat(&published.folder, name, AtFlags::empty());
    }
}

/// Takes a place in the file for a vCPU, if this process publishes.
pub(crate) fn take_slot(offer: &Offer, backing: Option<Backing>) -> Slot {
    let model = match &offer.pmu {
        None => 0,
        Some(Pmu::Architectural(Capability::Intel(_))) => 1,
        Some(Pmu::Architectural(Capability::Amd(_))) => 2,
        Some(Pmu::Paravirtual(_)) => 3,
    };
    let backing = BACKINGS.iter().position(|it| *it == backing);
    Slot::take(backing.unwrap_or(0) as u64, model)
}

/// The published statistics of one process that lives.
#[derive(Clone, Debug)]
pub struct Process {
    /// The process.
    pub id: u32,
    /// Its vCPUs.
    pub vcpus: Vec<PublishedVcpu>,
}

/// The published statistics of one vCPU.
#[derive(Clone, Debug)]
pub struct PublishedVcpu {
    /// Its number in its process, in the order of attachment. Numbers of vCPUs that are gone are given again.
    pub number: usize,
    /// Its thread; `None` before the first run.
    pub thread: Option<u32>,
    /// What counts; `None`: nothing does.
    pub backing: Option<Backing>,
    /// Whose PMU the guest has: `intel`, `amd`, `paravirtual` or `none`.
    pub pmu: &'static str,
    /// Its cost. The exits are known by their [kinds](Exits::kinds) alone.
    pub statistics: Statistics,
}

/// Returns the published statistics of all processes that live and whose files this process may read, by their numbers,
/// with the paths of files that could not be read.
pub fn published() -> (Vec<Process>, Vec<(PathBuf, io::Error)>) {
    let (mut processes, mut refused) = (Vec::new(), Vec::new());
    for (path, _) in folders() {
        read_folder(&path, &mut processes, &mut refused);
    }
    processes.sort_by_key(|process: &Process| process.id);
    (processes, refused)
}

fn read_folder(path: &Path, processes: &mut Vec<Process>, refused: &mut Vec<(PathBuf, io::Error)>) {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = match fs::open(path, flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(error) if error == rustix::io::Errno::NOENT => return,
        Err(error) => return refused.push((path.to_owned(), error.into())),
    };
    for name in names(&folder) {
        if let Some(words) = own(&folder, &name) {
            processes.extend(parse(std::process::id(), &words));
            continue;
        }
        match open(&folder, &name).and_then(|file| read(&file)) {
            Ok(found) => processes.extend(found),
            // It has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // A link or a socket, which is nobody's statistics.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => {}
            Err(error) => refused.push((path.join(&name), error)),
        }
    }
}

/// Returns the words of the file that this process publishes, if it has this name. The file is not to be opened here: with
/// any descriptor of it that a process closes, all of the process's record locks on it end (POSIX, fcntl).
fn own(folder: &OwnedFd, name: &str) -> Option<Vec<[u8; 8]>> {
    let mapped = FILE.get()?;
    let its = fs::fstat(&mapped.file).ok()?;
    let named = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if (named.st_dev, named.st_ino) != (its.st_dev, its.st_ino) {
        return None;
    }
    let vcpus = mapped.words[TAKEN_EVER].load(Ordering::Relaxed);
    let length = HEADER + STRIDE * usize::try_from(u64::from_le(vcpus)).ok()?;
    let words = mapped.words.get(..length)?.iter();
    Some(
        words
            .map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .collect(),
    )
}

/// Returns the names that are numbers of processes.
fn names(folder: &OwnedFd) -> Vec<String> {
    let entries = fs::Dir::read_from(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
    names.filter(|name| name.parse::<u32>().is_ok()).collect()
}

fn open(folder: &OwnedFd, name: &str) -> io::Result<File> {
    // NONBLOCK: a FIFO that somebody has put there is not waited for.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(fs::openat(folder, name, flags, Mode::empty())?.into())
}

/// Returns the process that holds the file's lock; `None`: it is gone.
fn owner(file: &impl AsFd) -> io::Result<Option<u32>> {
    let mut lock = libc::flock {
        l_type: libc::F_RDLCK as _,
        l_whence: libc::SEEK_SET as _,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the kernel writes what it has found into `lock`.
    if unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GETLK, &raw mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if lock.l_type == libc::F_UNLCK as libc::c_short {
        return Ok(None);
    }
    // No PID: it lives where this process sees none. -1: a lock of no process, which is none of this library's.
    Ok(u32::try_from(lock.l_pid).ok())
}

/// Reads a file; `None`: its process is gone, or it is another version's.
fn read(file: &File) -> io::Result<Option<Process>> {
    // Read, not mapped: whoever owns the file could shorten it, and kill its reader by SIGBUS. x86 copies in words.
    let Some(id) = owner(file)? else {
        return Ok(None);
    };
    let mut header = [0; HEADER * size_of::<u64>()];
    if file.read_at(&mut header, 0)? != header.len() {
        return Ok(None);
    }
    // A later version may have longer vCPUs, and none reads more than the longest file.
    let (header, _) = header.as_chunks::<8>();
    let number = |at: usize| u64::from_le_bytes(header[at]);
    let vcpus = number(4)
        .saturating_mul(number(TAKEN_EVER))
        .saturating_mul(8);
    let length = number(3).saturating_mul(8).saturating_add(vcpus);
    let mut bytes = Vec::new();
    file.take(length.min(MOST_BYTES)).read_to_end(&mut bytes)?;
    let (words, _) = bytes.as_chunks::<8>();
    Ok(parse(id, words))
}

fn parse(id: u32, words: &[[u8; 8]]) -> Option<Process> {
    let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let (&header, _) = words.split_first_chunk::<HEADER>()?;
    let [magic, version, own, offset, stride, _, kinds, figures] = header;
    if (magic, version) != (MAGIC, VERSION) {
        return None;
    }
    let size = |word: u64| usize::try_from(word).ok();
    let (kinds, figures) = (size(kinds)?, size(figures)?);
    let slots = words.get(size(offset)?..)?;
    let stride = size(stride).filter(|stride| *stride > COUNTS)?;
    let vcpus = slots.chunks_exact(stride).enumerate();
    let vcpus = vcpus.filter(|(_, slot)| slot[STATE] == VALID);
    let vcpu = |(number, slot): (usize, &[u64])| {
        let (about, counts) = slot.split_at(COUNTS);
        let (exits, others) = counts.split_at_checked(kinds)?;
        let others = others.get(..figures)?;
        let mut statistics = Statistics {
            exits: Exits::of_kinds(known(exits)),
            ..Statistics::default()
        };
        statistics.set_words(known(others));
        Some(PublishedVcpu {
            number,
            thread: u32::try_from(about[THREAD]).ok().filter(|it| *it != 0),
            backing: *BACKINGS.get(size(about[BACKING])?)?,
            pmu: MODELS.get(size(about[MODEL])?)?,
            statistics,
        })
    };
    Some(Process {
        id: if id == 0 {
            u32::try_from(own).ok()?
        } else {
            id
        },
        vcpus: vcpus.filter_map(vcpu).collect(),
    })
}

/// Returns the words that this version knows; those that the writer did not know are zero.
fn known<const N: usize>(words: &[u64]) -> [u64; N] {
    std::array::from_fn(|n| words.get(n).copied().unwrap_or(0))
}

#[cfg(test)]
mod tests;
