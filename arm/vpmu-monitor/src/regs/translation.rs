//! The registers of a translation regime, where `HCR_EL2.E2H` is 0 (Arm ARM DDI 0487, chapter D24, each register's page).

/// `TCR_EL2` and `VTCR_EL2`: bits that read as 1.
pub const TCR_RES1: u64 = 1 << 31 | 1 << 23;
/// `VTCR_EL2`: likewise.
pub const VTCR_RES1: u64 = 1 << 31;
/// `TCR_EL2.PS` and `VTCR_EL2.PS` begin here: bits of a physical address, encoded as in `ID_AA64MMFR0_EL1.PARange`.
pub const PS_SHIFT: u32 = 16;
/// `SH0`: table walks are inner shareable.
pub const WALK_INNER_SHAREABLE: u64 = 0b11 << 12;
/// `ORGN0` and `IRGN0`: table walks are cached, write-back with allocation. `TG0` = 0 is the granule of 4 KiB.
pub const WALK_WRITE_BACK: u64 = 0b01 << 10 | 0b01 << 8;
/// `VTCR_EL2.SL0` begins here: 1 begins at level 1, 2 at level 0.
pub const SL0_SHIFT: u32 = 6;
/// `T0SZ` for addresses of `bits` bits.
pub const fn t0sz(bits: u64) -> u64 {
    64 - bits
}

/// `VTTBR_EL2.VMID` begins here.
pub const VTTBR_VMID_SHIFT: u32 = 48;

/// `SCTLR_EL2`: bits that read as 1.
pub const SCTLR_EL2_RES1: u64 = 0x30c5_0830;
/// `SCTLR_EL2.M`: the MMU is on.
pub const SCTLR_M: u64 = 1 << 0;
/// `SCTLR_EL2.C`: data is cached.
pub const SCTLR_C: u64 = 1 << 2;
/// `SCTLR_EL2.I`: instructions are cached.
pub const SCTLR_I: u64 = 1 << 12;

/// `MAIR_EL2`: attribute 0 is normal memory, write-back; attribute 1 is Device-nGnRE.
pub const MAIR: u64 = 0xff | 0x04 << 8;

/// A table descriptor's kind, bits 1:0 (D8.3).
pub const TABLE: u64 = 0b11;
/// The address of the next table in a table descriptor, with 4 KiB granules and 48 bits.
pub const NEXT_TABLE: u64 = 0xffff_ffff_f000;

/// `CTR_EL0.DminLine`, as the bytes of the smallest line of the data caches.
pub const fn smallest_line(ctr_el0: u64) -> u64 {
    4 << (ctr_el0 >> 16 & 0xf)
}
