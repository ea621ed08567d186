//! A PMUv3 as naive as the manual's pseudocode: every counter is a number, every event is added at
//! once, nothing is put off, and there is no host. DDI 0487: the register pages of D24.5,
//! `CountPMUEvents`, `AArch64.IncrementEventCounter`, `AArch64.IncrementCycleCounter` and
//! `CheckPMUOverflowCondition` in J1. Shares no code with the engine but the names of registers.

use vpmu::arm::{ExceptionLevel, Outcome, Register};

#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) n: u8,
    /// 0: PMUv3, 1: PMUv3p1, 4: PMUv3p4, 5: PMUv3p5.
    pub(crate) minor: u8,
    pub(crate) el3: bool,
    /// PMCR_EL0.LC, where EL0 has no AArch32.
    res1_pmcr: u64,
    pub(crate) fixed_pmcr: u64,
    pub(crate) pmceid: [u64; 2],
    pub(crate) pmmir: u64,
    /// Whether the guest runs.
    pub(crate) loaded: bool,
    /// Events that count nothing.
    pub(crate) denied: Vec<u16>,
    /// Counters that count nothing, because the host has nothing for them: bit n.
    pub(crate) lost: u32,

    pmcr: u64,
    enabled: u32,
    interrupt: u32,
    overflow: u32,
    select: u8,
    user: u64,
    counters: [u64; 32],
    types: [u64; 32],
    elapsed: u64,
}

const CYCLES: usize = 31;

impl Reference {
    pub(crate) fn new(n: u8, minor: u8, el3: bool, aarch32: bool) -> Self {
        let res1_pmcr = if aarch32 { 0 } else { 0x40 };
        Self {
            n,
            minor,
            el3,
            res1_pmcr,
            fixed_pmcr: 0,
            pmceid: [0; 2],
            pmmir: 0,
            loaded: true,
            denied: Vec::new(),
            lost: 0,
            pmcr: res1_pmcr,
            enabled: 0,
            interrupt: 0,
            overflow: 0,
            select: 0,
            user: 0,
            counters: [0; 32],
            types: [0; 32],
            elapsed: 0,
        }
    }

    pub(crate) fn line(&self) -> bool {
        self.bit(0) && self.overflow & self.interrupt != 0
    }

    /// Forgets how many of 64 cycles have gone by, as a migration does.
    pub(crate) fn migrate(&mut self) {
        self.elapsed = 0;
    }

    /// Counts `times` occurrences of `event` at `level`.
    pub(crate) fn happen(&mut self, event: u16, level: ExceptionLevel, times: u64) {
        if !self.loaded || self.denied.contains(&event) {
            return;
        }
        let mut counted = [false; 32];
        for (n, counts) in counted.iter_mut().enumerate() {
            let wants = match n {
                CYCLES => event == 0x11,
                _ => n < usize::from(self.n) && self.event(n) == event,
            };
            *counts = wants && self.counts(n, level) && self.lost & 1 << n == 0;
        }
        for n in (0..32).filter(|&n| counted[n]) {
            let times = if n == CYCLES {
                self.cycles(times)
            } else {
                times
            };
            // The engine knows only from the filters at which levels a carry may happen.
            let levels = [ExceptionLevel::El0, ExceptionLevel::El1];
            let from = levels.map(|level| self.passes(n, level));
            self.increment(n, times, from);
        }
    }

    fn cycles(&mut self, times: u64) -> u64 {
        if self.bit(6) || !self.bit(3) {
            return times;
        }
        self.elapsed += times;
        let counts = self.elapsed / 64;
        self.elapsed %= 64;
        counts
    }

    fn increment(&mut self, n: usize, times: u64, from: [bool; 2]) {
        let long = self.bit(if n == CYCLES { 6 } else { 7 });
        let overflow_bit = if long { 64 } else { 32 };
        let old = u128::from(self.counters[n]);
        let new = old + u128::from(times);
        self.counters[n] = new as u64;
        if n != CYCLES && self.minor < 5 {
            self.counters[n] &= 0xffff_ffff;
        }
        let passed = (new >> overflow_bit) - (old >> overflow_bit);
        if passed == 0 {
            return;
        }
        self.overflow |= 1 << n;
        let odd = n + 1;
        // The pseudocode (J1.1.1) raises event 0x1e for idx<0> == '0', lp == '0' and an existing counter above.
        // PMCR_EL0.LP is `lp` from PMUv3p5 on; before that, `lp` is '0'.
        let lp = self.minor >= 5 && self.bit(7);
        let chains = n & 1 == 0 && odd < usize::from(self.n) && !lp && self.event(odd) == 0x1e;
        if chains && self.bit(0) && self.enabled & 1 << odd != 0 {
            let el0 = from[0] && self.passes(odd, ExceptionLevel::El0);
            let el1 = from[1] && self.passes(odd, ExceptionLevel::El1);
            if el0 || el1 {
                self.increment(odd, passed as u64, [el0, el1]);
            }
        }
    }

    fn counts(&self, n: usize, level: ExceptionLevel) -> bool {
        self.bit(0) && self.enabled & 1 << n != 0 && self.passes(n, level)
    }

    fn passes(&self, n: usize, level: ExceptionLevel) -> bool {
        let bit = |bit: u32| self.types[n] >> bit & 1;
        match level {
            ExceptionLevel::El0 => bit(30) == bit(28),
            ExceptionLevel::El1 => bit(31) == bit(29),
        }
    }

    fn event(&self, n: usize) -> u16 {
        self.types[n] as u16
    }

    fn bit(&self, bit: u32) -> bool {
        self.pmcr >> bit & 1 != 0
    }

