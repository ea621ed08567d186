//! Buffers that a test has forged, in a file, which takes the place of the kernel's event.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use perf_event_open_sys::bindings::PERF_RECORD_MISC_KERNEL;

use super::*;
use crate::kernel::Linux;

const PAGE: u64 = 4096;
const SIZE: u64 = 2 * PAGE;

/// A buffer's file.
struct Forged(File);

macro_rules! offset {
    ($field:tt) => {
        std::mem::offset_of!(perf_event_mmap_page, $field) as u64
    };
}

impl Forged {
    /// Returns a buffer whose tail and head are `at`.
    fn new(at: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE + SIZE).unwrap();
        let forged = Self(file);
        forged.put(offset!(data_tail), at);
        forged.put(offset!(data_head), at);
        forged
    }

    fn put(&self, at: u64, word: u64) {
        self.0.write_all_at(&word.to_ne_bytes(), at).unwrap();
    }

    fn get(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, at).unwrap();
        u64::from_ne_bytes(word)
    }

    fn buffer(&self) -> RingBuffer {
        RingBuffer::map(&Linux, self.0.as_raw_fd(), SIZE).unwrap()
    }

    /// Adds words behind the head.
    fn add(&self, words: &[u64]) {
        let head = self.get(offset!(data_head));
        for (n, &word) in words.iter().enumerate() {
            self.put(PAGE + (head + 8 * n as u64) % SIZE, word);
        }
        self.put(offset!(data_head), head + 8 * words.len() as u64);
    }

    fn tail(&self) -> u64 {
        self.get(offset!(data_tail))
    }
}

fn header(kind: u32, misc: u32, bytes: u64) -> u64 {
    u64::from(kind) | u64::from(misc) << 32 | bytes << 48
}

fn sample(misc: u32, ip: u64, time: u64) -> [u64; 3] {
    [header(PERF_RECORD_SAMPLE, misc, SAMPLE), ip, time]
}

#[test]
fn samples_come_in_their_order_and_are_given_back() {
    // 24 bytes do not divide the buffer, so one record goes over its end.
    let forged = Forged::new(SIZE - 32);
    let mut buffer = forged.buffer();
    assert_eq!(buffer.next(), None);
    let modes = [
        (PERF_RECORD_MISC_GUEST_USER, CpuMode::GuestUser),
        (PERF_RECORD_MISC_GUEST_KERNEL, CpuMode::GuestKernel),
        (PERF_RECORD_MISC_KERNEL, CpuMode::Host),
        // The bit beside the mode says that the address is exact.
        (0x4000 | PERF_RECORD_MISC_GUEST_USER, CpuMode::GuestUser),
    ];
    for (n, &(misc, _)) in (0..).zip(&modes) {
        forged.add(&sample(misc, 0xffff_0000 + n, 1000 + n));
    }
    for (n, &(_, mode)) in (0..).zip(&modes) {
        let (ip, time) = (0xffff_0000 + n, 1000 + n);
        let expected = PerfRecord::Sample(PerfSample { ip, mode, time });
        assert_eq!(buffer.next(), Some(expected));
        assert_eq!(forged.tail(), SIZE - 32 + 24 * (n + 1));
    }
    assert_eq!(buffer.next(), None);
}

#[test]
fn other_records_are_told_apart_and_unknown_ones_are_left_out() {
    let forged = Forged::new(0);
    let mut buffer = forged.buffer();
    forged.add(&[header(PERF_RECORD_THROTTLE, 0, 32), 1, 2, 3]);
    forged.add(&[header(77, 0, 16), 1]);
    forged.add(&[header(PERF_RECORD_UNTHROTTLE, 0, 32), 1, 2, 3]);
    forged.add(&[header(PERF_RECORD_LOST, 0, 24), 1, 5]);
    // A sample that is too short to be one.
    forged.add(&[header(PERF_RECORD_SAMPLE, 0, 16), 1]);
    assert_eq!(buffer.next(), Some(PerfRecord::Throttle));
    assert_eq!(buffer.next(), Some(PerfRecord::Unthrottle));
    assert_eq!(buffer.next(), Some(PerfRecord::Lost(5)));
    assert_eq!(buffer.next(), None);
    assert_eq!(forged.tail(), forged.get(offset!(data_head)));
}

