//! The caller's counters, reached through function pointers.

use core::ffi::c_void;
use core::num::NonZeroU64;

#[cfg(feature = "arm")]
use vpmu::arm;
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
#[cfg(feature = "x86")]
use vpmu::x86;

/// `struct vpmu_event.kind`: an x86 event by event select (bits 7:0 of `number`) and unit mask
/// (bits 15:8).
pub const VPMU_EVENT_X86: u32 = 0;
/// `struct vpmu_event.kind`: the event of the x86 fixed counter `number`.
pub const VPMU_EVENT_X86_FIXED: u32 = 1;
/// `struct vpmu_event.kind`: the PMUv3 event `number`.
pub const VPMU_EVENT_ARM: u32 = 2;
/// `struct vpmu_event.kind`: processor cycles, for the Arm cycle counter.
pub const VPMU_EVENT_ARM_CYCLES: u32 = 3;

/// `struct vpmu_event.kind`: an event of AMD's, by event select (bits 11:0 of `number`) and unit mask
/// (bits 23:16).
pub const VPMU_EVENT_X86_AMD: u32 = 4;

/// `create` answers: the counter is backed.
pub const VPMU_BACKED: i32 = 0;
/// `create` answers: the host has no such event, or cannot restrict it as asked.
pub const VPMU_LOST_UNSUPPORTED: i32 = 1;
/// `create` answers: every host counter that could count it is taken.
pub const VPMU_LOST_BUSY: i32 = 2;
/// `create` answers: the host would count it only part of the time.
pub const VPMU_LOST_MULTIPLEXED: i32 = 3;
/// `create` answers: the host failed for a reason of its own. Any other number says the same.
pub const VPMU_LOST_FAILED: i32 = 4;

/// What a host counter is to count, while the guest runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VpmuEvent {
    /// One of `VPMU_EVENT_*`.
    pub kind: u32,
    /// The event, as `kind` says.
    pub number: u32,
    /// Count in user space: CPL 1 to 3, or EL0.
    pub user: bool,
    /// Count in the guest's kernel: CPL 0, or EL1.
    pub kernel: bool,
    /// x86: count rising edges of the condition.
    pub edge: bool,
    /// x86: with `threshold`, count cycles with fewer events.
    pub invert: bool,
    /// x86: 0, or count cycles in which at least so many events happen.
    pub threshold: u8,
}

/// The caller's counters. All functions are called from within a call of this library, on the same
/// thread, with `context` first. Counters are named by the guest's numbers: on x86 general counter
/// *n* is *n* and fixed counter *n* is 16 + *n*; on Arm the cycle counter is 31.
///
/// The engine calls `create` first, then any of the others, then `release`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuHost {
    /// Handed to each function.
    pub context: *mut c_void,
    /// Backs `counter` with a stopped host counter for `event`, its total zero. Answers
    /// `VPMU_BACKED` or one of `VPMU_LOST_*`.
    pub create: Option<
        unsafe extern "C" fn(context: *mut c_void, counter: u8, event: *const VpmuEvent) -> i32,
    >,
    /// Asks for one report (`vpmu_*_overflow`) when `events` more have been counted; 0: no report.
    pub set_period: Option<unsafe extern "C" fn(context: *mut c_void, counter: u8, events: u64)>,
    /// Starts the counters whose bits are set.
    pub resume: Option<unsafe extern "C" fn(context: *mut c_void, counters: u32)>,
    /// Stops the counters whose bits are set. Their totals stay readable.
    pub pause: Option<unsafe extern "C" fn(context: *mut c_void, counters: u32)>,
    /// The number of events counted since `create`, modulo 2^64.
    pub read: Option<unsafe extern "C" fn(context: *mut c_void, counter: u8) -> u64>,
    /// Takes the host counter away.
    pub release: Option<unsafe extern "C" fn(context: *mut c_void, counter: u8)>,
    /// Whether each due report reaches the PMU before the guest's next access does. Status
    /// registers can then be read without reading counters. When in doubt: false.
    pub reports_promptly: bool,
}

