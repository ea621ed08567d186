// An attack of the isolation probe, made below EL2 with the MMU off.
.section .text.vpmu_el2_probe, "ax"

// An exception that ends the attack. One that comes to EL1 is handed on.
.macro ending
    .balign 0x80
    mrs     x2, CurrentEL
    tbnz    x2, #3, 0b
    hvc     #0
.endm

// Interrupts are masked, and not routed to EL2: any other exception is a fault, which is the hypervisor's own to report.
.macro foreign offset
    .balign 0x80
    mrs     x2, CurrentEL
    tbnz    x2, #3, 1f
    hvc     #0
1:  ldr     x2, [sp, #96]
    msr     vbar_el2, x2
    isb
    add     x2, x2, #\offset
    br      x2
.endm

// For EL1 as well as for EL2.
.balign 0x800
.global vpmu_el2_vectors
vpmu_el2_vectors:
    foreign 0x000

// vpmu_el2_execute_below(code, x1, pstate) -> x0. The first exception that reaches EL2 ends it. It lies, and ends, in what
// two vectors leave free: 2 KiB are there anyway.
.global vpmu_el2_execute_below
vpmu_el2_execute_below:
    mrs     x5, vbar_el2            // the hypervisor's, to come back to
    stp     x29, x30, [sp, #-112]!
    stp     x19, x20, [sp, #16]
    stp     x21, x22, [sp, #32]
    stp     x23, x24, [sp, #48]
    stp     x25, x26, [sp, #64]
    stp     x27, x28, [sp, #80]
    str     x5, [sp, #96]
    adrp    x4, vpmu_el2_vectors
    add     x4, x4, :lo12:vpmu_el2_vectors
    msr     vbar_el2, x4
    msr     elr_el2, x0
    msr     spsr_el2, x2
    mov     x0, xzr
    isb
    eret
    dsb     nsh
    isb

    foreign 0x080

0:                                  // at EL2 again
    ldr     x2, [sp, #96]
    msr     vbar_el2, x2
    isb
    ldp     x19, x20, [sp, #16]
    ldp     x21, x22, [sp, #32]
    ldp     x23, x24, [sp, #48]
    ldp     x25, x26, [sp, #64]
    ldp     x27, x28, [sp, #80]
    ldp     x29, x30, [sp], #112
    ret

    foreign 0x100
    foreign 0x180
    foreign 0x200                   // at EL1 its own, an undefined access, which goes on to EL2
    foreign 0x280
    foreign 0x300
    foreign 0x380
    ending                          // from below, in AArch64
    foreign 0x480
    foreign 0x500
    foreign 0x580
    ending                          // and in AArch32
    foreign 0x680
    foreign 0x700
    foreign 0x780

