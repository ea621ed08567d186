//! What the engine itself costs per emulated access on x86, on a host whose operations cost
//! nothing, and how many operations each policy asks of it for one sample.

use std::hint::black_box;
use std::num::NonZeroU64;

use criterion::{Criterion, criterion_group, criterion_main};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Policy, Report, Slots};
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::{CounterConfig, Outcome, Pmu, PmuConfig, Ring};

/// Totals that only the bench moves.
#[derive(Default)]
struct Totals {
    totals: [u64; 32],
    /// Whether pausing and reading is one operation.
    atomic: bool,
}

impl CounterHost<CounterConfig> for Totals {
    fn create(&mut self, counter: Counter, _: &CounterConfig) -> Result<(), Lost> {
        self.totals[counter.index()] = 0;
        Ok(())
    }
    fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
    fn resume(&mut self, _: CounterSet) {}
    fn pause(&mut self, _: CounterSet) {}
    fn read(&mut self, counter: Counter) -> u64 {
        self.totals[counter.index()]
    }
    fn release(&mut self, _: Counter) {}
    fn pause_and_read(&mut self, _: CounterSet, totals: &mut Slots<u64>) -> bool {
        totals
            .iter_mut()
            .zip(self.totals)
            .for_each(|((_, to), from)| *to = from);
        self.atomic
    }
    fn reports_promptly(&self) -> bool {
        true
    }
}

const EVNTSEL0: u32 = 0x186;
const FULL_WIDTH_PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const OVF_CTRL: u32 = 0x390;
const ALL: u64 = 0x7_0000_000f;
const PERIOD: u64 = 1_000_000;
const START: u64 = (1 << 48) - PERIOD;

fn rdmsr(pmu: &mut Pmu, host: &mut Totals, address: u32) -> u64 {
    match pmu.rdmsr(black_box(address), host) {
        Outcome::Value(value) => value,
        _ => 0,
    }
}

fn wrmsr(pmu: &mut Pmu, host: &mut Totals, address: u32, value: u64) {
    let _ = pmu.wrmsr(black_box(address), black_box(value), host);
}

/// Four general counters and three fixed ones that sample: what `perf record` with many events makes
/// of a PMU.
fn sampling(policy: Policy, atomic: bool) -> (Pmu, Totals) {
    let mut pmu = Pmu::new(PmuConfig {
        policy,
        ..PmuConfig::new(Capability::new(Version::V2))
    })
    .expect("a possible capability");
    let mut host = Totals {
        atomic,
        ..Totals::default()
    };
    wrmsr(&mut pmu, &mut host, GLOBAL_CTRL, 0);
    for n in 0..4 {
        wrmsr(&mut pmu, &mut host, FULL_WIDTH_PMC0 + n, START);
        wrmsr(&mut pmu, &mut host, EVNTSEL0 + n, 0x0053_00c0);
    }
    wrmsr(&mut pmu, &mut host, 0x38d, 0xbbb);
    wrmsr(&mut pmu, &mut host, GLOBAL_CTRL, ALL);
    (pmu, host)
}

/// The accesses of Linux's handler (arch/x86/events/intel/core.c) for one overflow of counter 0.
fn linux_handler(pmu: &mut Pmu, host: &mut Totals) {
    host.totals[0] = host.totals[0].wrapping_add(PERIOD);
    assert!(pmu.overflow(Counter::at::<0>(), Report::Due, host));
    wrmsr(pmu, host, GLOBAL_CTRL, 0);
    let status = rdmsr(pmu, host, GLOBAL_STATUS);
    wrmsr(pmu, host, OVF_CTRL, status);
    let _ = black_box(pmu.rdpmc(0, Ring::Kernel, false, host));
    wrmsr(pmu, host, FULL_WIDTH_PMC0, START);
    let _ = black_box(rdmsr(pmu, host, GLOBAL_STATUS));
    wrmsr(pmu, host, GLOBAL_CTRL, ALL);
}

fn access(c: &mut Criterion) {
    let (mut pmu, mut host) = sampling(Policy::ReusePaused, false);
    c.bench_function("RDMSR of a running counter", |b| {
        b.iter(|| {
            host.totals[2] = host.totals[2].wrapping_add(1);
            rdmsr(&mut pmu, &mut host, FULL_WIDTH_PMC0 + 2)
        });
    });
    c.bench_function("WRMSR of a running counter", |b| {
        b.iter(|| wrmsr(&mut pmu, &mut host, FULL_WIDTH_PMC0 + 2, START));
    });
    c.bench_function("WRMSR PERF_GLOBAL_CTRL, nothing new", |b| {
        b.iter(|| wrmsr(&mut pmu, &mut host, GLOBAL_CTRL, ALL));
    });
    c.bench_function("WRMSR PERF_GLOBAL_CTRL off and on, 7 counters", |b| {
        b.iter(|| {
            wrmsr(&mut pmu, &mut host, GLOBAL_CTRL, 0);
            wrmsr(&mut pmu, &mut host, GLOBAL_CTRL, ALL);
        });
    });
    c.bench_function("WRMSR PERFEVTSEL0, nothing new", |b| {
        b.iter(|| wrmsr(&mut pmu, &mut host, EVNTSEL0, 0x0053_00c0));
    });
    c.bench_function("RDMSR of an MSR that is not the PMU's", |b| {
        b.iter(|| rdmsr(&mut pmu, &mut host, 0x10));
    });

    for policy in Policy::ALL {
        let (mut pmu, mut host) = sampling(policy, false);
        c.bench_function(&format!("overflow and Linux's handler, {policy:?}"), |b| {
            b.iter(|| linux_handler(&mut pmu, &mut host));
        });
    }

    for atomic in [false, true] {
        for policy in Policy::ALL {
            let (mut pmu, mut host) = sampling(policy, atomic);
            linux_handler(&mut pmu, &mut host);
            let before = pmu.statistics();
            linux_handler(&mut pmu, &mut host);
            let after = pmu.statistics();
            println!(
                "host operations per sample, 4 + 3 counters, {policy:?}{}: {} (create {}, \
                 set_period {}, resume {}, pause {}, read {}, release {})",
                if atomic { ", pausing reads" } else { "" },
                after.host_operations() - before.host_operations(),
                after.creates - before.creates,
                after.set_periods - before.set_periods,
                after.resumes - before.resumes,
                after.pauses - before.pauses,
                after.reads - before.reads,
                after.releases - before.releases,
            );
        }
    }
}

criterion_group!(benches, access);
criterion_main!(benches);
