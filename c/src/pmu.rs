//! The one shape of the three Arm PMUs: a guest's registers, and what stands behind them.

use vpmu::arm::emulated::{BackedPmu, EmulatedPmu};
use vpmu::arm::partition::PartitionedPmu;
use vpmu::arm::{
    EventFilter, ExceptionLevel, Outcome, PmuState, PmuVersion, Register, RestoreError,
};

use crate::filter::VpmuArmFilter;
use crate::host::Host;
use crate::registers::{Registers, decode};
use crate::room::{self, Held, Mut, Ref, Room, Value};
use crate::state::{self, Place, Source};
use crate::status::{VpmuOutcome, VpmuStatus};

/// What each of the PMUs does over an `H`.
pub(crate) trait Pmu<H> {
    /// One that is not made yet.
    const VACANT: Self;

    /// Reads a register, or writes the value that it is given.
    fn access(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        written: Option<u64>,
        host: &mut H,
    ) -> Outcome;
    fn line(&mut self, host: &mut H) -> bool;
    fn save_into(&mut self, state: &mut PmuState, host: &mut H);
    /// Takes the vCPU off its CPU for a [`restore`](Self::restore); returns whether it has to be loaded again.
    fn stop(&mut self, host: &mut H) -> bool;
    fn restore(&mut self, state: &PmuState, host: &mut H) -> Result<(), RestoreError>;
    fn start(&mut self, host: &mut H);
}

/// Of methods that have one name in all three.
macro_rules! shape {
    ($pmu:ty, $host:ty, $restore:ident, |$regs:ident| $($read:ident)?) => {
        impl Pmu<$host> for $pmu {
            const VACANT: Self = <$pmu>::vacant();

            fn access(
                &mut self,
                register: Register,
                level: ExceptionLevel,
                written: Option<u64>,
                host: &mut $host,
            ) -> Outcome {
                match written {
                    Some(value) => self.write(register, level, value, host),
                    None => self.read(register, level, host),
                }
            }

            fn line(&mut self, $regs: &mut $host) -> bool {
                <$pmu>::line(self $(, $read)?)
            }

            fn save_into(&mut self, state: &mut PmuState, host: &mut $host) {
                self.save_into(state, host);
            }

            fn stop(&mut self, host: &mut $host) -> bool {
                let runs = self.is_loaded();
                if runs {
                    self.put(host);
                }
                runs
            }

            fn restore(&mut self, state: &PmuState, host: &mut $host) -> Result<(), RestoreError> {
                <$pmu>::$restore(self, state, host)
            }

            fn start(&mut self, host: &mut $host) {
                self.load(host);
            }
        }
    };
}

// The level of a partitioned PMU's interrupt is in the registers.
shape!(EmulatedPmu, Host, restore_put, |_host|);
shape!(BackedPmu, Registers, restore_put, |_registers|);
shape!(PartitionedPmu, Registers, restore, |registers| registers);

/// A room that holds one of them.
pub(crate) trait Guest: Room<Pmu: Pmu<Self::Host>, Host: Copy> {}

impl<R: Room<Pmu: Pmu<R::Host>, Host: Copy>> Guest for R {}

/// Makes a PMU out of reset over `host`, by `make`.
pub(crate) fn init<G: Guest>(
    pmu: Mut<'_, G>,
    host: G::Host,
    make: impl FnOnce(&mut G::Pmu, &mut G::Host) -> VpmuStatus,
) -> VpmuStatus {
    let vacant = |at: *mut Value<G>| {
        // SAFETY: `room::init` passes room for a value.
        unsafe {
            (&raw mut (*at).pmu).write(const { G::Pmu::VACANT });
            (&raw mut (*at).host).write(host);
        }
    };
    room::init(pmu, vacant, |held| {
        // A PMU that was here is reached as before, also where the new one cannot be made.
        let status = make(&mut held.pmu, &mut held.host);
        if status == VpmuStatus::Ok {
            held.host = host;
        }
        status
    })
}

/// Performs a trapped access.
pub(crate) fn access<G: Guest>(
    pmu: Mut<'_, G>,
    iss: u32,
    el0: bool,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    let Some(value) = value.get() else {
        return VpmuOutcome::Misuse;
    };
    let level = if el0 {
        ExceptionLevel::El0
    } else {
        ExceptionLevel::El1
    };
    room::with(pmu, |Held { pmu, host }| {
        let outcome = match decode(iss) {
            None => Outcome::NotHandled,
            Some((register, write)) => pmu.access(register, level, write.then_some(*value), host),
        };
        VpmuOutcome::of_arm(outcome, value)
    })
}

/// The level of the guest's interrupt.
pub(crate) fn line<G: Guest>(pmu: Mut<'_, G>) -> bool {
    room::with(pmu, |held| held.pmu.line(&mut held.host))
}

/// Performs what cannot fail.
pub(crate) fn perform<G: Guest>(
    pmu: Mut<'_, G>,
    act: impl FnOnce(&mut G::Pmu, &mut G::Host),
) -> VpmuStatus {
    room::perform(pmu, |held| {
        act(&mut held.pmu, &mut held.host);
    })
}

/// Saves to `place`.
pub(crate) fn save<G: Guest>(pmu: Mut<'_, G>, place: Option<Place<'_>>) -> VpmuStatus {
    let Some(place) = place else {
        return VpmuStatus::Misuse;
    };
    room::with(pmu, |held| {
        let mut state = PmuState::reset(PmuVersion::V3, 0);
        held.pmu.save_into(&mut state, &mut held.host);
        place.put(&mut state)
    })
}

/// Goes on from `source`.
pub(crate) fn restore<G: Guest>(pmu: Mut<'_, G>, source: Source<'_>) -> VpmuStatus {
    room::with(pmu, |held| {
        // Around the state's time on the stack, not within it: these two go deepest.
        let runs = held.pmu.stop(&mut held.host);
        let status = state::restore(source, |state: &PmuState| {
            VpmuStatus::of_restore(held.pmu.restore(state, &mut held.host))
        });
        if runs {
            held.pmu.start(&mut held.host);
        }
        status
    })
}

/// Sets another event filter by `set`.
pub(crate) fn set_filter<G: Guest>(
    pmu: Mut<'_, G>,
    filter: Ref<'_, VpmuArmFilter>,
    set: impl FnOnce(&mut G::Pmu, EventFilter, &mut G::Host),
) -> VpmuStatus {
    let Some(filter) = filter.get() else {
        return VpmuStatus::Misuse;
    };
    let Some(filter) = filter.filter() else {
        return VpmuStatus::Config;
    };
    perform(pmu, |pmu, host| set(pmu, filter, host))
}
