//! The program's own accesses of a vCPU's MSRs: it saves, restores and resets registers by number.

use std::ffi::{c_int, c_void};

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_msrs};
use vpmu_kvm::{Offer, Outcome, Vcpu};

use crate::{next, requests};

const MISC_ENABLE: u32 = 0x1a0;
const PERF_CAPABILITIES: u32 = 0x345;

/// Returns the entries behind `kvm_msrs`.
///
/// # Safety
///
/// `argument` points to as many entries as it says, which nobody else uses meanwhile.
unsafe fn entries<'a>(argument: *mut c_void) -> &'a mut [kvm_msr_entry] {
    let head: *mut kvm_msrs = argument.cast();
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(head.add(1).cast(), (*head).nmsrs as usize) }
}

/// Hands `entries` to KVM. Returns its answer: how many it has taken, from the first on.
fn of_kvm(vcpu: c_int, request: std::ffi::c_ulong, entries: &mut [kvm_msr_entry]) -> c_int {
    if entries.is_empty() {
        return 0;
    }
    // KVM takes no more, either.
    let Ok(mut all) = Msrs::from_entries(entries) else {
        return next::fail(libc::E2BIG);
    };
    let answer = next::ioctl(vcpu, request, all.as_mut_fam_struct_ptr().cast());
    entries.copy_from_slice(all.as_slice());
    answer
}

/// Answers one of both requests: `own` takes the PMU's registers, and says `None` for others, which KVM takes. The answer is
/// the number of registers from the first on that were taken.
fn split(
    entries: &mut [kvm_msr_entry],
    mut own: impl FnMut(&mut kvm_msr_entry) -> Option<bool>,
    kvm: impl FnOnce(&mut [kvm_msr_entry]) -> c_int,
) -> c_int {
    let mut others = Vec::new();
    let mut refused = entries.len();
    for (at, entry) in entries.iter_mut().enumerate() {
        match own(entry) {
            None => others.push((at, *entry)),
            Some(true) => {}
            Some(false) => {
                refused = at;
                break;
            }
        }
    }
    let mut for_kvm: Vec<kvm_msr_entry> = others.iter().map(|(_, entry)| *entry).collect();
    let answer = kvm(&mut for_kvm);
    let Ok(taken) = usize::try_from(answer) else {
        return answer;
    };
    for ((at, _), entry) in others.iter().zip(&for_kvm) {
        entries[*at] = *entry;
    }
    let first_left = others.get(taken).map_or(refused, |(at, _)| *at);
    c_int::try_from(first_left).unwrap_or(c_int::MAX)
}

/// Answers KVM_GET_MSRS.
///
/// # Safety
///
/// `argument` is that request's.
pub(crate) unsafe fn get(vcpu: &mut Vcpu, fd: c_int, argument: *mut c_void) -> c_int {
    let ours = vcpu.offer().msrs();
    let own = |entry: &mut kvm_msr_entry| {
        ours.contains(&entry.index).then(|| {
            // A register that can only be written reads as 0, as with KVM's own PMU.
            entry.data = vcpu.msr(entry.index).unwrap_or(0);
            true
        })
    };
    // SAFETY: the caller's promise.
    let entries = unsafe { entries(argument) };
    split(entries, own, |others| {
        of_kvm(fd, requests::GET_MSRS, others)
    })
}

/// Answers KVM_SET_MSRS.
///
/// # Safety
///
/// `argument` is that request's.
pub(crate) unsafe fn set(
    vcpu: &mut Vcpu,
    offer: &Offer,
    fd: c_int,
    argument: *mut c_void,
) -> c_int {
    let ours = offer.msrs();
    let own = |entry: &mut kvm_msr_entry| match entry.index {
        // The program knows KVM's, and this one cannot be changed.
        PERF_CAPABILITIES if ours.contains(&entry.index) => Some(true),
        MISC_ENABLE => {
            entry.data = offer.misc_enable(entry.data);
            None
        }
        index if ours.contains(&index) => {
            Some(vcpu.set_msr(index, entry.data) != Outcome::GeneralProtection)
        }
        _ => None,
    };
    // SAFETY: the caller's promise. The program's own entries stay as they are.
    let mut entries = unsafe { entries(argument) }.to_vec();
    split(&mut entries, own, |others| {
        of_kvm(fd, requests::SET_MSRS, others)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32) -> kvm_msr_entry {
        kvm_msr_entry {
            index,
            ..Default::default()
        }
    }

    /// Splits registers 0 to 5, of which the odd ones are the PMU's, between a PMU that refuses `refused` and a KVM that takes
    /// `taken`.
    fn answer(refused: u32, taken: c_int) -> (c_int, Vec<u64>) {
        let mut entries: Vec<_> = (0..6).map(entry).collect();
        let own = |entry: &mut kvm_msr_entry| {
            let is_own = entry.index % 2 == 1;
            entry.data = if is_own { 1 } else { 0 };
            is_own.then_some(entry.index != refused)
        };
        let answer = split(&mut entries, own, |others| {
            assert!(others.iter().all(|entry| entry.index % 2 == 0));
            others.iter_mut().for_each(|entry| entry.data = 2);
            taken.min(others.len() as c_int)
        });
        (answer, entries.iter().map(|entry| entry.data).collect())
    }

    #[test]
    fn the_answer_counts_from_the_first_register_on() {
        assert_eq!(answer(9, 3), (6, vec![2, 1, 2, 1, 2, 1]));
        assert_eq!(answer(9, 1).0, 2, "KVM refuses the second of its own");
        assert_eq!(answer(3, 3).0, 3, "the PMU refuses its second");
        assert_eq!(answer(3, 1).0, 2, "KVM's comes first");
        assert_eq!(answer(9, -1).0, -1);
    }
}
