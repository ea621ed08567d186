//! A VMM's choices, and the abilities of this host.

use std::fs;
use std::sync::Arc;

use vpmu::counter::Policy;
pub use vpmu::x86::intel::Version as Perfmon;
use vpmu::x86::{ArchEvent, Capability, amd, intel, pebs};
use vpmu_perf::{Backing, Kick, PerfOptions, Support, Vendor};

use crate::error::Error;
use crate::guest::GuestMemory;

/// IA32_DEBUGCTL.BTF (SDM vol. 3B, 18.4.1) is no business of a PMU, but the register comes to the VMM with
/// it. KVM takes the bit and does nothing for it.
const BTF: u64 = 1 << 1;

/// The vendor's model of the PMU, and so of the processor, that a guest is offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// AMD's where the host's processor is AMD's, else Intel's.
    #[default]
    Auto,
    /// Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
    Intel,
    /// AMD's core extension: six counters, without global registers. The guest keeps the host's processor.
    Amd,
    /// AMD's PerfMonV2. A sample takes more exits, switching many counters at once fewer (docs/x86-pmu.md).
    AmdV2,
}

/// The way in which a guest's PEBS records are collected. The records and all registers are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pebs {
    /// The guest has no PEBS.
    #[default]
    Off,
    /// Each overflow takes the vCPU out of the guest, and its record is made there.
    Exit,
    /// The host's kernel samples the guest where it can: records of the basic group, made at a fixed period, with room for
    /// many of them. Others are made as with `Exit`.
    Ring,
    /// As `Ring` on a host whose perf can do that, as `Exit` elsewhere.
    Auto,
}

/// A VMM's choices. The default suits most.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The model that [`detect`] finds.
    pub model: Model,
    /// The version of Intel's architectural performance monitoring that [`detect`] finds, and with it Intel's model where
    /// `model` leaves the choice. `None`: version 5, whose bitmap of fixed counters names no counter without an event
    /// here. A sample costs a guest as much with each version.
    pub perfmon: Option<Perfmon>,
    /// The PMU that the guest is offered. `None`: the one that [`detect`] finds.
    pub capability: Option<Capability>,
    /// Whether PEBS is offered with Intel's PMU: see docs/pebs.md for when that is better. Needs `memory`.
    pub pebs: Pebs,
    /// The guest's memory, where PEBS writes records.
    pub memory: Option<Arc<dyn GuestMemory>>,
    /// The backing that counts. `None`: the processor's counters where they are available, else a clock.
    pub backing: Option<Backing>,
    /// Where only a clock counts: offer instructions and branches too, one for each cycle.
    pub approximate_instructions: bool,
    /// The policy for calls to the host.
    pub policy: Policy,
    /// The real-time signal by which perf reports overflows to the vCPU's thread. `None`: SIGRTMIN+1.
    pub signal: Option<i32>,
    /// The way in which an overflow keeps the vCPU from entering the guest. `None`: by `kvm_run.immediate_exit`.
    pub kick: Option<Kick>,
    /// The guest's TSC, Hz. `None`: as KVM says.
    pub tsc_hz: Option<u64>,
}

impl Options {
    pub(crate) fn perf(&self, kick: Kick, tsc_hz: u64) -> PerfOptions {
        PerfOptions {
            tsc_hz,
            backing: self.backing,
            approximate_instructions: self.approximate_instructions,
            signal: self.signal,
            kick,
            repeating: false,
            sampling: false,
        }
    }
}

/// Finds out what this host can back: the best PMU that a guest can be offered here. May be called from any thread,
/// before there is a VM. Where only a clock counts, a guest is offered cycles and reference cycles. With hardware
/// counters, it is offered those of the seven architectural events that the host's PMU has. A guest with AMD's PMU
/// cannot be told which events there are: the others count nothing.
///
/// # Errors
///
/// When this process may not count a guest's kernel, when the host has no perf events, or when AMD's PMU is asked for
/// on a processor that is not AMD's.
pub fn detect(options: &Options) -> Result<Capability, Error> {
    let host = Vendor::of_host();
    samples(options)?;
    best(options, host, support(options)?)
}

/// Returns whether the host's kernel is to sample the guest.
///
/// # Errors
///
/// When it is to, and cannot.
pub(crate) fn samples(options: &Options) -> Result<bool, Error> {
    let can = || vpmu_perf::check_sampling(&options.perf(Kick::Nothing, 1));
    match options.pebs {
        Pebs::Off | Pebs::Exit => Ok(false),
        Pebs::Ring => Ok(can().map(|()| true)?),
        Pebs::Auto => Ok(can().is_ok()),
    }
}

/// Returns whether a guest with `capability` has PEBS.
pub(crate) fn has_pebs(capability: &Capability) -> bool {
    matches!(capability, Capability::Intel(capability) if capability.pebs.is_some())
}

/// Returns whether the linear addresses of this machine's processor, and so of its guests, have five levels.
fn has_five_levels() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "la57"))
    })
}

pub(crate) fn support(options: &Options) -> Result<Support, Error> {
    Ok(vpmu_perf::support(&options.perf(Kick::Nothing, 1))?)
}

