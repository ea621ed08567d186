//! A small VMM around [`VcpuPmu`](vpmu_kvm::VcpuPmu): enough of a machine for a stock Linux.
//!
//! Memory, in-kernel interrupt controllers and timers, a serial port, the power button's registers.
//! No disk, no network: what a guest needs is in its initramfs. It exists to run the engine under
//! real guests and to measure it; a VMM with devices embeds [`VcpuPmu`](vpmu_kvm::VcpuPmu) itself.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod acpi;
mod boot;
mod cpuid;
mod deadline;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod forged;
mod hardware;
mod host;
mod machine;
mod pmu;
mod ports;
mod saved;
mod slot;
mod stats;
mod threads;
mod tsc;
mod vcpu;
mod vm;

use std::path::PathBuf;

pub use vpmu_kvm::Model;
use vpmu_kvm::Policy;

pub use hardware::{MEMORY, MOST_VCPUS};
pub use saved::Error as SaveError;
pub use vm::{restore, run};

/// What to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// A bzImage or an ELF file.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub command_line: String,
    /// Virtual processors: 1 to 64.
    pub vcpus: u8,
    /// Memory, bytes: 64 MiB to 3 GiB.
    pub memory: u64,
    /// The guest's PMU; `None`: it has none.
    pub pmu: Option<PmuOptions>,
    /// Whether the guest is offered the registers of [`VcpuDeadline`](vpmu_kvm::VcpuDeadline).
    pub lazy_deadline: bool,
    /// Where the machine is saved when its guest or SIGUSR2 asks for it; `None`: it is not.
    pub save: Option<PathBuf>,
    /// Whether the guest may begin and end measurements. Each reads files of the host's, so a guest
    /// that does nothing else keeps its vCPU's thread busy there.
    pub measure: bool,
    /// Whether an unpacked kernel is kept in the user's cache folder, and taken from there.
    pub kernel_cache: bool,
}

/// What to go on with.
#[derive(Clone, Debug)]
pub struct Restore {
    /// A machine that was saved.
    pub file: PathBuf,
    /// Another policy than it had.
    pub policy: Option<Policy>,
    /// As in [`Config`].
    pub save: Option<PathBuf>,
    /// As in [`Config`].
    pub measure: bool,
    /// Whether a paravirtual PMU leaves its guest, as on a host that has none.
    pub drop_paravirtual: bool,
}

/// What kind of PMU.
#[derive(Clone, Copy, Debug)]
pub struct PmuOptions {
    /// Whose PMU.
    pub model: Model,
    /// What is asked of the host when.
    pub policy: Policy,
    /// Instructions and branches made of time, where nothing can count them.
    pub approximate_instructions: bool,
    /// With PEBS, whose records are made where an overflow takes the vCPU out of the guest.
    pub pebs: bool,
    /// A paravirtual one, for a guest with the driver (`guest/vpmu_pmu`), in place of an architectural one.
    pub paravirtual: bool,
}

/// How the guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It powered off.
    PowerOff,
    /// It reset itself. There is no second boot.
    Reset,
    /// A triple fault: its kernel is broken, or was broken.
    TripleFault,
    /// A signal ended the VMM.
    Interrupted,
    /// It was saved, and can go on.
    Saved,
}

/// Why a guest could not run, or not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No KVM.
    #[error(
        "cannot open /dev/kvm: {0}; load kvm_intel or kvm_amd, enable virtualisation in the \
         firmware (or nested virtualisation in the cloud), or join the group `kvm`"
    )]
    NoKvm(#[source] kvm_ioctls::Error),
    /// KVM said no.
    #[error("KVM: {0} failed: {1}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A file cannot be read.
    #[error("{0}: {1}")]
    File(String, #[source] std::io::Error),
    /// The kernel is none.
    #[error("{0}: {1}")]
    Kernel(String, #[source] vpmu_kernel::Error),
    /// A part of the kernel does not go where its headers want it.
    #[error(
        "the kernel wants memory from {0:#x} to {1:#x}: below 0x100000 it is the VMM's, and above \
         --memory there is none"
    )]
    Load(u64, u64),
    /// The kernel begins where nothing is loaded.
    #[error("the kernel begins at {0:#x}, where none of its segments is loaded")]
    Entry(u64),
    /// Too little memory for kernel and initramfs.
    #[error("{0} does not fit into the guest's memory: give more with --memory")]
    Memory(&'static str),
    /// No such machine.
    #[error("{0}")]
    Config(String),
    /// The PMU part.
    #[error("{0}")]
    Pmu(#[from] vpmu_kvm::Error),
    /// It cannot be saved, or not go on here.
    #[error("{0}")]
    Save(#[from] SaveError),
    /// The operating system.
    #[error("{0}: {1}")]
    Os(&'static str, #[source] std::io::Error),
    /// A bug of this program.
    #[error("a thread panicked: a bug; please report what it said above")]
    Panicked,
    /// KVM stopped the guest.
    #[error("KVM cannot go on with the guest: {0}")]
    Stopped(String),
}

pub(crate) fn kvm<T>(what: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Error> {
    result.map_err(|error| Error::Kvm(what, error))
}
