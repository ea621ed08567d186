// The boot image's header, the first instructions, and the way into and out of an exit.

.section .head, "ax"
.global head
head:
    b       start
    .long   0
    .quad   0                       // text offset
    .quad   0x200000                // image size
    .quad   0xa                     // little-endian, 4 KiB pages, anywhere
    .quad   0, 0, 0
    .ascii  "ARM\x64"
    .long   0

start:                              // x0 = device tree; EL2, MMU off
    mov     x1, #(1 << 31)          // HCR_EL2.RW, and E2H = 0
    msr     hcr_el2, x1
    ldr     x1, =0x30c50830         // SCTLR_EL2: little-endian, MMU and caches off
    msr     sctlr_el2, x1
    msr     SPSel, #1
    isb
    ldr     x1, =bss_start
    ldr     x2, =bss_end
1:  stp     xzr, xzr, [x1], #16
    cmp     x1, x2
    b.lo    1b
    ldr     x1, =stack_top
    mov     sp, x1
    ldr     x1, =vectors
    msr     vbar_el2, x1
    isb
    mov     x19, x0
    bl      boot                    // returns where the guest begins
    msr     elr_el2, x0
    mov     x1, #0x3c5              // EL1 on SP_EL1, everything masked
    msr     spsr_el2, x1
    mov     x0, x19                 // the device tree, as arm64's boot protocol has it
    mov     x1, xzr
    mov     x2, xzr
    mov     x3, xzr
    eret

.macro guest_vector handler
    .balign 0x80
    sub     sp, sp, #272
    stp     x0, x1, [sp]
    adr     x0, \handler
    b       leave
.endm

.macro own_vector
    .balign 0x80
    b       .                       // a fault of the hypervisor's own
.endm

.balign 0x800
vectors:
    .rept 8
    own_vector
    .endr
    guest_vector synchronous
    guest_vector interrupt
    own_vector
    own_vector
    guest_vector synchronous        // an EL0 in AArch32
    guest_vector interrupt
    own_vector
    own_vector

leave:                              // x0 = handler; x0 and x1 are saved
    stp     x2, x3, [sp, #16]
    stp     x4, x5, [sp, #32]
    stp     x6, x7, [sp, #48]
    stp     x8, x9, [sp, #64]
    stp     x10, x11, [sp, #80]
    stp     x12, x13, [sp, #96]
    stp     x14, x15, [sp, #112]
    stp     x16, x17, [sp, #128]
    stp     x18, x19, [sp, #144]
    stp     x20, x21, [sp, #160]
    stp     x22, x23, [sp, #176]
    stp     x24, x25, [sp, #192]
    stp     x26, x27, [sp, #208]
    stp     x28, x29, [sp, #224]
    mrs     x1, elr_el2
    mrs     x2, spsr_el2
    stp     x30, x1, [sp, #240]
    str     x2, [sp, #256]
    mov     x1, x0
    mov     x0, sp
    blr     x1
    ldp     x30, x1, [sp, #240]
    ldr     x2, [sp, #256]
    msr     elr_el2, x1
    msr     spsr_el2, x2
    ldp     x28, x29, [sp, #224]
    ldp     x26, x27, [sp, #208]
    ldp     x24, x25, [sp, #192]
    ldp     x22, x23, [sp, #176]
    ldp     x20, x21, [sp, #160]
    ldp     x18, x19, [sp, #144]
    ldp     x16, x17, [sp, #128]
    ldp     x14, x15, [sp, #112]
    ldp     x12, x13, [sp, #96]
    ldp     x10, x11, [sp, #80]
    ldp     x8, x9, [sp, #64]
    ldp     x6, x7, [sp, #48]
    ldp     x4, x5, [sp, #32]
    ldp     x2, x3, [sp, #16]
    ldp     x0, x1, [sp]
    add     sp, sp, #272
    eret
