//! The local APIC's LVT timer register, as far as a deadline depends on it.

/// What the LVT timer register says about deadlines (Intel SDM vol. 3A, "APIC Timer", and the
/// figure "Local Vector Table").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LvtTimer {
    /// Bits 18:17.
    pub mode: TimerMode,
    /// Bit 16: an interrupt that comes due is dropped.
    pub masked: bool,
}

/// What the local APIC's timer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum TimerMode {
    /// 0b00: counts down once.
    OneShot,
    /// 0b01: counts down again and again.
    Periodic,
    /// 0b10: fires at IA32_TSC_DEADLINE. In the others that register reads as 0 and ignores
    /// writes.
    TscDeadline,
    /// 0b11.
    Reserved,
}

impl LvtTimer {
    /// Out of reset: 0x1_0000.
    pub const RESET: Self = Self::decode(0x1_0000);

    /// Decodes the register, any value of it.
    pub const fn decode(register: u32) -> Self {
        Self {
            mode: match register >> 17 & 0b11 {
                0b00 => TimerMode::OneShot,
                0b01 => TimerMode::Periodic,
                0b10 => TimerMode::TscDeadline,
                _ => TimerMode::Reserved,
            },
            masked: register & 1 << 16 != 0,
        }
    }
}
