//! The values that a CPU's exception handlers and its tests exchange.
//!
//! One CPU owns each entry; handler and test interrupt one another but never
//! run at once, so relaxed loads and stores suffice (and, with the MMU off,
//! nothing else is architecturally sure to work).

// UNSAFETY: TPIDR_EL1 points at the CPU's entry.
#![expect(unsafe_code, reason = "TPIDR_EL1 points at the CPU's entry")]

use core::arch::asm;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::machine::MAX_CPUS;

/// Bytes of stack a CPU has.
pub(crate) const STACK_SIZE: usize = 0x1_0000;

/// Interrupts counted one by one: SGIs, PPIs and all SPIs of the `virt` machine.
pub(crate) const COUNTED: usize = 288;
const LOG: usize = 128;

/// The handler's reaction to a PMU interrupt.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PmiAction {
    /// Clear all overflow flags.
    Clear,
    /// Leave them the first time, clear them the second.
    KeepOnce,
    /// Clear them and disable all counters.
    Stop,
}

/// A CPU's entry.
#[repr(C, align(64))]
pub(crate) struct PerCpu {
    /// x0 when EL0 was left. This field is first, because the vectors store it.
    el0_result: AtomicU64,
    /// Whether an exception is expected, to be noted and skipped.
    expecting: AtomicBool,
    /// ESR_EL1 of the noted exception; 0: none.
    syndrome: AtomicU64,
    counts: [AtomicU32; COUNTED],
    spurious: AtomicU32,
    log: [AtomicU32; LOG],
    logged: AtomicU32,
    pmi_action: AtomicU8,
    /// PMOVSSET_EL0 as the last PMU interrupt found it.
    pmi_flags: AtomicU64,
    /// Whether interrupts are ended in two steps (EOIR, then DIR).
    split_end: AtomicBool,
    uart_interrupt: AtomicU32,
    /// The system counter when the CPU began to run the program.
    started: AtomicU64,
}

const _: () = assert!(
    offset_of!(PerCpu, el0_result) == 0,
    "vectors.rs relies on it"
);

static CPUS: [PerCpu; MAX_CPUS] = [const { PerCpu::new() }; MAX_CPUS];

/// Makes entry `index` this CPU's.
pub(crate) fn install(index: usize) {
    // SAFETY: TPIDR_EL1 is ours to use.
    unsafe { asm!("msr tpidr_el1, {}", in(reg) &raw const CPUS[index]) }
}

/// Returns the entry of CPU `index`.
pub(crate) fn of(index: usize) -> &'static PerCpu {
    &CPUS[index]
}

/// Returns this CPU's entry.
pub(crate) fn this() -> &'static PerCpu {
    let entry: *const PerCpu;
    // SAFETY: `install` came first; entries are static.
    unsafe {
        asm!("mrs {}, tpidr_el1", out(reg) entry, options(nomem, nostack));
        &*entry
    }
}

impl PerCpu {
    const fn new() -> Self {
        Self {
            el0_result: AtomicU64::new(0),
            expecting: AtomicBool::new(false),
            syndrome: AtomicU64::new(0),
            counts: [const { AtomicU32::new(0) }; COUNTED],
            spurious: AtomicU32::new(0),
            log: [const { AtomicU32::new(0) }; LOG],
            logged: AtomicU32::new(0),
            pmi_action: AtomicU8::new(0),
            pmi_flags: AtomicU64::new(0),
            split_end: AtomicBool::new(false),
            uart_interrupt: AtomicU32::new(0),
            started: AtomicU64::new(0),
        }
    }

    /// Returns x0 of the moment when EL0 was left.
    pub(crate) fn el0_result(&self) -> u64 {
        self.el0_result.load(Relaxed)
    }

    /// Makes the handler note an exception and skip its instruction from now
    /// on.
    pub(crate) fn expect_exception(&self) {
        self.syndrome.store(0, Relaxed);
        self.expecting.store(true, Relaxed);
    }

