//! What switches between two guests cost the PMU.

use core::fmt;

use vpmu::arm::partition::Residence;

use crate::world::statistics::OrNull;

/// Where a guest's PMU was when its turn ended, and where it is then kept: each [`Residence`], in its order.
const NAMES: [&str; 4] = ["free", "lazy", "saved", "loaded"];

/// Running sums, of both guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Switches from one guest to the other.
    pub count: u64,
    /// PMU registers read or written for them.
    pub registers: u64,
    /// Instructions of EL2 for the PMU's part in them, where a host counter counts those.
    pub instructions: u64,
    /// Trapped accesses of the second guest to PMU registers. Those of the first are among its exits.
    pub second_traps: u64,
    /// From where to where a guest's PMU went at the end of its turn.
    ended: [[u64; 4]; 4],
    /// The same at the beginning.
    began: [[u64; 4]; 4],
}

impl Switches {
    /// Nothing yet.
    pub const ZERO: Self = Self {
        count: 0,
        registers: 0,
        instructions: 0,
        second_traps: 0,
        ended: [[0; 4]; 4],
        began: [[0; 4]; 4],
    };

    /// A guest's turn ends: its PMU goes `from` one place `to` another.
    pub fn end(&mut self, from: Residence, to: Residence) {
        self.ended[from as usize][to as usize] += 1;
    }

    /// A guest's turn begins, likewise.
    pub fn begin(&mut self, from: Residence, to: Residence) {
        self.began[from as usize][to as usize] += 1;
    }

    /// What happened since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        difference.count -= earlier.count;
        difference.registers -= earlier.registers;
        difference.instructions -= earlier.instructions;
        difference.second_traps -= earlier.second_traps;
        let sums = difference.ended.iter_mut().chain(&mut difference.began);
        for (sums, earlier) in sums.zip(earlier.ended.iter().chain(&earlier.began)) {
            for (sum, earlier) in sums.iter_mut().zip(earlier) {
                *sum -= earlier;
            }
        }
        difference
    }
}

/// A JSON object. `instructions` is null where no host counter counts them.
pub struct Json<'a> {
    /// The sums.
    pub switches: &'a Switches,
    /// Whether a host counter counted the monitor's instructions.
    pub counts_instructions: bool,
}

impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Switches {
            count,
            registers,
            instructions,
            second_traps,
            ended,
            began,
        } = self.switches;
        let instructions = OrNull(self.counts_instructions.then_some(*instructions));
        write!(
            f,
            r#"{{"count":{count},"pmu_registers":{registers},"pmu_instructions":{instructions},"second_pmu_traps":{second_traps}"#
        )?;
        for (name, moves) in [("ended", ended), ("began", began)] {
            write!(f, r#","{name}":{{"#)?;
            let mut separator = "";
            for (from, counts) in NAMES.iter().zip(moves) {
                for (to, count) in NAMES.iter().zip(counts).filter(|(_, count)| **count > 0) {
                    write!(f, r#"{separator}"{from}-{to}":{count}"#)?;
                    separator = ",";
                }
            }
            f.write_str("}")?;
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_counted_between_two_moments() {
        let mut switches = Switches::ZERO;
        switches.end(Residence::Loaded, Residence::Lazy);
        let earlier = switches;
        switches.count = 2;
        switches.registers = 40;
        switches.end(Residence::Loaded, Residence::Lazy);
        switches.end(Residence::Free, Residence::Free);
        switches.begin(Residence::Saved, Residence::Loaded);
        let json = Json {
            switches: &switches.since(&earlier),
            counts_instructions: false,
        };
        assert_eq!(
            json.to_string(),
            concat!(
                r#"{"count":2,"pmu_registers":40,"pmu_instructions":null,"second_pmu_traps":0,"#,
                r#""ended":{"free-free":1,"loaded-lazy":1},"began":{"saved-loaded":1}}"#
            )
        );
    }
}
