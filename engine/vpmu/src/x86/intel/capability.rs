//! What a guest finds of its PMU, and all that follows from it.

use super::{ConfigError, Version, debugctl};
use crate::counter::{Counter, CounterSet};
use crate::x86::{ArchEvent, lbr, pebs};

/// No PMU here has more general counters: the MSRs IA32_PMC0 to IA32_PMC7 and their aliases are
/// architectural.
pub const MAX_GENERAL: u8 = 8;

/// No PMU here has more fixed counters: 0 to 6 have a meaning.
pub const MAX_FIXED: u8 = 7;

/// The number that fixed counter 0 has in [`CounterSet`]s and for a host; the others follow.
/// General counters begin at 0.
// The middle of a set of 32, so that a conversion from the global registers is a shift.
pub const FIXED: u8 = 16;

/// Bits of IA32_PERF_CAPABILITIES.
pub mod perf_capabilities {
    /// The format of last branch records is the architectural one.
    pub const LBR_FORMAT_ARCH: u64 = 0x3f;
    /// A PEBS record is written after the instruction, so its RIP is the next one's.
    pub const PEBS_TRAP: u64 = 1 << 6;
    /// PEBS records have the general registers.
    pub const PEBS_ARCH_REGS: u64 = 1 << 7;
    /// The format of PEBS records is 4.
    pub const PEBS_FORMAT_4: u64 = 4 << 8;
    /// The PEBS of every counter and event, with adaptive records.
    pub const PEBS_BASELINE: u64 = 1 << 14;
    /// IA32_DEBUGCTL.FREEZE_WHILE_SMM is there.
    pub const FREEZE_WHILE_SMM: u64 = 1 << 12;
    /// The aliases IA32_A_PMCx are there.
    pub const FW_WRITE: u64 = 1 << 13;
}

/// What a guest finds of its PMU. It decides which MSRs and which of their bits exist.
///
/// ```
/// use vpmu::x86::intel::{Capability, Version};
///
/// let capability = Capability::new(Version::V2);
/// assert_eq!(capability.leaf_0a().eax, 0x0730_0402); // 7 events, 48 bits, 4 counters, version 2
/// assert_eq!(capability.leaf_0a().edx, 0x0000_0603); // 48 bits, 3 fixed counters
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Capability {
    /// The version.
    pub version: Version,
    /// General counters: 1 to 8.
    pub general: u8,
    /// Their width in bits: 32 to 63.
    pub general_width: u8,
    /// Fixed counters, bit *n* for counter *n* below 7. Without gaps before version 5.
    pub fixed: u32,
    /// Their width in bits: 32 to 63.
    pub fixed_width: u8,
    /// The architectural events that general counters can count: bit
    /// [`ArchEvent::cpuid_bit`] for each.
    pub events: u32,
    /// Whether IA32_PERF_CAPABILITIES exists: CPUID.01H:ECX.PDCM\[15\].
    pub pdcm: bool,
    /// Whether general counters can be written in full width, at IA32_A_PMCx. Needs `pdcm`.
    pub full_width_writes: bool,
    /// Whether IA32_DEBUGCTL.FREEZE_WHILE_SMM exists. Needs `pdcm`. The engine keeps the bit; the implementer of SMM
    /// has to see that nothing counts there.
    pub freeze_while_smm: bool,
    /// Whether the guest is offered CPUID leaf 23H, CPUID.(07H,1):EAX\[8\]. From version 5 on.
    pub leaf_23: bool,
    /// Bits of IA32_DEBUGCTL that are implemented outside the PMU. The engine keeps them as written.
    pub other_debugctl: u64,
    /// PEBS: CPUID.01H:EDX.DS\[21\] and ECX.DTES64\[2\], and its fields of IA32_PERF_CAPABILITIES. Needs `pdcm`, and a
    /// host that has [`CounterHost::support_pebs`](crate::counter::CounterHost::support_pebs).
    #[cfg_attr(feature = "serde", serde(default))]
    pub pebs: Option<pebs::Capability>,
    /// Last branch records: CPUID.07H:EDX\[19\] and leaf 1CH, and the format of records in IA32_PERF_CAPABILITIES. Needs
    /// `pdcm` and version 4, whose status register freezes them.
    #[cfg_attr(feature = "serde", serde(default))]
    pub lbr: Option<lbr::intel::Capability>,
}

impl Capability {
    /// Returns what most processors of this version have, as far as a guest can use it: 4 general counters (8 from
    /// version 5 on) and 3 fixed ones, 48 bits wide, the seven events that every processor has, full-width writes.
    pub const fn new(version: Version) -> Self {
        Self {
            version,
            general: if matches!(version, Version::V5) { 8 } else { 4 },
            general_width: 48,
            fixed: 0b111,
            fixed_width: 48,
            events: 0x7f,
            pdcm: true,
            full_width_writes: true,
            freeze_while_smm: false,
            leaf_23: false,
            other_debugctl: 0,
            pebs: None,
            lbr: None,
        }
    }

