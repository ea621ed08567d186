//! A page, a host that checks how it is called, and both halves together.

use std::cell::RefCell;
use std::num::NonZeroU64;

use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report};
use vpmu::paravirt::{Device, GuestHalf, Offer, PAGE_SIZE, Page, RECORD, RECORDS, command, word};
use vpmu::x86::pebs::{self, Guest, Sample, TakenSamples};
use vpmu::x86::{CounterConfig, EventFilter, Outcome, Ring};

pub(crate) const BOTH: u64 = vpmu::paravirt::flag::USER | vpmu::paravirt::flag::KERNEL;
pub(crate) const SAMPLING: u64 = BOTH | vpmu::paravirt::flag::INTERRUPT;
pub(crate) const RECORDING: u64 = SAMPLING | vpmu::paravirt::flag::RECORD;
pub(crate) const CYCLES: u64 = 0x3c;
/// The address of the buffer.
pub(crate) const BUFFER: u64 = 0x10_0000;

/// Guest memory: the page, and the buffer.
#[derive(Clone)]
pub(crate) struct Memory(RefCell<[u64; PAGE_SIZE / 8]>, RefCell<Vec<u8>>);

impl Memory {
    pub(crate) fn new() -> Self {
        let buffer = vec![0; RECORDS as usize * RECORD];
        Self(RefCell::new([0; PAGE_SIZE / 8]), RefCell::new(buffer))
    }

    /// Returns the words of the record with this number.
    pub(crate) fn record(&self, number: u64) -> [u64; 4] {
        let buffer = self.1.borrow();
        let record = &buffer[(number % RECORDS) as usize * RECORD..][..RECORD];
        std::array::from_fn(|n| u64::from_le_bytes(record[8 * n..][..8].try_into().unwrap()))
    }
}

impl Page for Memory {
    fn load(&self, word: usize) -> u64 {
        self.0.borrow()[word]
    }
    fn store(&self, word: usize, value: u64) {
        self.0.borrow_mut()[word] = value;
    }
    fn fence(&self) {}
    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let mut buffer = self.1.borrow_mut();
        let at = usize::try_from(address.wrapping_sub(BUFFER)).unwrap_or(usize::MAX);
        let place = at
            .checked_add(bytes.len())
            .and_then(|end| buffer.get_mut(at..end));
        place.map(|place| place.copy_from_slice(bytes)).is_some()
    }
}

pub(crate) struct Event {
    total: u64,
    runs: bool,
    /// Number of events until the report, and between reports.
    left: Option<u64>,
    period: u64,
    sampler: Option<Sampler>,
}

/// The host's own samples of an event: as many addresses as events.
struct Sampler {
    period: u64,
    left: u64,
    samples: Vec<u64>,
}

/// A host that counts every event for every counter that runs.
#[derive(Default)]
pub(crate) struct Host {
    pub(crate) events: [Option<Event>; 32],
    pub(crate) repeats: bool,
    pub(crate) floor: u64,
    /// Number of events between an overflow and its report.
    pub(crate) latency: u64,
    pub(crate) refuses: Option<Lost>,
    pub(crate) reports: Vec<u8>,
    /// Number of samples that are kept. 0: the host takes none.
    pub(crate) room: u64,
    /// Of so many samples, the host takes one.
    pub(crate) takes_one_of: u64,
    /// Reports and samples come by a timer that gains an event on the count in so many. 0: the two agree.
    pub(crate) timer_gains_in: u64,
}

impl Host {
    fn event(&mut self, counter: u8) -> &mut Event {
        let event = self.events[usize::from(counter)].as_mut();
        event.expect("the engine asks for events that it has created")
    }

    /// Returns the number of events until the next report.
    fn nearest(&self) -> Option<u64> {
        let running = self.events.iter().flatten().filter(|event| event.runs);
        running.filter_map(|event| event.left).min()
    }

