//! The memory in which the kernel leaves an event's records: `struct perf_event_mmap_page`, and the ring buffer behind that.
//!
//! The kernel owns the bytes from the tail up to the head, which it writes; the reader owns those that it has not given
//! back by moving the tail (perf_event_open(2), "MMAP layout"). Records are multiples of 8 bytes and begin at one, so no
//! word of a record is divided by the end of the buffer.
//!
//! A crate exists for it (perf-event2). It hides the page's time fields, without which a sample's time is no TSC.
//!
//! UNSAFETY: maps and reads memory that the kernel writes.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use perf_event_open_sys::bindings::{
    PERF_RECORD_LOST, PERF_RECORD_MISC_CPUMODE_MASK, PERF_RECORD_MISC_GUEST_KERNEL,
    PERF_RECORD_MISC_GUEST_USER, PERF_RECORD_SAMPLE, PERF_RECORD_THROTTLE, PERF_RECORD_UNTHROTTLE,
    perf_event_mmap_page,
};

use crate::kernel::Kernel;

/// What a thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CpuMode {
    /// In its guest, at CPL 3.
    GuestUser,
    /// In its guest, at another CPL.
    GuestKernel,
    /// Not in a guest: in the VMM or in the host's kernel.
    Host,
}

/// One sample of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerfSample {
    /// The address of the next instruction, the guest's where the thread was in its guest.
    pub ip: u64,
    /// What the thread was doing.
    pub mode: CpuMode,
    /// The moment by perf's clock, in ns: [`Sampler::tsc`](crate::Sampler::tsc) converts it.
    pub time: u64,
}

/// One record of a [`Sampler`](crate::Sampler).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfRecord {
    /// A sample.
    Sample(PerfSample),
    /// The kernel takes no samples from here on, because there were too many: `kernel.perf_event_max_sample_rate`.
    Throttle,
    /// The kernel takes samples again.
    Unthrottle,
    /// The number of records that found no room. 0: the number is unknown, because the buffer made no sense.
    Lost(u64),
}

/// Bit of `capabilities`: the page's `time_offset`, `time_mult` and `time_shift` give the time since its last update.
const CAP_USER_TIME: u64 = 1 << 3;
/// Bit of `capabilities`: the page's `time_zero`, `time_mult` and `time_shift` relate perf's clock to the TSC.
const CAP_USER_TIME_ZERO: u64 = 1 << 4;

/// What an event's buffer has recorded of its overflows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overflows {
    pub(crate) number: u64,
    /// Whether the kernel has stopped the event, until the next tick or the next period that it is given.
    pub(crate) throttled: bool,
}

const HEADER: u64 = 8;
/// Header, address, time.
const SAMPLE: u64 = HEADER + 16;
/// Header, event, number.
const LOST: u64 = HEADER + 16;

/// A mapped ring buffer and its reader.
#[derive(Debug)]
pub(crate) struct RingBuffer {
    kernel: &'static dyn Kernel,
    page: NonNull<perf_event_mmap_page>,
    /// The first of `size` bytes, behind the page.
    data: NonNull<u64>,
    /// A power of two.
    size: u64,
    /// Bytes that are mapped.
    mapped: usize,
    tail: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread. There is one reader at a time, which `next` asks for by
// `&mut`.
unsafe impl Send for RingBuffer {}

/// A pointer to a field of the page.
macro_rules! field {
    ($buffer:expr, $($field:tt)+) => {{
        let page = $buffer.page.as_ptr();
        // SAFETY: `page` is mapped as long as `self`, a whole perf_event_mmap_page fits in it, and no reference is made.
        unsafe { &raw mut (*page).$($field)+ }
    }};
}

impl RingBuffer {
    /// Returns the size of a buffer with room for so many samples, in bytes: a power of two of whole pages.
    pub(crate) fn size_for(samples: u64) -> u64 {
        samples
            .saturating_mul(SAMPLE)
            .clamp(page_size(), 1 << 30)
            .next_power_of_two()
    }

