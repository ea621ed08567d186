//! The plan: what is trapped on one physical CPU, and why.

use core::fmt;

use super::traps::{TrapRegisters, fine_bit, mdcr};
use super::{Features, Isolation, PlanError};
use crate::arm::{
    CPU_CYCLES, CYCLE_COUNTER, EventFilter, MAX_EVENT_COUNTERS, PmuVersion, RawPmevtyper, Register,
};
use crate::counter::CounterSet;

/// The input of [`Plan::new`], one for each physical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionConfig {
    /// How many event counters the CPU has: PMCR_EL0.N as EL2 reads it, 0 to 31.
    pub implemented: u8,
    /// How many of them the host keeps, counted from the top.
    pub host_counters: u8,
    /// What the CPU's ID registers say.
    pub features: Features,
    /// What the boot probe found out.
    pub isolation: Isolation,
    /// Which events the guest may count.
    pub filter: EventFilter,
    /// PMCEID0_EL0 and PMCEID1_EL0 of the CPU.
    pub events: [u64; 2],
}

/// What is trapped on one physical CPU, with the register values that make it so.
///
/// It belongs to the CPU, not to the virtual machine: clusters differ in their number of counters,
/// and a vCPU may be loaded on one after the other. A guest that has seen its PMU must find the
/// same number of counters everywhere, so the host's share is what differs:
/// `host_counters = implemented - guest's`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    config: PartitionConfig,
    /// The limit design: traps nothing, whatever that means for the host.
    unguarded: bool,
    /// MDCR_EL2.TPM is set: every access traps.
    everything: bool,
    /// PMCEID0/1_EL0 list an event that is denied to the guest.
    lists_denied: bool,
    traps: TrapRegisters,
    filtered_at_exit: CounterSet,
}

/// PMEVTYPER<n>_EL0's fields of FEAT_PMUv3_TH and its successors: TC, TE, TLC and TH (DDI 0487, the register's page).
const THRESHOLD: u64 = 0b111 << 61 | 1 << 60 | 0b11 << 54 | 0xfff << 32;
/// PMEVTYPER<n>_EL0.VS and PMCCFILTR_EL0.VS of FEAT_PMUv3_SME: whether to count in Streaming SVE mode, and outside.
const STREAMING: u64 = 0b11 << 56;

/// Why an access is trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Why {
    /// The machine is not proven to keep host counters from the guest, so nothing is passed on.
    NotIsolated,
    /// Untrapped, it could make a counter count outside the guest.
    CountsOutsideGuest,
    /// It names or shows events, and some are denied to the guest.
    EventFilter,
    /// The access need not trap, but another one must, and without FEAT_FGT the two trap together.
    NoFineGrainedTraps,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotIsolated => "this machine does not keep host counters apart",
            Self::CountsOutsideGuest => "could count outside the guest",
            Self::EventFilter => "shows or selects filtered events",
            Self::NoFineGrainedTraps => "trapped with others, for lack of FEAT_FGT",
        })
    }
}

impl Plan {
    /// The plan of a PMU that is not made yet: everything traps.
    pub(super) const VACANT: Self = Self {
        everything: true,
        traps: TrapRegisters {
            mdcr_el2: mdcr::TPM | mdcr::TPMCR,
            ..Self::BLANK.traps
        },
        ..Self::BLANK
    };

    /// All zeros, for a place that another plan comes to before anybody asks it.
    pub(in crate::arm) const BLANK: Self = Self {
        config: PartitionConfig {
            implemented: 0,
            host_counters: 0,
            features: Features {
                version: PmuVersion::V3,
                fgt: false,
                hpmn0: false,
                mtpmu: false,
                multithreaded: false,
            },
            isolation: Isolation::NONE,
            filter: EventFilter::deny_all(),
            events: [0; 2],
        },
        unguarded: false,
        everything: false,
        lists_denied: false,
        traps: TrapRegisters {
            mdcr_el2: 0,
            hdfgrtr_el2: 0,
            hdfgwtr_el2: 0,
        },
        filtered_at_exit: CounterSet::EMPTY,
    };

