//! From the boot protocol to Rust.

// UNSAFETY: the first instructions of a machine.
#![expect(unsafe_code, reason = "the first instructions of a machine")]

use core::arch::global_asm;

use crate::boot::{Boot, Memory};
use crate::descriptors::{self, STACK_SIZE, STACKS};
use crate::{apic, ports, tests, user, vectors};

global_asm!(
    r#"
    .section .text.start, "ax"
    .global payload_start
payload_start:
    cli
    cld
    lea     rsp, [rip + {stacks} + {stack_size}]
    mov     rdi, rsi
    xor     ebp, ebp
    call    {boot_cpu}
    ud2
    "#,
    stacks = sym STACKS,
    stack_size = const STACK_SIZE,
    boot_cpu = sym boot_cpu,
);

/// Memory as the processor addresses it.
struct Physical;

impl Memory for Physical {
    fn byte(&self, address: u64) -> u8 {
        // SAFETY: the boot protocol maps all memory below 4 GiB onto itself, and reading it, even
        // where there is none, does no harm.
        unsafe { (address as *const u8).read_volatile() }
    }
}

extern "C" fn boot_cpu(zero_page: u64) -> ! {
    descriptors::build(vectors::entry);
    descriptors::load(0);
    user::open_page();
    apic::enable();
    let boot = match Boot::read(&Physical, zero_page) {
        Ok(boot) => boot,
        Err(error) => panic!("{error}"),
    };
    // SAFETY: the boot loader put the command line there, in memory that nobody writes to.
    let command_line = unsafe {
        core::slice::from_raw_parts(boot.command_line as *const u8, boot.command_line_length)
    };
    tests::run(boot, str::from_utf8(command_line).unwrap_or_default());
    ports::power_off()
}

#[panic_handler]
fn panic(information: &core::panic::PanicInfo<'_>) -> ! {
    ports::print(format_args!("FAIL payload: {information}\n"));
    ports::power_off()
}