    /// Returns the number of samples for which the buffer has room.
    pub(crate) fn capacity(&self) -> u64 {
        self.size / SAMPLE
    }

    /// Maps the buffer of `event`, of `size` bytes, a power of two of whole pages. 0: maps the page alone, and there are
    /// no records.
    pub(crate) fn map(kernel: &'static dyn Kernel, event: RawFd, size: u64) -> io::Result<Self> {
        let page = page_size();
        let (mapped, offset) = (page + size, page as usize);
        let mapped = usize::try_from(mapped).map_err(|_| io::ErrorKind::InvalidInput)?;
        let at = kernel.map(event, mapped)?;
        let mut buffer = Self {
            kernel,
            page: at.cast(),
            // SAFETY: the mapping is longer than its first page.
            data: unsafe { at.byte_add(offset) }.cast(),
            size,
            mapped,
            tail: 0,
        };
        buffer.tail = Self::get(field!(buffer, data_tail));
        Ok(buffer)
    }

    /// Returns the next record, if there is one that has not been returned. Reads memory alone where there is none.
    pub(crate) fn next(&mut self) -> Option<PerfRecord> {
        self.next_with(SAMPLE)
    }

    /// Adds all records to `taken`, of an event whose samples say nothing but that it has overflowed.
    pub(crate) fn take_overflows(&mut self, taken: &mut Overflows) {
        while let Some(record) = self.next_with(HEADER) {
            match record {
                PerfRecord::Sample(_) => taken.number += 1,
                PerfRecord::Lost(records) => {
                    taken.number = taken.number.saturating_add(records.max(1));
                }
                PerfRecord::Throttle => taken.throttled = true,
                PerfRecord::Unthrottle => {}
            }
        }
    }

    /// Returns the next record. A sample has so many bytes, or more; words that it has not may be anything.
    fn next_with(&mut self, sample: u64) -> Option<PerfRecord> {
        loop {
            let head = field!(self, data_head);
            // SAFETY: the field is aligned, mapped, and written by the kernel as one word.
            let head = unsafe { AtomicU64::from_ptr(head) }.load(Ordering::Acquire);
            let filled = head.wrapping_sub(self.tail);
            if filled == 0 {
                return None;
            }
            let header = self.word(0);
            // struct perf_event_header: type, misc, size.
            let (kind, misc, length) = (header as u32, header >> 32 & 0xffff, header >> 48);
            let fits = length >= HEADER && length % 8 == 0 && length <= filled;
            if filled > self.size || !fits {
                self.give_back(filled);
                return Some(PerfRecord::Lost(0));
            }
            let record = match kind {
                PERF_RECORD_SAMPLE if length >= sample => Some(PerfRecord::Sample(PerfSample {
                    ip: self.word(1),
                    mode: match misc as u32 & PERF_RECORD_MISC_CPUMODE_MASK {
                        PERF_RECORD_MISC_GUEST_USER => CpuMode::GuestUser,
                        PERF_RECORD_MISC_GUEST_KERNEL => CpuMode::GuestKernel,
                        _ => CpuMode::Host,
                    },
                    time: self.word(2),
                })),
                PERF_RECORD_LOST if length >= LOST => Some(PerfRecord::Lost(self.word(2))),
                PERF_RECORD_THROTTLE => Some(PerfRecord::Throttle),
                PERF_RECORD_UNTHROTTLE => Some(PerfRecord::Unthrottle),
                _ => None,
            };
            self.give_back(length);
            if record.is_some() {
                return record;
            }
        }
    }

    /// Returns a word behind the tail.
    fn word(&self, n: u64) -> u64 {
        let at = self.tail.wrapping_add(8 * n) & (self.size - 8);
        // SAFETY: `size` is a power of two and no less than a page, so `at` is a multiple of 8 below `size`, and the
        // word is in the buffer.
        unsafe { self.data.byte_add(at as usize).read_volatile() }
    }

