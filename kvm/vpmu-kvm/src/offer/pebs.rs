//! PEBS, where this host can make its records.

use std::fs;

use vpmu_perf::Backing;

use crate::error::Error;
use crate::options::{Options, Pebs, Skid};

/// Returns the number of bits of a linear address of this machine's processor, and so of its guests.
pub(super) fn linear_address_bits() -> u8 {
    let has_five_levels = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "la57"))
    });
    if has_five_levels { 57 } else { 48 }
}

/// Checks that the records are as precise as PEBS has them, or that the VMM accepts those that are not.
///
/// An overflow of hardware counters is reported some instructions late. A precise host event would not be, but no such event
/// counts a guest. Linux's `intel_guest_get_msrs` takes each precise event out of the guest's IA32_PERF_GLOBAL_CTRL, but for
/// those of KVM's own PMU: the host's records would be written to the host's addresses by the guest's page tables. AMD's
/// `perf_ibs_init` answers EINVAL to an event that leaves the host out. And no register says so to a guest: Linux takes each PEBS for
/// a constant skid of one instruction at most (`x86_pmu_max_precise`), whatever the format.
///
/// # Errors
///
/// When records would be late.
pub(super) fn check_skid(skid: Skid, backing: Backing) -> Result<(), Error> {
    match (backing, skid) {
        (Backing::Hardware, Skid::Refused) => Err(Error::PebsSkid),
        (Backing::Hardware, Skid::Accepted) | (Backing::Clock, _) => Ok(()),
    }
}

/// Returns whether the host's kernel is to sample a guest that has PEBS.
///
/// # Errors
///
/// When it is to, and cannot.
pub(crate) fn samples(options: &Options) -> Result<bool, Error> {
    // Asked only where it matters: the check opens an event with a ring buffer.
    let can = || vpmu_perf::check_sampling(&options.perf());
    match options.pebs {
        Pebs::Exit => Ok(false),
        Pebs::Buffer => Ok(can().map(|()| true)?),
        Pebs::Auto => Ok(can().is_ok()),
    }
}
