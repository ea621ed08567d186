/// Makes the edges that a local APIC wants out of the level that the PMU computes.
///
/// After each call of the PMU, give it [`Pmu::pmi_sources`](super::Pmu::pmi_sources). `true` is one
/// PMI: deliver what LVTPC says (an NMI or a vector) if LVTPC is not masked, and set its mask bit,
/// as Intel's processors do with the delivery. A PMI that finds LVTPC masked is lost, as it is there;
/// the overflow bit stays, and Linux finds it.
///
/// ```
/// use vpmu::x86::PmiEdge;
///
/// let mut edge = PmiEdge::new();
/// assert!(edge.rises(0b01));
/// assert!(!edge.rises(0b01), "once for each overflow");
/// assert!(edge.rises(0b11), "another counter has overflowed too");
/// assert!(!edge.rises(0b00));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmiEdge {
    seen: u64,
}

impl PmiEdge {
    /// The line has been low.
    pub const fn new() -> Self {
        Self { seen: 0 }
    }

    /// Whether a source is high that was low at the last call.
    pub const fn rises(&mut self, sources: u64) -> bool {
        let new = sources & !self.seen;
        self.seen = sources;
        new != 0
    }
}
