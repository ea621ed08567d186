//! The reasons why a machine cannot be saved, or a saved machine cannot
//! continue here.

use std::io;

use vpmu::x86::ArchEvent;

/// The reason why a machine cannot be saved, or a saved machine cannot continue
/// here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be written. The previous file is still there.
    #[error("save the machine to {0}: {1}")]
    Write(String, #[source] io::Error),
    /// The file cannot be read.
    #[error("restore from {0}: {1}")]
    Read(String, #[source] io::Error),
    /// Some other file.
    #[error("restore from {0}: it holds no machine that vpmu-vmm has saved")]
    Foreign(String),
    /// The file is another vpmu-vmm's.
    #[error(
        "restore from {file}: its format is {saved}, and this vpmu-vmm reads {known}; use the one \
         that saved it"
    )]
    Version {
        /// The file's name.
        file: String,
        /// The file's format.
        saved: u32,
        /// The format that can be read.
        known: u32,
    },
    /// The file differs from what was written.
    #[error("restore from {0}: the file is damaged ({1}); save the machine again")]
    Damaged(String, &'static str),
    /// The guest has found features that this host does not have.
    #[error(
        "restore on this host: the guest has found processor features that are not here \
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
        /// The guest's rate.
        saved: u32,
        /// The host's rate.
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
        /// The guest's value of the MSR.
        value: u64,
    },
    /// An event that this host cannot count.
    #[error(
        "restore on this host: the guest's PMU counts {0:?}, which this host cannot; restore where \
         there is such a PMU"
    )]
    Event(ArchEvent),
}
