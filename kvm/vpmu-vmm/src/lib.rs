//! A small VMM around [`vpmu_kvm::Vcpu`]: enough of a machine for a stock Linux.
//!
//! The machine has memory, in-kernel interrupt controllers and timers, a serial port, and the power
//! button's registers. It has no disk and no network: a guest's files are in its initramfs. The VMM
//! exists to run the engine under real guests and to measure it. A VMM with devices embeds
//! [`vpmu_kvm`] itself.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod acpi;
mod boot;
mod cpuid;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod forged;
mod hardware;
mod machine;
mod ports;
mod saved;
mod threads;
mod vcpu;
mod vm;

use std::path::PathBuf;

use vpmu::x86::ArchEvent;
use vpmu_kvm::Policy;
pub use vpmu_kvm::{Model, Options, Skid};

pub use hardware::{MEMORY, MOST_VCPUS};
pub use vm::{restore, run};

/// The machine to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// A bzImage or an ELF file.
    pub kernel: PathBuf,
    /// The parts of the kernel's initramfs.
    pub initrd: Vec<PathBuf>,
    /// The kernel's command line.
    pub command_line: String,
    /// Virtual processors: 1 to 64.
    pub vcpus: u8,
    /// Memory, bytes: 64 MiB to 3 GiB.
    pub memory: u64,
    /// The guest's PMU; `None`: the guest has none.
    pub pmu: Option<PmuOptions>,
    /// Whether the guest is offered the registers of the lazy deadline ([`vpmu_kvm::Deadline`]).
    pub lazy_deadline: bool,
    /// The file for the machine when its guest or SIGUSR2 asks for a save; `None`: nothing saves
    /// it.
    pub save: Option<PathBuf>,
    /// Whether the guest may begin and end measurements. Each measurement reads files of the
    /// host's, so a guest that does nothing else keeps its vCPU's thread busy there.
    pub measure: bool,
    /// Whether an unpacked kernel is kept in the user's cache folder, and taken from there.
    pub kernel_cache: bool,
}

/// The saved machine to continue.
#[derive(Clone, Debug)]
pub struct Restore {
    /// A machine that was saved.
    pub file: PathBuf,
    /// A policy in place of the saved one.
    pub policy: Option<Policy>,
    /// Whether this host's PEBS records may be late.
    pub skid: Skid,
    /// As in [`Config`].
    pub save: Option<PathBuf>,
    /// As in [`Config`].
    pub measure: bool,
    /// Whether a paravirtual PMU leaves its guest, as on a host that has none.
    pub drop_paravirtual: bool,
}

/// The kind of a PMU.
#[derive(Clone, Debug)]
pub struct PmuOptions {
    /// The model of the PMU.
    pub model: Model,
    /// How the host works for the guest.
    pub options: Options,
    /// The way of the guest's RDPMC to the VMM.
    pub rdpmc: Rdpmc,
}

/// The way of a guest's RDPMC to the VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Rdpmc {
    /// The kernel's RDPMCs are rewritten at load: no KASLR, no kexec, none in user space
    Load,
    /// The guest's #GP handler becomes an exit at run time: any kernel, and user space
    #[default]
    Run,
}

impl PmuOptions {
    pub(crate) fn is_paravirtual(&self) -> bool {
        self.model == Model::Paravirtual
    }
}

/// The end of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The guest powered off.
    PowerOff,
    /// The guest reset itself. There is no second boot.
    Reset,
    /// A triple fault: the guest's kernel is broken, or was broken.
    TripleFault,
    /// A signal ended the VMM.
    Interrupted,
    /// The guest was saved, and can continue.
    Saved,
}

/// The reason why a guest could not run, be saved or continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no KVM.
    #[error(
        "cannot open /dev/kvm: {0}; load kvm_intel or kvm_amd, enable virtualisation in the \
         firmware (or nested virtualisation in the cloud), or join the group `kvm`"
    )]
    NoKvm(#[source] kvm_ioctls::Error),
    /// KVM refused a call.
    #[error("KVM: {0} failed: {1}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A file cannot be read.
    #[error("{0}: {1}")]
    File(String, #[source] std::io::Error),
    /// The file is no kernel.
    #[error("{0}: {1}")]
    Kernel(String, #[source] vpmu_kernel::Error),
    /// A part of the kernel does not fit where its headers want it.
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
    /// There can be no such machine.
    #[error("{0}")]
    Config(String),
    /// The PMU part.
    #[error("{0}")]
    Pmu(#[from] vpmu_kvm::Error),
    /// The file for a saved machine cannot be written. The previous file is still there.
    #[error("save the machine to {0}: {1}")]
    Save(String, #[source] std::io::Error),
    /// The file of a saved machine cannot be read.
    #[error("restore from {0}: {1}")]
    Restore(String, #[source] std::io::Error),
    /// The file to restore from is no saved machine.
    #[error("restore from {0}: it holds no machine that vpmu-vmm has saved")]
    Foreign(String),
    /// The file is another vpmu-vmm's: its format, and the one that can be read.
    #[error(
        "restore from {0}: its format is {1}, and this vpmu-vmm reads {2}; use the one that saved it"
    )]
    Version(String, u32, u32),
    /// The file differs from what was written.
    #[error("restore from {0}: the file is damaged ({1}); save the machine again")]
    Damaged(String, &'static str),
    /// The guest has found features that this host does not have: a leaf of CPUID, EAX to EDX, and the bits.
    #[error(
        "restore on this host: the guest has found processor features that are not here \
         (CPUID leaf {0:#x}, {1}: {2:#x}); use a host with the same processor"
    )]
    Features(u32, &'static str, u32),
    /// The guest's TSC has another rate than the host's, which is the second.
    #[error(
        "restore on this host: the guest's TSC runs at {0} kHz and this host's at {1} kHz, \
         and KVM cannot scale it here"
    )]
    Tsc(u32, u32),
    /// An MSR that KVM does not take, and the guest's value of it.
    #[error(
        "restore on this host: KVM does not take MSR {0:#x} = {1:#x}; use a host with the \
         same kernel and processor"
    )]
    Msr(u32, u64),
    /// An event that this host cannot count.
    #[error(
        "restore on this host: the guest's PMU counts {0:?}, which this host cannot; restore where \
         there is such a PMU"
    )]
    Event(ArchEvent),
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
