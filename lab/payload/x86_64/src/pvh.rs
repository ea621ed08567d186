//! The way from PVH's entry, where QEMU's own machines begin a program, to the one of the boot protocol: long mode with the
//! first 4 GiB mapped onto themselves. Xen, docs/misc/pvh.pandoc.
//!
//! So the program runs on an emulated processor, too, with nothing between it and the PMU:
//!
//! ```text
//! qemu-system-x86_64 -M pc -cpu max,+perfctr-core -icount shift=0,sleep=off -nic none -display none -serial stdio \
//!     -kernel .../release/vpmu-payload-x86_64 -append "test=amd"
//! ```

// UNSAFETY: the first instructions of a machine.
#![expect(unsafe_code, reason = "the first instructions of a machine")]

use core::arch::global_asm;

global_asm!(
    r#"
    .section .note.Xen, "a", @note
    .p2align 2
    .long   4, 8, 18            // of the name, of the value; XEN_ELFNOTE_PHYS32_ENTRY
    .asciz  "Xen"
    .quad   pvh_start

    // EBX: the start info. Flat 32-bit segments, no paging.
    .section .text.start, "ax"
    .code32
pvh_start:
    cli
    cld
    movb    $0xff, %al          // the firmware's interrupt controllers deliver nothing
    outb    %al, $0x21
    outb    %al, $0xa1
    movl    %ebx, %esi
    movl    $pvh_stack, %esp
    lgdt    pvh_gdt_pointer
    movl    %cr4, %eax
    orl     $0x20, %eax         // PAE
    movl    %eax, %cr4
    movl    $pvh_pml4, %eax
    movl    %eax, %cr3
    movl    $0xc0000080, %ecx   // EFER.LME
    rdmsr
    orl     $0x100, %eax
    wrmsr
    movl    %cr0, %eax
    orl     $0x80000001, %eax   // PG, PE
    movl    %eax, %cr0
    ljmpl   $0x8, $pvh_long
    .code64
pvh_long:
    movl    $0x10, %eax
    movl    %eax, %ss
    movl    %eax, %ds
    movl    %eax, %es
    movl    %esi, %esi
    jmp     payload_start

    .section .data.pvh, "aw"
    .p2align 12
pvh_pml4:
    .quad   pvh_pdpt + 3        // present, writable
    .fill   511, 8, 0
pvh_pdpt:
    .quad   pvh_pds + 3, pvh_pds + 0x1003, pvh_pds + 0x2003, pvh_pds + 0x3003
    .fill   508, 8, 0
pvh_pds:
    .set    pvh_page, 0
    .rept   4 * 512
    .quad   pvh_page + 0x83     // 2 MiB, present, writable
    .set    pvh_page, pvh_page + 0x200000
    .endr
pvh_gdt:
    .quad   0
    .quad   0x00af9b000000ffff
    .quad   0x00cf93000000ffff
pvh_gdt_pointer:
    .word   23
    .long   pvh_gdt
    .p2align 4
    .fill   64, 1, 0
pvh_stack:
    "#,
    options(att_syntax),
);
