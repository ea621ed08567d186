//! The last branch records of a PMU: who hands branches over, and which PMI waits for them.

use super::Pmu;
use crate::counter::{CounterHost, Events, Model};
use crate::x86::{CounterConfig, Outcome, lbr};

impl<V: Events> Pmu<V> {
    /// Returns which branches the guest wants recorded now; `None`: it has no [last branch records](lbr), they are
    /// disabled, or they are frozen. For an embedder that sees every branch, and need not decode unwanted ones.
    pub fn branch_filter(&self) -> Option<lbr::Filter> {
        let frozen = self.counters.global.are_branches_frozen();
        self.counters.lbr.filter().filter(|_| !frozen)
    }

    /// Returns how many branches more a PMI waits for: 1 to 32, or 0 if no PMI waits. While that is not 0, the embedder
    /// [follows](CounterHost::follows_branches) its guest.
    pub fn branches_awaited(&self) -> u8 {
        self.counters.lbr.awaited()
    }

    /// Hands over a branch that the guest has taken, to be recorded if the guest wants that. Returns whether a PMI
    /// [is due](Self::pmi_due): the branch may be the last one that the PMI waited for.
    pub fn branch<H: CounterHost<CounterConfig>>(
        &mut self,
        branch: &lbr::Branch,
        host: &mut H,
    ) -> bool {
        match self.counters.global.are_branches_frozen() {
            true => self.counters.lbr.drop_branch(),
            false => self.counters.lbr.record(branch),
        }
        if self.branches_awaited() == 0 {
            self.end_delay(host);
        }
        self.pmi_due()
    }

    /// Ends the following of the guest: a PMI that waits for branches is requested with those that were handed over.
    /// Returns whether a PMI [is due](Self::pmi_due).
    pub fn end_following<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> bool {
        self.end_delay(host);
        self.pmi_due()
    }

    /// Drops the branches that were handed over for this PMI, because the embedder has missed later ones. The PMI still
    /// waits for a full stack.
    pub fn lose_branches(&mut self) {
        self.counters.lbr.lose();
    }

    /// Clears the bit that enables the last branch records, and returns whether it was set. The processor does so at
    /// INIT, at a debug exception, and at an SMI, after which RSM sets the bit again (SDM vol. 3B, 19.1.4). All else that
    /// INIT does leaves the PMU as it is.
    pub fn disable_lbr<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> bool {
        let was = self.counters.lbr.disable();
        self.end_access(host);
        self.counters.apply(host);
        was
    }

    /// Returns what became of the branches that were handed over.
    pub fn lbr_statistics(&self) -> lbr::Statistics {
        self.counters.lbr.statistics
    }

    /// RDMSR of a register that is none of the counters'.
    pub(super) fn read_lbr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        host: &mut H,
    ) -> Outcome {
        let outcome = self.counters.lbr.read(address);
        if outcome != Outcome::NotHandled {
            self.end_delay(host);
        }
        outcome
    }

    /// WRMSR of a register that is none of the counters'.
    pub(super) fn write_lbr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        if self.counters.lbr.read(address) == Outcome::NotHandled {
            return Outcome::NotHandled;
        }
        // A record that has waited is written before the branches change.
        self.begin_access(host);
        let lbr = &mut self.counters.lbr;
        let freezing = lbr.freezing();
        let outcome = lbr.write(address, value);
        // Settling reads counters, which costs calls of the host: only where it matters.
        let changes = freezing != lbr.freezing();
        if changes {
            // What overflowed before the guest wanted it to freeze does not freeze.
            self.counters.settle(self.counters.interrupting, host);
            self.adopt_freezing();
        }
        self.end_access(host);
        self.counters.apply(host);
        outcome
    }

    /// What freezes is what the registers say now.
    pub(super) fn adopt_freezing(&mut self) {
        self.counters.freezing = match self.registers.intel() {
            Some(registers) => registers.freezing(),
            // AMD's register is one of the last branch records'.
            None => self.counters.lbr.freezing(),
        };
    }

    /// What has waited for branches has those that there are.
    pub(super) fn end_delay<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.counters.lbr.is_anything_delayed() {
            self.counters.end_delay(host);
            // The request may have stopped the counters, and a PEBS record gives its counter another value.
            self.counters.apply(host);
            // The request may have frozen the records, and then no PMI waits for them.
            self.counters.find_delays(host.follows_branches());
        }
    }
}
