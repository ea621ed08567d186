//! `ICH_LR<n>_EL2`, the Interrupt Controller List Registers (Arm IHI 0069, the register's page).

/// vINTID, bits 31:0.
pub const VINTID: u64 = 0xffff_ffff;
/// Bits of pINTID, which follow at [`PINTID_SHIFT`] when [`HW`] is set.
pub const PINTID: u64 = 0x1fff;
/// Where pINTID begins.
pub const PINTID_SHIFT: u32 = 32;
/// EOI, with [`HW`] clear: the guest's deactivation raises a maintenance interrupt.
pub const EOI: u64 = 1 << 41;
/// Where the priority begins, 8 bits.
pub const PRIORITY_SHIFT: u32 = 48;
/// Group 1 (virtual IRQ) rather than group 0 (virtual FIQ).
pub const GROUP1: u64 = 1 << 60;
/// HW: the guest's deactivation deactivates the physical interrupt pINTID.
pub const HW: u64 = 1 << 61;
/// State bit 0: pending.
pub const PENDING: u64 = 1 << 62;
/// State bit 1: active. With [`HW`], pending and active at once is forbidden.
pub const ACTIVE: u64 = 1 << 63;
