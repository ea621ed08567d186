//! What every hypervisor at EL2 needs around the engine: on bare-metal AArch64 only.

use core::ffi::c_void;

use vpmu::arm::partition::{Features, PmuRegisters as _, TrapRegisters};
use vpmu::arm::{ExceptionLevel, Outcome, Register};
use vpmu_el2::PhysicalPmu;
use vpmu_el2::access::{Access, Vcpu};

use crate::arm::VpmuArmConfig;
use crate::backed::VpmuBacked;
use crate::partition::{VPMU_ISOLATES_HCCD, VPMU_ISOLATES_HPMD, VPMU_ISOLATES_PARTITION};
use crate::partition::{VpmuPartition, VpmuPartitionConfig, VpmuTraps};
use crate::pmu::{Guest, Pmu};
use crate::registers::{VpmuRegisters, decode};
use crate::room::{self, Mut, Ref, promised};
use crate::status::VpmuStatus;

/// The registers of a vCPU that has left its guest.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuEl2Vcpu {
    /// X0 to X30.
    pub x: *mut u64,
    /// Where the guest goes on: ELR_EL2.
    pub pc: *mut u64,
    /// The state in which it goes on: SPSR_EL2.
    pub pstate: *mut u64,
}

/// As [`VpmuEl2Vcpu`], for who calls from Rust.
fn vcpu<'a>(given: Ref<'a, VpmuEl2Vcpu>) -> Option<Vcpu<'a>> {
    let given = given.get()?;
    let x = promised!(Mut::of(given.x).slice(31, 31))?;
    Some(Vcpu {
        x: x.try_into().ok()?,
        pc: promised!(Mut::of(given.pc)).get()?,
        pstate: promised!(Mut::of(given.pstate)).get()?,
    })
}

unsafe extern "C" fn read(_: *mut c_void, iss: u32) -> u64 {
    decode(iss).map_or(0, |(register, _)| PhysicalPmu.read(register))
}

unsafe extern "C" fn write(_: *mut c_void, iss: u32, value: u64) {
    if let Some((register, _)) = decode(iss) {
        PhysicalPmu.write(register, value);
    }
}

/// Fills `registers` with functions that access the registers of the CPU that executes them.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_registers(registers: Mut<'_, VpmuRegisters>) -> VpmuStatus {
    registers.with(|registers| {
        *registers = VpmuRegisters {
            context: core::ptr::null_mut(),
            read: Some(read),
            write: Some(write),
        };
        VpmuStatus::Ok
    })
}

/// Fills `config` with what this CPU has: `host_counters` of its counters are to be the host's, nothing of its isolation is
/// proven, and all events are allowed. `cpus` are the affinities (MPIDR_EL1) of the `count` CPUs of the machine.
/// `VPMU_STATUS_CONFIG`: there is no PMUv3.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_config(
    config: Mut<'_, VpmuPartitionConfig>,
    host_counters: u8,
    cpus: Ref<'_, u64>,
    count: usize,
) -> VpmuStatus {
    const MOST: usize = 1 << 16;
    let (Some(config), Some(cpus)) = (config.get(), promised!(cpus.slice(count, MOST))) else {
        return VpmuStatus::Misuse;
    };
    let Some(features) = vpmu_el2::features(cpus.iter().copied()) else {
        return VpmuStatus::Config;
    };
    let (id_aa64dfr0, id_aa64mmfr0) = vpmu_el2::id_registers();
    *config = VpmuPartitionConfig {
        id_aa64dfr0,
        id_aa64mmfr0,
        pmceid: [Register::Pmceid0, Register::Pmceid1].map(|register| PhysicalPmu.read(register)),
        implemented: (PhysicalPmu.read(Register::Pmcr) >> 11 & 31) as u8,
        host_counters,
        shares_core: features.multithreaded,
        ..VpmuPartitionConfig::default()
    };
    VpmuStatus::Ok
}

/// Attacks the PMU of this CPU from EL1, EL0 and AArch32, and sets `config->isolation` to what it keeps. Before a guest runs
/// here, on each CPU: it also stops all counters. MDCR_EL2, HDFGRTR_EL2 and HDFGWTR_EL2 are to be written afterwards, the
/// hypervisor's own bits included.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_probe(config: Mut<'_, VpmuPartitionConfig>) -> VpmuStatus {
    let Some(config) = config.get() else {
        return VpmuStatus::Misuse;
    };
    let (dfr0, mmfr0) = (config.id_aa64dfr0, config.id_aa64mmfr0);
    let Some(features) = Features::from_registers(dfr0, mmfr0, 0, []) else {
        return VpmuStatus::Config;
    };
    let findings = vpmu_el2::probe(config.implemented, config.host_counters, &features);
    let kept = findings.isolation;
    config.isolation = (u32::from(kept.partition) * VPMU_ISOLATES_PARTITION)
        | (u32::from(kept.hpmd) * VPMU_ISOLATES_HPMD)
        | (u32::from(kept.hccd) * VPMU_ISOLATES_HCCD);
    VpmuStatus::Ok
}

