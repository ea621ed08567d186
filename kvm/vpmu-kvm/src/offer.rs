//! The parts of a vCPU that a guest is offered, found by trying this host.

mod branches;
mod pebs;

use vpmu::paravirt;
use vpmu::x86::pebs::{Capability as PebsCapability, misc_enable};
use vpmu::x86::{ArchEvent, Capability, EventFilter, amd, intel, lbr};
use vpmu_perf::{Backing, Support, Vendor};

use crate::cpuid::{self, CpuidEntry};
use crate::deadline::{DEADLINE_MSR, DEADLINE_SLOT_MSR};
use crate::error::Error;
use crate::options::{Lbr, Model, Options};
use crate::paravirt::{PMU_DOORBELL_MSR, PMU_PAGE_MSR};
use crate::trial;
use branches::{BTF, LBR, offer_lbr, with_lbr};
pub(crate) use pebs::samples;

/// Counters that share a clock. More would do no harm, but would be useless: they all count the same.
const CLOCK_COUNTERS: u8 = 8;
/// Counters that nearly all processors have for their host's own use. More would be shared in time.
const HARDWARE_COUNTERS: u8 = 4;

/// The parts that a VM's guest is offered, the same on each vCPU. The default offers none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// The PMU. `None`: the guest has none, and nothing is asked of perf.
    pub pmu: Option<Pmu>,
    /// Whether the guest has the registers of the lazy TSC deadline (docs/how/lazy-deadline.md).
    pub deadline: bool,
}

/// The PMU that a guest is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is one for each VM")]
pub enum Pmu {
    /// Intel's or AMD's, for stock guests.
    Architectural(Capability),
    /// The paravirtual PMU, for guests with its driver (docs/how/paravirtual-pmu.md).
    Paravirtual(paravirt::Offer),
}

impl From<Pmu> for Offer {
    fn from(pmu: Pmu) -> Self {
        Self {
            pmu: Some(pmu),
            deadline: false,
        }
    }
}

impl From<Capability> for Offer {
    fn from(capability: Capability) -> Self {
        Pmu::Architectural(capability).into()
    }
}

impl Pmu {
    /// Returns the number of counters.
    pub(crate) fn counters(&self) -> usize {
        match self {
            Self::Architectural(Capability::Intel(pmu)) => {
                usize::from(pmu.general) + pmu.fixed.count_ones() as usize
            }
            Self::Architectural(Capability::Amd(pmu)) => pmu.counters().len() as usize,
            Self::Paravirtual(offer) => offer.counters.into(),
        }
    }

    pub(crate) fn has_pebs(&self) -> bool {
        matches!(self, Self::Architectural(Capability::Intel(pmu)) if pmu.pebs.is_some())
    }
}

impl Offer {
    /// Returns the architectural PMU, if the guest is offered one.
    pub fn capability(&self) -> Option<Capability> {
        match &self.pmu {
            Some(Pmu::Architectural(capability)) => Some(*capability),
            Some(Pmu::Paravirtual(_)) | None => None,
        }
    }

    /// Returns the MSRs of all offered parts, for [`intercept`](crate::intercept).
    pub fn msrs(&self) -> Vec<u32> {
        let mut msrs = match &self.pmu {
            None => Vec::new(),
            Some(Pmu::Architectural(capability)) => capability.msrs().collect(),
            Some(Pmu::Paravirtual(_)) => vec![PMU_PAGE_MSR, PMU_DOORBELL_MSR],
        };
        if self.deadline {
            // IA32_TSC_DEADLINE stays KVM's, which answers it before the filter.
            msrs.extend([DEADLINE_SLOT_MSR, DEADLINE_MSR]);
        }
        msrs
    }

    /// Turns `cpuid`, of a guest without these parts, into that of a processor with them. Call this
    /// after the VMM's own changes, many of which clear leaf 0AH. A second call changes nothing.
    ///
    /// With AMD's PMU the guest's processor is the host's; otherwise it is an Intel processor of no known model. With
    /// Intel's PMU on an AMD host, vendor and features become Intel's, and the TSC has `tsc_khz`. Features that no
    /// guest with an architectural PMU can use, because their MSRs are the PMU's, are not offered: Intel PT, the debug
    /// store, bus lock detection, instruction-based sampling and their kin. VMX and SVM are not offered: a guest of
    /// such a PMU has no guests of its own. With a paravirtual PMU, the VMM offers the guest no other.
    pub fn set_cpuid(&self, cpuid: &mut Vec<CpuidEntry>, tsc_khz: u32) {
        let paravirtual = match &self.pmu {
            None => None,
            Some(Pmu::Architectural(capability)) => {
                cpuid::set_architectural(cpuid, capability, tsc_khz);
                None
            }
            Some(Pmu::Paravirtual(offer)) => Some(offer),
        };
        cpuid::set_own(cpuid, self.deadline, paravirtual);
    }

