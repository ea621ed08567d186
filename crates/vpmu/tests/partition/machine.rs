//! A CPU with a PMU, as far as a partition can tell: what EL2 sees, what EL1 and EL0 see below
//! MDCR_EL2.HPMN and the traps, and what an event does to the counters.
//!
//! Written from the manual (DDI 0487: the register pages' access pseudocode, `PMUEvent`,
//! `AArch64.PMUSwIncrement`) independently of the engine, and without its helpers. With [`Quirks`] it
//! can be made to deviate, as QEMU does and in other ways.

use vpmu::arm::partition::{Attacker, Features, PmuRegisters, ProbedCpu, TrapRegisters};
use vpmu::arm::{EventFilter, ExceptionLevel, PmuVersion, Register};

/// How an access of the guest ends on the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Value(u64),
    Done,
    Undefined,
    TrapToEl1,
    TrapToEl2,
}

/// What a machine does that the architecture forbids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quirks {
    /// Accesses ([`access_bit`]) that reach host counters below EL2.
    pub(crate) open: u64,
    /// Where from they do: bit 0 EL1, bit 1 EL0, bit 2 EL0 in AArch32.
    pub(crate) from: u8,
    /// Accesses that do nothing at all below EL2, and read as zero.
    pub(crate) dead: u64,
    /// PMCR_EL0.E is host counters' enable, too.
    pub(crate) e_gates_all: bool,
    /// PMCR_EL0.LP says where host counters overflow.
    pub(crate) lp_is_for_all: bool,
    /// MDCR_EL2.HPMD does nothing.
    pub(crate) no_hpmd: bool,
    /// MDCR_EL2.HCCD does nothing.
    pub(crate) no_hccd: bool,
    /// MDCR_EL2.TPM lets pass what PMUSERENR_EL0.{ER, CR, SW} permit to EL0.
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

#[derive(Clone, Debug)]
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
    /// Denied events are ones this machine does not have.
    pub(crate) filter: EventFilter,
    /// How often EL2 accessed a PMU register.
    pub(crate) el2_accesses: u64,
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

