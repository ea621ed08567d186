//! The MSRs whose accesses KVM hands to the VMM.

use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_MSR_FILTER, KVM_CAP_X86_USER_SPACE_MSR,
    KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_FILTER_DEFAULT_ALLOW, KVM_MSR_FILTER_DEFAULT_DENY,
    KVM_MSR_FILTER_MAX_BITMAP_SIZE, KVM_MSR_FILTER_MAX_RANGES, KVM_MSR_FILTER_READ,
    KVM_MSR_FILTER_WRITE, KVM_PMU_CAP_DISABLE, kvm_msr_filter,
};

use crate::error::Error;
use crate::sys;

/// A VMM's own MSR filter, as KVM_X86_SET_MSR_FILTER takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Whether accesses of MSRs in no range are handed to the VMM (KVM_MSR_FILTER_DEFAULT_DENY).
    pub denies_by_default: bool,
    /// The ranges, of which the first that has an MSR decides.
    pub ranges: Vec<FilterRange>,
}

/// A range of an MSR filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilterRange {
    /// The first MSR.
    pub base: u32,
    /// The number of MSRs.
    pub count: u32,
    /// Whether the range decides on RDMSR.
    pub reads: bool,
    /// Whether the range decides on WRMSR.
    pub writes: bool,
    /// A bit for each MSR, the lowest first: set, and KVM performs the access; clear, and the VMM gets it.
    pub allowed: Vec<u8>,
}

/// Makes KVM hand all accesses of `msrs` to the VMM, and of no others. An empty list asks KVM for nothing. Switches off
/// the PMU that KVM itself may have for this guest: a KVM that gives its guests the host's PMU (mediated vPMU) would
/// take it from perf. Call this before the first vCPU is created.
///
/// A VM has one filter, and this call replaces it. A VMM that handles MSRs of its own puts them into the list, or gives
/// its filter to [`intercept_beside`]. A VMM that wants other accesses, too (KVM_MSR_EXIT_REASON_UNKNOWN or _INVAL),
/// enables KVM_CAP_X86_USER_SPACE_MSR again after this call, with KVM_MSR_EXIT_REASON_FILTER among the reasons.
///
/// # Errors
///
/// A KVM before Linux 5.10 cannot do this. No KVM can when there is a vCPU already.
pub fn intercept(vm: &impl AsRawFd, msrs: &[u32]) -> Result<(), Error> {
    intercept_beside(vm, msrs, &Filter::default())
}

/// As [`intercept`], with the VMM's own filter behind the parts' MSRs. A VMM that changes its filter calls this again:
/// a filter that the VMM sets by itself replaces both. Such a call may come when there are vCPUs already.
///
/// # Errors
///
/// As for [`intercept`], and when KVM has too few ranges for both: it has 16, of which the MSRs of AMD's PMU take 3 and of
/// Intel's up to 9, and the deadline and RDPMC 3 more.
pub fn intercept_beside(vm: &impl AsRawFd, msrs: &[u32], own: &Filter) -> Result<(), Error> {
    sys::check_vm(vm)?;
    match disable_kvm_pmu(vm) {
        // The first call has done so.
        Err(Error::LateIntercept) if *own != Filter::default() => {}
        result => result?,
    }
    if msrs.is_empty() && *own == Filter::default() {
        return Ok(());
    }
    filter(vm, msrs, own)
}

pub(crate) fn filter(vm: &impl AsRawFd, msrs: &[u32], own: &Filter) -> Result<(), Error> {
    let has = |capability| sys::check_extension(vm, capability) != 0;
    if !has(KVM_CAP_X86_USER_SPACE_MSR) || !has(KVM_CAP_X86_MSR_FILTER) {
        return Err(Error::NoUserSpaceMsr);
    }
    // Unknown MSRs stay KVM's #GP: a guest probes many, and each exit would cost it some microseconds.
    let reasons = KVM_MSR_EXIT_REASON_FILTER.into();
    sys::enable_cap(vm, KVM_CAP_X86_USER_SPACE_MSR, reasons)?;

    // KVM stops at the first range that has an MSR, so the parts' MSRs come before the VMM's.
    let ranges = [runs(msrs), own.ranges.clone()].concat();
    if ranges.iter().any(|range| range.count > LARGEST) {
        return Err(Error::Kvm("KVM_X86_SET_MSR_FILTER", libc::EINVAL));
    }
    let mut filter = kvm_msr_filter::default();
    if ranges.len() > filter.ranges.len() {
        return Err(Error::Kvm("KVM_X86_SET_MSR_FILTER", libc::E2BIG));
    }
    let mut bitmaps: Vec<Vec<u8>> = ranges.iter().map(FilterRange::bitmap).collect();
    for ((place, range), bitmap) in filter.ranges.iter_mut().zip(&ranges).zip(&mut bitmaps) {
        // The padding stays zero: the kernel reads that, too.
        (place.flags, place.base, place.nmsrs) = (range.flags(), range.base, range.count);
        place.bitmap = bitmap.as_mut_ptr();
    }
    filter.flags = match own.denies_by_default {
        true => KVM_MSR_FILTER_DEFAULT_DENY,
        false => KVM_MSR_FILTER_DEFAULT_ALLOW,
    };
    // Reads the bitmaps, too, which are kept while this runs.
    sys::X86_SET_MSR_FILTER.set(vm, &filter)
}

