//! The choice of the perf event that counts a guest's event, and the events that this machine has.

use std::io;
use std::sync::OnceLock;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_HW_REF_CPU_CYCLES, PERF_COUNT_SW_TASK_CLOCK, PERF_TYPE_HARDWARE, PERF_TYPE_RAW,
    PERF_TYPE_SOFTWARE,
};
use vpmu::counter::Lost;
use vpmu::x86::{ArchEvent, EventKind};

use crate::error::PerfError;
use crate::event::{Kind, PerfEvent, Rings};
use crate::kernel::Kernel;

/// Returns the processor's name of its vendor, by CPUID: a process in a jail may have no /proc.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the oldest compiler has no safe CPUID")]
#[expect(clippy::allow_attributes, reason = "compilers differ")]
fn vendor_name() -> [u8; 12] {
    #[allow(unused_unsafe, reason = "the newest compiler has one")]
    // SAFETY: every processor of 64 bits has CPUID.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    let mut name = [0; 12];
    let words = name.as_chunks_mut::<4>().0.iter_mut();
    for (bytes, word) in words.zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        *bytes = word.to_le_bytes();
    }
    name
}

#[cfg(not(target_arch = "x86_64"))]
fn vendor_name() -> [u8; 12] {
    [0; 12]
}

/// The backing that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The processor's counters.
    Hardware,
    /// The thread's time on the CPU.
    Clock,
}

/// The rules by which perf events are chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chooser {
    kernel: &'static dyn Kernel,
    pub(crate) backing: Backing,
    /// Count only while the thread runs a guest.
    pub(crate) guest: bool,
    pub(crate) approximate: bool,
}

impl Chooser {
    /// Chooses the wanted backing, or the best that works.
    pub(crate) fn new(
        kernel: &'static dyn Kernel,
        wanted: Option<Backing>,
        guest: bool,
        approximate: bool,
    ) -> Result<Self, PerfError> {
        let works = |backing| PerfEvent::try_open(kernel, probe(backing, guest));
        let backing = match wanted {
            Some(backing) => works(backing).map(|()| backing),
            None => match works(Backing::Hardware) {
                Ok(()) => Ok(Backing::Hardware),
                Err(error) if is_absence(&error) => works(Backing::Clock).map(|()| Backing::Clock),
                Err(error) => Err(error),
            },
        };
        Ok(Self {
            kernel,
            backing: backing.map_err(|error| PerfError::from_open(&error))?,
            guest,
            approximate,
        })
    }

    /// Returns whether this machine counts `event`.
    pub(crate) fn counts(self, event: ArchEvent) -> bool {
        let rings = Rings {
            user: true,
            kernel: true,
            guest: self.guest,
        };
        self.kind(Some(event), None, rings)
            .is_ok_and(|kind| PerfEvent::try_open(self.kernel, kind).is_ok())
    }

    /// Returns the perf event for a configuration.
    pub(crate) fn kind(
        self,
        event: Option<ArchEvent>,
        raw: Option<(Vendor, u64)>,
        rings: Rings,
    ) -> Result<Kind, Lost> {
        match self.backing {
            Backing::Clock => match event {
                // A guest's ring is told by samples.
                _ if !(self.guest || rings.user && rings.kernel) => Err(Lost::Unsupported),
                Some(ArchEvent::CoreCycles | ArchEvent::ReferenceCycles | ArchEvent::TscCycles) => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                Some(ArchEvent::Instructions | ArchEvent::Branches) if self.approximate => {
                    Ok(probe(Backing::Clock, self.guest))
                }
                _ => Err(Lost::Unsupported),
            },
            Backing::Hardware => {
                let generic = event.and_then(|event| {
                    Some(match event {
                        ArchEvent::CoreCycles => PERF_COUNT_HW_CPU_CYCLES,
                        ArchEvent::Instructions => PERF_COUNT_HW_INSTRUCTIONS,
                        ArchEvent::ReferenceCycles | ArchEvent::TscCycles => {
                            PERF_COUNT_HW_REF_CPU_CYCLES
                        }
                        ArchEvent::LlcReferences => PERF_COUNT_HW_CACHE_REFERENCES,
                        ArchEvent::LlcMisses => PERF_COUNT_HW_CACHE_MISSES,
                        ArchEvent::Branches => PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
                        ArchEvent::BranchMisses => PERF_COUNT_HW_BRANCH_MISSES,
                        ArchEvent::TopdownSlots => return None,
                    })
                });
                let (type_, config) = match (generic, raw) {
                    (Some(generic), _) => (PERF_TYPE_HARDWARE, u64::from(generic)),
                    // The host's processor must be of the guest's vendor to have its events.
                    (None, Some((vendor, raw))) if vendor == Vendor::of_host() => {
                        (PERF_TYPE_RAW, raw)
                    }
                    _ => return Err(Lost::Unsupported),
                };
                Ok(Kind {
                    type_,
                    config,
                    rings: Some(rings),
                })
            }
        }
    }
}

/// Returns the event that shows whether a backing works.
pub(crate) fn probe(backing: Backing, guest: bool) -> Kind {
    match backing {
        Backing::Hardware => Kind {
            type_: PERF_TYPE_HARDWARE,
            config: PERF_COUNT_HW_CPU_CYCLES.into(),
            rings: Some(Rings {
                user: true,
                kernel: true,
                guest,
            }),
        },
        Backing::Clock => Kind {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_TASK_CLOCK.into(),
            rings: None,
        },
    }
}

/// Returns whether there is no hardware PMU, or none that can be restricted to guests.
fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL)
    )
}

/// The maker of a processor, as far as its events matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD, or Hygon, whose processors are AMD's.
    Amd,
    /// Another maker.
    Other,
}

impl Vendor {
    /// Returns the vendor of this machine's processor.
    pub fn of_host() -> Self {
        static VENDOR: OnceLock<Vendor> = OnceLock::new();
        *VENDOR.get_or_init(|| match &vendor_name() {
            b"GenuineIntel" => Self::Intel,
            b"AuthenticAMD" | b"HygonGenuine" => Self::Amd,
            _ => Self::Other,
        })
    }

    /// Returns the vendor whose event select `event` is, or `None` if it is no event select.
    pub(crate) fn of(event: EventKind) -> Option<Self> {
        match event {
            EventKind::General { .. } => Some(Self::Intel),
            EventKind::Amd { .. } => Some(Self::Amd),
            EventKind::Fixed(_) => None,
        }
    }
}
