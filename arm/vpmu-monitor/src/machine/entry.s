// The first instructions, and the way into and out of every exception.
// STACK_SIZE comes from cpu.rs, FRAME from frame.rs.

// relocate BASE: adds BASE, where the image is, to the addresses in it. It is linked at 0. Uses x3 to x7.
.macro relocate base
    adrp    x3, rela_start
    add     x3, x3, :lo12:rela_start
    adrp    x4, rela_end
    add     x4, x4, :lo12:rela_end
.Lnext\@:
    cmp     x3, x4
    b.hs    .Ldone\@
    ldp     x5, x6, [x3], #16       // offset, type
    ldr     x7, [x3], #8            // addend
    cmp     w6, #1027               // R_AARCH64_RELATIVE
    b.ne    .Lnext\@
    add     x7, x7, \base
    str     x7, [x5, \base]
    b       .Lnext\@
.Ldone\@:
.endm

// ---- The arm64 image header (Linux, Documentation/arch/arm64/booting.rst) ----------------------
.section .head, "ax"
.global head
head:
    ccmp    x18, #0, #0xd, pl       // does nothing; its bytes begin with "MZ", by which UEFI knows a program
    b       start
    .quad   0                       // text offset
.global image_size
image_size:
    .quad   0x200000                // image size; the lab adds the guest's
    .quad   0xa                     // little-endian, 4 KiB pages, anywhere in memory
    .quad   0, 0, 0
    .ascii  "ARM\x64"
    .long   pe_header - head
// ---- The header of a UEFI program (Microsoft PE and COFF Specification, sections 3 and 4) ----------
pe_header:
    .ascii  "PE\0\0"
    .short  0xaa64, 1               // AArch64, one section
    .long   0, 0, 0
    .short  optional_header_end - optional_header
    .short  0x206                   // executable; no line numbers, no debug information
optional_header:
    .short  0x20b                   // PE32+
    .short  0
    .long   rela_end - head - 0x1000, 0, 0 // bytes of code, of data
    .long   efi_start - head, 0x1000
    .quad   0                       // anywhere
    .long   0x1000, 0x200           // alignment in memory, in the file
    .short  0, 0, 0, 0, 0, 0
    .long   0
    .long   0x200000, 0x1000        // bytes of the image, to which the lab adds the guest's; of the headers
    .long   0
    .short  10, 0                   // an EFI application
    .quad   0, 0, 0, 0
    .long   0, 0                    // no data directories
optional_header_end:
    .ascii  ".text\0\0\0"
    .long   0x200000 - 0x1000, 0x1000 // bytes in memory, which the lab changes; where
    .long   rela_end - head - 0x1000, 0x1000 // the same in the file
    .long   0, 0
    .short  0, 0
    .long   0xe0000020              // code, and all access
    .org    0x100
.global second_words
second_words:                       // the second guest's command line, ends with a zero; the lab fills it in
    .org    0x7f8
    .ascii  "VPMUGST1"              // marks what follows:
.global guest_length
guest_length:
    .quad   0                       // bytes of the appended guest; the lab fills it in
.global second_file
second_file:
    .quad   0, 0                    // the second guest: its distance from the head, its bytes; likewise
    .quad   0, 0                    // its initrd, likewise
    .quad   0                       // bytes of its memory; 0: as many as a small program wants

// ---- Start by UEFI: x0 = handle of the image, x1 = system table ----------------------------------
    .org    0x1000                  // where the section begins
