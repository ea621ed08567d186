//! A CPU with a PMU, as far as a partition can tell: the view of EL2, the view of EL1 and EL0 below
//! MDCR_EL2.HPMN and the traps, and the effect of an event on the counters.
//!
//! Written from the manual (DDI 0487: the register pages' access pseudocode, `PMUEvent`,
//! `AArch64.PMUSwIncrement`) independently of the engine, and without its helpers. With [`Quirks`] it
//! can be made to deviate, as QEMU does and in other ways.

mod below_el2;
mod el2;

use vpmu::arm::partition::{Features, TrapRegisters};
use vpmu::arm::{EventFilter, Outcome, PmuVersion, Register};

/// The end of a guest's access on the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Value(u64),
    Done,
    Undefined,
    TrapToEl1,
    TrapToEl2,
}

impl Exit {
    /// Returns the end as the engine names it. `None`: EL2 performs the access.
    pub(crate) fn outcome(self) -> Option<Outcome> {
        match self {
            Self::Value(value) => Some(Outcome::Value(value)),
            Self::Done => Some(Outcome::Done),
            Self::Undefined => Some(Outcome::Undefined),
            Self::TrapToEl1 => Some(Outcome::TrapToEl1),
            Self::TrapToEl2 => None,
        }
    }
}

/// Deviations of a machine from the architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quirks {
    /// Accesses ([`access_bit`]) that reach host counters below EL2.
    pub(crate) open: u64,
    /// Levels from which these accesses do so: bit 0 EL1, bit 1 EL0, bit 2 EL0 in AArch32.
    pub(crate) from: u8,
    /// Accesses that do nothing at all below EL2, and read as zero.
    pub(crate) dead: u64,
    /// PMCR_EL0.E enables host counters, too.
    pub(crate) e_gates_all: bool,
    /// PMCR_EL0.LP says where host counters overflow.
    pub(crate) lp_is_for_all: bool,
    /// MDCR_EL2.HPMD does nothing.
    pub(crate) no_hpmd: bool,
    /// MDCR_EL2.HCCD does nothing.
    pub(crate) no_hccd: bool,
    /// MDCR_EL2.TPM does not trap EL0's accesses that PMUSERENR_EL0.{ER, CR, SW} permit.
    pub(crate) tpm_asks_only_en: bool,
}

impl Quirks {
    /// Keeps nothing apart.
    pub(crate) const OPEN: Self = Self {
        open: u64::MAX,
        from: 7,
        dead: 0,
        e_gates_all: false,
        lp_is_for_all: false,
        no_hpmd: false,
        no_hccd: false,
        tpm_asks_only_en: true,
    };
}

pub(crate) const fn access_bit(register: Register, write: bool) -> u64 {
    1 << (2 * register.ordinal() + write as usize)
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Machine {
    pub(crate) implemented: u8,
    pub(crate) features: Features,
    pub(crate) quirks: Quirks,
    /// EL0 executes in AArch32.
    aarch32: bool,
    /// MDCR_EL2, HDFGRTR_EL2 and HDFGWTR_EL2.
    pub(crate) traps: TrapRegisters,
    pub(crate) pmcr: u64,
    pub(crate) cnten: u64,
    pub(crate) inten: u64,
    pub(crate) ovs: u64,
    pub(crate) selr: u64,
    pub(crate) userenr: u64,
    pub(crate) evcntr: [u64; 32],
    pub(crate) evtyper: [u64; 32],
    /// The machine lacks the events that this filter denies.
    pub(crate) filter: EventFilter,
    /// Number of EL2's accesses to PMU registers.
    pub(crate) el2_accesses: u64,
    /// PMCR_EL0.LC is RES1: EL0 has no AArch32.
    pub(crate) long_cycles: bool,
}

/// Where an event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    El0,
    El1,
    El2,
    /// EL1, on another thread of this core.
    OtherThread,
}

/// The host's part of the PMU, which nothing that a guest does may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPart {
    /// Bits of PMCNTEN, PMINTEN and PMOVS.
    pub(crate) sets: [u64; 3],
    counters: Vec<(u64, u64)>,
}

const CYCLE: u8 = 31;
const E: u64 = 1;
const P: u64 = 2;
const C: u64 = 4;
const DP: u64 = 1 << 5;
const LC: u64 = 1 << 6;
const LP: u64 = 1 << 7;

const fn bit(value: u64, n: u32) -> bool {
    value >> n & 1 != 0
}

impl Machine {
    pub(crate) fn new(implemented: u8, features: Features, quirks: Quirks) -> Self {
        Self {
            implemented,
            features,
            quirks,
            aarch32: false,
            traps: TrapRegisters {
                mdcr_el2: u64::from(implemented),
                ..TrapRegisters::default()
            },
            pmcr: 0,
            cnten: 0,
            inten: 0,
            ovs: 0,
            selr: 0,
            userenr: 0,
            evcntr: [0; 32],
            evtyper: [0; 32],
            filter: EventFilter::allow_all(),
            el2_accesses: 0,
            long_cycles: false,
        }
    }

