//! Profiles: how often each stack was sampled.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A profile as folded stacks, the form that flame graphs are made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Samples by stack. A stack names its frames from the outermost on, with `;` between them.
    pub folded: BTreeMap<String, u64>,
}
