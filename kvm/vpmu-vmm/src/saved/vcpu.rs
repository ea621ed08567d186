//! One vCPU as KVM has it.
//!
//! No order but this one is safe (QEMU, `kvm_arch_put_registers`; Firecracker, `KvmVcpu`):
//!
//! - KVM_GET_MP_STATE first: it may take an INIT or SIPI, which changes everything else;
//! - KVM_SET_CPUID2 first: it decides which MSRs and which bits there are;
//! - KVM_SET_SREGS before KVM_SET_LAPIC: it holds the APIC's base and mode;
//! - KVM_SET_LAPIC before the deadline: in another mode of its timer the MSR is not taken;
//! - the TSC before the deadline: the TSC's value decides when a deadline fires;
//! - KVM_SET_REGS before KVM_SET_VCPU_EVENTS: it drops a pending exception;
//! - KVM_GET_VCPU_EVENTS last: reading other state may change it.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::{Error, kvm};
use vpmu_kvm::{State, Vendor};

const IA32_TSC: u32 = 0x10;
const IA32_TSC_DEADLINE: u32 = 0x6e0;
/// MSRs that KVM may name, with room for those of later kernels. Linux 6.12 names some 110.
const MOST_MSRS: usize = 1024;
/// The difference of two hosts' TSCs that is tolerated, parts per million: as much as NTP corrects.
const TSC_TOLERANCE_PPM: u32 = 250;

#[derive(Serialize, Deserialize)]
pub(crate) struct VcpuState {
    pub(crate) cpuid: Vec<kvm_cpuid_entry2>,
    /// Its PMU and its deadline.
    pub(crate) parts: State,
    tsc_khz: u32,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

impl VcpuState {
    /// Reads the state of a vCPU that does not run, with no exit waiting for its completion. The
    /// other vCPUs do not run either. `msrs` are the MSRs that may exist.
    pub(crate) fn of(
        fd: &VcpuFd,
        cpuid: &CpuId,
        parts: State,
        msrs: &[u32],
    ) -> Result<Self, Error> {
        Ok(Self {
            cpuid: cpuid.as_slice().to_vec(),
            parts,
            tsc_khz: kvm("KVM_GET_TSC_KHZ", fd.get_tsc_khz())?,
            mp_state: kvm("KVM_GET_MP_STATE", fd.get_mp_state())?,
            regs: kvm("KVM_GET_REGS", fd.get_regs())?,
            sregs: kvm("KVM_GET_SREGS", fd.get_sregs())?,
            xsave: kvm("KVM_GET_XSAVE", fd.get_xsave())?,
            xcrs: kvm("KVM_GET_XCRS", fd.get_xcrs())?,
            debug_regs: kvm("KVM_GET_DEBUGREGS", fd.get_debug_regs())?,
            lapic: kvm("KVM_GET_LAPIC", fd.get_lapic())?,
            msrs: read_msrs(fd, msrs)?,
            events: kvm("KVM_GET_VCPU_EVENTS", fd.get_vcpu_events())?,
        })
    }

    /// Writes the state into a new vCPU. The machine's own state comes after that of all its vCPUs.
    pub(crate) fn restore(&self, fd: &VcpuFd) -> Result<(), Error> {
        let cpuid = self.cpuid()?;
        kvm("KVM_SET_CPUID2", fd.set_cpuid2(&cpuid))?;
        let here = kvm("KVM_GET_TSC_KHZ", fd.get_tsc_khz())?;
        let tolerance = u64::from(here) * u64::from(TSC_TOLERANCE_PPM) / 1_000_000;
        if u64::from(here.abs_diff(self.tsc_khz)) > tolerance {
            fd.set_tsc_khz(self.tsc_khz)
                .map_err(|_| Error::Tsc(self.tsc_khz, here))?;
        }
        kvm("KVM_SET_MP_STATE", fd.set_mp_state(self.mp_state))?;
        kvm("KVM_SET_REGS", fd.set_regs(&self.regs))?;
        kvm("KVM_SET_SREGS", fd.set_sregs(&self.sregs()))?;
        kvm("KVM_SET_XSAVE", set_xsave(fd, &self.xsave))?;
        kvm("KVM_SET_XCRS", fd.set_xcrs(&self.xcrs))?;
        kvm("KVM_SET_DEBUGREGS", fd.set_debug_regs(&self.debug_regs))?;
        kvm("KVM_SET_LAPIC", fd.set_lapic(&self.lapic))?;
        write_msrs(fd, &self.msrs)?;
        kvm("KVM_SET_VCPU_EVENTS", fd.set_vcpu_events(&self.events))
    }

