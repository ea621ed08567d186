//! The parts of a machine, before anything is in it.

use std::ops::RangeInclusive;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vpmu_kvm::{Offer, Rdpmc};

use super::ports::COM1_IRQ;
use super::{Error, kvm};

/// The address of three pages that Intel's processors need for themselves, below the firmware's.
const TSS: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;
/// Bytes of memory that a guest may have. Devices are above the largest.
pub const MEMORY: RangeInclusive<u64> = 64 << 20..=3 << 30;
/// Virtual processors that a guest may have.
pub const MOST_VCPUS: u8 = 64;

/// The machine's parts.
pub(super) struct Hardware {
    pub(super) vm: VmFd,
    pub(super) memory: GuestMemoryMmap,
    /// The serial line's interrupt.
    pub(super) interrupt: EventFd,
    pub(super) vcpus: Vec<VcpuFd>,
    /// KVM's supported features.
    pub(super) cpuid: CpuId,
    /// The MSRs that KVM keeps for a guest, and this program does not.
    pub(super) msrs: Vec<u32>,
}

impl Hardware {
    /// Makes a machine whose guest is offered these parts. `run`: its RDPMCs are rewritten at run time, and read MSRs.
    pub(super) fn new(vcpus: usize, memory: u64, offer: &Offer, run: bool) -> Result<Self, Error> {
        if !MEMORY.contains(&memory) {
            return Err(Error::Config("--memory takes 64M to 3G".to_owned()));
        }
        if !(1..=MOST_VCPUS.into()).contains(&vcpus) {
            return Err(Error::Config("--vcpus takes 1 to 64".to_owned()));
        }
        let system = Kvm::new().map_err(Error::NoKvm)?;
        let vm = kvm("KVM_CREATE_VM", system.create_vm())?;
        kvm(
            "KVM_SET_IDENTITY_MAP_ADDR",
            vm.set_identity_map_address(IDENTITY_MAP),
        )?;
        kvm("KVM_SET_TSS_ADDR", vm.set_tss_address(TSS))?;
        kvm("KVM_CREATE_IRQCHIP", vm.create_irq_chip())?;
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        kvm("KVM_CREATE_PIT2", vm.create_pit2(pit))?;
        let mut offered_msrs = offer.msrs();
        if run {
            offered_msrs.extend(Rdpmc::msrs(offer));
        }
        vpmu_kvm::intercept(&vm, &offered_msrs)?;

        let size = memory as usize;
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), size)])
            .map_err(|_| Error::Memory("what --memory asks for"))?;
        give_memory(&vm, &memory)?;

        let interrupt = EventFd::new(EFD_NONBLOCK).map_err(|e| Error::Os("eventfd", e))?;
        kvm("KVM_IRQFD", vm.register_irqfd(&interrupt, COM1_IRQ))?;
        let vcpus = (0..vcpus)
            .map(|id| kvm("KVM_CREATE_VCPU", vm.create_vcpu(id as u64)))
            .collect::<Result<Vec<_>, Error>>()?;
        let msrs = kvm("KVM_GET_MSR_INDEX_LIST", system.get_msr_index_list())?;
        let msrs = msrs.as_slice().iter().copied();
        Ok(Self {
            vm,
            memory,
            interrupt,
            vcpus,
            cpuid: kvm(
                "KVM_GET_SUPPORTED_CPUID",
                system.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES),
            )?,
            msrs: msrs.filter(|index| !offered_msrs.contains(index)).collect(),
        })
    }
}

#[expect(unsafe_code, reason = "KVM maps this memory by its address")]
fn give_memory(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), Error> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the region is mapped, and `Hardware` keeps it so until every vCPU has stopped.
        kvm("KVM_SET_USER_MEMORY_REGION", unsafe {
            vm.set_user_memory_region(region)
        })?;
    }
    Ok(())
}
