// SPDX-License-Identifier: Apache-2.0

//! A virtual PMU by vpmu-kvm: counters of perf in the vCPU's thread, where KVM offers the guest none.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vpmu_kvm::{CpuidEntry, Error, Model, Offer, Options, Rdpmc, RdpmcState, State};

use crate::vstate::memory::GuestMemoryMmap;

/// What all vCPUs of a microVM are offered.
#[derive(Debug)]
pub struct Pmu {
    offer: Offer,
    rdpmc: Arc<Rdpmc>,
}

/// A vCPU's PMU. The places of RDPMC are the microVM's.
#[derive(Debug)]
pub struct VcpuPmu {
    /// To be called around each KVM_RUN.
    pub vcpu: vpmu_kvm::Vcpu,
    rdpmc: Arc<Rdpmc>,
}

/// A vCPU's PMU in a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PmuState {
    vcpu: State,
    rdpmc: RdpmcState,
}

impl Pmu {
    /// The best PMU that this host can back.
    pub fn detect() -> Result<Self, Error> {
        let offer = vpmu_kvm::detect(Model::Auto, &Options::default())?;
        Ok(Self {
            offer,
            rdpmc: Arc::new(Rdpmc::new()),
        })
    }

    /// The PMU that a guest was offered before its snapshot.
    pub fn of_snapshot(state: &PmuState) -> Self {
        let rdpmc = Rdpmc::new();
        rdpmc.restore(&state.rdpmc);
        Self {
            offer: state.vcpu.offer(),
            rdpmc: Arc::new(rdpmc),
        }
    }

    /// Asks KVM for the accesses to the PMU. Must come before the first vCPU.
    pub fn intercept(&self, vm: &VmFd) -> Result<(), Error> {
        let msrs: Vec<u32> = self.msrs().into_iter().collect();
        vpmu_kvm::intercept(vm, &msrs)
    }

    /// The MSRs that are in [`PmuState`], so that KVM's values of them mean nothing.
    pub fn msrs(&self) -> BTreeSet<u32> {
        let rdpmc = Rdpmc::msrs(&self.offer);
        self.offer.msrs().into_iter().chain(rdpmc).collect()
    }

    /// The last step of a CPUID's normalization.
    pub fn set_cpuid(
        &self,
        cpuid: &CpuId,
        tsc_khz: u32,
    ) -> Result<CpuId, vmm_sys_util::fam::Error> {
        let mut entries: Vec<_> = cpuid.as_slice().iter().map(CpuidEntry::from).collect();
        self.offer.set_cpuid(&mut entries, tsc_khz);
        let entries: Vec<_> = entries.into_iter().map(Into::into).collect();
        CpuId::from_entries(&entries)
    }

    /// What IA32_MISC_ENABLE says of the PMU.
    pub fn misc_enable(&self, value: u64) -> u64 {
        self.offer.misc_enable(value)
    }

    /// Gives `vcpu` its PMU. Must come after the interrupt controller and before the seccomp filters.
    pub fn attach(
        &self,
        vm: &VmFd,
        vcpu: &VcpuFd,
        memory: &GuestMemoryMmap,
    ) -> Result<VcpuPmu, Error> {
        let memory = Arc::new(memory.clone());
        let mut pmu = vpmu_kvm::Vcpu::attach(vm, vcpu, &self.offer, &Options::default(), memory)?;
        pmu.set_rdpmc(self.rdpmc.clone());
        Ok(VcpuPmu {
            vcpu: pmu,
            rdpmc: self.rdpmc.clone(),
        })
    }
}

impl VcpuPmu {
    /// Must come before KVM's events are read.
    pub fn save(&mut self) -> PmuState {
        PmuState {
            vcpu: self.vcpu.save(),
            rdpmc: self.rdpmc.save(),
        }
    }

    /// Must come last, after memory, TSC and local APIC.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), Error> {
        self.vcpu.restore(&state.vcpu)
    }
}
