//! AMD's LBR stack, LbrExtV2: CPUID leaf 8000_0022H; APM vol. 2, 13.1.1; the PPRs of Zen 4 and later.

use super::{Branch, Entry, Field, Filter, Kind, Kinds, Stack};
use crate::x86::status::Freeze;
use crate::x86::{Ring, canonical};

/// How many records there are.
pub const DEPTH: u8 = 16;

const DEBUG_CTL: u32 = 0x1d9;
const LBR_SELECT: u32 = 0xc000_010e;
const DEBUG_EXTN_CTL: u32 = 0xc000_010f;
const FROM0: u32 = 0xc001_0300;

/// Bits of LbrSelect: what each keeps out of the records.
pub mod lbr_select {
    /// Branches that end at CPL 0.
    pub const CPL_EQ_0: u64 = 1 << 0;
    /// Branches that end at CPL 1 to 3.
    pub const CPL_NEQ_0: u64 = 1 << 1;
    /// Conditional branches.
    pub const JCC: u64 = 1 << 2;
    /// Near relative calls.
    pub const NEAR_REL_CALL: u64 = 1 << 3;
    /// Near indirect calls.
    pub const NEAR_IND_CALL: u64 = 1 << 4;
    /// Near returns.
    pub const NEAR_RET: u64 = 1 << 5;
    /// Near indirect jumps.
    pub const NEAR_IND_JMP: u64 = 1 << 6;
    /// Near relative jumps.
    pub const NEAR_REL_JMP: u64 = 1 << 7;
    /// Far branches.
    pub const FAR_BRANCH: u64 = 1 << 8;
    /// Bits that exist.
    pub const ALL: u64 = 0x1ff;
}

/// DebugExtnCtl: branches are recorded.
pub const LBR_V2_ENABLE: u64 = 1 << 6;

/// Bits of DebugCtl that belong to the PMU.
mod debugctl {
    pub(super) const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;
    pub(super) const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
    pub(super) const OWN: u64 = FREEZE_LBRS_ON_PMI | FREEZE_PERFMON_ON_PMI;
}

/// Bits of a record's registers.
mod record {
    /// From: the branch was mispredicted.
    pub(super) const MISPREDICTED: u64 = 1 << 63;
    /// To: the record is of a branch that was taken.
    pub(super) const VALID: u64 = 1 << 63;
    /// To: the branch was speculative. None is that was handed over.
    pub(super) const SPECULATIVE: u64 = 1 << 62;
    /// To: no meaning.
    pub(super) const RESERVED: u64 = 1 << 61;
}

/// What a guest finds of its last branch records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Capability {
    /// Bits of DebugCtl that are implemented outside the PMU. The engine keeps them as written.
    pub other_debugctl: u64,
}

/// A register of the LBR stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Msr {
    /// LbrSelect.
    Select,
    /// DebugExtnCtl.
    Extension,
    /// DebugCtl.
    Debug,
    /// The halves of a record.
    Record(Field, u8),
}

impl Msr {
    pub(super) const fn decode(address: u32) -> Option<Self> {
        const END: u32 = FROM0 + 2 * DEPTH as u32 - 1;
        Some(match address {
            LBR_SELECT => Self::Select,
            DEBUG_EXTN_CTL => Self::Extension,
            DEBUG_CTL => Self::Debug,
            // A record's two registers are neighbours.
            FROM0..=END => {
                let n = ((address - FROM0) / 2) as u8;
                match address & 1 {
                    0 => Self::Record(Field::From, n),
                    _ => Self::Record(Field::To, n),
                }
            }
            _ => return None,
        })
    }
}

/// Returns the addresses of all registers: what an integration has to intercept. DebugCtl is one.
pub fn msrs() -> impl Iterator<Item = u32> {
    let records = FROM0..FROM0 + 2 * u32::from(DEPTH);
    [LBR_SELECT, DEBUG_EXTN_CTL, DEBUG_CTL]
        .into_iter()
        .chain(records)
}

/// The registers as one plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct State {
    /// LbrSelect.
    pub select: u64,
    /// DebugExtnCtl.
    pub extension: u64,
    /// DebugCtl.
    pub debugctl: u64,
    /// The records.
    pub stack: Stack,
}

impl State {
    /// Returns the name and the value of a register that `capability` cannot have.
    pub(in crate::x86) fn check(&self, capability: &Capability) -> Result<(), (&'static str, u64)> {
        if self.select & !lbr_select::ALL != 0 {
            return Err(("LbrSelect", self.select));
        }
        if self.extension & !LBR_V2_ENABLE != 0 {
            return Err(("DebugExtnCtl", self.extension));
        }
        if self.debugctl & !(debugctl::OWN | capability.other_debugctl) != 0 {
            return Err(("DebugCtl", self.debugctl));
        }
        let depth = self.stack.depth();
        let kept = |field, value| match field {
            Field::From | Field::To => value,
            // A record has two registers here, so that a third word is damage.
            Field::Info => 0,
        };
        match depth == DEPTH && self.stack.is_sound(kept) {
            true => Ok(()),
            false => Err(("SampBrFrom", depth.into())),
        }
    }
}

