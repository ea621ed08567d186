//! The MSRs that KVM hands to the VMM, and to nobody else.

use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_MSR_FILTER, KVM_CAP_X86_USER_SPACE_MSR,
    KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_FILTER_DEFAULT_ALLOW, KVM_MSR_FILTER_MAX_RANGES,
    KVM_MSR_FILTER_READ, KVM_MSR_FILTER_WRITE, KVM_PMU_CAP_DISABLE, kvm_msr_filter,
    kvm_msr_filter_range,
};

use crate::error::Error;
use crate::sys;

/// Makes KVM hand all accesses of `msrs` to the VMM, and of no others. An empty list asks KVM for nothing. Switches off
/// the PMU that KVM itself may have for this guest: a KVM that gives its guests the host's PMU (mediated vPMU) would
/// take it from perf. Call this before the first vCPU is created.
///
/// A VM has one filter, and this call replaces it. A VMM that handles MSRs of its own puts them into the list. A VMM that
/// wants other accesses, too (KVM_MSR_EXIT_REASON_UNKNOWN or _INVAL), enables KVM_CAP_X86_USER_SPACE_MSR again behind this
/// call, with KVM_MSR_EXIT_REASON_FILTER among its reasons.
///
/// # Errors
///
/// A KVM before Linux 5.10 cannot do this. No KVM can when there is a vCPU already.
pub fn intercept(vm: &impl AsRawFd, msrs: &[u32]) -> Result<(), Error> {
    disable_kvm_pmu(vm)?;
    if msrs.is_empty() {
        return Ok(());
    }
    filter(vm, msrs)
}

pub(crate) fn filter(vm: &impl AsRawFd, msrs: &[u32]) -> Result<(), Error> {
    let has = |capability| sys::check_extension(vm, capability) != 0;
    if !has(KVM_CAP_X86_USER_SPACE_MSR) || !has(KVM_CAP_X86_MSR_FILTER) {
        return Err(Error::NoUserSpaceMsr);
    }
    let reasons = KVM_MSR_EXIT_REASON_FILTER.into();
    sys::enable_cap(vm, KVM_CAP_X86_USER_SPACE_MSR, reasons)?;

    // A clear bit denies, and KVM hands denied accesses to the VMM.
    let mut denied = [0_u8; DENIED];
    let mut filter = kvm_msr_filter {
        flags: KVM_MSR_FILTER_DEFAULT_ALLOW,
        ..Default::default()
    };
    let runs = runs(msrs);
    if runs.len() > filter.ranges.len() {
        return Err(Error::Kvm("KVM_X86_SET_MSR_FILTER", libc::E2BIG));
    }
    for (range, (base, nmsrs)) in filter.ranges.iter_mut().zip(runs) {
        *range = kvm_msr_filter_range {
            flags: KVM_MSR_FILTER_READ | KVM_MSR_FILTER_WRITE,
            base,
            nmsrs,
            bitmap: denied.as_mut_ptr(),
        };
    }
    sys::set_msr_filter(vm, &filter)
}

const _: () = assert!(KVM_MSR_FILTER_MAX_RANGES == 16);
/// Bytes of a bitmap for the longest run.
const DENIED: usize = LONGEST.div_ceil(8) as usize;
/// MSRs in a run.
const LONGEST: u32 = 256;

/// Returns first MSRs, each with the number of MSRs in its run.
fn runs(msrs: &[u32]) -> Vec<(u32, u32)> {
    let mut addresses = msrs.to_vec();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
        .chunk_by(|a, b| b - a == 1)
        .flat_map(|run| run.chunks(LONGEST as usize))
        .map(|run| (run[0], run.len() as u32))
        .collect()
}

fn disable_kvm_pmu(vm: &impl AsRawFd) -> Result<(), Error> {
    let known = sys::check_extension(vm, KVM_CAP_PMU_CAPABILITY);
    if known & KVM_PMU_CAP_DISABLE == 0 {
        return Ok(());
    }
    match sys::enable_cap(vm, KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE.into()) {
        Err(Error::Kvm(_, libc::EINVAL)) => Err(Error::LateIntercept),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use vpmu::x86::{Capability, amd, intel};

    use super::*;

    #[test]
    fn a_pmus_msrs_are_few_runs() {
        let intel = Capability::from(intel::Capability::new(intel::Version::V2));
        let amd = Capability::from(amd::Capability::new(amd::Interface::Core));
        for (capability, run) in [(intel, (0x38d, 6)), (amd, (0xc001_0200, 12))] {
            let msrs: Vec<u32> = capability.msrs().collect();
            let runs = runs(&msrs);
            assert!(
                runs.len() <= KVM_MSR_FILTER_MAX_RANGES as usize - 8,
                "{runs:x?}"
            );
            assert!(runs.contains(&run));
            let all = runs.iter().map(|run| run.1 as usize).sum::<usize>();
            assert_eq!(all, msrs.len());
        }
    }

    #[test]
    fn a_long_run_is_cut() {
        let msrs: Vec<u32> = (0..300).rev().chain([7]).collect();
        assert_eq!(runs(&msrs), [(0, 256), (256, 44)]);
    }
}
