//! The local APIC, which KVM keeps: its registers, and an interrupt for it.

use std::os::fd::AsRawFd;

use kvm_bindings::{kvm_lapic_state, kvm_msi};

use crate::error::Error;
use crate::sys;

/// An LVT register that asks for an NMI (SDM vol. 3A, figure 11-8).
pub(crate) const NMI: u32 = 0x400;

/// The registers (SDM vol. 3A, table 11-1), as KVM_GET_LAPIC gives them.
pub(crate) struct Lapic(kvm_lapic_state);

impl Lapic {
    /// Reads the registers of a vCPU that does not run.
    pub(crate) fn of(vcpu: &impl AsRawFd) -> Result<Self, Error> {
        sys::GET_LAPIC.get(vcpu).map(Self)
    }

    fn register(&self, offset: usize) -> u32 {
        let bytes = [0, 1, 2, 3].map(|n| self.0.regs[offset + n] as u8);
        u32::from_le_bytes(bytes)
    }

    /// Returns the APIC's ID. With KVM_CAP_X2APIC_API, an x2APIC's is the whole register; else it is the uppermost byte.
    pub(crate) fn id(&self) -> u32 {
        let register = self.register(0x20);
        // The format depends on a capability of the VM's that cannot be read back. An ID of 0 is the same in both.
        let is_whole = register << 8 != 0;
        if is_whole { register } else { register >> 24 }
    }

    pub(crate) fn lvtpc(&self) -> u32 {
        self.register(0x340)
    }

    pub(crate) fn lvt_timer(&self) -> u32 {
        self.register(0x320)
    }
}

/// Sends a fixed interrupt to the processor with this APIC, if there is one: a guest may give its APIC
/// another ID at any time.
pub(crate) fn signal(vm: &impl AsRawFd, id: u32, vector: u8) -> Result<(), Error> {
    // Sent by ID, as a device would: KVM has no call that raises LVTPC itself.
    let message = kvm_msi {
        address_lo: 0xfee0_0000 | (id & 0xff) << 12,
        // KVM reads this with KVM_CAP_X2APIC_API only. Without it, no ID is as large.
        address_hi: id & !0xff,
        data: vector.into(),
        ..Default::default()
    };
    match sys::SIGNAL_MSI.set(vm, &message) {
        // KVM's -1 for "nobody".
        Err(Error::Kvm(_, libc::EPERM)) => Ok(()),
        result => result,
    }
}

/// The delivery of a PMI to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pmi {
    /// As an NMI.
    Nmi,
    /// As a fixed interrupt of this vector, 16 or above.
    Vector(u8),
}

impl Pmi {
    /// Returns the delivery that LVTPC asks for (SDM vol. 3A, figure 11-8). `None`: LVTPC is masked.
    pub(crate) fn of(lvtpc: u32) -> Option<Self> {
        const MASKED: u32 = 1 << 16;
        match (lvtpc >> 8 & 0b111, lvtpc as u8) {
            _ if lvtpc & MASKED != 0 => None,
            (0b100, _) => Some(Self::Nmi),
            // A vector below 16 is illegal: nothing is delivered.
            // The guest's local APIC would note an error for a lower one, which KVM_SIGNAL_MSI does not.
            (0b000, vector @ 16..) => Some(Self::Vector(vector)),
            // SMI and INIT are legal and not offered; the rest is reserved.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_found_in_either_format() {
        let id = |register: u32| {
            let mut lapic = kvm_lapic_state::default();
            for (to, from) in lapic.regs[0x20..].iter_mut().zip(register.to_le_bytes()) {
                *to = from.cast_signed();
            }
            Lapic(lapic).id()
        };
        assert_eq!(id(0), 0);
        assert_eq!(id(3 << 24), 3, "an xAPIC, or without the capability");
        assert_eq!(id(0xff << 24), 0xff);
        assert_eq!(id(3), 3, "an x2APIC, with the capability");
        assert_eq!(id(0x1234), 0x1234);
    }

    #[test]
    fn lvtpc_says_what_is_delivered() {
        assert_eq!(Pmi::of(0x400), Some(Pmi::Nmi));
        assert_eq!(Pmi::of(0x4fe), Some(Pmi::Nmi));
        assert_eq!(Pmi::of(0x1_0400), None);
        assert_eq!(Pmi::of(0xee), Some(Pmi::Vector(0xee)));
        assert_eq!(Pmi::of(0x0f), None);
        assert_eq!(Pmi::of(0x7ee), None, "ExtINT");
    }
}
