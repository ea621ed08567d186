//! One vCPU's parts as a value, to be saved with the guest and continued elsewhere.

use vpmu::x86::{Capability, PmuState};

use crate::deadline::DeadlineState;
use crate::error::Error;
use crate::offer::{Offer, Pmu};
use crate::paravirt::ParavirtState;

/// One vCPU's state: everything of its parts that its guest could find out, and the parts that it was offered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct State {
    /// The version of this layout: [`State::VERSION`].
    pub version: u32,
    /// The PMU. `None`: the guest was offered none.
    pub pmu: Option<SavedPmu>,
    /// The lazy deadline. `None`: the guest was offered none.
    pub deadline: Option<DeadlineState>,
}

/// The state of the PMU that a guest was offered.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum SavedPmu {
    /// An architectural PMU: what the guest finds of it, and its registers with all that has been counted.
    Architectural(Capability, PmuState),
    /// A paravirtual PMU.
    Paravirtual(ParavirtState),
}

impl State {
    /// The version of the layout that this crate writes and reads.
    pub const VERSION: u32 = 1;

    /// Returns the state of a vCPU without any part.
    pub fn empty() -> Self {
        Self::new(None, None)
    }

    pub(crate) fn new(pmu: Option<SavedPmu>, deadline: Option<DeadlineState>) -> Self {
        Self {
            version: Self::VERSION,
            pmu,
            deadline,
        }
    }

    /// Returns the parts that the guest was offered, for [`Vcpu::attach`](crate::Vcpu::attach).
    pub fn offer(&self) -> Offer {
        Offer {
            pmu: self.pmu.as_ref().map(SavedPmu::offer),
            // What a guest was offered follows from what was saved, so that the two cannot disagree.
            deadline: self.deadline.is_some(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        // Formats that describe themselves would take an older layout for this one.
        match self.version {
            Self::VERSION => Ok(()),
            other => Err(Error::StateVersion(other)),
        }
    }
}

impl SavedPmu {
    pub(crate) fn offer(&self) -> Pmu {
        match self {
            Self::Architectural(capability, _) => Pmu::Architectural(*capability),
            Self::Paravirtual(state) => Pmu::Paravirtual(state.offer()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_layout_is_refused() {
        let state = State::empty();
        assert_eq!(state.check(), Ok(()));
        assert_eq!(state.offer(), Offer::default());
        let version = State::VERSION + 1;
        let foreign = State { version, ..state };
        assert_eq!(foreign.check(), Err(Error::StateVersion(version)));
    }
}