impl FilterRange {
    /// Returns a bit for each MSR. What `allowed` is too short for is denied.
    fn bitmap(&self) -> Vec<u8> {
        let mut bitmap = self.allowed.clone();
        // KVM reads whole words of 64 bits.
        bitmap.resize(self.count.div_ceil(64) as usize * size_of::<u64>(), 0);
        bitmap
    }

    fn flags(&self) -> u32 {
        let reads = if self.reads { KVM_MSR_FILTER_READ } else { 0 };
        let writes = if self.writes { KVM_MSR_FILTER_WRITE } else { 0 };
        reads | writes
    }
}

const _: () = assert!(KVM_MSR_FILTER_MAX_RANGES == 16);
/// MSRs in a range: KVM takes bitmaps of so many bits.
const LARGEST: u32 = KVM_MSR_FILTER_MAX_BITMAP_SIZE * u8::BITS;

/// Returns the ranges of MSRs that are handed over: a clear bit denies, and KVM hands denied accesses to the VMM.
fn runs(msrs: &[u32]) -> Vec<FilterRange> {
    let mut addresses = msrs.to_vec();
    // KVM has 16 ranges, and neighbours share one.
    addresses.sort_unstable();
    addresses.dedup();
    addresses
        .chunk_by(|a, b| b - a == 1)
        .flat_map(|run| run.chunks(LARGEST as usize))
        .map(|run| FilterRange {
            base: run[0],
            count: run.len() as u32,
            reads: true,
            // An RDPMC reads only. Writes of what MSRs there may be are KVM's.
            writes: !crate::rdpmc::is_index(run[0]),
            allowed: Vec::new(),
        })
        .collect()
}

fn disable_kvm_pmu(vm: &impl AsRawFd) -> Result<(), Error> {
    let known = sys::check_extension(vm, KVM_CAP_PMU_CAPABILITY);
    // Before Linux 5.18 KVM has no such switch. The filter keeps the guest from KVM's PMU all the same.
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
    use vpmu::x86::{Capability, amd, intel, pebs};

    use super::*;

    #[test]
    fn a_pmus_msrs_are_few_runs() {
        let intel = |version, pebs| {
            Capability::from(intel::Capability {
                pebs,
                ..intel::Capability::new(version)
            })
        };
        let pebs = Some(pebs::Capability::new());
        let amd = Capability::from(amd::Capability::new(amd::Interface::Core));
        // What the documentation says.
        for (capability, most, run) in [
            (intel(intel::Version::V2, None), 9, (0x38d, 6)),
            (intel(intel::Version::V5, pebs), 9, (0x38d, 6)),
            (amd, 3, (0xc001_0200, 12)),
        ] {
            let msrs: Vec<u32> = capability.msrs().collect();
            let runs = runs(&msrs).into_iter().map(|run| (run.base, run.count));
            let runs: Vec<(u32, u32)> = runs.collect();
            assert!(runs.len() <= most, "{runs:x?}");
            assert!(runs.contains(&run));
            let all = runs.iter().map(|run| run.1 as usize).sum::<usize>();
            assert_eq!(all, msrs.len());
        }
    }

    #[test]
    fn a_long_run_is_cut() {
        let msrs: Vec<u32> = (0..LARGEST + 44).rev().chain([7]).collect();
        let runs = runs(&msrs);
        let counts: Vec<(u32, u32)> = runs.iter().map(|run| (run.base, run.count)).collect();
        assert_eq!(counts, [(0, LARGEST), (LARGEST, 44)]);
        // As the kernel reads it: whole words.
        assert_eq!(runs[1].bitmap(), [0; 8]);
    }
}
