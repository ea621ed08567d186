//! The machine: what only exists at EL2.
//!
//! UNSAFETY: system registers, device registers, page tables and memory that a bootloader described
//! have no safe form. Each module below that needs them says why; the logic is in the library, which
//! has no unsafe code.
#![expect(unsafe_code, reason = "the machine has no safe form")]

mod boot;
mod console;
mod cpu;
mod device;
mod el2;
mod end;
mod error;
mod figures;
mod firmware;
mod frame;
mod gic;
mod hardware;
mod heap;
mod irq;
mod mmio;
mod mmu;
mod second;
mod start;
mod sysreg;
mod trap;
mod uefi;

use core::{arch::global_asm, panic::PanicInfo};

global_asm!(
    concat!(
        ".set FRAME, {frame}\n.set STACK_SIZE, {stack}\n",
        include_str!("entry.s")
    ),
    frame = const size_of::<frame::Frame>(),
    stack = const cpu::STACK_SIZE,
);

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    console::say!("error: {info}");
    end::power_off()
}