#[test]
fn overflows_are_counted_with_those_that_found_no_room() {
    let forged = Forged::new(0);
    let mut buffer = forged.buffer();
    forged.add(&[header(PERF_RECORD_SAMPLE, 0, 8)]);
    forged.add(&[header(PERF_RECORD_LOST, 0, 24), 1, 5]);
    forged.add(&[header(77, 0, 16), 1]);
    let mut take = || {
        let mut taken = Overflows::default();
        buffer.take_overflows(&mut taken);
        (taken.number, taken.throttled)
    };
    assert_eq!(take(), (6, false));
    forged.add(&[header(PERF_RECORD_SAMPLE, 0, 8)]);
    forged.add(&[header(PERF_RECORD_THROTTLE, 0, 32), 1, 2, 3]);
    assert_eq!(take(), (1, true));
    forged.add(&[header(PERF_RECORD_SAMPLE, 0, 7)]);
    assert_eq!(take(), (1, false), "no sense");
    assert_eq!(take(), (0, false));
}

#[test]
fn a_buffer_that_makes_no_sense_is_emptied() {
    for length in [0, 4, 7, 12, 48, 0xfff8] {
        let forged = Forged::new(8);
        let mut buffer = forged.buffer();
        forged.add(&[header(PERF_RECORD_SAMPLE, 0, length), 1, 2, 3]);
        assert_eq!(buffer.next(), Some(PerfRecord::Lost(0)), "{length}");
        assert_eq!(buffer.next(), None, "{length}");
        // It is of use again.
        forged.add(&sample(PERF_RECORD_MISC_GUEST_USER, 1, 2));
        assert!(matches!(buffer.next(), Some(PerfRecord::Sample(_))));
    }
    // A head before the tail, and one further than a buffer.
    for head in [0, SIZE + 16] {
        let forged = Forged::new(8);
        let mut buffer = forged.buffer();
        forged.put(offset!(data_head), head);
        assert_eq!(buffer.next(), Some(PerfRecord::Lost(0)), "{head}");
        assert_eq!(buffer.next(), None, "{head}");
    }
}

#[test]
fn a_time_is_a_tsc_where_the_page_says_so() {
    let forged = Forged::new(0);
    let buffer = forged.buffer();
    assert_eq!(buffer.tsc(1000), None);
    // The shift and the factor are halves of one word, the factor the higher.
    let word = |shift: u64, mult: u64| shift << 16 | mult << 32;
    let at = offset!(time_shift) & !7;
    assert_eq!(offset!(time_mult), at + 4);
    let capabilities = offset!(__bindgen_anon_1);
    forged.put(capabilities, CAP_USER_TIME_ZERO);
    assert_eq!(buffer.tsc(1000), None, "a factor of 0");
    // A TSC of 2.5 GHz: 0.4 ns each, 429,496,730 in 2^30.
    let (mult, shift) = (429_496_730, 30);
    for (zero, tsc) in [
        (0, 0),
        (5000, 123_456_789_012),
        (0_u64.wrapping_sub(77), 1 << 50),
    ] {
        forged.put(at, word(shift, mult));
        forged.put(offset!(time_zero), zero);
        let time = zero.wrapping_add(((u128::from(tsc) * u128::from(mult)) >> shift) as u64);
        let found = buffer.tsc(time).unwrap();
        assert!(found.abs_diff(tsc) <= 3, "{found} {tsc}");
    }
    forged.put(at, word(64, mult));
    assert_eq!(buffer.tsc(1000), None, "no shift");
}

#[test]
fn sizes_are_whole_pages_and_powers_of_two() {
    let page = page_size();
    for (samples, size) in [(0, page), (1, page), (u64::MAX, 1 << 30)] {
        assert_eq!(RingBuffer::size_for(samples), size);
    }
    let size = RingBuffer::size_for(2040);
    assert!(size.is_power_of_two() && (2040 * SAMPLE..4 * 2040 * SAMPLE).contains(&size));
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_time_of_an_event_goes_on_from_the_page() {
    let forged = Forged::new(0);
    let buffer = RingBuffer::map(&Linux, forged.0.as_raw_fd(), 0).unwrap();
    assert_eq!(buffer.running(), None, "no time without a TSC");
    forged.put(offset!(__bindgen_anon_1), CAP_USER_TIME);
    forged.put(offset!(time_running), 1_000_000);
    // The page was written at TSC 2^20, with 4 ns a tick.
    forged.put(offset!(time_shift) & !7, 1 << 16 | 8 << 32);
    forged.put(offset!(time_offset), 0_u64.wrapping_sub(4 << 20));
    let since = |tsc: u64| 1_000_000 + 4 * (tsc - (1 << 20));
    let [before, time, after] = [tsc(), buffer.running(), tsc()].map(Option::unwrap);
    assert!((since(before)..=since(after)).contains(&time), "{time}");
}
