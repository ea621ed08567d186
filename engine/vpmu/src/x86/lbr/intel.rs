//! Intel's architectural LBR: SDM vol. 3B, chapter 19; CPUID leaf 1CH.

use super::{Branch, Entry, Field, Filter, Kind, Kinds, MAX_DEPTH, Stack};
use crate::x86::{CpuidLeaf, canonical};

const INFO: u32 = 0x1200;
const CONTROL: u32 = 0x14ce;
const DEPTH: u32 = 0x14cf;
/// IA32_LBR_0_FROM_IP, behind which those of the other records stand.
pub const FROM: u32 = 0x1500;
const TO: u32 = 0x1600;

/// Bits of IA32_LBR_CTL.
pub mod lbr_ctl {
    /// Branches are recorded.
    pub const ENABLE: u64 = 1 << 0;
    /// Branches that end at CPL 0.
    pub const OS: u64 = 1 << 1;
    /// Branches that end at CPL 1 to 3.
    pub const USR: u64 = 1 << 2;
    /// The records are a stack of calls.
    pub const CALL_STACK: u64 = 1 << 3;
    /// Conditional branches.
    pub const JCC: u64 = 1 << 16;
    /// Near relative jumps.
    pub const NEAR_REL_JMP: u64 = 1 << 17;
    /// Near indirect jumps.
    pub const NEAR_IND_JMP: u64 = 1 << 18;
    /// Near relative calls.
    pub const NEAR_REL_CALL: u64 = 1 << 19;
    /// Near indirect calls.
    pub const NEAR_IND_CALL: u64 = 1 << 20;
    /// Near returns.
    pub const NEAR_RET: u64 = 1 << 21;
    /// Other branches.
    pub const OTHER_BRANCH: u64 = 1 << 22;
}

/// Bits of IA32_LBR_x_INFO.
pub mod lbr_info {
    /// The cycles since the branch before.
    pub const CYCLES: u64 = 0xffff;
    /// The kind of the branch.
    pub const BR_TYPE: u64 = 0xf << 56;
    /// The cycles are known.
    pub const CYCLES_VALID: u64 = 1 << 60;
    /// The branch was mispredicted.
    pub const MISPRED: u64 = 1 << 63;
}

/// What a guest finds of its last branch records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Capability {
    /// The depths that IA32_LBR_DEPTH takes: bit *n* for 8 * (*n* + 1) records. Bits 0 to 3, at least one of them.
    pub depths: u8,
    /// Whether there is a call-stack mode. For an embedder that hands over every call and return, or that finds the calls
    /// that are open at an overflow.
    pub call_stack: bool,
    /// Whether it is known which branches were mispredicted.
    pub mispredict: bool,
    /// Whether the cycles between branches are known.
    pub cycles: bool,
    /// The guest's linear addresses have so many bits: 48 or 57. Higher bits of addresses are ignored when they are
    /// written.
    pub linear_address_bits: u8,
}

impl Capability {
    /// Returns a stack of 32 records with addresses of 48 bits, of which kinds and addresses are known.
    pub const fn new() -> Self {
        Self {
            depths: 0b1000,
            call_stack: false,
            mispredict: false,
            cycles: false,
            linear_address_bits: 48,
        }
    }

    /// Whether there can be such a stack.
    pub(in crate::x86) const fn is_possible(&self) -> bool {
        self.depths != 0
            && self.depths >> (MAX_DEPTH / 8) == 0
            && matches!(self.linear_address_bits, 48 | 57)
    }

    /// Returns CPUID leaf 1CH.
    pub const fn leaf_1c(&self) -> CpuidLeaf {
        // Addresses are linear: the embedder hands over no other ones.
        const LIP: u32 = 1 << 31;
        const CPL_AND_BRANCH_FILTERING: u32 = 0b11;
        const BRANCH_TYPE: u32 = 1 << 2;
        CpuidLeaf {
            eax: self.depths as u32 | LIP,
            ebx: CPL_AND_BRANCH_FILTERING | (self.call_stack as u32) << 2,
            ecx: self.mispredict as u32 | (self.cycles as u32) << 1 | BRANCH_TYPE,
            edx: 0,
        }
    }

