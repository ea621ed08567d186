//! The workload's functions on x86-64. [`vpmu_guest_tools::mix`] promises the
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
        "push rbp",
        "mov rbp, rsp",
        "push rbx",
        "push r12",
        "mov r12, rdi",
        "mov rbx, rsi",
        // A unit takes 12 instructions and two a round. It has one round less
        // than on machines that test and branch in one instruction.
        "2:",
        "mov eax, {rounds} - 1",
        "3:",
        "dec eax",
        "jnz 3b",
        "test bl, 1",
        "jz 4f",
        "call {foo}",
        "4:",
        "test bl, 2",
        "jz 5f",
        "call {bar}",
        "5:",
        "test bl, 4",
        "jz 6f",
        "call {qux}",
        "6:",
        "dec r12",
        "jnz 2b",
        "pop r12",
        "pop rbx",
        "pop rbp",
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
        "mov ecx, {rounds}",
        "2:",
        "add rax, rcx",
        "xor rax, rcx",
        "ror rax, 3",
        "add rdx, rax",
        "dec ecx",
        "jnz 2b",
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
        "mov ecx, {rounds}",
        "mov eax, {seed}",
        "mov edx, {feedback}",
        "2:",
        "shr eax, 1",
        "jnc 3f",
        "xor eax, edx",
        "jmp 4f",
        "3:",
        "nop",
        "nop",
        "4:",
        "nop",
        "dec ecx",
        "jnz 2b",
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
        "mov ecx, {rounds}",
        "lea rdx, [rip + {here}]",
        "2:",
        "mov eax, dword ptr [rdx]",
        "dec ecx",
        "jnz 2b",
        "ret",
        rounds = const mix::QUX_ROUNDS,
        here = sym qux,
    )
}
