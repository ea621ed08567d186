//! The few Linux system calls the programs need, as safe functions.

// UNSAFETY: system calls take raw pointers and numbers.
#![expect(unsafe_code, reason = "system calls")]

mod process;

use core::ffi::CStr;
use core::fmt;
use core::ptr;
use core::slice;

pub use process::{Child, Ended, SignalAction, execute, exit, fork, ignore_signal, restore_signal};
pub use syscalls::Errno;
use syscalls::{Sysno, syscall};

const AT_FDCWD: isize = -100;
const PROT_READ_WRITE: usize = 1 | 2;
const MAP_SHARED: usize = 1;

/// Flags of [`open`].
pub mod flags {
    /// Read only.
    pub const READ: usize = 0;
    /// Write, create (mode 0644) and truncate.
    pub const CREATE: usize = 0o1 | 0o100 | 0o1000;
    /// Read and write.
    pub const READ_WRITE: usize = 0o2;
    /// Write at the end, and create.
    pub const APPEND: usize = 0o1 | 0o100 | 0o2000;
    /// Read and write, uncached where the file is memory.
    pub const READ_WRITE_SYNC: usize = 0o2 | 0o4_010_000;
}

/// SIGINT, the keyboard's interrupt.
pub const SIGINT: i32 = 2;

/// An open file descriptor. Not closed on drop: the programs end soon.
#[derive(Clone, Copy)]
pub struct Fd(pub(crate) usize);

impl Fd {
    /// Standard input.
    pub const STDIN: Self = Self(0);
    /// Standard output.
    pub const STDOUT: Self = Self(1);
    /// Standard error.
    pub const STDERR: Self = Self(2);

    /// Reads at most `buffer.len()` bytes; 0 at the end of the file.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn read(self, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: the buffer is writable for its length.
        retry(|| unsafe { syscall!(Sysno::read, self.0, buffer.as_mut_ptr(), buffer.len()) })
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn write_all(self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            // SAFETY: the buffer is readable for its length.
            let written =
                retry(|| unsafe { syscall!(Sysno::write, self.0, bytes.as_ptr(), bytes.len()) })?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Writes a message and a line end, for people. A failure has no
    /// consequences.
    pub fn say(mut self, message: fmt::Arguments<'_>) {
        let _ = fmt::Write::write_fmt(&mut self, format_args!("{message}\n"));
    }

    /// Makes `target` another name of this descriptor.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn duplicate_to(self, target: Fd) -> Result<(), Errno> {
        // SAFETY: no pointers.
        unsafe { syscall!(Sysno::dup3, self.0, target.0, 0) }.map(drop)
    }

    /// Closes the descriptor.
    pub fn close(self) {
        // SAFETY: no pointers.
        let _ = unsafe { syscall!(Sysno::close, self.0) };
    }

    /// Hands each name in this folder to `take`, except those of the folder and its parent. Ends at
    /// the first error.
    pub fn each_entry(self, mut take: impl FnMut(&[u8])) {
        // A `struct linux_dirent64` is 8-byte aligned: inode, offset, then its size (u16), a type
        // (u8) and the name.
        let mut entries = [0_u64; 256];
        loop {
            // SAFETY: the buffer is writable for its size.
            let filled = unsafe {
                let size = size_of_val(&entries);
                syscall!(Sysno::getdents64, self.0, entries.as_mut_ptr(), size)
            };
            let Ok(filled @ 1..) = filled else { return };
            // SAFETY: any byte of the array may be read as such.
            let bytes = unsafe { slice::from_raw_parts(entries.as_ptr().cast::<u8>(), filled) };
            let mut rest = bytes;
            while !rest.is_empty() {
                let size = usize::from(u16::from_ne_bytes([rest[16], rest[17]]));
                let name = CStr::from_bytes_until_nul(&rest[19..size]).unwrap_or_default();
                if ![&b"."[..], b".."].contains(&name.to_bytes()) {
                    take(name.to_bytes());
                }
                rest = &rest[size..];
            }
        }
    }

    /// Maps `length` bytes at `offset`, shared, for reading and writing.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn map(self, offset: usize, length: usize) -> Result<*mut u8, Errno> {
        // SAFETY: the kernel picks an address that nothing else uses.
        let mapped = unsafe {
            let (access, shared) = (PROT_READ_WRITE, MAP_SHARED);
            syscall!(Sysno::mmap, 0, length, access, shared, self.0, offset)
        };
        mapped.map(ptr::with_exposed_provenance_mut)
    }
}

impl fmt::Write for Fd {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.write_all(text.as_bytes()).map_err(|_| fmt::Error)
    }
}

/// Opens `path` with one of [`flags`].
///
/// # Errors
///
/// The system call's.
pub fn open(path: &CStr, flags: usize) -> Result<Fd, Errno> {
    // SAFETY: the path is a C string.
    retry(|| unsafe { syscall!(Sysno::openat, AT_FDCWD, path.as_ptr(), flags, 0o644) }).map(Fd)
}

/// Opens a perf event that counts the hardware event `config` for this process, in user space and in the kernel.
///
/// # Errors
///
/// The system call's.
#[cfg(target_arch = "x86_64")]
pub fn count_hardware(config: u64) -> Result<Fd, Errno> {
    const PERF_TYPE_HARDWARE: u64 = 0;
    const THIS_PROCESS: usize = 0;
    const ANY_CPU: usize = usize::MAX;
    const NO_GROUP: usize = usize::MAX;
    // PERF_ATTR_SIZE_VER0: the type and the size, the configuration, and no wish beside them.
    let mut attributes = [0_u64; 8];
    attributes[0] = (size_of_val(&attributes) as u64) << 32 | PERF_TYPE_HARDWARE;
    attributes[1] = config;
    let at = &raw const attributes;
    // SAFETY: the attributes are readable for the size in them.
    let event = unsafe {
        syscall!(
            Sysno::perf_event_open,
            at,
            THIS_PROCESS,
            ANY_CPU,
            NO_GROUP,
            0
        )
    };
    event.map(Fd)
}

/// Lets this process use I/O port `port`.
///
/// # Errors
///
/// The system call's.
#[cfg(target_arch = "x86_64")]
pub fn allow_port(port: u16) -> Result<(), Errno> {
    // SAFETY: no pointers.
    unsafe { syscall!(Sysno::ioperm, port, 1, 1) }.map(drop)
}

/// Returns the nanoseconds of CLOCK_MONOTONIC.
pub fn monotonic_ns() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    let mut time = [0_u64; 2];
    // SAFETY: a timespec is two 64-bit words.
    let _ = unsafe { syscall!(Sysno::clock_gettime, CLOCK_MONOTONIC, time.as_mut_ptr()) };
    time[0] * 1_000_000_000 + time[1]
}

/// Sleeps for `ms` milliseconds.
pub fn sleep_ms(ms: u32) {
    let time = [u64::from(ms / 1000), u64::from(ms % 1000) * 1_000_000];
    // SAFETY: a timespec is two 64-bit words.
    let _ = unsafe { syscall!(Sysno::nanosleep, time.as_ptr(), 0) };
}

/// Keeps thread `thread` on processor `cpu` of the first 64.
///
/// # Errors
///
/// The system call's.
pub fn pin(thread: usize, cpu: u32) -> Result<(), Errno> {
    let mask = 1_u64.checked_shl(cpu).unwrap_or(0);
    let (at, size) = (&raw const mask, size_of_val(&mask));
    // SAFETY: the mask is readable for its size.
    unsafe { syscall!(Sysno::sched_setaffinity, thread, size, at) }.map(drop)
}

fn retry(mut call: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}