/// Fills `told` with the emulated PMU that is this CPU's own, for `vpmu_backed_init`: the fewest accesses of such a PMU trap.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_backed_config(
    told: Mut<'_, VpmuArmConfig>,
    cpu: Ref<'_, VpmuPartitionConfig>,
) -> VpmuStatus {
    let (Some(told), Some(cpu)) = (told.get(), cpu.get()) else {
        return VpmuStatus::Misuse;
    };
    let Some(config) = vpmu_el2::partition_config(cpu.host_counters, []) else {
        return VpmuStatus::Config;
    };
    let own = vpmu_el2::emulated_config(&config);
    *told = VpmuArmConfig {
        id_aa64dfr0: cpu.id_aa64dfr0,
        counters: own.counters,
        el3: own.el3,
        aarch32: own.aarch32,
        implementer: own.identity.implementer,
        idcode: own.identity.code,
        pmceid: cpu.pmceid,
        pmmir: own.pmmir,
        policy: 0,
        filter: cpu.filter,
    };
    VpmuStatus::Ok
}

/// Writes MDCR_EL2 and, where they exist, HDFGRTR_EL2 and HDFGWTR_EL2: what the PMU wants, and the hypervisor's own bits.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_set_traps(
    pmu: Ref<'_, VpmuTraps>,
    own: Ref<'_, VpmuTraps>,
) -> VpmuStatus {
    let (Some(pmu), Some(own)) = (pmu.get(), own.get()) else {
        return VpmuStatus::Misuse;
    };
    let registers = |traps: &VpmuTraps| TrapRegisters {
        mdcr_el2: traps.mdcr_el2,
        hdfgrtr_el2: traps.hdfgrtr_el2,
        hdfgwtr_el2: traps.hdfgwtr_el2,
    };
    let (_, id_aa64mmfr0) = vpmu_el2::id_registers();
    // ID_AA64MMFR0_EL1.FGT.
    vpmu_el2::set_traps(
        &registers(pmu),
        &registers(own),
        id_aa64mmfr0 >> 56 & 15 != 0,
    );
    VpmuStatus::Ok
}

/// Gives the guest a synchronous exception with this ESR_EL1, as the processor would.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_inject(esr: u64, vcpu: Ref<'_, VpmuEl2Vcpu>) -> VpmuStatus {
    let Some(vcpu) = self::vcpu(vcpu) else {
        return VpmuStatus::Misuse;
    };
    vpmu_el2::inject(esr, vcpu);
    VpmuStatus::Ok
}

/// Serves a trapped access with this ESR_EL2 in full, in AArch64 or AArch32: the guest goes on behind it, or with an
/// exception. `false`: it is no access of a PMU register, and nothing has changed.
fn exit<G: Guest>(pmu: Mut<'_, G>, esr: u64, given: Ref<'_, VpmuEl2Vcpu>) -> bool {
    room::with(pmu, |held| {
        let mut serve = |register: Register, level: ExceptionLevel, written: Option<u64>| {
            held.pmu.access(register, level, written, &mut held.host)
        };
        complete(esr, given, &mut serve)
    })
}

/// Has `serve` perform the access, and completes it for the guest.
// One for all PMUs, to save a hypervisor a kilobyte for the second.
#[inline(never)]
fn complete(
    esr: u64,
    given: Ref<'_, VpmuEl2Vcpu>,
    serve: &mut dyn FnMut(Register, ExceptionLevel, Option<u64>) -> Outcome,
) -> bool {
    let (Some(access), Some(vcpu)) = (Access::decode(esr), vcpu(given)) else {
        return false;
    };
    let for_access = Vcpu {
        x: &mut *vcpu.x,
        pc: &mut *vcpu.pc,
        pstate: &mut *vcpu.pstate,
    };
    if let Some(esr) = access.complete(for_access, serve) {
        vpmu_el2::inject(esr, vcpu);
    }
    true
}

/// Serves a trapped access of the partitioned PMU with this ESR_EL2 in full, in AArch64 or AArch32: the guest goes on behind
/// it, or with an exception. `false`: it is no access of a PMU register, and nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_partition_exit(
    pmu: Mut<'_, VpmuPartition>,
    esr: u64,
    vcpu: Ref<'_, VpmuEl2Vcpu>,
) -> bool {
    exit(pmu, esr, vcpu)
}

/// Serves a trapped access of the PMU that is emulated on the counters of the CPU, as `vpmu_el2_partition_exit` does. The
/// level of the interrupt may have changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_el2_backed_exit(
    pmu: Mut<'_, VpmuBacked>,
    esr: u64,
    vcpu: Ref<'_, VpmuEl2Vcpu>,
) -> bool {
    exit(pmu, esr, vcpu)
}
