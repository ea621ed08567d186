//! A host's perf events as one group, which a system call stops, reads or starts as a whole.
//!
//! A guest that switches tasks stops all its counters, reads them, and starts them again. For each counter this takes
//! three system calls, for a group three in all: its leader, an event of no counter, is disabled, read and
//! enabled. A member that stands still while others count is disabled by itself, unless it only counts: then the
//! group is just read (`host/idle.rs`).
//!
//! Only a clock's events are a group. Hardware events in a group count only while all of them fit, so a busy host
//! would count none of them, where it counts each for a part of the time.

use std::io;

use vpmu::counter::CounterSet;

use crate::event::{COUNTERS, PerfEvent, Total};
use crate::notes::Notes;
use crate::ring::Ring;

/// The group. Each perf event of the host is a member.
#[derive(Debug)]
pub(crate) struct Group {
    leader: PerfEvent,
    /// The leader's page, which tells its time without a system call.
    page: Option<Ring>,
    /// Whether the leader is enabled. Then enabled members count, too.
    runs: bool,
    /// Members that are enabled by themselves.
    enabled: CounterSet,
    /// Counters in the order in which the kernel reads them.
    members: Vec<u8>,
}

impl Group {
    pub(crate) fn new(notes: &Notes) -> io::Result<Self> {
        let leader = PerfEvent::open_group(notes)?;
        Ok(Self {
            page: Ring::map(leader.as_fd(), 0).ok(),
            leader,
            runs: false,
            enabled: CounterSet::EMPTY,
            members: Vec::with_capacity(COUNTERS),
        })
    }

    pub(crate) fn leader(&self) -> &PerfEvent {
        &self.leader
    }

    /// Adds a new event, the group's last, behind `counter`.
    pub(crate) fn add(&mut self, counter: u8) {
        self.members.push(counter);
    }

    /// Removes the event behind `counter`, which is closed.
    pub(crate) fn remove(&mut self, counter: u8) {
        self.members.retain(|&member| member != counter);
        self.enabled.remove(counter);
    }

    /// Notes that the event behind `counter` has been enabled or disabled.
    pub(crate) fn note(&mut self, counter: u8, enabled: bool) {
        if enabled {
            self.enabled.insert(counter);
        } else {
            self.enabled.remove(counter);
        }
    }

    /// Returns the members to disable, and those to enable, before [`start`](Self::start), so that `wanted` count. Those
    /// that are `idle` may.
    pub(crate) fn changes(&self, wanted: CounterSet, idle: CounterSet) -> (CounterSet, CounterSet) {
        (self.enabled - wanted - idle, wanted - self.enabled)
    }

    /// Returns whether the events behind all of `counters` count.
    pub(crate) fn counts(&self, counters: CounterSet) -> bool {
        self.runs && (counters - self.enabled).is_empty()
    }

    pub(crate) fn start(&mut self) {
        self.runs = self.runs || self.leader.enable();
    }

    /// Stops all of `running` if these are `counters`, and several. `false`: the caller must stop each by itself.
    pub(crate) fn stop(&mut self, counters: CounterSet, running: CounterSet) -> bool {
        let whole = self.runs && running.len() > 1 && (running - counters).is_empty();
        if whole {
            self.runs = !self.leader.disable();
        }
        whole && !self.runs
    }

    /// Returns the leader's time, ns, where that takes no system call and the group runs.
    pub(crate) fn now(&self) -> Option<u64> {
        let page = self.page.as_ref().filter(|_| self.runs)?;
        page.running()
    }

    /// Reads each member's counter and total, by one system call.
    pub(crate) fn read(&self) -> io::Result<impl Iterator<Item = (u8, Total)> + use<'_>> {
        let totals = self.leader.read_group(self.members.len())?;
        Ok(self.members.iter().copied().zip(totals))
    }
}
