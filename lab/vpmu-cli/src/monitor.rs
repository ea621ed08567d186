//! The options of the EL2 monitor.

use std::path::PathBuf;

use clap::Args;
use vpmu_lab::spec::command::Command;
use vpmu_lab::spec::profile::ProfileRequest;
use vpmu_lab::spec::{SecondPayload, SecondRequest};

use crate::values::memory;

#[derive(Debug, Args)]
pub(crate) struct Monitor {
    /// Counters that the hypervisor keeps for itself (partitioned, direct; emulated with --host-profile)
    ///
    /// The default leaves all to the guest, which then has as many as native.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) host_counters: u32,
    /// Sample the guest from the hypervisor with counters that the guest does not have, RATE times a second (1 to
    /// 10000): cycles, or up to four of cycles, instructions and numbers such as 0x11 (partitioned, emulated; aarch64)
    ///
    /// Each event takes one of --host-counters, or one of the guest's with --borrow. --keep has the profile as folded
    /// stacks.
    #[arg(long, value_name = "RATE[,EVENT..]")]
    host_profile: Option<ProfileRequest>,
    /// Take the counters of --host-profile from the guest when CMD begins, and give them back when it ends
    ///
    /// The guest keeps its number of counters. What it has counting on one that is taken stands still.
    #[arg(long, requires = "host_profile")]
    borrow: bool,
    /// Run this arm64 Image or raw binary beside the guest, on its first processor, each in turn; `linux`: the guest's
    /// own Linux once more (partitioned, emulated; aarch64)
    ///
    /// The second guest has one processor, memory, a timer, a PMU, and a serial port of its own, whose output comes last.
    /// The machine goes off when both guests have. A file of the name linux is ./linux.
    #[arg(long, value_name = "IMAGE")]
    second: Option<PathBuf>,
    /// What --second linux runs, a line for the shell; without it the same as the first guest, CMD
    #[arg(long, value_name = "CMD", requires = "second")]
    second_command: Option<String>,
    /// The initrd of the second guest's IMAGE
    #[arg(
        long,
        value_name = "FILE",
        requires = "second",
        conflicts_with = "second_command"
    )]
    second_initrd: Option<PathBuf>,
    /// The second guest's memory, of --memory (default: 384M for `linux`, else 128M)
    #[arg(long, value_name = "SIZE", requires = "second", value_parser = memory)]
    second_memory: Option<u32>,
    /// The second guest's command line; for `linux`, more words for it
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
        let image = self.second.clone()?;
        let payload = if image.as_os_str() == "linux" && self.second_initrd.is_none() {
            SecondPayload::Linux
        } else {
            SecondPayload::Image {
                image,
                initrd: self.second_initrd.clone(),
            }
        };
        Some(SecondRequest {
            payload,
            command: Command::from_words(self.second_command.as_slice()),
            memory: self.second_memory,
            append: self.second_append.clone().unwrap_or_default(),
            slice: self.slice,
            eager: false,
        })
    }
}
