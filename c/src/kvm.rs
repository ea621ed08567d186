//! The engine on Linux KVM, over descriptors: `vpmu-kvm` for VMMs written in C.

mod filter;
mod handle;
mod memory;
mod vm;

use core::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu_kvm::{AfterRun, Backing, Deadline, Exit, Kick, Rdpmc, Vcpu};

use crate::counter::counter_state;
use crate::room::{Mut, Ref, promised};
use crate::state::{self, Saved};
use crate::status::{VpmuOutcome, VpmuStatus};
use handle::{Table, answer, damaged, failed, misuse, needed, refused, unsuitable};
use vm::VMS;

pub use filter::*;
pub use handle::{vpmu_kvm_error, vpmu_kvm_error_is_fatal};
pub use memory::*;
pub use vm::*;

/// Run the vCPU again: the exit was completed.
pub const VPMU_KVM_COMPLETED: u32 = 0;
/// Run the vCPU again: there was no exit, but an overflow, and `immediate_exit` is not 1. A signal of the VMM's own may
/// have come at the same time.
pub const VPMU_KVM_KICKED: u32 = 1;
/// The exit, or the interruption by a signal, is the VMM's, and is as KVM has made it.
pub const VPMU_KVM_YOURS: u32 = 2;

/// One vCPU's PMU, counted by perf events of the vCPU's thread, and its lazy deadline.
#[derive(Debug)]
pub struct VpmuKvm {
    _opaque: [u8; 0],
}

/// The cost of one vCPU, for `vpmu_kvm_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuKvmStatistics {
    /// `sizeof(struct vpmu_kvm_statistics)`, before the call.
    pub size: usize,
    /// PMIs delivered to the guest.
    pub pmis: u64,
    /// PMIs that found LVTPC masked.
    pub masked_pmis: u64,
    /// Exits for the parts' MSRs.
    pub msr_exits: u64,
    /// Exits for RDPMC.
    pub rdpmc_exits: u64,
    /// Runs that ended without an exit.
    pub kicks: u64,
    /// Perf events that were made.
    pub creates: u64,
    /// Counters that the host could not back, or only part of the time, how often.
    pub lost: u64,
    /// PEBS records written.
    pub pebs_records: u64,
    /// PEBS records for which there was no room or no memory.
    pub pebs_lost: u64,
    /// The longest time, ns, for which a counter of cycles stood still between its reads although its perf event ran.
    pub longest_stuck_ns: u64,
}

/// What `struct vpmu_kvm` stands for.
struct Attached {
    vcpu: Mutex<Vcpu>,
    // Beside the lock: another thread waits for it while the vCPU runs.
    deadline: Option<Arc<Deadline>>,
    /// Whether the vCPU was detached. Held while an expiry uses the guest's memory.
    detached: Mutex<bool>,
    /// The VM's places of RDPMC.
    rdpmc: Option<Arc<Rdpmc>>,
}

static PMUS: Table<Attached> = Table::new();

impl Attached {
    fn vcpu(&self) -> MutexGuard<'_, Vcpu> {
        self.vcpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline(&self) -> Result<&Deadline, VpmuStatus> {
        let deadline = self.deadline.as_deref();
        needed(deadline, "the guest was not offered a deadline")
    }

    fn detached(&self) -> MutexGuard<'_, bool> {
        self.detached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does to the vCPU what always works.
fn perform(pmu: *const VpmuKvm, act: impl FnOnce(&mut Vcpu)) -> VpmuStatus {
    answer(|| {
        act(&mut PMUS.find(pmu)?.vcpu());
        Ok(())
    })
}

/// Publishes the statistics of the vCPUs that are attached from now on in a file that `vpmu top` and `vpmu metrics` read:
/// `/run/vpmu/PID` where this process may write there, else `$XDG_RUNTIME_DIR/vpmu/PID`, else nowhere, which is no error.
/// After the process has become a daemon, and before its seccomp filter. Where the file cannot be made, guests run
/// unpublished. The file goes with the process.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_publish() -> VpmuStatus {
    answer(|| vpmu_kvm::publish().map(drop).map_err(refused))
}

/// Makes the offered parts of a vCPU, out of reset, and puts them into `*pmu`. Give them back by `vpmu_kvm_detach`. The
/// descriptors stay the caller's. Before the seccomp filter, on any thread. With a PMU, installs a handler of the
/// overflows' signal, and of SIGIO unless there is one.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_attach(
    vm: *const VpmuKvmVm,
    vm_fd: c_int,
    vcpu_fd: c_int,
    pmu: Mut<'_, *mut VpmuKvm>,
) -> VpmuStatus {
    answer(|| {
        let vm = VMS.find(vm)?;
        let what = "a place for the PMU, at an address that is a multiple of 8";
        let pmu = needed(pmu.get(), what)?;
        let memory = Arc::clone(&vm.memory);
        let attached = Vcpu::attach(&vm_fd, &vcpu_fd, &vm.offer, &vm.options, memory);
        let mut vcpu = attached.map_err(failed)?;
        if let Some(rdpmc) = &vm.rdpmc {
            vcpu.set_rdpmc(Arc::clone(rdpmc));
        }
        *pmu = PMUS.add(Attached {
            deadline: vcpu.deadline(),
            detached: Mutex::new(false),
            vcpu: Mutex::new(vcpu),
            rdpmc: vm.rdpmc.as_ref().map(Arc::clone),
        });
        Ok(())
    })
}

/// Ends a PMU, on any thread while its vCPU does not run. Each later call with it is refused, and so is a wait in
/// `vpmu_kvm_serve_deadline`, which ends. The guest's memory is not used any more when this returns. NULL is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_detach(pmu: *mut VpmuKvm) -> VpmuStatus {
    if !pmu.is_null()
        && let Ok(attached) = PMUS.find(pmu)
        && let Some(deadline) = &attached.deadline
    {
        *attached.detached() = true;
        deadline.wake();
    }
    PMUS.remove(pmu)
}

/// Has each overflow add 1 to this eventfd, in place of writing to `kvm_run.immediate_exit`. Before the vCPU first runs.
/// The descriptor stays the caller's.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_kick_by_eventfd(pmu: *mut VpmuKvm, eventfd: c_int) -> VpmuStatus {
    if eventfd < 0 {
        return misuse("an eventfd is not negative");
    }
    // SAFETY: it is used for one call, which duplicates it, or says that it is closed.
    let fd = unsafe { BorrowedFd::borrow_raw(eventfd) };
    let Ok(fd) = fd.try_clone_to_owned() else {
        return misuse("this eventfd is closed");
    };
    perform(pmu, |vcpu| vcpu.set_kick(Kick::EventFd(Arc::new(fd))))
}

/// Has each overflow send this signal to the vCPU's thread, in place of writing to `kvm_run.immediate_exit`: the signal by
/// which the VMM itself takes a vCPU out of the guest. Before the vCPU first runs.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_kick_by_signal(pmu: *mut VpmuKvm, signal: c_int) -> VpmuStatus {
    if !(1..=64).contains(&signal) {
        return misuse("a signal's number is 1 to 64");
    }
    perform(pmu, |vcpu| vcpu.set_kick(Kick::Signal(signal)))
}

/// Takes what has overflowed, delivers the interrupt that is due, and sets the deadline. On the vCPU's thread, right before
/// each KVM_RUN.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_before_run(pmu: *mut VpmuKvm) -> VpmuStatus {
    answer(|| PMUS.find(pmu)?.vcpu().before_run().map_err(failed))
}

/// Completes the exit if it is one of the parts', and puts one of `VPMU_KVM_COMPLETED`, `_KICKED` and `_YOURS` into `*what`.
/// On the vCPU's thread, right after each KVM_RUN, however it ended.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_after_run(pmu: *mut VpmuKvm, what: Mut<'_, u32>) -> VpmuStatus {
    answer(|| {
        let place = "a place for what it was, at an address that is a multiple of 4";
        let what = needed(what.get(), place)?;
        let after = PMUS.find(pmu)?.vcpu().after_run().map_err(failed)?;
        *what = match after {
            AfterRun::Completed => VPMU_KVM_COMPLETED,
            AfterRun::Kicked => VPMU_KVM_KICKED,
            AfterRun::Vmm => VPMU_KVM_YOURS,
        };
        Ok(())
    })
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`, while no vCPU of the VM runs. With `rdpmc` of the options, the places in the guest's memory are among
/// them. The PMU can go on. First complete the last exit: a KVM_RUN with `immediate_exit`, between `vpmu_kvm_before_run` and
/// `_after_run`. The vCPU's thread still lives, or has called
/// `vpmu_kvm_release_thread`.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_save(
    pmu: *mut VpmuKvm,
    buffer: Mut<'_, u8>,
    room: usize,
    length: Mut<'_, usize>,
) -> VpmuStatus {
    let place = promised!(state::place(buffer, room, length));
    let what = "a buffer, and a place for its length, at an address that is a multiple of 8";
    answer(|| {
        let (attached, place) = (PMUS.find(pmu)?, needed(place, what)?);
        let places = attached.rdpmc.as_ref().map(|rdpmc| rdpmc.save());
        let mut saved: Saved = (attached.vcpu().save(), places);
        match place.put(&mut saved) {
            VpmuStatus::Ok => Ok(()),
            status => Err(status),
        }
    })
}

/// Goes on from the `length` bytes at `buffer`, which `vpmu_kvm_save` has written, after the guest's memory, TSC and local
/// APIC have been restored. Open its VM with these bytes (`saved` of `struct vpmu_kvm_options`).
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_restore(
    pmu: *mut VpmuKvm,
    buffer: Ref<'_, u8>,
    length: usize,
) -> VpmuStatus {
    if buffer.is_null() {
        return misuse("the saved bytes");
    }
    answer(|| {
        let saved: Option<Saved> = state::read(promised!(state::source(buffer, length)));
        let (vcpu, places) = saved.ok_or_else(damaged)?;
        let attached = PMUS.find(pmu)?;
        if places.is_some() && attached.rdpmc.is_none() {
            // The guest's memory has instructions that nobody would complete.
            let text = "this guest's RDPMC needs a VM that was opened with rdpmc";
            return Err(unsuitable(text));
        }
        let restored = attached.vcpu().restore(&vcpu);
        restored.map_err(|error| match failed(error) {
            // There can be such a PMU, but not here.
            VpmuStatus::Config => VpmuStatus::State,
            status => status,
        })?;
        if let (Some(places), Some(rdpmc)) = (places, &attached.rdpmc) {
            rdpmc.restore(&places);
        }
        Ok(())
    })
}

/// Gives back the perf events of the thread that runs the vCPU, at that thread's end, where another thread saves the vCPU or
/// runs it on.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_release_thread(pmu: *mut VpmuKvm) -> VpmuStatus {
    perform(pmu, Vcpu::release_thread)
}

/// The vCPU is reset, and does not run.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_reset(pmu: *mut VpmuKvm) -> VpmuStatus {
    perform(pmu, Vcpu::reset)
}

/// Reads one of the parts' MSRs into `*value`, as KVM_GET_MSRS would. `VPMU_OUTCOME_NOT_HANDLED`: the parts have no such
/// register, or it cannot be read.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_get_msr(
    pmu: *mut VpmuKvm,
    index: u32,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    let (Some(value), Ok(attached)) = (value.get(), PMUS.find(pmu)) else {
        return VpmuOutcome::Misuse;
    };
    match attached.vcpu().msr(index) {
        Some(found) => {
            *value = found;
            VpmuOutcome::Value
        }
        None => VpmuOutcome::NotHandled,
    }
}

/// Sets one of the parts' MSRs, as KVM_SET_MSRS would: a counter is written whole, and a status that a guest can only read
/// is written, too. `VPMU_OUTCOME_GENERAL_PROTECTION`: the register has no such value.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_set_msr(pmu: *mut VpmuKvm, index: u32, value: u64) -> VpmuOutcome {
    match PMUS.find(pmu) {
        Ok(attached) => VpmuOutcome::of_x86(attached.vcpu().set_msr(index, value), &mut 0),
        Err(_) => VpmuOutcome::Misuse,
    }
}

/// Waits until the deadline expires, and delivers its interrupt. On a thread of the VMM's, again and again. Also returns
/// after `vpmu_kvm_wake_deadline`, and is refused after `vpmu_kvm_detach`.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_serve_deadline(pmu: *mut VpmuKvm) -> VpmuStatus {
    answer(|| {
        let attached = PMUS.find(pmu)?;
        let deadline = attached.deadline()?;
        let waited = deadline.wait();
        waited.map_err(|error| misuse(&format!("timerfd: {error}")))?;
        let detached = attached.detached();
        if *detached {
            return Err(misuse("this handle was given back meanwhile"));
        }
        deadline.expire().map_err(failed)
    })
}

/// Ends another thread's wait in `vpmu_kvm_serve_deadline`. The deadline stays.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_wake_deadline(pmu: *mut VpmuKvm) -> VpmuStatus {
    answer(|| {
        PMUS.find(pmu)?.deadline()?.wake();
        Ok(())
    })
}

/// Writes what the vCPU has cost until now to `*statistics`, whose `size` says how large the struct is. Any thread may
/// call this.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_statistics(
    pmu: *mut VpmuKvm,
    statistics: Mut<'_, VpmuKvmStatistics>,
) -> VpmuStatus {
    let size = size_of::<VpmuKvmStatistics>();
    let is_ours = statistics.size() == Some(size);
    let out = is_ours.then(|| statistics.get());
    let Some(out) = out.flatten() else {
        return misuse(
            "statistics.size is not sizeof(struct vpmu_kvm_statistics) of this library's header",
        );
    };
    perform(pmu, |vcpu| {
        let shared = vcpu.statistics();
        let statistics = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let exits = |kind: fn(&Exit) -> bool| {
            let counts = statistics.exits.iter().filter(|(exit, _)| kind(exit));
            counts.map(|(_, count)| count).sum()
        };
        *out = VpmuKvmStatistics {
            size,
            pmis: statistics.pmis,
            masked_pmis: statistics.masked_pmis,
            msr_exits: exits(|exit| matches!(exit, Exit::MsrRead(_) | Exit::MsrWrite(_))),
            rdpmc_exits: exits(|exit| *exit == Exit::Rdpmc),
            kicks: exits(|exit| *exit == Exit::Kick),
            creates: statistics.host.creates,
            lost: statistics.host.lost + statistics.host.unsupported + statistics.host.part_time,
            pebs_records: statistics.pebs.records,
            pebs_lost: statistics.pebs.lost,
            longest_stuck_ns: statistics.longest_stuck_ns,
        };
    })
}

/// Returns one of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_counter_state(pmu: *mut VpmuKvm, counter: u8) -> i32 {
    match PMUS.find(pmu) {
        Ok(attached) => counter_state(counter, |n| attached.vcpu().counter_state(n)),
        Err(status) => status as i32,
    }
}

/// Returns what counts: `VPMU_KVM_BACKING_HARDWARE` or `_CLOCK`, or `VPMU_STATUS_MISUSE` where nothing does.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_backing(pmu: *mut VpmuKvm) -> i32 {
    let backing = PMUS.find(pmu).ok();
    match backing.and_then(|attached| attached.vcpu().backing()) {
        Some(Backing::Hardware) => VPMU_KVM_BACKING_HARDWARE.cast_signed(),
        Some(Backing::Clock) => VPMU_KVM_BACKING_CLOCK.cast_signed(),
        None => VpmuStatus::Misuse as i32,
    }
}
