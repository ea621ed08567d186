//! The vpmu engine on stock KVM: a PMU for guests of any VMM, where KVM offers none.
//!
//! KVM hands every access to the PMU's MSRs to the VMM if it is asked to; what it never hands over
//! is RDPMC. So a VMM needs three things, and they are here:
//!
//! - [`VcpuPmu`]: one vCPU's PMU. It sets up CPUID and the MSR filter, completes the exits, and
//!   delivers the interrupt;
//! - [`kernel`]: takes the vmlinux out of a distribution's kernel image and rewrites its RDPMC
//!   instructions into an exit that [`VcpuPmu`] completes;
//! - a host that counts: anything that implements
//!   [`CounterHost`](vpmu::counter::CounterHost), such as `vpmu_perf::PerfHost`.
//!
//! The binary `vpmu-vmm` is a small VMM on the rust-vmm crates that uses them ([`vmm`]).
//!
//! # In a VMM of your own
//!
//! ```no_run
//! use kvm_ioctls::{Kvm, VcpuExit};
//! use vpmu::x86::{Capability, PmuConfig, Version};
//! # use vpmu::{counter::{CounterHost, CounterSet, Lost}, x86::CounterConfig};
//! use vpmu_kvm::VcpuPmu;
//! # struct Host;
//! # impl CounterHost<CounterConfig> for Host {
//! #     fn create(&mut self, _: u8, _: &CounterConfig) -> Result<(), Lost> { Ok(()) }
//! #     fn set_period(&mut self, _: u8, _: Option<core::num::NonZeroU64>) {}
//! #     fn resume(&mut self, _: CounterSet) {}
//! #     fn pause(&mut self, _: CounterSet) {}
//! #     fn read(&mut self, _: u8) -> u64 { 0 }
//! #     fn release(&mut self, _: u8) {}
//! # }
//! # impl Host { fn overflows(&mut self) -> [(u8, vpmu::counter::Report); 0] { [] } }
//! # let host = Host;
//! let kvm = Kvm::new()?;
//! let vm = kvm.create_vm()?;
//! vm.create_irq_chip()?;
//! vpmu_kvm::intercept(&vm, vpmu_kvm::pmu_msrs())?; // these, and no others, come to the VMM
//!
//! let capability = Capability::new(Version::V2);
//! let mut vcpu = vm.create_vcpu(0)?;
//! let mut cpuid = kvm.get_supported_cpuid(80)?;
//! vpmu_kvm::set_cpuid(&mut cpuid, &capability);
//! vcpu.set_cpuid2(&cpuid)?;
//! let mut pmu = VcpuPmu::new(PmuConfig::new(capability), host)?;
//! vpmu_kvm::prepare(&mut vcpu);
//!
//! loop {
//!     for (counter, report) in pmu.host().overflows() {
//!         pmu.overflow(counter, report);
//!     }
//!     pmu.before_run(&vm, &vcpu)?; // delivers the interrupt
//!     match vcpu.run()? {
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
pub mod kernel;
mod lapic;
mod pmu;
mod statistics;
pub mod vmm;

pub use cpuid::{set_cpuid, set_deadline_cpuid};
pub use deadline::{DEADLINE_MSR, DEADLINE_SLOT_MSR, VcpuDeadline, VcpuDeadlineState};
pub use error::Error;
pub use intercept::{intercept, pmu_msrs};
pub use pmu::{RDPMC_PORT, VcpuPmu, VcpuPmuState, prepare};
pub use statistics::{Exit, Statistics};
