//! RDPMC of any guest, however it was booted.
//!
//! KVM never hands RDPMC to a VMM. Without a PMU in KVM the instruction is #GP in the guest, so the way to the VMM is the
//! guest's own handler of #GP:
//!
//! - When a vCPU first touches the PMU's registers, the guest has its IDT. Gate 13 names the handler. The first two bytes
//!   of the handler's first instruction behind ENDBR64 become a write to [`ENTRY_PORT`], which exits (`entry.rs`).
//! - At that exit the frame of the exception names the instruction. If that is RDPMC, and may be executed there, it is
//!   completed as the engine says, and the vCPU goes on behind it. Otherwise the displaced instruction is completed,
//!   and the guest's handler goes on as if nothing had happened (`frame.rs`).
//! - An RDPMC of the guest's kernel becomes RDMSR, which differs from it in one bit. The RDMSR exits by the MSR filter
//!   with the counter's number as its index, so the instruction faults only once. RDMSRs elsewhere are KVM's still.
//!
//! A guest whose handler is not of a known form finds no PMU: its accesses to the PMU's registers are #GP.
//!
//! A guest chooses its IDT, its page tables, its code and its stack, and may ring the port at any moment. It reads and
//! changes its own RAM thereby, through its own page tables, and nothing else. docs/how/rdpmc.md has the whole argument.

mod code;
mod entry;
mod frame;
mod vcpu;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_sregs;
use vpmu::x86::Capability;

use crate::error::Error;
use crate::memory::GuestMemory;
use crate::offer::Offer;
use code::{Code, exchange};
pub(crate) use entry::ENTRY_PORT;
use entry::{Entry, Refusal};
pub(crate) use vcpu::VcpuRdpmc;
use vpmu_x86::paging::PAGE;

/// Entries that are known at a time. A guest has one; another kernel that it boots by itself (kexec) has another.
const MOST_ENTRIES: usize = 8;
/// RDPMCs of kernels that become RDMSRs. Linux 6.12 has two, and a module one. The others fault each time.
const MOST_SITES: usize = 64;

/// The low index and the high index of an RDPMC: general counters, and Intel's fixed ones.
const GENERAL: u32 = 0;
const FIXED: u32 = 1 << 30;
/// MSRs of each kind that are handed over. No PMU here has more counters of a kind.
const INDICES: u32 = 8;

/// The second byte of RDMSR, and that of RDPMC. The first is the same.
const RDMSR: [u8; 1] = [0x32];
const RDPMC: [u8; 1] = [frame::RDPMC[1]];

/// The places in a VM's code by which RDPMC reaches the VMM. All vCPUs of a VM share this record:
/// [`Vcpu::set_rdpmc`](crate::Vcpu::set_rdpmc).
#[derive(Debug, Default)]
pub struct Rdpmc {
    places: Mutex<Places>,
    /// Changes when the guest has its own bytes back.
    epoch: AtomicU64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Places {
    entries: Vec<Entry>,
    sites: Vec<Site>,
    /// Whether the newest entry was an exit when it was found. The guest's memory comes from elsewhere then, as that of a
    /// guest that has slept on a disk (hibernation) does, and has sites that nobody knows.
    is_foreign: bool,
}

impl Places {
    /// Makes room for another site, unless all that are known are there.
    fn has_room(&mut self, code: Code<'_>) -> bool {
        if self.sites.len() < MOST_SITES {
            return true;
        }
        // This vCPU is in its kernel. What its tables do not lead to was a module's that has gone. The bytes do not show it:
        // a kernel that traces itself changes the first one of an instruction for a while.
        let is_gone = |site: &Site| site.place(code) != Some(site.physical);
        let gone = self.sites.iter().position(is_gone);
        gone.map(|gone| self.sites.remove(gone)).is_some()
    }
}

/// An RDPMC that has become an RDMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Site {
    /// Linear address of the instruction.
    at: u64,
    /// Physical address of its second byte.
    physical: u64,
}

impl Site {
    /// Returns the physical address of the second byte, as the tables have it now.
    fn place(&self, code: Code<'_>) -> Option<u64> {
        code.kernels_place(self.at.checked_add(1)?)
    }

    /// Gives the guest its RDPMC back, unless the instruction has gone.
    fn remove(&self, code: Code<'_>) {
        let is_there = match self.place(code) {
            Some(now) => now == self.physical,
            // A process's tables may lack most of the kernel (KPTI). Then only the memory shows whether this is still the
            // instruction, or anything else that has a byte 0x32: a module may have gone since.
            None => self.has_first_byte(code.memory),
        };
        if is_there {
            let _ = exchange(code.memory, self.physical, RDMSR, RDPMC);
        }
    }

    /// Returns whether the byte before the second one may be the instruction's first. One on another page is not known.
    fn has_first_byte(&self, memory: &dyn GuestMemory) -> bool {
        let mut first = [0];
        self.physical.is_multiple_of(PAGE)
            || memory.read(self.physical - 1, &mut first) && first == frame::RDPMC[..1]
    }
}

/// The places as a value, which goes with the guest's memory: the memory has the changed bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RdpmcState(Places);

