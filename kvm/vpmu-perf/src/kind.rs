//! What a perf event counts, and of whom.

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_SW_TASK_CLOCK, PERF_FORMAT_TOTAL_TIME_ENABLED,
    PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use crate::options::Backing;

/// A period that is longer than any machine runs. The kernel refuses 2^63.
pub(crate) const ENDLESS: u64 = i64::MAX as u64;

/// The event to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) type_: u32,
    pub(crate) config: u64,
    /// The rings that count, and whose they are. A software clock knows neither.
    pub(crate) rings: Option<Rings>,
}

/// The privilege rings in which an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rings {
    pub(crate) user: bool,
    pub(crate) kernel: bool,
    /// Whether the event counts only while the thread runs a guest.
    pub(crate) guest: bool,
}

impl Rings {
    /// User space alone, which every user may count.
    pub(crate) const USER: Self = Self {
        user: true,
        kernel: false,
        guest: false,
    };

    pub(crate) const fn all(guest: bool) -> Self {
        Self {
            user: true,
            kernel: true,
            guest,
        }
    }
}

impl Kind {
    /// Returns the attributes of a stopped event that say what is counted, and where. Its totals come with both times.
    pub(crate) fn attr(self) -> perf_event_attr {
        let mut attr = perf_event_attr::default();
        attr.set_disabled(1);
        attr.read_format =
            u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED) | u64::from(PERF_FORMAT_TOTAL_TIME_RUNNING);
        attr.type_ = self.type_;
        attr.config = self.config;
        if let Some(rings) = self.rings {
            attr.set_exclude_host(rings.guest.into());
            attr.set_exclude_hv(1);
            attr.set_exclude_user(u64::from(!rings.user));
            attr.set_exclude_kernel(u64::from(!rings.kernel));
        }
        attr
    }
}

/// Returns the event that shows whether a backing works.
pub(crate) fn probe(backing: Backing, guest: bool) -> Kind {
    match backing {
        Backing::Hardware => Kind {
            type_: PERF_TYPE_HARDWARE,
            config: PERF_COUNT_HW_CPU_CYCLES.into(),
            rings: Some(Rings::all(guest)),
        },
        Backing::Clock => Kind {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_TASK_CLOCK.into(),
            rings: None,
        },
    }
}