/// What the guest has written.
#[derive(Clone, Debug)]
pub(super) struct Registers {
    pub(super) capability: Capability,
    select: u64,
    extension: u64,
    debugctl: u64,
}

impl Registers {
    pub(super) const fn power_on(capability: Capability) -> Self {
        Self {
            capability,
            select: 0,
            extension: 0,
            debugctl: 0,
        }
    }

    /// `None`: #GP.
    pub(super) fn read(&self, msr: Msr, stack: &Stack) -> Option<u64> {
        Some(match msr {
            Msr::Select => self.select,
            Msr::Extension => self.extension,
            Msr::Debug => self.debugctl,
            Msr::Record(field, n) => return stack.field(field, n),
        })
    }

    /// Reserved bits of the PMU's own registers are ignored, as in all of AMD's. Those of DebugCtl must be zero (APM vol.
    /// 2, 13.1.1.6). `None`: #GP.
    pub(super) fn write(&mut self, msr: Msr, value: u64, stack: &mut Stack) -> Option<()> {
        match msr {
            // Bits keep branches out: a register of zeros lets all pass.
            Msr::Select => self.select = value & lbr_select::ALL,
            Msr::Extension => self.extension = value & LBR_V2_ENABLE,
            Msr::Debug => {
                if value & !(debugctl::OWN | self.capability.other_debugctl) != 0 {
                    return None;
                }
                self.debugctl = value;
            }
            // Linux clears them one by one.
            Msr::Record(field, n) => return stack.set_field(field, n, value),
        }
        Some(())
    }

    pub(super) const fn disable(&mut self) -> bool {
        let was = self.extension & LBR_V2_ENABLE != 0;
        self.extension &= !LBR_V2_ENABLE;
        was
    }

    pub(super) const fn freezing(&self) -> (Option<Freeze>, bool) {
        let counters = match self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI {
            0 => None,
            _ => Some(Freeze::Status),
        };
        (counters, self.debugctl & debugctl::FREEZE_LBRS_ON_PMI != 0)
    }

    pub(super) fn filter(&self) -> Option<Filter> {
        // A set bit keeps branches out, where Intel's lets them in.
        let lets = |bit| self.select & bit == 0;
        let kinds = Kinds::NONE
            .with(Kind::Conditional, lets(lbr_select::JCC))
            .with(Kind::RelativeJump, lets(lbr_select::NEAR_REL_JMP))
            .with(Kind::IndirectJump, lets(lbr_select::NEAR_IND_JMP))
            .with(Kind::RelativeCall, lets(lbr_select::NEAR_REL_CALL))
            .with(Kind::IndirectCall, lets(lbr_select::NEAR_IND_CALL))
            .with(Kind::Return, lets(lbr_select::NEAR_RET))
            .with(Kind::Other, lets(lbr_select::FAR_BRANCH));
        (self.extension & LBR_V2_ENABLE != 0).then(|| Filter {
            kernel: lets(lbr_select::CPL_EQ_0),
            user: lets(lbr_select::CPL_NEQ_0),
            kinds,
            // LbrExtV2 has no such mode.
            call_stack: false,
        })
    }

    /// Returns the record of `branch`. Addresses are extended from bit 57.
    pub(super) fn entry(&self, branch: &Branch) -> Entry {
        // The address is bits 57:0; flags are among those above (Linux: arch/x86/events/amd/lbr.c, `branch_entry`).
        const BITS: u8 = 58;
        // The address of code in a ring that is not recorded must not be seen: user space may own the records.
        let hidden = match branch.from_ring {
            Ring::Kernel => self.select & lbr_select::CPL_EQ_0 != 0,
            Ring::User => self.select & lbr_select::CPL_NEQ_0 != 0,
        };
        let from = if hidden { 0 } else { branch.from };
        let mispredicted = match branch.mispredicted {
            Some(true) => record::MISPREDICTED,
            Some(false) | None => 0,
        };
        let to = canonical(branch.to, BITS);
        Entry {
            from: canonical(from, BITS) & !record::MISPREDICTED | mispredicted,
            to: to & !(record::VALID | record::SPECULATIVE | record::RESERVED) | record::VALID,
            info: 0,
        }
    }

    pub(super) fn save(&self, stack: &Stack) -> State {
        State {
            select: self.select,
            extension: self.extension,
            debugctl: self.debugctl,
            stack: stack.clone(),
        }
    }

    pub(super) const fn restore(&mut self, state: &State) {
        self.select = state.select;
        self.extension = state.extension;
        self.debugctl = state.debugctl;
    }
}
