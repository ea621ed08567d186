//! A host's beginning: what counts here, for whom, and whether this thread may.

use std::sync::Arc;

use vpmu::counter::Slots;

use super::PerfHost;
use crate::choose::{Backing, Chooser};
use crate::error::PerfError;
use crate::events::Events;
use crate::kernel::{Kernel, Linux};
use crate::notes::Notes;
use crate::options::{self, PerfOptions};
use crate::pace::Pace;
use crate::rings::GuestRing;
use crate::slot::{Slot, Units};

impl PerfHost {
    /// Makes a host for the guest that the calling thread runs. Does the work of [`prepare`](crate::prepare), unless
    /// that is done.
    ///
    /// # Errors
    ///
    /// Says why perf events are not available, and what to do.
    pub fn new(options: PerfOptions) -> Result<Self, PerfError> {
        options::prepare(&options)?;
        Self::counting(&Linux, options, true)
    }

    /// Like [`PerfHost::new`], but counts the thread itself, which runs no guest: to try and to
    /// measure this machine's perf events.
    ///
    /// # Errors
    ///
    /// As for [`PerfHost::new`].
    pub fn of_thread(options: PerfOptions) -> Result<Self, PerfError> {
        options::prepare(&options)?;
        Self::counting(&Linux, options, false)
    }

    pub(super) fn counting(
        kernel: &'static dyn Kernel,
        options: PerfOptions,
        guest: bool,
    ) -> Result<Self, PerfError> {
        if options.tsc_hz == 0 {
            return Err(PerfError::NoFrequency);
        }
        let approximate = options.approximate_instructions;
        let chooser = Chooser::new(kernel, options.backing, guest, approximate)?;
        let notes = Notes::claim(&options.kick).ok_or(PerfError::Taken)?;
        // A group of hardware events counts nothing while one of them has no counter.
        let grouped = chooser.backing == Backing::Clock;
        let signal = options::signal(&options);
        let units = Units::new(chooser.backing, options.tsc_hz);
        Ok(Self {
            kernel,
            chooser,
            units,
            pace: (units == Units::Events).then(Pace::new),
            repeating: options.repeating,
            sampling: options.sampling,
            freeze: options.freeze,
            slots: Slots::from_fn(|| Slot::Empty),
            events: Events::new(kernel, Arc::clone(&notes), signal, grouped),
            ring_sampler: None,
            guest_ring: GuestRing::default(),
            guest: None,
            notes,
            longest_stuck_ns: 0,
            _kick: options.kick,
        })
    }
}
