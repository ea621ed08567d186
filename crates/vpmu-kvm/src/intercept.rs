//! Which MSRs come to the VMM, and that they are nobody else's.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_PMU_CAP_DISABLE, kvm_enable_cap,
};
use kvm_ioctls::{
    Cap, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd,
};
use vpmu::x86::intel::Msr;

use crate::error::{Error, kvm};

/// Every MSR of a PMU, for [`intercept`].
pub fn pmu_msrs() -> impl Iterator<Item = u32> {
    Msr::all().map(Msr::address)
}

/// Switches off the PMU that KVM itself may have for this VM's guest. Before the first vCPU is created:
/// with that, a KVM that gives its guests the host's PMU (mediated vPMU) takes it from perf.
///
/// # Errors
///
/// When KVM refuses. One without a PMU has nothing to switch off.
pub fn disable_kvm_pmu(vm: &VmFd) -> Result<(), Error> {
    let known = vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if known & KVM_PMU_CAP_DISABLE.cast_signed() == 0 {
        return Ok(());
    }
    let cap = capability(KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE.into());
    kvm("KVM_CAP_PMU_CAPABILITY", vm.enable_cap(&cap))
}

fn capability(cap: u32, argument: u64) -> kvm_enable_cap {
    kvm_enable_cap {
        cap,
        args: [argument, 0, 0, 0],
        ..Default::default()
    }
}

/// Has KVM hand all accesses of `msrs` to the VMM, and of no others. Before the first vCPU runs.
///
/// # Errors
///
/// A KVM before Linux 5.10 cannot.
pub fn intercept(vm: &VmFd, msrs: impl IntoIterator<Item = u32>) -> Result<(), Error> {
    if !vm.check_extension(Cap::X86UserSpaceMsr) || !vm.check_extension(Cap::X86MsrFilter) {
        return Err(Error::NoUserSpaceMsr);
    }
    let reasons = MsrExitReason::Filter.bits();
    let cap = capability(KVM_CAP_X86_USER_SPACE_MSR, reasons.into());
    kvm("KVM_CAP_X86_USER_SPACE_MSR", vm.enable_cap(&cap))?;

    let mut addresses: Vec<u32> = msrs.into_iter().collect();
    addresses.sort_unstable();
    addresses.dedup();
    let ranges: Vec<MsrFilterRange<'_>> = addresses
        .chunk_by(|a, b| b - a == 1)
        .map(|run| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: run[0],
            msr_count: run.len() as u32,
            // A clear bit denies, and what is denied comes to us. No run is longer than 8.
            bitmap: &[0; 4],
        })
        .collect();
    kvm(
        "KVM_X86_SET_MSR_FILTER",
        vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges),
    )
}
