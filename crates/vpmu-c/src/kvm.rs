//! The engine on Linux KVM, over descriptors: `vpmu-kvm` for VMMs written in C.

use core::ffi::{c_char, c_int};
use core::slice;
use std::cell::RefCell;
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};

use vpmu_kvm::{Capability, CpuidEntry, Error, Model, Options, State, VcpuPmu};

use crate::{VpmuStatus, room, state};

/// One vCPU's PMU, counted by perf events of the vCPU's thread.
#[derive(Debug)]
pub struct VpmuKvm(VcpuPmu);

/// One entry of a vCPU's CPUID, laid out as Linux's `struct kvm_cpuid_entry2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuKvmCpuid {
    /// The leaf.
    pub function: u32,
    /// The subleaf.
    pub index: u32,
    /// Bit 0: the subleaf matters.
    pub flags: u32,
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
    /// Zero.
    pub padding: [u32; 3],
}

/// The PMU that guests are offered, for `vpmu_kvm_choose`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VpmuKvmModel {
    /// AMD's where the host's processor is AMD's, else Intel's.
    Auto = 0,
    /// Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
    Intel = 1,
    /// AMD's core extension: six counters, without global registers.
    Amd = 2,
    /// AMD's PerfMonV2.
    AmdV2 = 3,
}

/// The choice of this process.
static MODEL: AtomicU32 = AtomicU32::new(VpmuKvmModel::Auto as u32);

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// What an error is for C; its text stays for `vpmu_kvm_error`.
fn failed(error: &Error) -> VpmuStatus {
    let text = CString::new(error.to_string()).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = text);
    match error {
        Error::State(_) | Error::StateVersion(_) => VpmuStatus::State,
        Error::Config(_) | Error::Event(_) => VpmuStatus::Config,
        _ => VpmuStatus::Host,
    }
}

fn status(result: Result<(), Error>) -> VpmuStatus {
    match result {
        Ok(()) => VpmuStatus::Ok,
        Err(error) => failed(&error),
    }
}

/// The PMU at `pmu`.
///
/// # Safety
///
/// `pmu` is null or what `vpmu_kvm_attach` gave, and nobody else uses it meanwhile.
unsafe fn held<'a>(pmu: *mut VpmuKvm) -> Option<&'a mut VcpuPmu> {
    // SAFETY: as the caller promises.
    unsafe { pmu.as_mut() }.map(|pmu| &mut pmu.0)
}

/// What was wrong with this thread's last call that answered `VPMU_STATUS_HOST`, `_CONFIG` or `_STATE`,
/// and what to do about it. Good until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

fn model(number: u32) -> Option<Model> {
    const MODELS: [(VpmuKvmModel, Model); 4] = [
        (VpmuKvmModel::Auto, Model::Auto),
        (VpmuKvmModel::Intel, Model::Intel),
        (VpmuKvmModel::Amd, Model::Amd),
        (VpmuKvmModel::AmdV2, Model::AmdV2),
    ];
    let mut models = MODELS.into_iter();
    models.find_map(|(name, model)| (name as u32 == number).then_some(model))
}

fn options() -> Options {
    Options {
        model: model(MODEL.load(Ordering::Relaxed)).unwrap_or_default(),
        ..Options::default()
    }
}

/// The PMU that this host can back, of the chosen model.
fn detect() -> Result<Capability, Error> {
    vpmu_kvm::detect(&options())
}

/// Chooses the PMU of all guests of this process by an `enum vpmu_kvm_model`, before the other calls. Without this call
/// it is `VPMU_KVM_MODEL_AUTO`. `VPMU_STATUS_MISUSE`: there is no such model.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_choose(number: u32) -> VpmuStatus {
    if model(number).is_none() {
        return VpmuStatus::Misuse;
    }
    MODEL.store(number, Ordering::Relaxed);
    VpmuStatus::Ok
}

/// Has KVM hand the PMU's MSRs over, and no others, and switches off KVM's own PMU. Before the first
/// vCPU is made.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_intercept(vm: c_int) -> VpmuStatus {
    status(detect().and_then(|found| vpmu_kvm::intercept(&vm, &vpmu_kvm::pmu_msrs(&found))))
}