/// What must not change by anything a guest does: the host's part of the PMU.
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

    /// The values of the counters the guest owns.
    pub(crate) fn guest_counts(&self) -> Vec<u64> {
        let guests = self.guests();
        (0..32)
            .filter(|n| bit(guests, *n))
            .map(|n| self.evcntr[n as usize])
            .collect()
    }

    /// The PMU's interrupt line.
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

    /// `times` occurrences of `event`. Cycles are event 0x11.
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
            // PMCR_EL0.DP extends to the cycle counter what is prohibited to event counters.
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
        // `AArch64.IncrementEventCounter`: no carry out of 64 bits (lp == '1'). Of a pair that HPMN
        // divides, CONSTRAINED UNPREDICTABLE, this machine makes none.
        let pair = n.is_multiple_of(2)
            && !long
            && next < self.implemented
            && self.is_guests(n) == self.is_guests(next);
        if pair && self.counts(next, 0x1e, place) {
            self.increment(next, place);
        }
    }

    /// An instruction of the guest.
    pub(crate) fn guest(
        &mut self,
        register: Register,
        write: Option<u64>,
        el: ExceptionLevel,
    ) -> Exit {
        let (register, trap_as) = match register {
            Register::Pmxevtyper if self.selected() == CYCLE => (Register::Pmccfiltr, register),
            Register::Pmxevtyper => (Register::Pmevtyper(self.selected()), register),
            Register::Pmxevcntr => (Register::Pmevcntr(self.selected()), register),
            other => (other, other),
        };
        if let Register::Pmevtyper(n) | Register::Pmevcntr(n) = register
            && n >= self.implemented
        {
            return Exit::Undefined;
        }
        if let Some(refused) = self.refuse(trap_as, write.is_some(), el) {
            return refused;
        }
        if self.traps_to_el2(trap_as, write.is_some(), el) {
            return Exit::TrapToEl2;
        }
        let open = self.is_open(trap_as, write.is_some(), el);
        if let Register::Pmevtyper(n) | Register::Pmevcntr(n) = register
            && n >= self.hpmn()
            && !open
        {
            return if self.features.fgt {
                Exit::TrapToEl2
            } else {
                Exit::Undefined
            };
        }
        match write {
            _ if self.quirks.dead & access_bit(trap_as, write.is_some()) != 0 => match write {
                Some(_) => Exit::Done,
                None => Exit::Value(0),
            },
            Some(value) => {
                self.write_below_el2(register, value, el, open);
                Exit::Done
            }
            None => Exit::Value(self.read_below_el2(register, open)),
        }
    }

    /// Whether this machine lets the access reach host counters.
    fn is_open(&self, register: Register, write: bool, el: ExceptionLevel) -> bool {
        let from = match el {
            ExceptionLevel::El1 => 0,
            ExceptionLevel::El0 if self.aarch32 => 2,
            ExceptionLevel::El0 => 1,
        };
        self.quirks.open & access_bit(register, write) != 0 && bit(self.quirks.from.into(), from)
    }

    fn selected(&self) -> u8 {
        (self.selr & 0x1f) as u8
    }

    fn refuse(&self, register: Register, write: bool, el: ExceptionLevel) -> Option<Exit> {
        use Register as R;
        let missing = match register {
            R::Pmswinc => !write,
            R::Pmmir => write || self.features.version < PmuVersion::V3p4,
            R::Pmceid0 | R::Pmceid1 => write,
            _ => false,
        };
        if missing {
            return Some(Exit::Undefined);
        }
        if el == ExceptionLevel::El1 {
            return None;
        }
        let [en, sw, cr, er] = [0, 1, 2, 3].map(|n| bit(self.userenr, n));
        let allowed = match register {
            R::PmintenSet | R::PmintenClr | R::Pmmir => return Some(Exit::Undefined),
            R::Pmuserenr if write => return Some(Exit::Undefined),
            R::Pmuserenr => true,
            R::Pmswinc => en || sw,
            R::Pmccntr if !write => en || cr,
            R::Pmevcntr(_) | R::Pmxevcntr if !write => en || er,
            R::Pmselr => en || er,
            _ => en,
        };
        (!allowed).then_some(Exit::TrapToEl1)
    }

    fn traps_to_el2(&self, register: Register, write: bool, el: ExceptionLevel) -> bool {
        use Register as R;
        let bit_number = match register {
            R::Pmevcntr(_) | R::Pmxevcntr => 12,
            R::Pmevtyper(_) | R::Pmxevtyper => 13,
            R::Pmccfiltr => 14,
            R::Pmccntr => 15,
            R::PmcntenSet | R::PmcntenClr => 16,
            R::PmintenSet | R::PmintenClr => 17,
            R::PmovsSet | R::PmovsClr => 18,
            R::Pmselr => 19,
            R::Pmswinc => 20,
            R::Pmcr => 21,
            R::Pmmir => 22,
            R::Pmuserenr => 57,
            R::Pmceid0 | R::Pmceid1 => 58,
        };
        let fine = if write {
            self.traps.hdfgwtr_el2
        } else {
            self.traps.hdfgrtr_el2
        };
        let (tpm, tpmcr) = (bit(self.traps.mdcr_el2, 6), bit(self.traps.mdcr_el2, 5));
        let by_fine = self.features.fgt && bit(fine, bit_number);
        // HDFGRTR_EL2 has no bit for PMCR_EL0.
        let by_fine = by_fine && (write || register != R::Pmcr);
        let unasked =
            self.quirks.tpm_asks_only_en && el == ExceptionLevel::El0 && !bit(self.userenr, 0);
        by_fine || (tpm || tpmcr && register == R::Pmcr) && !unasked
    }

    /// The bits of a set/clear pair that EL1 reaches.
    fn reach(&self, open: bool) -> u64 {
        if open { self.all() } else { self.guests() }
    }

    fn read_below_el2(&self, register: Register, open: bool) -> u64 {
        use Register as R;
        match register {
            R::Pmcr if open => self.pmcr_with(self.implemented),
            R::Pmcr => self.pmcr_with(self.hpmn()),
            R::PmcntenSet | R::PmcntenClr => self.cnten & self.reach(open),
            R::PmintenSet | R::PmintenClr => self.inten & self.reach(open),
            R::PmovsSet | R::PmovsClr => self.ovs & self.reach(open),
            R::Pmselr => self.selr,
            R::Pmuserenr => self.userenr,
            R::Pmevtyper(n) => self.evtyper[usize::from(n)],
            R::Pmevcntr(n) => self.evcntr[usize::from(n)],
            R::Pmccfiltr => self.evtyper[31],
            R::Pmccntr => self.evcntr[31],
            R::Pmceid0 => self.filter.pmceid(EVENTS)[0],
            R::Pmceid1 => self.filter.pmceid(EVENTS)[1],
            R::Pmmir => 5,
            R::Pmswinc | R::Pmxevtyper | R::Pmxevcntr => unreachable!("{register:?}"),
        }
    }

    fn write_below_el2(&mut self, register: Register, value: u64, el: ExceptionLevel, open: bool) {
        use Register as R;
        let bits = value & self.reach(open);
        match register {
            R::Pmcr if open => self.write_pmcr(value, self.implemented),
            R::Pmcr => self.write_pmcr(value, self.hpmn()),
            R::PmcntenSet => self.cnten |= bits,
            R::PmcntenClr => self.cnten &= !bits,
            R::PmintenSet => self.inten |= bits,
            R::PmintenClr => self.inten &= !bits,
            R::PmovsSet => self.ovs |= bits,
            R::PmovsClr => self.ovs &= !bits,
            R::Pmswinc => {
                let place = match el {
                    ExceptionLevel::El0 => Place::El0,
                    ExceptionLevel::El1 => Place::El1,
                };
                self.software_increment(bits, place);
            }
            other => self.write_plain(other, value),
        }
    }

    fn software_increment(&mut self, counters: u64, place: Place) {
        for n in (0..self.implemented).filter(|n| bit(counters, u32::from(*n))) {
            if self.counts(n, 0, place) {
                self.increment(n, place);
            }
        }
    }

    fn write_pmcr(&mut self, value: u64, reset: u8) {
        if value & P != 0 {
            self.evcntr[..usize::from(reset)].fill(0);
        }
        if value & C != 0 {
            self.evcntr[31] = 0;
        }
        let long = if self.features.version >= PmuVersion::V3p5 {
            LP
        } else {
            0
        };
        self.pmcr = value & (0x79 | long);
    }

    fn pmcr_with(&self, n: u8) -> u64 {
        self.pmcr | u64::from(n) << 11 | 0x4101 << 16
    }

    /// Registers whose writes do not depend on the exception level.
    fn write_plain(&mut self, register: Register, value: u64) {
        use Register as R;
        match register {
            R::Pmselr => self.selr = value & 0x1f,
            R::Pmuserenr => self.userenr = value & 0xf,
            R::Pmevtyper(n) => {
                // Bits 23 and 19 to 16 are RES0, and this machine has no thresholds.
                self.evtyper[usize::from(n)] = value & 0xff70_ffff;
            }
            R::Pmccfiltr => self.evtyper[31] = value & 0xff70_0000,
            R::Pmevcntr(n) => {
                self.evcntr[usize::from(n)] = value & counter_mask(self.features.version, n);
            }
            R::Pmccntr => self.evcntr[31] = value,
            other => unreachable!("{other:?} is not writable"),
        }
    }
}

