// SPDX-License-Identifier: MIT OR Apache-2.0

//! A PMU for guests (`--cpus features=pmu`), by `vpmu-kvm`: KVM hands the PMU's MSRs over, and perf events of the vCPU's
//! thread count.

use std::fmt;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, bitmap::AtomicBitmap};
use vpmu_kvm::{AfterRun, CpuidEntry, GuestMemory, Model, Offer, Options, Rdpmc, Vcpu, Words};

/// What a VM's guest is offered, the same on each vCPU.
pub struct VmPmu {
    offer: Offer,
    options: Options,
    rdpmc: Arc<Rdpmc>,
}

impl VmPmu {
    /// Call this before the VM's first vCPU is created.
    pub fn new(vm: &VmFd) -> anyhow::Result<Self> {
        let options = Options::default();
        let offer = vpmu_kvm::detect(Model::Auto, &options)
            .context("This host permits no PMU for guests (--cpus features=pmu)")?;
        let mut msrs = offer.msrs();
        msrs.extend(Rdpmc::msrs(&offer));
        vpmu_kvm::intercept(vm, &msrs).context("Cannot intercept the MSRs of the PMU")?;
        Ok(Self {
            offer,
            options,
            rdpmc: Arc::new(Rdpmc::new()),
        })
    }

    pub fn attach(
        &self,
        vm: &VmFd,
        vcpu: &VcpuFd,
        memory: Arc<dyn GuestMemory>,
    ) -> anyhow::Result<VcpuPmu> {
        let mut vcpu = Vcpu::attach(vm, vcpu, &self.offer, &self.options, memory)
            .context("Cannot give the vCPU a PMU")?;
        vcpu.set_rdpmc(self.rdpmc.clone());
        Ok(VcpuPmu {
            offer: self.offer.clone(),
            vcpu: Mutex::new(vcpu),
        })
    }
}

/// A vCPU's PMU. The mutex is never contended: `Vcpu` is not `Sync`.
pub struct VcpuPmu {
    offer: Offer,
    vcpu: Mutex<Vcpu>,
}

impl VcpuPmu {
    /// The last change of CPUID.
    pub fn set_cpuid(&self, cpuid: &mut Vec<kvm_cpuid_entry2>, tsc_khz: u32) {
        let mut entries: Vec<CpuidEntry> = cpuid.iter().map(CpuidEntry::from).collect();
        self.offer.set_cpuid(&mut entries, tsc_khz);
        *cpuid = entries.into_iter().map(Into::into).collect();
    }

    pub fn misc_enable(&self, value: u64) -> u64 {
        self.offer.misc_enable(value)
    }

    /// Call this right before each KVM_RUN.
    pub fn before_run(&mut self) -> anyhow::Result<()> {
        Ok(self.vcpu.get_mut().unwrap().before_run()?)
    }

    /// Call this right after each KVM_RUN. Returns whether the exit is the VMM's.
    pub fn after_run(&mut self) -> anyhow::Result<bool> {
        Ok(self.vcpu.get_mut().unwrap().after_run()? == AfterRun::Vmm)
    }
}

/// The guest's RAM, as it is at each access: memory may be plugged.
pub struct PmuMemory(pub GuestMemoryAtomic<GuestMemoryMmap<AtomicBitmap>>);

impl fmt::Debug for PmuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PmuMemory")
    }
}

impl GuestMemory for PmuMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        GuestMemory::read(&*self.0.memory(), address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        GuestMemory::write(&*self.0.memory(), address, bytes)
    }

    fn with_words(&self, address: u64, count: usize, body: &mut dyn FnMut(&dyn Words)) {
        GuestMemory::with_words(&*self.0.memory(), address, count, body);
    }
}
