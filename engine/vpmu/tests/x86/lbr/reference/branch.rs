//! Which branches are recorded, and how a record holds one.

use super::{Record, Reference};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Kind};

impl Reference {
    pub(super) fn ring(&self, ring: Ring) -> bool {
        match (self.is_intel(), ring) {
            (true, Ring::Kernel) => self.control & 1 << 1 != 0,
            (true, Ring::User) => self.control & 1 << 2 != 0,
            (false, Ring::Kernel) => self.control & 1 << 0 == 0,
            (false, Ring::User) => self.control & 1 << 1 == 0,
        }
    }

    pub(super) fn kind(&self, kind: Kind) -> bool {
        // The bit that lets pass, and the bit that keeps out.
        let (intel, amd) = match kind {
            Kind::Conditional => (16, 2),
            Kind::RelativeJump => (17, 7),
            Kind::IndirectJump => (18, 6),
            Kind::RelativeCall | Kind::NextCall => (19, 3),
            Kind::IndirectCall => (20, 4),
            Kind::Return => (21, 5),
            Kind::Other => (22, 8),
        };
        match self.is_intel() {
            true => self.control & 1 << intel != 0,
            false => self.control & 1 << amd == 0,
        }
    }

    pub(super) fn intel_record(&self, branch: &Branch) -> Record {
        let bits = u32::from(self.intel().linear_address_bits);
        let from = match self.ring(branch.from_ring) {
            true => extend(branch.from, bits),
            false => u64::MAX,
        };
        let kind = match branch.kind {
            Kind::Conditional => 0,
            Kind::IndirectJump => 1,
            Kind::RelativeJump => 2,
            Kind::IndirectCall => 3,
            Kind::RelativeCall | Kind::NextCall => 4,
            Kind::Return => 5,
            Kind::Other => 8,
        };
        let mut info = kind << 56;
        if let (true, Some(cycles)) = (self.intel().cycles, branch.cycles) {
            info |= u64::from(cycles) + (1 << 60);
        }
        if self.intel().mispredict && branch.mispredicted == Some(true) {
            info |= 1 << 63;
        }
        [from, extend(branch.to, bits), info]
    }

    pub(super) fn amd_record(&self, branch: &Branch) -> Record {
        let from = if self.ring(branch.from_ring) {
            branch.from
        } else {
            0
        };
        // Bits 57:0 are the address and bits 60:58 its sign, in both. Bits 62:61 are a sign, or reserved and speculative;
        // bit 63 is mispredicted, or valid.
        let (from, to) = (extend(from, 58), extend(branch.to, 58));
        let mispredicted = u64::from(branch.mispredicted == Some(true));
        [
            from << 1 >> 1 | mispredicted << 63,
            to << 3 >> 3 | 1 << 63,
            0,
        ]
    }
}

/// Returns `value` with its bit `bits` - 1 repeated above.
pub(super) fn extend(value: u64, bits: u32) -> u64 {
    match value >> (bits - 1) & 1 {
        0 => value & ((1 << bits) - 1),
        _ => value | !((1 << bits) - 1),
    }
}
