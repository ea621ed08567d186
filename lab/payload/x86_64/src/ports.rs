//! Ports: the console on the first serial port, and the power-off.

// UNSAFETY: port accesses.
#![expect(unsafe_code, reason = "port accesses")]

use core::arch::asm;
use core::fmt::{self, Write};

const COM1: u16 = 0x3f8;
const LINE_STATUS: u16 = COM1 + 5;
const TRANSMITTER_EMPTY: u8 = 1 << 5;

/// ACPI's PM1a control register, where vpmu-vmm and QEMU's machines have it.
const PM1_CONTROL: u16 = 0x604;
/// SLP_EN, and the sleep types of S5 in vpmu-vmm's DSDT and in that of QEMU's machines, where it is 0.
const POWER_OFF: [u16; 2] = [1 << 13 | 5 << 10, 1 << 13];

/// Prints, on one CPU at a time.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    // The serial port accepts every byte.
    let _ = Serial.write_fmt(text);
}

/// The serial port as a text sink.
pub(crate) struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if byte == b'\n' {
                put(b'\r');
            }
            put(byte);
        }
        Ok(())
    }
}

fn put(byte: u8) {
    while read8(LINE_STATUS) & TRANSMITTER_EMPTY == 0 {}
    // SAFETY: a port access changes no memory of the program.
    unsafe { asm!("out dx, al", in("dx") COM1, in("al") byte, options(nomem, nostack)) }
}

fn read8(port: u16) -> u8 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) }
    value
}

/// Stops the machine.
pub(crate) fn power_off() -> ! {
    for word in POWER_OFF {
        // SAFETY: as above.
        unsafe {
            asm!("out dx, ax", in("dx") PM1_CONTROL, in("ax") word, options(nomem, nostack));
        }
    }
    loop {
        // SAFETY: without such a port, the program can only wait.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) }
    }
}