    /// Decides what is trapped on a CPU. Nothing else in this crate does.
    ///
    /// The guest has the event counters `0..HPMN` and the cycle counter; the host has the rest.
    /// Everything is reached without a trap, *except*:
    ///
    /// | register | trapped | when | because |
    /// |---|---|---|---|
    /// | all | both | the host keeps counters, and [`Isolation::partition`] is not proven | a machine that breaks this promise in one register is not believed in the next. All is performed at EL2, on the guest's counters alone |
    /// | PMEVTYPERn_EL0, PMXEVTYPER_EL0, PMCCFILTR_EL0 | writes | other threads of the core could be counted | PMEVTYPERn_EL0.MT is masked |
    /// | PMEVTYPERn_EL0, PMXEVTYPER_EL0, PMCCFILTR_EL0 | both | events are filtered | a denied event counts nothing, and reads back as written |
    /// | PMCEID0/1_EL0 | reads | a filtered event is one of those listed there | its bit is hidden |
    ///
    /// The three registers of event types go together, because PMXEVTYPER_EL0 with PMSELR_EL0.SEL =
    /// 31 *is* PMCCFILTR_EL0 and shares its trap bit with PMEVTYPERn_EL0. A guest that owns all
    /// counters can reach no other's, so the first row needs host counters to exist.
    ///
    /// Why each untrapped register is safe:
    ///
    /// | register | safe, because |
    /// |---|---|
    /// | PMCR_EL0 reads | N reads as HPMN below EL2, so as the guest's count |
    /// | PMCR_EL0 writes | E, D, DP, LC, LP act on counters below HPMN and the cycle counter only; so does P, below EL2. X exports nothing where counting is prohibited |
    /// | PMCNTEN*, PMINTEN*, PMOVS* | bits at or above HPMN read as zero and ignore writes, below EL2 |
    /// | PMSWINC_EL0 | the same |
    /// | PMEVCNTRn, PMXEVCNTR, PMEVTYPERn, PMXEVTYPER, n >= HPMN | trap to EL2 (FEAT_FGT) without being asked, and are undefined for the guest; without FEAT_FGT CONSTRAINED UNPREDICTABLE, and no permitted behaviour reaches counter n |
    /// | PMEVTYPERn, PMXEVTYPER, PMCCFILTR, what they count at EL2 | see below |
    /// | PMCCNTR_EL0 | the cycle counter is the guest's; a host that wants cycles counts event 0x0011 |
    /// | PMSELR_EL0 | selects; what the selected access may do is decided there |
    /// | PMUSERENR_EL0 | gives EL0 what the guest's EL1 has, no more; it is saved and zeroed on a put |
    /// | PMCEID0/1_EL0, PMMIR_EL1 | constants that say what the hardware can, and nothing is hidden |
    ///
    /// Nothing counts at EL2 unless its type asks for that (NSH, or SH in Secure state), and only a
    /// write by the guest makes it ask. Three things keep such a request from being granted; the
    /// first that applies to a counter is used, and none of them traps:
    ///
    /// | counter | from | kept in the guest by |
    /// |---|---|---|
    /// | event counters | PMUv3p1 | MDCR_EL2.HPMD |
    /// | cycle counter | PMUv3p5 | MDCR_EL2.HCCD |
    /// | any other, and those where the probe saw HPMD or HCCD fail | | [`PartitionedPmu::exited`], which takes the request back at each exit: one read for each such counter |
    ///
    /// The last leaves the guest what passes between the exception and that call: the hypervisor's
    /// way in, which saves registers and is the same at each exit. PMCR_EL0.DP with HPMD would stop
    /// the cycle counter too, but DP is the guest's to clear.
    ///
    /// Without FEAT_FGT all accesses trap where any must, by MDCR_EL2.TPM.
    ///
    /// [`PartitionedPmu::exited`]: super::PartitionedPmu::exited
    ///
    /// # Errors
    ///
    /// [`PlanError`], when the CPU cannot be divided so.
    pub fn new(config: &PartitionConfig) -> Result<Self, PlanError> {
        Self::build(config, false)
    }

