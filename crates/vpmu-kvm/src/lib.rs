//! The vpmu engine on stock KVM: a PMU for guests of any VMM, where KVM offers none.
//!
//! KVM hands every access to the PMU's MSRs to the VMM if it is asked to; what it never hands over
//! is RDPMC. So a VMM needs three things, and they are here:
//!
//! - [`VcpuPmu`]: one vCPU's PMU. It sets up CPUID and the MSR filter, completes the exits, and
//!   delivers the interrupt;
//! - the crate `vpmu-kernel`: takes the vmlinux out of a distribution's kernel image and rewrites its RDPMC
//!   instructions into an exit that [`VcpuPmu`] completes;
//! - a host that counts: anything that implements
//!   [`CounterHost`](vpmu::counter::CounterHost), such as `vpmu_perf::PerfHost`.
//!
//! The crate `vpmu-vmm` is a small VMM on the rust-vmm crates that uses them.
//!
//! # In a VMM of your own
//!
//! ```no_run
//! use kvm_ioctls::{Kvm, VcpuExit};
//! use vpmu::x86::intel::{Capability, PmuConfig, Version};
//! use vpmu_kvm::VcpuPmu;
//! use vpmu_perf::{PerfHost, PerfOptions};
//!
//! let kvm = Kvm::new()?;
//! let vm = kvm.create_vm()?;
//! vpmu_kvm::disable_kvm_pmu(&vm)?;
//! vm.create_irq_chip()?;
//! vpmu_kvm::intercept(&vm, vpmu_kvm::pmu_msrs())?; // these, and no others, come to the VMM
//!
//! let capability = Capability::new(Version::V2);
//! let mut vcpu = vm.create_vcpu(0)?;
//! let mut cpuid = kvm.get_supported_cpuid(80)?;
//! vpmu_kvm::set_cpuid(&mut cpuid, &capability);
//! vcpu.set_cpuid2(&cpuid)?;
//! // From here on, all on the vCPU's thread.
//! let mut host = PerfHost::new(PerfOptions {
//!     tsc_hz: u64::from(vcpu.get_tsc_khz()?) * 1000,
//!     backing: None,
//!     approximate_instructions: false,
//! })?;
//! // SAFETY: kvm_run outlives the host, and only this thread touches this byte of it.
//! unsafe { host.set_kick(&raw mut vcpu.get_kvm_run().immediate_exit) };
//! let mut pmu = VcpuPmu::new(PmuConfig::new(capability), host)?;
//! vpmu_kvm::prepare(&mut vcpu);
//!
//! loop {
//!     pmu.take_overflows();
//!     pmu.before_run(&vm, &vcpu)?; // delivers the interrupt
//!     let exit = match vcpu.run() {
//!         // An overflow's signal has taken the vCPU out of the guest.
//!         Err(error) if error.errno() == libc::EINTR => {
//!             vcpu.set_kvm_immediate_exit(0);
//!             continue;
//!         }
//!         exit => exit?,
//!     };
//!     pmu.take_overflows(); // what was counted up to this exit comes before the access
//!     match exit {
//!         VcpuExit::X86Rdmsr(mut exit) => { pmu.rdmsr(&mut exit); }
//!         VcpuExit::X86Wrmsr(mut exit) => { pmu.wrmsr(&mut exit); }
//!         VcpuExit::IoOut(vpmu_kvm::RDPMC_PORT, _) => pmu.rdpmc(&mut vcpu)?,
//!         exit => break, // yours
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod cpuid;
mod deadline;
mod error;
mod intercept;
mod lapic;
mod pmu;
mod stats;

pub use cpuid::{set_cpuid, set_deadline_cpuid};
pub use deadline::{DEADLINE_MSR, DEADLINE_SLOT_MSR, VcpuDeadline, VcpuDeadlineState};
pub use error::Error;
pub use intercept::{disable_kvm_pmu, intercept, pmu_msrs};
pub use pmu::{RDPMC_PORT, VcpuPmu, prepare};
pub use stats::{Exit, Statistics};