    /// Returns the greatest depth, which IA32_LBR_DEPTH has after reset.
    pub const fn deepest(&self) -> u8 {
        // Bit n stands for a depth of 8 * (n + 1).
        let highest = 8_u32.saturating_sub(self.depths.leading_zeros());
        8 * highest as u8
    }

    /// Returns the depth that `value` of IA32_LBR_DEPTH is; `None`: it is not supported.
    pub(super) const fn depth(&self, value: u64) -> Option<u8> {
        // Refused first: the division below would make a depth of any other value.
        if value == 0 || !value.is_multiple_of(8) || value > MAX_DEPTH as u64 {
            return None;
        }
        match self.depths >> (value / 8 - 1) & 1 {
            0 => None,
            _ => Some(value as u8),
        }
    }

    /// Returns the reserved bits of IA32_LBR_CTL.
    pub const fn ctl_reserved(&self) -> u64 {
        const ALL: u64 = 0x7f_000f;
        match self.call_stack {
            true => !ALL,
            false => !(ALL & !lbr_ctl::CALL_STACK),
        }
    }
}

impl Default for Capability {
    fn default() -> Self {
        Self::new()
    }
}

/// A register of architectural LBR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Msr {
    /// IA32_LBR_CTL.
    Control,
    /// IA32_LBR_DEPTH.
    Depth,
    /// IA32_LBR_x_FROM_IP, _TO_IP or _INFO.
    Record(Field, u8),
}

impl Msr {
    pub(super) const fn decode(address: u32) -> Option<Self> {
        const LAST: u32 = MAX_DEPTH as u32 - 1;
        // The three blocks begin at multiples of their length.
        let n = (address & LAST) as u8;
        Some(match address & !LAST {
            _ if address == CONTROL => Self::Control,
            _ if address == DEPTH => Self::Depth,
            INFO => Self::Record(Field::Info, n),
            FROM => Self::Record(Field::From, n),
            TO => Self::Record(Field::To, n),
            _ => return None,
        })
    }
}

/// Returns the addresses of all registers: what an integration has to intercept.
pub fn msrs() -> impl Iterator<Item = u32> {
    let records = (0..u32::from(MAX_DEPTH)).flat_map(|n| [INFO + n, FROM + n, TO + n]);
    [CONTROL, DEPTH].into_iter().chain(records)
}

/// The registers as one plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct State {
    /// IA32_LBR_CTL.
    pub control: u64,
    /// IA32_LBR_DEPTH and the records.
    pub stack: Stack,
}

impl State {
    /// Returns the name and the value of a register that `capability` cannot have.
    pub(in crate::x86) fn check(&self, capability: &Capability) -> Result<(), (&'static str, u64)> {
        let registers = Registers::power_on(*capability);
        if self.control & capability.ctl_reserved() != 0 {
            return Err(("IA32_LBR_CTL", self.control));
        }
        let depth = self.stack.depth().into();
        if capability.depth(depth).is_none() {
            return Err(("IA32_LBR_DEPTH", depth));
        }
        match self
            .stack
            .is_sound(|field, value| registers.kept(field, value))
        {
            true => Ok(()),
            false => Err(("IA32_LBR_x", depth)),
        }
    }
}

/// What the guest has written.
#[derive(Clone, Debug)]
pub(super) struct Registers {
    pub(super) capability: Capability,
    pub(super) control: u64,
}

impl Registers {
    pub(super) const fn power_on(capability: Capability) -> Self {
        Self {
            capability,
            control: 0,
        }
    }

    /// `None`: #GP.
    pub(super) fn read(&self, msr: Msr, stack: &Stack) -> Option<u64> {
        match msr {
            Msr::Control => Some(self.control),
            Msr::Depth => Some(stack.depth().into()),
            Msr::Record(field, n) => stack.field(field, n),
        }
    }