    /// Checks that there can be such a PMU.
    ///
    /// # Errors
    ///
    /// Names the first field with an impossible value.
    pub const fn check(&self) -> Result<(), ConfigError> {
        if self.general == 0 || self.general > MAX_GENERAL {
            return Err(ConfigError::General(self.general));
        }
        // Before version 5 CPUID has only the number of fixed counters.
        let gaps = self.fixed & self.fixed.wrapping_add(1) != 0;
        if self.fixed >> MAX_FIXED != 0 || gaps && !matches!(self.version, Version::V5) {
            return Err(ConfigError::Fixed(self.fixed));
        }
        // IA32_PMCx takes 32 bits, and the distance to an overflow at 2^64 would not fit a u64.
        if self.general_width < 32 || self.general_width > 63 {
            return Err(ConfigError::Width(self.general_width));
        }
        if self.fixed_width < 32 || self.fixed_width > 63 {
            return Err(ConfigError::Width(self.fixed_width));
        }
        if self.events & !0xff != 0 {
            return Err(ConfigError::Events(self.events));
        }
        // A guest cannot learn of these without IA32_PERF_CAPABILITIES.
        let announced = self.full_width_writes
            || self.freeze_while_smm
            || self.pebs.is_some()
            || self.lbr.is_some();
        if !self.pdcm && announced {
            return Err(ConfigError::Pdcm);
        }
        if let Some(pebs) = self.pebs
            // Page tables of four or five levels: which addresses are canonical depends on that.
            && !matches!(pebs.linear_address_bits, 48 | 57)
        {
            return Err(ConfigError::LinearAddress(pebs.linear_address_bits));
        }
        if let Some(lbr) = self.lbr {
            let frozen_by_status = matches!(self.version, Version::V4 | Version::V5);
            if !lbr.is_possible() || !frozen_by_status {
                return Err(ConfigError::Lbr);
            }
        }
        if self.leaf_23 && !matches!(self.version, Version::V5) {
            return Err(ConfigError::Leaf23(self.version));
        }
        let own = debugctl::FREEZE_LBRS_ON_PMI
            | debugctl::FREEZE_PERFMON_ON_PMI
            | debugctl::FREEZE_WHILE_SMM;
        // Kept for somebody else, these would be without the effect that the guest is promised.
        if self.other_debugctl & own != 0 {
            return Err(ConfigError::DebugCtl(self.other_debugctl & own));
        }
        Ok(())
    }

    /// Returns IA32_PERF_CAPABILITIES.
    pub const fn perf_capabilities(&self) -> u64 {
        let pebs = perf_capabilities::PEBS_TRAP
            | perf_capabilities::PEBS_ARCH_REGS
            | perf_capabilities::PEBS_FORMAT_4
            | perf_capabilities::PEBS_BASELINE;
        when(self.pebs.is_some(), pebs)
            | when(self.lbr.is_some(), perf_capabilities::LBR_FORMAT_ARCH)
            | when(self.full_width_writes, perf_capabilities::FW_WRITE)
            | when(self.freeze_while_smm, perf_capabilities::FREEZE_WHILE_SMM)
    }

    /// Returns every counter there is.
    pub const fn counters(&self) -> CounterSet {
        CounterSet::from_bits(CounterSet::first(self.general).bits() | self.fixed << FIXED)
    }

    /// Returns which bits of counter `n` exist.
    pub const fn counter_mask(&self, n: Counter) -> u64 {
        let width = match n.number() < FIXED {
            true => self.general_width,
            false => self.fixed_width,
        };
        // A capability that nobody has checked may have any width, and no shift may panic.
        match 1_u64.checked_shl(width as u32) {
            Some(bit) => bit - 1,
            None => u64::MAX,
        }
    }

    /// Returns the fixed counters to offer where these architectural events are counted (bit [`ArchEvent::cpuid_bit`]
    /// for each). From version 5 on, a fixed counter whose event is missing is not there. Before, there are no gaps,
    /// and the bit of CPUID.0AH:EBX says that fixed counter 0 has no instructions to count.
    pub const fn fixed_for(version: Version, events: u32) -> u32 {
        match version {
            Version::V2 | Version::V3 | Version::V4 => 0b111,
            // Instructions, cycles and reference cycles are bits 1, 0 and 2 of the events.
            Version::V5 => events >> 1 & 1 | (events & 1) << 1 | events & 1 << 2,
        }
    }

    /// Returns whether a general counter can count `event`. Fixed counters always can count theirs.
    pub const fn has_event(&self, event: ArchEvent) -> bool {
        event.is_in(self.events)
    }
}

pub(super) const fn when(exist: bool, bits: u64) -> u64 {
    if exist { bits } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_cpuid() {
        assert_eq!(Version::from_number(0), None);
        assert_eq!(Version::from_number(1), None);
        for number in 2..=5 {
            assert_eq!(
                Version::from_number(number).map(Version::number),
                Some(number)
            );
        }
        assert_eq!(Version::from_number(6), Some(Version::V5));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = Capability::new(Version::V4);
        assert_eq!(good.check(), Ok(()));
        let refused = |capability: Capability| capability.check().expect_err("impossible");
        for general in [0, 9] {
            let error = refused(Capability { general, ..good });
            assert_eq!(error, ConfigError::General(general));
        }
        for fixed in [0b101, 1 << 7, u32::MAX] {
            assert_eq!(
                refused(Capability { fixed, ..good }),
                ConfigError::Fixed(fixed)
            );
        }
        for width in [0, 31, 64, 255] {
            let general = Capability {
                general_width: width,
                ..good
            };
            let fixed = Capability {
                fixed_width: width,
                ..good
            };
            assert_eq!(refused(general), ConfigError::Width(width));
            assert_eq!(refused(fixed), ConfigError::Width(width));
        }
        let events = 0x100;
        assert_eq!(
            refused(Capability { events, ..good }),
            ConfigError::Events(events)
        );
        let pdcm = false;
        assert_eq!(refused(Capability { pdcm, ..good }), ConfigError::Pdcm);
        let leaf_23 = true;
        assert_eq!(
            refused(Capability { leaf_23, ..good }),
            ConfigError::Leaf23(Version::V4)
        );
        let other_debugctl = 1 << 11 | 1 << 1;
        assert_eq!(
            refused(Capability {
                other_debugctl,
                ..good
            }),
            ConfigError::DebugCtl(1 << 11)
        );
    }
}
