//! The serial line, shared with the guest: used at boot and when the guest has ended, never between.
//!
//! UNSAFETY: makes a driver for device registers out of an address.

use core::{
    fmt::{self, Write},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use arm_pl011_uart::{PL011Registers, Uart, UniqueMmioPointer};

static BASE: AtomicU64 = AtomicU64::new(0);

/// Uses the PL011 at `base` from now on. Without one, everything said is lost.
pub(crate) fn set(base: u64) {
    BASE.store(base, Relaxed);
}

struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let base = BASE.load(Relaxed);
        let Some(registers) = NonNull::new(base as *mut PL011Registers) else {
            return Ok(());
        };
        // SAFETY: the device tree says that a PL011 is here, and the monitor's page tables map it as
        // a device. The guest drives it too, but writing characters has no state to share.
        let mut uart = Uart::new(unsafe { UniqueMmioPointer::new(registers) });
        uart.write_str(text)
    }
}

/// Prints; used by [`say!`].
pub(crate) fn print(arguments: fmt::Arguments<'_>) {
    // Writing to a PL011 cannot fail.
    let _ = Console.write_fmt(arguments);
}

/// Says one line with the monitor's name before it.
macro_rules! say {
    ($($argument:tt)*) => {
        $crate::machine::console::print(format_args!("vpmu-monitor: {}\r\n", format_args!($($argument)*)))
    };
}
pub(crate) use say;
