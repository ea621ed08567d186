//! The bits of the registers, and what they set a counter to count.

use super::Version;
use crate::x86::{CounterConfig, EventKind, RawPerfEvtSel};

impl RawPerfEvtSel {
    /// Pin control: there are no pins in a virtual machine. Kept, and without effect.
    pub const PC: u64 = 1 << 19;
    /// Count for all threads of the core. Versions 3 and 4 only.
    pub const ANY_THREAD: u64 = 1 << 21;

    /// Records of the counter have the groups that MSR_PEBS_DATA_CFG names. With PEBS only.
    pub const ADAPTIVE: u64 = 1 << 34;

    /// Returns the bits that must be written as zero, without PEBS.
    pub const fn reserved(version: Version) -> u64 {
        match version {
            // Bit 21 is AnyThread: not yet in version 2, and no longer in version 5.
            Version::V2 | Version::V5 => 0xffff_ffff_0020_0000,
            Version::V3 | Version::V4 => 0xffff_ffff_0000_0000,
        }
    }

    /// Returns what a counter with this register is to count.
    pub const fn config(self, version: Version) -> CounterConfig {
        CounterConfig {
            // Without INV nothing happens outside C0 that could be counted.
            only_c0: matches!(version, Version::V5) && self.has(Self::INV),
            ..self.counts(EventKind::General {
                select: self.select(),
                umask: self.umask(),
            })
        }
    }
}

/// Fields of IA32_FIXED_CTR_CTRL, four bits for each counter (SDM 20.2.2, figure 20-2).
pub mod fixed_ctrl {
    use super::{CounterConfig, EventKind, RawPerfEvtSel};

    /// Count at CPL 0.
    pub const OS: u64 = 1 << 0;
    /// Count at CPL 1 to 3.
    pub const USR: u64 = 1 << 1;
    /// Count for all threads of the core. Versions 3 and 4 only.
    pub const ANY_THREAD: u64 = 1 << 2;
    /// Interrupt on overflow.
    pub const PMI: u64 = 1 << 3;

    /// Returns the field of fixed counter `n`; a counter that the register has no room for has zero.
    pub const fn field(register: u64, n: u8) -> u64 {
        // Checked, as a number is anybody's and a shift by 64 or more would panic.
        match register.checked_shr(n as u32 * 4) {
            Some(shifted) => shifted & 0xf,
            None => 0,
        }
    }

    /// Returns `bits` in the field of fixed counter `n`.
    pub const fn place(bits: u64, n: u8) -> u64 {
        match (bits & 0xf).checked_shl(n as u32 * 4) {
            Some(placed) => placed,
            None => 0,
        }
    }

    /// Returns the bit by which records of fixed counter `n` have the groups that MSR_PEBS_DATA_CFG names. With PEBS
    /// only.
    pub const fn adaptive(n: u8) -> u64 {
        match (1_u64 << 32).checked_shl(n as u32 * 4) {
            Some(bit) => bit,
            None => 0,
        }
    }

    /// Returns what fixed counter `n` with this register is to count.
    pub const fn config(register: u64, n: u8) -> CounterConfig {
        let field = field(register, n);
        CounterConfig {
            user: field & USR != 0,
            kernel: field & OS != 0,
            ..RawPerfEvtSel(0).counts(EventKind::Fixed(n))
        }
    }
}

/// Bits of IA32_PERF_GLOBAL_STATUS that are no counter's.
pub mod global_status {
    /// The last-branch records are frozen. From version 4 on.
    pub const LBR_FRZ: u64 = 1 << 58;
    /// The counters are frozen: none counts while this is set. From version 4 on.
    pub const CTR_FRZ: u64 = 1 << 59;
    /// The PEBS buffer in the DS save area is full, up to its threshold.
    pub const OVF_BUF: u64 = 1 << 62;
    /// The state of the performance monitoring hardware has changed.
    pub const COND_CHGD: u64 = 1 << 63;
}

/// Bits of IA32_DEBUGCTL that belong to the PMU.
pub mod debugctl {
    /// Freeze the last branch records on a PMI. Reserved without [`lbr`](crate::x86::lbr).
    pub const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;
    /// Freeze the counters on a PMI.
    pub const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
    /// Freeze the counters in system management mode, if IA32_PERF_CAPABILITIES says so.
    pub const FREEZE_WHILE_SMM: u64 = 1 << 14;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_event_is_what_the_guest_wrote_without_the_controls() {
        let written = RawPerfEvtSel(0x0ad7_41c0);
        let config = written.config(Version::V2);
        assert_eq!(config.raw(), Some(0x0a84_41c0));
        assert_eq!(config.architectural(), None);
        assert!(config.user && config.kernel && config.edge && config.invert);
        assert!(!config.only_c0 && written.config(Version::V5).only_c0);
    }

    #[test]
    fn fixed_fields_outside_the_register_are_empty() {
        assert_eq!(fixed_ctrl::field(u64::MAX, 15), 0xf);
        assert_eq!(fixed_ctrl::field(u64::MAX, 16), 0);
        assert_eq!(fixed_ctrl::field(u64::MAX, 255), 0);
        assert_eq!(fixed_ctrl::place(0xb, 2), 0xb00);
        assert_eq!(fixed_ctrl::place(0xb, 255), 0);
    }
}