impl Rdpmc {
    /// Makes the record of a VM whose guest has not run.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the MSRs that a rewritten RDPMC of a guest with this offer reads, for [`intercept`](crate::intercept),
    /// beside those of the offer.
    pub fn msrs(offer: &Offer) -> Vec<u32> {
        let general = GENERAL..GENERAL + INDICES;
        match offer.capability() {
            None => Vec::new(),
            Some(Capability::Amd(_)) => general.collect(),
            Some(Capability::Intel(_)) => general.chain(FIXED..FIXED + INDICES).collect(),
        }
    }

    /// Returns the places, to be kept with the guest's memory. No vCPU runs meanwhile.
    pub fn save(&self) -> RdpmcState {
        RdpmcState(self.places().clone())
    }

    /// Takes over the places of a saved guest, whose memory has the changed bytes. Call this before a vCPU runs.
    pub fn restore(&self, state: &RdpmcState) {
        let mut places = state.0.clone();
        // The state may be anybody's. Too many places would only make the look-up slow.
        places.entries.truncate(MOST_ENTRIES);
        places.sites.truncate(MOST_SITES);
        *self.places() = places;
    }

    /// Restores the guest's own bytes, for a host that completes no RDPMC: there RDPMC is #GP, as the host has it. No
    /// vCPU runs meanwhile, and no exit waits for its completion. `vcpu` is any vCPU of the VM. Should a vCPU run
    /// afterwards, its next access to the PMU changes the bytes again.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn disarm(
        &self,
        vcpu: &impl std::os::fd::AsRawFd,
        memory: &dyn GuestMemory,
    ) -> Result<(), Error> {
        let sregs = crate::sys::GET_SREGS.get(vcpu)?;
        self.remove(Code::of(&sregs, memory));
        Ok(())
    }

    fn remove(&self, code: Code<'_>) {
        let mut places = self.places();
        for entry in places.entries.drain(..) {
            // Where the tables lead elsewhere, the kernel has moved.
            if entry.place(code).is_none_or(|now| now == entry.physical) {
                let _ = entry.disarm(code.memory);
            }
        }
        for site in places.sites.drain(..) {
            site.remove(code);
        }
        drop(places);
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the handler of a vCPU with these registers exit, unless it does.
    fn arm(&self, sregs: &kvm_sregs, memory: &dyn GuestMemory) -> Result<(), Refusal> {
        let code = Code::of(sregs, memory);
        let (entry, is_armed) = Entry::find(sregs, code)?;
        let mut places = self.places();
        // Another vCPU may be at the exit as soon as it is there.
        if !places.entries.contains(&entry) {
            // This vCPU is in its kernel. What its tables do not lead to was another kernel's, which the guest has left:
            // the memory may be anything by now.
            places
                .entries
                .retain(|entry| entry.place(code) == Some(entry.physical));
            places
                .sites
                .retain(|site| site.place(code) == Some(site.physical));
            if places.entries.len() >= MOST_ENTRIES {
                places.entries.remove(0);
            }
            places.entries.push(entry);
            places.is_foreign = is_armed;
        }
        // Another vCPU that was faster has done the same, and holds no lock of the guest's.
        if is_armed || entry.arm(code) {
            return Ok(());
        }
        match Entry::find(sregs, code) {
            Ok((now, true)) if now == entry => Ok(()),
            _ => {
                places.entries.retain(|known| *known != entry);
                Err(Refusal::Memory)
            }
        }
    }

    /// Finds the handler of a vCPU that behaves as if the handler were an exit, and knows it if it is one.
    fn find(&self, sregs: &kvm_sregs, code: Code<'_>) -> Option<Entry> {
        let (entry, is_armed) = Entry::find(sregs, code).ok()?;
        let known = is_armed.then(|| self.arm(sregs, code.memory));
        known?.ok().map(|()| entry)
    }

    /// Returns whether the guest may have RDMSRs that were RDPMCs, and that are no known sites.
    fn is_foreign(&self, sregs: &kvm_sregs, code: Code<'_>) -> bool {
        self.find(sregs, code).is_some() && self.places().is_foreign
    }

    /// Returns the entry whose exit a vCPU with this RIP may have taken.
    fn entry(&self, rip: u64) -> Option<Entry> {
        let places = self.places();
        let mut entries = places.entries.iter();
        entries.find(|entry| entry.is_at(rip)).copied()
    }

    /// Returns whether the instruction at `rip` was an RDPMC.
    fn is_site(&self, rip: u64) -> bool {
        self.places().sites.iter().any(|site| site.at == rip)
    }

    /// Makes the RDPMC of the guest's kernel at `at` an RDMSR, unless there are too many.
    fn rewrite(&self, at: u64, code: Code<'_>) {
        let mut places = self.places();
        let mut site = Site { at, physical: 0 };
        match site.place(code) {
            Some(physical) => site.physical = physical,
            None => return,
        }
        let is_known = places.sites.contains(&site);
        if !is_known {
            if !places.has_room(code) {
                return;
            }
            // Another vCPU may execute the RDMSR as soon as it is there.
            places.sites.push(site);
        }
        // One that is known is an RDMSR already where two vCPUs faulted at once, or an RDPMC again in another kernel.
        if !exchange(code.memory, site.physical, RDPMC, RDMSR) && !is_known {
            places.sites.pop();
        }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether `msr` is the index of an RDPMC. No PMU has an MSR there.
pub(crate) fn is_index(msr: u32) -> bool {
    (GENERAL..GENERAL + INDICES).contains(&msr) || (FIXED..FIXED + INDICES).contains(&msr)
}

#[cfg(test)]
mod tests;
