//! The host: perf events behind guest counters.
//!
//! # One-shot reports from periodic events
//!
//! The engine asks for one report; a perf event overflows again and again. To stop it after the
//! first one (PERF_EVENT_IOC_REFRESH) would stop its counting too, and cost a system call to undo.
//! So it is let go on: the guest's handler usually gives it another period at once, and if a second
//! overflow comes that nobody waits for, only then is the period made endless.

use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::sync::OnceLock;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_HW_REF_CPU_CYCLES, PERF_COUNT_SW_TASK_CLOCK, PERF_TYPE_HARDWARE, PERF_TYPE_RAW,
    PERF_TYPE_SOFTWARE,
};
use vpmu::counter::{CounterHost, CounterSet, Lost, Report};
use vpmu::x86::{ArchEvent, CounterConfig};

use crate::event::{Kind, PerfEvent, Rings, Total};
use crate::notes;

const COUNTERS: usize = 32;
/// Longer than any machine runs.
const ENDLESS: u64 = i64::MAX as u64;
const NS: u64 = 1_000_000_000;

/// What counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The processor's counters.
    Hardware,
    /// The thread's time on the CPU.
    Clock,
}

/// How to count.
#[derive(Clone, Copy, Debug)]
pub struct PerfOptions {
    /// The guest's TSC frequency, Hz: what a clock's cycles are.
    pub tsc_hz: u64,
    /// `None`: hardware if it is there, else a clock.
    pub backing: Option<Backing>,
    /// With a clock: instructions and branches too, one for each cycle. Their distribution is that
    /// of time, their number means nothing.
    pub approximate_instructions: bool,
}

/// Why there can be no perf events.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    /// The kernel forbids it.
    #[error(
        "the kernel does not let this user count the guest's kernel (perf_event_paranoid is {0}): \
         run as root, give the program CAP_PERFMON, or write 1 to \
         /proc/sys/kernel/perf_event_paranoid"
    )]
    Forbidden(String),
    /// Someone else has the PMU for the guest.
    #[error(
        "the host's PMU is taken: KVM gives it to guests itself (mediated vPMU); switch that off \
         with the module parameter enable_mediated_pmu=0 of kvm_intel or kvm_amd, or use KVM's PMU"
    )]
    Mediated,
    /// No perf in this kernel.
    #[error("this kernel has no perf events (CONFIG_PERF_EVENTS), or a container forbids them")]
    NoPerf,
    /// Anything else.
    #[error("perf_event_open: {0}")]
    Open(#[source] io::Error),
    /// One for each thread, which has its overflows.
    #[error("this thread has a PerfHost already")]
    Taken,
    /// A clock that stands still.
    #[error("a TSC frequency of 0")]
    NoFrequency,
}

impl PerfError {
    fn from_open(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => {
                let path = "/proc/sys/kernel/perf_event_paranoid";
                let level = fs::read_to_string(path).unwrap_or_default();
                Self::Forbidden(level.trim().to_owned())
            }
            // The second one: while a guest has it.
            Some(libc::EBUSY | libc::EOPNOTSUPP) => Self::Mediated,
            Some(libc::ENOSYS) => Self::NoPerf,
            _ => Self::Open(error),
        }
    }
}

/// The perf event behind one counter.
#[derive(Debug)]
struct Slot {
    event: PerfEvent,
    /// A report is wanted and has not come.
    armed: bool,
    /// The period was set while the event stood still, so that a signal can be of no other.
    certain: bool,
    running: bool,
    /// The period that the event has is endless.
    endless: bool,
    /// It was not counted all the time.
    multiplexed: bool,
    /// The last total, for when a read fails.
    total: u64,
    /// Guest's events to the next overflow, for when it is resumed: then it is known how many share
    /// the processor with it.
    wanted: Option<NonZeroU64>,
}

/// A [`CounterHost`] of the calling thread.
#[derive(Debug)]
pub struct PerfHost {
    backing: Backing,
    /// Count only while the thread runs a guest.
    guest: bool,
    tsc_hz: u64,
    approximate: bool,
    slots: [Option<Slot>; COUNTERS],
    /// It belongs to a thread: its events are that thread's.
    _thread: std::marker::PhantomData<*mut ()>,
}

impl PerfHost {
    /// Overflows are at least so far apart, in a clock's ns: those of each of several perf events so
    /// many times as far, or their timers together would leave no time for anything else, the guest
    /// included. A host that is emulated takes half of that for one. A hardware event does not know
    /// time, and takes it for so many events: at 4 GHz and one event a cycle it is a quarter of that.
    pub const FLOOR: u64 = 50_000;

    /// For the guest that the calling thread runs. SIGRTMIN+1 becomes the process's signal for
    /// overflows, and SIGIO one for when too many of them wait.
    ///
    /// # Errors
    ///
    /// Says why perf events cannot be had, and what to do.
    pub fn new(options: PerfOptions) -> Result<Self, PerfError> {
        Self::counting(options, true)
    }

    /// As [`PerfHost::new`], but what is counted is the thread itself, which runs no guest: to try
    /// and to measure what this machine's perf events do.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn of_thread(options: PerfOptions) -> Result<Self, PerfError> {
        Self::counting(options, false)
    }

    fn counting(options: PerfOptions, guest: bool) -> Result<Self, PerfError> {
        if options.tsc_hz == 0 {
            return Err(PerfError::NoFrequency);
        }
        notes::install().map_err(PerfError::Open)?;
        let open = |backing| PerfEvent::open(probe(backing, guest), ENDLESS);
        let backing = match options.backing {
            Some(backing) => {
                open(backing).map_err(PerfError::from_open)?;
                backing
            }
            None => match open(Backing::Hardware) {
                Ok(_) => Backing::Hardware,
                Err(error) if is_absence(&error) => {
                    open(Backing::Clock).map_err(PerfError::from_open)?;
                    Backing::Clock
                }
                Err(error) => return Err(PerfError::from_open(error)),
            },
        };
        if !notes::claim() {
            return Err(PerfError::Taken);
        }
        Ok(Self {
            backing,
            guest,
            tsc_hz: options.tsc_hz,
            approximate: options.approximate_instructions,
            slots: [const { None }; COUNTERS],
            _thread: std::marker::PhantomData,
        })
    }

    /// What counts.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Whether `event` can be counted: what CPUID may offer.
    pub fn counts(&self, event: ArchEvent) -> bool {
        let rings = Rings {
            user: true,
            kernel: true,
            guest: self.guest,
        };
        self.kind(Some(event), None, rings)
            .is_ok_and(|kind| PerfEvent::open(kind, ENDLESS).is_ok())
    }

    /// Overflows that have been signalled since the last call. Costs a look into memory when there
    /// are none.
    pub fn take_overflows(&mut self) -> impl Iterator<Item = (u8, Report)> + use<> {
        let (mut due, mut unsure) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in notes::take() {
            let Some(slot) = self.slots.get_mut(usize::from(counter)) else {
                continue;
            };
            let Some(slot) = slot else {
                continue;
            };
            if slot.armed {
                slot.armed = false;
                let reports = if slot.certain { &mut due } else { &mut unsure };
                reports.insert(counter);
            } else if !slot.endless {
                slot.endless = slot.event.set_period(ENDLESS);
            }
        }
        if notes::take_overrun() {
            for (counter, slot) in (0..).zip(&mut self.slots) {
                if let Some(slot) = slot.as_mut().filter(|slot| slot.armed) {
                    slot.armed = false;
                    unsure.insert(counter);
                }
            }
        }
        let due = due.iter().map(|counter| (counter, Report::Due));
        due.chain(unsure.iter().map(|counter| (counter, Report::Unsure)))
    }

    /// Has each overflow's signal write 1 to `flag`: `kvm_run.immediate_exit`, so that a signal is
    /// not missed that comes just before the guest is entered. Null: nothing is written.
    ///
    /// # Safety
    ///
    /// `flag` must stay valid for writes until another call or the end of this host, and nobody but
    /// this thread may access it except by volatile or atomic accesses.
    #[expect(unsafe_code, reason = "a signal handler writes through a pointer")]
    pub unsafe fn set_kick(&mut self, flag: *mut u8) {
        notes::set_kick(flag);
    }

    /// The perf event for what is to be counted.
    fn kind(&self, event: Option<ArchEvent>, raw: Option<u64>, rings: Rings) -> Result<Kind, Lost> {
        match self.backing {
            Backing::Clock => match event {
                _ if !rings.user || !rings.kernel => Err(Lost::Unsupported),
                Some(ArchEvent::CoreCycles | ArchEvent::ReferenceCycles | ArchEvent::TscCycles) => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                Some(ArchEvent::Instructions | ArchEvent::Branches) if self.approximate => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                _ => Err(Lost::Unsupported),
            },
            Backing::Hardware => {
                let generic = event.and_then(|event| {
                    Some(match event {
                        ArchEvent::CoreCycles => PERF_COUNT_HW_CPU_CYCLES,
                        ArchEvent::Instructions => PERF_COUNT_HW_INSTRUCTIONS,
                        ArchEvent::ReferenceCycles | ArchEvent::TscCycles => {
                            PERF_COUNT_HW_REF_CPU_CYCLES
                        }
                        ArchEvent::LlcReferences => PERF_COUNT_HW_CACHE_REFERENCES,
                        ArchEvent::LlcMisses => PERF_COUNT_HW_CACHE_MISSES,
                        ArchEvent::Branches => PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
                        ArchEvent::BranchMisses => PERF_COUNT_HW_BRANCH_MISSES,
                        ArchEvent::TopdownSlots => return None,
                    })
                });
                let (type_, config) = match (generic, raw) {
                    (Some(generic), _) => (PERF_TYPE_HARDWARE, u64::from(generic)),
                    // The guest's processor is an Intel one; so must the host's be for its events.
                    (None, Some(raw)) if is_intel() => (PERF_TYPE_RAW, raw),
                    _ => return Err(Lost::Unsupported),
                };
                Ok(Kind {
                    type_,
                    config,
                    rings: Some(rings),
                })
            }
        }
    }

    /// `events` as what the perf event counts, rounded up.
    fn to_host(&self, events: u64) -> u64 {
        let count = match self.backing {
            Backing::Hardware => u128::from(events),
            Backing::Clock => {
                let ns = u128::from(events) * u128::from(NS);
                ns.div_ceil(u128::from(self.tsc_hz))
            }
        };
        let sharing = self.slots.iter().flatten().count().max(1) as u64;
        u64::try_from(count)
            .unwrap_or(ENDLESS)
            .clamp(Self::FLOOR * sharing, ENDLESS)
    }

    /// What the perf event has counted as the guest's events.
    fn to_guest(&self, count: u64) -> u64 {
        match self.backing {
            Backing::Hardware => count,
            // Modulo 2^64, as every total.
            Backing::Clock => (u128::from(count) * u128::from(self.tsc_hz) / u128::from(NS)) as u64,
        }
    }

    fn slot(&mut self, counter: u8) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(counter))?.as_mut()
    }

    /// Gives the perf event its period.
    fn program(&mut self, counter: u8, events: NonZeroU64) {
        let period = self.to_host(events.get());
        if let Some(slot) = self.slot(counter) {
            slot.armed = slot.event.set_period(period);
            slot.endless = false;
        }
    }
}

