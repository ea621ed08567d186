//! The plan: what is trapped on one physical CPU, and why.

use core::fmt;

use super::traps::{TrapRegisters, fine_bit, mdcr};
use super::{Features, Isolation, PlanError};
use crate::arm::{
    CPU_CYCLES, CYCLE_COUNTER, EventFilter, MAX_EVENT_COUNTERS, PmuVersion, RawPmevtyper, Register,
};
use crate::counter::CounterSet;

/// What [`Plan::new`] decides from. One for each physical CPU.
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
    coarse: Coarse,
    traps: TrapRegisters,
}

/// How much MDCR_EL2 alone traps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Coarse {
    Nothing,
    /// TPMCR.
    Pmcr,
    /// TPM.
    Everything,
}

/// Why an access is trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Why {
    /// Untrapped, it would reach host counters on this machine.
    ReachesHostCounters,
    /// Untrapped, it could make a counter count outside the guest.
    CountsOutsideGuest,
    /// It names or shows events, and some are denied to the guest.
    EventFilter,
    /// This one need not trap, but without FEAT_FGT it cannot be told from one that must.
    NoFineGrainedTraps,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReachesHostCounters => "reaches host counters on this machine",
            Self::CountsOutsideGuest => "could count outside the guest",
            Self::EventFilter => "shows or selects filtered events",
            Self::NoFineGrainedTraps => "trapped with others, for lack of FEAT_FGT",
        })
    }
}

impl Plan {
    /// Decides what is trapped on a CPU. Nothing else in this crate does.
    ///
    /// The guest has the event counters `0..HPMN` and the cycle counter; the host has the rest.
    /// Everything is reached without a trap, *except*:
    ///
    /// | register | trapped | when | because |
    /// |---|---|---|---|
    /// | PMCR_EL0 | writes | P reaches host counters | P would reset them. Performed at EL2, counter by counter |
    /// | PMCNTENSET/CLR, PMINTENSET/CLR, PMOVSSET/CLR | both | they reach host counters | the guest would stop them, or see what the host counts. Masked both ways |
    /// | PMSWINC_EL0 | writes | it reaches host counters | it would increment those that count SW_INCR |
    /// | PMEVCNTRn_EL0, PMXEVCNTR_EL0 | both | n >= HPMN reaches host counters | n beyond the guest's is undefined |
    /// | PMEVTYPERn_EL0, PMXEVTYPER_EL0 | both | n >= HPMN reaches host counters | as above |
    /// | PMEVTYPERn_EL0, PMXEVTYPER_EL0, PMCCFILTR_EL0 | writes | counting at EL2 cannot be ruled out by MDCR_EL2 | the filter bits that count outside the guest are masked |
    /// | PMEVTYPERn_EL0, PMXEVTYPER_EL0, PMCCFILTR_EL0 | both | events are filtered | a denied event counts nothing, and reads back as written |
    /// | PMCEID0/1_EL0 | reads | a filtered event is one of those listed there | its bit is hidden |
    ///
    /// The first five "when"s need host counters to exist: a guest that owns all counters can
    /// reach no other's. Whether it can reach them otherwise is what [`Isolation`] says; on
    /// hardware that follows the architecture it cannot, and none of the five applies.
    ///
    /// Counting at EL2 is ruled out without traps only by all of: MDCR_EL2.HPMD for event counters
    /// and MDCR_EL2.HCCD for the cycle counter (so PMUv3p5), both seen to work by the probe, and no
    /// way for PMEVTYPERn_EL0.MT to count other threads. The three registers go together, because
    /// PMXEVTYPER_EL0 with PMSELR_EL0.SEL = 31 *is* PMCCFILTR_EL0 and shares its trap bit with
    /// PMEVTYPERn_EL0.
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
    /// | PMCCNTR_EL0 | the cycle counter is the guest's; a host that wants cycles counts event 0x0011 |
    /// | PMSELR_EL0 | selects; what the selected access may do is decided there |
    /// | PMUSERENR_EL0 | gives EL0 what the guest's EL1 has, no more; it is saved and zeroed on a put |
    /// | PMCEID0/1_EL0, PMMIR_EL1 | constants that say what the hardware can, and nothing is hidden |
    ///
    /// Without FEAT_FGT there is MDCR_EL2.TPMCR when only PMCR_EL0 must trap, and MDCR_EL2.TPM,
    /// which traps everything, when anything else must.
    ///
    /// # Errors
    ///
    /// [`PlanError`], when the CPU cannot be divided so.
    pub fn new(config: &PartitionConfig) -> Result<Self, PlanError> {
        Self::build(*config, false)
    }