    /// Makes the plan of the limit design, for measuring what traps cost: the guest has all counters, no access traps,
    /// and no exit reads event types. Where MDCR_EL2.HPMD and HCCD do not keep the guest from counting at EL2, nothing
    /// does.
    ///
    /// # Errors
    ///
    /// [`PlanError::Implemented`].
    pub fn untrapped(implemented: u8, features: Features) -> Result<Self, PlanError> {
        let config = PartitionConfig {
            implemented,
            host_counters: 0,
            features,
            // Nothing is proven: the design that measures a limit believes the architecture.
            isolation: Isolation::ALL,
            filter: EventFilter::allow_all(),
            events: [0; 2],
        };
        Self::build(&config, true)
    }

    fn build(config: &PartitionConfig, unguarded: bool) -> Result<Self, PlanError> {
        let PartitionConfig {
            implemented,
            host_counters,
            features,
            ..
        } = *config;
        if implemented > MAX_EVENT_COUNTERS {
            return Err(PlanError::Implemented { implemented });
        }
        if host_counters > implemented {
            return Err(PlanError::HostCounters {
                host_counters,
                implemented,
            });
        }
        // HPMN = 0 without FEAT_HPMN0 is CONSTRAINED UNPREDICTABLE (DDI 0487, MDCR_EL2): the guest may have any number.
        if host_counters == implemented && implemented > 0 && !features.hpmn0 {
            return Err(PlanError::NoGuestCounter { implemented });
        }
        let mut plan = Self {
            config: *config,
            unguarded,
            ..Self::BLANK
        };
        plan.lists_denied = plan.events() != config.events;
        plan.set_traps();
        plan.filtered_at_exit = plan.escape_mdcr();
        Ok(plan)
    }

    /// The one decision, as [`new`](Self::new) describes it.
    fn needs_trap(&self, register: Register, write: bool) -> Option<Why> {
        let config = &self.config;
        if self.unguarded || !register.is_accessible(write) {
            return None;
        }
        // Before all other rules: none of them may open what a broken partition must keep closed.
        if self.is_distrusted() {
            return Some(Why::NotIsolated);
        }
        let selects_event = matches!(
            register,
            Register::Pmevtyper(_) | Register::Pmxevtyper | Register::Pmccfiltr
        );
        if selects_event && self.hides_events() {
            return Some(Why::EventFilter);
        }
        if selects_event && write && config.features.mtpmu && config.features.multithreaded {
            return Some(Why::CountsOutsideGuest);
        }
        let lists_events = matches!(register, Register::Pmceid0 | Register::Pmceid1);
        if lists_events && self.lists_denied {
            return Some(Why::EventFilter);
        }
        None
    }

    /// Whether the machine may let the guest reach host counters: then no access is passed on.
    const fn is_distrusted(&self) -> bool {
        self.config.host_counters > 0 && !self.config.isolation.partition
    }

    /// The guest's counters that neither MDCR_EL2 nor a trap keeps from counting at EL2.
    fn escape_mdcr(&self) -> CounterSet {
        let (version, isolation) = (self.version(), self.config.isolation);
        // A trapped write of a type goes through `kept_pmevtyper`, which takes the request out.
        let masked = self.is_trapped(Register::Pmccfiltr, true).is_some();
        if self.unguarded || masked {
            return CounterSet::EMPTY;
        }
        let mut escape = self.guest_counters();
        if isolation.hpmd && version >= PmuVersion::V3p1 {
            escape -= CounterSet::first(self.hpmn());
        }
        if isolation.hccd && version >= PmuVersion::V3p5 {
            escape.remove(CYCLE_COUNTER);
        }
        escape
    }

    fn set_traps(&mut self) {
        let needed = |write| {
            Register::all()
                .filter(|&register| self.needs_trap(register, write).is_some())
                .fold(0, |bits, register| bits | fine_bit(register))
        };
        let (reads, writes) = (needed(false), needed(true));
        self.traps.mdcr_el2 = self.mdcr_el2();
        // Where everything traps, TPM says so in one bit, and no fine-grained trap has to be believed.
        if self.config.features.fgt && !self.is_distrusted() {
            self.traps.hdfgrtr_el2 = reads;
            self.traps.hdfgwtr_el2 = writes;
        } else if reads | writes != 0 {
            self.everything = true;
            self.traps = self.trap_all();
        }
    }

