//! The PL011, written to by polling.

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::mmio::{read32, write32};

static ADDRESS: AtomicU64 = AtomicU64::new(0);

const DATA: u64 = 0x00;
const FLAGS: u64 = 0x18;
const TRANSMIT_FULL: u32 = 1 << 5;
const INTERRUPT_MASK: u64 = 0x38;
const INTERRUPT_CLEAR: u64 = 0x44;
const SENT: u32 = 1 << 5;

/// Sets the UART's address.
pub(crate) fn set_address(address: u64) {
    ADDRESS.store(address, Relaxed);
}

/// Prints, on one CPU at a time.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    // The UART accepts every byte.
    let _ = Uart.write_fmt(text);
}

/// Lets the UART interrupt when a byte has been sent, or never.
pub(crate) fn interrupt_when_sent(wanted: bool) {
    let address = ADDRESS.load(Relaxed);
    acknowledge();
    write32(address + INTERRUPT_MASK, if wanted { SENT } else { 0 });
}

/// Lowers the UART's interrupt.
pub(crate) fn acknowledge() {
    write32(ADDRESS.load(Relaxed) + INTERRUPT_CLEAR, SENT);
}

/// The UART as a text sink.
pub(crate) struct Uart;

impl Write for Uart {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let address = ADDRESS.load(Relaxed);
        for byte in text.bytes() {
            if byte == b'\n' {
                put(address, b'\r');
            }
            put(address, byte);
        }
        Ok(())
    }
}

fn put(address: u64, byte: u8) {
    while read32(address + FLAGS) & TRANSMIT_FULL != 0 {}
    write32(address + DATA, byte.into());
}