    fn count(&mut self, events: u64) {
        for (n, event) in (0..).zip(&mut self.events) {
            let Some(event) = event.as_mut().filter(|event| event.runs) else {
                continue;
            };
            if let Some(sampler) = &mut event.sampler {
                for now in event.total + 1..=event.total + events {
                    sampler.left -= 1;
                    if sampler.left == 0 {
                        sampler.left = sampler.period;
                        sampler.samples.push(now);
                    }
                }
            }
            event.total += events;
            let Some(left) = &mut event.left else {
                continue;
            };
            *left -= events;
            if *left == 0 {
                event.left = self.repeats.then_some(event.period);
                self.reports.push(n);
            }
        }
    }
}

impl CounterHost<CounterConfig> for Host {
    fn create(&mut self, counter: Counter, _: &CounterConfig) -> Result<(), Lost> {
        let slot = &mut self.events[counter.index()];
        assert!(slot.is_none(), "created twice");
        if let Some(lost) = self.refuses {
            return Err(lost);
        }
        *slot = Some(Event {
            total: 0,
            runs: false,
            left: None,
            period: 0,
            sampler: None,
        });
        Ok(())
    }
    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        let event = self.event(counter.number());
        event.left = events.map(NonZeroU64::get);
        event.period = event.left.unwrap_or(0);
    }
    fn resume(&mut self, counters: CounterSet) {
        for counter in counters {
            assert!(!std::mem::replace(
                &mut self.event(counter.number()).runs,
                true
            ));
        }
    }
    fn pause(&mut self, counters: CounterSet) {
        for counter in counters {
            assert!(std::mem::replace(
                &mut self.event(counter.number()).runs,
                false
            ));
        }
    }
    fn read(&mut self, counter: Counter) -> u64 {
        let timer = self.event(counter.number()).total;
        timer - timer.checked_div(self.timer_gains_in).unwrap_or(0)
    }
    fn release(&mut self, counter: Counter) {
        assert!(!self.event(counter.number()).runs, "released while it runs");
        self.events[counter.index()] = None;
    }
    fn support_pebs(&mut self) -> Option<&mut dyn pebs::Host> {
        Some(self)
    }
    fn repeats(&self) -> bool {
        self.repeats
    }
    fn shortest_period(&self, sharing: u32) -> u64 {
        self.floor * u64::from(sharing)
    }
}

impl pebs::Host for Host {
    fn guest(&mut self) -> Option<&mut dyn Guest> {
        None
    }
    fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        if self.room != 0 {
            let period = events.get();
            self.event(counter.number()).sampler = Some(Sampler {
                period,
                left: period,
                samples: Vec::new(),
            });
        }
        self.room
    }
    fn end_sampling(&mut self, counter: Counter) {
        self.event(counter.number()).sampler = None;
    }
    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        let (room, one_of) = (self.room as usize, self.takes_one_of.max(1));
        let event = self.events[counter.index()].as_mut();
        let Some(sampler) = event.and_then(|event| event.sampler.as_mut()) else {
            return TakenSamples::NONE;
        };
        let lost = sampler.samples.len().saturating_sub(room) as u64;
        sampler.samples.truncate(room);
        let period = sampler.period;
        (sampler.samples).retain(|ip| ip / period % one_of == 0);
        let number = sampler.samples.len().min(samples.len());
        for (slot, ip) in samples.iter_mut().zip(sampler.samples.drain(..number)) {
            let ring = if ip % 2 == 0 {
                Ring::User
            } else {
                Ring::Kernel
            };
            *slot = Sample { ip, ring, tsc: ip };
        }
        TakenSamples {
            samples: number,
            lost,
            ..TakenSamples::default()
        }
    }
}

pub(crate) fn offer() -> Offer {
    Offer {
        counters: 4,
        events: 0b11,
        rings: true,
        raw: false,
        filter: EventFilter::default(),
    }
}

/// A vCPU: both halves, and the state between them.
pub(crate) struct Vcpu {
    pub(crate) device: Device,
    pub(crate) host: Host,
    pub(crate) page: Memory,
    pub(crate) guest: GuestHalf,
    /// Whether there is an NMI that the guest has not taken.
    pub(crate) nmi: bool,
    pub(crate) nmis: u64,
}

