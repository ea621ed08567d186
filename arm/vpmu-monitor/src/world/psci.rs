//! What the guest's firmware calls mean to the monitor.
//!
//! The guest calls firmware by SMC, which traps. Calls that start or stop a CPU or the machine are
//! performed around the monitor's own state; harmless questions go on to the real firmware; everything
//! else does not exist (Arm DEN 0022, Power State Coordination Interface; DEN 0028, SMC Calling Convention).

use core::ops::RangeInclusive;

use smccc::psci::{
    PSCI_AFFINITY_INFO_32, PSCI_CPU_OFF, PSCI_CPU_ON_32, PSCI_CPU_SUSPEND_32, PSCI_FEATURES,
    PSCI_MIGRATE_INFO_TYPE, PSCI_SYSTEM_OFF, PSCI_SYSTEM_RESET, PSCI_SYSTEM_RESET2_32,
    PSCI_VERSION,
};

/// A firmware call of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Start the CPU with MPIDR affinity `target` at `entry` with `context` in x0.
    CpuOn {
        /// MPIDR affinity fields.
        target: u64,
        /// Guest physical address.
        entry: u64,
        /// x0 of the started CPU.
        context: u64,
    },
    /// Stop this CPU.
    CpuOff,
    /// Wait for an interrupt; a power-down request may be answered as stand-by.
    CpuSuspend(PowerState),
    /// Switch the machine off.
    SystemOff,
    /// Restart the machine.
    SystemReset,
    /// Whether the CPU with MPIDR affinity `target` is on.
    AffinityInfo {
        /// MPIDR affinity fields.
        target: u64,
    },
    /// Pass the call and its answer through.
    Forward,
    /// There is no such call, which PSCI and the calling convention say alike.
    Unknown,
}

/// The `power_state` of CPU_SUSPEND (DEN 0022, 5.4.2), which is 32 bits wide in both forms of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerState(pub u32);

impl PowerState {
    /// In the original format: StateType and StateID. The power level is the platform's, as the reserved bits are zero.
    const ORIGINAL: u32 = 0x0001_ffff;
    /// In the extended format: StateType and StateID.
    const EXTENDED: u32 = 1 << 30 | 0x0fff_ffff;
    /// Bit 1 of what PSCI_FEATURES answers for CPU_SUSPEND: the firmware uses the extended format.
    const EXTENDED_FORMAT: u64 = 1 << 1;

    /// Whether firmware could take this state. `listed` has the states that the device tree names
    /// (`arm,psci-suspend-param`); `features` is what the firmware's PSCI_FEATURES answers for CPU_SUSPEND. A state of a
    /// higher power level than the CPU's own is valid only where it is listed.
    pub fn is_valid(self, listed: &[u32], features: u64) -> bool {
        // An error leaves the original format, which every firmware has.
        let extended = (features as i32) > 0 && features & Self::EXTENDED_FORMAT != 0;
        let known = if extended {
            Self::EXTENDED
        } else {
            Self::ORIGINAL
        };
        self.0 & !known == 0 || listed.contains(&self.0)
    }
}

/// Set in a fast call's function identifier.
const FAST: u32 = 1 << 31;
/// In a fast call: the caller keeps nothing in its SVE registers (DEN 0028, version 1.3). Linux sets it on any
/// call where the firmware says that it is of version 1.3.
const SVE_HINT: u32 = 1 << 16;
/// Set in the 64-bit form of a function identifier.
const SMC64: u32 = 1 << 30;
/// The architecture services of the calling convention: version, features, errata workarounds.
const ARCHITECTURE_SERVICES: RangeInclusive<u32> = 0x8000_0000..=0x8000_ffff;

/// The function identifier in `x0` of an SMC, without the hint that a caller may give in it.
pub const fn function(x0: u64) -> u32 {
    let function = x0 as u32;
    if function & FAST != 0 {
        function & !SVE_HINT
    } else {
        function
    }
}

