//! Numbers for hostile writes, the same in every run.

/// A linear congruential generator, with Knuth's constants. Only its upper half
/// is used.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns the sequence of this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn half(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    /// Returns any value.
    pub fn any(&mut self) -> u64 {
        self.half() << 32 | self.half()
    }

    /// Returns a number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.half() as usize) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_is_set_sometimes_and_clear_sometimes() {
        let mut random = Random::new(1);
        let (mut ever, mut always) = (0, u64::MAX);
        for _ in 0..100 {
            let value = random.any();
            ever |= value;
            always &= value;
        }
        assert_eq!((ever, always), (u64::MAX, 0));
        assert!((0..100).all(|_| random.below(7) < 7));
    }
}
