//! Tests that a PMU follows its vCPU: made on one thread, run on another, then on a third. It also runs without
//! descriptors.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use super::guest::{Code, HANDLED, MODEL, Machine, REPORT};
use super::{CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Patience, Port, attach, possible, run};
use vpmu::x86::Outcome::{self, Done, GeneralProtection, NotHandled, Value};
use vpmu::x86::{PmuState, intel};
use vpmu_kvm::{
    BarePmu, Capability, Clock, CounterState, Error, KICKED, Kick, Offer, Options, PerfError, Pmi,
    SavedPmu, Source, State, Vcpu, detect,
};

const MASK: u64 = (1 << 48) - 1;

fn events(offer: &Offer) -> u32 {
    match offer.capability() {
        Some(Capability::Intel(capability)) => capability.events,
        other => panic!("{other:?}"),
    }
}

fn by(source: Source) -> Options {
    Options {
        source,
        ..Options::default()
    }
}

#[test]
fn what_is_offered_is_what_counts_here() {
    let found = std::thread::spawn(|| detect(MODEL, &Options::default()));
    let Some(offer) = possible(found.join().unwrap()) else {
        return;
    };
    let clock = by(Source::Clock(Clock::Cycles));
    let by_clock = detect(MODEL, &clock).unwrap();
    assert_eq!(events(&by_clock), 0b101, "cycles and reference cycles");
    // Not every processor of AMD's has an event for reference cycles.
    assert_eq!(events(&offer) & 0b1, 0b1);
    let approximate = by(Source::Clock(Clock::Approximate));
    let approximate = detect(MODEL, &approximate).unwrap();
    assert_eq!(events(&approximate), 0b10_0111);
    // A capability with more than this host counts is refused.
    let capability = approximate.capability().unwrap();
    let error = BarePmu::new(capability, &clock, 1, Kick::Nothing).unwrap_err();
    assert!(matches!(error, Error::Event(_)), "{error}");
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

/// Returns the PMU of a VMM with its own way to a vCPU. The clock counts the thread, so the thread is the guest.
fn clock(kick: Kick) -> Option<BarePmu> {
    let options = by(Source::Clock(Clock::Cycles));
    let offer = possible(detect(MODEL, &options))?;
    let capability = offer.capability().unwrap();
    possible(BarePmu::new(capability, &options, 1_000_000_000, kick))
}

fn value(outcome: Outcome) -> u64 {
    match outcome {
        Value(value) => value,
        other => panic!("{other:?}"),
    }
}

/// Counts to an overflow of counter 0 and takes its PMI.
fn one_overflow(pmu: &mut BarePmu) {
    assert_eq!(pmu.wrmsr(PMC0, MASK - 1_000_000), Done);
    let mut before = 0;
    let patience = Patience::new();
    while !pmu.pmi_is_due() {
        patience.check();
        pmu.before_run().unwrap();
        let now = value(pmu.rdpmc(0));
        assert!(
            now >= before || now < MASK / 2,
            "{now:#x} after {before:#x}"
        );
        before = now;
    }
    assert_eq!(pmu.take_pmi(NMI), Some(Pmi::Nmi));
    assert_eq!(pmu.take_pmi(NMI), None);
}

#[test]
fn a_vmm_with_its_own_abstraction_gives_and_takes_by_itself() {
    let flag = Arc::new(AtomicU8::new(0));
    let Some(mut pmu) = clock(Kick::Flag(flag.clone())) else {
        return;
    };
    for (index, value) in [(PERFEVTSEL0, CYCLES), (GLOBAL_CTRL, 1)] {
        assert_eq!(pmu.wrmsr(index, value), Done);
    }
    assert_eq!(pmu.wrmsr(PERFEVTSEL0, 1 << 40), GeneralProtection);
    assert_eq!(pmu.rdmsr(0x10), NotHandled, "the TSC is the VMM's");
    // On a busy machine, the read may find an overflow before its signal comes. The next round
    // tries again.
    let kicked = (0..1000).any(|_| {
        one_overflow(&mut pmu);
        flag.load(std::sync::atomic::Ordering::SeqCst) == KICKED
    });
    assert!(kicked);
    assert_eq!(pmu.rdpmc(9), GeneralProtection);
    // Another host takes its place on the thread when it is gone, and goes on.
    let state = pmu.save();
    drop(pmu);
    let mut other = clock(Kick::Nothing).unwrap();
    other.restore(&state).unwrap();
    let again = other.save();
    assert_eq!(again, state, "nothing counts before it runs");
    other.before_run().unwrap();
    let before = registers(state);
    let patience = Patience::new();
    while value(other.rdpmc(0)) == before.pmc[0] {
        patience.check();
    }
}

/// As when a VMM's main thread takes a guest back to an earlier state. The guest does not touch its PMU before the next
/// overflow.
#[test]
fn a_state_that_another_thread_restores_counts_on_the_vcpus() {
    fn elsewhere<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(act).join().unwrap()
    }
    let Some(mut pmu) = clock(Kick::Nothing) else {
        return;
    };
    pmu.before_run().unwrap();
    for (index, value) in [(PERFEVTSEL0, CYCLES), (GLOBAL_CTRL, 1)] {
        assert_eq!(pmu.wrmsr(index, value), Done);
    }
    let run_to_a_pmi = |pmu: &mut BarePmu| {
        let patience = Patience::new();
        while !pmu.pmi_is_due() {
            patience.check();
            pmu.before_run().unwrap();
        }
        assert_eq!(pmu.take_pmi(NMI), Some(Pmi::Nmi));
    };
    for _ in 0..3 {
        assert_eq!(pmu.wrmsr(PMC0, MASK - 10_000_000), Done);
        let (mut moved, state) = elsewhere(move || {
            let state = pmu.save();
            (pmu, state)
        });
        run_to_a_pmi(&mut moved);
        pmu = elsewhere(move || {
            moved.reset();
            moved.restore(&state).unwrap();
            moved
        });
        run_to_a_pmi(&mut pmu);
    }
}

