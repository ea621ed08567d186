//! The engine on Linux KVM, over descriptors: `vpmu-kvm` for VMMs written in C.

use core::ffi::{c_char, c_int};
use core::slice;
use std::cell::RefCell;
use std::ffi::CString;
use std::sync::{Arc, OnceLock};

use vpmu_kvm::{AfterRun, Backing, CpuidEntry, Error, GuestMemory, State, Vcpu, Words};

use crate::choice::{VPMU_KVM_BACKING_CLOCK, VPMU_KVM_BACKING_HARDWARE, detect, options};
use crate::counter::counter_state;
use crate::{VpmuStatus, room, state};

/// One vCPU's PMU, counted by perf events of the vCPU's thread.
#[derive(Debug)]
pub struct VpmuKvm(Vcpu);

/// The memory of a guest without PEBS, which nobody asks for.
#[derive(Debug)]
struct NoMemory;

impl GuestMemory for NoMemory {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: u64, _: &[u8]) -> bool {
        false
    }

    fn with_words(&self, _: u64, _: usize, _: &mut dyn FnMut(&dyn Words)) {}
}

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

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// What an error is for C; its text stays for `vpmu_kvm_error`.
fn failed(error: &Error) -> VpmuStatus {
    explain(&error.to_string());
    match error {
        Error::State(_) | Error::StateVersion(_) | Error::OtherOffer => VpmuStatus::State,
        Error::Config(_) | Error::Event(_) | Error::NoAmd => VpmuStatus::Config,
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
unsafe fn held<'a>(pmu: *mut VpmuKvm) -> Option<&'a mut Vcpu> {
    // SAFETY: as the caller promises.
    unsafe { pmu.as_mut() }.map(|pmu| &mut pmu.0)
}

/// What was wrong with this thread's last call that answered `VPMU_STATUS_HOST`, `_CONFIG` or `_STATE`,
/// and what to do about it. Good until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

/// Reads what `vpmu_kvm_save` has written.
///
/// # Safety
///
/// `buffer` is null or has `length` readable bytes.
pub(crate) unsafe fn saved(buffer: *const u8, length: usize) -> Result<State, VpmuStatus> {
    if buffer.is_null() {
        return Err(VpmuStatus::Misuse);
    }
    // SAFETY: as the caller promises.
    unsafe { state::read(buffer, length) }.ok_or_else(|| {
        explain("these bytes are no saved PMU of this version");
        VpmuStatus::State
    })
}

/// Keeps a text for `vpmu_kvm_error`.
fn explain(text: &str) {
    let text = CString::new(text).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = text);
}

/// The MSRs of the PMU, for a VMM with a filter of its own in place of `vpmu_kvm_intercept`: their number to `count`,
/// and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there are more.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_msrs(
    msrs: *mut u32,
    room: usize,
    count: *mut usize,
) -> VpmuStatus {
    match detect() {
        // SAFETY: as the caller promises.
        Ok(found) => unsafe { room::list(found.msrs().into_iter(), msrs, room, count) },
        Err(error) => failed(&error),
    }
}

/// The system calls of a vCPU's thread for its PMU, as seccompiler's JSON. The text stays for ever. These calls come before
/// the filter: `vpmu_kvm_intercept`, `_msrs`, `_cpuid`, `_attach`, and `_restore` of a state from elsewhere.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_seccomp_rules() -> *const c_char {
    static RULES: OnceLock<CString> = OnceLock::new();
    let rules = RULES.get_or_init(|| CString::new(vpmu_kvm::seccomp_rules()).unwrap_or_default());
    rules.as_ptr()
}

/// To be called by a VMM's own handler of SIGIO: the kernel sends it in place of the overflows' signal when its queue is
/// full. Without such a handler, the library's does.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_overrun() {
    vpmu_kvm::overrun();
}