impl Drop for PerfHost {
    fn drop(&mut self) {
        notes::give_back();
    }
}

/// The event that shows whether a backing works.
fn probe(backing: Backing, guest: bool) -> Kind {
    match backing {
        Backing::Hardware => Kind {
            type_: PERF_TYPE_HARDWARE,
            config: PERF_COUNT_HW_CPU_CYCLES.into(),
            rings: Some(Rings {
                user: true,
                kernel: true,
                guest,
            }),
        },
        Backing::Clock => Kind {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_TASK_CLOCK.into(),
            rings: None,
        },
    }
}

/// No hardware PMU, or none that can be restricted to guests.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL)
    )
}

/// Not by CPUID: that is an unsafe function to the oldest compiler, and a safe one to the newest.
fn is_intel() -> bool {
    static INTEL: OnceLock<bool> = OnceLock::new();
    *INTEL.get_or_init(|| {
        fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("GenuineIntel"))
    })
}

impl CounterHost<CounterConfig> for PerfHost {
    fn create(&mut self, counter: u8, config: &CounterConfig) -> Result<(), Lost> {
        let rings = Rings {
            user: config.user,
            kernel: config.kernel,
            guest: self.guest,
        };
        let kind = self.kind(config.architectural(), config.raw(), rings)?;
        let event = PerfEvent::open(kind, ENDLESS).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL) => Lost::Unsupported,
            Some(libc::EMFILE | libc::ENFILE | libc::EBUSY | libc::ENOSPC) => Lost::Busy,
            _ => Lost::Failed,
        })?;
        let slot = self
            .slots
            .get_mut(usize::from(counter))
            .ok_or(Lost::Unsupported)?;
        notes::watch(counter, event.fd());
        *slot = Some(Slot {
            event,
            armed: false,
            certain: false,
            running: false,
            endless: true,
            multiplexed: false,
            total: 0,
            wanted: None,
        });
        Ok(())
    }

    fn set_period(&mut self, counter: u8, events: Option<NonZeroU64>) {
        let Some(slot) = self.slot(counter) else {
            return;
        };
        if slot.running {
            slot.certain = false;
            match events {
                Some(events) => self.program(counter, events),
                // If one comes all the same, it is ignored, and the last.
                None => slot.armed = false,
            }
        } else {
            slot.wanted = events;
            slot.armed = events.is_some();
            slot.certain = true;
            // A signal of the period before has come by now, and is of no interest.
            notes::forget(counter);
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        for counter in counters {
            if let Some(wanted) = self.slot(counter).and_then(|slot| slot.wanted.take()) {
                self.program(counter, wanted);
            }
        }
        for counter in counters {
            if let Some(slot) = self.slot(counter) {
                slot.running = slot.event.enable();
            }
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        for counter in counters {
            if let Some(slot) = self.slot(counter) {
                slot.event.disable();
                slot.running = false;
            }
        }
    }

    fn read(&mut self, counter: u8) -> u64 {
        let Some(slot) = self.slot(counter) else {
            return 0;
        };
        let total = match slot.event.read() {
            Ok(Total {
                value,
                enabled,
                running,
            }) => {
                slot.multiplexed |= enabled != running;
                slot.total = value;
                value
            }
            // An event in an error state reads nothing: it stands still.
            Err(_) => slot.total,
        };
        self.to_guest(total)
    }

    fn release(&mut self, counter: u8) {
        notes::watch(counter, -1);
        if let Some(slot) = self.slots.get_mut(usize::from(counter)) {
            *slot = None;
        }
    }

    /// Two system calls, but one operation: a guest that stops a counter reads it next, and then the
    /// total is known.
    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut [u64; 32]) -> bool {
        self.pause(counters);
        for counter in counters {
            if let Some(total) = totals.get_mut(usize::from(counter)) {
                *total = self.read(counter);
            }
        }
        true
    }

    /// The signal is the vCPU thread's own, and the VMM looks for it at each exit.
    fn reports_promptly(&self) -> bool {
        true
    }

    fn deficit(&self, counter: u8) -> Option<Lost> {
        let slot = self.slots.get(usize::from(counter))?.as_ref()?;
        slot.multiplexed.then_some(Lost::Multiplexed)
    }
}