    /// MDCR_EL2 without traps. HPMFZO, HPMFZS and MTPME stay zero: host counters do not freeze, and
    /// where EL2 decides about FEAT_MTPMU, it is off.
    fn mdcr_el2(&self) -> u64 {
        let version = self.config.features.version;
        let mut mdcr = u64::from(self.hpmn()) & mdcr::HPMN_MASK;
        if version >= PmuVersion::V3p1 {
            mdcr |= mdcr::HPMD;
        }
        if version >= PmuVersion::V3p5 {
            mdcr |= mdcr::HCCD;
        }
        if self.config.host_counters > 0 {
            // Without counters of the host there is nothing for HPME and HLP to act on.
            mdcr |= mdcr::HPME;
            if version >= PmuVersion::V3p5 {
                // Else the host would have to read its counters before each passes 2^32.
                mdcr |= mdcr::HLP;
            }
        }
        mdcr
    }

    /// Returns the number of event counters the guest has, the value of MDCR_EL2.HPMN: 0 to 31.
    pub const fn hpmn(&self) -> u8 {
        self.config.implemented - self.config.host_counters
    }

    /// Returns the guest's counters: `0..hpmn()` and the cycle counter.
    pub fn guest_counters(&self) -> CounterSet {
        CounterSet::first(self.hpmn()) | CounterSet::of(CYCLE_COUNTER)
    }

    /// Returns the host's counters, from the top of those implemented. MDCR_EL2.HPME enables them and, from PMUv3p5 on,
    /// MDCR_EL2.HLP makes them overflow at 2^64; the guest's PMCR_EL0 has no say.
    ///
    /// Where the lowest is an odd one, do not have it count CHAIN: the even counter below is the
    /// guest's, and the architecture leaves open whether that would carry over.
    pub fn host_counters(&self) -> CounterSet {
        CounterSet::first(self.config.implemented) - CounterSet::first(self.hpmn())
    }

    /// Returns the number of event counters that the CPU has.
    pub const fn implemented(&self) -> u8 {
        self.config.implemented
    }

    /// Returns which PMUv3 the guest has.
    pub const fn version(&self) -> PmuVersion {
        self.config.features.version
    }

    /// Returns PMCEID0_EL0 and PMCEID1_EL0 for the guest.
    pub fn events(&self) -> [u64; 2] {
        self.config.filter.pmceid(self.config.events)
    }

    /// Returns the trap registers while the guest's PMU is in the hardware.
    pub const fn traps(&self) -> TrapRegisters {
        self.traps
    }

    /// Returns the trap registers while the guest's PMU is not in the hardware. Every access traps, so that the guest
    /// sees nothing of another guest's.
    pub fn trap_all(&self) -> TrapRegisters {
        TrapRegisters {
            mdcr_el2: self.mdcr_el2() | mdcr::TPM | mdcr::TPMCR,
            // Zero in the fine-grained registers opens nothing: TPM traps each access by itself.
            ..TrapRegisters::default()
        }
    }

    /// The trap registers with which just the accesses trap that `traps` names; `None`: they cannot be
    /// told apart, or no access may be passed on. Reads of PMCR_EL0 cannot be among them.
    pub(in crate::arm) fn trap_just(
        &self,
        traps: impl Fn(Register, bool) -> bool,
    ) -> Option<TrapRegisters> {
        let bits = |write| {
            Register::all()
                .filter(|&register| traps(register, write))
                .fold(0, |bits, register| bits | fine_bit(register))
        };
        (self.config.features.fgt && !self.is_distrusted()).then(|| TrapRegisters {
            mdcr_el2: self.mdcr_el2(),
            hdfgrtr_el2: bits(false),
            hdfgwtr_el2: bits(true),
        })
    }

    /// Returns why a read (or write) of `register` traps while the guest's PMU is in the hardware; `None`: it does not.
    /// For an indexed register, n is one of the guest's.
    pub fn is_trapped(&self, register: Register, write: bool) -> Option<Why> {
        if !register.is_accessible(write) {
            return None;
        }
        self.needs_trap(register, write)
            .or(self.everything.then_some(Why::NoFineGrainedTraps))
    }

