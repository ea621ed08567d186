//! A kernel for tests, which follows perf's rules for machines that are not at hand.
//!
//! Each rule names the function of Linux 6.12 that it was read from. Two clocks: the host's, and the time that the guest
//! has run. An event happens so many times a ms of the guest's, so an ideal counter is a product.

mod state;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Mutex;

use perf_event_open_sys::bindings::{
    PERF_FORMAT_GROUP, PERF_RECORD_UNTHROTTLE, PERF_TYPE_HARDWARE, PERF_TYPE_RAW, perf_event_attr,
};

use crate::kernel::Kernel;
use crate::notes;
use crate::processor::{Processor, Vendor};
pub(crate) use state::happened;
use state::{Event, State};

/// ns between two of the kernel's ticks, and between two rotations (HZ = 250, PERF_CPU_HRTIMER).
pub(crate) const TICK: u64 = 4_000_000;
/// ns of the host's for an overflow's interrupt.
const INTERRUPT: u64 = 1_000;
const PAGE: usize = 4096;

/// The machine that a test wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) processor: Processor,
    /// The raw event that counts nothing.
    pub(crate) dead: Option<u64>,
    /// Counters of the PMU.
    pub(crate) counters: usize,
    /// Whether cache misses count on one of them alone. Any other event counts on any.
    pub(crate) constrained: bool,
    /// Of so many ticks, the thread spends each last on a core whose PMU is another one. 0: there is none.
    pub(crate) e_core_each: usize,
    /// Counters that others have pinned, such as the watchdog.
    pub(crate) pinned: usize,
    /// Whether perf's clock is made of the TSC.
    pub(crate) tsc: bool,
    /// Whether an event of guests counts the host, too: a KVM below that drops AMD's GuestOnly bit.
    pub(crate) counts_host: bool,
    /// Whether there is a VM with a mediated PMU.
    pub(crate) mediated: bool,
    /// Events that can be open at a time.
    pub(crate) descriptors: usize,
    /// Overflows of an event after which it is throttled until the next tick.
    pub(crate) per_tick: u64,
    /// ns of the host's from an overflow to its signal.
    pub(crate) latency: u64,
    /// Of so many signals, each last finds the queue full.
    pub(crate) full_each: u64,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            processor: Processor {
                vendor: Vendor::Intel,
                family: 6,
                has_p0_cycles: false,
            },
            dead: None,
            counters: 8,
            constrained: false,
            e_core_each: 0,
            pinned: 0,
            tsc: false,
            counts_host: false,
            mediated: false,
            descriptors: 100,
            per_tick: 400,
            latency: 30_000,
            full_each: u64::MAX,
        }
    }
}

/// The kernel of a [`Machine`].
#[derive(Debug)]
pub(crate) struct Fake(Mutex<State>);

impl Fake {
    /// Makes a kernel, for ever.
    pub(crate) fn new(machine: Machine) -> &'static Self {
        Box::leak(Box::new(Self(Mutex::new(State {
            machine,
            now: 1_000_000_000,
            guest: 0,
            next_tick: 1_000_000_000 + TICK,
            rotation: 0,
            events: BTreeMap::new(),
            last_fd: 1000,
            signals: 0,
            waiting: Vec::new(),
            arrival: None,
            in_interrupts: 0,
        }))))
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Machine)) {
        let mut state = self.0.lock().unwrap();
        change(&mut state.machine);
        state.schedule();
    }

    /// Runs the guest for so many ns of its own, or until a signal takes the thread out. Returns the ns.
    pub(crate) fn run(&self, ns: u64) -> u64 {
        let (ran, signals) = self.0.lock().unwrap().run(ns);
        // The signal handler, which reads nothing of the kernel's.
        signals.into_iter().for_each(notes::signalled);
        ran
    }

    /// Lets time pass in which the guest does not run.
    pub(crate) fn pass(&self, ns: u64) {
        self.0.lock().unwrap().pass(ns);
    }

    /// Has every event count so much less than before: as much as two ways to read it differ by.
    pub(crate) fn set_back(&self, by: u64) {
        for event in self.0.lock().unwrap().events.values_mut() {
            event.value -= by;
        }
    }

    /// Returns the guest's ns so far.
    pub(crate) fn guest(&self) -> u64 {
        self.0.lock().unwrap().guest
    }

    /// Returns the host's ns so far, and those in interrupts.
    pub(crate) fn host(&self) -> (u64, u64) {
        let state = self.0.lock().unwrap();
        (state.now, state.in_interrupts)
    }

    /// Returns the number of open events.
    pub(crate) fn open_events(&self) -> usize {
        self.0.lock().unwrap().events.len()
    }

    fn event<T>(&self, fd: RawFd, body: impl FnOnce(&mut Event) -> T) -> T {
        let mut state = self.0.lock().unwrap();
        let done = body(state.events.get_mut(&fd).expect("an open event"));
        state.schedule();
        done
    }
}

impl Kernel for Fake {
    fn processor(&self) -> Processor {
        self.0.lock().unwrap().machine.processor
    }