    /// Ends [`Self::expect_exception`], and returns the syndrome of the
    /// exception, if any.
    pub(crate) fn exception(&self) -> Option<u64> {
        self.expecting.store(false, Relaxed);
        match self.syndrome.load(Relaxed) {
            0 => None,
            syndrome => Some(syndrome),
        }
    }

    /// Notes an exception. Returns false when none was expected.
    pub(crate) fn note_exception(&self, syndrome: u64) -> bool {
        self.syndrome.store(syndrome, Relaxed);
        self.expecting.load(Relaxed)
    }

    /// Counts an interrupt, and returns how often it has come.
    pub(crate) fn count(&self, intid: u32) -> u32 {
        let logged = self.logged.load(Relaxed);
        if let Some(slot) = self.log.get(logged as usize) {
            slot.store(intid, Relaxed);
            self.logged.store(logged + 1, Relaxed);
        }
        let counter = self.counts.get(intid as usize).unwrap_or(&self.spurious);
        let count = counter.load(Relaxed) + 1;
        counter.store(count, Relaxed);
        count
    }

    /// Returns how often `intid` came since [`Self::reset`].
    pub(crate) fn taken(&self, intid: u32) -> u64 {
        self.counts[intid as usize].load(Relaxed).into()
    }

    /// Returns how often any interrupt came, spurious ones and unknown ones
    /// included.
    pub(crate) fn taken_any(&self) -> u64 {
        let known: u32 = self.counts.iter().map(|count| count.load(Relaxed)).sum();
        (known + self.spurious.load(Relaxed)).into()
    }

    /// Returns the `index`th interrupt taken since [`Self::reset`].
    pub(crate) fn logged(&self, index: usize) -> Option<u32> {
        (index < self.logged.load(Relaxed) as usize).then(|| self.log[index].load(Relaxed))
    }

    /// Returns the handler's reaction to a PMU interrupt.
    pub(crate) fn pmi_action(&self) -> PmiAction {
        match self.pmi_action.load(Relaxed) {
            1 => PmiAction::KeepOnce,
            2 => PmiAction::Stop,
            _ => PmiAction::Clear,
        }
    }

    /// Sets the [`PmiAction`].
    pub(crate) fn set_pmi_action(&self, action: PmiAction) {
        self.pmi_action.store(action as u8, Relaxed);
    }

    /// Returns PMOVSSET_EL0 as the last PMU interrupt found it.
    pub(crate) fn pmi_flags(&self) -> u64 {
        self.pmi_flags.load(Relaxed)
    }

    /// Notes PMOVSSET_EL0 in the interrupt.
    pub(crate) fn set_pmi_flags(&self, flags: u64) {
        self.pmi_flags.store(flags, Relaxed);
    }

    /// Returns whether interrupts are ended in two steps.
    pub(crate) fn split_end(&self) -> bool {
        self.split_end.load(Relaxed)
    }

    /// Ends interrupts in two steps, or one.
    pub(crate) fn set_split_end(&self, split: bool) {
        self.split_end.store(split, Relaxed);
    }

    /// Returns the interrupt that the handler lowers at the UART.
    pub(crate) fn uart_interrupt(&self) -> Option<u32> {
        Some(self.uart_interrupt.load(Relaxed)).filter(|&intid| intid != 0)
    }

    /// Has the handler lower this interrupt at the UART.
    pub(crate) fn set_uart_interrupt(&self, intid: u32) {
        self.uart_interrupt.store(intid, Relaxed);
    }

    /// Notes that the CPU begins to run the program, at this time of the system counter.
    pub(crate) fn note_start(&self, now: u64) {
        self.started.store(now, Relaxed);
    }

    /// Returns the system counter of the last [`Self::note_start`].
    pub(crate) fn started(&self) -> u64 {
        self.started.load(Relaxed)
    }

    /// Forgets all counts, and goes back to [`PmiAction::Clear`].
    pub(crate) fn reset(&self) {
        for count in &self.counts {
            count.store(0, Relaxed);
        }
        self.spurious.store(0, Relaxed);
        self.logged.store(0, Relaxed);
        self.pmi_flags.store(0, Relaxed);
        self.set_pmi_action(PmiAction::Clear);
    }
}
