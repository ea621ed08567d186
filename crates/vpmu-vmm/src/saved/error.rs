//! Why a machine cannot be saved, or a saved one cannot go on here.

use std::io;

use vpmu::x86::ArchEvent;

/// Why a machine cannot be saved, or a saved one cannot go on here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It cannot be written. What was there before still is.
    #[error("save the machine to {0}: {1}")]
    Write(String, #[source] io::Error),
    /// It cannot be read.
    #[error("restore from {0}: {1}")]
    Read(String, #[source] io::Error),
    /// Some other file.
    #[error("restore from {0}: it holds no machine that vpmu-vmm has saved")]
    Foreign(String),
    /// Of another vpmu-vmm.
    #[error(
        "restore from {file}: its format is {saved}, and this vpmu-vmm reads {known}; use the one \
         that saved it"
    )]
    Version {
        /// Which file.
        file: String,
        /// What it says.
        saved: u32,
        /// What can be read.
        known: u32,
    },
    /// Not as it was written.
    #[error("restore from {0}: the file is damaged ({1}); save the machine again")]
    Damaged(String, &'static str),
    /// The guest has been told of features that this host does not have.
    #[error(
        "restore on this host: the guest has been told of processor features that are not here \
         (CPUID leaf {leaf:#x}, {register}: {missing:#x}); use a host with the same processor"
    )]
    Features {
        /// The leaf.
        leaf: u32,
        /// EAX to EDX.
        register: &'static str,
        /// The bits.
        missing: u32,
    },
    /// The guest's TSC has another rate.
    #[error(
        "restore on this host: the guest's TSC runs at {saved} kHz and this host's at {here} kHz, \
         and KVM cannot scale it here"
    )]
    Tsc {
        /// The guest's.
        saved: u32,
        /// The host's.
        here: u32,
    },
    /// An MSR that KVM does not take.
    #[error(
        "restore on this host: KVM does not take MSR {index:#x} = {value:#x}; use a host with the \
         same kernel and processor"
    )]
    Msr {
        /// Its address.
        index: u32,
        /// What the guest had there.
        value: u64,
    },
    /// An event that this host cannot count.
    #[error(
        "restore on this host: the guest's PMU counts {0:?}, which this host cannot; restore where \
         there is such a PMU"
    )]
    Event(ArchEvent),
}
