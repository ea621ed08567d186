//! The rights that protection keys give user space (SDM vol. 3A, 4.6.2).

use std::cell::{OnceCell, RefCell};
use std::os::fd::AsRawFd;

use kvm_bindings::kvm_xsave;

/// Reads a vCPU's PKRU.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    /// Where it is in the words of an XSAVE area, once somebody has asked.
    place: OnceCell<Option<usize>>,
    /// The last area: making and moving 4 KiB would take longer than the call.
    area: RefCell<Box<kvm_xsave>>,
}

const PKRU: u32 = 9;

impl Keys {
    /// Returns PKRU; `None`: KVM does not say.
    pub(crate) fn pkru(&self, vcpu: &impl AsRawFd) -> Option<u32> {
        const XSAVE: u32 = 0xd;
        let place = self.place.get_or_init(|| {
            let entry = super::cpuid(vcpu, XSAVE, PKRU)?;
            let (size, offset) = (entry.eax, entry.ebx as usize);
            (size >= 4 && offset.is_multiple_of(4)).then_some(offset / 4)
        });
        let mut area = self.area.borrow_mut();
        super::GET_XSAVE.fill(vcpu, &mut area).ok()?;
        rights(&area, (*place)?)
    }
}

fn rights(xsave: &kvm_xsave, place: usize) -> Option<u32> {
    /// XSTATE_BV, whose lower half has the bit.
    const PRESENT: usize = 512 / 4;
    // What is not there is in its initial state, as far as KVM knows. It keeps this register apart from the others.
    let is_there = xsave.region[PRESENT] >> PKRU & 1 != 0;
    is_there.then(|| xsave.region.get(place).copied())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_that_are_there() {
        let mut xsave = kvm_xsave::default();
        xsave.region[672] = 0x5555_5554;
        assert_eq!(rights(&xsave, 672), None);
        xsave.region[128] = 0x200;
        assert_eq!(rights(&xsave, 672), Some(0x5555_5554));
        assert_eq!(rights(&xsave, 1024), None);
    }
}
