//! A VMM's choices.

use vpmu::counter::Policy;
use vpmu::x86::amd;
pub use vpmu::x86::intel::Version as Perfmon;
pub use vpmu_perf::Freeze;
use vpmu_perf::{Backing, PerfError, PerfOptions};

use crate::error::Error;
use crate::trial;

/// The model of the PMU, and so of the processor, that a guest is offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// AMD's core extension where the host's processor is AMD's, else [`Model::INTEL`].
    #[default]
    Auto,
    /// Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
    Intel {
        /// The version of architectural performance monitoring. A sample costs a guest as much with each version.
        version: Perfmon,
        /// Whether the guest has PEBS: see docs/how/pebs.md for when that is better.
        pebs: bool,
    },
    /// AMD's core performance counters, on hosts of AMD's. The guest keeps the host's processor. With PerfMonV2 a
    /// sample takes more exits, and switching many counters at once takes fewer (docs/how/amd.md).
    Amd(amd::Interface),
    /// The paravirtual PMU, for guests with its driver. No guest finds an architectural PMU beside it.
    Paravirtual,
}

impl Model {
    /// Intel's PMU as it suits most guests: version 5, without PEBS. The bitmap of fixed counters of this version names
    /// no counter without an event here.
    pub const INTEL: Self = Self::Intel {
        version: Perfmon::V5,
        pebs: false,
    };
}

/// The way in which a guest's PEBS records are collected. The records and all registers are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pebs {
    /// As `Buffer` on a host whose perf can sample guests, as `Exit` elsewhere.
    #[default]
    Auto,
    /// Each overflow takes the vCPU out of the guest, and its record is made there.
    Exit,
    /// The host's kernel samples the guest into its ring buffer where it can: records of the basic group, made at a fixed
    /// period, with room for many of them. Others are made as with `Exit`. On the command line this is `--pebs ring`.
    Buffer,
}

/// The skid of a guest's PEBS records: from the instruction that made a counter overflow to the one that the record names.
///
/// Records of a clock have none. Those of hardware counters are some instructions late, because KVM lets no host event be
/// precise in a guest, and no register can say so to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Skid {
    /// PEBS is offered where its records have none.
    #[default]
    Refused,
    /// PEBS is offered everywhere.
    Accepted,
}

/// The last branch records that a guest is offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lbr {
    /// None.
    #[default]
    Off,
    /// As many as the PMU's model can have: 32 with Intel's, 16 with AMD's. Linux uses all that there are.
    On,
    /// This number of records: 8, 16, 24 or 32 with Intel's PMU, 16 with AMD's. A sample of fewer records costs less.
    Depth(u8),
}

/// The way in which a guest is followed for its last branch records. The records are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Follow {
    /// By breakpoints as far ahead as the guest's way is known.
    #[default]
    Ahead,
    /// Instruction by instruction: for comparison.
    Steps,
}

/// A VMM's choices of how the host works for a guest, which does not see them. The default suits most.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What counts. `None`: the processor's counters where perf has them, else the time of the vCPU's thread.
    pub backing: Option<Backing>,
    /// Where a clock counts: instructions and branches, too, one for each cycle. Their distribution is that of time, their
    /// number means nothing.
    pub approximate_instructions: bool,
    /// The time that a clock counts: with or without the host's work for the guest.
    pub freeze: Freeze,
    /// The policy for calls to perf.
    pub policy: Policy,
    /// The way in which PEBS records, and those of the paravirtual PMU's samples, are collected.
    pub pebs: Pebs,
    /// Whether PEBS records may be late.
    pub skid: Skid,
    /// The last branch records that the guest is offered (docs/how/lbr.md). They need this crate's feature `lbr`, and for the
    /// guest Intel's PMU of version 4 or 5, or AMD's PerfMonV2.
    pub lbr: Lbr,
    /// The way in which the guest is followed for them.
    pub follow: Follow,
    /// The real-time signal by which perf reports overflows to the vCPU's thread. `None`: SIGRTMIN+1.
    pub signal: Option<i32>,
}

impl Options {
    /// Checks what no host could do.
    ///
    /// # Errors
    ///
    /// When the signal is no real-time signal.
    pub fn check(&self) -> Result<(), Error> {
        // Signals below lose all but one of those that wait, and with them counters that have overflowed.
        match self.signal {
            Some(signal) if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) => {
                Err(PerfError::Signal(signal).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns the options to try this host with. The others change nothing about what can be counted, and follow from what
    /// the guest is offered, and from its vCPU and its TSC.
    pub(crate) fn perf(&self) -> PerfOptions {
        PerfOptions {
            backing: match self.backing {
                None if trial::is_known_broken() => Some(Backing::Clock),
                // Without a choice, perf finds out by opening an event: a PMU may be there and taken.
                chosen => chosen,
            },
            approximate_instructions: self.approximate_instructions,
            signal: self.signal,
            freeze: self.freeze,
            ..PerfOptions::default()
        }
    }
}