    /// The limit design: the guest has all counters and no access traps, so nothing keeps it from
    /// counting at EL2 where MDCR_EL2.HPMD and HCCD do not. For measuring what traps cost.
    ///
    /// # Errors
    ///
    /// [`PlanError::Implemented`].
    pub fn untrapped(implemented: u8, features: Features) -> Result<Self, PlanError> {
        let config = PartitionConfig {
            implemented,
            host_counters: 0,
            features,
            isolation: Isolation::ALL,
            filter: EventFilter::allow_all(),
            events: [0; 2],
        };
        Self::build(config, true)
    }

    fn build(config: PartitionConfig, unguarded: bool) -> Result<Self, PlanError> {
        let PartitionConfig {
            implemented,
            host_counters,
            features,
            ..
        } = config;
        if implemented > MAX_EVENT_COUNTERS {
            return Err(PlanError::Implemented { implemented });
        }
        if host_counters > implemented {
            return Err(PlanError::HostCounters {
                host_counters,
                implemented,
            });
        }
        if host_counters == implemented && implemented > 0 && !features.hpmn0 {
            return Err(PlanError::NoGuestCounter { implemented });
        }
        let mut plan = Self {
            config,
            unguarded,
            coarse: Coarse::Nothing,
            traps: TrapRegisters::default(),
        };
        plan.set_traps();
        Ok(plan)
    }

    /// The one decision, as [`new`](Self::new) tells it.
    fn needs_trap(&self, register: Register, write: bool) -> Option<Why> {
        let config = &self.config;
        if self.unguarded || !register.is_accessible(write) {
            return None;
        }
        let isolated = match register {
            Register::Pmcr => !write || config.isolation.pmcr_p,
            Register::PmcntenSet | Register::PmcntenClr => config.isolation.pmcnten,
            Register::PmintenSet | Register::PmintenClr => config.isolation.pminten,
            Register::PmovsSet | Register::PmovsClr => config.isolation.pmovs,
            Register::Pmswinc => config.isolation.pmswinc,
            Register::Pmevcntr(_)
            | Register::Pmxevcntr
            | Register::Pmevtyper(_)
            | Register::Pmxevtyper => config.isolation.indexed,
            _ => true,
        };
        if config.host_counters > 0 && !isolated {
            return Some(Why::ReachesHostCounters);
        }
        let selects_event = matches!(
            register,
            Register::Pmevtyper(_) | Register::Pmxevtyper | Register::Pmccfiltr
        );
        if selects_event && self.hides_events() {
            return Some(Why::EventFilter);
        }
        if selects_event && write && !self.stays_in_guest() {
            return Some(Why::CountsOutsideGuest);
        }
        let lists_events = matches!(register, Register::Pmceid0 | Register::Pmceid1);
        if lists_events && self.events() != config.events {
            return Some(Why::EventFilter);
        }
        None
    }

    /// Whether MDCR_EL2 alone keeps the guest's counters from counting anything but the guest.
    const fn stays_in_guest(&self) -> bool {
        let PartitionConfig {
            features,
            isolation,
            ..
        } = &self.config;
        let counts_threads = features.mtpmu && features.multithreaded;
        isolation.el2_prohibited && matches!(features.version, PmuVersion::V3p5) && !counts_threads
    }

    fn set_traps(&mut self) {
        let needed = Register::all()
            .flat_map(|register| [(register, false), (register, true)])
            .filter(|&(register, write)| self.needs_trap(register, write).is_some());
        let (mut reads, mut writes, mut coarse) = (0, 0, Coarse::Nothing);
        for (register, write) in needed {
            *(if write { &mut writes } else { &mut reads }) |= fine_bit(register);
            coarse = coarse.max(match register {
                Register::Pmcr => Coarse::Pmcr,
                _ => Coarse::Everything,
            });
        }
        self.traps.mdcr_el2 = self.mdcr_el2();
        if self.config.features.fgt {
            self.traps.hdfgrtr_el2 = reads;
            self.traps.hdfgwtr_el2 = writes;
        } else {
            self.coarse = coarse;
            self.traps.mdcr_el2 |= match coarse {
                Coarse::Nothing => 0,
                Coarse::Pmcr => mdcr::TPMCR,
                Coarse::Everything => mdcr::TPM | mdcr::TPMCR,
            };
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
            mdcr |= mdcr::HPME;
            if version >= PmuVersion::V3p5 {
                mdcr |= mdcr::HLP;
            }
        }
        mdcr
    }

