//! Tests that a PMU follows its vCPU: made on one thread, run on another, then on a third.

use super::guest::{Code, HANDLED, MODEL, Machine, REPORT};
use super::{CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Port, attach, possible, run};
use vpmu::x86::{PmuState, intel};
use vpmu_kvm::{Backing, Capability, Offer, Options, SavedPmu, State, Vcpu, detect};

fn events(offer: &Offer) -> u32 {
    match offer.capability() {
        Some(Capability::Intel(capability)) => capability.events,
        other => panic!("{other:?}"),
    }
}

fn by_clock(approximate_instructions: bool) -> Options {
    Options {
        backing: Some(Backing::Clock),
        approximate_instructions,
        ..Options::default()
    }
}

#[test]
fn what_is_offered_is_what_counts_here() {
    let found = std::thread::spawn(|| detect(MODEL, &Options::default()));
    let Some(offer) = possible(found.join().unwrap()) else {
        return;
    };
    let clock = detect(MODEL, &by_clock(false)).unwrap();
    assert_eq!(events(&clock), 0b101, "cycles and reference cycles");
    // Not every processor of AMD's has an event for reference cycles.
    assert_eq!(events(&offer) & 0b1, 0b1);
    let approximate = detect(MODEL, &by_clock(true)).unwrap();
    assert_eq!(events(&approximate), 0b10_0111);
}

#[test]
fn a_pmu_follows_its_vcpu_from_thread_to_thread() {
    // mov ecx, 1000; dec ecx; jnz $-2; out REPORT, eax; jmp to the mov
    let code = Code::default()
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(PMC0, (1 << 48) - 20_000_000)
        .wrmsr(GLOBAL_CTRL, 1)
        .ecx(1000)
        .bytes(&[0xff, 0xc9, 0x75, 0xfc])
        .out(REPORT)
        .bytes(&[0xeb, 0xf3]);
    let Some(machine) = Machine::new(code, NMI) else {
        return;
    };
    let Some(pmu) = attach(&machine, MODEL, &Options::default()) else {
        return;
    };
    let (mut guest, mut handled) = ((machine, pmu), false);
    while !handled {
        // Each thread gets some reports, or the event that ends the period.
        let some_reports = move || {
            let (mut reports, (mut machine, mut pmu)) = (0, guest);
            run(&mut machine, &mut pmu, |port| {
                reports += 1;
                handled = matches!(port, Port::Out(HANDLED, 2));
                handled || reports == 10
            });
            ((machine, pmu), handled)
        };
        (guest, handled) = std::thread::spawn(some_reports).join().unwrap();
    }
    let (_machine, mut pmu) = guest;
    let statistics = pmu.statistics();
    assert_eq!(statistics.lock().unwrap().pmis, 1);
    assert_eq!(registers(pmu.save()).global_status, 1, "on another");
}

/// Returns the registers of Intel's PMU.
fn registers(state: State) -> intel::PmuState {
    match state.pmu {
        Some(SavedPmu::Architectural(_, PmuState::Intel(registers))) => registers,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_pmu_may_be_sent_to_a_thread() {
    fn may<T: Send>() {}
    may::<Vcpu>();
    may::<Options>();
}
