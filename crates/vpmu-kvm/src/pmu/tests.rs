use std::num::NonZeroU64;

use vpmu::counter::{CounterSet, Lost};
use vpmu::x86::intel::{self, Version};
use vpmu::x86::{RestoreError, amd};

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
pub(crate) struct Host {
    total: [u64; 32],
    /// Number of events until a report is due.
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

pub(crate) fn pmu() -> Core<Host> {
    let capability = intel::Capability::new(Version::V2).into();
    let mut pmu = Core::new(capability, Policy::default(), Host::default()).unwrap();
    pmu.load();
    pmu
}

fn rdmsr(pmu: &mut Core<Host>, index: u32) -> Result<u64, Gp> {
    pmu.rdmsr(index).expect("the PMU has it")
}

fn wrmsr(pmu: &mut Core<Host>, index: u32, data: u64) -> Result<(), Gp> {
    pmu.wrmsr(index, data).expect("the PMU has it")
}

/// Runs the guest for `cycles` cycles, and hands over the host's reports as a VMM does.
pub(crate) fn run(pmu: &mut Core<Host>, cycles: u64) {
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

fn registers(state: &State) -> intel::PmuState {
    match &state.pmu {
        PmuState::Intel(registers) => registers.clone(),
        PmuState::Amd(_) => panic!("Intel's"),
    }
}

fn sample_every(pmu: &mut Core<Host>, cycles: u64) {
    for (index, data) in [
        (PERFEVTSEL0, CYCLES),
        (PMC0, (1 << 48) - cycles),
        (GLOBAL_CTRL, 1),
    ] {
        assert_eq!(wrmsr(pmu, index, data), Ok(()));
    }
}

#[test]
fn an_access_is_answered_and_counted() {
    let mut pmu = pmu();
    assert_eq!(wrmsr(&mut pmu, PERFEVTSEL0, CYCLES), Ok(()));
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0), Ok(CYCLES));
    let statistics = pmu.shared_statistics();
    let statistics = statistics.lock().unwrap();
    assert_eq!(statistics.exits.get(Exit::MsrWrite(PERFEVTSEL0)), 1);
    assert_eq!(statistics.exits.get(Exit::MsrRead(PERFEVTSEL0)), 1);
}

#[test]
fn what_the_guest_may_not_do_is_a_fault() {
    let mut pmu = pmu();
    assert_eq!(wrmsr(&mut pmu, PERFEVTSEL0, 1 << 40), Err(Gp));
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0), Ok(0), "unchanged");
    assert_eq!(wrmsr(&mut pmu, GLOBAL_STATUS, 0), Err(Gp), "read-only");
    assert_eq!(wrmsr(&mut pmu, PERF_CAPABILITIES, 0), Err(Gp));
    // There are no five counters.
    assert_eq!(rdmsr(&mut pmu, PERFEVTSEL0 + 4), Err(Gp));
}

#[test]
fn another_msr_is_left_to_the_caller() {
    let mut pmu = pmu();
    for index in [0x10, 0x1a0, 0x4b56_4d57, u32::MAX] {
        assert_eq!(pmu.rdmsr(index), None, "{index:#x}");
        assert_eq!(pmu.wrmsr(index, 0), None, "{index:#x}");
    }
}

#[test]
fn rdpmc_gives_the_count_or_a_fault() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    run(&mut pmu, 300);
    assert_eq!(pmu.rdpmc(0), Ok((1 << 48) - 700));
    assert_eq!(pmu.rdpmc(3), Ok(0));
    assert_eq!(pmu.rdpmc(1 << 30), Ok(0), "a fixed counter");
    for index in [4, 1 << 30 | 3, 1 << 29, u32::MAX] {
        assert_eq!(pmu.rdpmc(index), Err(Gp), "{index:#x}");
    }
    assert_eq!(
        pmu.shared_statistics()
            .lock()
            .unwrap()
            .exits
            .get(Exit::Rdpmc),
        7
    );
}

#[test]
fn an_overflow_is_one_interrupt() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    run(&mut pmu, 999);
    assert_eq!(pmu.take_pmi(NMI), None);
    run(&mut pmu, 1);
    assert_eq!(pmu.take_pmi(NMI), Some(Pmi::Nmi));
    run(&mut pmu, 5000);
    assert_eq!(rdmsr(&mut pmu, GLOBAL_STATUS), Ok(1));
    assert_eq!(pmu.take_pmi(NMI), None);
    // A handler that does not acknowledge gets the next PMI, too.
    assert_eq!(wrmsr(&mut pmu, PMC0, (1 << 48) - 10), Ok(()));
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(0xee), Some(Pmi::Vector(0xee)));
    let statistics = pmu.shared_statistics();
    assert_eq!(statistics.lock().unwrap().pmis, 2);
}