    /// Checks, in place of [`detect`], that this host can back the offer of a saved guest. Call this where `detect` would be
    /// called: it tries hardware counters, which [`Vcpu::attach`](crate::Vcpu::attach) believes.
    ///
    /// # Errors
    ///
    /// As of `detect`, and when the host cannot count what was offered.
    pub fn check(&self, options: &Options) -> Result<(), Error> {
        let Some(pmu) = &self.pmu else {
            return Ok(());
        };
        backing(tried(options)?, options, pmu).map(drop)
    }

    /// Returns the guest's IA32_MISC_ENABLE with bits 11 and 12 (BTS and PEBS unavailable) as this PMU has them. The VMM
    /// gives the register this value before the vCPU runs. Other bits are those of `value`.
    pub fn misc_enable(&self, value: u64) -> u64 {
        let both = misc_enable::BTS_UNAVAILABLE | misc_enable::PEBS_UNAVAILABLE;
        let unavailable = match self.capability() {
            Some(Capability::Intel(pmu)) => pmu.misc_enable(),
            Some(Capability::Amd(_)) | None => both,
        };
        // Both bits are the PMU's to say, whatever KVM's default is.
        value & !both | unavailable
    }

    /// Returns whether the guest is offered last branch records.
    pub fn has_lbr(&self) -> bool {
        self.lbr() != Lbr::Off
    }

    /// Returns the last branch records that the guest is offered, by their number.
    pub fn lbr(&self) -> Lbr {
        let depth = match self.capability() {
            Some(Capability::Intel(pmu)) => pmu.lbr.map(|lbr| lbr.deepest()),
            Some(Capability::Amd(pmu)) => pmu.offered_lbr().map(|_| lbr::amd::DEPTH),
            None => None,
        };
        depth.map_or(Lbr::Off, Lbr::Depth)
    }

    /// Returns what the guest cannot find out, for the VMM's log: AMD's PMU has no way to say that nothing counts
    /// instructions here, nor that there are fewer counters than its interface has. May be called from any thread.
    pub fn warning(&self, options: &Options) -> Option<&'static str> {
        self.warning_beside(|| support(options).ok()?.counters)
    }

    /// `free`: the host's counters that nobody has pinned, where it has any.
    fn warning_beside(&self, free: impl FnOnce() -> Option<u8>) -> Option<&'static str> {
        let Some(Capability::Amd(pmu)) = self.capability() else {
            return None;
        };
        if !pmu.has_event(ArchEvent::Instructions) {
            return Some(
                "a clock counts here: instructions, branches and cache events read 0 in the guest, which AMD's PMU cannot say; \
                 offer Intel's, or do not publish them",
            );
        }
        free().is_some_and(|free| free < pmu.count()).then_some(
            "others have counters of this host's (its NMI watchdog: sysctl kernel.nmi_watchdog=0; perf): a guest that uses all of \
             its own counts with each a part of the time, which this interface of AMD's PMU cannot say; PerfMonV2 and Intel's can",
        )
    }

    pub(crate) fn has_pebs(&self) -> bool {
        self.pmu.as_ref().is_some_and(Pmu::has_pebs)
    }
}

/// Finds out what this host can back: the best PMU of this model that a guest can be offered here. May be called from
/// any thread, before there is a VM. Where only a clock counts, a guest is offered cycles and reference cycles. With
/// hardware counters, it is offered those of the seven architectural events that the host's PMU has. A guest with AMD's
/// PMU has no register that lists the events: events that the host lacks count nothing. A guest of a few instructions
/// tries the hardware counters, once for the process: where they count the host, or nothing, a clock counts.
///
/// # Errors
///
/// When this process may not count a guest's kernel, when the host has no perf events, when AMD's PMU is asked for on a
/// processor that is not AMD's, or when PEBS is asked for where records would be late and the VMM does not accept that
/// ([`Skid`](crate::Skid)).
pub fn detect(model: Model, options: &Options) -> Result<Offer, Error> {
    // A wrong signal would be found by `attach` only, when the VMM has made its VM.
    options.check()?;
    let model = with_lbr(model, options.lbr != Lbr::Off);
    let support = tried(options)?;
    let mut pmu = best(model, Vendor::of_host(), support)?;
    if options.lbr != Lbr::Off {
        let architectural = match &mut pmu {
            Pmu::Architectural(capability) => Some(capability),
            Pmu::Paravirtual(_) => None,
        };
        offer_lbr(architectural, options.lbr)?;
    }
    let offer = Offer::from(pmu);
    // A VMM is to know before it has made a VM that there can be no ring buffer, or that records would be late.
    if offer.has_pebs() {
        pebs::check_skid(options.skid, support.backing)?;
        samples(options)?;
    }
    Ok(offer)
}

