//! What a VMM may choose, and what this host can do.

use std::sync::Arc;

use vpmu::counter::Policy;
use vpmu::x86::ArchEvent;
use vpmu::x86::intel::{Capability, Version};
use vpmu_perf::{Backing, Kick, PerfOptions, Support};

use crate::error::Error;

/// IA32_DEBUGCTL.BTF (SDM vol. 3B, 18.4.1) is no business of a PMU, but the register comes to the VMM with
/// it. KVM takes the bit and does nothing for it.
const BTF: u64 = 1 << 1;

/// What a VMM may choose. The default is what most want.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What the guest is offered. `None`: what [`detect`] finds.
    pub capability: Option<Capability>,
    /// What counts. `None`: the processor's counters where they can be had, else a clock.
    pub backing: Option<Backing>,
    /// Where only a clock counts: offer instructions and branches too, one for each cycle.
    pub approximate_instructions: bool,
    /// What is asked of the host when.
    pub policy: Policy,
    /// The real-time signal by which perf reports overflows to the vCPU's thread. `None`: SIGRTMIN+1.
    pub signal: Option<i32>,
    /// How an overflow keeps the vCPU from entering the guest. `None`: by `kvm_run.immediate_exit`.
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
        }
    }
}

/// Finds out what this host can back: the best PMU that a guest can be offered here. From any thread, before there is
/// a VM. Where only a clock counts, a guest is offered cycles and reference cycles; with hardware counters, what
/// the host's PMU has of the seven architectural events.
///
/// # Errors
///
/// When this process may not count a guest's kernel, or the host has no perf events.
pub fn detect(options: &Options) -> Result<Capability, Error> {
    support(options).map(best)
}

pub(crate) fn support(options: &Options) -> Result<Support, Error> {
    Ok(vpmu_perf::support(&options.perf(Kick::Nothing, 1))?)
}

/// The best PMU that `support` backs.
fn best(support: Support) -> Capability {
    let offered = Capability::new(Version::V2);
    Capability {
        events: support.events & offered.events,
        other_debugctl: BTF,
        ..offered
    }
}

/// What a guest is offered with `options`, and what counts for it.
pub(crate) fn offer(options: &Options) -> Result<(Capability, Backing), Error> {
    let support = support(options)?;
    let capability = options.capability.unwrap_or_else(|| best(support));
    check(support, &capability)?;
    Ok((capability, support.backing))
}

/// Whether this host can count what a guest with `capability` is offered.
pub(crate) fn check_host(options: &Options, capability: &Capability) -> Result<(), Error> {
    check(support(options)?, capability)
}

fn check(support: Support, capability: &Capability) -> Result<(), Error> {
    check_events(support.events, |event| capability.has_event(event))
}

/// Whether all events that are offered are among those that are counted here.
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

/// A flag for [`Kick::Flag`] in memory of this process.
pub(crate) fn flag<F: vpmu_perf::Flag + 'static>(flag: &Arc<F>) -> Kick {
    let flag: Arc<dyn vpmu_perf::Flag> = flag.clone();
    Kick::Flag(flag)
}
