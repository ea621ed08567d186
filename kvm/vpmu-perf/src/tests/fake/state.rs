//! The rules: what the machine does while time goes on.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CPU_CYCLES, PERF_RECORD_SAMPLE, PERF_RECORD_THROTTLE, PERF_RECORD_UNTHROTTLE,
    PERF_TYPE_HARDWARE, PERF_TYPE_RAW, PERF_TYPE_SOFTWARE, perf_event_attr, perf_event_mmap_page,
};

use super::{INTERRUPT, Machine, PAGE, TICK};

/// Events in a ms of the guest's. The guest is in user space for three quarters of each moment.
fn rate(attr: &perf_event_attr) -> u64 {
    let quarters = 3 * (1 - attr.exclude_user()) + (1 - attr.exclude_kernel());
    let generic = |number: u32| attr.config == u64::from(number);
    let rate = match attr.type_ {
        PERF_TYPE_HARDWARE if generic(PERF_COUNT_HW_CPU_CYCLES) => 3_000_000,
        PERF_TYPE_HARDWARE if generic(PERF_COUNT_HW_BRANCH_INSTRUCTIONS) => 400_000,
        PERF_TYPE_HARDWARE if generic(PERF_COUNT_HW_BRANCH_MISSES) => 5_000,
        _ if is_constrained(attr) => 20,
        // A clock knows no rings.
        PERF_TYPE_SOFTWARE => return 1_000_000,
        _ => 1_000_000,
    };
    rate * quarters / 4
}

/// Cache misses, by Linux's name or by AMD's numbers.
fn is_constrained(attr: &perf_event_attr) -> bool {
    match attr.type_ {
        PERF_TYPE_HARDWARE => attr.config == u64::from(PERF_COUNT_HW_CACHE_MISSES),
        PERF_TYPE_RAW => matches!(attr.config, 0x077e | 0x0964),
        _ => false,
    }
}

#[derive(Debug)]
pub(super) struct Event {
    pub(super) attr: perf_event_attr,
    pub(super) leader: Option<RawFd>,
    pub(super) enabled: bool,
    /// Whether it has a counter.
    pub(super) scheduled: bool,
    pub(super) throttled: bool,
    /// Overflows since the tick.
    pub(super) interrupts: u64,
    pub(super) value: u64,
    /// Events until the next overflow.
    pub(super) left: u64,
    pub(super) period: u64,
    pub(super) time_enabled: u64,
    pub(super) time_running: u64,
    pub(super) signals: bool,
    /// The buffer, its length, and its head.
    pub(super) buffer: Option<(NonNull<u8>, usize, u64)>,
}

// SAFETY: the buffer is the test's own memory, and the test has one thread.
#[expect(unsafe_code, reason = "the buffer is shared as with a kernel")]
unsafe impl Send for Event {}

impl Event {
    pub(super) fn is_hardware(&self) -> bool {
        matches!(self.attr.type_, PERF_TYPE_HARDWARE | PERF_TYPE_RAW)
    }

    pub(super) fn is_in_guest(&self) -> bool {
        self.attr.exclude_guest() == 0
    }

