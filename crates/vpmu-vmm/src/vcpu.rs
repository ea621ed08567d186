//! One virtual processor: its thread, from the first instruction to the machine's end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::x86::ArchEvent;
use vpmu::x86::intel::{Capability, PmuConfig, PmuState, Version};
use vpmu_perf::{PerfHost, PerfOptions};

use super::boot::{self, Entry};
use super::deadline::Deadline;
use super::machine::Machine;
use super::ports::Request;
use super::{Ending, Error, PmuOptions, SaveError, cpuid, kvm};
use vpmu_kvm::{Exit, RDPMC_PORT, Statistics, VcpuPmu};

/// How long a host event is kept for a guest that does not use it.
const SLICE: Duration = Duration::from_millis(100);
/// IA32_DEBUGCTL.BTF (SDM vol. 3B, 18.4.1) is no business of a PMU, but the register comes here with
/// it. KVM takes the bit and does nothing for it.
const BTF: u64 = 1 << 1;
/// Exits between two looks at the clock.
const LOOK_AT_CLOCK: u32 = 64;

/// A vCPU that does not run.
pub(super) struct Vcpu {
    pub(super) fd: VcpuFd,
    pub(super) id: u8,
    pub(super) start: Start,
    /// What KVM supports, and once it has run, what the guest was told.
    pub(super) cpuid: CpuId,
    pub(super) deadline: Option<Deadline>,
    /// Its PMU, when it has run.
    pub(super) pmu: Option<(Capability, PmuState)>,
}

/// How a vCPU begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    /// With its first instruction.
    Entry(Entry),
    /// With the boot processor's call.
    Wait,
    /// Where it was: KVM has its state, and `pmu` holds its PMU's.
    Saved,
}

impl Vcpu {
    /// Runs it, on the calling thread, until the machine ends. Then no exit waits for its completion,
    /// unless it was this vCPU that ended the machine.
    pub(super) fn run(
        &mut self,
        machine: &Machine,
        options: Option<PmuOptions>,
    ) -> Result<Ending, Error> {
        let tsc_khz = kvm("KVM_GET_TSC_KHZ", self.fd.get_tsc_khz())?;
        let saved = self.pmu.take();
        let told = saved.as_ref().map(|(capability, _)| *capability);
        let mut pmu = options
            .map(|options| new_pmu(options, tsc_khz, told, machine))
            .transpose()?;
        let capability = pmu.as_mut().map(|pmu| *pmu.pmu().0.capability());
        if !matches!(self.start, Start::Saved) {
            let lazy = self.deadline.is_some();
            cpuid::guest(&mut self.cpuid, self.id, tsc_khz, capability.as_ref(), lazy);
            kvm("KVM_SET_CPUID2", self.fd.set_cpuid2(&self.cpuid))?;
            self.set_up()?;
        }
        if let Some(pmu) = &mut pmu {
            vpmu_kvm::prepare(&mut self.fd);
            kick_before_entry(pmu.host(), &mut self.fd);
            if let Some((_, state)) = &saved {
                pmu.restore(state).map_err(SaveError::from)?;
            }
        }
        let account = match &pmu {
            Some(pmu) => pmu.account(),
            None => Arc::default(),
        };
        machine.add_account(Arc::clone(&account));
        let count = |exit| {
            let mut account = account.lock().unwrap_or_else(PoisonError::into_inner);
            Statistics::count(&mut account, exit);
        };

        let (mut slice, mut exits) = (Instant::now(), 0_u32);
        let mut ending = Ending::Interrupted;
        loop {
            let stop = machine.stop.load(Ordering::Relaxed);
            if stop {
                // The exit before is still to be completed, without the guest going on.
                self.fd.set_kvm_immediate_exit(1);
            } else if let Some(pmu) = &mut pmu {
                exits = exits.wrapping_add(1);
                if exits % LOOK_AT_CLOCK == 0 && slice.elapsed() >= SLICE {
                    slice = Instant::now();
                    pmu.end_slice();
                }
                pmu.take_overflows();
                pmu.before_run(&machine.vm, &self.fd)?;
            }
            if let (false, Some(deadline)) = (stop, &self.deadline) {
                deadline.before_run(&machine.vm, &self.fd)?;
            }
            let exit = match self.fd.run() {
                Ok(exit) => exit,
                // EINTR: a signal. EAGAIN: a vCPU that has not been started.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    // Before the look for overflows, so that none is without its kick.
                    self.fd.set_kvm_immediate_exit(0);
                    if stop {
                        break;
                    }
                    count(Exit::Kick);
                    continue;
                }
                Err(error) => return Err(Error::Kvm("KVM_RUN", error)),
            };
            if let Some(pmu) = &mut pmu {
                pmu.take_overflows();
            }
            match (exit, &mut pmu) {
                (VcpuExit::X86Rdmsr(mut exit), pmu) => {
                    let deadline = self.deadline.as_ref();
                    if deadline.is_some_and(|deadline| deadline.rdmsr(&mut exit)) {
                        count(Exit::MsrRead(exit.index));
                    } else if let Some(pmu) = pmu {
                        pmu.rdmsr(&mut exit);
                    } else {
                        *exit.error = 1;
                    }
                }
                (VcpuExit::X86Wrmsr(mut exit), pmu) => {
                    let deadline = self.deadline.as_ref();
                    if deadline.is_some_and(|deadline| deadline.wrmsr(&mut exit)) {
                        count(Exit::MsrWrite(exit.index));
                    } else if let Some(pmu) = pmu {
                        pmu.wrmsr(&mut exit);
                    } else {
                        *exit.error = 1;
                    }
                }
                (VcpuExit::IoOut(RDPMC_PORT, _), Some(pmu)) => pmu.rdpmc(&mut self.fd)?,
                (VcpuExit::IoIn(port, data), _) => {
                    count(Exit::Port(port));
                    machine.ports().read(port, data);
                }
                (VcpuExit::IoOut(port, data), _) => {
                    count(Exit::Port(port));
                    let request = machine.ports().write(port, data);
                    match request {
                        None => {}
                        Some(Request::End(ending)) => return Ok(ending),
                        Some(Request::BeginMeasuring) => machine.begin_measuring(),
                        Some(Request::EndMeasuring) => machine.end_measuring(),
                        Some(Request::Save) if machine.saves => {
                            ending = Ending::Saved;
                            machine.stop.store(true, Ordering::Relaxed);
                        }
                        Some(Request::Save) => {}
                    }
                }
                (VcpuExit::MmioRead(_, data), _) => {
                    count(Exit::Memory);
                    data.fill(0xff);
                }
                (VcpuExit::MmioWrite(..), _) => count(Exit::Memory),
                (VcpuExit::Shutdown, _) => return Ok(Ending::TripleFault),
                (VcpuExit::SystemEvent(..), _) => return Ok(Ending::PowerOff),
                (VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen, _) => count(Exit::Other),
                (exit, _) => return Err(Error::Stopped(format!("{exit:?}"))),
            }
        }
        if let Some(pmu) = &mut pmu {
            pmu.take_overflows();
            self.pmu = capability.map(|capability| (capability, pmu.save()));
        }
        Ok(ending)
    }

    fn set_up(&self) -> Result<(), Error> {
        // Fast string operations; neither BTS nor PEBS.
        const MISC_ENABLE: u32 = 0x1a0;
        let misc = kvm_msr_entry {
            index: MISC_ENABLE,
            data: 1 << 0 | 1 << 11 | 1 << 12,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[misc]).expect("one MSR fits");
        kvm("KVM_SET_MSRS", self.fd.set_msrs(&msrs))?;

        // LINT0 is where the 8259s are, LINT1 the NMI button.
        let mut lapic = kvm("KVM_GET_LAPIC", self.fd.get_lapic())?;
        for (offset, mode) in [(0x350, 0x700_u32), (0x360, 0x400)] {
            for (byte, value) in lapic.regs[offset..].iter_mut().zip(mode.to_le_bytes()) {
                *byte = value.cast_signed();
            }
        }
        kvm("KVM_SET_LAPIC", self.fd.set_lapic(&lapic))?;
        if let Start::Entry(entry) = self.start {
            kvm("KVM_SET_SREGS", boot::set_registers(&self.fd, entry))?;
        }
        Ok(())
    }
}

