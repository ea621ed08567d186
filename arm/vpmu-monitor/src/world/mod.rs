//! The guest's world: what an exit means, and what the guest sees of its PMU, its interrupts and its firmware.

pub mod distributor;
pub mod exit;
pub mod guest_pmu;
pub mod offer;
pub mod profile;
pub mod psci;
pub mod redistributor;
pub mod second;
pub mod set_way;
pub mod statistics;
pub mod vgic;