    /// Returns the registers as KVM takes them. AMD's task register is never busy. KVM says that it
    /// is, as Intel's must be, and would make it so. QEMU, where it is the processor, then takes
    /// away the ports that user space has been given (`helper_check_io` knows only a TSS that is
    /// not busy).
    fn sregs(&self) -> kvm_sregs {
        const BUSY: u8 = 1 << 1;
        let mut sregs = self.sregs;
        if Vendor::of_host() == Vendor::Amd {
            sregs.tr.type_ &= !BUSY;
        }
        sregs
    }

    /// Returns whether KVM could have given this state.
    pub(crate) fn is_plausible(&self) -> bool {
        self.tsc_khz != 0
            && self.cpuid.len() <= KVM_MAX_CPUID_ENTRIES
            && self.msrs.len() <= MOST_MSRS
    }

    pub(crate) fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    pub(crate) fn cpuid(&self) -> Result<CpuId, Error> {
        CpuId::from_entries(&self.cpuid)
            .map_err(|_| Error::Stopped("its CPUID has too many leaves".to_owned()))
    }
}

#[expect(unsafe_code, reason = "KVM may read more than a kvm_xsave")]
fn set_xsave(fd: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: KVM reads more than these 4096 bytes only for features that a process has to ask for
    // (arch_prctl, ARCH_REQ_XCOMP_GUEST_PERM). This one never does.
    unsafe { fd.set_xsave(xsave) }
}

/// Returns those of `indices` that exist, in an order in which they can be written.
fn read_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut wanted: Vec<kvm_msr_entry> = indices
        .iter()
        .map(|&index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    wanted.sort_by_key(|msr| rank(msr.index));
    let mut found = Vec::with_capacity(wanted.len());
    let mut rest = wanted.as_slice();
    while !rest.is_empty() {
        let mut msrs = entries(rest)?;
        let read = kvm("KVM_GET_MSRS", fd.get_msrs(&mut msrs))?.min(rest.len());
        found.extend_from_slice(&msrs.as_slice()[..read]);
        // KVM stops at an MSR that this guest does not have.
        rest = rest.get(read + 1..).unwrap_or_default();
    }
    Ok(found)
}

/// Returns the present TSC.
pub(super) fn tsc(fd: &VcpuFd) -> Result<u64, Error> {
    let found = read_msrs(fd, &[IA32_TSC])?;
    Ok(found.first().map_or(0, |msr| msr.data))
}

fn write_msrs(fd: &VcpuFd, values: &[kvm_msr_entry]) -> Result<(), Error> {
    let mut rest = values;
    while !rest.is_empty() {
        let written = kvm("KVM_SET_MSRS", fd.set_msrs(&entries(rest)?))?;
        let Some(refused) = rest.get(written) else {
            break;
        };
        // Some MSRs that can be read cannot be written. They need no write if they have their old
        // value.
        let now = read_msrs(fd, &[refused.index])?;
        if now.first().is_none_or(|now| now.data != refused.data) {
            return Err(Error::Msr(refused.index, refused.data));
        }
        rest = &rest[written + 1..];
    }
    Ok(())
}

/// Returns the order of an MSR: the TSC first, its deadline last.
fn rank(index: u32) -> u8 {
    match index {
        IA32_TSC => 0,
        IA32_TSC_DEADLINE => 2,
        _ => 1,
    }
}

fn entries(msrs: &[kvm_msr_entry]) -> Result<Msrs, Error> {
    Msrs::from_entries(msrs).map_err(|_| Error::Stopped("too many MSRs".to_owned()))
}

#[cfg(any(test, fuzzing))]
impl VcpuState {
    /// Returns the state of a vCPU that has done nothing yet.
    pub(crate) fn blank() -> Self {
        let cpuid = |function| kvm_cpuid_entry2 {
            function,
            eax: 0x1234,
            ..Default::default()
        };
        let msr = |index| kvm_msr_entry {
            index,
            data: u64::MAX,
            ..Default::default()
        };
        Self {
            cpuid: (0..20).map(cpuid).collect(),
            parts: State::empty(),
            tsc_khz: 2_000_000,
            mp_state: kvm_mp_state::default(),
            regs: kvm_regs::default(),
            sregs: kvm_sregs::default(),
            xsave: kvm_xsave::default(),
            xcrs: kvm_xcrs::default(),
            debug_regs: kvm_debugregs::default(),
            lapic: kvm_lapic_state::default(),
            msrs: (0..100).map(msr).collect(),
            events: kvm_vcpu_events::default(),
        }
    }
}
