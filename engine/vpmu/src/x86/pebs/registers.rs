//! The registers of PEBS, and what a guest finds of it.

use super::data_cfg;
use crate::x86::canonical;

/// Bits of IA32_MISC_ENABLE that say what a PMU has. Both are read-only to the guest.
pub mod misc_enable {
    /// Branch trace storage is not available.
    pub const BTS_UNAVAILABLE: u64 = 1 << 11;
    /// PEBS is not available.
    pub const PEBS_UNAVAILABLE: u64 = 1 << 12;
}

/// The PEBS that a guest is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Capability {
    /// The guest's linear addresses have so many bits: 48, or 57 with five levels of page tables. IA32_DS_AREA takes
    /// only such addresses.
    pub linear_address_bits: u8,
}

impl Capability {
    /// Makes the capability for processors with four levels of page tables.
    pub const fn new() -> Self {
        Self {
            linear_address_bits: 48,
        }
    }

    /// Returns the reserved bits of MSR_PEBS_DATA_CFG.
    pub const fn data_cfg_reserved(&self) -> u64 {
        !data_cfg::ALL
    }

    /// Whether `address` is canonical.
    pub(in crate::x86) const fn is_linear(&self, address: u64) -> bool {
        // WRMSR of another address to IA32_DS_AREA is #GP (SDM vol. 2, WRMSR).
        canonical(address, self.linear_address_bits) == address
    }
}

impl Default for Capability {
    fn default() -> Self {
        Self::new()
    }
}

/// What the guest has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Registers {
    /// IA32_PEBS_ENABLE.
    pub(in crate::x86) enable: u64,
    /// IA32_DS_AREA.
    pub(in crate::x86) ds_area: u64,
    /// MSR_PEBS_DATA_CFG.
    pub(in crate::x86) data_cfg: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_address_repeats_its_highest_bit() {
        let (four, five) = (
            Capability::new(),
            Capability {
                linear_address_bits: 57,
            },
        );
        for (address, in_four, in_five) in [
            (0, true, true),
            (0x7fff_ffff_ffff, true, true),
            (0x8000_0000_0000, false, true),
            (0xff_ffff_ffff_ffff, false, true),
            (0x100_0000_0000_0000, false, false),
            (0xfeff_ffff_ffff_ffff, false, false),
            (0xff00_0000_0000_0000, false, true),
            (0xffff_8000_0000_0000, true, true),
            (u64::MAX, true, true),
        ] {
            assert_eq!(four.is_linear(address), in_four, "{address:#x}");
            assert_eq!(five.is_linear(address), in_five, "{address:#x}");
        }
    }
}
