//! The host's profile of its guest: samples by host counters that overflow to EL2.
//!
//! A host counter counts what the guest does at EL0 and EL1, never EL2's own work. It interrupts EL2 after each period;
//! the sample is what the CPU was doing then. Samples go into a bounded buffer of the CPU and leave it when the guest
//! has ended: a sample takes one exit, and its way out takes none. The guest's counters are below HPMN and are not
//! touched, and the interrupt is ended at EL2.
//!
//! The period follows the rate asked for, as Linux's does (`perf_adjust_period`): an eighth of the way at each sample.

use alloc::vec::Vec;
use core::fmt;

use vpmu::{
    arm::{Register, partition::PmuRegisters},
    counter::CounterSet,
};

use crate::boot::words::{MOST_EVENTS, ProfileSettings};

/// Samples that a CPU keeps: half a minute at 1,000 a second.
pub const CAPACITY: usize = 32 << 10;
/// The period that is tried first, in events.
const FIRST_PERIOD: u64 = 100_000;
/// Shorter periods would leave the guest no time.
const LEAST_PERIOD: u64 = 10_000;
/// A counter overflows past its 32nd bit at the least.
const MOST_PERIOD: u64 = 0x7fff_ffff;
/// Samples in one record; a record has at most some kilobytes.
const IN_RECORD: usize = 64;

/// What the CPU was doing when a host counter overflowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The system counter.
    pub time: u64,
    /// The guest's PC.
    pub pc: u64,
    /// `CONTEXTIDR_EL1`: what the guest's kernel calls the process, if it does.
    pub context: u32,
    /// The guest's VMID.
    pub vmid: u16,
    /// The guest's exception level.
    pub el: u8,
    /// Which of the events, by its place in [`ProfileSettings`].
    pub event: u8,
}

/// One host counter that samples.
#[derive(Clone, Copy, Debug, Default)]
struct Sampler {
    counter: u8,
    event: u16,
    period: u64,
    /// Events of periods that are over.
    counted: u64,
    /// When the last sample was taken.
    last: u64,
}

/// The profile of one CPU.
#[derive(Debug)]
pub struct Profile {
    samplers: [Sampler; MOST_EVENTS],
    used: usize,
    /// Ticks of the system counter between two samples.
    interval: u64,
    samples: Vec<Sample>,
    lost: u64,
    /// The measurement that the samples belong to.
    epoch: u32,
}

impl Profile {
    /// A profile by `settings` with the lowest of the host's `counters`, on a CPU whose system counter has `frequency`
    /// ticks a second. It keeps as many samples as `buffer` has room for. `None`: there are fewer counters than events.
    pub fn new(
        settings: &ProfileSettings,
        counters: CounterSet,
        frequency: u64,
        buffer: Vec<Sample>,
    ) -> Option<Self> {
        let mut samplers = [Sampler::default(); MOST_EVENTS];
        let mut counters = counters.iter();
        for (sampler, &event) in samplers.iter_mut().zip(settings.events()) {
            *sampler = Sampler {
                counter: counters.next()?.number(),
                event,
                period: FIRST_PERIOD,
                ..Sampler::default()
            };
        }
        Some(Self {
            samplers,
            used: settings.events().len(),
            interval: (frequency / u64::from(settings.rate)).max(1),
            samples: buffer,
            lost: 0,
            epoch: 0,
        })
    }

    /// Programs the counters and lets them run, from the time `now`.
    pub fn start<R: PmuRegisters>(&mut self, now: u64, registers: &mut R) {
        for sampler in &mut self.samplers[..self.used] {
            // Neither P, U nor NSH: EL1 and EL0 count, EL2 does not.
            let kind = u64::from(sampler.event);
            registers.write(Register::Pmevtyper(sampler.counter), kind);
            sampler.last = now;
            sampler.arm(registers);
            registers.write(Register::PmovsClr, 1 << sampler.counter);
            registers.write(Register::PmintenSet, 1 << sampler.counter);
            registers.write(Register::PmcntenSet, 1 << sampler.counter);
        }
    }