    /// Returns the register that an access through PMSELR_EL0 reaches, or how the access ends instead.
    fn access(
        &self,
        register: Register,
        write: bool,
        level: ExceptionLevel,
    ) -> Result<Register, Outcome> {
        use Register::*;
        let register = match (register, self.select) {
            (Pmxevtyper, 31) => Pmccfiltr,
            (Pmxevtyper, n) => Pmevtyper(n),
            (Pmxevcntr, n) => Pmevcntr(n),
            _ => register,
        };
        let [en, sw, cr, er] = [0, 1, 2, 3].map(|bit| self.user >> bit & 1 != 0);
        let el0 = level == ExceptionLevel::El0;
        // The pair says whether the register exists for this direction and level, and whether EL0 may access it.
        let (exists, open) = match register {
            Pmevtyper(n) => (n < self.n, en),
            Pmevcntr(n) => (n < self.n, en || er && !write),
            Pmccntr => (true, en || cr && !write),
            Pmselr => (true, en || er),
            Pmswinc => (write, en || sw),
            Pmceid0 | Pmceid1 => (!write, en),
            Pmmir => (!write && !el0 && self.minor >= 4, true),
            PmintenSet | PmintenClr => (!el0, true),
            Pmuserenr => (!(el0 && write), true),
            Pmcr | PmcntenSet | PmcntenClr | PmovsSet | PmovsClr | Pmccfiltr => (true, en),
            Pmxevtyper | Pmxevcntr => unreachable!("replaced above"),
        };
        if !exists {
            Err(Outcome::Undefined)
        } else if el0 && !open {
            Err(Outcome::TrapToEl1)
        } else {
            Ok(register)
        }
    }

    pub(crate) fn read(&self, register: Register, level: ExceptionLevel) -> Outcome {
        use Register::*;
        Outcome::Value(match self.access(register, false, level) {
            Err(outcome) => return outcome,
            Ok(Pmcr) => self.pmcr | u64::from(self.n) << 11 | self.fixed_pmcr,
            Ok(PmcntenSet | PmcntenClr) => self.enabled.into(),
            Ok(PmintenSet | PmintenClr) => self.interrupt.into(),
            Ok(PmovsSet | PmovsClr) => self.overflow.into(),
            Ok(Pmselr) => self.select.into(),
            Ok(Pmevtyper(n)) => self.types[usize::from(n)],
            Ok(Pmevcntr(n)) => self.counters[usize::from(n)],
            Ok(Pmccfiltr) => self.types[CYCLES],
            Ok(Pmccntr) => self.counters[CYCLES],
            Ok(Pmuserenr) => self.user,
            Ok(Pmceid0) => self.common(0),
            Ok(Pmceid1) => self.common(1),
            Ok(Pmmir) => self.pmmir,
            Ok(other) => unreachable!("{other:?} cannot be read"),
        })
    }

    fn common(&self, high: u16) -> u64 {
        let mut bits = 0;
        for bit in 0..64_u16 {
            let event = high * 32 + if bit < 32 { bit } else { 0x4000 + bit - 32 };
            let own = event == 0 || event == 0x1e;
            let offered = self.pmceid[usize::from(high)] >> bit & 1 != 0;
            if (own || offered && !self.denied.contains(&event)) && (bit < 32 || self.minor > 0) {
                bits |= 1 << bit;
            }
        }
        bits
    }

    pub(crate) fn write(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        value: u64,
    ) -> Outcome {
        use Register::*;
        let register = match self.access(register, true, level) {
            Err(outcome) => return outcome,
            Ok(register) => register,
        };
        let exist = ((1_u32 << self.n) - 1) | 1 << 31;
        let bits = value as u32 & exist;
        let filters = if self.el3 { 0xf000_0000 } else { 0xc000_0000 };
        match register {
            Pmcr => {
                let mut keep = 0b0111_1001;
                if self.minor >= 5 {
                    keep |= 1 << 7;
                }
                let value = value | self.res1_pmcr;
                if (self.pmcr ^ value) & 0b0100_1000 != 0 {
                    self.elapsed = 0;
                }
                self.pmcr = value & keep;
                if value & 2 != 0 {
                    self.counters[..CYCLES].fill(0);
                }
                if value & 4 != 0 {
                    self.counters[CYCLES] = 0;
                    self.elapsed = 0;
                }
            }
            PmcntenSet => self.enabled |= bits,
            PmcntenClr => self.enabled &= !bits,
            PmintenSet => self.interrupt |= bits,
            PmintenClr => self.interrupt &= !bits,
            PmovsSet => self.overflow |= bits,
            PmovsClr => self.overflow &= !bits,
            Pmswinc => {
                for n in (0..31).filter(|n| bits & 1 << n != 0) {
                    if self.event(n) == 0 && self.counts(n, level) {
                        let el0 = level == ExceptionLevel::El0;
                        self.increment(n, 1, [el0, !el0]);
                    }
                }
            }
            Pmselr => self.select = value as u8 & 31,
            Pmevtyper(n) => {
                let events = if self.minor == 0 { 0x3ff } else { 0xffff };
                self.types[usize::from(n)] = value & (filters | events);
            }
            Pmccfiltr => self.types[CYCLES] = value & filters,
            Pmevcntr(n) => {
                let width = if self.minor >= 5 {
                    u64::MAX
                } else {
                    0xffff_ffff
                };
                self.counters[usize::from(n)] = value & width;
            }
            Pmccntr => {
                self.counters[CYCLES] = value;
                self.elapsed = 0;
            }
            Pmuserenr => self.user = value & 15,
            other => unreachable!("{other:?} cannot be written"),
        }
        Outcome::Done
    }
}
