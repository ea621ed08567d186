//! Loops of exactly known length.

// UNSAFETY: exact instruction counts need assembly.
#![expect(unsafe_code, reason = "exact instruction counts need assembly")]

use core::arch::{asm, naked_asm};

use crate::el0;
use crate::fault::Fault;

/// Instructions, one of them a taken branch, in a round of any loop here.
pub(crate) const ROUND: u64 = 2;

/// Runs `rounds` (at least one) rounds.
pub(crate) fn spin(rounds: u64) {
    // SAFETY: touches one register.
    unsafe {
        asm!("2: subs {0}, {0}, #1", "b.ne 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
}

/// Sets `counters` in PMCNTENSET_EL0, runs `rounds` rounds, and clears them.
/// The counters count the rounds and a few instructions, always as many.
pub(crate) fn counted(counters: u64, rounds: u64) {
    // SAFETY: counters are what the tests are about.
    unsafe {
        asm!(
            "msr pmcntenset_el0, {counters}",
            "isb",
            "2: subs {rounds}, {rounds}, #1",
            "b.ne 2b",
            "msr pmcntenclr_el0, {counters}",
            "isb",
            counters = in(reg) counters,
            rounds = inout(reg) rounds => _,
            options(nomem, nostack),
        );
    }
}

/// Runs `rounds` rounds at EL0.
pub(crate) fn spin_at_el0(rounds: u64) -> Result<(), Fault> {
    // SAFETY: the code uses no stack and ends in SVC.
    unsafe { el0::run(el0_loop as *const () as usize, rounds) }.map(drop)
}

#[unsafe(naked)]
unsafe extern "C" fn el0_loop() {
    naked_asm!("2: subs x0, x0, #1", "b.ne 2b", "svc #0")
}

/// Runs `body` with interrupts unmasked.
pub(crate) fn interruptible(body: impl FnOnce()) {
    // SAFETY: the vectors handle interrupts.
    unsafe {
        asm!("msr daifclr, #2", "isb");
        body();
        asm!("msr daifset, #2", "isb");
    }
}

/// Waits for an interrupt, masked or not.
pub(crate) fn wait_for_interrupt() {
    // SAFETY: the caller has arranged that one comes.
    unsafe { asm!("dsb sy", "wfi", options(nostack)) }
}
