//! Files: read whole, by lines, or appended.

use alloc::ffi::CString;
use alloc::string::String;
use alloc::vec::Vec;

use crate::sys::{self, Errno, Fd, flags};

const PIECE: usize = 4096;

/// Opens `path` with one of [`flags`].
///
/// # Errors
///
/// The system call's error. A path with a NUL counts as a file that does not exist.
pub fn open(path: &str, flags: usize) -> Result<Fd, Errno> {
    let path = CString::new(path).map_err(|_| Errno::ENOENT)?;
    sys::open(&path, flags)
}

/// Returns whether there is a file at `path`.
pub fn exists(path: &str) -> bool {
    open(path, flags::READ).map(Fd::close).is_ok()
}

/// Reads all of a file; bytes that are no UTF-8 are replaced.
///
/// # Errors
///
/// The system calls'.
pub fn read(path: &str) -> Result<String, Errno> {
    bytes(path).map(|text| String::from_utf8_lossy(&text).into_owned())
}

/// Reads all of a file.
///
/// # Errors
///
/// The system calls'.
pub fn bytes(path: &str) -> Result<Vec<u8>, Errno> {
    let file = open(path, flags::READ)?;
    let mut all = Vec::new();
    let result = each_piece(file, |piece| {
        all.extend_from_slice(piece);
        Ok(())
    });
    file.close();
    result.map(|()| all)
}

/// Opens `path` with `flags` and writes `text` in one piece, as the kernel's
/// files want it.
///
/// # Errors
///
/// The system calls'.
pub fn write(path: &str, flags: usize, text: &str) -> Result<(), Errno> {
    let file = open(path, flags)?;
    let result = file.write_all(text.as_bytes());
    file.close();
    result
}

/// Appends the file at `from` to `to`.
///
/// # Errors
///
/// The system calls'.
pub fn append(from: &str, to: Fd) -> Result<(), Errno> {
    let from = open(from, flags::READ)?;
    let result = each_piece(from, |piece| to.write_all(piece));
    from.close();
    result
}

fn each_piece(file: Fd, mut take: impl FnMut(&[u8]) -> Result<(), Errno>) -> Result<(), Errno> {
    let mut piece = [0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            count => take(&piece[..count])?,
        }
    }
}

/// Returns the names in a folder, sorted. Returns none when the folder cannot be read.
pub fn names(folder: &str) -> Vec<String> {
    let mut names = Vec::new();
    if let Ok(folder) = open(folder, flags::READ) {
        folder.each_entry(|name| names.push(String::from_utf8_lossy(name).into_owned()));
        folder.close();
    }
    names.sort();
    names
}

/// A stream's lines.
pub struct Lines {
    stream: Fd,
    piece: [u8; PIECE],
    /// The part of `piece` that has not been taken.
    rest: core::ops::Range<usize>,
}

impl Lines {
    /// Reads the lines of `stream`, from its current position.
    pub fn of(stream: Fd) -> Self {
        Self {
            stream,
            piece: [0; PIECE],
            rest: 0..0,
        }
    }
}

impl Iterator for Lines {
    type Item = String;

    /// Returns the next line without its end, or `None` when the stream ended, even amid a line.
    fn next(&mut self) -> Option<String> {
        let mut line = Vec::new();
        loop {
            let rest = &self.piece[self.rest.clone()];
            if let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                line.extend_from_slice(&rest[..end]);
                self.rest.start += end + 1;
                return Some(String::from_utf8_lossy(&line).into_owned());
            }
            line.extend_from_slice(rest);
            self.rest = match self.stream.read(&mut self.piece) {
                Ok(0) | Err(_) => return None,
                Ok(count) => 0..count,
            };
        }
    }
}
