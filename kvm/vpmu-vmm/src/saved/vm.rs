//! The parts of a machine besides its vCPUs, as KVM has them: interrupt controllers and a timer.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use crate::{Error, kvm};

#[derive(Default, Serialize, Deserialize)]
pub(crate) struct VmState {
    chips: [kvm_irqchip; 3],
    pit: kvm_pit_state2,
}

impl VmState {
    pub(crate) fn of(vm: &VmFd) -> Result<Self, Error> {
        let mut chips = [
            KVM_IRQCHIP_PIC_MASTER,
            KVM_IRQCHIP_PIC_SLAVE,
            KVM_IRQCHIP_IOAPIC,
        ]
        .map(|chip_id| kvm_irqchip {
            chip_id,
            ..Default::default()
        });
        for chip in &mut chips {
            kvm("KVM_GET_IRQCHIP", vm.get_irqchip(chip))?;
        }
        Ok(Self {
            chips,
            pit: kvm("KVM_GET_PIT2", vm.get_pit2())?,
        })
    }

    /// Restores these parts. The vCPUs' state must be restored before.
    pub(crate) fn restore(&self, vm: &VmFd) -> Result<(), Error> {
        for chip in &self.chips {
            kvm("KVM_SET_IRQCHIP", vm.set_irqchip(chip))?;
        }
        kvm("KVM_SET_PIT2", vm.set_pit2(&self.pit))
    }
}
