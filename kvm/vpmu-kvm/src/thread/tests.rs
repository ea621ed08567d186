//! A PMU on the perf events of a thread that runs no guest: the clock counts the thread, so the thread is the guest.
//!
//! Needs perf events. Without them, the tests say `skipped` on standard error.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use vpmu::counter::{Counter, CounterState};
use vpmu::x86::Outcome::{self, Done, GeneralProtection, NotHandled, Value};
use vpmu::x86::{PmuState, Ring, intel};
use vpmu_perf::PerfError;

use super::*;
use crate::lapic::Pmi;
use crate::offer::detect;
use crate::options::{Model, Perfmon};
use crate::pmu::tests::no_memory;
use crate::state::SavedPmu;
use crate::stats::Shared;

const PERFEVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_CTRL: u32 = 0x38f;
/// EN, INT, OS, USR, core cycles.
const CYCLES: u64 = 0x0053_003c;
/// An LVTPC.
const NMI: u32 = 0x400;
const MASK: u64 = (1 << 48) - 1;
const MODEL: Model = Model::Intel {
    version: Perfmon::V2,
    pebs: false,
};

/// Ends a test that hangs: thousands of times what any takes on an idle machine.
struct Patience(Instant);

impl Patience {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn check(&self) {
        assert!(self.0.elapsed() < Duration::from_secs(120), "a test hangs");
    }
}

/// Returns the result, or says that no PMU is available and returns `None`.
fn possible<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error @ Error::Perf(PerfError::Forbidden(_) | PerfError::NoPerf)) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn by_clock(approximate_instructions: bool) -> Options {
    Options {
        backing: Some(Backing::Clock),
        approximate_instructions,
        ..Options::default()
    }
}

/// The PMU and the perf events of a guest that has no vCPU.
struct Guest {
    pmu: VcpuPmu,
    thread: Thread,
    statistics: Shared,
}

impl Guest {
    fn new(pmu: &Pmu, options: &Options, kick: Kick) -> Result<Self, Error> {
        let statistics = Shared::new();
        Ok(Self {
            thread: Thread::new(pmu, options, kick)?,
            pmu: VcpuPmu::new(pmu, options.policy, no_memory(), statistics.clone())?,
            statistics,
        })
    }

    fn before_run(&mut self) -> Result<(), Error> {
        let host = |perf| Ok(PerfHost::new(perf)?);
        self.thread
            .before_run(&mut self.pmu, || Ok(1_000_000_000), host)
    }

    fn rdmsr(&mut self, index: u32) -> Outcome {
        self.pmu.take_overflows();
        self.pmu.rdmsr(index)
    }

    fn wrmsr(&mut self, index: u32, value: u64) -> Outcome {
        self.pmu.take_overflows();
        self.pmu.wrmsr(index, value)
    }

    fn rdpmc(&mut self, index: u32) -> Outcome {
        self.pmu.take_overflows();
        self.pmu.rdpmc(index, Ring::Kernel)
    }

    fn save(&mut self) -> SavedPmu {
        self.pmu.take_overflows();
        self.pmu.save()
    }
}

/// Returns the registers of Intel's PMU.
fn registers(state: SavedPmu) -> intel::PmuState {
    match state {
        SavedPmu::Architectural(_, PmuState::Intel(registers)) => registers,
        other @ (SavedPmu::Architectural(..) | SavedPmu::Paravirtual(_)) => panic!("{other:?}"),
    }
}

fn clock(kick: Kick) -> Option<Guest> {
    let options = by_clock(false);
    let offer = possible(detect(MODEL, &options))?;
    possible(Guest::new(&offer.pmu.unwrap(), &options, kick))
}

/// As where a guest comes from a host that counts more.
#[test]
fn a_capability_with_more_than_this_host_counts_is_refused() {
    let Some(offer) = possible(detect(MODEL, &by_clock(true))) else {
        return;
    };
    let clock = by_clock(false);
    let error = Guest::new(&offer.pmu.unwrap(), &clock, Kick::Nothing).err();
    assert!(matches!(error, Some(Error::Event(_))), "{error:?}");
}

fn value(outcome: Outcome) -> u64 {
    match outcome {
        Value(value) => value,
        other => panic!("{other:?}"),
    }
}

/// Counts to an overflow of counter 0 and takes its PMI.
fn one_overflow(pmu: &mut Guest) {
    assert_eq!(pmu.wrmsr(PMC0, MASK - 1_000_000), Done);
    let mut before = 0;
    let patience = Patience::new();
    while !pmu.pmu.pmi_is_due() {
        patience.check();
        pmu.before_run().unwrap();
        let now = value(pmu.rdpmc(0));
        assert!(
            now >= before || now < MASK / 2,
            "{now:#x} after {before:#x}"
        );
        before = now;
    }
    assert_eq!(pmu.pmu.take_pmi(NMI), Some(Pmi::Nmi));
    assert_eq!(pmu.pmu.take_pmi(NMI), None);
}

#[test]
fn a_pmu_counts_and_another_goes_on() {
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
        flag.load(Ordering::SeqCst) == KICKED
    });
    assert!(kicked);
    assert_eq!(pmu.rdpmc(9), GeneralProtection);
    // Another host takes its place on the thread when it is gone, and goes on.
    let state = pmu.save();
    drop(pmu);
    let mut other = clock(Kick::Nothing).unwrap();
    other.pmu.restore(&state).unwrap();
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
    let run_to_a_pmi = |pmu: &mut Guest| {
        let patience = Patience::new();
        while !pmu.pmu.pmi_is_due() {
            patience.check();
            pmu.before_run().unwrap();
        }
        assert_eq!(pmu.pmu.take_pmi(NMI), Some(Pmi::Nmi));
    };
    for _ in 0..3 {
        assert_eq!(pmu.wrmsr(PMC0, MASK - 10_000_000), Done);
        let (mut moved, state) = elsewhere(move || {
            let state = pmu.save();
            (pmu, state)
        });
        run_to_a_pmi(&mut moved);
        pmu = elsewhere(move || {
            moved.pmu.reset();
            moved.pmu.restore(&state).unwrap();
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
    let offer = offer.pmu.unwrap();
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
        let error = Guest::new(&offer, &options, Kick::Nothing).err().unwrap();
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
    while !pmu.pmu.pmi_is_due() {
        patience.check();
        pmu.before_run().unwrap();
    }
    pmu.pmu.reset();
    assert!(!pmu.pmu.pmi_is_due());
    assert_eq!(pmu.save(), fresh);
    pmu.before_run().unwrap();
    assert_eq!(pmu.rdpmc(0), Value(0));
    assert_eq!(
        pmu.pmu.counter_state(Counter::at::<0>()),
        Some(CounterState::Paused)
    );
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
        while pmu.statistics.lock().longest_stuck_ns < 50_000_000 {
            patience.check();
            assert!(value(pmu.rdpmc(0)) <= MASK);
            pmu.pmu.publish_all();
        }
        assert!(!pmu.pmu.pmi_is_due());
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
    let offer = offer.pmu.unwrap();
    let mut pmu = Guest::new(&offer, &options, Kick::Nothing).unwrap();
    signal_hook::flag::register(signal, Arc::default()).unwrap();
    let taken = Err(Error::Perf(PerfError::SignalTaken(signal)));
    assert_eq!(pmu.before_run(), taken);
}