impl Call {
    /// Decodes `x0..x3` of an SMC.
    ///
    /// In the 32-bit form only the low words count.
    pub fn decode(x: [u64; 4]) -> Self {
        let function = function(x[0]);
        let narrow = if function & SMC64 == 0 {
            0xffff_ffff
        } else {
            u64::MAX
        };
        let [_, target, entry, context] = x.map(|value| value & narrow);
        match function {
            PSCI_CPU_OFF => Self::CpuOff,
            PSCI_SYSTEM_OFF => Self::SystemOff,
            PSCI_SYSTEM_RESET => Self::SystemReset,
            PSCI_VERSION | PSCI_MIGRATE_INFO_TYPE => Self::Forward,
            // The arm below would decode a question without a function.
            PSCI_FEATURES if target == u64::from(PSCI_FEATURES) => Self::Forward,
            PSCI_FEATURES => match Self::decode([target, 0, 0, 0]) {
                // The firmware may have what the monitor does not pass on.
                Self::Unknown => Self::Unknown,
                _ => Self::Forward,
            },
            f if ARCHITECTURE_SERVICES.contains(&f) => Self::Forward,
            _ => match function & !SMC64 {
                PSCI_CPU_ON_32 => Self::CpuOn {
                    target,
                    entry,
                    context,
                },
                PSCI_CPU_SUSPEND_32 => Self::CpuSuspend(PowerState(x[1] as u32)),
                PSCI_AFFINITY_INFO_32 => Self::AffinityInfo { target },
                PSCI_SYSTEM_RESET2_32 => Self::SystemReset,
                _ => Self::Unknown,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_state_is_valid_by_its_format_or_by_the_device_tree() {
        const ORIGINAL: u64 = 0;
        const NOT_SUPPORTED_32: u64 = 0xffff_ffff;
        for (state, features, valid) in [
            (0x0000_0000, ORIGINAL, true),
            (0x0001_0002, ORIGINAL, true),
            (0x0101_0000, ORIGINAL, false),
            (0x0002_0000, ORIGINAL, false),
            (0xffff_ffff, ORIGINAL, false),
            (0x4000_0002, ORIGINAL, false),
            (0x4000_0002, 0b10, true),
            (0x8000_0000, 0b10, false),
            (0x4000_0002, NOT_SUPPORTED_32, false),
            (0x0000_0000, NOT_SUPPORTED_32, true),
        ] {
            assert_eq!(
                PowerState(state).is_valid(&[], features),
                valid,
                "{state:#x} {features:#x}"
            );
        }
        assert!(PowerState(0x0101_0000).is_valid(&[0x0101_0000], ORIGINAL));
    }

    #[test]
    fn cpu_on_takes_its_arguments_in_both_widths() {
        let wide = Call::decode([0xc400_0003, 1 << 32, 0x1_4000_0000, 7]);
        assert_eq!(
            wide,
            Call::CpuOn {
                target: 1 << 32,
                entry: 0x1_4000_0000,
                context: 7
            }
        );
        let narrow = Call::decode([0x8400_0003, 1 << 32 | 1, 0x4000_0000, 7]);
        assert_eq!(
            narrow,
            Call::CpuOn {
                target: 1,
                entry: 0x4000_0000,
                context: 7
            }
        );
    }

    #[test]
    fn the_sve_hint_changes_no_call() {
        for id in [0x8400_0002_u64, 0xc400_0003, 0x8000_0000, 0x8400_00ff] {
            let call = [id, 1, 2, 3];
            let hinted = [id | 1 << 16, 1, 2, 3];
            assert_eq!(Call::decode(hinted), Call::decode(call), "{id:#x}");
            assert_eq!(function(hinted[0]), id as u32);
        }
        // Bit 16 of a yielding call is part of its number.
        assert_eq!(function(0x0001_0000), 0x0001_0000);
    }

    #[test]
    fn questions_go_to_the_firmware_and_unknown_calls_nowhere() {
        for function in [
            PSCI_VERSION,
            *ARCHITECTURE_SERVICES.start(),
            PSCI_MIGRATE_INFO_TYPE,
        ] {
            assert_eq!(Call::decode([function.into(), 0, 0, 0]), Call::Forward);
        }
        // SYSTEM_SUSPEND, a secure service, the OEM range, a fast call of a hypervisor.
        for function in [0xc400_000e_u64, 0xb200_0000, 0x8300_0000, 0x8600_0000] {
            assert_eq!(Call::decode([function, 0, 0, 0]), Call::Unknown);
        }
    }

    #[test]
    fn features_answers_only_for_what_is_there() {
        assert_eq!(
            Call::decode([PSCI_FEATURES.into(), PSCI_CPU_OFF.into(), 0, 0]),
            Call::Forward
        );
        assert_eq!(
            Call::decode([PSCI_FEATURES.into(), 0xc400_000e, 0, 0]),
            Call::Unknown
        );
        assert_eq!(
            Call::decode([PSCI_FEATURES.into(), PSCI_FEATURES.into(), 0, 0]),
            Call::Forward
        );
    }
}
