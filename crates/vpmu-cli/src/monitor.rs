//! The options of the EL2 monitor.

use std::path::PathBuf;

use clap::Args;
use vpmu_lab::spec::SecondRequest;
use vpmu_lab::spec::profile::ProfileRequest;

#[derive(Debug, Args)]
pub(crate) struct Monitor {
    /// Counters that the hypervisor keeps for itself (partitioned, direct)
    ///
    /// The default leaves all to the guest, which then has as many as native.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) host_counters: u32,
    /// Sample the guest from the hypervisor with counters that the guest does not have, RATE times a second: cycles,
    /// or the events named (partitioned, emulated; aarch64)
    ///
    /// Each event takes one of --host-counters. --keep has the profile as folded stacks and for pprof.
    #[arg(long, value_name = "RATE[,EVENT..]", value_parser = host_profile)]
    host_profile: Option<ProfileRequest>,
    /// Take the counters of --host-profile from the guest when CMD begins, and give them back when it ends
    ///
    /// The guest keeps its number of counters. What it has counting on one that is taken stands still.
    #[arg(long, requires = "host_profile")]
    borrow: bool,
    /// Run this arm64 Image or raw binary beside the guest, on its first processor, each in turn (partitioned, emulated;
    /// aarch64)
    ///
    /// The second guest has one processor, 128M of memory, a timer, a PMU, and a serial port of its own, whose output
    /// comes last. The machine goes off when both guests have.
    #[arg(long, value_name = "IMAGE")]
    second: Option<PathBuf>,
    /// The second guest's command line
    #[arg(
        long,
        value_name = "STRING",
        requires = "second",
        allow_hyphen_values = true
    )]
    second_append: Option<String>,
    /// How long one of two guests runs before the other's turn, in microseconds, 10 to 1000000
    #[arg(long, value_name = "US", requires = "second", value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    slice: Option<u32>,
}

impl Monitor {
    pub(crate) fn host_profile(&self) -> Option<ProfileRequest> {
        let borrow = self.borrow;
        self.host_profile
            .clone()
            .map(|profile| ProfileRequest { borrow, ..profile })
    }

    pub(crate) fn second(&self) -> Option<SecondRequest> {
        Some(SecondRequest {
            image: self.second.clone()?,
            append: self.second_append.clone().unwrap_or_default(),
            slice: self.slice,
            eager: false,
        })
    }
}

fn host_profile(text: &str) -> Result<ProfileRequest, String> {
    text.parse()
}
