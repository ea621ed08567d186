//! The values that a CPU's handlers and its tests exchange.
//!
//! One CPU owns each entry; handler and test interrupt one another but never
//! run at once. A CPU finds its entry by its task register, which no change of
//! ring touches.

// UNSAFETY: reads the task register.
#![expect(unsafe_code, reason = "reads the task register")]

use core::arch::asm;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::boot::MAX_CPUS;
use crate::descriptors::FIRST_TSS;
use crate::fault::Fault;

/// The handler's reaction to a PMI, beside counting it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PmiAction {
    /// Acknowledge the overflows, unmask LVTPC.
    Acknowledge,
    /// As `Acknowledge`, and make the counters overflow again at their next
    /// event, as often as [`PerCpu::storm_left`] says; then stop them.
    Storm,
    /// As `Storm`, and no counter counts meanwhile.
    StopAndStorm,
    /// Nothing.
    Leave,
    /// The reaction for the paravirtual PMU's tests.
    Page,
}

/// A CPU's entry.
pub(crate) struct PerCpu {
    /// Whether an exception is expected, to be noted and skipped.
    expecting: AtomicBool,
    /// The noted exception: 1 << 63, vector, error code.
    noted: AtomicU64,
    /// How often each vector came. NMIs are vector 2.
    counts: [AtomicU32; 256],
    pmi_action: AtomicU8,
    /// IA32_PERF_GLOBAL_STATUS as the last PMI found it, and as any PMI did.
    pub(crate) pmi_status: AtomicU64,
    pub(crate) pmi_status_ever: AtomicU64,
    /// LVTPC as the last PMI found it.
    pub(crate) pmi_lvtpc: AtomicU32,
    /// PMIs that found something to do, whatever their vector.
    pub(crate) pmis: AtomicU64,
    /// Number of PMIs that [`PmiAction::Storm`] has yet to make.
    pub(crate) storm_left: AtomicU64,
    /// RSP at which `user::run` goes on.
    pub(crate) kernel_stack: AtomicU64,
    /// RAX when ring 3 was left, and RDX.
    pub(crate) user_result: [AtomicU64; 2],
}

static CPUS: [PerCpu; MAX_CPUS] = [const { PerCpu::new() }; MAX_CPUS];

/// Returns this CPU's number.
pub(crate) fn index() -> usize {
    let task: u16;
    // SAFETY: reads a selector.
    unsafe { asm!("str {0:x}", out(reg) task, options(nomem, nostack)) }
    usize::from(task.saturating_sub(FIRST_TSS)) / 16
}

/// Returns this CPU's entry.
pub(crate) fn this() -> &'static PerCpu {
    &CPUS[index()]
}

impl PerCpu {
    const fn new() -> Self {
        Self {
            expecting: AtomicBool::new(false),
            noted: AtomicU64::new(0),
            counts: [const { AtomicU32::new(0) }; 256],
            pmi_action: AtomicU8::new(0),
            pmi_status: AtomicU64::new(0),
            pmi_status_ever: AtomicU64::new(0),
            pmi_lvtpc: AtomicU32::new(0),
            pmis: AtomicU64::new(0),
            storm_left: AtomicU64::new(0),
            kernel_stack: AtomicU64::new(0),
            user_result: [const { AtomicU64::new(0) }; 2],
        }
    }

    /// Makes the handler note an exception and skip its instruction from now
    /// on.
    pub(crate) fn expect_fault(&self) {
        self.noted.store(0, Relaxed);
        self.expecting.store(true, Relaxed);
    }

    /// Ends [`Self::expect_fault`], and returns the exception, if any.
    pub(crate) fn fault(&self) -> Option<Fault> {
        self.expecting.store(false, Relaxed);
        let noted = self.noted.load(Relaxed);
        (noted != 0).then_some(Fault {
            vector: (noted >> 32) as u8,
            error: noted as u32,
        })
    }

    /// Notes an exception. Returns false when none was expected.
    pub(crate) fn note_fault(&self, fault: Fault) -> bool {
        let noted = 1 << 63 | u64::from(fault.vector) << 32 | u64::from(fault.error);
        self.noted.store(noted, Relaxed);
        self.expecting.load(Relaxed)
    }

    /// Restores the treatment of faults from before an interrupt; see
    /// [`Self::suspend_faults`].
    pub(crate) fn resume_faults(&self, expecting: bool) {
        self.expecting.store(expecting, Relaxed);
    }

    /// Suspends the expectation of faults at an interrupt: its handler expects
    /// none.
    pub(crate) fn suspend_faults(&self) -> bool {
        self.expecting.swap(false, Relaxed)
    }

    /// Counts an interrupt.
    pub(crate) fn count(&self, vector: u8) {
        let counter = &self.counts[usize::from(vector)];
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }

    /// Returns how often `vector` came since [`Self::reset`].
    pub(crate) fn taken(&self, vector: u8) -> u64 {
        self.counts[usize::from(vector)].load(Relaxed).into()
    }

    /// Returns how often any vector came.
    pub(crate) fn taken_any(&self) -> u64 {
        let sum: u32 = self.counts.iter().map(|count| count.load(Relaxed)).sum();
        sum.into()
    }

    /// Returns the handler's reaction to a PMI.
    pub(crate) fn pmi_action(&self) -> PmiAction {
        match self.pmi_action.load(Relaxed) {
            1 => PmiAction::Storm,
            2 => PmiAction::StopAndStorm,
            3 => PmiAction::Leave,
            4 => PmiAction::Page,
            _ => PmiAction::Acknowledge,
        }
    }

    /// Sets the [`PmiAction`].
    pub(crate) fn set_pmi_action(&self, action: PmiAction) {
        self.pmi_action.store(action as u8, Relaxed);
    }

    /// Forgets all counts, and goes back to [`PmiAction::Acknowledge`].
    pub(crate) fn reset(&self) {
        for count in &self.counts {
            count.store(0, Relaxed);
        }
        for value in [
            &self.pmi_status,
            &self.pmi_status_ever,
            &self.pmis,
            &self.storm_left,
        ] {
            value.store(0, Relaxed);
        }
        self.pmi_lvtpc.store(0, Relaxed);
        self.set_pmi_action(PmiAction::Acknowledge);
    }
}
