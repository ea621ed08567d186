//! Profiles: how often each stack was sampled.

use std::collections::BTreeMap;

pub use vpmu_measure::Profile;

/// Returns the samples of each function, their callees' left out.
pub fn own(profile: &Profile) -> BTreeMap<&str, u64> {
    let mut own: BTreeMap<&str, u64> = BTreeMap::new();
    for (stack, samples) in &profile.folded {
        let function = stack.rsplit(';').next().unwrap_or(stack);
        let count = own.entry(function).or_default();
        *count = count.saturating_add(*samples);
    }
    own
}
