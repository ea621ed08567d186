/// When host events are made and given back, and what is asked of one that stands still.
///
/// Three published designs of the same virtual PMU (see [`HostEvents`](super::HostEvents)), so that a
/// bench can count what each saves. They are here and not adapters of a host, because what
/// [`Reuse`](Self::Reuse) does more than [`ReusePaused`](Self::ReusePaused) are calls for writes of
/// the guest of which a host's adapter never learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Policy {
    /// Every rewrite by the guest and every overflow takes the host event away and makes a new one.
    /// What KVM did until 2018: the measure of the others.
    Recreate,
    /// The guest's counter owns its host event as long as the guest uses it: pause, set the period,
    /// resume. An overflow handled on the CPU where the event runs asks nothing of the host. A
    /// whole scheduling slice without use gives the event back. It does not remember that an event
    /// is paused already: each rewrite pauses it, reads it and sets its period again.
    Reuse,
    /// As [`Reuse`](Self::Reuse), but an event that is paused and drained is left alone until it is resumed: there is
    /// no second pause, no read, and no new period.
    // The two others are here to be measured against.
    #[default]
    ReusePaused,
}

impl Policy {
    /// All of them, the most expensive first.
    pub const ALL: [Self; 3] = [Self::Recreate, Self::Reuse, Self::ReusePaused];
}

/// What the host knows when it reports an overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Report {
    /// All the events last asked for have been counted since they were asked for, and the host
    /// event goes on counting on the CPU where this is handled. The engine believes it and, unless
    /// the policy is [`Policy::Recreate`], makes no call.
    ///
    /// A host that says so too early only gets a guest counter that is ahead, until the host event has counted that
    /// far.
    Due,
    /// As [`Due`](Self::Due), but the vCPU has left the CPU on which the host event counts: the
    /// event is made anew. Only for hosts whose events do not follow the vCPU by themselves.
    Moved,
    /// It may be early, or late, or meant for a period that has been replaced since. The counter is
    /// read to find out.
    Unsure,
}