    /// Stops the counters.
    pub fn stop<R: PmuRegisters>(&self, registers: &mut R) {
        let samplers = self.samplers[..self.used].iter();
        let counters = samplers.fold(0, |bits, sampler| bits | 1 << sampler.counter);
        registers.write(Register::PmcntenClr, counters);
        registers.write(Register::PmintenClr, counters);
        registers.write(Register::PmovsClr, counters);
    }

    /// The counters of `overflowed` have overflowed, and their bits in PMOVSSET_EL0 are clear. Takes a sample for each, in
    /// the measurement `epoch`; none where that is `None`. `at` has the facts, but for the event.
    pub fn overflow<R: PmuRegisters>(
        &mut self,
        overflowed: CounterSet,
        epoch: Option<u32>,
        at: Sample,
        registers: &mut R,
    ) {
        if let Some(epoch) = epoch
            && self.epoch != epoch
        {
            // What is here belongs to another measurement.
            self.epoch = epoch;
            self.samples.clear();
            self.lost = 0;
        }
        let samplers = self.samplers[..self.used].iter_mut();
        for (event, sampler) in (0..).zip(samplers) {
            if overflowed.bits() >> sampler.counter & 1 == 0 {
                continue;
            }
            if epoch.is_some() {
                // Within the capacity, so that nothing is allocated.
                if self.samples.len() < self.samples.capacity() {
                    self.samples.push(Sample { event, ..at });
                } else {
                    self.lost += 1;
                }
            }
            sampler.counted = sampler.counted.wrapping_add(sampler.period);
            sampler.adapt(at.time, self.interval);
            sampler.arm(registers);
        }
    }

    /// The records of CPU `cpu` for the measurement `epoch`; `vectors` is the guest's VBAR_EL1.
    pub const fn records(&self, cpu: usize, epoch: u32, vectors: u64) -> Records<'_> {
        Records {
            profile: self,
            cpu,
            epoch,
            vectors,
        }
    }
}

impl Sampler {
    /// Lets the counter overflow after a period.
    fn arm<R: PmuRegisters>(&self, registers: &mut R) {
        registers.write(
            Register::Pmevcntr(self.counter),
            0_u64.wrapping_sub(self.period),
        );
    }

    /// Brings the period nearer to that by which samples would be `interval` apart.
    fn adapt(&mut self, now: u64, interval: u64) {
        let took = now.wrapping_sub(self.last).max(1);
        self.last = now;
        // Both factors have 32 bits at most.
        let right = self.period * interval.min(u64::from(u32::MAX)) / took;
        let right = right.clamp(LEAST_PERIOD, MOST_PERIOD);
        // An eighth of the way, rounded away from zero so that the end is reached.
        self.period = if right > self.period {
            self.period + (right - self.period).div_ceil(8)
        } else {
            self.period - (self.period - right).div_ceil(8)
        };
    }
}

/// See [`Profile::records`]: lines, each a record separator and a JSON object.
pub struct Records<'a> {
    profile: &'a Profile,
    cpu: usize,
    epoch: u32,
    vectors: u64,
}

