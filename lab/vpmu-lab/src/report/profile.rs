//! Profiles: how often each stack was sampled.

pub use vpmu_measure::Profile;
