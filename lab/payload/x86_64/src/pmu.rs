//! The PMU under test.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vpmu_payload_harness::{Failure, Text};

use crate::apic::{self, LVT_MASKED};
use crate::fault::Fault;
use crate::instructions::{cpuid, rdmsr, spin, tsc, wrmsr};
use crate::msr::*;
use crate::percpu::{PerCpu, PmiAction};

/// IA32_PERFEVTSELx.USR: count in ring 3.
pub(crate) const USR: u64 = 1 << 16;
/// OS: count in ring 0.
pub(crate) const OS: u64 = 1 << 17;
/// INT: interrupt on overflow.
pub(crate) const INT: u64 = 1 << 20;
/// EN: enabled.
pub(crate) const EN: u64 = 1 << 22;
/// Bits of a counter that counts wherever the program is.
pub(crate) const COUNT: u64 = USR | OS | EN;

/// Event select and unit mask of the architectural events, in the order of
/// CPUID.0AH:EBX. SDM vol. 3B, table 20-1.
pub(crate) const EVENTS: [(&str, u64); 8] = [
    ("cycles", 0x003c),
    ("instructions", 0x00c0),
    ("reference cycles", 0x013c),
    ("cache references", 0x4f2e),
    ("cache misses", 0x412e),
    ("branches", 0x00c4),
    ("branch misses", 0x00c5),
    ("topdown slots", 0x01a4),
];
pub(crate) const CYCLES: u64 = EVENTS[0].1;

/// Number of events to wait for, where any number would do.
pub(crate) const SOME: u64 = 20_000;
/// Cycles of the time-stamp counter after which a wait gives up. They take ten seconds and more, as a busy machine's
/// own KVM may let the guest wait.
pub(crate) const PATIENCE: u64 = 1 << 35;
/// Rounds between two looks.
const ROUNDS: u64 = 1_000;

/// All bits of a fixed counter, for the handler.
static FIXED_MASK: AtomicU64 = AtomicU64::new(0);

/// A counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Counter {
    General(u32),
    Fixed(u32),
}

impl core::fmt::Display for Counter {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::General(n) => write!(f, "PMC{n}"),
            Self::Fixed(n) => write!(f, "FIXED_CTR{n}"),
        }
    }
}

impl Counter {
    /// Returns the counter's bit in IA32_PERF_GLOBAL_CTRL and _STATUS.
    pub(crate) fn bit(self) -> u64 {
        match self {
            Self::General(n) => 1 << n,
            Self::Fixed(n) => 1 << (32 + n),
        }
    }

    /// Returns the MSR that holds the counter's value.
    pub(crate) fn address(self) -> u32 {
        match self {
            Self::General(n) => PMC + n,
            Self::Fixed(n) => FIXED_CTR + n,
        }
    }

    /// Returns the counter's index for RDPMC (SDM vol. 2B, RDPMC).
    pub(crate) fn rdpmc_index(self) -> u64 {
        match self {
            Self::General(n) => n.into(),
            Self::Fixed(n) => 1 << 30 | u64::from(n),
        }
    }

    /// Returns the counter's value.
    pub(crate) fn value(self) -> Result<u64, Fault> {
        rdmsr(self.address())
    }
}

/// This PMU's description, from CPUID and its MSRs.
#[derive(Clone, Copy)]
pub(crate) struct Pmu(pub(crate) Capability);

impl Pmu {
    /// Reads the PMU's description.
    pub(crate) fn identify() -> Result<Self, Fault> {
        let [_, _, features, _] = cpuid(1, 0);
        let pdcm = features >> 15 & 1 != 0;
        let perf_capabilities = if pdcm { rdmsr(PERF_CAPABILITIES)? } else { 0 };
        let capability = Capability::new(cpuid(0x0a, 0), pdcm, perf_capabilities);
        FIXED_MASK.store(capability.fixed_mask(), Relaxed);
        Ok(Self(capability))
    }

    /// Returns the general counters.
    pub(crate) fn general(&self) -> impl Iterator<Item = Counter> + use<> {
        (0..self.0.general).map(Counter::General)
    }