/// Has an overflow that comes just before the guest is entered keep it from being entered.
#[expect(unsafe_code, reason = "a signal handler writes into kvm_run")]
fn kick_before_entry(host: &mut PerfHost, vcpu: &mut VcpuFd) {
    let flag = &raw mut vcpu.get_kvm_run().immediate_exit;
    // SAFETY: kvm_run is mapped as long as `vcpu` lives. In `Vcpu::run` that is longer than `host`,
    // which forgets the flag when it goes. The signal's handler runs on this thread, so nothing is
    // written at the same time. It is written by `set_kvm_immediate_exit` too, and what is read of it
    // is read by the kernel: whichever of the two writes is last, the overflow is noted before, and
    // is looked for after (`take_overflows`, behind a lock of the account).
    unsafe { host.set_kick(flag) };
}

/// A PMU as the guest was told before, or of all that this host can count.
fn new_pmu(
    options: PmuOptions,
    tsc_khz: u32,
    told: Option<Capability>,
    machine: &Machine,
) -> Result<VcpuPmu<PerfHost>, Error> {
    let host = perf_host(options, tsc_khz)?;
    let capability = told.unwrap_or_else(|| Capability {
        events: ArchEvent::ENUMERATED
            .iter()
            .filter(|&&event| host.counts(event))
            .filter_map(|event| event.cpuid_bit())
            .filter(|&bit| bit < 7)
            .fold(0, |bits, bit| bits | 1 << bit),
        other_debugctl: BTF,
        ..Capability::new(Version::V2)
    });
    machine.say_pmu(capability, host.backing());
    let config = PmuConfig {
        policy: options.policy,
        ..PmuConfig::new(capability)
    };
    Ok(VcpuPmu::new(config, host)?)
}

/// What counts for the calling thread.
pub(super) fn perf_host(options: PmuOptions, tsc_khz: u32) -> Result<PerfHost, Error> {
    PerfHost::new(PerfOptions {
        tsc_hz: u64::from(tsc_khz) * 1000,
        backing: None,
        approximate_instructions: options.approximate_instructions,
    })
    .map_err(|error| Error::Perf(error.to_string()))
}