    /// `None`: #GP.
    pub(super) fn write(&mut self, msr: Msr, value: u64, stack: &mut Stack) -> Option<()> {
        match msr {
            // Unlike AMD's registers of records, whose reserved bits are ignored.
            Msr::Control if value & self.capability.ctl_reserved() != 0 => return None,
            Msr::Control => self.control = value,
            // The write clears every record, also where the depth stays as it is (SDM vol. 3B, 19.1.2): so Linux empties
            // the stack.
            Msr::Depth => *stack = Stack::new(self.capability.depth(value)?),
            Msr::Record(field, n) => stack.set_field(field, n, self.kept(field, value))?,
        }
        Some(())
    }

    pub(super) const fn disable(&mut self) -> bool {
        let was = self.control & lbr_ctl::ENABLE != 0;
        self.control &= !lbr_ctl::ENABLE;
        was
    }

    /// Returns what a register of a record keeps of `value`. The high bits of an address and the bits of _INFO that have
    /// no meaning are ignored.
    pub(super) const fn kept(&self, field: Field, value: u64) -> u64 {
        match field {
            Field::From | Field::To => canonical(value, self.capability.linear_address_bits),
            Field::Info => value & self.info_bits(),
        }
    }

    /// Bits of IA32_LBR_x_INFO that have a meaning.
    const fn info_bits(&self) -> u64 {
        let mut bits = lbr_info::BR_TYPE;
        if self.capability.mispredict {
            bits |= lbr_info::MISPRED;
        }
        if self.capability.cycles {
            bits |= lbr_info::CYCLES | lbr_info::CYCLES_VALID;
        }
        bits
    }

    pub(super) fn filter(&self) -> Option<Filter> {
        let has = |bit| self.control & bit != 0;
        let kinds = Kinds::NONE
            .with(Kind::Conditional, has(lbr_ctl::JCC))
            .with(Kind::RelativeJump, has(lbr_ctl::NEAR_REL_JMP))
            .with(Kind::IndirectJump, has(lbr_ctl::NEAR_IND_JMP))
            .with(Kind::RelativeCall, has(lbr_ctl::NEAR_REL_CALL))
            .with(Kind::IndirectCall, has(lbr_ctl::NEAR_IND_CALL))
            .with(Kind::Return, has(lbr_ctl::NEAR_RET))
            .with(Kind::Other, has(lbr_ctl::OTHER_BRANCH));
        // Bit 0 of IA32_DEBUGCTL, which enables the records of older processors, does nothing here (SDM vol. 3B, 19.1).
        has(lbr_ctl::ENABLE).then(|| Filter {
            kernel: has(lbr_ctl::OS),
            user: has(lbr_ctl::USR),
            kinds,
            call_stack: has(lbr_ctl::CALL_STACK),
        })
    }

    /// Returns the record of `branch`, which `filter` lets pass.
    pub(super) fn entry(&self, filter: &Filter, branch: &Branch) -> Entry {
        let bits = self.capability.linear_address_bits;
        // The address of code in a ring that is not recorded must not be seen (SDM vol. 3B, 19.1.3): user space may
        // own the records.
        let from = match filter.ring(branch.from_ring) {
            true => canonical(branch.from, bits),
            false => u64::MAX,
        };
        let kind: u64 = match branch.kind {
            Kind::Conditional => 0,
            Kind::IndirectJump => 1,
            Kind::RelativeJump => 2,
            Kind::IndirectCall => 3,
            Kind::RelativeCall | Kind::NextCall => 4,
            Kind::Return => 5,
            // 8 to 15 all mean another branch.
            Kind::Other => 8,
        };
        let mut info = kind << 56;
        if let Some(cycles) = branch.cycles {
            info |= u64::from(cycles) | lbr_info::CYCLES_VALID;
        }
        if branch.mispredicted == Some(true) {
            info |= lbr_info::MISPRED;
        }
        Entry {
            from,
            to: canonical(branch.to, bits),
            // What CPUID does not announce reads as zero, whatever the embedder knows.
            info: info & self.info_bits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_depth_is_a_multiple_of_8_that_is_offered() {
        let capability = Capability {
            depths: 0b1010,
            ..Capability::new()
        };
        assert_eq!(capability.deepest(), 32);
        let supported = (0..300).filter(|&value| capability.depth(value).is_some());
        assert!(supported.eq([16, 32]));
        assert_eq!(capability.depth(u64::MAX - 7), None);
    }
}
