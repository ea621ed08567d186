//! What the KVM host is to do.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// One guest to run on stock KVM, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostJob {
    /// What runs the guest.
    pub vmm: HostVmm,
    /// The VMM's options.
    pub options: Vec<String>,
    /// The guest's kernel command line.
    pub append: String,
    /// The guest's processors.
    pub vcpus: u32,
    /// Whether the host's clock ticks at another rate than the guest's, so that
    /// the host's shares of time are fair.
    pub skew: bool,
    /// Whether KVM's tracepoints count while the guest measures.
    pub trace: bool,
    /// Milliseconds to wait before the guest starts.
    pub settle_ms: u32,
    /// Whether the guest boots from a disk, which the options name, and not a kernel.
    pub boots_disk: bool,
    /// Whether KVM hands the processor's PMU over to the guest (mediated vPMU).
    pub mediates: bool,
}

impl HostJob {
    /// Where the job is in the host's file tree, as JSON.
    pub const PATH: &str = "vpmu/job.json";
}

/// A VMM on stock KVM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostVmm {
    /// Stock QEMU of this name, in `/usr/bin`.
    Qemu(String),
    /// A QEMU that the machine has given the host, with its libraries, and whose guests have the PMU.
    Patched {
        /// Its name.
        name: String,
        /// What happens to the guest while it measures.
        disturb: Option<Disturb>,
    },
    /// Stock QEMU, under `vpmu exec` with these options.
    Exec {
        /// QEMU's name.
        qemu: String,
        /// The options of `vpmu exec`.
        options: Vec<String>,
    },
    /// This project's x86 VMM.
    Ours {
        /// Where the guest is saved when it asks for that; the host then
        /// restores it in another process of the VMM.
        save: Option<String>,
        /// Options of the VMM that restores it, and of no other.
        restore: Vec<String>,
    },
    /// The user's VMM.
    Theirs {
        /// Its path.
        program: String,
        /// The options of `vpmu exec`, where it runs under that.
        exec: Option<Vec<String>>,
    },
}

/// What happens to a guest while it measures, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Disturb {
    /// It goes on in another process of the VMM.
    Migrate(u32),
    /// It goes back to a state that was saved shortly before.
    Loadvm(u32),
    /// It is reset, and begins again.
    Reset(u32),
}