impl fmt::Display for Records<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let profile = self.profile;
        let (samples, lost) = if profile.epoch == self.epoch {
            (profile.samples.as_slice(), profile.lost)
        } else {
            (&[][..], 0)
        };
        // The first record says what there is, with or without samples.
        let (first, rest) = samples.split_at(samples.len().min(IN_RECORD));
        for (n, chunk) in [first]
            .into_iter()
            .chain(rest.chunks(IN_RECORD))
            .enumerate()
        {
            write!(f, "\r\n\x1e{{\"host-profile\":{{\"cpu\":{}", self.cpu)?;
            if n == 0 {
                write!(
                    f,
                    ",\"lost\":{lost},\"vectors\":{},\"events\":[",
                    self.vectors
                )?;
                for (n, sampler) in profile.samplers[..profile.used].iter().enumerate() {
                    let comma = if n == 0 { "" } else { "," };
                    write!(f, "{comma}[{},{}]", sampler.event, sampler.counted)?;
                }
                f.write_str("]")?;
            }
            f.write_str(",\"samples\":[")?;
            for (n, sample) in chunk.iter().enumerate() {
                let comma = if n == 0 { "" } else { "," };
                write!(
                    f,
                    "{comma}[{},{},{},{},{},{}]",
                    sample.time, sample.pc, sample.el, sample.context, sample.vmid, sample.event
                )?;
            }
            f.write_str("]}}\r\n")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Registers that keep what is written.
    #[derive(Default)]
    struct Written(BTreeMap<&'static str, Vec<u64>>);

    impl PmuRegisters for Written {
        fn read(&mut self, _: Register) -> u64 {
            0
        }

        fn write(&mut self, register: Register, value: u64) {
            self.0.entry(register.name()).or_default().push(value);
        }
    }

    const AT: Sample = Sample {
        time: 0,
        pc: 0x1234,
        context: 7,
        vmid: 0,
        el: 1,
        event: 0,
    };

    fn profile(counters: u32) -> Option<Profile> {
        let settings = ProfileSettings::parse("1000,0x11,0x8").unwrap();
        let buffer = Vec::with_capacity(100);
        Profile::new(
            &settings,
            CounterSet::from_bits(counters),
            1_000_000_000,
            buffer,
        )
    }

    #[test]
    fn each_event_needs_a_counter() {
        assert!(profile(0b10_0000).is_none());
        let mut profile = profile(0b11_0000).unwrap();
        let mut registers = Written::default();
        profile.start(0, &mut registers);
        assert_eq!(registers.0["PMEVTYPERn_EL0"], [0x11, 0x8]);
        assert_eq!(registers.0["PMCNTENSET_EL0"], [1 << 4, 1 << 5]);
        assert_eq!(registers.0["PMINTENSET_EL1"], [1 << 4, 1 << 5]);
    }

    #[test]
    fn the_period_follows_the_rate() {
        let mut profile = profile(0b11_0000).unwrap();
        let mut registers = Written::default();
        profile.start(0, &mut registers);
        // 1 event a tick, 1,000,000 ticks between samples.
        let mut now = 0;
        for _ in 0..100 {
            now += profile.samplers[0].period;
            profile.overflow(
                CounterSet::from_bits(1 << 4),
                Some(0),
                Sample { time: now, ..AT },
                &mut registers,
            );
        }
        let period = profile.samplers[0].period;
        assert!((999_000..=1_001_000).contains(&period), "{period}");
        // A guest that slept for a year does not make the counter run wild.
        now += 1 << 55;
        for time in [now, now, now + 1] {
            profile.overflow(
                CounterSet::from_bits(1 << 4),
                Some(0),
                Sample { time, ..AT },
                &mut registers,
            );
        }
        let period = profile.samplers[0].period;
        assert!((LEAST_PERIOD..=MOST_PERIOD).contains(&period), "{period}");
    }

    #[test]
    fn a_measurement_begins_empty_and_a_full_buffer_counts_what_is_lost() {
        let mut profile = profile(0b11_0000).unwrap();
        let mut registers = Written::default();
        let both = CounterSet::from_bits(0b11_0000);
        profile.overflow(both, Some(0), AT, &mut registers);
        profile.overflow(both, None, AT, &mut registers);
        assert_eq!(profile.samples.len(), 2);
        profile.overflow(both, Some(1), AT, &mut registers);
        assert_eq!(
            profile.records(3, 1, 2048).to_string(),
            concat!(
                "\r\n\x1e{\"host-profile\":{\"cpu\":3,\"lost\":0,\"vectors\":2048,\"events\":[[17,300023],[8,300023]],",
                "\"samples\":[[0,4660,1,7,0,0],[0,4660,1,7,0,1]]}}\r\n",
            )
            .replace("300023", &profile.samplers[0].counted.to_string())
        );
        while profile.samples.len() < profile.samples.capacity() {
            profile.overflow(both, Some(1), AT, &mut registers);
        }
        profile.overflow(both, Some(1), AT, &mut registers);
        assert_eq!(profile.lost, 2);
        // Nothing of the last measurement is of this one.
        assert!(
            profile
                .records(3, 2, 2048)
                .to_string()
                .ends_with("\"samples\":[]}}\r\n")
        );
    }
}
