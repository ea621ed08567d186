//! What the engine itself costs per emulated access, on a host whose operations cost nothing.

use std::hint::black_box;
use std::num::NonZeroU64;

use criterion::{Criterion, criterion_group, criterion_main};
use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
use vpmu::arm::{CounterConfig, EventFilter, ExceptionLevel, Outcome, PmuVersion, Register, pmcr};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Policy, Report};

/// Totals that only the bench moves.
#[derive(Default)]
struct Totals([u64; 32]);

impl CounterHost<CounterConfig> for Totals {
    fn create(&mut self, counter: Counter, _: &CounterConfig) -> Result<(), Lost> {
        self.0[counter.index()] = 0;
        Ok(())
    }
    fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
    fn resume(&mut self, _: CounterSet) {}
    fn pause(&mut self, _: CounterSet) {}
    fn read(&mut self, counter: Counter) -> u64 {
        self.0[counter.index()]
    }
    fn release(&mut self, _: Counter) {}
}

fn read(pmu: &mut EmulatedPmu, host: &mut Totals, register: Register) -> u64 {
    match pmu.read(black_box(register), ExceptionLevel::El1, host) {
        Outcome::Value(value) => value,
        _ => 0,
    }
}

fn write(pmu: &mut EmulatedPmu, host: &mut Totals, register: Register, value: u64) {
    let _ = pmu.write(
        black_box(register),
        ExceptionLevel::El1,
        black_box(value),
        host,
    );
}

const PERIOD: u64 = 1_000_000;
const START: u64 = (1 << 32) - PERIOD;

/// Six event counters that sample, and the cycle counter: what `perf record` with many events
/// makes of a PMU.
fn sampling() -> (EmulatedPmu, Totals) {
    let mut pmu = EmulatedPmu::new(EmulatedConfig {
        counters: 6,
        version: PmuVersion::V3p5,
        el3: false,
        aarch32: true,
        identity: Identity::default(),
        events: [u64::MAX; 2],
        pmmir: 0,
        filter: EventFilter::default(),
        policy: Policy::default(),
    })
    .expect("six counters are possible");
    let mut host = Totals::default();
    for n in 0..6 {
        write(&mut pmu, &mut host, Register::Pmevtyper(n), 0x08);
        write(&mut pmu, &mut host, Register::Pmevcntr(n), START);
    }
    write(&mut pmu, &mut host, Register::PmintenSet, 0x8000_003f);
    write(&mut pmu, &mut host, Register::PmcntenSet, 0x8000_003f);
    write(&mut pmu, &mut host, Register::Pmcr, pmcr::E | pmcr::LC);
    (pmu, host)
}

/// The register accesses of Linux's handler (drivers/perf/arm_pmuv3.c) for one overflow.
fn linux_handler(pmu: &mut EmulatedPmu, host: &mut Totals) {
    host.0[0] = host.0[0].wrapping_add(PERIOD);
    assert!(pmu.overflow(Counter::at::<0>(), Report::Unsure, host));
    let overflowed = read(pmu, host, Register::PmovsClr);
    write(pmu, host, Register::PmovsClr, overflowed);
    let control = read(pmu, host, Register::Pmcr);
    write(pmu, host, Register::Pmcr, control & !pmcr::E);
    black_box(read(pmu, host, Register::Pmevcntr(0)));
    write(pmu, host, Register::Pmevcntr(0), START);
    let control = read(pmu, host, Register::Pmcr);
    write(pmu, host, Register::Pmcr, control | pmcr::E);
}

fn access(c: &mut Criterion) {
    let (mut pmu, mut host) = sampling();
    c.bench_function("read a running counter", |b| {
        b.iter(|| {
            host.0[2] = host.0[2].wrapping_add(1);
            read(&mut pmu, &mut host, Register::Pmevcntr(2))
        });
    });
    c.bench_function("write PMCNTENSET, nothing new", |b| {
        b.iter(|| write(&mut pmu, &mut host, Register::PmcntenSet, 1));
    });
    c.bench_function("write PMCNTENCLR and PMCNTENSET of one counter", |b| {
        b.iter(|| {
            write(&mut pmu, &mut host, Register::PmcntenClr, 1);
            write(&mut pmu, &mut host, Register::PmcntenSet, 1);
        });
    });

    let (mut pmu, mut host) = sampling();
    c.bench_function("overflow and Linux's handler, 8 accesses", |b| {
        b.iter(|| linux_handler(&mut pmu, &mut host));
    });

    let (mut pmu, mut host) = sampling();
    let before = pmu.statistics();
    linux_handler(&mut pmu, &mut host);
    let after = pmu.statistics();
    println!(
        "host operations per overflow: {} (read {}, set_period {}, pause {}, resume {}, create {}, \
         release {})",
        after.host_operations() - before.host_operations(),
        after.reads - before.reads,
        after.set_periods - before.set_periods,
        after.pauses - before.pauses,
        after.resumes - before.resumes,
        after.creates - before.creates,
        after.releases - before.releases,
    );
}

criterion_group!(benches, access);
criterion_main!(benches);