    pub(super) fn write(&mut self, kind: u32, words: &[u64]) {
        let Some((page, length, head)) = &mut self.buffer else {
            return;
        };
        let size = (*length - PAGE) as u64;
        let bytes = 8 * (1 + words.len() as u64);
        if size == 0 {
            return;
        }
        #[expect(unsafe_code, reason = "the buffer is shared as with a kernel")]
        // SAFETY: `page` has `length` bytes, of which the first are a perf_event_mmap_page; the rest is taken modulo.
        unsafe {
            let shared = page.cast::<perf_event_mmap_page>().as_ptr();
            if *head + bytes - (*shared).data_tail > size {
                return;
            }
            let header = u64::from(kind) | bytes << 48;
            for word in std::iter::once(header).chain(words.iter().copied()) {
                let at = PAGE + (*head % size) as usize;
                page.byte_add(at).cast::<u64>().write(word);
                *head += 8;
            }
            (*shared).data_head = *head;
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Machine,
    /// The host's time and the guest's, ns.
    pub(super) now: u64,
    pub(super) guest: u64,
    pub(super) next_tick: u64,
    pub(super) rotation: usize,
    pub(super) events: BTreeMap<RawFd, Event>,
    pub(super) last_fd: RawFd,
    pub(super) signals: u64,
    /// Signals that are on their way, and when they arrive.
    pub(super) waiting: Vec<RawFd>,
    pub(super) arrival: Option<u64>,
    /// ns of the host's in interrupts of overflows.
    pub(super) in_interrupts: u64,
}

impl State {
    /// Gives counters to enabled events: group by group, all of a group or none, from the one on whose turn it is
    /// (ctx_sched_in, group_sched_in). Others' pinned events come first (ctx_pinned_sched_in). An event that one counter
    /// alone counts waits for that (x86_schedule_events). On a core of the other kind none has a counter (x86_pmu_filter).
    pub(super) fn schedule(&mut self) {
        let each = self.machine.e_core_each;
        let is_away = each != 0 && self.rotation % each == each - 1;
        let mut free = match is_away {
            true => 0,
            false => self.machine.counters.saturating_sub(self.machine.pinned),
        };
        let mut special = match self.machine.constrained {
            true => 1,
            false => usize::MAX,
        };
        let leaders: Vec<RawFd> = self
            .events
            .iter()
            .filter(|(_, event)| event.leader.is_none() && event.enabled)
            .map(|(&fd, _)| fd)
            .collect();
        let pinned = |fd: &RawFd| self.events[fd].attr.pinned() == 1;
        let (first, mut rest): (Vec<_>, Vec<_>) = leaders.into_iter().partition(pinned);
        if !rest.is_empty() {
            let turn = self.rotation % rest.len();
            rest.rotate_left(turn);
        }
        for event in self.events.values_mut() {
            event.scheduled = false;
        }
        for leader in first.into_iter().chain(rest) {
            let members: Vec<RawFd> = self
                .events
                .iter()
                .filter(|(fd, event)| **fd == leader || event.leader == Some(leader))
                .filter(|(_, event)| event.enabled)
                .map(|(&fd, _)| fd)
                .collect();
            let count = |wanted: fn(&Event) -> bool| {
                let events = members.iter().map(|fd| &self.events[fd]);
                events.filter(|event| wanted(event)).count()
            };
            let needed = count(Event::is_hardware);
            let constrained = count(|event| is_constrained(&event.attr));
            if needed <= free && constrained <= special {
                free -= needed;
                special -= constrained;
                for fd in members {
                    self.events.get_mut(&fd).unwrap().scheduled = true;
                }
            }
        }
    }

    /// A tick: throttled events that lead a group go on (perf_adjust_freq_unthr_events visits no others), and the next gets
    /// its turn (perf_rotate_context).
    pub(super) fn tick(&mut self) {
        self.next_tick += TICK;
        for event in self.events.values_mut() {
            event.interrupts = 0;
            if event.leader.is_none() && std::mem::take(&mut event.throttled) {
                event.left = event.left.max(1);
                event.write(PERF_RECORD_UNTHROTTLE, &[0; 3]);
            }
        }
        self.rotation += 1;
        self.schedule();
    }

    pub(super) fn pass(&mut self, ns: u64) {
        let end = self.now + ns;
        while self.now < end {
            let step = end.min(self.next_tick) - self.now;
            self.now += step;
            for event in self.events.values_mut() {
                if event.enabled {
                    event.time_enabled += step;
                    event.time_running += if event.scheduled { step } else { 0 };
                    // An event of the host alone, or a hypervisor below that does not keep the host out.
                    let counts = !event.is_in_guest() || self.machine.counts_host;
                    let is_dead = event.attr.type_ == PERF_TYPE_RAW
                        && self.machine.dead == Some(event.attr.config);
                    if event.scheduled && counts && !is_dead {
                        event.value += happened(step, rate(&event.attr));
                    }
                }
            }
            if self.now == self.next_tick {
                self.tick();
            }
        }
    }

    pub(super) fn run(&mut self, ns: u64) -> (u64, Vec<Option<RawFd>>) {
        let (start, end) = (self.guest, self.guest + ns);
        while self.guest < end {
            if self.arrival.is_some_and(|arrival| arrival <= self.now) {
                break;
            }
            let mut step = (end - self.guest).min(self.next_tick - self.now);
            if let Some(arrival) = self.arrival {
                step = step.min(arrival - self.now);
            }
            for event in self.events.values().filter(|event| event.overflows()) {
                step = step.min(event.ns_to_overflow(self.guest));
            }
            self.guest_runs(step);
            let full: Vec<RawFd> = self
                .events
                .iter()
                .filter(|(_, event)| event.overflows() && event.left == 0)
                .map(|(&fd, _)| fd)
                .collect();
            full.into_iter().for_each(|fd| self.overflow(fd));
            if self.now >= self.next_tick {
                self.tick();
            }
        }
        let arrived = self.arrival.is_some_and(|arrival| arrival <= self.now);
        let signals = match arrived {
            true => self.deliver(),
            false => Vec::new(),
        };
        (self.guest - start, signals)
    }

    pub(super) fn guest_runs(&mut self, step: u64) {
        let (before, after) = (self.guest, self.guest + step);
        for event in self.events.values_mut().filter(|event| event.enabled) {
            event.time_enabled += step;
            if event.scheduled {
                event.time_running += step;
            }
            if event.counts() {
                let rate = rate(&event.attr);
                let counted = happened(after, rate) - happened(before, rate);
                event.value += counted;
                event.left = event.left.saturating_sub(counted);
            }
        }
        self.guest = after;
        self.now += step;
    }

    /// An overflow's interrupt (perf_event_overflow). An event that has had its number since the tick is stopped, and
    /// only the buffer records it (__perf_event_account_interrupt).
    pub(super) fn overflow(&mut self, fd: RawFd) {
        self.now += INTERRUPT;
        self.in_interrupts += INTERRUPT;
        let per_tick = self.machine.per_tick;
        let event = self.events.get_mut(&fd).unwrap();
        event.left = event.period;
        event.interrupts += 1;
        event.write(PERF_RECORD_SAMPLE, &[]);
        if event.interrupts >= per_tick {
            event.throttled = true;
            event.write(PERF_RECORD_THROTTLE, &[0; 3]);
        }
        if event.signals {
            if !self.waiting.contains(&fd) {
                self.waiting.push(fd);
            }
            let arrival = self.now + self.machine.latency;
            self.arrival.get_or_insert(arrival);
        }
    }

    /// Hands the signals to the thread. One that finds the queue full is a SIGIO, which names no event
    /// (send_sigio_to_task).
    pub(super) fn deliver(&mut self) -> Vec<Option<RawFd>> {
        self.arrival = None;
        let mut signals = Vec::new();
        for fd in std::mem::take(&mut self.waiting) {
            self.signals += 1;
            let full = self.signals.is_multiple_of(self.machine.full_each);
            signals.push(Some(fd).filter(|_| !full));
        }
        signals
    }
}

/// Returns how often an event has happened up to a moment of the guest's.
pub(crate) fn happened(guest: u64, rate: u64) -> u64 {
    (u128::from(guest) * u128::from(rate) / 1_000_000) as u64
}

impl Event {
    /// A clock goes on counting when it is throttled: only its timer stops (perf_swevent_hrtimer).
    pub(super) fn counts(&self) -> bool {
        let stopped = self.throttled && self.is_hardware();
        self.enabled && self.scheduled && !stopped && self.is_in_guest()
    }

    pub(super) fn overflows(&self) -> bool {
        self.counts() && !self.throttled
    }

    pub(super) fn ns_to_overflow(&self, guest: u64) -> u64 {
        let rate = rate(&self.attr);
        if rate == 0 {
            return u64::MAX;
        }
        let at = u128::from(happened(guest, rate)) + u128::from(self.left);
        let moment = (at * 1_000_000).div_ceil(u128::from(rate));
        u64::try_from(moment - u128::from(guest)).unwrap_or(u64::MAX)
    }
}