/// Makes the CPUID in `*count` entries that of a processor with the PMU that this host can back, after the
/// VMM's own changes. There is room for `room` entries; the PMU may need three more than there are.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_cpuid(
    entries: *mut VpmuKvmCpuid,
    count: *mut usize,
    room: usize,
    tsc_khz: u32,
) -> VpmuStatus {
    // SAFETY: as the caller promises.
    let Some(count) = (unsafe { room::out(count) }) else {
        return VpmuStatus::Misuse;
    };
    if entries.is_null() || *count > room {
        return VpmuStatus::Misuse;
    }
    let capability = match detect() {
        Ok(capability) => capability,
        Err(error) => return failed(&error),
    };
    // SAFETY: as the caller promises.
    let entries = unsafe { slice::from_raw_parts_mut(entries, room) };
    let numbers = |e: &VpmuKvmCpuid| [e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx];
    let given = entries.iter().take(*count);
    let mut leaves: Vec<CpuidEntry> = given.map(|entry| numbers(entry).into()).collect();
    vpmu_kvm::set_cpuid(&mut leaves, &capability, tsc_khz);
    if leaves.len() > room {
        return VpmuStatus::Room;
    }
    *count = leaves.len();
    for (entry, leaf) in entries.iter_mut().zip(leaves) {
        let [function, index, flags, eax, ebx, ecx, edx] = leaf.into();
        *entry = VpmuKvmCpuid {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            padding: [0; 3],
        };
    }
    VpmuStatus::Ok
}

/// Makes the PMU of a vCPU, out of reset, and puts it into `*pmu`. Give it back by `vpmu_kvm_detach`. The
/// descriptors stay the caller's. Before the seccomp filter, on any thread.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_attach(
    vm: c_int,
    vcpu: c_int,
    pmu: *mut *mut VpmuKvm,
) -> VpmuStatus {
    // SAFETY: as the caller promises.
    let Some(pmu) = (unsafe { room::out(pmu) }) else {
        return VpmuStatus::Misuse;
    };
    match VcpuPmu::attach(&vm, &vcpu, options()) {
        Ok(made) => {
            *pmu = Box::into_raw(Box::new(VpmuKvm(made)));
            VpmuStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Ends a PMU, on the thread of its vCPU. Null is left alone.
///
/// # Safety
///
/// See the crate's page. The PMU is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_detach(pmu: *mut VpmuKvm) {
    if !pmu.is_null() {
        // SAFETY: what `vpmu_kvm_attach` gave, as the caller promises.
        drop(unsafe { Box::from_raw(pmu) });
    }
}

/// Takes what has overflowed and delivers the interrupt that is due. On the vCPU's thread, right before
/// each KVM_RUN.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_before_run(pmu: *mut VpmuKvm) -> VpmuStatus {
    // SAFETY: as the caller promises.
    match unsafe { held(pmu) } {
        Some(pmu) => status(pmu.before_run()),
        None => VpmuStatus::Misuse,
    }
}

/// Completes the exit if it is one of the PMU's: `*ours` then becomes true. On the vCPU's thread, right
/// after each KVM_RUN, however it ended.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_after_run(pmu: *mut VpmuKvm, ours: *mut bool) -> VpmuStatus {
    // SAFETY: as the caller promises.
    let (Some(pmu), Some(ours)) = (unsafe { (held(pmu), room::out(ours)) }) else {
        return VpmuStatus::Misuse;
    };
    match pmu.after_run() {
        Ok(completed) => {
            *ours = completed;
            VpmuStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`, while the vCPU does not run. The PMU can go on.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_save(
    pmu: *mut VpmuKvm,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    // SAFETY: as the caller promises.
    match unsafe { held(pmu) } {
        // SAFETY: as the caller promises.
        Some(pmu) => unsafe { state::save(&pmu.save(), buffer, room, length) },
        None => VpmuStatus::Misuse,
    }
}

/// Goes on from the `length` bytes at `buffer`, which `vpmu_kvm_save` has written.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_restore(
    pmu: *mut VpmuKvm,
    buffer: *const u8,
    length: usize,
) -> VpmuStatus {
    // SAFETY: as the caller promises.
    let Some(pmu) = (unsafe { held(pmu) }) else {
        return VpmuStatus::Misuse;
    };
    // SAFETY: as the caller promises.
    unsafe { state::restore(buffer, length, |state: &State| status(pmu.restore(state))) }
}
