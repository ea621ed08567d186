//! What the functions answer.

#[cfg(feature = "arm")]
use vpmu::arm;
#[cfg(feature = "x86")]
use vpmu::x86;

/// How a call ended that is not an access of the guest.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum VpmuStatus {
    /// It is done.
    Ok = 0,
    /// A null pointer, a number out of its range, or a PMU that was not initialized. A fault of the
    /// caller's.
    Misuse = -1,
    /// There can be no PMU of this configuration.
    Config = -2,
    /// The saved state is damaged, or this PMU cannot go on from it. The PMU is unchanged.
    State = -3,
    /// The buffer is too small: `VPMU_STATE_SIZE` bytes always suffice.
    Room = -4,
    /// KVM or perf refuses: `vpmu_kvm_error` says why.
    Host = -5,
}

impl VpmuStatus {
    /// The status of going on from a saved state.
    pub(crate) fn of_restore<E>(result: Result<(), E>) -> Self {
        result.map_or(Self::State, |()| Self::Ok)
    }
}

/// How a guest's access ended, and so what the caller does next. The library injects nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum VpmuOutcome {
    /// As `VPMU_STATUS_MISUSE`.
    Misuse = -1,
    /// No register of this PMU: go on as for any register that the caller does not know.
    NotHandled = 0,
    /// A read is complete: the value is where the caller wanted it. Give it to the guest and step
    /// over the instruction.
    Value = 1,
    /// A write is complete: step over the instruction.
    Done = 2,
    /// x86: inject #GP(0).
    GeneralProtection = 3,
    /// Arm: inject an Undefined Instruction exception (EC 0x00) into EL1.
    Undefined = 4,
    /// Arm: inject the trapped access (EC 0x18, with the same ISS) into EL1.
    TrapToEl1 = 5,
}

impl VpmuOutcome {
    /// The outcome of an access, its value put into `value`.
    #[cfg(feature = "x86")]
    pub(crate) fn of_x86(outcome: x86::Outcome, value: &mut u64) -> Self {
        match outcome {
            x86::Outcome::NotHandled => Self::NotHandled,
            x86::Outcome::Done => Self::Done,
            x86::Outcome::GeneralProtection => Self::GeneralProtection,
            x86::Outcome::Value(read) => {
                *value = read;
                Self::Value
            }
        }
    }

    /// The outcome of an access, its value put into `value`.
    #[cfg(feature = "arm")]
    pub(crate) fn of_arm(outcome: arm::Outcome, value: &mut u64) -> Self {
        match outcome {
            arm::Outcome::NotHandled => Self::NotHandled,
            arm::Outcome::Done => Self::Done,
            arm::Outcome::Undefined => Self::Undefined,
            arm::Outcome::TrapToEl1 => Self::TrapToEl1,
            arm::Outcome::Value(read) => {
                *value = read;
                Self::Value
            }
        }
    }
}