/// A [`VpmuHost`] of which every function is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    context: *mut c_void,
    create: unsafe extern "C" fn(*mut c_void, u8, *const VpmuEvent) -> i32,
    set_period: unsafe extern "C" fn(*mut c_void, u8, u64),
    resume: unsafe extern "C" fn(*mut c_void, u32),
    pause: unsafe extern "C" fn(*mut c_void, u32),
    read: unsafe extern "C" fn(*mut c_void, u8) -> u64,
    release: unsafe extern "C" fn(*mut c_void, u8),
    reports_promptly: bool,
}

impl Host {
    /// `None`: a function is missing.
    pub(crate) fn new(host: &VpmuHost) -> Option<Self> {
        Some(Self {
            context: host.context,
            create: host.create?,
            set_period: host.set_period?,
            resume: host.resume?,
            pause: host.pause?,
            read: host.read?,
            release: host.release?,
            reports_promptly: host.reports_promptly,
        })
    }

    fn back(&self, counter: u8, event: VpmuEvent) -> Result<(), Lost> {
        // SAFETY: the caller of `vpmu_*_init` promised functions that may be called with its context.
        match unsafe { (self.create)(self.context, counter, &raw const event) } {
            VPMU_BACKED => Ok(()),
            VPMU_LOST_UNSUPPORTED => Err(Lost::Unsupported),
            VPMU_LOST_BUSY => Err(Lost::Busy),
            VPMU_LOST_MULTIPLEXED => Err(Lost::Multiplexed),
            _ => Err(Lost::Failed),
        }
    }
}

#[cfg(feature = "x86")]
impl From<x86::CounterConfig> for VpmuEvent {
    fn from(config: x86::CounterConfig) -> Self {
        let (kind, number) = match config.event {
            x86::EventKind::General { select, umask } => {
                (VPMU_EVENT_X86, u32::from(select) | u32::from(umask) << 8)
            }
            x86::EventKind::Fixed(n) => (VPMU_EVENT_X86_FIXED, u32::from(n)),
            x86::EventKind::Amd { select, umask } => (
                VPMU_EVENT_X86_AMD,
                u32::from(select) | u32::from(umask) << 16,
            ),
        };
        Self {
            kind,
            number,
            user: config.user,
            kernel: config.kernel,
            edge: config.edge,
            invert: config.invert,
            threshold: config.threshold,
        }
    }
}

#[cfg(feature = "arm")]
impl From<arm::CounterConfig> for VpmuEvent {
    fn from(config: arm::CounterConfig) -> Self {
        let (kind, number) = match config.event {
            arm::EventKind::Event(number) => (VPMU_EVENT_ARM, u32::from(number)),
            arm::EventKind::Cycles => (VPMU_EVENT_ARM_CYCLES, 0),
        };
        Self {
            kind,
            number,
            user: config.el0,
            kernel: config.el1,
            ..Self::default()
        }
    }
}

impl<E: Copy + Into<VpmuEvent>> CounterHost<E> for Host {
    fn create(&mut self, counter: Counter, event: &E) -> Result<(), Lost> {
        self.back(counter.number(), (*event).into())
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        let events = events.map_or(0, NonZeroU64::get);
        // SAFETY: as in `back`.
        unsafe { (self.set_period)(self.context, counter.number(), events) }
    }

    fn resume(&mut self, counters: CounterSet) {
        // SAFETY: as in `back`.
        unsafe { (self.resume)(self.context, counters.bits()) }
    }

    fn pause(&mut self, counters: CounterSet) {
        // SAFETY: as in `back`.
        unsafe { (self.pause)(self.context, counters.bits()) }
    }

    fn read(&mut self, counter: Counter) -> u64 {
        // SAFETY: as in `back`.
        unsafe { (self.read)(self.context, counter.number()) }
    }

    fn release(&mut self, counter: Counter) {
        // SAFETY: as in `back`.
        unsafe { (self.release)(self.context, counter.number()) }
    }

    fn reports_promptly(&self) -> bool {
        self.reports_promptly
    }
}
