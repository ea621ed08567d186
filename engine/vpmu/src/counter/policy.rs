/// When host events are made and given back, and what is asked of a paused event.
///
/// Guests run under [`ReusePaused`](Self::ReusePaused). The two others are experiments: published designs of the same
/// virtual PMU (see [`HostEvents`](super::HostEvents)), so that a bench can count what each saves. They are not adapters of a
/// host, because the additional calls of [`Reuse`](Self::Reuse) over [`ReusePaused`](Self::ReusePaused) answer writes of the
/// guest that a host's adapter never sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Policy {
    /// Every rewrite by the guest and every overflow releases the host event and makes a new one. KVM did so until
    /// 2018: the others are measured against this policy.
    Recreate,
    /// The guest's counter owns its host event as long as the guest uses it: pause, set the period, resume. An overflow
    /// handled on the CPU where the event runs asks nothing of the host. A whole scheduling slice without use gives the
    /// event back. The policy does not remember that an event is paused already: each rewrite pauses the event, reads
    /// it and sets its period again.
    Reuse,
    /// As [`Reuse`](Self::Reuse), but an event that is paused and drained is left alone until it is resumed: there is
    /// no second pause, no read, and no new period.
    #[default]
    ReusePaused,
}

// `HostEvents` asks for an experiment by these names alone: where both answer no, its code is what guests run.
impl Policy {
    /// All of them, the most expensive first.
    pub const ALL: [Self; 3] = [Self::Recreate, Self::Reuse, Self::ReusePaused];

    /// Returns the name that options and statistics have for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recreate => "recreate",
            Self::Reuse => "reuse",
            Self::ReusePaused => "paused",
        }
    }

    /// Whether a rewrite, a stop or an overflow takes the host event away: the design of 2018 knows no paused event.
    pub(super) const fn recreates(self) -> bool {
        matches!(self, Self::Recreate)
    }

    /// Whether a paused event is paused, read and given its period again at each write of the guest, as in the design of
    /// 2019.
    pub(super) const fn forgets_pauses(self) -> bool {
        matches!(self, Self::Reuse)
    }
}

/// What the host knows when it reports an overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Report {
    /// All the events last asked for have been counted since they were asked for, and the host
    /// event goes on counting on the CPU where this is handled. The engine believes it and, unless
    /// the policy is [`Policy::Recreate`], makes no call.
    ///
    /// If the report is too early, only the guest's counter runs ahead, until the host event has counted that far: as far
    /// as reads show, by less than half of a period that repeats.
    Due,
    /// As [`Due`](Self::Due), but the vCPU has left the CPU on which the host event counts, so the engine makes the
    /// event anew. Only for hosts whose events do not follow the vCPU by themselves.
    Moved,
    /// The report may be early, or late, or meant for a period that has been replaced since. The engine reads the
    /// counter to find out.
    Unsure,
}