efi_start:
    stp     x29, x30, [sp, #-16]!
    mov     x29, sp
    adrp    x2, head
    relocate x2
    bl      efi_main
    ldp     x29, x30, [sp], #16
    ret

// leave_firmware(device tree, entry): MMU and caches off, all of this has been cleaned from them.
.global leave_firmware
leave_firmware:
    msr     daifset, #0xf
    mrs     x2, sctlr_el2
    mov     x3, #0x1005             // I, C, M
    bic     x2, x2, x3
    dsb     sy
    msr     sctlr_el2, x2
    isb
    ic      iallu
    dsb     sy
    isb
    br      x1

// ---- Start of the boot CPU: x0 = device tree, MMU off ------------------------------------------
.section .text.start, "ax"
.global start
start:
    mrs     x23, CurrentEL
    cmp     x23, #(2 << 2)
    b.ne    1f                      // said later, when there is a console
    // First of all HCR_EL2 = RW: its E2H decides what the bits of EL2's other registers mean.
    mov     x1, #(1 << 31)
    msr     hcr_el2, x1
    isb
    ldr     x1, =0x30c50830         // SCTLR_EL2: little-endian, MMU and caches off
    msr     sctlr_el2, x1
    isb
1:
    adrp    x21, head               // where the bootloader put us, the guest's file behind
    mov     x22, xzr                // and how far our memory reaches: not known yet
    b       0f
.global moved
moved:                              // the same again, from the monitor's home: x0 = device tree,
    mov     x21, x1                 // x1 = where the bootloader put us, x2 = end of our memory
    mov     x22, x2
    mrs     x23, CurrentEL
0:  mov     x19, x0
    adrp    x20, head               // where we are; linked at 0, so also the offset

    relocate x20

    adrp    x1, bss_start
    adrp    x2, bss_end
3:  cmp     x1, x2
    b.hs    4f
    stp     xzr, xzr, [x1], #16
    b       3b

4:  adrp    x1, boot_cpu_stack_top
    add     x1, x1, :lo12:boot_cpu_stack_top
    msr     SPSel, #1
    mov     sp, x1
    mov     x0, x19
    mov     x1, x20
    cmp     x23, #(2 << 2)
    b.eq    5f
    lsr     x2, x23, #2
    bl      wrong_level
    b       wait_forever
5:  adrp    x2, vectors
    add     x2, x2, :lo12:vectors
    msr     vbar_el2, x2
    isb
    mov     x2, x21
    mov     x3, x22
    bl      boot_cpu
wait_forever:
    wfe
    b       wait_forever

// ---- Start of every other CPU: x0 = its `StartBlock`, MMU off ----------------------------------
.global start_secondary
start_secondary:
    mov     x1, #(1 << 31)          // HCR_EL2.RW, as on the boot CPU
    msr     hcr_el2, x1
    isb
    msr     SPSel, #1
    ldp     x1, x2, [x0]            // stack, MAIR_EL2
    ldp     x3, x4, [x0, #16]       // TCR_EL2, TTBR0_EL2
    ldr     x5, [x0, #32]           // SCTLR_EL2
    mov     sp, x1
    msr     mair_el2, x2
    msr     tcr_el2, x3
    msr     ttbr0_el2, x4
    adrp    x1, vectors
    add     x1, x1, :lo12:vectors
    msr     vbar_el2, x1
    isb
    tlbi    alle2
    dsb     nsh
    isb
    msr     sctlr_el2, x5
    isb
    bl      secondary_cpu
    b       wait_forever

// ---- Into the guest for the first time: enter_guest(its x0, top of this CPU's stack) ------------
// ELR_EL2 and SPSR_EL2 are set. The stack becomes empty: the next exception starts at its top.
.global enter_guest
enter_guest:
    mov     sp, x1
    mov     x1, xzr
    mov     x2, xzr
    mov     x3, xzr
    eret
    dsb     nsh
    isb

// ---- Exceptions ---------------------------------------------------------------------------------
// `Frame` of trap.rs: x0..x30, ELR, SPSR, time of entry.

.macro save
    sub     sp, sp, #FRAME
    stp     x0, x1, [sp]
    mrs     x0, cntpct_el0
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
    stp     x2, x0, [sp, #256]
    mov     x0, sp
.endm

.macro guest_vector handler, argument
    .balign 0x80
    save
    .ifnb   \argument
    mov     w1, #\argument
    .endif
    bl      \handler
    b       resume_guest
.endm

.macro own_vector number
    .balign 0x80
    mov     x0, #\number
    b       own_exception
.endm

.macro vector_table synchronous, interrupt
    // From EL2 itself: always a fault of the monitor's own.
    .irp number, 0, 1, 2, 3, 4, 5, 6, 7
    own_vector \number
    .endr
    // From the guest in AArch64, and in AArch32, which only its EL0 can be in.
    .rept 2
    guest_vector \synchronous
    guest_vector \interrupt, 1      // an IRQ is of group 1, an FIQ of group 0
    guest_vector \interrupt, 0
    guest_vector guest_serror
    .endr
.endm

.section .vectors, "ax"
.balign 0x800
vectors:
    vector_table guest_synchronous, guest_interrupt

// The same where two guests share this CPU.
.balign 0x800
.global shared_vectors
shared_vectors:
    vector_table shared_synchronous, shared_interrupt

resume_guest:
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
    add     sp, sp, #FRAME
    eret
    dsb     nsh
    isb

own_exception:
    mrs     x1, esr_el2
    mrs     x2, elr_el2
    mrs     x3, far_el2
    // Whatever the stack pointer was, it cannot be trusted now.
    adrp    x4, boot_cpu_stack_top
    add     x4, x4, :lo12:boot_cpu_stack_top
    mov     sp, x4
    bl      own_fault
    b       wait_forever

// ---- The vector registers of two guests: x0 = 32 of 16 bytes, FPCR, FPSR --------------------------
.arch_extension fp
.arch_extension simd
.section .text.vectors, "ax"
.macro each_pair instruction
    \instruction q0, q1, [x0]
    \instruction q2, q3, [x0, #32]
    \instruction q4, q5, [x0, #64]
    \instruction q6, q7, [x0, #96]
    \instruction q8, q9, [x0, #128]
    \instruction q10, q11, [x0, #160]
    \instruction q12, q13, [x0, #192]
    \instruction q14, q15, [x0, #224]
    \instruction q16, q17, [x0, #256]
    \instruction q18, q19, [x0, #288]
    \instruction q20, q21, [x0, #320]
    \instruction q22, q23, [x0, #352]
    \instruction q24, q25, [x0, #384]
    \instruction q26, q27, [x0, #416]
    \instruction q28, q29, [x0, #448]
    \instruction q30, q31, [x0, #480]
.endm
.global save_vectors
save_vectors:
    each_pair stp
    mrs     x1, fpcr
    mrs     x2, fpsr
    add     x0, x0, #512
    stp     x1, x2, [x0]
    ret
.global load_vectors
load_vectors:
    each_pair ldp
    add     x0, x0, #512
    ldp     x1, x2, [x0]
    msr     fpcr, x1
    msr     fpsr, x2
    ret

// ---- The stack of boot, and of a fault in the monitor itself --------------------------------------
.section .bss, "aw", @nobits
.balign 16
.global boot_cpu_stack
boot_cpu_stack:
    .skip   2 * STACK_SIZE          // boot reads the device tree, which nests
boot_cpu_stack_top:
