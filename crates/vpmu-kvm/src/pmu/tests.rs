use std::num::NonZeroU64;

use kvm_ioctls::MsrExitReason;
use vpmu::counter::{CounterSet, Lost};
use vpmu::x86::intel::{Capability, Version};

use super::*;

const PERFEVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const GLOBAL_OVF_CTRL: u32 = 0x390;
const PERF_CAPABILITIES: u32 = 0x345;
/// EN, INT, OS, USR, core cycles.
const CYCLES: u64 = 0x0053_003c;
const NMI: u32 = 0x400;
const MASKED: u32 = 1 << 16;

/// A host that counts what it is told to.
#[derive(Debug, Default)]
struct Host {
    total: [u64; 32],
    /// How many events are left until a report is due.
    left: [Option<u64>; 32],
    running: CounterSet,
}

impl CounterHost<CounterConfig> for Host {
    fn create(&mut self, counter: u8, _: &CounterConfig) -> Result<(), Lost> {
        self.total[usize::from(counter)] = 0;
        Ok(())
    }
    fn set_period(&mut self, counter: u8, events: Option<NonZeroU64>) {
        self.left[usize::from(counter)] = events.map(NonZeroU64::get);
    }
    fn resume(&mut self, counters: CounterSet) {
        self.running |= counters;
    }
    fn pause(&mut self, counters: CounterSet) {
        self.running -= counters;
    }
    fn read(&mut self, counter: u8) -> u64 {
        self.total[usize::from(counter)]
    }
    fn release(&mut self, counter: u8) {
        self.left[usize::from(counter)] = None;
    }
    fn reports_promptly(&self) -> bool {
        true
    }
}

fn pmu() -> VcpuPmu<Host> {
    VcpuPmu::new(
        PmuConfig::new(Capability::new(Version::V2)),
        Host::default(),
    )
    .unwrap()
}

/// Value, error byte, whether it was an MSR of the PMU.
fn rdmsr(pmu: &mut VcpuPmu<Host>, index: u32) -> (u64, u8, bool) {
    let (mut error, mut data) = (0xee, 0xdddd);
    let handled = pmu.rdmsr(&mut ReadMsrExit {
        error: &mut error,
        reason: MsrExitReason::Filter,
        index,
        data: &mut data,
    });
    (data, error, handled)
}

fn wrmsr(pmu: &mut VcpuPmu<Host>, index: u32, data: u64) -> (u8, bool) {
    let mut error = 0xee;
    let handled = pmu.wrmsr(&mut WriteMsrExit {
        error: &mut error,
        reason: MsrExitReason::Filter,
        index,
        data,
    });
    (error, handled)
}

/// The guest runs for so many cycles, and the VMM hands over what the host reports.
fn run(pmu: &mut VcpuPmu<Host>, cycles: u64) {
    let mut due = Vec::new();
    for n in pmu.host.running {
        let n = usize::from(n);
        pmu.host.total[n] += cycles;
        if let Some(left) = pmu.host.left[n] {
            pmu.host.left[n] = left.checked_sub(cycles).filter(|&left| left > 0);
            if pmu.host.left[n].is_none() {
                due.push(n as u8);
            }
        }
    }
    for counter in due {
        pmu.overflow(counter, Report::Due);
    }
}

fn sample_every(pmu: &mut VcpuPmu<Host>, cycles: u64) {
    for (index, data) in [
        (PERFEVTSEL0, CYCLES),
        (PMC0, (1 << 48) - cycles),
        (GLOBAL_CTRL, 1),
    ] {
        assert_eq!(wrmsr(pmu, index, data), (0, true));
    }
}

#[test]
fn an_access_is_completed_as_kvm_wants_it() {
    let mut pmu = pmu();
    assert_eq!(wrmsr(&mut pmu, PERFEVTSEL0, CYCLES), (0, true));
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0), (CYCLES, 0, true));
    let account = pmu.account();
    let account = account.lock().unwrap();
    assert_eq!(account.exits[&Exit::MsrWrite(PERFEVTSEL0)], 1);
    assert_eq!(account.exits[&Exit::MsrRead(PERFEVTSEL0)], 1);
}

#[test]
fn what_the_guest_may_not_do_is_an_error_byte() {
    let mut pmu = pmu();
    assert_eq!(wrmsr(&mut pmu, PERFEVTSEL0, 1 << 40), (1, true));
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0), (0, 0, true), "unchanged");
    assert_eq!(wrmsr(&mut pmu, GLOBAL_STATUS, 0), (1, true), "read-only");
    assert_eq!(wrmsr(&mut pmu, PERF_CAPABILITIES, 0), (1, true));
    // Five counters there are not.
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0 + 4), (0, 1, true));
}

#[test]
fn another_msr_is_left_to_the_caller_and_fails_if_he_does_nothing() {
    let mut pmu = pmu();
    for index in [0x10, 0x1a0, 0x4b56_4d57, u32::MAX] {
        assert_eq!(rdmsr(&mut pmu, index), (0, 1, false), "{index:#x}");
        assert_eq!(wrmsr(&mut pmu, index, 0), (1, false), "{index:#x}");
    }
}

