//! The guest's events in the perf event's unit, and back.

use vpmu::counter::CounterSet;

use super::{NS, PerfHost};
use crate::choose::Backing;
use crate::event::ENDLESS;

impl PerfHost {
    /// Converts `events` to the perf event's unit, rounded up.
    pub(super) fn to_count(&self, events: u64) -> u64 {
        let count = match self.chooser.backing {
            Backing::Hardware => u128::from(events),
            Backing::Clock => {
                let ns = u128::from(events) * u128::from(NS);
                ns.div_ceil(u128::from(self.tsc_hz))
            }
        };
        u64::try_from(count).unwrap_or(ENDLESS)
    }

    /// Converts `events` to a period of the perf event's, which leaves others time.
    pub(super) fn to_host(&self, events: u64) -> u64 {
        let count = self.to_count(events);
        count.clamp(self.floor(), ENDLESS)
    }

    /// Returns the shortest period, in the perf event's unit.
    pub(super) fn floor(&self) -> u64 {
        let made = self.slots.iter().flatten();
        // Counters that only count interrupt nobody. Nothing tells which one-shot reports come back.
        let sharing = match self.repeating {
            true => made.filter(|slot| slot.armed && slot.running).count(),
            false => made.count(),
        };
        Self::FLOOR * sharing.max(1) as u64
    }

    /// Gives the counters that run, `begun` the last of them, the periods that as many may have. Where periods repeat,
    /// nobody asks for them again.
    pub(super) fn spread(&mut self, begun: CounterSet) {
        let armed = |counter| Some(self.slots.get(usize::from(counter))?.as_ref()?.armed);
        let is_armed = |counter| armed(counter).unwrap_or(false);
        if !self.repeating || !begun.iter().any(is_armed) {
            return;
        }
        for counter in self.which(|slot| slot.armed && slot.running) {
            let asked = self.slot(counter).and_then(|slot| slot.asked);
            if let Some((events, period)) = asked
                && self.to_host(events.get()) != period
            {
                self.program(counter, events);
            }
        }
    }

    /// Converts the perf event's count to the guest's events.
    pub(super) fn to_guest(&self, count: u64) -> u64 {
        match self.chooser.backing {
            Backing::Hardware => count,
            Backing::Clock => to_events(count, self.tsc_hz),
        }
    }
}

/// Converts a clock's ns to the guest's events. The product is taken modulo 2^64, as every total.
pub(super) fn to_events(ns: u64, hz: u64) -> u64 {
    (u128::from(ns) * u128::from(hz) / u128::from(NS)) as u64
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use vpmu::counter::CounterHost;
    use vpmu::x86::intel::{RawPerfEvtSel, Version};

    use super::*;
    use crate::{Kick, PerfOptions};

    #[test]
    fn counters_that_began_alone_do_not_keep_the_period_of_a_lone_one() {
        let options = PerfOptions {
            tsc_hz: NS,
            backing: Some(Backing::Clock),
            kick: Kick::Nothing,
            repeating: true,
            ..PerfOptions::default()
        };
        let Ok(mut host) = PerfHost::new(options) else {
            eprintln!("skipped: no perf events");
            return;
        };
        const CYCLES: u64 = 0x3c | RawPerfEvtSel::USR | RawPerfEvtSel::OS;
        let cycles = RawPerfEvtSel(CYCLES).config(Version::V2);
        let periods = |host: &PerfHost| {
            let slots = host.slots.iter().flatten();
            slots.map(|slot| slot.asked.unwrap().1).collect::<Vec<_>>()
        };
        let all = CounterSet::from_bits(0b111);
        for counter in all {
            assert_eq!(host.create(counter, &cycles), Ok(()));
            host.set_period(counter, NonZeroU64::new(1));
            host.resume(CounterSet::of(counter));
            host.pause(CounterSet::of(counter));
        }
        assert_eq!(periods(&host), [PerfHost::FLOOR; 3]);
        host.resume(all);
        assert_eq!(periods(&host), [3 * PerfHost::FLOOR; 3]);
        host.pause(all);
        host.resume(CounterSet::of(1));
        assert_eq!(periods(&host)[1], PerfHost::FLOOR, "alone again");
    }
}
