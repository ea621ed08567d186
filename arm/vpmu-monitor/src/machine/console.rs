//! The serial lines, shared with the guest: used at boot and when the guest has ended, never between.
//!
//! UNSAFETY: drives device registers by their addresses.

use core::{
    fmt::{self, Write},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use arm_pl011_uart::{PL011Registers, Uart, UniqueMmioPointer};
use vpmu_monitor::boot::console::{Console, Kind};

use super::mmio::{read_device, write_device};

/// At most so many are used at once.
const MOST: usize = 4;

/// Addresses of the ports, and above them how an 8250 is driven: no address has these bits.
static PORTS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];

const WIDTH: u32 = 60;
const SHIFT: u32 = 56;
const ADDRESS: u64 = (1 << 52) - 1;

/// Uses these ports from now on. Without one, everything said is lost.
pub(crate) fn set(consoles: &[Console]) {
    for (port, console) in PORTS.iter().zip(consoles) {
        let kind = match console.kind {
            Kind::Pl011 => 0,
            Kind::Uart8250 { shift, width } => {
                u64::from(width) << WIDTH | u64::from(shift) << SHIFT
            }
        };
        port.store(console.base & ADDRESS | kind, Relaxed);
    }
}

struct Everywhere;

impl Write for Everywhere {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for port in &PORTS {
            let port = port.load(Relaxed);
            if port >> WIDTH != 0 {
                put_8250(port, text);
            } else if let Some(registers) = NonNull::new(port as *mut PL011Registers) {
                // SAFETY: the device tree says that a PL011 is here, and the monitor's page tables map it as
                // a device. The guest drives it too, but writing characters has no state to share.
                Uart::new(unsafe { UniqueMmioPointer::new(registers) }).write_str(text)?;
            }
        }
        Ok(())
    }
}

/// Writes to the transmit register when the line status says that it is empty.
fn put_8250(port: u64, text: &str) {
    const LINE_STATUS: u64 = 5;
    const EMPTY: u64 = 1 << 5;
    let (base, shift, width) = (port & ADDRESS, port >> SHIFT & 7, (port >> WIDTH) as u8);
    for byte in text.bytes() {
        while read_device(base + (LINE_STATUS << shift), width) & EMPTY == 0 {}
        write_device(base, width, byte.into());
    }
}

/// Prints; used by [`say!`].
pub(crate) fn print(arguments: fmt::Arguments<'_>) {
    // Writing to a serial port cannot fail.
    let _ = Everywhere.write_fmt(arguments);
}

/// Says one line with the monitor's name before it.
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::machine::console::print(format_args!("vpmu-monitor: {}\r\n", format_args!($($argument)*)))
    };
}
pub(crate) use say;
