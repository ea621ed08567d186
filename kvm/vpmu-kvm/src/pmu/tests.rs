use std::num::NonZeroU64;

use vpmu::counter::{Counter, CounterSet, Lost, Policy};
use vpmu::x86::intel::{self, Version};
use vpmu::x86::{Capability, PmuState, RestoreError, amd};

use super::*;
use Outcome::{Done, GeneralProtection, NotHandled, Value};

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

/// A host that counts what a test sets.
#[derive(Debug, Default)]
pub(crate) struct Host {
    total: [u64; 32],
    /// Number of events until a report is due.
    left: [Option<u64>; 32],
    running: CounterSet,
}

impl CounterHost<CounterConfig> for Host {
    fn create(&mut self, counter: Counter, _: &CounterConfig) -> Result<(), Lost> {
        self.total[counter.index()] = 0;
        Ok(())
    }
    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        self.left[counter.index()] = events.map(NonZeroU64::get);
    }
    fn resume(&mut self, counters: CounterSet) {
        self.running |= counters;
    }
    fn pause(&mut self, counters: CounterSet) {
        self.running -= counters;
    }
    fn read(&mut self, counter: Counter) -> u64 {
        self.total[counter.index()]
    }
    fn release(&mut self, counter: Counter) {
        self.left[counter.index()] = None;
    }
    fn reports_promptly(&self) -> bool {
        true
    }
}

/// Returns the memory of a guest whose PMU needs none.
pub(crate) fn no_memory() -> Arc<dyn GuestMemory> {
    Arc::new(vm_memory::GuestMemoryMmap::<()>::new())
}

pub(crate) fn pmu() -> VcpuPmu<Host> {
    with(intel::Capability::new(Version::V2))
}

fn with(capability: impl Into<Capability>) -> VcpuPmu<Host> {
    let offer = Pmu::Architectural(capability.into());
    let mut pmu = VcpuPmu::new(&offer, Policy::default(), no_memory(), Shared::new()).unwrap();
    pmu.host = Some(Host::default());
    pmu.load();
    pmu
}

/// Runs the guest for `cycles` cycles, and hands over the host's reports as a VMM does.
pub(crate) fn run(pmu: &mut VcpuPmu<Host>, cycles: u64) {
    let mut due = Vec::new();
    let host = pmu.host.as_mut().expect("`with` has given it one");
    for counter in host.running {
        let n = counter.index();
        host.total[n] += cycles;
        if let Some(left) = host.left[n] {
            host.left[n] = left.checked_sub(cycles).filter(|&left| left > 0);
            if host.left[n].is_none() {
                due.push(counter);
            }
        }
    }
    for counter in due {
        pmu.overflow(counter, Report::Due);
    }
}

/// Checks that an access which ends here counts as an instruction where the host's events do not see it.
#[test]
fn a_completed_access_is_an_instruction() {
    for (misses, completed) in [(false, 0), (true, 1)] {
        let mut pmu = pmu();
        pmu.misses_completed = misses;
        // EN, OS, USR, instructions; and cycles beside them.
        for (n, select) in [(0, 0xc0), (1, 0x3c)] {
            assert_eq!(pmu.wrmsr(PERFEVTSEL0 + n, 0x43_0000 | select), Done);
        }
        assert_eq!(pmu.wrmsr(GLOBAL_CTRL, 3), Done);
        let counts = |pmu: &mut VcpuPmu<Host>| [PMC0, PMC0 + 1].map(|msr| pmu.rdmsr(msr));
        let (before, after) = (counts(&mut pmu), counts(&mut pmu));
        let more = |n: usize| match (before[n], after[n]) {
            (Value(before), Value(after)) => after - before,
            other => panic!("{other:?}"),
        };
        assert_eq!((more(0), more(1)), (2 * completed, 0));
        // A refused access retires nothing.
        let counted = pmu.rdmsr(PMC0);
        assert_eq!(pmu.rdpmc(9, Ring::Kernel), GeneralProtection);
        let Value(counted) = counted else {
            panic!("{counted:?}");
        };
        assert_eq!(pmu.rdmsr(PMC0), Value(counted + completed));
    }
}

fn registers(state: &SavedPmu) -> intel::PmuState {
    match state {
        SavedPmu::Architectural(_, PmuState::Intel(registers)) => registers.clone(),
        other => panic!("{other:?}"),
    }
}

fn sample_every(pmu: &mut VcpuPmu<Host>, cycles: u64) {
    for (index, data) in [
        (PERFEVTSEL0, CYCLES),
        (PMC0, (1 << 48) - cycles),
        (GLOBAL_CTRL, 1),
    ] {
        assert_eq!(pmu.wrmsr(index, data), Done);
    }
}