impl Vcpu {
    pub(crate) fn new(host: Host) -> Self {
        let page = Memory::new();
        let mut guest = GuestHalf::new();
        guest.prepare(&page);
        let mut device = Device::new(offer()).unwrap();
        let mut host = host;
        device.attach(&mut host, &page).unwrap();
        Self {
            device,
            host,
            page,
            guest,
            nmi: false,
            nmis: 0,
        }
    }

    pub(crate) fn ring(&mut self, bits: u64) {
        let done = self.device.doorbell(bits, &mut self.host, Some(&self.page));
        assert_eq!(done, Outcome::Done);
        self.take_nmi();
    }

    pub(crate) fn take_nmi(&mut self) {
        if self.device.take_nmi() {
            assert!(!self.nmi, "a second NMI while one is on its way");
            self.nmi = true;
            self.nmis += 1;
        }
    }

    /// Runs `events` events. Overflows are reported when they happen.
    pub(crate) fn run(&mut self, mut events: u64) {
        while events != 0 {
            let step = self.host.nearest().map_or(events, |left| left.min(events));
            self.host.count(step);
            events -= step;
            if !self.host.reports.is_empty() {
                self.host.count(self.host.latency);
                events = events.saturating_sub(self.host.latency);
            }
            self.deliver(Report::Due);
        }
    }

    /// Runs `events` events. Overflows are reported at the end.
    pub(crate) fn run_late(&mut self, mut events: u64) {
        while events != 0 {
            let step = self.host.nearest().map_or(events, |left| left.min(events));
            self.host.count(step);
            events -= step;
        }
        self.host.reports.dedup();
        self.deliver(Report::Unsure);
    }

    fn deliver(&mut self, report: Report) {
        for n in std::mem::take(&mut self.host.reports) {
            self.device
                .overflow(nth(n), report, &mut self.host, Some(&self.page));
            self.take_nmi();
        }
    }

    /// Takes the guest's NMI, if there is one.
    pub(crate) fn handle(&mut self) -> CounterSet {
        if !std::mem::take(&mut self.nmi) {
            return CounterSet::EMPTY;
        }
        let seen = self.guest.interrupt(&self.page);
        seen.expect("every NMI is the device's")
    }

    pub(crate) fn word(&self, word: usize) -> u64 {
        self.page.load(word)
    }

    pub(crate) fn sample(&mut self, counter: u8, left: u64, period: u64) {
        self.guest
            .wish(&self.page, nth(counter), CYCLES, SAMPLING, left, period);
    }

    pub(crate) fn want(&mut self, bits: u32) {
        self.guest.want(&self.page, CounterSet::from_bits(bits));
    }

    pub(crate) fn count_of(&self, counter: u8) -> u64 {
        self.word(word::count(nth(counter)))
    }

    pub(crate) fn operations(&self) -> u64 {
        self.device.statistics().host_operations()
    }
}

/// Sets up `counters` counters of one kind.
pub(crate) fn counting(vcpu: &mut Vcpu, counters: u8) {
    for n in 0..counters {
        vcpu.guest.wish(&vcpu.page, nth(n), CYCLES, BOTH, 0, 0);
    }
    vcpu.want((1 << counters) - 1);
    vcpu.ring(command::APPLY);
}

/// Has counter 0 sample with this period, and no other count.
pub(crate) fn sampling(vcpu: &mut Vcpu, period: u64) {
    vcpu.sample(0, period, period);
    vcpu.want(1);
    vcpu.ring(command::APPLY);
}

pub(crate) fn repeating() -> Host {
    Host {
        repeats: true,
        ..Host::default()
    }
}

/// Returns the counter of a number that a test knows to be one.
pub(crate) const fn nth(number: u8) -> Counter {
    Counter::new(number).expect("a counter's number")
}
