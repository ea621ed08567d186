//! The thread whose perf events count for a vCPU.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vpmu_perf::{Backing, Descriptors, Flag, KICKED, Kick, PerfHost, PerfOptions};

use crate::error::Error;
use crate::offer::{self, Pmu};
use crate::options::Options;
use crate::pmu::VcpuPmu;

/// Time for which a host event is kept for a guest that does not use it.
const SLICE: Duration = Duration::from_millis(100);
/// Runs between two reads of the clock.
const CLOCK_INTERVAL: u32 = 64;

/// The perf events of the thread that runs a vCPU.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) backing: Backing,
    /// The options of the present perf events.
    pub(crate) perf: PerfOptions,
    slice: Slice,
    /// Whether the next run asks for the TSC's rate before the slice is over.
    pub(crate) is_unsure_of_rate: bool,
    /// Keeps the limit of open files from being reached by this vCPU's counters.
    _descriptors: Descriptors,
}

impl Thread {
    /// Prepares the process for a PMU that this host can back. `kick` is the vCPU's.
    ///
    /// # Errors
    ///
    /// When this process may not count guests, or the host cannot count what the guest is offered.
    pub(crate) fn new(pmu: &Pmu, options: &Options, kick: Kick) -> Result<Self, Error> {
        let backing = offer::check(options, pmu)?;
        let has_records = pmu.has_pebs() || matches!(pmu, Pmu::Paravirtual(_));
        let perf = PerfOptions {
            // A guest does not write a counter anew for each record, and a driver with a page for no overflow.
            repeating: has_records,
            sampling: has_records && offer::samples(options)?,
            kick,
            ..options.perf()
        };
        // Whatever a jail forbids later is done here.
        vpmu_perf::prepare(&perf)?;
        Ok(Self {
            backing,
            slice: Slice::new(),
            is_unsure_of_rate: false,
            _descriptors: Descriptors::promise(pmu.counters(), backing, perf.sampling)?,
            perf,
        })
    }

    /// Takes the overflows. Where the calling thread is a new one, its perf events count from now on: `host` makes
    /// them. `tsc_hz` asks for the rate of the vCPU's TSC.
    pub(crate) fn before_run(
        &mut self,
        pmu: &mut VcpuPmu,
        tsc_hz: impl Fn() -> Result<u64, Error>,
        host: impl Fn(PerfOptions) -> Result<PerfHost, Error>,
    ) -> Result<(), Error> {
        if !pmu.host.as_ref().is_some_and(PerfHost::is_here) {
            self.bind(pmu, tsc_hz()?, &host)?;
        }
        if let Some(host) = &mut pmu.host {
            host.forget_guest();
        }
        // The kick is taken back before the check for overflows, so that no overflow is without its kick.
        if let Kick::Flag(flag) = &self.perf.kick {
            unset(&**flag);
        }
        // Between two runs no other thread has to be kept out.
        if self.slice.reads_clock() {
            pmu.publish_all();
            if self.slice.has_ended() {
                pmu.end_slice();
                // A VMM may give the TSC another rate at any time, and KVM notifies nobody.
                self.is_unsure_of_rate = true;
            }
        }
        if std::mem::take(&mut self.is_unsure_of_rate) {
            let now = tsc_hz()?;
            if now != self.perf.tsc_hz {
                self.bind(pmu, now, &host)?;
            }
        }
        pmu.take_overflows();
        Ok(())
    }

    /// Makes the perf events of the calling thread.
    fn bind(
        &mut self,
        pmu: &mut VcpuPmu,
        tsc_hz: u64,
        host: &impl Fn(PerfOptions) -> Result<PerfHost, Error>,
    ) -> Result<(), Error> {
        // A perf event counts one thread for all its life, so that another thread means other events.
        pmu.unbind();
        // Whatever the VMM did to its threads' signals since `attach`, it did before it ran this vCPU here.
        vpmu_perf::reach_thread(&self.perf)?;
        self.perf.tsc_hz = tsc_hz;
        pmu.host = Some(host(self.perf.clone())?);
        // A clock counts the time of an exit; a hardware event counts none of an exit's instructions.
        pmu.misses_completed = self.backing == Backing::Hardware;
        // Last: a counter that is enabled counts from here on.
        pmu.load();
        Ok(())
    }
}

/// Takes back the value that this crate has set, and no other.
pub(crate) fn unset(flag: &dyn Flag) {
    let _ = flag
        .flag()
        .compare_exchange(KICKED, 0, Ordering::SeqCst, Ordering::Relaxed);
}

/// Decides when a scheduling slice of a vCPU is over, by its runs and, seldom, by the clock.
#[derive(Debug)]
struct Slice {
    begun: Instant,
    runs: u32,
}

impl Slice {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            runs: 0,
        }
    }

    /// Returns whether to read the clock. Call this before each run.
    fn reads_clock(&mut self) -> bool {
        // The clock costs a system call where the vDSO cannot read the time, as in some clouds.
        self.runs = self.runs.wrapping_add(1);
        self.runs.is_multiple_of(CLOCK_INTERVAL)
    }

    /// Returns whether a slice has ended. The next slice then begins.
    fn has_ended(&mut self) -> bool {
        let ended = self.begun.elapsed() >= SLICE;
        if ended {
            self.begun = Instant::now();
        }
        ended
    }
}

#[cfg(test)]
mod tests;
