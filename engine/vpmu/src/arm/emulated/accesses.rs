//! Reads and writes of the registers.

use super::EmulatedPmu;
use crate::arm::access::refusal;
use crate::arm::{
    CHAIN, CYCLE_COUNTER, CounterConfig, ExceptionLevel, Outcome, PmuVersion, RawPmevtyper,
    Register, SW_INCR, pmcr, pmuserenr,
};
use crate::counter::{Counter, CounterHost, CounterSet, Events, Model};

impl<V: Events> EmulatedPmu<V> {
    /// Performs a read at exception level `level` of the guest.
    pub fn read<H: CounterHost<CounterConfig>>(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        host: &mut H,
    ) -> Outcome {
        let register = match self.resolve(register, false, level) {
            Ok(register) => register,
            Err(outcome) => return outcome,
        };
        Outcome::Value(match register {
            Register::Pmcr => {
                self.pmcr
                    | u64::from(self.config.counters) << pmcr::N_SHIFT
                    | self.config.identity.to_pmcr()
            }
            Register::PmcntenSet | Register::PmcntenClr => self.enabled.bits().into(),
            Register::PmintenSet | Register::PmintenClr => self.interrupting.bits().into(),
            Register::PmovsSet | Register::PmovsClr => {
                self.settle_overflows(host);
                self.overflowed.bits().into()
            }
            Register::Pmselr => self.pmselr.into(),
            Register::Pmevtyper(n) => self.types[event_counter(n)].0,
            Register::Pmccfiltr => self.types[CYCLE_COUNTER].0,
            Register::Pmevcntr(n) => self.counter(event_counter(n), host),
            Register::Pmccntr => self.counter(CYCLE_COUNTER, host),
            Register::Pmuserenr => self.pmuserenr,
            Register::Pmceid0 => self.common_events()[0],
            Register::Pmceid1 => self.common_events()[1],
            Register::Pmmir => self.config.pmmir & PMMIR_SLOTS_AND_BUS,
            // `resolve` has replaced the first two and refused the last.
            Register::Pmxevtyper | Register::Pmxevcntr | Register::Pmswinc => {
                return Outcome::Undefined;
            }
        })
    }

    /// Performs a write at exception level `level` of the guest.
    pub fn write<H: CounterHost<CounterConfig>>(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        let register = match self.resolve(register, true, level) {
            Ok(register) => register,
            Err(outcome) => return outcome,
        };
        // The set and clear registers have 32 bits; those of counters that do not exist are RAZ/WI.
        let counters = CounterSet::from_bits(value as u32) & self.implemented();
        match register {
            Register::Pmcr => self.write_pmcr(value, host),
            Register::PmcntenSet => self.enable(counters - self.enabled, host),
            Register::PmcntenClr => {
                self.bank.hosted.touch(counters & self.enabled, host);
                self.settle_carries_into(counters & self.enabled, host);
                self.enabled -= counters;
            }
            Register::PmintenSet => {
                // A report that is wanted from now on is a distance from what has been taken.
                self.settle_with_carries(counters - self.interrupting, host);
                self.interrupting |= counters;
            }
            Register::PmintenClr => {
                self.settle_with_carries(counters & self.interrupting, host);
                self.interrupting -= counters;
            }
            Register::PmovsSet => {
                self.settle_with_carries(counters - self.overflowed, host);
                self.overflowed |= counters;
            }
            Register::PmovsClr => {
                // What wrapped before this write is cleared by it, noticed or not.
                self.settle_with_carries(counters, host);
                self.overflowed -= counters;
            }
            Register::Pmswinc => {
                for n in counters - CounterSet::of(CYCLE_COUNTER) {
                    self.increment(n, level);
                }
                return Outcome::Done;
            }
            // No host event depends on the selection.
            Register::Pmselr => {
                self.pmselr = value as u8 & 0x1f;
                return Outcome::Done;
            }
            Register::Pmevtyper(n) => {
                let raw = RawPmevtyper(value).for_guest(self.config.version, self.config.el3);
                self.configure(event_counter(n), raw, host);
            }
            Register::Pmccfiltr => {
                let raw = RawPmevtyper(value).for_guest_cycles(self.config.el3);
                self.configure(CYCLE_COUNTER, raw, host);
            }
            Register::Pmevcntr(n) => {
                self.set_counter(
                    event_counter(n),
                    value & self.config.version.counter_mask(),
                    host,
                );
            }
            Register::Pmccntr => self.set_counter(CYCLE_COUNTER, value, host),
            Register::Pmuserenr => {
                self.pmuserenr = value & pmuserenr::MASK;
                return Outcome::Done;
            }
            // `resolve` has replaced the first two and refused the others.
            Register::Pmxevtyper
            | Register::Pmxevcntr
            | Register::Pmceid0
            | Register::Pmceid1
            | Register::Pmmir => return Outcome::Undefined,
        }
        let runs_as_before = matches!(
            register,
            Register::Pmcr
                | Register::PmovsSet
                | Register::PmovsClr
                | Register::PmintenSet
                | Register::PmintenClr
        );
        // Open counters are started and stopped by their enables and types alone.
        if self.open && runs_as_before {
            return Outcome::Done;
        }
        self.apply(host);
        Outcome::Done
    }