    /// Returns every counter.
    pub(crate) fn counters(&self) -> impl Iterator<Item = Counter> + use<> {
        let bits = self.0.fixed;
        let fixed = (0..FIXED_ADDRESSES).filter(move |n| bits >> n & 1 != 0);
        self.general().chain(fixed.map(Counter::Fixed))
    }

    /// Returns whether event `n` of [`EVENTS`] is offered.
    pub(crate) fn offers(&self, n: usize) -> bool {
        self.0.events >> n & 1 != 0
    }

    /// Returns whether CPUID promises that `counter` counts: general counters
    /// count cycles, fixed ones their own event (SDM vol. 3B, table 20-2).
    pub(crate) fn counts(&self, counter: Counter) -> bool {
        match counter {
            Counter::General(_) => self.offers(0),
            Counter::Fixed(n) => match n {
                0 => self.offers(1),
                1 => self.offers(0),
                2 => self.offers(2),
                3 => self.offers(7),
                _ => false,
            },
        }
    }

    /// Returns the counters that count.
    pub(crate) fn counting(&self) -> impl Iterator<Item = Counter> + use<> {
        let pmu = *self;
        self.counters().filter(move |&counter| pmu.counts(counter))
    }

    /// Returns all bits of `counter`.
    pub(crate) fn mask(&self, counter: Counter) -> u64 {
        match counter {
            Counter::General(_) => self.0.general_mask(),
            Counter::Fixed(_) => self.0.fixed_mask(),
        }
    }

    /// Sets the PMU to a known state: all off, all zero.
    pub(crate) fn reset(&self) -> Result<(), Fault> {
        apic::set_lvtpc(LVT_MASKED);
        wrmsr(GLOBAL_CTRL, 0)?;
        wrmsr(DEBUGCTL, 0)?;
        if self.0.has_pebs() {
            for address in [PEBS_ENABLE, PEBS_DATA_CFG, DS_AREA] {
                wrmsr(address, 0)?;
            }
        }
        wrmsr(FIXED_CTR_CTRL, 0)?;
        for n in 0..self.0.general {
            wrmsr(PERFEVTSEL + n, 0)?;
        }
        for counter in self.counters() {
            wrmsr(counter.address(), 0)?;
        }
        let status = rdmsr(GLOBAL_STATUS)?;
        wrmsr(GLOBAL_OVF_CTRL, status)
    }

    /// Sets `counter` to `value`, which may have all of its bits.
    pub(crate) fn set(&self, counter: Counter, value: u64) -> Result<(), Fault> {
        match counter {
            Counter::General(n) if self.0.full_width() => wrmsr(A_PMC + n, value),
            Counter::General(n) => wrmsr(PMC + n, value),
            Counter::Fixed(n) => wrmsr(FIXED_CTR + n, value),
        }
    }

    /// Makes `counter` overflow after `events` more.
    pub(crate) fn set_period(&self, counter: Counter, events: u64) -> Result<(), Fault> {
        self.set(counter, events.wrapping_neg() & self.mask(counter))
    }

    /// Configures `counter` with bits of IA32_PERFEVTSELx. The event of general
    /// counters is cycles.
    pub(crate) fn configure(&self, counter: Counter, bits: u64) -> Result<(), Fault> {
        match counter {
            Counter::General(n) => wrmsr(PERFEVTSEL + n, CYCLES | bits),
            Counter::Fixed(n) => {
                let field = if bits & EN == 0 {
                    0
                } else {
                    (bits & OS) >> 17 | (bits & USR) >> 15 | (bits & INT) >> 17
                };
                let others = rdmsr(FIXED_CTR_CTRL)? & !(0xf << (4 * n));
                wrmsr(FIXED_CTR_CTRL, others | field << (4 * n))
            }
        }
    }

    /// Lets these counters count, and no others.
    pub(crate) fn enable(&self, counters: u64) -> Result<(), Fault> {
        wrmsr(GLOBAL_CTRL, counters)
    }