#[test]
fn an_access_is_answered_and_counted() {
    let mut pmu = pmu();
    assert_eq!(pmu.wrmsr(PERFEVTSEL0, CYCLES), Done);
    assert_eq!(pmu.rdmsr(PERFEVTSEL0), Value(CYCLES));
    let statistics = pmu.statistics.share();
    let statistics = statistics.lock().unwrap();
    assert_eq!(statistics.exits.get(Exit::MsrWrite(PERFEVTSEL0)), 1);
    assert_eq!(statistics.exits.get(Exit::MsrRead(PERFEVTSEL0)), 1);
}

#[test]
fn what_the_guest_may_not_do_is_a_fault() {
    let mut pmu = pmu();
    assert_eq!(pmu.wrmsr(PERFEVTSEL0, 1 << 40), GeneralProtection);
    assert_eq!(pmu.rdmsr(PERFEVTSEL0), Value(0), "unchanged");
    assert_eq!(pmu.wrmsr(GLOBAL_STATUS, 0), GeneralProtection, "read-only");
    assert_eq!(pmu.wrmsr(PERF_CAPABILITIES, 0), GeneralProtection);
    // There are no five counters.
    assert_eq!(pmu.rdmsr(PERFEVTSEL0 + 4), GeneralProtection);
}

#[test]
fn another_msr_is_left_to_the_caller() {
    let mut pmu = pmu();
    for index in [0x10, 0x1a0, 0x4b56_4d57, u32::MAX] {
        assert_eq!(pmu.rdmsr(index), NotHandled, "{index:#x}");
        assert_eq!(pmu.wrmsr(index, 0), NotHandled, "{index:#x}");
    }
}

#[test]
fn rdpmc_gives_the_count_or_a_fault() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    run(&mut pmu, 300);
    assert_eq!(pmu.rdpmc(0, Ring::Kernel), Value((1 << 48) - 700));
    assert_eq!(pmu.rdpmc(3, Ring::Kernel), Value(0));
    assert_eq!(
        pmu.rdpmc(1 << 30, Ring::Kernel),
        Value(0),
        "a fixed counter"
    );
    for index in [4, 1 << 30 | 3, 1 << 29, u32::MAX] {
        assert_eq!(
            pmu.rdpmc(index, Ring::Kernel),
            GeneralProtection,
            "{index:#x}"
        );
    }
    assert_eq!(
        pmu.statistics
            .share()
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
    assert_eq!(pmu.rdmsr(GLOBAL_STATUS), Value(1));
    assert_eq!(pmu.take_pmi(NMI), None);
    // A handler that does not acknowledge gets the next PMI, too.
    assert_eq!(pmu.wrmsr(PMC0, (1 << 48) - 10), Done);
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(0xee), Some(Pmi::Vector(0xee)));
    let statistics = pmu.statistics.share();
    assert_eq!(statistics.lock().unwrap().pmis, 2);
}

#[test]
fn an_interrupt_that_finds_lvtpc_masked_is_lost_and_its_status_stays() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 10);
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI | MASKED), None);
    assert_eq!(pmu.take_pmi(NMI), None);
    assert_eq!(pmu.rdmsr(GLOBAL_STATUS), Value(1));
    // Such a PMI does not silence its counter.
    assert_eq!(pmu.wrmsr(PMC0, (1 << 48) - 10), Done);
    run(&mut pmu, 10);
    assert_eq!(pmu.take_pmi(NMI), Some(Pmi::Nmi));
    let statistics = pmu.statistics.share();
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
    assert_eq!(postcard::from_bytes::<SavedPmu>(&bytes).unwrap(), state);
}

#[test]
fn the_state_of_another_pmu_is_refused() {
    let mut pmu = pmu();
    sample_every(&mut pmu, 1000);
    let before = pmu.save();
    let SavedPmu::Architectural(capability, _) = before else {
        panic!("{before:?}");
    };
    let mut registers = registers(&before);
    registers.general.0 = 2;
    registers.pmi_due = true;
    let other = SavedPmu::Architectural(capability, PmuState::Intel(registers));
    assert!(matches!(
        pmu.restore(&other),
        Err(Error::State(RestoreError::General { .. }))
    ));
    assert_eq!(pmu.save(), before);
}

