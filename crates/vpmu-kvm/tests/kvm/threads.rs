//! Tests that a PMU follows its vCPU: made on one thread, run on another, then on a third. It also runs without
//! descriptors.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use super::guest::{Code, HANDLED, Machine, REPORT, options};
use super::{
    CYCLES, GLOBAL_CTRL, GLOBAL_STATUS, NMI, PERFEVTSEL0, PMC0, Patience, Port, attach, possible,
    run,
};
use vpmu::x86::PmuState;
use vpmu_kvm::{
    Backing, Capability, CounterState, Error, Gp, KICKED, Kick, Options, PerfError, Pmi, VcpuPmu,
    detect,
};

const MASK: u64 = (1 << 48) - 1;

fn events(capability: Capability) -> u32 {
    match capability {
        Capability::Intel(capability) => capability.events,
        Capability::Amd(_) => panic!("Intel's"),
    }
}

#[test]
fn what_is_offered_is_what_counts_here() {
    let found = options();
    let Some(capability) = possible(std::thread::spawn(move || detect(&found)).join().unwrap())
    else {
        return;
    };
    let clock = Options {
        backing: Some(Backing::Clock),
        ..options()
    };
    let by_clock = detect(&clock).unwrap();
    assert_eq!(events(by_clock), 0b101, "cycles and reference cycles");
    // Not every processor of AMD's has an event for reference cycles.
    assert_eq!(events(capability) & 0b1, 0b1);
    let approximate = Options {
        approximate_instructions: true,
        ..clock.clone()
    };
    assert_eq!(events(detect(&approximate).unwrap()), 0b10_0111);
    // A capability with more than this host counts is refused.
    let too_much = Options {
        capability: Some(detect(&approximate).unwrap()),
        kick: Some(Kick::Nothing),
        tsc_hz: Some(1),
        ..clock
    };
    let error = VcpuPmu::without_descriptors(too_much).unwrap_err();
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
    let Some(pmu) = attach(&machine, options()) else {
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
    assert_eq!(pmu.rdmsr(GLOBAL_STATUS), Some(Ok(1)), "on another");
}

/// Returns the PMU of a VMM with its own way to a vCPU. The clock counts the thread, so the thread is the guest.
fn clock(kick: Kick) -> Option<VcpuPmu> {
    possible(VcpuPmu::without_descriptors(Options {
        backing: Some(Backing::Clock),
        kick: Some(kick),
        tsc_hz: Some(1_000_000_000),
        ..options()
    }))
}

/// Counts to an overflow of counter 0 and takes its PMI.
fn one_overflow(pmu: &mut VcpuPmu) {
    assert_eq!(pmu.wrmsr(PMC0, MASK - 1_000_000), Some(Ok(())));
    let mut before = 0;
    let patience = Patience::new();
    while !pmu.pmi_is_due() {
        patience.check();
        pmu.before_run().unwrap();
        let now = pmu.rdpmc(0).unwrap();
        assert!(
            now >= before || now < MASK / 2,
            "{now:#x} after {before:#x}"
        );
        before = now;
        assert_eq!(pmu.after_run(), Ok(false), "no exit is known of");
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
        assert_eq!(pmu.wrmsr(index, value), Some(Ok(())));
    }
    assert_eq!(pmu.wrmsr(PERFEVTSEL0, 1 << 40), Some(Err(Gp)));
    assert_eq!(pmu.rdmsr(0x10), None, "the TSC is the VMM's");
    // On a busy machine, the read may find an overflow before its signal comes. The next round
    // tries again.
    let kicked = (0..1000).any(|_| {
        one_overflow(&mut pmu);
        flag.load(std::sync::atomic::Ordering::SeqCst) == KICKED
    });
    assert!(kicked);
    assert_eq!(pmu.rdpmc(9), Err(Gp));
    // Another host takes its place on the thread when it is gone, and goes on.
    let state = pmu.save();
    drop(pmu);
    let mut other = clock(Kick::Nothing).unwrap();
    other.restore(&state).unwrap();
    let again = other.save();
    assert_eq!(again, state, "nothing counts before it runs");
    other.before_run().unwrap();
    let PmuState::Intel(before) = state.pmu else {
        panic!("Intel's");
    };
    let patience = Patience::new();
    while other.rdpmc(0).unwrap() == before.pmc[0] {
        patience.check();
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
    let missing = VcpuPmu::without_descriptors(options()).unwrap_err();
    assert!(missing.to_string().ends_with("give it in Options"));
    let by = |signal| Options {
        signal: Some(signal),
        kick: Some(Kick::Nothing),
        tsc_hz: Some(1),
        ..options()
    };
    if possible(detect(&options())).is_none() {
        return;
    }
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
        let error = VcpuPmu::without_descriptors(by(signal)).unwrap_err();
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
        assert_eq!(pmu.wrmsr(msr, value), Some(Ok(())));
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
    assert_eq!(pmu.rdpmc(0), Ok(0));
    assert_eq!(pmu.counter_state(0), Some(CounterState::Paused));
}

#[test]
fn a_pmu_may_be_sent_to_a_thread() {
    fn may<T: Send>() {}
    may::<VcpuPmu>();
    may::<Options>();
}
