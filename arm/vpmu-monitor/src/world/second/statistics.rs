//! What switches between two guests cost the PMU.

use core::fmt;

use vpmu::arm::partition::Residence;

use crate::world::statistics::OrNull;

/// Where a guest's PMU was when its turn ended, and where it is then kept: each [`Residence`], in its order.
const NAMES: [&str; 4] = ["free", "lazy", "saved", "loaded"];
const MOVES: usize = NAMES.len() * NAMES.len();

/// A running sum, of both guests.
#[derive(Clone, Copy, Debug)]
pub enum Figure {
    /// Switches from one guest to the other.
    Count,
    /// PMU registers read or written for them.
    Registers,
    /// Instructions of EL2 for the PMU's part in them, where a host counter counts those.
    Instructions,
    /// Trapped accesses of the second guest to PMU registers. Those of the first are among its exits.
    SecondTraps,
    /// A guest's turn ended, and its PMU went from one place to another.
    Ended(Residence, Residence),
    /// A guest's turn began, likewise.
    Began(Residence, Residence),
}

impl Figure {
    /// How many there are.
    pub(crate) const COUNT: usize = 4 + 2 * MOVES;

    pub(crate) const fn index(self) -> usize {
        let (first, from, to) = match self {
            Self::Count => return 0,
            Self::Registers => return 1,
            Self::Instructions => return 2,
            Self::SecondTraps => return 3,
            Self::Ended(from, to) => (4, from, to),
            Self::Began(from, to) => (4 + MOVES, from, to),
        };
        first + NAMES.len() * from as usize + to as usize
    }
}

/// A JSON object. `instructions` is null where no host counter counts them.
pub struct Json<'a> {
    /// The sums, in the order of [`Figure`].
    pub figures: &'a [u64; Figure::COUNT],
    /// Whether a host counter counted the monitor's instructions.
    pub counts_instructions: bool,
}

impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [count, registers, instructions, second_traps, moves @ ..] = self.figures;
        let instructions = OrNull(self.counts_instructions.then_some(*instructions));
        write!(
            f,
            r#"{{"count":{count},"pmu_registers":{registers},"pmu_instructions":{instructions},"second_pmu_traps":{second_traps}"#
        )?;
        for (name, moves) in ["ended", "began"].iter().zip(moves.chunks(MOVES)) {
            write!(f, r#","{name}":{{"#)?;
            let mut separator = "";
            for (n, count) in moves.iter().enumerate().filter(|(_, count)| **count > 0) {
                let (from, to) = (NAMES[n / NAMES.len()], NAMES[n % NAMES.len()]);
                write!(f, r#"{separator}"{from}-{to}":{count}"#)?;
                separator = ",";
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
    fn moves_are_named() {
        let mut figures = [0; Figure::COUNT];
        for (figure, value) in [
            (Figure::Count, 2),
            (Figure::Registers, 40),
            (Figure::Ended(Residence::Loaded, Residence::Lazy), 1),
            (Figure::Ended(Residence::Free, Residence::Free), 1),
            (Figure::Began(Residence::Saved, Residence::Loaded), 1),
        ] {
            figures[figure.index()] += value;
        }
        let json = Json {
            figures: &figures,
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
