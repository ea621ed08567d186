//! Device registers of any width, for an access that the guest made.
//!
//! UNSAFETY: reads and writes device registers.

/// Reads a register of `bytes` bytes.
pub(super) fn read_device(address: u64, bytes: u8) -> u64 {
    // SAFETY: a redistributor register, mapped as a device; the guest chose an aligned address, or
    // stage 1 would have faulted on device memory.
    unsafe {
        match bytes {
            1 => (address as *const u8).read_volatile().into(),
            2 => ((address & !1) as *const u16).read_volatile().into(),
            4 => ((address & !3) as *const u32).read_volatile().into(),
            _ => ((address & !7) as *const u64).read_volatile(),
        }
    }
}

/// Writes the low `bytes` bytes of `value` to a register.
pub(super) fn write_device(address: u64, bytes: u8, value: u64) {
    // SAFETY: as for `read_device`.
    unsafe {
        match bytes {
            1 => (address as *mut u8).write_volatile(value as u8),
            2 => ((address & !1) as *mut u16).write_volatile(value as u16),
            4 => ((address & !3) as *mut u32).write_volatile(value as u32),
            _ => ((address & !7) as *mut u64).write_volatile(value),
        }
    }
}