#[test]
fn rdpmc_gives_the_count_or_a_fault() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    run(&mut pmu, 300);
    assert_eq!(pmu.rdpmc_value(0), Some((1 << 48) - 700));
    assert_eq!(pmu.rdpmc_value(3), Some(0));
    assert_eq!(pmu.rdpmc_value(1 << 30), Some(0), "a fixed counter");
    for index in [4, 1 << 30 | 3, 1 << 29, u32::MAX] {
        assert_eq!(pmu.rdpmc_value(index), None, "{index:#x}");
    }
    assert_eq!(pmu.account().lock().unwrap().exits[&Exit::Rdpmc], 7);
}

#[test]
fn an_overflow_is_one_interrupt() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    run(&mut pmu, 999);
    assert_eq!(pmu.take_pmi(NMI), None);
    run(&mut pmu, 1);
    assert_eq!(pmu.take_pmi(NMI), Some(Delivery::Nmi));
    run(&mut pmu, 5000);
    assert_eq!(rdmsr(&mut pmu, GLOBAL_STATUS), (1, 0, true));
    assert_eq!(pmu.take_pmi(NMI), None);
    // A handler that does not acknowledge gets the next, too.
    assert_eq!(wrmsr(&mut pmu, PMC0, (1 << 48) - 10), (0, true));
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(0xee), Some(Delivery::Vector(0xee)));
    let account = pmu.account();
    assert_eq!(account.lock().unwrap().pmis, 2);
}

#[test]
fn an_interrupt_that_finds_lvtpc_masked_is_lost_and_its_status_stays() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 10);
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI | MASKED), Some(Delivery::Masked));
    assert_eq!(pmu.take_pmi(NMI), None);
    assert_eq!(rdmsr(&mut pmu, GLOBAL_STATUS), (1, 0, true));
    // It does not silence its counter.
    assert_eq!(wrmsr(&mut pmu, PMC0, (1 << 48) - 10), (0, true));
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI), Some(Delivery::Nmi));
    let account = pmu.account();
    let account = account.lock().unwrap();
    assert_eq!((account.pmis, account.masked_pmis), (1, 1));
}

#[test]
fn a_state_is_read_as_it_was_written() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 10);
    run(&mut pmu, 25);
    let state = pmu.save();
    assert!(state.pmi_due);
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert_eq!(postcard::from_bytes::<PmuState>(&bytes).unwrap(), state);
}

#[test]
fn the_state_of_another_pmu_is_refused() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    let before = pmu.save();
    let mut other = before.clone();
    other.general.0 = 2;
    other.pmi_due = true;
    assert!(matches!(
        pmu.restore(&other),
        Err(RestoreError::General { .. })
    ));
    assert_eq!(pmu.save(), before);
}

/// What a profiler does, each step with what the guest sees of it.
const STEPS: [fn(&mut VcpuPmu<Host>) -> u64; 16] = {
    fn delivered(pmu: &mut VcpuPmu<Host>) -> u64 {
        u64::from(pmu.take_pmi(NMI) == Some(Delivery::Nmi))
    }
    fn write(pmu: &mut VcpuPmu<Host>, index: u32, data: u64) -> u64 {
        u64::from(wrmsr(pmu, index, data).0)
    }
    [
        |pmu| write(pmu, PERFEVTSEL0, CYCLES),
        |pmu| write(pmu, PMC0, (1 << 48) - 1000),
        |pmu| write(pmu, GLOBAL_CTRL, 0x1_0000_0001),
        |pmu| {
            run(pmu, 600);
            delivered(pmu)
        },
        |pmu| {
            run(pmu, 600);
            u64::from(pmu.pmu.pmi_due())
        },
        delivered,
        delivered,
        |pmu| rdmsr(pmu, GLOBAL_STATUS).0,
        |pmu| write(pmu, GLOBAL_CTRL, 0),
        |pmu| pmu.rdpmc_value(0).unwrap_or(u64::MAX),
        |pmu| write(pmu, PMC0, (1 << 48) - 50),
        |pmu| write(pmu, GLOBAL_OVF_CTRL, 1),
        |pmu| write(pmu, GLOBAL_CTRL, 1),
        |pmu| {
            run(pmu, 70);
            rdmsr(pmu, GLOBAL_STATUS).0
        },
        delivered,
        |pmu| pmu.rdpmc_value(0).unwrap_or(u64::MAX),
    ]
};

#[test]
fn at_any_moment_a_guest_goes_on_with_another_host() {
    let mut pmu = pmu();
    let seen: Vec<u64> = STEPS.iter().map(|step| step(&mut pmu)).collect();
    assert_eq!(seen.iter().filter(|&&n| n == 1).count(), 5, "{seen:?}");
    assert_eq!(seen[15], 20, "50 of 70 were up to the overflow");
    for moment in 0..STEPS.len() {
        let mut first = tests::pmu();
        let mut seen_here: Vec<u64> = STEPS[..moment]
            .iter()
            .map(|step| step(&mut first))
            .collect();
        let mut second = tests::pmu();
        second.restore(&first.save()).unwrap();
        seen_here.extend(STEPS[moment..].iter().map(|step| step(&mut second)));
        assert_eq!(seen_here, seen, "saved before step {moment}");
    }
}

mod kvm;
