use core::num::NonZeroU64;

use super::{CounterHost, CounterSet, Lost};

/// How often the engine called its host, by kind, and what the host could not do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Calls of [`CounterHost::create`], failed ones included.
    pub creates: u64,
    /// Calls of [`CounterHost::set_period`].
    pub set_periods: u64,
    /// Calls of [`CounterHost::resume`].
    pub resumes: u64,
    /// Calls of [`CounterHost::pause`].
    pub pauses: u64,
    /// Calls of [`CounterHost::read`].
    pub reads: u64,
    /// Calls of [`CounterHost::release`].
    pub releases: u64,
    /// How many of the creates failed: each is a stretch of guest counting that was lost.
    pub lost: u64,
    /// Overflow reports from the host.
    pub reports: u64,
    /// Reports that found no overflow, early or stray ones.
    pub spurious_reports: u64,
}

impl Statistics {
    /// All calls of the host together.
    pub fn host_operations(&self) -> u64 {
        [
            self.creates,
            self.set_periods,
            self.resumes,
            self.pauses,
            self.reads,
            self.releases,
        ]
        .iter()
        .fold(0, |sum, &n| sum.wrapping_add(n))
    }
}

/// A host whose calls are counted on their way. An empty set is no call.
#[derive(Debug)]
pub struct Counted<'a, H> {
    /// Where the calls go.
    pub host: &'a mut H,
    /// Where they are counted.
    pub statistics: &'a mut Statistics,
}

fn count(n: &mut u64) {
    *n = n.wrapping_add(1);
}

impl<E, H: CounterHost<E>> CounterHost<E> for Counted<'_, H> {
    fn create(&mut self, counter: u8, event: &E) -> Result<(), Lost> {
        count(&mut self.statistics.creates);
        let created = self.host.create(counter, event);
        if created.is_err() {
            count(&mut self.statistics.lost);
        }
        created
    }

    fn set_period(&mut self, counter: u8, events: Option<NonZeroU64>) {
        count(&mut self.statistics.set_periods);
        self.host.set_period(counter, events);
    }

    fn resume(&mut self, counters: CounterSet) {
        if !counters.is_empty() {
            count(&mut self.statistics.resumes);
            self.host.resume(counters);
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        if !counters.is_empty() {
            count(&mut self.statistics.pauses);
            self.host.pause(counters);
        }
    }

    fn read(&mut self, counter: u8) -> u64 {
        count(&mut self.statistics.reads);
        self.host.read(counter)
    }

    fn release(&mut self, counter: u8) {
        count(&mut self.statistics.releases);
        self.host.release(counter);
    }
}
