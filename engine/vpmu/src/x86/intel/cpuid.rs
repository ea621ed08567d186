//! What a guest reads of its PMU in CPUID.

use super::capability::when;
use super::{Capability, Version};
use crate::counter::CounterSet;
use crate::x86::CpuidLeaf;
use crate::x86::pebs::misc_enable;

impl Capability {
    /// Returns CPUID leaf 0AH.
    pub const fn leaf_0a(&self) -> CpuidLeaf {
        let known = self.known_events();
        let length = known.count_ones();
        // EDX counts from 0 up to the first gap; ECX has the others.
        let count = self.fixed.trailing_ones();
        let v5 = matches!(self.version, Version::V5);
        CpuidLeaf {
            eax: self.version.number() as u32
                | (self.general as u32) << 8
                | (self.general_width as u32) << 16
                | length << 24,
            ebx: !self.events & known,
            // Reserved before version 5, where software goes by the number in EDX.
            ecx: if v5 { self.fixed } else { 0 },
            // Bit 15: AnyThread is deprecated.
            edx: count | (self.fixed_width as u32) << 5 | (v5 as u32) << 15,
        }
    }

    /// Returns CPUID leaf 23H, if it is offered: subleaf 0 says which others there are, 1 which counters, 3 which
    /// events.
    pub const fn leaf_23(&self, subleaf: u32) -> CpuidLeaf {
        let (eax, ebx) = match subleaf {
            _ if !self.leaf_23 => (0, 0),
            0 => (1 << 0 | 1 << 1 | 1 << 3, 0),
            1 => (CounterSet::first(self.general).bits(), self.fixed),
            3 => (self.events, 0),
            _ => (0, 0),
        };
        CpuidLeaf {
            eax,
            ebx,
            ecx: 0,
            edx: 0,
        }
    }

    /// Returns the bits of CPUID.01H:ECX that say what this PMU has: DTES64 and PDCM.
    pub const fn leaf_01_ecx(&self) -> u32 {
        (self.pebs.is_some() as u32) << 2 | (self.pdcm as u32) << 15
    }

    /// Returns the bits of CPUID.01H:EDX that say what this PMU has: DS.
    pub const fn leaf_01_edx(&self) -> u32 {
        (self.pebs.is_some() as u32) << 21
    }

    /// Returns the bits of IA32_MISC_ENABLE that say what this PMU lacks, for the implementer of that MSR.
    pub const fn misc_enable(&self) -> u64 {
        // Branch trace store writes a record of each branch, and nobody hands all branches over.
        misc_enable::BTS_UNAVAILABLE | when(self.pebs.is_none(), misc_enable::PEBS_UNAVAILABLE)
    }

    /// Returns the bits of CPUID.(07H,0):EDX that say what this PMU has: architectural LBR.
    pub const fn leaf_07_edx(&self) -> u32 {
        (self.lbr.is_some() as u32) << 19
    }

    /// Returns CPUID leaf 1CH: the last branch records. All zero where there are none.
    pub const fn leaf_1c(&self) -> CpuidLeaf {
        match self.lbr {
            Some(lbr) => lbr.leaf_1c(),
            None => CpuidLeaf {
                eax: 0,
                ebx: 0,
                ecx: 0,
                edx: 0,
            },
        }
    }

    /// Returns the bits of CPUID.(07H,1):EAX that say what this PMU has: leaf 23H.
    pub const fn leaf_07_1_eax(&self) -> u32 {
        (self.leaf_23 as u32) << 8
    }

    /// Bits of CPUID.0AH:EBX that have a meaning: seven, or eight where topdown slots are there.
    const fn known_events(&self) -> u32 {
        // Without topdown slots the vector has seven bits, as on processors that did not know of them.
        if self.events & 0x80 != 0 { 0xff } else { 0x7f }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_5_enumerates_fixed_counters_by_a_bitmap() {
        let capability = Capability {
            fixed: 0b1011,
            events: 0xfd,
            leaf_23: true,
            ..Capability::new(Version::V5)
        };
        assert_eq!(capability.check(), Ok(()));
        let leaf = capability.leaf_0a();
        assert_eq!(leaf.eax, 0x0830_0805);
        assert_eq!(leaf.ebx, 0x02, "instructions are not available");
        assert_eq!(leaf.ecx, 0b1011);
        assert_eq!(leaf.edx, 0x8000 | 48 << 5 | 2, "two without a gap");
        assert_eq!(capability.leaf_23(0).eax, 0b1011);
        assert_eq!(capability.leaf_23(1).eax, 0xff);
        assert_eq!(capability.leaf_23(1).ebx, 0b1011);
        assert_eq!(capability.leaf_23(3).eax, 0xfd);
        assert_eq!(capability.leaf_23(2), CpuidLeaf::default());
        assert_eq!(capability.leaf_07_1_eax(), 1 << 8);
    }
}
