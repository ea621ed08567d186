//! The trial of hardware counters, by a guest of a few instructions: they count it, and they do not count the host.
//!
//! perf takes `exclude_host` on hosts where nothing keeps it (vpmu_perf's `support.rs` says which). A guest's counts would
//! then have the hypervisor's time in them. So before hardware counters are promised to a guest, they are tried, once for
//! the process. Where no guest can be run for that, the promise is believed.
//!
//! UNSAFETY: makes a VM and a vCPU by C interfaces.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::OnceLock;

use kvm_bindings::{KVM_EXIT_HLT, kvm_regs, kvm_userspace_memory_region};
use vpmu_perf::GuestsOnly;

use crate::error::Error;
use crate::run::RunPage;
use crate::sys;

/// Rounds of the guest's loop: some ms on hardware.
const ROUNDS: u32 = 3_000_000;
/// The guest's only page, and its first instruction.
const AT: u64 = 0x1000;

static FOUND: OnceLock<Option<GuestsOnly>> = OnceLock::new();

/// Tries whether this machine's hardware counters count guests, and guests alone, by a guest of a few instructions on the
/// calling thread. Takes some ms, and gives everything back.
///
/// # Errors
///
/// When there are no hardware counters for this process, or it can run no guest.
pub fn guests_only() -> Result<GuestsOnly, Error> {
    let guest = TinyGuest::new(ROUNDS)?;
    let mut ran = Ok(());
    let found = vpmu_perf::guests_only(|| ran = guest.run());
    ran?;
    Ok(found?)
}

/// As [`guests_only`], once for the process. Returns what was found where the counters do not count as promised.
pub(crate) fn broken() -> Option<GuestsOnly> {
    let found = *FOUND.get_or_init(|| guests_only().ok());
    found.filter(|found| !found.holds())
}

/// Returns whether hardware counters have been found not to count as promised. Tries nothing.
pub(crate) fn is_known_broken() -> bool {
    matches!(FOUND.get(), Some(Some(found)) if !found.holds())
}

/// A VM whose guest counts down and halts.
struct TinyGuest {
    vcpu: OwnedFd,
    run: RunPage,
    // Dropped last: the VM's memory.
    _vm: OwnedFd,
    _page: Box<Page>,
}

/// A page of this process, as KVM takes it for memory.
#[repr(align(4096))]
struct Page([u8; 4096]);

impl TinyGuest {
    fn new(rounds: u32) -> Result<Self, Error> {
        let kvm = File::options().read(true).write(true).open("/dev/kvm");
        let kvm = kvm.map_err(|error| {
            Error::Kvm("open /dev/kvm", error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        let owned = |fd: u32| {
            // SAFETY: KVM has just made this descriptor, and nobody else knows it.
            unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) }
        };
        let vm = owned(sys::CREATE_VM.call(&kvm, 0)?);
        let (mut page, code) = (Box::new(Page([0; 4096])), code(rounds));
        page.0[..code.len()].copy_from_slice(&code);
        let region = kvm_userspace_memory_region {
            guest_phys_addr: AT,
            memory_size: size_of::<Page>() as u64,
            userspace_addr: page.0.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        sys::SET_USER_MEMORY_REGION.set(&vm, &region)?;
        let vcpu = owned(sys::CREATE_VCPU.call(&vm, 0)?);
        let mut sregs = sys::GET_SREGS.get(&vcpu)?;
        // Real mode, so that the guest needs no tables.
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        sys::SET_SREGS.set(&vcpu, &sregs)?;
        let regs = kvm_regs {
            rip: AT,
            rflags: 2,
            ..Default::default()
        };
        sys::SET_REGS.set(&vcpu, &regs)?;
        Ok(Self {
            run: RunPage::map(&vcpu)?,
            vcpu,
            _vm: vm,
            _page: page,
        })
    }

    /// Runs the guest to its end.
    fn run(&self) -> Result<(), Error> {
        loop {
            match sys::RUN.call(&self.vcpu, 0) {
                // A signal of the VMM's.
                Err(Error::Kvm(_, libc::EINTR)) => {}
                done => {
                    done?;
                    return match self.run.exit_reason() {
                        KVM_EXIT_HLT => Ok(()),
                        _ => Err(Error::Kvm("KVM_RUN of a guest that halts", libc::EIO)),
                    };
                }
            }
        }
    }
}

/// Returns `mov ecx, rounds; again: dec ecx; jnz again; hlt`, of 16 bits.
fn code(rounds: u32) -> [u8; 11] {
    let [a, b, c, d] = rounds.to_le_bytes();
    [0x66, 0xb9, a, b, c, d, 0x66, 0x49, 0x75, 0xfc, 0xf4]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_runs_to_its_end_on_any_kvm() {
        match TinyGuest::new(1000) {
            Ok(guest) => assert_eq!(guest.run(), Ok(())),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }

    #[test]
    fn without_hardware_counters_nothing_is_found_broken() {
        match guests_only() {
            // A machine with a PMU, on which the trial has to pass.
            Ok(found) => assert_eq!(broken().is_none(), found.holds()),
            Err(_) => assert_eq!(broken(), None),
        }
    }
}