    pub(crate) fn hpmn(&self) -> u8 {
        (self.traps.mdcr_el2 & 0x1f) as u8
    }

    fn all(&self) -> u64 {
        ((1 << self.implemented) - 1) | (1 << CYCLE)
    }

    fn guests(&self) -> u64 {
        ((1 << self.hpmn()) - 1) | (1 << CYCLE)
    }

    pub(crate) fn host_part(&self) -> HostPart {
        let host = self.all() & !self.guests();
        HostPart {
            sets: [self.cnten & host, self.inten & host, self.ovs & host],
            counters: (usize::from(self.hpmn())..usize::from(self.implemented))
                .map(|n| (self.evcntr[n], self.evtyper[n]))
                .collect(),
        }
    }

    /// Returns the values of the counters the guest owns.
    pub(crate) fn guest_counts(&self) -> Vec<u64> {
        let guests = self.guests();
        (0..32)
            .filter(|n| bit(guests, *n))
            .map(|n| self.evcntr[n as usize])
            .collect()
    }

    /// Returns the PMU's interrupt line.
    pub(crate) fn interrupt(&self) -> bool {
        let enabled = |n: u8| {
            if self.is_guests(n) {
                self.pmcr & E != 0
            } else {
                bit(self.traps.mdcr_el2, 7)
            }
        };
        (0..32).any(|n| bit(self.ovs & self.inten, n.into()) && enabled(n))
    }

    fn is_guests(&self, n: u8) -> bool {
        bit(self.guests(), n.into())
    }

    /// Lets `event` happen `times` times. Cycles are event 0x11.
    pub(crate) fn happen(&mut self, event: u16, place: Place, times: u64) {
        let all = self.all();
        for _ in 0..times {
            for n in (0..32).filter(|n| bit(all, u32::from(*n))) {
                if self.counts(n, event, place) {
                    self.increment(n, place);
                }
            }
        }
    }

    fn counts(&self, n: u8, event: u16, place: Place) -> bool {
        let raw = self.evtyper[usize::from(n)];
        let (mdcr, version) = (self.traps.mdcr_el2, self.features.version);
        let mask = if version == PmuVersion::V3 {
            0x3ff
        } else {
            0xffff
        };
        let selected = if n == CYCLE { 0x11 } else { raw as u16 & mask };
        let enabled = if self.is_guests(n) {
            self.pmcr & E != 0
        } else {
            bit(mdcr, 7) && (self.pmcr & E != 0 || !self.quirks.e_gates_all)
        };
        let hpmd = bit(mdcr, 17) && version >= PmuVersion::V3p1 && !self.quirks.no_hpmd;
        let hccd = bit(mdcr, 23) && version >= PmuVersion::V3p5 && !self.quirks.no_hccd;
        let prohibited = match n {
            // PMCR_EL0.DP extends the prohibition of event counters to the cycle counter.
            CYCLE => hccd || hpmd && self.pmcr & DP != 0,
            _ => hpmd && self.is_guests(n),
        };
        let threads = self.features.mtpmu && self.features.multithreaded;
        let level = match place {
            Place::El0 => bit(raw, 30) == bit(raw, 28),
            Place::El1 => bit(raw, 31) == bit(raw, 29),
            Place::OtherThread => threads && bit(raw, 25),
            Place::El2 => bit(raw, 27) && !prohibited,
        };
        enabled
            && bit(self.cnten, n.into())
            && selected == event
            && (self.filter.allows(event) || !self.is_guests(n))
            && level
    }

    fn increment(&mut self, n: u8, place: Place) {
        let long = match n {
            CYCLE => self.pmcr & LC != 0,
            _ if self.features.version < PmuVersion::V3p5 => false,
            _ if self.is_guests(n) || self.quirks.lp_is_for_all => self.pmcr & LP != 0,
            _ => bit(self.traps.mdcr_el2, 26),
        };
        let count = &mut self.evcntr[usize::from(n)];
        *count = count.wrapping_add(1) & counter_mask(self.features.version, n);
        let wrapped = if long {
            *count == 0
        } else {
            *count as u32 == 0
        };
        if !wrapped {
            return;
        }
        self.ovs |= 1 << n;
        let next = n + 1;
        // `AArch64.IncrementEventCounter`: no carry out of 64 bits (lp == '1'). Where HPMN divides
        // a pair, which is CONSTRAINED UNPREDICTABLE, this machine carries nothing.
        let pair = n.is_multiple_of(2)
            && !long
            && next < self.implemented
            && self.is_guests(n) == self.is_guests(next);
        if pair && self.counts(next, 0x1e, place) {
            self.increment(next, place);
        }
    }
}

/// Values of PMCEID0_EL0 and PMCEID1_EL0.
pub(crate) const EVENTS: [u64; 2] = [0x4002_0000_000b_8fff, 0x0000_0001_1000_0018];

fn counter_mask(version: PmuVersion, n: u8) -> u64 {
    if n == CYCLE || version >= PmuVersion::V3p5 {
        u64::MAX
    } else {
        0xffff_ffff
    }
}