    /// Lets `counter`, configured but not enabled, count [`SOME`], and stops
    /// all counters. Returns its value then.
    pub(crate) fn count_some(&self, counter: Counter) -> Result<u64, Failure> {
        self.enable(counter.bit())?;
        let counted = wait(|| Ok(counter.value()? >= SOME));
        self.enable(0)?;
        let value = counter.value()?;
        match counted {
            Ok(()) => Ok(value),
            Err(_) => Err(Failure(Text::new(format_args!(
                "{counter} does not count (got {value} want {SOME} or more)"
            )))),
        }
    }
}

/// Runs until `done`, or fails after a while.
pub(crate) fn wait(mut done: impl FnMut() -> Result<bool, Fault>) -> Result<(), Failure> {
    let begin = tsc();
    while !done()? {
        if tsc().wrapping_sub(begin) > PATIENCE {
            return Err(Failure(Text::new(format_args!("waited in vain"))));
        }
        spin(ROUNDS);
    }
    Ok(())
}

/// Runs for this many cycles of the time-stamp counter, the processor's or the
/// hypervisor's.
pub(crate) fn pass(cycles: u64) {
    let begin = tsc();
    while tsc().wrapping_sub(begin) < cycles {
        spin(ROUNDS);
    }
}

/// Reads a register that must exist.
pub(crate) fn read(address: u32) -> Result<u64, Failure> {
    Ok(rdmsr(address)?)
}

/// Writes a register that must exist.
pub(crate) fn write(address: u32, value: u64) -> Result<(), Failure> {
    Ok(wrmsr(address, value)?)
}

/// Handles a PMI. An access that raises #GP here ends the program: none of
/// these accesses may.
pub(crate) fn handle_pmi(cpu: &PerCpu) {
    if cpu.pmi_action() == PmiAction::Page {
        return crate::tests::acknowledge_page();
    }
    if cpuid(0x0a, 0)[0] == 0 {
        // AMD's PMU needs no acknowledgement, and the tests look at the number of PMIs.
        return;
    }
    let read = |address| rdmsr(address).unwrap_or_else(|fault| panic!("in a PMI: {fault:?}"));
    let write = |address, value| {
        wrmsr(address, value).unwrap_or_else(|fault| panic!("in a PMI: {fault:?}"));
    };
    let action = cpu.pmi_action();
    let global = read(GLOBAL_CTRL);
    if action == PmiAction::StopAndStorm {
        // The handler stops the counters first, as Linux does. The status then
        // has every overflow up to here.
        write(GLOBAL_CTRL, 0);
    }
    let status = read(GLOBAL_STATUS);
    let lvtpc = apic::lvtpc();
    if status == 0 {
        if action == PmiAction::StopAndStorm {
            write(GLOBAL_CTRL, global);
        }
        return;
    }
    cpu.pmi_lvtpc.store(lvtpc, Relaxed);
    cpu.pmi_status.store(status, Relaxed);
    cpu.pmi_status_ever.fetch_or(status, Relaxed);
    cpu.pmis.fetch_add(1, Relaxed);
    match action {
        PmiAction::Leave | PmiAction::Page => return,
        PmiAction::Acknowledge => write(GLOBAL_OVF_CTRL, status),
        PmiAction::Storm | PmiAction::StopAndStorm => {
            write(GLOBAL_OVF_CTRL, status);
            match cpu.storm_left.load(Relaxed) {
                0 | 1 => write(GLOBAL_CTRL, 0),
                left => {
                    cpu.storm_left.store(left - 1, Relaxed);
                    rearm(status, write);
                    write(GLOBAL_CTRL, global);
                }
            }
        }
    }
    apic::set_lvtpc(lvtpc & !LVT_MASKED);
}

/// Makes each counter of `status` overflow at its next event.
fn rearm(status: u64, write: impl Fn(u32, u64)) {
    for n in 0..GENERAL_ADDRESSES {
        if status >> n & 1 != 0 {
            // The write copies bit 31 into the upper half.
            write(PMC + n, 0xffff_ffff);
        }
    }
    for n in 0..FIXED_ADDRESSES {
        if status >> (32 + n) & 1 != 0 {
            write(FIXED_CTR + n, FIXED_MASK.load(Relaxed));
        }
    }
}
