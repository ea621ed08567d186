//! Another plan for a guest that runs.

use super::{BackedPmu, open::stays_trapped};
use crate::arm::partition::{MigrateError, Plan};
use crate::counter::Events;

impl<V: Events> BackedPmu<V> {
    /// Goes on with another plan, between [`put`](Self::put) and [`load`](Self::load): of this CPU, where the host has more
    /// counters or fewer, or of another CPU. With the registers open the guest reads that one's identity. A guest
    /// keeps the number of counters that it has found. One that the plan does not give it and that it has counting is `Lost`,
    /// until a plan gives it back.
    ///
    /// # Errors
    ///
    /// [`MigrateError`], when the PMU has not been put, or for a plan of another version.
    pub fn migrate(&mut self, plan: Plan) -> Result<(), MigrateError> {
        // The values of a loaded PMU are in counters that the new plan may give to the host.
        if self.pmu.bank.loaded {
            return Err(MigrateError::Loaded);
        }
        let (guest, offered) = (self.plan.version(), plan.version());
        if guest != offered {
            return Err(MigrateError::Version { guest, offered });
        }
        // An open PMCR_EL0 shows the hardware's N. With another number everything traps, so no number is refused.
        let as_told = self.is_the_machines && self.pmu.config.counters == plan.hpmn();
        self.open_traps = plan.trap_just(stays_trapped).filter(|_| as_told);
        self.backing.available = plan.hpmn();
        self.plan = plan;
        Ok(())
    }
}
