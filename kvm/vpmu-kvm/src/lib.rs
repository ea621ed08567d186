//! The vpmu engine on stock KVM: a PMU for the guests of any VMM, where KVM offers none.
//!
//! KVM hands every access to the PMU's MSRs to the VMM if the VMM asks for that. So a VMM needs:
//!
//! - this crate, which completes what KVM hands over, counts by perf events of the vCPU's thread, and delivers the
//!   interrupt;
//! - RDPMC, which KVM never hands over: at run time by [`Vcpu::set_rdpmc`], for any 64-bit Linux, or from a kernel
//!   that the crate `vpmu-kernel` or the command `vpmu rewrite-kernel` has rewritten, as below;
//! - permission to use perf: CAP_PERFMON, or `/proc/sys/kernel/perf_event_paranoid` of 1 or less.
//!
//! The VMM's binding to KVM does not matter: descriptors are taken as [`AsRawFd`](std::os::fd::AsRawFd), everything else is
//! plain. No call is unsafe. `docs/embed/embedding.md` has the rules that a VMM with jails, snapshots and pauses needs.
//!
//! # In a VMM of your own
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use kvm_bindings::CpuId;
//! use kvm_ioctls::{Kvm, VcpuExit};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//! use vpmu_kvm::{AfterRun, CpuidEntry, Model, Options, Vcpu};
//!
//! // 1. On any thread, before there is a VM: what can this host back?
//! let options = Options::default();
//! let offer = vpmu_kvm::detect(Model::Auto, &options)?;
//!
//! // 2. Before the first vCPU is created: the PMU's MSRs, and no others, come to the VMM.
//! let kvm = Kvm::new()?;
//! let vm = kvm.create_vm()?;
//! vpmu_kvm::intercept(&vm, &offer.msrs())?;
//! vm.create_irq_chip()?;
//! let mut vcpu = vm.create_vcpu(0)?;
//!
//! // 3. After the VMM's own changes of CPUID: the processor and its PMU.
//! let cpuid = kvm.get_supported_cpuid(80)?;
//! let mut leaves: Vec<CpuidEntry> = cpuid.as_slice().iter().map(CpuidEntry::from).collect();
//! offer.set_cpuid(&mut leaves, vcpu.get_tsc_khz()?);
//! let leaves: Vec<_> = leaves.into_iter().map(Into::into).collect();
//! vcpu.set_cpuid2(&CpuId::from_entries(&leaves).unwrap())?;
//!
//! // 4. Before the seccomp filter, on any thread. The memory is the guest's.
//! let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 30)])?;
//! let mut pmu = Vcpu::attach(&vm, &vcpu, &offer, &options, Arc::new(memory))?;
//!
//! // 5. On the vCPU's thread: around each KVM_RUN.
//! loop {
//!     pmu.before_run()?;
//!     let exit = vcpu.run();
//!     match pmu.after_run()? {
//!         AfterRun::Completed | AfterRun::Kicked => continue,
//!         AfterRun::Vmm => {}
//!     }
//!     match exit {
//!         // A signal of the VMM's.
//!         Err(error) if error.errno() == libc::EINTR => vcpu.set_kvm_immediate_exit(0),
//!         exit => match exit? {
//!             VcpuExit::Hlt => break,
//!             _yours => {}
//!         },
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With the feature `bindings`, entries of CPUID convert from and to those of this crate's version of `kvm-bindings`, as
//! above; a VMM on another version converts by `[u32; 7]`. With the feature `vm-memory`, `GuestMemoryMmap` is a
//! [`GuestMemory`]; a VMM on another version implements three functions.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

#[cfg(test)]
extern crate self as vpmu_kvm;

mod cpuid;
mod deadline;
mod error;
#[cfg(feature = "lbr")]
mod follow;
#[cfg(not(feature = "lbr"))]
#[path = "no_follow.rs"]
mod follow;
mod guest;
mod intercept;
mod lapic;
mod memory;
mod offer;
mod options;
mod paravirt;
mod pmu;
mod publish;
mod rdpmc;
mod run;
mod seccomp;
mod slot;
mod state;
mod stats;
mod sys;
mod thread;
mod trial;
mod vcpu;

pub use cpuid::CpuidEntry;
pub use deadline::{DEADLINE_MSR, DEADLINE_SLOT_MSR, Deadline, DeadlineState};
pub use error::Error;
pub use intercept::{Filter, FilterRange, intercept, intercept_beside};

pub use memory::{GuestMemory, Words};
pub use offer::{Offer, Pmu, detect};
pub use options::{Follow, Freeze, Lbr, Model, Options, Pebs, Perfmon, Skid};
pub use paravirt::{PMU_DOORBELL_MSR, PMU_PAGE_MSR, ParavirtState};
pub use publish::{Process, PublishedVcpu, publish, published};
pub use rdpmc::{Rdpmc, RdpmcState};
#[cfg(feature = "seccompiler")]
pub use seccomp::add_seccomp_rules;
pub use seccomp::{
    Argument, SETUP_SYSCALLS, SYSCALLS, Syscall, seccomp_rules, seccomp_setup_rules,
};
pub use state::{SavedPmu, State};
pub use stats::{Arming, CallStacks, Exit, Exits, Replays, Statistics};
pub use trial::guests_only;
pub use vcpu::{AfterRun, RDPMC_PORT, Vcpu};
pub use vpmu::counter::{Counter, CounterState, Policy};
pub use vpmu::x86::{Capability, CpuidLeaf, Outcome, amd, intel, lbr, pebs};
pub use vpmu_perf::{Backing, Flag, GuestsOnly, KICKED, Kick, PerfError, Vendor, overrun};

/// The guide's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embed/embedding-example.md")]
struct EmbeddingGuide;
