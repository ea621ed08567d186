//! The workload's functions on AArch64. [`vpmu_guest_tools::mix`] promises the
//! number of instructions of each; change both together.

// UNSAFETY: exact instruction counts need functions written in assembly, and
// `perf` should show their plain names.
#![expect(unsafe_code, reason = "exact instruction counts need assembly")]

use core::arch::naked_asm;

use vpmu_guest_tools::mix;

/// Runs `units` units (at least one), each calling the `functions` of
/// [`mix::Functions::bits`].
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) extern "C" fn main(units: u64, functions: u64) {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x19, x20, [sp, #16]",
        "mov x19, x0",
        "mov x20, x1",
        // A unit: 10 instructions and two a round.
        "0:",
        "nop",
        "mov x0, #{rounds}",
        "1:",
        "subs x0, x0, #1",
        "b.ne 1b",
        "tbz x20, #0, 2f",
        "bl {foo}",
        "2:",
        "tbz x20, #1, 3f",
        "bl {bar}",
        "3:",
        "tbz x20, #2, 4f",
        "bl {qux}",
        "4:",
        "subs x19, x19, #1",
        "b.ne 0b",
        "ldp x19, x20, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "ret",
        rounds = const mix::MAIN_ROUNDS,
        foo = sym foo,
        bar = sym bar,
        qux = sym qux,
    )
}

/// Does arithmetic: 2 instructions and six a round.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn foo() {
    naked_asm!(
        "mov x0, #{rounds}",
        "1:",
        "add x1, x1, x0",
        "eor x1, x1, x0, lsl #7",
        "ror x1, x1, #3",
        "add x2, x2, x1",
        "subs x0, x0, #1",
        "b.ne 1b",
        "ret",
        rounds = const mix::FOO_ROUNDS,
    )
}

/// Takes a branch that nobody predicts: 5 instructions and seven a round,
/// whichever way the branch goes.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn bar() {
    naked_asm!(
        "nop",
        "mov x0, #{rounds}",
        "mov w1, #{seed}",
        "mov w2, #{feedback}",
        "1:",
        "lsr w3, w1, #1",
        "tbz w1, #0, 2f",
        "eor w3, w3, w2",
        "b 3f",
        "2:",
        "nop",
        "nop",
        "3:",
        "mov w1, w3",
        "subs x0, x0, #1",
        "b.ne 1b",
        "ret",
        rounds = const mix::BAR_ROUNDS,
        seed = const mix::BAR_SEED,
        feedback = const mix::BAR_FEEDBACK,
    )
}

/// Loads a word again and again: 3 instructions and three a round.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn qux() {
    naked_asm!(
        "mov x0, #{rounds}",
        "adr x1, {here}",
        "1:",
        "ldr w2, [x1]",
        "subs x0, x0, #1",
        "b.ne 1b",
        "ret",
        rounds = const mix::QUX_ROUNDS,
        here = sym qux,
    )
}