    /// Follows PMXEV*_EL0 to the register that PMSELR_EL0 selects, and refuses registers that the guest
    /// may not access. The register returned names a counter that exists.
    fn resolve(
        &self,
        register: Register,
        write: bool,
        level: ExceptionLevel,
    ) -> Result<Register, Outcome> {
        let register = match register {
            Register::Pmxevtyper if self.pmselr == CYCLE_COUNTER.number() => Register::Pmccfiltr,
            Register::Pmxevtyper => Register::Pmevtyper(self.pmselr),
            Register::Pmxevcntr => Register::Pmevcntr(self.pmselr),
            direct => direct,
        };
        match register {
            Register::Pmevtyper(n) | Register::Pmevcntr(n) if n >= self.config.counters => {
                return Err(Outcome::Undefined);
            }
            Register::Pmmir if self.config.version < PmuVersion::V3p4 => {
                return Err(Outcome::Undefined);
            }
            _ => {}
        }
        match refusal(register, write, level, self.pmuserenr) {
            Some(outcome) => Err(outcome),
            None => Ok(register),
        }
    }

    fn write_pmcr<H: CounterHost<CounterConfig>>(&mut self, value: u64, host: &mut H) {
        use pmcr::{C, D, E, LC, LP, P};
        let new = self.kept_pmcr(value);
        let changed = self.pmcr ^ new;
        if changed & E != 0 && !self.open {
            self.bank.hosted.touch(self.enabled, host);
        }
        if changed & (D | LC | LP) != 0 || value & (P | C) != 0 {
            // What was counted until now was divided, and overflowed, as the old bits say.
            self.settle(self.unsettled(), host);
        } else if changed & E != 0 {
            // Carries so far belong to the time when the CHAIN counters still counted.
            self.settle_carries(host);
        }
        if changed & (D | LC) != 0 || value & C != 0 {
            self.prescaler = 0;
        }
        self.pmcr = new;
        if value & P != 0 {
            for n in CounterSet::first(self.config.counters) {
                self.bank.counters[n].value = 0;
            }
        }
        if value & C != 0 {
            self.bank.counters[CYCLE_COUNTER].value = 0;
        }
    }

    fn enable<H: CounterHost<CounterConfig>>(&mut self, counters: CounterSet, host: &mut H) {
        self.bank.hosted.touch(counters, host);
        self.settle_carries_into(counters, host);
        self.enabled |= counters;
        // A host that could not back one before is asked again.
        self.reclassify(counters);
    }

    fn configure<H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        raw: RawPmevtyper,
        host: &mut H,
    ) {
        // Drivers write the same type at each start: that must cost no call.
        if self.types[n] != raw {
            let mut concerned = n.alone();
            if n != CYCLE_COUNTER {
                // An odd counter may have been, or become, the CHAIN counter of the one below.
                concerned.insert(n.even());
            }
            let before = self.types[n];
            self.bank.hosted.touch(n.alone(), host);
            if self.config_of(n, before) != self.config_of(n, raw) {
                self.bank.hosted.stop(n.alone(), host);
            }
            self.settle(concerned, host);
            self.types[n] = raw;
            self.reclassify(n.alone());
        }
    }

    fn counter<H: CounterHost<CounterConfig>>(&mut self, n: Counter, host: &mut H) -> u64 {
        self.settle_carries_into(n.alone(), host);
        self.settle_read(n, host);
        self.bank.counters[n].value
    }

    fn set_counter<H: CounterHost<CounterConfig>>(&mut self, n: Counter, value: u64, host: &mut H) {
        self.settle_with_carries(n.alone(), host);
        self.bank.counters[n].value = value;
        if n == CYCLE_COUNTER {
            self.prescaler = 0;
        }
        self.rearm(n, host);
    }

    /// Returns PMCEID0_EL0 and PMCEID1_EL0.
    fn common_events(&self) -> [u64; 2] {
        let exist = match self.config.version {
            // Events from 0x4000 on came with PMUv3p1.
            PmuVersion::V3 => 0xffff_ffff,
            _ => u64::MAX,
        };
        let [low, high] = self.config.events;
        let own = 1 << SW_INCR | 1 << CHAIN;
        self.config
            .filter
            .pmceid([(low | own) & exist, high & exist])
    }
}

/// PMMIR_EL1.SLOTS, BUS_SLOTS and BUS_WIDTH. The fields above offer thresholds and filters that no host event has.
const PMMIR_SLOTS_AND_BUS: u64 = 0xf_ffff;

/// Returns the event counter of this number. `resolve` has refused numbers above those of the counters that exist.
const fn event_counter(n: u8) -> Counter {
    match Counter::new(n) {
        Some(counter) => counter,
        None => CYCLE_COUNTER,
    }
}
