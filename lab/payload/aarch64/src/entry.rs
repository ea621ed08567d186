//! From the boot loader to Rust: the image's header, EL2 left behind,
//! relocations, stacks.
//!
//! The header is that of the kernel's `Documentation/arch/arm64/booting.rst`.

// UNSAFETY: the first instructions of a machine.
#![expect(unsafe_code, reason = "image header, relocation, CPU set-up")]

use core::arch::global_asm;

use dtoolkit::fdt::Fdt;

use crate::machine::{FALLBACK_UART, MAX_CPUS, Machine};
use crate::tests;
use crate::{percpu, psci, uart};

/// A R_AARCH64_RELATIVE relocation.
const RELATIVE: u64 = 1027;

global_asm!(
    r#"
    .section .head, "ax"
    .global image_head
image_head:
    b       1f
    .long   0
    .quad   0                   // loaded at a 2 MiB boundary itself
    .quad   image_size
    .quad   0xa                 // little-endian, 4 KiB pages, any address
    .quad   0, 0, 0
    .ascii  "ARM\x64"
    .long   0

1:  mov     x20, x0             // device tree
    bl      leave_el2
    adrp    x0, bss_start
    add     x0, x0, :lo12:bss_start
    adrp    x1, bss_end
    add     x1, x1, :lo12:bss_end
2:  cmp     x0, x1
    b.hs    3f
    stp     xzr, xzr, [x0], #16
    b       2b
3:  adr     x0, image_head
    adrp    x1, relocations_start
    add     x1, x1, :lo12:relocations_start
    adrp    x2, relocations_end
    add     x2, x2, :lo12:relocations_end
4:  cmp     x1, x2
    b.hs    5f
    ldp     x3, x4, [x1], #16   // offset, kind
    ldr     x5, [x1], #8        // addend
    cmp     x4, #{relative}
    b.ne    4b
    add     x5, x5, x0
    str     x5, [x3, x0]
    b       4b
5:  mov     x0, #0
    bl      set_up_cpu
    mov     x0, x20
    b       {boot_cpu}

    .global secondary_entry
secondary_entry:                // x0: index of the CPU
    mov     x20, x0
    bl      leave_el2
    mov     x0, x20
    bl      set_up_cpu
    mov     x0, x20
    b       {secondary_cpu}

set_up_cpu:                     // x0: index of the CPU
    adrp    x1, stacks
    add     x1, x1, :lo12:stacks
    add     x0, x0, #1
    mov     x2, #{stack_size}
    madd    x1, x0, x2, x1
    mov     sp, x1
    adrp    x1, vectors
    add     x1, x1, :lo12:vectors
    msr     vbar_el1, x1
    mov     x29, xzr
    isb
    ret

leave_el2:
    // MMU and data cache off; EL1 exception entry and return synchronise; WFI
    // and WFE are not trapped from EL0.
    ldr     x1, ={sctlr}
    msr     sctlr_el1, x1
    mrs     x1, currentel
    cmp     x1, #(2 << 2)
    b.ne    6f
    // There is no monitor, so EL1 gets the whole machine. Accesses that EL2 still traps are
    // UNDEFINED.
    adrp    x1, el2_vectors
    add     x1, x1, :lo12:el2_vectors
    msr     vbar_el2, x1
    ldr     x1, =(1 << 31 | 3 << 40)
    msr     hcr_el2, x1
    mov     x1, #3
    msr     cnthctl_el2, x1
    msr     cntvoff_el2, xzr
    mrs     x1, pmcr_el0
    ubfx    x1, x1, #11, #5
    msr     mdcr_el2, x1
    mrs     x1, midr_el1
    msr     vpidr_el2, x1
    mrs     x1, mpidr_el1
    msr     vmpidr_el2, x1
    mov     x1, #0x22ff         // no traps of SIMD, SVE or SME
    msr     cptr_el2, x1
    mov     x1, #0xf
    msr     s3_4_c12_c9_5, x1   // ICC_SRE_EL2
    isb
    msr     s3_4_c12_c11_0, xzr // ICH_HCR_EL2
    mov     x1, #0x3c5          // EL1h, interrupts masked
    msr     spsr_el2, x1
    msr     elr_el2, x30
    eret
6:  isb
    ret

    .balign 0x800
el2_vectors:
    .org    el2_vectors + 0x400 // synchronous, from EL1 or EL0
    msr     tpidr_el2, x0
    mrs     x0, esr_el2
    lsr     x0, x0, #26
    cmp     x0, #0x16           // HVC: `cell` has code at x1 for EL2, with x0
    b.eq    8f
    mov     x0, #(1 << 25)      // EC 0, IL
    msr     esr_el1, x0
    mrs     x0, elr_el2
    msr     elr_el1, x0
    mrs     x0, spsr_el2
    msr     spsr_el1, x0
    tst     x0, #0xf
    mrs     x0, vbar_el1
    b.eq    7f
    sub     x0, x0, #0x200
7:  add     x0, x0, #0x400
    msr     elr_el2, x0
    mov     x0, #0x3c5
    msr     spsr_el2, x0
    mrs     x0, tpidr_el2
    eret
8:  mrs     x0, tpidr_el2
    blr     x1
    isb
    eret
    "#,
    relative = const RELATIVE,
    stack_size = const percpu::STACK_SIZE,
    sctlr = const 0x30d5_0800_u64,
    boot_cpu = sym boot_cpu,
    secondary_cpu = sym secondary_cpu,
);

unsafe extern "C" {
    /// Marks the entry at which PSCI starts the other CPUs.
    safe fn secondary_entry();
    /// Marks the image's first instruction.
    safe fn image_head();
}

/// Returns the image's address.
pub(crate) fn image_address() -> u64 {
    image_head as *const () as u64
}

/// Returns the address at which PSCI starts the other CPUs. Their x0 is their index.
pub(crate) fn secondary_address() -> u64 {
    secondary_entry as *const () as u64
}

extern "C" fn boot_cpu(device_tree: *const u8) -> ! {
    percpu::install(0);
    uart::set_address(FALLBACK_UART);
    // SAFETY: the boot protocol passes a device tree that nobody changes.
    let tree = match unsafe { Fdt::from_raw(device_tree) } {
        Ok(tree) => tree,
        Err(error) => panic!("invalid device tree at {device_tree:?}: {error}"),
    };
    let machine = match Machine::from_device_tree(tree) {
        Ok(machine) => machine,
        Err(error) => panic!("{error}"),
    };
    uart::set_address(machine.uart);
    psci::set_conduit(machine.conduit);
    tests::run(machine);
    psci::system_off()
}

extern "C" fn secondary_cpu(index: usize) -> ! {
    percpu::install(index);
    tests::run_secondary(index);
    psci::cpu_off()
}

const _: () = assert!(
    MAX_CPUS == 8 && percpu::STACK_SIZE == 0x1_0000,
    "image.ld has them too"
);

#[panic_handler]
fn panic(information: &core::panic::PanicInfo<'_>) -> ! {
    uart::print(format_args!("FAIL payload: {information}\n"));
    psci::system_off()
}
