//! What a process's guests are offered.

use core::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use vpmu_kvm::{Backing, Capability, Error, Model, Options, Perfmon};

use crate::VpmuStatus;
use crate::kvm::saved;

/// AMD's PMU where the host's processor is AMD's, else Intel's.
pub const VPMU_KVM_MODEL_AUTO: u32 = 0;
/// Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
pub const VPMU_KVM_MODEL_INTEL: u32 = 1;
/// AMD's core extension: six counters, without global registers. On hosts of AMD's.
pub const VPMU_KVM_MODEL_AMD: u32 = 2;
/// AMD's PerfMonV2. On hosts of AMD's.
pub const VPMU_KVM_MODEL_AMD_V2: u32 = 3;

/// The processor's counters where they are available, else a clock.
pub const VPMU_KVM_BACKING_AUTO: u32 = 0;
/// The processor's counters.
pub const VPMU_KVM_BACKING_HARDWARE: u32 = 1;
/// The thread's time on the CPU.
pub const VPMU_KVM_BACKING_CLOCK: u32 = 2;

/// What a process's guests are offered, for `vpmu_kvm_choose`. Zero is each field's default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuKvmOptions {
    /// One of `VPMU_KVM_MODEL_*`.
    pub model: u32,
    /// The version of Intel's architectural performance monitoring, 2 to 5. 0: 5.
    pub perfmon: u32,
    /// One of `VPMU_KVM_BACKING_*`.
    pub backing: u32,
    /// The real-time signal by which perf reports overflows to the vCPU's thread. 0: SIGRTMIN+1.
    pub signal: c_int,
    /// Where only a clock counts: offer instructions and branches too, one for each cycle.
    pub approximate_instructions: bool,
    /// The bytes of a saved guest, which is then offered the PMU that it had; `model` and `perfmon` are not looked at.
    /// Null: a new guest.
    pub saved: *const u8,
    /// How many bytes these are.
    pub saved_length: usize,
}

/// The choice of this process. `None`: the defaults.
static CHOICE: Mutex<Option<Options>> = Mutex::new(None);

pub(crate) fn options() -> Options {
    let choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    choice.clone().unwrap_or_default()
}

/// The PMU that this host can back, or the saved guest's.
pub(crate) fn detect() -> Result<Capability, Error> {
    let options = options();
    match options.capability {
        Some(capability) => Ok(capability),
        None => vpmu_kvm::detect(&options),
    }
}

impl VpmuKvmOptions {
    /// The choice without the saved guest's PMU. `None`: a number has no meaning.
    fn numbers(&self) -> Option<Options> {
        Some(Options {
            model: match self.model {
                VPMU_KVM_MODEL_AUTO => Model::Auto,
                VPMU_KVM_MODEL_INTEL => Model::Intel,
                VPMU_KVM_MODEL_AMD => Model::Amd,
                VPMU_KVM_MODEL_AMD_V2 => Model::AmdV2,
                _ => return None,
            },
            perfmon: match self.perfmon {
                0 => None,
                number @ 2..=5 => Some(Perfmon::from_number(u8::try_from(number).ok()?)?),
                _ => return None,
            },
            backing: match self.backing {
                VPMU_KVM_BACKING_AUTO => None,
                VPMU_KVM_BACKING_HARDWARE => Some(Backing::Hardware),
                VPMU_KVM_BACKING_CLOCK => Some(Backing::Clock),
                _ => return None,
            },
            approximate_instructions: self.approximate_instructions,
            signal: (self.signal != 0).then_some(self.signal),
            ..Options::default()
        })
    }
}

/// Chooses what the guests of this process are offered, before the other calls. Null: the defaults again.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_kvm_choose(options: *const VpmuKvmOptions) -> VpmuStatus {
    let mut chosen = None;
    // SAFETY: as the caller promises.
    if let Some(options) = unsafe { options.as_ref() } {
        let Some(mut made) = options.numbers() else {
            return VpmuStatus::Misuse;
        };
        if !options.saved.is_null() {
            // SAFETY: as the caller promises.
            match unsafe { saved(options.saved, options.saved_length) } {
                Ok(state) => made.capability = Some(state.capability),
                Err(status) => return status,
            }
        }
        chosen = Some(made);
    }
    *CHOICE.lock().unwrap_or_else(PoisonError::into_inner) = chosen;
    VpmuStatus::Ok
}