#[test]
fn two_pmus_on_one_thread_are_refused_and_told_so() {
    let (Some(mut first), Some(mut second)) = (clock(Kick::Nothing), clock(Kick::Nothing)) else {
        return;
    };
    first.before_run().unwrap();
    assert_eq!(second.before_run(), Err(Error::Perf(PerfError::Taken)));
    // The host is dropped on a thread that has not made it.
    std::thread::spawn(move || drop(first)).join().unwrap();
    assert_eq!(second.before_run(), Ok(()));
}

#[test]
fn a_wish_that_cannot_be_is_refused_with_what_to_do() {
    let Some(offer) = possible(detect(MODEL, &Options::default())) else {
        return;
    };
    let capability = offer.capability().unwrap();
    let taken = libc::SIGRTMIN() + 4;
    signal_hook::flag::register(taken, Arc::default()).unwrap();
    for (signal, expected, says) in [
        (
            libc::SIGUSR1,
            PerfError::Signal(libc::SIGUSR1),
            "give a real-time signal, which queues",
        ),
        (
            taken,
            PerfError::SignalTaken(taken),
            "give another real-time signal for overflows",
        ),
    ] {
        let options = Options {
            signal: Some(signal),
            ..Options::default()
        };
        let error = BarePmu::new(capability, &options, 1, Kick::Nothing).unwrap_err();
        assert_eq!(error, Error::Perf(expected));
        assert!(error.to_string().ends_with(says), "{error}");
    }
}

#[test]
fn a_reset_ends_what_the_guest_began() {
    let Some(mut pmu) = clock(Kick::Nothing) else {
        return;
    };
    let fresh = pmu.save();
    pmu.before_run().unwrap();
    for (msr, value) in [(PERFEVTSEL0, CYCLES), (PMC0, MASK), (GLOBAL_CTRL, 1)] {
        assert_eq!(pmu.wrmsr(msr, value), Done);
    }
    let patience = Patience::new();
    while !pmu.pmi_is_due() {
        patience.check();
        pmu.before_run().unwrap();
    }
    pmu.reset();
    assert!(!pmu.pmi_is_due());
    assert_eq!(pmu.save(), fresh);
    pmu.before_run().unwrap();
    assert_eq!(pmu.rdpmc(0), Value(0));
    assert_eq!(
        pmu.counter_state(vpmu_kvm::Counter::at::<0>()),
        Some(CounterState::Paused)
    );
}

#[test]
fn a_pmu_may_be_sent_to_a_thread() {
    fn may<T: Send>() {}
    may::<Vcpu>();
    may::<BarePmu>();
    may::<Options>();
}

/// A thread whose overflows nobody takes would fill the user's queue of signals, and its guest would get no PMI.
#[test]
fn a_thread_that_blocks_the_signal_gets_its_overflows() {
    std::thread::spawn(|| {
        let Some(mut pmu) = clock(Kick::Nothing) else {
            return;
        };
        change_mask(libc::SIG_BLOCK);
        pmu.before_run().unwrap();
        for (index, value) in [(PERFEVTSEL0, CYCLES), (GLOBAL_CTRL, 1)] {
            assert_eq!(pmu.wrmsr(index, value), Done);
        }
        one_overflow(&mut pmu);
    })
    .join()
    .unwrap();
}

/// A counter of one ring stands still before an overflow until that is reported.
#[test]
fn a_counter_whose_overflow_never_comes_is_told() {
    std::thread::spawn(|| {
        let Some(mut pmu) = clock(Kick::Nothing) else {
            return;
        };
        pmu.before_run().unwrap();
        // As a VMM may do by mistake.
        change_mask(libc::SIG_BLOCK);
        const USR: u64 = 1 << 16;
        for (index, value) in [
            (PERFEVTSEL0, CYCLES & !USR),
            (PMC0, MASK - 1_000_000),
            (GLOBAL_CTRL, 1),
        ] {
            assert_eq!(pmu.wrmsr(index, value), Done);
        }
        let patience = Patience::new();
        while pmu.statistics().lock().unwrap().longest_stuck_ns < 50_000_000 {
            patience.check();
            assert!(value(pmu.rdpmc(0)) <= MASK);
        }
        assert!(!pmu.pmi_is_due());
    })
    .join()
    .unwrap();
}

#[expect(unsafe_code, reason = "pthread_sigmask is a C interface")]
fn change_mask(how: libc::c_int) {
    // SAFETY: the set is a local, initialized by the first call.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

#[test]
fn a_handler_that_was_replaced_is_missed_before_the_guest_runs() {
    let signal = libc::SIGRTMIN() + 6;
    let options = Options {
        signal: Some(signal),
        ..Options::default()
    };
    let Some(offer) = possible(detect(MODEL, &options)) else {
        return;
    };
    let capability = offer.capability().unwrap();
    let mut pmu = BarePmu::new(capability, &options, 1_000_000_000, Kick::Nothing).unwrap();
    signal_hook::flag::register(signal, Arc::default()).unwrap();
    let taken = Err(Error::Perf(PerfError::SignalTaken(signal)));
    assert_eq!(pmu.before_run(), taken);
}
