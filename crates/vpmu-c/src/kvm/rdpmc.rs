//! The places in a guest's code by which RDPMC comes to the VMM, as bytes.

use std::sync::Arc;

use vpmu_kvm::{Rdpmc, RdpmcState};

use super::handle::{damaged, misuse};
use super::vm::{VMS, VpmuKvmVm};
use crate::room::promised;
use crate::{VpmuStatus, state};

/// Answers what `act` does with the VM's places.
fn with(vm: *const VpmuKvmVm, act: impl FnOnce(&Rdpmc) -> VpmuStatus) -> VpmuStatus {
    match VMS.find(vm).map(|vm| vm.rdpmc.as_ref().map(Arc::clone)) {
        Ok(Some(rdpmc)) => act(&rdpmc),
        Ok(None) => misuse("the VM was opened without rdpmc"),
        Err(status) => status,
    }
}

/// Writes the places in the guest's code by which RDPMC comes to the VMM to the `room` bytes at `buffer`, and the number of
/// bytes to `length`, while no vCPU runs. They go with the guest's memory, which has the changed instructions.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_save_rdpmc(
    vm: *const VpmuKvmVm,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    with(vm, |rdpmc| {
        match promised!(state::save(|| rdpmc.save(), buffer, room, length)) {
            VpmuStatus::Misuse => misuse(
                "a buffer, and a place for its length, at an address that is a multiple of 8",
            ),
            status => status,
        }
    })
}

/// Knows the places in the `length` bytes at `buffer`, which `vpmu_kvm_save_rdpmc` has written. Before a vCPU runs.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_restore_rdpmc(
    vm: *const VpmuKvmVm,
    buffer: *const u8,
    length: usize,
) -> VpmuStatus {
    let saved: Option<RdpmcState> = promised!(state::read(buffer, length));
    with(vm, |rdpmc| match &saved {
        Some(saved) => {
            rdpmc.restore(saved);
            VpmuStatus::Ok
        }
        None => damaged(),
    })
}