/// Returns what this host counts, after a try of its counters. A choice of the best is then a clock where they count what is
/// not the guest's.
///
/// # Errors
///
/// When hardware counters are asked for, and do not count guests alone.
fn tried(options: &Options) -> Result<Support, Error> {
    let found = support(options)?;
    // While another VM has the PMU, a try would find nothing out.
    if found.backing == Backing::Clock || found.mediated {
        return Ok(found);
    }
    // Once for the process: a trial runs a guest for some ms.
    match (trial::broken(), options.backing) {
        (None, _) => Ok(found),
        (Some(broken), Some(Backing::Hardware)) => Err(Error::GuestsOnly(broken)),
        // The options know by now that hardware is broken.
        (Some(_), None | Some(Backing::Clock)) => support(options),
    }
}

fn support(options: &Options) -> Result<Support, Error> {
    Ok(vpmu_perf::support(&options.perf())?)
}

/// Returns the best PMU of this model that `support` backs on a host of this vendor's.
fn best(model: Model, host: Vendor, support: Support) -> Result<Pmu, Error> {
    Ok(match model {
        Model::Auto if host == Vendor::Amd => {
            return best(Model::Amd(amd::Interface::Core), host, support);
        }
        Model::Auto => return best(Model::INTEL, host, support),
        Model::Intel {
            version,
            pebs: has_pebs,
        } => {
            let offered = intel::Capability::new(version);
            // An event that is offered and not counted would read as zero, and perf would print it.
            let events = support.events & offered.events;
            let fixed = intel::Capability::fixed_for(version, events);
            // Other processors have no counters of their own for these, which then take those that events share.
            let taken = match host {
                Vendor::Intel => 0,
                Vendor::Amd | Vendor::Other => fixed.count_ones() as u8,
            };
            let capability = intel::Capability {
                general: at_most(offered.general, support, taken),
                events,
                fixed,
                other_debugctl: LBR | BTF,
                pebs: has_pebs.then(|| PebsCapability {
                    linear_address_bits: pebs::linear_address_bits(),
                }),
                ..offered
            };
            Pmu::Architectural(capability.into())
        }
        // The guest would keep this processor's vendor, and its kernel drives AMD's PMU on AMD's processors only.
        Model::Amd(_) if host != Vendor::Amd => return Err(Error::NoAmd),
        Model::Amd(interface) => {
            let events = support.events;
            Pmu::Architectural(
                amd::Capability {
                    events,
                    v2_counters: at_most(amd::MAX_COUNTERS, support, 0),
                    ..amd::Capability::new(interface)
                }
                .into(),
            )
        }
        Model::Paravirtual => {
            let hardware = support.backing == Backing::Hardware;
            Pmu::Paravirtual(paravirt::Offer {
                counters: if hardware {
                    at_most(HARDWARE_COUNTERS, support, 0)
                } else {
                    CLOCK_COUNTERS
                },
                events: support.events,
                // A clock knows no rings, and counts nothing else.
                rings: hardware,
                raw: hardware,
                filter: EventFilter::default(),
            })
        }
    })
}

/// Returns how many of `counters` a guest can be promised: those that count all the time beside the other users of the
/// host's PMU, and beside `taken` of its own. One is promised where all are taken for a time.
fn at_most(counters: u8, support: Support, taken: u8) -> u8 {
    let left = |free: u8| free.saturating_sub(taken).max(1);
    support
        .counters
        .map_or(counters, |free| counters.min(left(free)))
}

/// Returns the backing that counts for a guest with this PMU.
///
/// # Errors
///
/// When this host cannot count the events that the guest is offered.
pub(crate) fn check(options: &Options, pmu: &Pmu) -> Result<Backing, Error> {
    backing(support(options)?, options, pmu)
}

/// As [`check`], by what was found of this host.
fn backing(found: Support, options: &Options, pmu: &Pmu) -> Result<Backing, Error> {
    let Support {
        backing, events, ..
    } = found;
    if pmu.has_pebs() {
        pebs::check_skid(options.skid, backing)?;
    }
    match pmu {
        Pmu::Architectural(capability) => {
            // A saved guest may come from another host.
            if matches!(capability, Capability::Amd(_)) && Vendor::of_host() != Vendor::Amd {
                return Err(Error::NoAmd);
            }
            check_events(events, |event| capability.has_event(event))?;
        }
        Pmu::Paravirtual(offer) => check_events(events, |event| offer.has_event(event))?,
    }
    Ok(backing)
}

/// Checks that all offered events are among those that are counted here.
fn check_events(here: u32, offered: impl Fn(ArchEvent) -> bool) -> Result<(), Error> {
    let counted = |event: ArchEvent| {
        let bit = event.cpuid_bit().map_or(0, |bit| 1 << bit);
        here & bit != 0
    };
    ArchEvent::ENUMERATED
        .into_iter()
        .filter(|&event| offered(event))
        .find(|&event| !counted(event))
        .map_or(Ok(()), |event| Err(Error::Event(event)))
}

#[cfg(test)]
mod tests;
