//! A vCPU's TSC, as KVM tells it.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::{Error, kvm};

pub(crate) const IA32_TSC: u32 = 0x10;

/// Returns the present TSC.
pub(crate) fn tsc(vcpu: &VcpuFd) -> Result<u64, Error> {
    let entry = kvm_msr_entry {
        index: IA32_TSC,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).expect("one MSR fits");
    kvm("KVM_GET_MSRS", vcpu.get_msrs(&mut msrs))?;
    Ok(msrs.as_slice()[0].data)
}
