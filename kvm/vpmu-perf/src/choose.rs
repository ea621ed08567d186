//! The choice of the perf event that counts a guest's event, and the events that this machine has.

use std::io;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_TYPE_HARDWARE,
};
use vpmu::counter::{Counter, Lost};
use vpmu::x86::ArchEvent;

use crate::attrs;
use crate::error::PerfError;
use crate::kernel::{Kernel, PerfEvent};
use crate::kind::{Kind, Rings, probe};
use crate::options::{Backing, PerfOptions};
use crate::processor::Vendor;

/// The rules by which perf events are chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chooser {
    kernel: &'static dyn Kernel,
    pub(crate) backing: Backing,
    /// Count only while the thread runs a guest.
    pub(crate) guest: bool,
    pub(crate) approximate: bool,
}

impl Chooser {
    /// Chooses the wanted backing, or the best that works.
    pub(crate) fn new(
        kernel: &'static dyn Kernel,
        options: &PerfOptions,
        guest: bool,
    ) -> Result<Self, PerfError> {
        let works = |backing| PerfEvent::try_open(kernel, probe(backing, guest));
        let hardware = || match works(Backing::Hardware) {
            // It is another VM's for a time: counters are lost until then, and asked for again.
            Err(error) if is_mediated(kernel, probe(Backing::Hardware, guest), &error) => Ok(true),
            // Others may have pinned all counters, for as long as they like.
            tried => tried.map(|()| free_counters(kernel, guest) > 0),
        };
        let clock = || works(Backing::Clock).map(|()| Backing::Clock);
        let backing = match options.backing {
            Some(Backing::Clock) => clock(),
            Some(Backing::Hardware) => hardware().map(|_| Backing::Hardware),
            None => match hardware() {
                Ok(true) => Ok(Backing::Hardware),
                Ok(false) => clock(),
                Err(error) if is_absence(&error) => clock(),
                Err(error) => Err(error),
            },
        };
        Ok(Self {
            kernel,
            backing: backing.map_err(|error| match error.raw_os_error() {
                // No VM has the PMU, as that was found above: it has no interrupt, or cannot be restricted to guests.
                Some(libc::EOPNOTSUPP) => PerfError::NoHardware,
                _ => PerfError::from_open(&error),
            })?,
            guest,
            approximate: options.approximate_instructions,
        })
    }

    /// Returns whether this machine counts `event`.
    pub(crate) fn counts(self, event: ArchEvent) -> bool {
        self.kind(Some(event), None, Rings::all(self.guest))
            .is_ok_and(|kind| match PerfEvent::try_open(self.kernel, kind) {
                Ok(()) => true,
                Err(error) => is_mediated(self.kernel, kind, &error),
            })
    }

    /// Returns the perf event for a configuration.
    pub(crate) fn kind(
        self,
        event: Option<ArchEvent>,
        raw: Option<(Vendor, u64)>,
        rings: Rings,
    ) -> Result<Kind, Lost> {
        match self.backing {
            Backing::Clock => match event {
                // Samples determine a guest's ring.
                _ if !(self.guest || rings.user && rings.kernel) => Err(Lost::Unsupported),
                Some(ArchEvent::CoreCycles | ArchEvent::ReferenceCycles | ArchEvent::TscCycles) => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                Some(ArchEvent::Instructions | ArchEvent::Branches) if self.approximate => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                _ => Err(Lost::Unsupported),
            },
            Backing::Hardware => {
                let host = self.kernel.processor();
                let named = event.and_then(|event| attrs::architectural(event, host));
                let numbered = || raw.and_then(|(vendor, raw)| attrs::raw(vendor, raw, host));
                let (type_, config) = named.or_else(numbered).ok_or(Lost::Unsupported)?;
                Ok(Kind {
                    type_,
                    config,
                    rings: Some(rings),
                })
            }
        }
    }

    /// Returns the reason why the event of `kind` could not be opened.
    pub(crate) fn lost(self, kind: Kind, error: &io::Error) -> Lost {
        match error.raw_os_error() {
            _ if is_mediated(self.kernel, kind, error) => Lost::Busy,
            // No such event; none that can be restricted so; a bit that this processor's driver refuses.
            Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EINVAL) => Lost::Unsupported,
            // Each may pass by itself, so that the engine asks again.
            Some(libc::EMFILE | libc::ENFILE | libc::EBUSY | libc::ENOSPC) => Lost::Busy,
            _ => Lost::Failed,
        }
    }

    /// Returns the number of general counters that no other user of the PMU has pinned. `None`: a clock counts any
    /// number.
    ///
    /// The kernel opens more events than there are counters, and then each counts for a part of the time. A pinned group
    /// counts as a whole or not at all, and says so when it is read.
    pub(crate) fn free_counters(self) -> Option<u8> {
        match self.backing {
            Backing::Clock => None,
            Backing::Hardware => Some(free_counters(self.kernel, self.guest)),
        }
    }

    /// Returns whether the PMU is another VM's at the moment: a mediated vPMU. Events that count guests cannot be opened.
    pub(crate) fn is_mediated(self) -> bool {
        let kind = probe(self.backing, self.guest);
        let tried = PerfEvent::try_open(self.kernel, kind);
        tried.is_err_and(|error| is_mediated(self.kernel, kind, &error))
    }
}

/// Returns the number of counters on which a pinned group counts now.
fn free_counters(kernel: &'static dyn Kernel, guest: bool) -> u8 {
    // The first of these that there is. On Intel's processors only the last have counters of their own (fixed ones).
    let events = [
        PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
        PERF_COUNT_HW_INSTRUCTIONS,
        PERF_COUNT_HW_CPU_CYCLES,
    ];
    let kinds = events.map(|event| Kind {
        type_: PERF_TYPE_HARDWARE,
        config: event.into(),
        rings: Some(Rings::all(guest)),
    });
    let there = |kind: &Kind| PerfEvent::try_open(kernel, *kind).is_ok();
    let Some(kind) = kinds.into_iter().find(there) else {
        return 0;
    };
    let fit = |number: &u8| PerfEvent::can_pin(kernel, kind, *number);
    // One more at a time: a group that does not fit is all that the next larger would be, and more.
    (1..=Counter::COUNT as u8)
        .take_while(fit)
        .last()
        .unwrap_or(0)
}

/// Returns whether `error` is that of an event which counts guests while a VM has a mediated vPMU (since Linux 7.0). An
/// event that the processor has not gives the same number, but also where it counts the host alone.
fn is_mediated(kernel: &'static dyn Kernel, kind: Kind, error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EOPNOTSUPP) && PerfEvent::open_for_host(kernel, kind).is_ok()
}

/// Returns whether there is no hardware PMU, or none that can be restricted to guests.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL)
    )
}
