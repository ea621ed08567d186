//! The instructions that `workload` executes, exactly.
//!
//! One *unit* is the work of `--scale 1`: `main` runs a loop of its own, then
//! calls `foo`, `bar` and `qux` once each. All four are written in assembly, so
//! a unit takes exactly
//!
//! | function | instructions | share | what it does |
//! |---|---|---|---|
//! | `main` | 5,000 | 5 % | an empty loop of 2,495 rounds, the calls |
//! | `foo` | 50,000 | 50 % | arithmetic, 8,333 rounds |
//! | `bar` | 30,000 | 30 % | a shift register whose bits steer a branch, 4,285 rounds |
//! | `qux` | 15,000 | 15 % | loads of one word, 4,999 rounds |
//!
//! and the whole program `--scale N`, all functions:
//!
//! ```text
//! instructions:u = N * 100,000 + start
//! ```
//!
//! where `start` (process entry, arguments, exit) depends on the compiler, and
//! is less than 2,000. It is the same in every run with the same
//! arguments. Two values of N with as many digits have the same `start`, so
//! their difference is exact. With a NAME the other functions are not called. A
//! unit is then 5,000 less one (its `bl`) for each function left out, plus the
//! instructions of the one named.
//!
//! On x86-64 `main`'s loop has one round less, because testing and branching
//! are two instructions there; everything else is the same.
//!
//! Branches of a unit (AArch64, all architecturally executed ones):
//!
//! | function | conditional, taken | conditional, not taken | unconditional |
//! |---|---|---|---|
//! | `main` | 2,495 (2,494 in the last unit) | 4 (5) | 3 (`bl`) |
//! | `foo` | 8,332 | 1 | 1 (`ret`) |
//! | `bar` | 4,284 + 2,133 | 1 + 2,152 | 2,152 (`b`) + 1 (`ret`) |
//! | `qux` | 4,998 | 1 | 1 (`ret`) |
//!
//! `bar`'s steered branch follows the low bit of a 16-bit shift register that
//! starts anew in every call: 0 takes it. Its period is 65,535, so a predictor
//! does not learn it.

/// Instructions of `main` in a unit.
pub const MAIN: u64 = 5_000;
/// Instructions of `foo` in a unit.
pub const FOO: u64 = 50_000;
/// Instructions of `bar` in a unit.
pub const BAR: u64 = 30_000;
/// Instructions of `qux` in a unit.
pub const QUX: u64 = 15_000;

/// Rounds of `main`'s own loop in a unit: two instructions each, ten outside.
pub const MAIN_ROUNDS: u64 = (MAIN - 10) / 2;
/// Rounds of `foo`'s loop: six instructions each, two outside.
pub const FOO_ROUNDS: u64 = (FOO - 2) / 6;
/// Rounds of `bar`'s loop: seven instructions each, five outside.
pub const BAR_ROUNDS: u64 = (BAR - 5) / 7;
/// Rounds of `qux`'s loop: three instructions each, three outside.
pub const QUX_ROUNDS: u64 = (QUX - 3) / 3;

/// The initial value of `bar`'s shift register.
pub const BAR_SEED: u16 = 0xace1;
/// The feedback of the register: x^16 + x^14 + x^13 + x^11 + 1, of maximal
/// period.
pub const BAR_FEEDBACK: u16 = 0xb400;
/// The functions that `main` calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Functions(u64);

impl Functions {
    /// `main` alone.
    pub const MAIN: Self = Self(0);
    /// `foo`.
    pub const FOO: Self = Self(1);
    /// `bar`.
    pub const BAR: Self = Self(2);
    /// `qux`.
    pub const QUX: Self = Self(4);
    /// All three.
    pub const ALL: Self = Self(7);

    /// Returns the function called `name` alone.
    pub fn named(name: &[u8]) -> Option<Self> {
        match name {
            b"main" => Some(Self::MAIN),
            b"foo" => Some(Self::FOO),
            b"bar" => Some(Self::BAR),
            b"qux" => Some(Self::QUX),
            _ => None,
        }
    }

    /// Returns the functions as bits: bit 0 is `foo`, bit 1 `bar`, bit 2 `qux`.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_make_exactly_the_instructions() {
        assert_eq!(MAIN_ROUNDS * 2 + 10, MAIN);
        assert_eq!(FOO_ROUNDS * 6 + 2, FOO);
        assert_eq!(BAR_ROUNDS * 7 + 5, BAR);
        assert_eq!(QUX_ROUNDS * 3 + 3, QUX);
        assert_eq!(
            (MAIN_ROUNDS, FOO_ROUNDS, BAR_ROUNDS, QUX_ROUNDS),
            (2_495, 8_333, 4_285, 4_999)
        );
        assert_eq!(MAIN + FOO + BAR + QUX, 100_000);
    }

    #[test]
    fn branch_pattern() {
        let next = |state: &u16| Some((state >> 1) ^ ((state & 1) * BAR_FEEDBACK));
        let states = std::iter::successors(Some(BAR_SEED), next);
        let ones = states
            .take(BAR_ROUNDS as usize)
            .filter(|state| state & 1 == 1);
        assert_eq!(ones.count(), 2_152);
        assert_eq!(BAR_ROUNDS - 2_152, 2_133);
    }
}