    /// Gives bytes behind the tail back to the kernel.
    fn give_back(&mut self, bytes: u64) {
        self.tail = self.tail.wrapping_add(bytes);
        let tail = field!(self, data_tail);
        // SAFETY: as for the head. The kernel reads the word.
        unsafe { AtomicU64::from_ptr(tail) }.store(self.tail, Ordering::Release);
    }

    /// Returns the host's TSC at `time`. `None`: this machine's perf clock is not made of the TSC.
    pub(crate) fn tsc(&self, time: u64) -> Option<u64> {
        let scale = self.consistent(|| self.scale());
        if scale.capabilities & CAP_USER_TIME_ZERO == 0 || scale.mult == 0 {
            return None;
        }
        let (mult, shift) = (u64::from(scale.mult), u32::from(scale.shift));
        let since = time.wrapping_sub(scale.zero);
        let (whole, rest) = (since / mult, since % mult);
        let whole = whole.checked_shl(shift)?;
        Some(whole.wrapping_add(rest.checked_shl(shift)? / mult))
    }

    /// Returns the ns for which the event has counted, where the calling thread is the event's and it counts now.
    /// `None`: this machine's perf clock is not made of the TSC.
    pub(crate) fn running(&self) -> Option<u64> {
        let (scale, running, tsc) = self.consistent(|| {
            let running: u64 = Self::get(field!(self, time_running));
            (self.scale(), running, tsc())
        });
        if scale.capabilities & CAP_USER_TIME == 0 {
            return None;
        }
        let since = (u128::from(tsc?) * u128::from(scale.mult)) >> u32::from(scale.shift).min(63);
        Some(running.wrapping_add(scale.offset.wrapping_add(since as u64)))
    }

    fn scale(&self) -> Scale {
        Scale {
            capabilities: Self::get(field!(self, __bindgen_anon_1.capabilities)),
            shift: Self::get(field!(self, time_shift)),
            mult: Self::get(field!(self, time_mult)),
            zero: Self::get(field!(self, time_zero)),
            offset: Self::get(field!(self, time_offset)),
        }
    }

    /// Reads several fields of the page, which the kernel may change, as they were at one moment.
    fn consistent<T>(&self, read: impl Fn() -> T) -> T {
        let lock = field!(self, lock);
        // SAFETY: the field is aligned, mapped, and written by the kernel as one word.
        let lock = unsafe { AtomicU32::from_ptr(lock) };
        loop {
            let before = lock.load(Ordering::Acquire);
            let fields = read();
            fence(Ordering::Acquire);
            // The kernel adds 1 before it writes and 1 behind.
            if before & 1 == 0 && lock.load(Ordering::Relaxed) == before {
                return fields;
            }
            std::hint::spin_loop();
        }
    }

    fn get<T: Copy>(field: *mut T) -> T {
        // SAFETY: `field` comes from `field!`, which see. Any bits are a value of the integers there.
        unsafe { field.read_volatile() }
    }
}

/// The relation of perf's clock to the TSC.
struct Scale {
    capabilities: u64,
    shift: u16,
    mult: u32,
    zero: u64,
    /// The time from the page's last update on, less that of the TSC.
    offset: u64,
}

/// Returns the TSC, where there is one.
fn tsc() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction takes no memory, and Linux lets every program execute it.
    return Some(unsafe { std::arch::x86_64::_rdtsc() });
    #[cfg(not(target_arch = "x86_64"))]
    None
}

impl Drop for RingBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is this buffer's, and nobody else has a pointer into it.
        unsafe { self.kernel.unmap(self.page.cast(), self.mapped) };
    }
}

fn page_size() -> u64 {
    // SAFETY: takes no memory.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // Linux has pages of 4 KiB or more, and tells their size.
    u64::try_from(size).unwrap_or(4096).max(4096)
}

#[cfg(test)]
mod tests;
