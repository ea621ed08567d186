//! One vCPU's RDPMC: what its exits mean.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_regs;
use vpmu::counter::CounterHost;
use vpmu::x86::{CounterConfig, Outcome, Ring, amd, intel};

use super::code::Code;
use super::entry::{Displaced, Entry};
use super::frame::{Frame, TF};
use super::{Rdpmc, is_index};
use crate::error::Error;
use crate::pmu::VcpuPmu;
use crate::run::Kvm;
use crate::stats::Exit;
use crate::sys;

/// Time between two checks for another IDT. A check takes KVM_GET_SREGS and a walk of page tables: some microseconds. A
/// kernel that the guest boots by itself takes longer to come to its PMU.
const INTERVAL: Duration = Duration::from_millis(100);
const RFLAGS_AC: u64 = 1 << 18;

/// One vCPU's view of the places in its VM's code.
#[derive(Debug)]
pub(crate) struct VcpuRdpmc {
    shared: Arc<Rdpmc>,
    /// The last check that has found the handler to exit, and the epoch it was made in.
    armed: Option<(Instant, u64)>,
}

impl VcpuRdpmc {
    pub(crate) fn new(shared: Arc<Rdpmc>) -> Self {
        Self {
            shared,
            armed: None,
        }
    }

    /// Checks whether this vCPU's RDPMC comes to the VMM before `msr` is accessed, if the access asks for a check: the first
    /// of a vCPU, and those that a kernel makes when it searches for a PMU, but no access on the path of a PMI. `false`: the
    /// guest is to find no such register.
    pub(crate) fn permits(&mut self, msr: u32, kvm: &Kvm) -> Result<bool, Error> {
        let epoch = self.shared.epoch.load(Ordering::Relaxed);
        let armed = self.armed.filter(|&(_, armed)| armed == epoch);
        match (Checked::of(msr), armed) {
            (Checked::Select, Some((when, _))) if when.elapsed() < INTERVAL => return Ok(true),
            (Checked::Counters, Some(_)) | (Checked::Other, _) => return Ok(true),
            _ => {}
        }
        let begin = Instant::now();
        let sregs = sys::GET_SREGS.get(&kvm.vcpu)?;
        let armed = self.shared.arm(&sregs, &*kvm.memory);
        let end = Instant::now();
        let arming = &mut kvm.statistics.lock().arming;
        arming.note(armed.is_err(), end - begin);
        self.armed = armed.is_ok().then_some((end, epoch));
        Ok(armed.is_ok())
    }