/// The steps of a profiler, each with the result that the guest sees.
const STEPS: [fn(&mut VcpuPmu<Host>) -> u64; 16] = {
    fn delivered(pmu: &mut VcpuPmu<Host>) -> u64 {
        u64::from(pmu.take_pmi(NMI) == Some(Pmi::Nmi))
    }
    fn write(pmu: &mut VcpuPmu<Host>, index: u32, data: u64) -> u64 {
        u64::from(pmu.wrmsr(index, data) != Done)
    }
    fn read(outcome: Outcome) -> u64 {
        match outcome {
            Value(value) => value,
            _ => u64::MAX,
        }
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
        |pmu| read(pmu.rdmsr(GLOBAL_STATUS)),
        |pmu| write(pmu, GLOBAL_CTRL, 0),
        |pmu| read(pmu.rdpmc(0, Ring::Kernel)),
        |pmu| write(pmu, PMC0, (1 << 48) - 50),
        |pmu| write(pmu, GLOBAL_OVF_CTRL, 1),
        |pmu| write(pmu, GLOBAL_CTRL, 1),
        |pmu| {
            run(pmu, 70);
            read(pmu.rdmsr(GLOBAL_STATUS))
        },
        delivered,
        |pmu| read(pmu.rdpmc(0, Ring::Kernel)),
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

#[test]
fn a_state_brings_what_its_guest_was_offered() {
    let mut first = pmu();
    sample_every(&mut first, 1000);
    run(&mut first, 300);
    let state = first.save();
    let mut second = with(intel::Capability::new(Version::V4));
    assert_eq!(second.wrmsr(GLOBAL_CTRL, 1), Done);
    second.restore(&state).unwrap();
    assert_eq!(second.save(), state);
    run(&mut second, 700);
    assert!(second.pmi_is_due(), "it counts at once");
}

#[test]
fn amds_pmu_samples_and_keeps_to_itself() {
    const PERF_CTL0: u32 = 0xc001_0200;
    const PERF_CTR0: u32 = 0xc001_0201;
    let mut amd = with(amd::Capability::new(amd::Interface::Core));
    assert_eq!(amd.wrmsr(PERF_CTR0, (1 << 48) - 1000), Done);
    assert_eq!(amd.wrmsr(PERF_CTL0, 0x0053_0076), Done);
    run(&mut amd, 1000);
    assert_eq!(amd.take_pmi(NMI), Some(Pmi::Nmi));
    assert_eq!(amd.rdpmc(0, Ring::Kernel), Value(0));
    assert_eq!(amd.rdpmc(6, Ring::Kernel), GeneralProtection);
    assert_eq!(amd.rdmsr(GLOBAL_CTRL), NotHandled, "Intel's");
    assert_eq!(amd.rdmsr(0xc000_0301), GeneralProtection, "PerfMonV2's");

    let state = amd.save();
    let bytes = postcard::to_stdvec(&state).unwrap();
    assert_eq!(postcard::from_bytes::<SavedPmu>(&bytes).unwrap(), state);
    let mut intel = pmu();
    let error = Error::State(RestoreError::Vendor);
    assert_eq!(intel.restore(&state), Err(error));
}

/// As QEMU migrates a guest: it reads the registers here and writes them there, each by its number.
#[test]
fn registers_go_on_elsewhere_by_number() {
    let mut first = pmu();
    sample_every(&mut first, 1000);
    run(&mut first, 1300);
    assert_eq!(first.take_pmi(NMI), Some(Pmi::Nmi));
    let capability = intel::Capability::new(Version::V2);
    let mut second = pmu();
    for index in Capability::from(capability).msrs() {
        if let Some(value) = first.msr(index) {
            let told = second.set_msr(index, value);
            assert_eq!(told, Done, "{index:#x} = {value:#x}");
        }
    }
    assert_eq!(second.save(), first.save());
    assert_eq!(second.msr(GLOBAL_STATUS), Some(1));
    run(&mut second, 50);
    assert_eq!(second.msr(PMC0), Some(350), "it counts");
    let statistics = second.statistics.share();
    let exits = statistics.lock().unwrap().exits.clone();
    assert!(exits.iter().all(|(_, count)| count == 0), "not the guest's");
}

#[test]
fn the_vmm_writes_a_counter_whole_and_no_nonsense() {
    const LEGACY_PMC0: u32 = 0xc1;
    let mut pmu = pmu();
    assert_eq!(pmu.set_msr(LEGACY_PMC0, 0x1234_5678_9abc), Done);
    assert_eq!(pmu.msr(PMC0), Some(0x1234_5678_9abc));
    assert_eq!(pmu.set_msr(LEGACY_PMC0 + 4, 1), GeneralProtection);
    assert_eq!(pmu.set_msr(PERFEVTSEL0, 1 << 40), GeneralProtection);
    assert_eq!(pmu.set_msr(GLOBAL_STATUS, 1 << 50), GeneralProtection);
    let told = pmu.msr(PERF_CAPABILITIES).unwrap();
    assert_eq!(pmu.set_msr(PERF_CAPABILITIES, told), Done, "as it is");
    assert_eq!(pmu.set_msr(PERF_CAPABILITIES, 1), GeneralProtection);
    assert_eq!((pmu.msr(0x10), pmu.set_msr(0x10, 1)), (None, NotHandled));
}