    fn open(
        &self,
        attr: perf_event_attr,
        _: libc::pid_t,
        leader: Option<RawFd>,
    ) -> io::Result<RawFd> {
        let mut state = self.0.lock().unwrap();
        let hardware = matches!(attr.type_, PERF_TYPE_HARDWARE | PERF_TYPE_RAW);
        let errno = |errno| Err(io::Error::from_raw_os_error(errno));
        // The guest runs with these counters off (intel_guest_get_msrs), and AMD's refuse to leave the host out
        // (perf_ibs_init): a precise event never counts a guest.
        assert_eq!(attr.precise_ip(), 0, "a precise event");
        if hardware && state.machine.counters == 0 {
            return errno(libc::ENOENT);
        }
        // mediated_pmu_account_event of Linux 7.0.
        if hardware && state.machine.mediated && attr.exclude_guest() == 0 {
            return errno(libc::EOPNOTSUPP);
        }
        if state.events.len() >= state.machine.descriptors {
            return errno(libc::EMFILE);
        }
        // A group that can never be scheduled as a whole is refused (x86's validate_group, which counts no others).
        let members = |event: &&Event| event.is_hardware() && leader.is_some();
        let group = state.events.iter().filter(|(fd, event)| {
            members(event) && (Some(**fd) == leader || event.leader == leader)
        });
        if hardware && group.count() >= state.machine.counters {
            return errno(libc::EINVAL);
        }
        state.last_fd += 1;
        let fd = state.last_fd;
        #[expect(unsafe_code, reason = "a union of integers")]
        // SAFETY: both fields are u64.
        let period = unsafe { attr.__bindgen_anon_1.sample_period };
        let event = Event {
            attr,
            leader,
            enabled: attr.disabled() == 0,
            scheduled: false,
            throttled: false,
            interrupts: 0,
            value: 0,
            left: period.max(1),
            period: period.max(1),
            time_enabled: 0,
            time_running: 0,
            signals: false,
            buffer: None,
        };
        state.events.insert(fd, event);
        state.schedule();
        Ok(fd)
    }

    fn close(&self, event: RawFd) {
        let mut state = self.0.lock().unwrap();
        let closed = state.events.remove(&event).expect("an open event");
        assert!(closed.buffer.is_none(), "a mapped event stays open");
        state.waiting.retain(|&fd| fd != event);
        state.schedule();
    }

    fn signal(&self, event: RawFd, _: libc::pid_t, _: libc::c_int) -> io::Result<()> {
        self.event(event, |event| event.signals = true);
        Ok(())
    }

    fn enable(&self, event: RawFd) -> bool {
        self.event(event, |event| event.enabled = true);
        true
    }

    fn disable(&self, event: RawFd) -> bool {
        self.event(event, |event| event.enabled = false);
        true
    }

    /// A throttled event goes on (__perf_event_period). 0 and 2^63 are refused (perf_event_check_period).
    fn set_period(&self, event: RawFd, period: u64) -> bool {
        if period == 0 || period >> 63 != 0 {
            return false;
        }
        self.event(event, |event| {
            (event.period, event.left) = (period, period);
            if std::mem::take(&mut event.throttled) {
                event.interrupts = 0;
                event.write(PERF_RECORD_UNTHROTTLE, &[0; 3]);
            }
        });
        true
    }

    /// Reads nothing of a pinned group that has no counters: it is in an error state (perf_read).
    fn read(&self, event: RawFd, totals: &mut [u8]) -> io::Result<usize> {
        let state = self.0.lock().unwrap();
        let leader = &state.events[&event];
        if leader.attr.pinned() == 1 && leader.enabled && !leader.scheduled {
            return Ok(0);
        }
        let mut words = vec![leader.value, leader.time_enabled, leader.time_running];
        if leader.attr.read_format & u64::from(PERF_FORMAT_GROUP) != 0 {
            let members = state.events.values();
            let members: Vec<u64> = members
                .filter(|member| member.leader == Some(event))
                .map(|member| member.value)
                .collect();
            words = vec![
                1 + members.len() as u64,
                leader.time_enabled,
                leader.time_running,
                leader.value,
            ];
            words.extend(members);
        }
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        let room = totals.get_mut(..bytes.len()).ok_or(io::ErrorKind::Other)?;
        room.copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn now(&self) -> u64 {
        self.0.lock().unwrap().now
    }

    fn map(&self, event: RawFd, length: usize) -> io::Result<NonNull<u8>> {
        let mut memory = vec![0_u64; length / 8].into_boxed_slice();
        if self.0.lock().unwrap().machine.tsc {
            // struct perf_event_mmap_page: cap_user_time_zero, and a time_mult of 1 behind a time_shift of 0.
            (memory[5], memory[6]) = (1 << 4, 1 << 32);
        }
        let at = NonNull::from(Box::leak(memory)).cast();
        self.event(event, |event| event.buffer = Some((at, length, 0)));
        Ok(at)
    }

    #[expect(unsafe_code, reason = "the trait's")]
    unsafe fn unmap(&self, buffer: NonNull<u8>, length: usize) {
        let mut state = self.0.lock().unwrap();
        for event in state.events.values_mut() {
            event.buffer = event.buffer.filter(|&(at, ..)| at != buffer);
        }
        let words = std::ptr::slice_from_raw_parts_mut(buffer.as_ptr().cast::<u64>(), length / 8);
        // SAFETY: `map` has leaked this box, and nobody uses it any more.
        drop(unsafe { Box::from_raw(words) });
    }
}
