//! Which events an Arm guest may count.

use vpmu::arm::EventFilter;

/// How many rules a `struct vpmu_arm_filter` has.
pub const VPMU_ARM_RULES: usize = 16;

/// A verdict on the events from `first` to `last`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuArmRule {
    /// The first of the events.
    pub first: u16,
    /// The last of them.
    pub last: u16,
    /// Whether the guest may count them.
    pub allow: bool,
}

/// Which events a guest may count: of the rules that name an event the last one decides. A denied event counts nothing,
/// and PMCEID0/1_EL0 do not list it. Event 0x11 stands for the cycle counter, too. All zero: a guest may count all.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuArmFilter {
    /// An event that no rule names is denied.
    pub deny: bool,
    /// How many rules there are.
    pub count: u8,
    /// The rules.
    pub rules: [VpmuArmRule; VPMU_ARM_RULES],
}

impl VpmuArmFilter {
    /// `None`: there are more rules than fit.
    pub(crate) fn filter(&self) -> Option<EventFilter> {
        let mut filter = if self.deny {
            EventFilter::deny_all()
        } else {
            EventFilter::allow_all()
        };
        for &VpmuArmRule { first, last, allow } in self.rules.get(..self.count.into())? {
            filter.add_rule(first..=last, allow).ok()?;
        }
        Some(filter)
    }
}