/// Has KVM hand the PMU's MSRs over, and no others, and switches off KVM's own PMU. Before the first
/// vCPU is made. A VMM with other MSRs of its own makes one filter of both (`vpmu_kvm_msrs`), which hands
/// them over with KVM_MSR_EXIT_REASON_FILTER.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_intercept(vm: c_int) -> VpmuStatus {
    status(detect().and_then(|found| vpmu_kvm::intercept(&vm, &found.msrs())))
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
    let offer = match detect() {
        Ok(offer) => offer,
        Err(error) => return failed(&error),
    };
    // SAFETY: as the caller promises.
    let entries = unsafe { slice::from_raw_parts_mut(entries, room) };
    let numbers = |e: &VpmuKvmCpuid| [e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx];
    let given = entries.iter().take(*count);
    let mut leaves: Vec<CpuidEntry> = given.map(|entry| numbers(entry).into()).collect();
    offer.set_cpuid(&mut leaves, tsc_khz);
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
/// descriptors stay the caller's. Before the seccomp filter, on any thread. Installs a handler of the
/// overflows' signal, and of SIGIO unless there is one; no thread may block the first.
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
    let attached =
        detect().and_then(|offer| Vcpu::attach(&vm, &vcpu, &offer, &options(), Arc::new(NoMemory)));
    match attached {
        Ok(made) => {
            *pmu = Box::into_raw(Box::new(VpmuKvm(made)));
            VpmuStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Ends a PMU, on any thread while its vCPU does not run. Null is left alone.
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

/// Completes the exit if it is one of the PMU's: `*ours` then becomes true. Else the exit is left as KVM has
/// made it. On the vCPU's thread, right after each KVM_RUN, however it ended.
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
            *ours = completed == AfterRun::Completed;
            VpmuStatus::Ok
        }
        Err(error) => failed(&error),
    }
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`, while the vCPU does not run. The PMU can go on. First complete the last exit: a KVM_RUN with
/// `immediate_exit`, between `vpmu_kvm_before_run` and `_after_run`. The vCPU's thread still lives.
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
        Some(pmu) => unsafe { state::save(|| pmu.save(), buffer, room, length) },
        None => VpmuStatus::Misuse,
    }
}

/// Goes on from the `length` bytes at `buffer`, which `vpmu_kvm_save` has written. Choose that guest's PMU before its VM
/// is made (`saved` of `vpmu_kvm_choose`).
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
    let state = match unsafe { saved(buffer, length) } {
        Ok(state) => state,
        Err(status) => return status,
    };
    match pmu.restore(&state) {
        Ok(()) => VpmuStatus::Ok,
        Err(error) => match failed(&error) {
            // There can be such a PMU, but not here.
            VpmuStatus::Config => VpmuStatus::State,
            status => status,
        },
    }
}

/// The vCPU is reset, and does not run.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_reset(pmu: *mut VpmuKvm) -> VpmuStatus {
    // SAFETY: as the caller promises.
    match unsafe { held(pmu) } {
        Some(pmu) => {
            pmu.reset();
            VpmuStatus::Ok
        }
        None => VpmuStatus::Misuse,
    }
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_counter_state(pmu: *mut VpmuKvm, counter: u8) -> i32 {
    // SAFETY: as the caller promises.
    counter_state(unsafe { held(pmu) }.and_then(|pmu| pmu.counter_state(counter)))
}

/// What counts: `VPMU_KVM_BACKING_HARDWARE` or `_CLOCK`, or `VPMU_STATUS_MISUSE`.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_backing(pmu: *mut VpmuKvm) -> i32 {
    // SAFETY: as the caller promises.
    match unsafe { held(pmu) }.and_then(|pmu| pmu.backing()) {
        Some(Backing::Hardware) => VPMU_KVM_BACKING_HARDWARE.cast_signed(),
        Some(Backing::Clock) => VPMU_KVM_BACKING_CLOCK.cast_signed(),
        None => VpmuStatus::Misuse as i32,
    }
}
