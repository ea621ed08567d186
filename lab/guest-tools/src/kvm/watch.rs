//! Recognises a guest that will never end.
//!
//! QEMU sometimes loses an interrupt of a nested guest, or delivers it twice.
//! The guest then waits for ever, or runs in an endless loop with its
//! interrupts off.

use vpmu_measure::Snapshot;

/// Nearly all of the processor's time between two looks, hundredths of a second.
const ALL: u64 = 350;
/// Number of looks at a guest without exits after which it counts as stuck.
const PATIENCE: u32 = 30;
/// Number of looks for which a look at a busy guest counts. Even a busy guest
/// sets its next tick, so two are enough.
const BUSY: u32 = 15;

/// Seconds between two looks.
pub const INTERVAL_S: u32 = 4;

/// The observations of a guest so far.
#[derive(Debug, Default)]
pub struct Watch {
    /// Number of exits, without those for the host's own interrupts.
    own: Option<u64>,
    /// Time in the guest, hundredths of a second.
    guest: u64,
    looks: u32,
}

impl Watch {
    /// Takes the host's statistics of [`INTERVAL_S`] later. Returns true when the guest is stuck.
    pub fn look(&mut self, snapshot: &Snapshot) -> bool {
        let count = |name| snapshot.exits.get(name).copied().unwrap_or(0);
        let own = Some(count("exits").saturating_sub(count("irq_exits")));
        // proc_stat(5): "cpu", then user, nice, system, idle, iowait, irq, softirq, steal, guest.
        let guest = snapshot.cpu.split_whitespace().nth(9);
        let guest: u64 = guest.and_then(|time| time.parse().ok()).unwrap_or(0);
        if own == self.own {
            let busy = guest.saturating_sub(self.guest) > ALL;
            self.looks += if busy { BUSY } else { 1 };
        } else {
            self.looks = 0;
        }
        self.own = own;
        self.guest = guest;
        self.looks >= PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of the first look that finds the guest stuck, of 100.
    fn stuck_at(mut at: impl FnMut(u64) -> [u64; 3]) -> Option<u64> {
        let mut watch = Watch::default();
        (0..100).find(|&look| {
            let [exits, irqs, guest] = at(look);
            watch.look(&Snapshot {
                cpu: format!("cpu  10 0 5 7 0 0 0 0 {guest} 0"),
                exits: [("exits", exits), ("irq_exits", irqs)]
                    .map(|(name, count)| (name.to_owned(), count))
                    .into(),
                pmu: Default::default(),
            })
        })
    }

    #[test]
    fn guests_that_have_exits_are_never_stuck() {
        assert_eq!(stuck_at(|look| [10 + look, 3, 400 * look]), None);
        assert_eq!(stuck_at(|look| [10 + look / 20, 3, 0]), None);
    }

    #[test]
    fn a_circle_is_found_at_the_second_look_and_a_wait_at_the_thirtieth() {
        assert_eq!(stuck_at(|look| [10 + look, 3 + look, 400 * look]), Some(2));
        assert_eq!(stuck_at(|look| [10 + look, 3 + look, 0]), Some(30));
    }
}