/// Returns the best PMU that `support` backs on this host.
fn best(options: &Options, host: Vendor, support: Support) -> Result<Capability, Error> {
    let amd = |interface| {
        if options.pebs != Pebs::Off {
            return Err(Error::NoPebs);
        }
        if options.perfmon.is_some() {
            return Err(Error::NoPerfmon);
        }
        if host != Vendor::Amd {
            return Err(Error::NoAmd);
        }
        Ok(amd::Capability {
            interface,
            events: support.events,
        }
        .into())
    };
    match options.model {
        Model::Amd => amd(amd::Interface::Core),
        Model::AmdV2 => amd(amd::Interface::V2),
        Model::Auto if host == Vendor::Amd && options.perfmon.is_none() => {
            amd(amd::Interface::Core)
        }
        Model::Auto | Model::Intel => {
            let version = options.perfmon.unwrap_or(Perfmon::V5);
            let offered = intel::Capability::new(version);
            let events = support.events & offered.events;
            Ok(intel::Capability {
                events,
                fixed: intel::Capability::fixed_for(version, events),
                other_debugctl: BTF,
                pebs: (options.pebs != Pebs::Off).then(|| pebs::Capability {
                    linear_address_bits: if has_five_levels() { 57 } else { 48 },
                }),
                ..offered
            }
            .into())
        }
    }
}

/// Returns the PMU that a guest is offered with `options`, and the backing that counts for it.
pub(crate) fn offer(options: &Options) -> Result<(Capability, Backing), Error> {
    let support = support(options)?;
    let capability = match options.capability {
        Some(capability) => capability,
        None => best(options, Vendor::of_host(), support)?,
    };
    check(support, &capability)?;
    Ok((capability, support.backing))
}

/// Checks that this host can count the events that a guest with `capability` is offered.
pub(crate) fn check_host(options: &Options, capability: &Capability) -> Result<(), Error> {
    check(support(options)?, capability)
}

fn check(support: Support, capability: &Capability) -> Result<(), Error> {
    if matches!(capability, Capability::Amd(_)) && Vendor::of_host() != Vendor::Amd {
        return Err(Error::NoAmd);
    }
    check_events(support.events, |event| capability.has_event(event))
}

/// Checks that all offered events are among those that are counted here.
pub(crate) fn check_events(here: u32, offered: impl Fn(ArchEvent) -> bool) -> Result<(), Error> {
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

/// Returns a flag for [`Kick::Flag`] in memory of this process.
pub(crate) fn flag<F: vpmu_perf::Flag + 'static>(flag: &Arc<F>) -> Kick {
    let flag: Arc<dyn vpmu_perf::Flag> = flag.clone();
    Kick::Flag(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_gets_the_hosts_vendor() {
        let support = Support {
            backing: Backing::Clock,
            events: 0b101,
        };
        let amd = |interface| {
            Capability::Amd(amd::Capability {
                interface,
                events: 0b101,
            })
        };
        let options = |model, pebs| Options {
            model,
            pebs,
            ..Options::default()
        };
        let found = |model, host| best(&options(model, Pebs::Off), host, support);
        assert_eq!(
            found(Model::Auto, Vendor::Amd),
            Ok(amd(amd::Interface::Core))
        );
        assert_eq!(
            found(Model::AmdV2, Vendor::Amd),
            Ok(amd(amd::Interface::V2))
        );
        for host in [Vendor::Intel, Vendor::Other] {
            assert_eq!(found(Model::Auto, host), found(Model::Intel, Vendor::Amd));
            assert_eq!(found(Model::Amd, host), Err(Error::NoAmd));
        }
        let with_pebs = |model, host| best(&options(model, Pebs::Exit), host, support);
        assert!(!has_pebs(&found(Model::Intel, Vendor::Intel).unwrap()));
        assert!(has_pebs(&with_pebs(Model::Intel, Vendor::Amd).unwrap()));
        assert_eq!(with_pebs(Model::Auto, Vendor::Amd), Err(Error::NoPebs));
    }

    #[test]
    fn a_fixed_counter_that_nothing_backs_is_not_offered_where_it_can_be_left_out() {
        let found = |perfmon, model, events| {
            let options = Options {
                perfmon: Some(perfmon),
                model,
                ..Options::default()
            };
            let support = Support {
                backing: Backing::Clock,
                events,
            };
            best(&options, Vendor::Amd, support)
        };
        let fixed = |perfmon, events| match found(perfmon, Model::Auto, events) {
            Ok(Capability::Intel(found)) => {
                assert_eq!((found.version, found.check()), (perfmon, Ok(())));
                assert_eq!(found.leaf_0a().ebx, !events & 0x7f);
                found.fixed
            }
            other => panic!("{other:?}"),
        };
        for perfmon in [Perfmon::V2, Perfmon::V3, Perfmon::V4] {
            assert_eq!(fixed(perfmon, 0b101), 0b111, "no gaps");
        }
        for (events, counters) in [(0b101, 0b110), (0b111, 0b111), (0x7b, 0b011)] {
            assert_eq!(fixed(Perfmon::V5, events), counters);
        }
        assert_eq!(found(Perfmon::V5, Model::Amd, 1), Err(Error::NoPerfmon));
    }
}