    /// Whether no access of the guest is passed on while its PMU is in the hardware.
    pub(super) const fn traps_everything(&self) -> bool {
        self.everything
    }

    /// Returns the guest's counters whose types [`PartitionedPmu::exited`] reads at each exit, because MDCR_EL2 does
    /// not keep them from counting at EL2. Empty from PMUv3p5 on, where HPMD and HCCD work; the cycle counter before;
    /// all of them before PMUv3p1.
    ///
    /// [`PartitionedPmu::exited`]: super::PartitionedPmu::exited
    pub const fn filtered_at_exit(&self) -> CounterSet {
        self.filtered_at_exit
    }

    /// Returns whether an event type in the hardware may differ from what the guest wrote. Then reads and writes of
    /// event types trap, and the engine keeps what was written.
    pub(super) fn hides_events(&self) -> bool {
        !self.config.filter.allows_all()
    }

    /// A value of PMSELR_EL0 with which every selected access that some guest may make is defined.
    pub(in crate::arm) const fn harmless_selection(&self) -> u64 {
        if self.config.implemented == 0 {
            CYCLE_COUNTER.number() as u64
        } else {
            0
        }
    }

    /// What stays of a guest's trapped write to PMEVTYPERn_EL0, as the guest reads it back.
    pub(super) const fn kept_pmevtyper(&self, written: u64) -> RawPmevtyper {
        let kept = RawPmevtyper(written).for_guest(self.version(), true);
        // They make a counter count less, never elsewhere, and PMMIR_EL1 has offered them to the guest.
        RawPmevtyper(kept.0 | written & (THRESHOLD | STREAMING))
    }

    /// What stays of a guest's trapped write to PMCCFILTR_EL0, as the guest reads it back.
    pub(super) const fn kept_pmccfiltr(written: u64) -> RawPmevtyper {
        RawPmevtyper(RawPmevtyper(written).for_guest_cycles(true).0 | written & STREAMING)
    }

    /// What goes into the hardware's PMEVTYPERn_EL0 for what the guest wrote.
    pub(super) fn pmevtyper(&self, written: u64) -> u64 {
        let kept = self.kept_pmevtyper(written);
        self.allowed(kept, kept.event(self.version()))
    }

    /// What goes into the hardware's PMCCFILTR_EL0, likewise.
    pub(super) fn pmccfiltr(&self, written: u64) -> u64 {
        self.allowed(Self::kept_pmccfiltr(written), CPU_CYCLES)
    }

    /// What a load puts into the hardware's PMEVTYPERn_EL0: all that a guest's untrapped writes have left there, so that it
    /// reads the same after a switch as before.
    pub(super) fn loaded_pmevtyper(&self, counter: u8, saved: u64) -> u64 {
        if self.keeps_filters(counter) {
            saved
        } else {
            self.pmevtyper(saved)
        }
    }

    /// What a load puts into the hardware's PMCCFILTR_EL0, likewise.
    pub(super) fn loaded_pmccfiltr(&self, saved: u64) -> u64 {
        if self.keeps_filters(CYCLE_COUNTER.number()) {
            saved
        } else {
            self.pmccfiltr(saved)
        }
    }

    /// Whether a guest may leave any filter in the hardware's type of `counter`: its writes do not trap, and no exit takes
    /// bits out.
    fn keeps_filters(&self, counter: u8) -> bool {
        self.filtered_at_exit.bits() >> counter & 1 == 0
            && !self.hides_events()
            && self.is_trapped(Register::Pmccfiltr, true).is_none()
    }

    fn allowed(&self, kept: RawPmevtyper, event: u16) -> u64 {
        if self.config.filter.allows(event) {
            kept.0
        } else {
            // Neither EL1 nor EL0, and event 0x0000, which never happens by itself: some events
            // of an interconnect or a shared cache count whatever the filter says.
            RawPmevtyper::P | RawPmevtyper::U
        }
    }
}