    /// The number of event counters the guest has, the value of MDCR_EL2.HPMN: 0 to 31.
    pub const fn hpmn(&self) -> u8 {
        self.config.implemented - self.config.host_counters
    }

    /// The guest's counters: `0..hpmn()` and the cycle counter.
    pub fn guest_counters(&self) -> CounterSet {
        CounterSet::first(self.hpmn()) | CounterSet::of(CYCLE_COUNTER)
    }

    /// The host's counters, from the top of those implemented. MDCR_EL2.HPME enables them and,
    /// from PMUv3p5 on, MDCR_EL2.HLP makes them overflow at 2^64; the guest's PMCR_EL0 has no say.
    pub fn host_counters(&self) -> CounterSet {
        CounterSet::first(self.config.implemented) - CounterSet::first(self.hpmn())
    }

    /// Which PMUv3 the guest has.
    pub const fn version(&self) -> PmuVersion {
        self.config.features.version
    }

    /// PMCEID0_EL0 and PMCEID1_EL0 for the guest.
    pub fn events(&self) -> [u64; 2] {
        self.config.filter.pmceid(self.config.events)
    }

    /// The trap registers while the guest's PMU is in the hardware.
    pub const fn traps(&self) -> TrapRegisters {
        self.traps
    }

    /// The trap registers while it is not: every access traps, and nothing of another guest's can
    /// be seen.
    pub fn trap_all(&self) -> TrapRegisters {
        TrapRegisters {
            mdcr_el2: self.mdcr_el2() | mdcr::TPM | mdcr::TPMCR,
            ..TrapRegisters::default()
        }
    }

    /// Why a read (or write) of `register` traps while the guest's PMU is in the hardware; `None`:
    /// it does not. For an indexed register, n is one of the guest's.
    pub fn is_trapped(&self, register: Register, write: bool) -> Option<Why> {
        if !register.is_accessible(write) {
            return None;
        }
        self.needs_trap(register, write)
            .or(match (self.coarse, register) {
                (Coarse::Everything, _) | (Coarse::Pmcr, Register::Pmcr) => {
                    Some(Why::NoFineGrainedTraps)
                }
                _ => None,
            })
    }

    /// Whether what the guest wrote to an event type may differ from what the hardware holds. Then
    /// its reads and writes trap, and the engine remembers.
    pub(super) fn hides_events(&self) -> bool {
        !self.config.filter.allows_all()
    }

    /// A value of PMSELR_EL0 with which every selected access that some guest may make is defined.
    pub(super) const fn harmless_selection(&self) -> u64 {
        if self.config.implemented == 0 {
            CYCLE_COUNTER as u64
        } else {
            0
        }
    }

    /// What stays of a guest's trapped write to PMEVTYPERn_EL0, as the guest reads it back.
    pub(super) const fn kept_pmevtyper(&self, written: u64) -> RawPmevtyper {
        // Fields of FEAT_PMUv3_TH: they make a counter count less, never elsewhere, and PMMIR_EL1
        // has offered them to the guest.
        const THRESHOLD: u64 = 0xf0c0_0fff << 32;
        let kept = RawPmevtyper(written).for_guest(self.version(), true);
        RawPmevtyper(kept.0 | written & THRESHOLD)
    }

    /// What stays of a guest's trapped write to PMCCFILTR_EL0, as the guest reads it back.
    pub(super) const fn kept_pmccfiltr(written: u64) -> RawPmevtyper {
        RawPmevtyper(written).for_guest_cycles(true)
    }

    /// What goes into the hardware's PMEVTYPERn_EL0 for what the guest wrote: the same where the
    /// guest's writes do not trap, as the hardware then is to be trusted with any value.
    pub(super) fn pmevtyper(&self, written: u64) -> u64 {
        if self.is_trapped(Register::Pmevtyper(0), true).is_none() {
            return written;
        }
        let kept = self.kept_pmevtyper(written);
        self.allowed(kept, kept.event(self.version()))
    }

    /// What goes into the hardware's PMCCFILTR_EL0, likewise.
    pub(super) fn pmccfiltr(&self, written: u64) -> u64 {
        if self.is_trapped(Register::Pmccfiltr, true).is_none() {
            return written;
        }
        self.allowed(Self::kept_pmccfiltr(written), CPU_CYCLES)
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
