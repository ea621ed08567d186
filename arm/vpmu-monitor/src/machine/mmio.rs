//! Device registers of any width, for an access that the guest made.
//!
//! UNSAFETY: reads and writes device registers.

/// Reads a register of `bytes` bytes.
pub(super) fn read_device(address: u64, bytes: u8) -> u64 {
    // SAFETY: a register of the interrupt controller, mapped as a device; only accesses that are
    // aligned by their width are passed on.
    unsafe {
        match bytes {
            1 => (address as *const u8).read_volatile().into(),
            2 => (address as *const u16).read_volatile().into(),
            4 => (address as *const u32).read_volatile().into(),
            _ => (address as *const u64).read_volatile(),
        }
    }
}

/// Writes the low `bytes` bytes of `value` to a register.
pub(super) fn write_device(address: u64, bytes: u8, value: u64) {
    // SAFETY: as for `read_device`.
    unsafe {
        match bytes {
            1 => (address as *mut u8).write_volatile(value as u8),
            2 => (address as *mut u16).write_volatile(value as u16),
            4 => (address as *mut u32).write_volatile(value as u32),
            _ => (address as *mut u64).write_volatile(value),
        }
    }
}
