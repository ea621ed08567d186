//! The rights that protection keys give user space (SDM vol. 3A, 4.6.2).

use std::os::fd::AsRawFd;

use kvm_bindings::kvm_xsave;

/// Where a vCPU's XSAVE area has PKRU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place(usize);

const PKRU: u32 = 9;

impl Place {
    /// Asks the CPUID that the vCPU's guest was told.
    pub(crate) fn of(vcpu: &impl AsRawFd) -> Option<Self> {
        const XSAVE: u32 = 0xd;
        let entry = super::cpuid(vcpu, XSAVE, PKRU)?;
        let (size, offset) = (entry.eax, entry.ebx as usize);
        (size >= 4 && offset.is_multiple_of(4)).then_some(Self(offset / 4))
    }
}

/// Returns a vCPU's PKRU; `None`: KVM does not tell.
pub(crate) fn pkru(vcpu: &impl AsRawFd, place: Place) -> Option<u32> {
    rights(&super::xsave(vcpu).ok()?, place)
}

fn rights(xsave: &kvm_xsave, place: Place) -> Option<u32> {
    /// XSTATE_BV, whose lower half has the bit.
    const PRESENT: usize = 512 / 4;
    // What is not there is in its initial state, as far as KVM knows. It keeps this register apart from the others.
    let is_there = xsave.region[PRESENT] >> PKRU & 1 != 0;
    is_there.then(|| xsave.region.get(place.0).copied())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_that_are_there() {
        let mut xsave = kvm_xsave::default();
        xsave.region[672] = 0x5555_5554;
        assert_eq!(rights(&xsave, Place(672)), None);
        xsave.region[128] = 0x200;
        assert_eq!(rights(&xsave, Place(672)), Some(0x5555_5554));
        assert_eq!(rights(&xsave, Place(1024)), None);
    }
}
