//! The exception vectors of EL1.
//!
//! From EL1, a synchronous exception is either expected (the access under test)
//! and skipped, or the end of the program. From EL0, the exception ends
//! `el0::run`. Interrupts are handled the same from both.

// UNSAFETY: exception vectors.
#![expect(unsafe_code, reason = "exception vectors")]

use core::arch::global_asm;

use crate::fault::Fault;
use crate::{gic, percpu, psci, uart};

global_asm!(
    r#"
    .macro  vector target
    .balign 0x80
    b       \target
    .endm

    .section .text
    .balign 0x800
    .global vectors
vectors:
    vector  fatal_exception     // from EL1 on SP_EL0: never used
    vector  fatal_exception
    vector  fatal_exception
    vector  fatal_exception
    vector  el1_synchronous     // from EL1
    vector  interrupt
    vector  fatal_exception
    vector  fatal_exception
    vector  el0_synchronous     // from EL0, AArch64
    vector  interrupt
    vector  fatal_exception
    vector  fatal_exception
    vector  el0_synchronous     // from EL0, AArch32
    vector  interrupt
    vector  fatal_exception
    vector  fatal_exception

    .macro  save
    stp     x0, x1, [sp, #-192]!
    stp     x2, x3, [sp, #16]
    stp     x4, x5, [sp, #32]
    stp     x6, x7, [sp, #48]
    stp     x8, x9, [sp, #64]
    stp     x10, x11, [sp, #80]
    stp     x12, x13, [sp, #96]
    stp     x14, x15, [sp, #112]
    stp     x16, x17, [sp, #128]
    stp     x18, x30, [sp, #144]
    mrs     x0, elr_el1
    mrs     x1, spsr_el1
    stp     x0, x1, [sp, #160]
    .endm

    .macro  restore
    ldp     x0, x1, [sp, #160]
    msr     elr_el1, x0
    msr     spsr_el1, x1
    ldp     x18, x30, [sp, #144]
    ldp     x16, x17, [sp, #128]
    ldp     x14, x15, [sp, #112]
    ldp     x12, x13, [sp, #96]
    ldp     x10, x11, [sp, #80]
    ldp     x8, x9, [sp, #64]
    ldp     x6, x7, [sp, #48]
    ldp     x4, x5, [sp, #32]
    ldp     x2, x3, [sp, #16]
    ldp     x0, x1, [sp], #192
    .endm

interrupt:
    save
    bl      {interrupt}
    restore
    eret

el1_synchronous:
    save
    mrs     x0, esr_el1
    ldr     x1, [sp, #160]
    ldr     x2, [sp, #152]      // x30
    bl      {el1_synchronous}
    str     x0, [sp, #160]      // where to go on
    restore
    eret

el0_synchronous:                // SP_EL1 is where `el0::run` left it
    mrs     x1, tpidr_el1
    str     x0, [x1]            // PerCpu::el0_result
    mrs     x0, esr_el1
    ldp     x19, x20, [sp, #16]
    ldp     x21, x22, [sp, #32]
    ldp     x23, x24, [sp, #48]
    ldp     x25, x26, [sp, #64]
    ldp     x27, x28, [sp, #80]
    ldp     x29, x30, [sp], #96
    ret

fatal_exception:
    mrs     x0, esr_el1
    mrs     x1, elr_el1
    mrs     x2, far_el1
    b       {fatal}
    "#,
    interrupt = sym gic::handle_interrupt,
    el1_synchronous = sym el1_synchronous,
    fatal = sym fatal,
);

/// Returns the address at which the program continues: the next instruction or, after a jump to nothing, the caller's.
extern "C" fn el1_synchronous(syndrome: u64, address: u64, link: u64) -> u64 {
    if percpu::this().note_exception(syndrome) {
        if (Fault { syndrome }).class() == Fault::INSTRUCTION_ABORT {
            link
        } else {
            address + 4
        }
    } else {
        fatal(syndrome, address, 0)
    }
}

extern "C" fn fatal(syndrome: u64, address: u64, fault_address: u64) -> ! {
    uart::print(format_args!(
        "FAIL payload: unexpected exception (ESR {syndrome:#x} ELR {address:#x} FAR {fault_address:#x})\n"
    ));
    psci::system_off()
}
