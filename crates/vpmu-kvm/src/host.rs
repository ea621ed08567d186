//! The host of a PMU that may not have a thread yet.

use std::num::NonZeroU64;

use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report, Slots, TakenSamples};
use vpmu::x86::CounterConfig;
use vpmu::x86::pebs::{Guest, Sample};
use vpmu_perf::PerfHost;

use crate::guest::VcpuGuest;

/// A vCPU thread's perf events, or none before there is a thread. The PMU is put (`Pmu::put`) as long as there is
/// none, so that nothing is asked of it.
#[derive(Debug, Default)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is a thread nearly always, and it is to allocate nothing"
)]
pub(crate) enum Host {
    #[default]
    Unbound,
    Bound(PerfHost, Option<VcpuGuest>),
}

impl Host {
    /// Returns whether the PMU belongs to the calling thread.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self, Self::Bound(host, _) if host.is_here())
    }

    /// Forgets the guest's registers, which are old once the guest may have run.
    pub(crate) fn forget_guest(&mut self) {
        if let Self::Bound(_, Some(guest)) = self {
            guest.forget();
        }
    }

    pub(crate) fn overflows(&mut self) -> Option<impl Iterator<Item = (Counter, Report)> + use<>> {
        match self {
            Self::Bound(host, _) if host.has_overflows() => Some(host.take_overflows()),
            Self::Unbound | Self::Bound(..) => None,
        }
    }

    fn bound(&mut self) -> Option<&mut PerfHost> {
        match self {
            Self::Unbound => None,
            Self::Bound(host, _) => Some(host),
        }
    }
}

impl CounterHost<CounterConfig> for Host {
    fn create(&mut self, counter: Counter, event: &CounterConfig) -> Result<(), Lost> {
        match self {
            // The counter is asked for again when there is a thread.
            Self::Unbound => Err(Lost::Busy),
            Self::Bound(host, _) => host.create(counter, event),
        }
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        if let Some(host) = self.bound() {
            host.set_period(counter, events);
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        if let Some(host) = self.bound() {
            host.resume(counters);
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        if let Some(host) = self.bound() {
            host.pause(counters);
        }
    }

    fn read(&mut self, counter: Counter) -> u64 {
        self.bound().map_or(0, |host| host.read(counter))
    }

    fn release(&mut self, counter: Counter) {
        if let Some(host) = self.bound() {
            host.release(counter);
        }
    }

    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        self.bound()
            .is_some_and(|host| host.pause_and_read(counters, totals))
    }

    fn pebs(&mut self) -> Option<&mut dyn Guest> {
        match self {
            Self::Bound(_, Some(guest)) => Some(guest),
            Self::Bound(_, None) | Self::Unbound => None,
        }
    }

    fn sample(&mut self, counter: Counter, events: Option<NonZeroU64>) -> u64 {
        self.bound().map_or(0, |host| host.sample(counter, events))
    }

    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        let Self::Bound(host, guest) = self else {
            return TakenSamples::default();
        };
        let mut taken = host.take_samples(counter, samples);
        if taken.samples == 0 {
            return taken;
        }
        let offset = guest.as_mut().map(VcpuGuest::tsc_offset);
        // A record without the guest's time would be sorted wrongly among those with it: better none.
        let Some(Ok(offset)) = offset else {
            taken.lost += taken.samples as u64;
            taken.samples = 0;
            return taken;
        };
        for sample in &mut samples[..taken.samples] {
            sample.tsc = sample.tsc.wrapping_add(offset);
        }
        taken
    }

    fn reports_promptly(&self) -> bool {
        // A signal ends KVM_RUN, and is taken before the access that KVM_RUN returned for.
        true
    }

    fn follows_branches(&self) -> bool {
        // Asked only where branches are offered, and so followed.
        true
    }

    fn repeats(&self) -> bool {
        match self {
            Self::Unbound => false,
            Self::Bound(host, _) => host.repeats(),
        }
    }

    fn shortest_period(&self, sharing: u32) -> u64 {
        match self {
            // The floor is the thread's, and is asked for again when there is one.
            Self::Unbound => 1,
            Self::Bound(host, _) => host.shortest_period(sharing),
        }
    }

    fn deficit(&self, counter: Counter) -> Option<Lost> {
        match self {
            Self::Unbound => None,
            Self::Bound(host, _) => host.deficit(counter),
        }
    }
}