/// PMCEID0/1_EL0.
pub(crate) const EVENTS: [u64; 2] = [0x4002_0000_000b_8fff, 0x0000_0001_1000_0018];

fn counter_mask(version: PmuVersion, n: u8) -> u64 {
    if n == CYCLE || version >= PmuVersion::V3p5 {
        u64::MAX
    } else {
        0xffff_ffff
    }
}

impl PmuRegisters for Machine {
    fn read(&mut self, register: Register) -> u64 {
        self.el2_accesses += 1;
        match register {
            Register::Pmcr => self.pmcr_with(self.implemented),
            Register::PmcntenSet | Register::PmcntenClr => self.cnten,
            Register::PmintenSet | Register::PmintenClr => self.inten,
            Register::PmovsSet | Register::PmovsClr => self.ovs,
            other => self.read_below_el2(other, true),
        }
    }

    fn write(&mut self, register: Register, value: u64) {
        self.el2_accesses += 1;
        let bits = value & self.all();
        match register {
            Register::Pmcr => self.write_pmcr(value, self.implemented),
            Register::PmcntenSet => self.cnten |= bits,
            Register::PmcntenClr => self.cnten &= !bits,
            Register::PmintenSet => self.inten |= bits,
            Register::PmintenClr => self.inten &= !bits,
            Register::PmovsSet => self.ovs |= bits,
            Register::PmovsClr => self.ovs &= !bits,
            Register::Pmswinc => self.software_increment(bits, Place::El2),
            other => self.write_plain(other, value),
        }
    }
}

impl ProbedCpu for Machine {
    fn set_mdcr_el2(&mut self, value: u64) {
        self.traps = TrapRegisters {
            mdcr_el2: value,
            ..TrapRegisters::default()
        };
    }

    fn attack(&mut self, from: Attacker, register: Register, write: Option<u64>) -> u64 {
        self.aarch32 = from == Attacker::El0AArch32;
        let el = match from {
            Attacker::El1 => ExceptionLevel::El1,
            Attacker::El0 | Attacker::El0AArch32 => ExceptionLevel::El0,
        };
        let exit = self.guest(register, write, el);
        self.aarch32 = false;
        match exit {
            Exit::Value(value) => value,
            _ => 0,
        }
    }

    fn spend_time_at_el2(&mut self) {
        self.happen(0x11, Place::El2, 64);
    }
}
