//! What a process's guests are offered.

use core::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use vpmu_kvm::{Clock, Error, Model, Offer, Options, Perfmon, Source, State, amd};

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

/// What guests are offered, and how the host counts for them.
#[derive(Clone, Default)]
struct Choice {
    model: Model,
    options: Options,
    /// The saved guest's.
    offer: Option<Offer>,
}

/// The choice of this process. `None`: the defaults.
static CHOICE: Mutex<Option<Choice>> = Mutex::new(None);

fn choice() -> Choice {
    let choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
    choice.clone().unwrap_or_default()
}

pub(crate) fn options() -> Options {
    choice().options
}

/// The PMU that this host can back, or the saved guest's.
pub(crate) fn detect() -> Result<Offer, Error> {
    let choice = choice();
    match choice.offer {
        Some(offer) => Ok(offer),
        None => vpmu_kvm::detect(choice.model, &choice.options),
    }
}

impl VpmuKvmOptions {
    /// The choice without the saved guest's PMU. `None`: a number has no meaning.
    fn numbers(&self) -> Option<Choice> {
        let perfmon = match self.perfmon {
            0 => None,
            number @ 2..=5 => Some(Perfmon::from_number(u8::try_from(number).ok()?)?),
            _ => return None,
        };
        let model = match (self.model, perfmon) {
            (VPMU_KVM_MODEL_AUTO, None) => Model::Auto,
            (VPMU_KVM_MODEL_AUTO | VPMU_KVM_MODEL_INTEL, perfmon) => Model::Intel {
                version: perfmon.unwrap_or(Perfmon::V5),
                pebs: false,
            },
            (VPMU_KVM_MODEL_AMD, None) => Model::Amd(amd::Interface::Core),
            (VPMU_KVM_MODEL_AMD_V2, None) => Model::Amd(amd::Interface::V2),
            _ => return None,
        };
        let clock = match self.approximate_instructions {
            true => Clock::Approximate,
            false => Clock::Cycles,
        };
        let source = match self.backing {
            VPMU_KVM_BACKING_AUTO => Source::Best(clock),
            VPMU_KVM_BACKING_HARDWARE => Source::Hardware,
            VPMU_KVM_BACKING_CLOCK => Source::Clock(clock),
            _ => return None,
        };
        Some(Choice {
            model,
            options: Options {
                source,
                signal: (self.signal != 0).then_some(self.signal),
                ..Options::default()
            },
            offer: None,
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
                Ok(state) => made.offer = Some(State::offer(&state)),
                Err(status) => return status,
            }
        }
        chosen = Some(made);
    }
    *CHOICE.lock().unwrap_or_else(PoisonError::into_inner) = chosen;
    VpmuStatus::Ok
}
