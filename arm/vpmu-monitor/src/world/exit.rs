//! Why the guest left EL1: Arm ARM DDI 0487, ESR_EL2 (exception classes and their syndromes).

use vpmu::arm::Encoding;
use vpmu_el2::access::Access;

/// A decoded `ESR_EL2` of an exception from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// HVC: the guest has already stepped past it.
    Hvc,
    /// SMC trapped by `HCR_EL2.TSC`.
    Smc,
    /// WFI trapped by `HCR_EL2.TWI`.
    Wfi,
    /// An access of a PMU register, in AArch64 or AArch32.
    Pmu(Access),
    /// A trapped MRS or MSR of another register.
    SystemRegister(RegisterAccess),
    /// A trapped MRC, MCR, MRRC or MCRR of coprocessor 15, in AArch32, of no PMU register.
    Aarch32,
    /// A stage-2 fault of a load or store that the syndrome describes.
    Memory(MemoryAccess),
    /// A stage-2 fault of cache maintenance, which moves no data.
    CacheMaintenance,
    /// A stage-2 fault of anything else: an instruction fetch, a walk of the guest's own page tables, a load or store that the
    /// syndrome does not describe (pairs, write-back, SIMD).
    Abort,
    /// Anything else, by exception class.
    Other(u8),
}

/// `ESR_EL2.EC` of the exceptions that the monitor serves.
const EC_WAIT: u64 = 0x01;
const EC_MCR: u64 = 0x03;
const EC_MCRR: u64 = 0x04;
const EC_HVC: u64 = 0x16;
const EC_SMC: u64 = 0x17;
const EC_SYSTEM_REGISTER: u64 = 0x18;
const EC_LOWER_INSTRUCTION_ABORT: u64 = 0x20;
const EC_LOWER_DATA_ABORT: u64 = 0x24;

/// A trapped MRS or MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterAccess {
    /// Which register.
    pub encoding: Encoding,
    /// General-purpose register, 31 = XZR.
    pub rt: usize,
    /// MSR rather than MRS.
    pub write: bool,
}

/// A trapped load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAccess {
    /// Store rather than load.
    pub write: bool,
    /// 1, 2, 4 or 8.
    pub bytes: u8,
    /// General-purpose register, 31 = XZR.
    pub rt: usize,
    /// Loads of less than 64 bits into an X register with sign.
    pub sign_extend: bool,
    /// The destination is an X register.
    pub wide: bool,
}

impl Exit {
    /// Decodes any value of `ESR_EL2`.
    pub fn decode(esr: u64) -> Self {
        if let Some(access) = Access::decode(esr) {
            return Self::Pmu(access);
        }
        let iss = esr as u32 & 0x01ff_ffff;
        let bit = |n: u32| iss >> n & 1 != 0;
        match esr >> 26 & 0x3f {
            EC_MCR | EC_MCRR => Self::Aarch32,
            EC_HVC => Self::Hvc,
            EC_SMC => Self::Smc,
            // ISS.TI: WFI; `HCR_EL2.TWE` traps no other.
            EC_WAIT if iss & 0b11 == 0 => Self::Wfi,
            EC_SYSTEM_REGISTER => Self::SystemRegister(RegisterAccess {
                encoding: Encoding::from_iss(iss),
                rt: (iss >> 5 & 0x1f) as usize,
                write: !bit(0),
            }),
            // ISS.S1PTW: page tables in a device. No answer would make the walk go on.
            EC_LOWER_DATA_ABORT if bit(7) => Self::Abort,
            // ISS.CM.
            EC_LOWER_DATA_ABORT if bit(8) => Self::CacheMaintenance,
            // ISS.ISV.
            EC_LOWER_DATA_ABORT if bit(24) => Self::Memory(MemoryAccess {
                write: bit(6),
                bytes: 1 << (iss >> 22 & 3),
                rt: (iss >> 16 & 0x1f) as usize,
                sign_extend: bit(21),
                wide: bit(15),
            }),
            // The architecture wants no other loads and stores of the interrupt controller's registers (Arm IHI 0069, "GIC
            // memory-mapped register access"), and what a bus answers to them is an abort.
            EC_LOWER_DATA_ABORT | EC_LOWER_INSTRUCTION_ABORT => Self::Abort,
            class => Self::Other(class as u8),
        }
    }
}

impl MemoryAccess {
    /// What a load leaves in its register for `value` read from memory.
    pub fn extend(self, value: u64) -> u64 {
        let unused = 64 - 8 * u32::from(self.bytes);
        let value = value << unused;
        if !self.sign_extend {
            return value >> unused;
        }
        let value = ((value as i64) >> unused) as u64;
        // A load into a W register clears the upper half, also of a value with its sign.
        if self.wide {
            value
        } else {
            value & 0xffff_ffff
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::arm::Register;

    #[test]
    fn a_trapped_mrs_is_decoded() {
        // mrs x20, dczid_el0: op0 3, op1 3, CRn 0, CRm 0, op2 7.
        let iss = 3 << 20 | 7 << 17 | 3 << 14 | 20 << 5 | 1;
        let Exit::SystemRegister(access) = Exit::decode(0x18 << 26 | iss) else {
            panic!("not a register access");
        };
        assert_eq!((access.rt, access.write), (20, false));
        let e = access.encoding;
        assert_eq!((e.op0, e.op1, e.crn, e.crm, e.op2), (3, 3, 0, 0, 7));
    }

    #[test]
    fn an_access_of_the_pmu_is_one_in_either_state() {
        // mrs x20, pmccntr_el0: op0 3, op1 3, CRn 9, CRm 13, op2 0; mrc p15, 0, r4, c9, c13, 0.
        let a64 = 0x18 << 26 | 3 << 20 | 3 << 14 | 9 << 10 | 20 << 5 | 13 << 1 | 1;
        let a32 = 0x03 << 26 | 9 << 10 | 4 << 5 | 13 << 1 | 1;
        for esr in [a64, a32] {
            let Exit::Pmu(access) = Exit::decode(esr) else {
                panic!("not an access of the PMU");
            };
            assert_eq!((access.register, access.write), (Register::Pmccntr, false));
        }
        // mrc p15, 0, r4, c1, c0, 0.
        assert_eq!(
            Exit::decode(0x03 << 26 | 1 << 10 | 4 << 5 | 1),
            Exit::Aarch32
        );
    }

    #[test]
    fn loads_are_extended_as_their_register_wants() {
        let load = |bytes, sign_extend, wide| MemoryAccess {
            write: false,
            bytes,
            rt: 0,
            sign_extend,
            wide,
        };
        assert_eq!(load(1, false, false).extend(0xff80), 0x80);
        assert_eq!(load(1, true, false).extend(0x80), 0xffff_ff80);
        assert_eq!(load(2, true, true).extend(0x8000), 0xffff_ffff_ffff_8000);
        assert_eq!(load(4, false, true).extend(!0), 0xffff_ffff);
        assert_eq!(load(8, false, true).extend(!0), !0);
    }

    #[test]
    fn every_syndrome_decodes() {
        for class in 0..64u64 {
            for iss in [0, 0x01ff_ffff, 0x0155_5555] {
                let _ = Exit::decode(class << 26 | iss);
            }
        }
    }
}