#[test]
fn an_interrupt_that_finds_lvtpc_masked_is_lost_and_its_status_stays() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 10);
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI | MASKED), None);
    assert_eq!(pmu.take_pmi(NMI), None);
    assert_eq!(rdmsr(&mut pmu, GLOBAL_STATUS), Ok(1));
    // Such a PMI does not silence its counter.
    assert_eq!(wrmsr(&mut pmu, PMC0, (1 << 48) - 10), Ok(()));
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI), Some(Pmi::Nmi));
    let statistics = pmu.shared_statistics();
    let statistics = statistics.lock().unwrap();
    assert_eq!((statistics.pmis, statistics.masked_pmis), (1, 1));
}

#[test]
fn a_state_is_read_as_it_was_written() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 10);
    run(&mut pmu, 25);
    let state = pmu.save();
    assert!(registers(&state).pmi_due);
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert_eq!(postcard::from_bytes::<State>(&bytes).unwrap(), state);
}

#[test]
fn the_state_of_another_pmu_is_refused() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    let before = pmu.save();
    let mut other = before.clone();
    let mut registers = registers(&before);
    registers.general.0 = 2;
    registers.pmi_due = true;
    other.pmu = PmuState::Intel(registers);
    assert!(matches!(
        pmu.restore(&other, true),
        Err(Error::State(RestoreError::Intel(
            intel::RestoreError::General { .. }
        )))
    ));
    assert_eq!(pmu.save(), before);
}

/// The steps of a profiler, each with the result that the guest sees.
const STEPS: [fn(&mut Core<Host>) -> u64; 16] = {
    fn delivered(pmu: &mut Core<Host>) -> u64 {
        u64::from(pmu.take_pmi(NMI) == Some(Pmi::Nmi))
    }
    fn write(pmu: &mut Core<Host>, index: u32, data: u64) -> u64 {
        u64::from(wrmsr(pmu, index, data).is_err())
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
            u64::from(pmu.pmi_is_due())
        },
        delivered,
        delivered,
        |pmu| rdmsr(pmu, GLOBAL_STATUS).unwrap_or(u64::MAX),
        |pmu| write(pmu, GLOBAL_CTRL, 0),
        |pmu| pmu.rdpmc(0).unwrap_or(u64::MAX),
        |pmu| write(pmu, PMC0, (1 << 48) - 50),
        |pmu| write(pmu, GLOBAL_OVF_CTRL, 1),
        |pmu| write(pmu, GLOBAL_CTRL, 1),
        |pmu| {
            run(pmu, 70);
            rdmsr(pmu, GLOBAL_STATUS).unwrap_or(u64::MAX)
        },
        delivered,
        |pmu| pmu.rdpmc(0).unwrap_or(u64::MAX),
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
        second.restore(&first.save(), true).unwrap();
        seen_here.extend(STEPS[moment..].iter().map(|step| step(&mut second)));
        assert_eq!(seen_here, seen, "saved before step {moment}");
    }
}

#[test]
fn a_state_brings_what_its_guest_was_offered() {
    let mut first = pmu();
    sample_every(&mut first, 1000);
    run(&mut first, 300);
    let state = first.save();
    let other = intel::Capability::new(Version::V4).into();
    let mut second = Core::new(other, Policy::default(), Host::default()).unwrap();
    second.load();
    second.wrmsr(GLOBAL_CTRL, 1);
    second.restore(&state, true).unwrap();
    assert_eq!(second.save(), state);
    run(&mut second, 700);
    assert!(second.pmi_is_due(), "it counts at once");
    let old = State {
        version: 2,
        ..state.clone()
    };
    assert_eq!(second.restore(&old, true), Ok(()));
    let foreign = State {
        version: 4,
        ..state
    };
    assert_eq!(second.restore(&foreign, true), Err(Error::StateVersion(4)));
}

#[test]
fn amds_pmu_samples_and_keeps_to_itself() {
    const PERF_CTL0: u32 = 0xc001_0200;
    const PERF_CTR0: u32 = 0xc001_0201;
    let capability = amd::Capability::new(amd::Interface::Core).into();
    let mut amd = Core::new(capability, Policy::default(), Host::default()).unwrap();
    amd.load();
    assert_eq!(wrmsr(&mut amd, PERF_CTR0, (1 << 48) - 1000), Ok(()));
    assert_eq!(wrmsr(&mut amd, PERF_CTL0, 0x0053_0076), Ok(()));
    run(&mut amd, 1000);
    assert_eq!(amd.take_pmi(NMI), Some(Pmi::Nmi));
    assert_eq!(amd.rdpmc(0), Ok(0));
    assert_eq!(amd.rdpmc(6), Err(Gp));
    assert_eq!(amd.rdmsr(GLOBAL_CTRL), None, "Intel's");
    assert_eq!(amd.rdmsr(0xc000_0301), Some(Err(Gp)), "PerfMonV2's");

    let state = amd.save();
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert_eq!(postcard::from_bytes::<State>(&bytes).unwrap(), state);
    let mut intel = pmu();
    let error = Error::State(RestoreError::Vendor);
    assert_eq!(intel.restore(&state, true), Err(error));
}