    /// Performs RDMSR of the index of an RDPMC. Other MSRs are not handled.
    pub(crate) fn rdmsr<H: CounterHost<CounterConfig>>(
        &self,
        msr: u32,
        kvm: &Kvm,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Outcome {
        if !is_index(msr) {
            return Outcome::NotHandled;
        }
        let (_, rip) = kvm.run.rcx_and_rip();
        if self.shared.is_site(rip) || self.is_foreign(kvm) {
            return read(pmu, msr, Ring::Kernel);
        }
        kvm.statistics.lock().count(Exit::MsrRead(msr));
        // The guest has no enlightenments of Hyper-V's, whose MSRs KVM shows its host even so.
        let is_hyperv = msr >= super::FIXED;
        let value = match is_hyperv && !sys::has_hyperv(&kvm.vcpu) {
            true => None,
            false => sys::msr(&kvm.vcpu, msr).ok(),
        };
        value.map_or(Outcome::GeneralProtection, Outcome::Value)
    }

    /// Returns whether the guest may have sites that are not known.
    fn is_foreign(&self, kvm: &Kvm) -> bool {
        // This is no counter's way: no kernel reads the MSRs that are at the counters' indices.
        sys::GET_SREGS.get(&kvm.vcpu).is_ok_and(|sregs| {
            let code = Code::of(&sregs, &*kvm.memory);
            self.shared.is_foreign(&sregs, code)
        })
    }

    /// Completes the exit at the entry of the guest's #GP handler. `false`: the write to the port is another one.
    pub(crate) fn entered<H: CounterHost<CounterConfig>>(
        &self,
        kvm: &Kvm,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<bool, Error> {
        let Some(regs) = kvm.run.regs() else {
            return Ok(false);
        };
        let sregs = sys::GET_SREGS.get(&kvm.vcpu)?;
        if sregs.ss.dpl != 0 {
            // A process that has been given ports. The handler begins at CPL 0.
            return Ok(false);
        }
        let code = Code::of(&sregs, &*kvm.memory);
        let known = self.shared.entry(regs.rip);
        // The guest's memory may come from elsewhere, and this vCPU not have searched for its handler.
        let found = || self.shared.find(&sregs, code);
        let entry = known.or_else(|| found().filter(|entry| entry.is_at(regs.rip)));
        let Some(entry) = entry else {
            return Ok(false);
        };
        let mut complete = || {
            let frame = Frame::of_rdpmc(&sregs, &regs, code)?;
            let Outcome::Value(value) = read(pmu, regs.rcx as u32, frame.ring) else {
                // An index without a counter is the guest's own #GP.
                return None;
            };
            let regs = kvm_regs {
                rax: value & 0xffff_ffff,
                rdx: value >> 32,
                ..regs
            };
            let regs = self.step_over(&frame, &entry, regs, code)?;
            Some((frame, regs))
        };
        match complete() {
            Some((frame, regs)) => {
                kvm.run.set_regs(&regs);
                if frame.ring == Ring::Kernel && frame.rflags & TF != 0 {
                    sys::inject_debug(&kvm.vcpu, sys::DR6_BS)?;
                }
            }
            None => {
                kvm.statistics
                    .lock()
                    .count(Exit::Port(super::entry::ENTRY_PORT));
                kvm.run.set_regs(&displaced(&entry, regs));
            }
        }
        Ok(true)
    }

    /// Returns the registers with which the guest goes on behind its RDPMC.
    fn step_over(
        &self,
        frame: &Frame,
        entry: &Entry,
        regs: kvm_regs,
        code: Code<'_>,
    ) -> Option<kvm_regs> {
        match frame.ring {
            Ring::Kernel => {
                self.shared.rewrite(frame.rip, code);
                // No IRETQ: that would end the blocking of NMIs, in whose handler Linux reads counters.
                Some(kvm_regs {
                    rip: frame.rip.wrapping_add(super::frame::LENGTH),
                    rsp: frame.rsp,
                    rflags: frame.flags(),
                    ..regs
                })
            }
            Ring::User => {
                // The guest's own IRETQ loads and checks the segments, and switches shadow stacks.
                let returns = entry.can_return(code) && frame.step_over(regs.rsp, code);
                returns.then(|| kvm_regs {
                    rip: entry.iretq,
                    // The error code is not IRETQ's.
                    rsp: regs.rsp.wrapping_add(8),
                    ..regs
                })
            }
        }
    }
}

/// Performs RDPMC, by `ring` of the guest.
fn read<H: CounterHost<CounterConfig>>(
    pmu: &mut Option<VcpuPmu<H>>,
    index: u32,
    ring: Ring,
) -> Outcome {
    let pmu = pmu.as_mut();
    pmu.map_or(Outcome::NotHandled, |pmu| pmu.rdpmc(index, ring))
}

/// Returns the registers after the displaced instruction.
fn displaced(entry: &Entry, regs: kvm_regs) -> kvm_regs {
    kvm_regs {
        rip: entry.at.wrapping_add(Displaced::LENGTH),
        rflags: match entry.displaced {
            Displaced::Clac => regs.rflags & !RFLAGS_AC,
            Displaced::Nop => regs.rflags,
        },
        ..regs
    }
}

/// What an access of a register shows of the guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checked {
    /// It says what a counter counts. A kernel that searches for a PMU reads all of these, and none handles a PMI with them.
    Select,
    /// Another register of counters.
    Counters,
    /// A register that a guest without a PMU may still find.
    Other,
}

impl Checked {
    fn of(msr: u32) -> Self {
        use intel::Msr::{DebugCtl, FixedCtrCtrl, PerfCapabilities, PerfEvtSel};

        // An address is of one vendor's PMU alone, so that nearly all accesses are decoded once.
        match intel::Msr::decode(msr) {
            Some(PerfEvtSel(_) | FixedCtrCtrl) => Self::Select,
            Some(PerfCapabilities | DebugCtl) => Self::Other,
            Some(_) => Self::Counters,
            None => match amd::Msr::decode(msr) {
                Some(amd::Msr::Ctl(_) | amd::Msr::LegacyCtl(_)) => Self::Select,
                Some(_) => Self::Counters,
                None => Self::Other,
            },
        }
    }
}
