//! Tests of what a VMM may change or lack: the TSC's rate, and descriptors.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::ClockId;
use rustix::time::clock_gettime;

use super::guest::{Code, MODEL, Machine};
use super::{CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Port, attach, possible, run, try_attach};
use vpmu_kvm::{
    AfterRun, Backing, Counter, CounterState, Error, Offer, Options, PerfError, Vcpu, detect,
};

/// The variable that says that this process is the one with a limit.
const CHILD: &str = "VPMU_LIMITS_CHILD";

fn by_clock() -> Options {
    Options {
        backing: Some(Backing::Clock),
        ..Options::default()
    }
}

fn time_on_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Lets the guest spin for so long of this thread's time.
fn spin(machine: &mut Machine, pmu: &mut Vcpu, time: Duration) {
    let end = time_on_cpu() + time;
    run(machine, pmu, |port| match port {
        Port::In(data) => {
            data[0] = 0;
            time_on_cpu() >= end
        }
        Port::Out(..) => true,
    });
}

/// A guest that counts cycles by a clock counts twice as many where its TSC is twice as fast, whenever the rate is set.
#[test]
fn a_rate_of_the_tsc_that_is_set_after_attach_is_seen() {
    let code = Code::default()
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(GLOBAL_CTRL, 1)
        // As spin_until_told, with more exits: a slice ends after some.
        .ecx(2_000)
        .bytes(&[0xff, 0xc9, 0x75, 0xfc, 0xe4, 0x14, 0x84, 0xc0, 0x74, 0xf1]);
    let Some(mut machine) = Machine::new(code, NMI) else {
        return;
    };
    let Some(mut pmu) = attach(&machine, MODEL, &by_clock()) else {
        return;
    };
    // The first rate is set before the first run, the second while the vCPU runs on its thread.
    for khz in [2 * machine.tsc_khz, 4 * machine.tsc_khz] {
        if let Err(error) = machine.vcpu.set_tsc_khz(khz) {
            eprintln!("skipped: this KVM cannot give a TSC another rate: {error}");
            return;
        }
        // Longer than a slice, at whose end the rate is looked at.
        spin(&mut machine, &mut pmu, Duration::from_millis(300));
        let mut measure = || {
            let before = (pmu.msr(PMC0).unwrap(), time_on_cpu());
            spin(&mut machine, &mut pmu, Duration::from_millis(200));
            let cycles = (pmu.msr(PMC0).unwrap() - before.0) as f64;
            let ms = (time_on_cpu() - before.1).as_secs_f64() * 1e3;
            cycles / ms / f64::from(khz)
        };
        // Where the machine stands still between two readings they are of different times. With the rate of before, each is
        // a half.
        let mut found: Vec<f64> = Vec::new();
        while found.last().is_none_or(|found| !(0.7..1.3).contains(found)) {
            assert!(found.len() < 5, "{khz} kHz: {found:?}");
            found.push(measure());
        }
    }
}

/// Attaches a lazy deadline, and no PMU.
fn attach_deadline(machine: &Machine) -> Vcpu {
    let offer = Offer {
        deadline: true,
        ..Offer::default()
    };
    let (memory, options) = (Arc::new(machine.memory.clone()), Options::default());
    Vcpu::attach(&machine.vm, &machine.vcpu, &offer, &options, memory).unwrap()
}

/// A lazy deadline's timer counts the host's time.
#[test]
fn a_deadline_refuses_a_rate_that_is_set_after_attach() {
    let code = Code::default().wrmsr(vpmu_kvm::DEADLINE_MSR, 1 << 60);
    let Some(mut machine) = Machine::with_deadline(code) else {
        return;
    };
    let khz = 2 * machine.tsc_khz;
    let mut vcpu = attach_deadline(&machine);
    if let Err(error) = machine.vcpu.set_tsc_khz(khz) {
        eprintln!("skipped: this KVM cannot give a TSC another rate: {error}");
        return;
    }
    // The first run exits with the write, which the second acts upon.
    assert_eq!(vcpu.before_run(), Ok(()));
    let _ = machine.vcpu.run();
    assert_eq!(vcpu.after_run(), Ok(AfterRun::Completed));
    let refused = vcpu.before_run().unwrap_err();
    assert!(!refused.is_fatal());
    let expected = Error::ScaledTsc {
        guest: khz,
        host: machine.tsc_khz,
    };
    assert_eq!(refused, expected);
    // The write is not lost.
    machine.vcpu.set_tsc_khz(machine.tsc_khz).unwrap();
    assert_eq!(vcpu.before_run(), Ok(()));
    assert_eq!(vcpu.deadline().unwrap().statistics().writes, 1);
    // And a reset leaves nothing of it.
    vcpu.reset();
    assert_eq!(vcpu.msr(vpmu_kvm::DEADLINE_MSR), Some(0));
}

#[test]
fn a_deadline_refuses_a_rate_that_was_set_before_attach() {
    let code = Code::default().wrmsr(vpmu_kvm::DEADLINE_MSR, 1 << 60);
    let Some(mut machine) = Machine::with_deadline(code) else {
        return;
    };
    let khz = 2 * machine.tsc_khz;
    if let Err(error) = machine.vcpu.set_tsc_khz(khz) {
        eprintln!("skipped: this KVM cannot give a TSC another rate: {error}");
        return;
    }
    let mut vcpu = attach_deadline(&machine);
    assert_eq!(vcpu.before_run(), Ok(()));
    let _ = machine.vcpu.run();
    assert_eq!(vcpu.after_run(), Ok(AfterRun::Completed));
    let Err(Error::ScaledTsc { guest, host }) = vcpu.before_run() else {
        panic!("a timer of the host's nanoseconds for a TSC that is twice as fast");
    };
    assert_eq!(guest, khz);
    assert!(
        host.abs_diff(machine.tsc_khz) < machine.tsc_khz / 1000,
        "{host}"
    );
}

/// The limit of open files is an error when a vCPU is made, and not when its guest first counts. Runs in a process of its own.
#[test]
fn a_vcpu_whose_counters_would_find_no_descriptors_is_refused() {
    if std::env::var_os(CHILD).is_none() {
        let own = std::env::current_exe().unwrap();
        let name = "limits::a_vcpu_whose_counters_would_find_no_descriptors_is_refused";
        let child = Command::new(own)
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{child:?}");
        eprint!("{}", String::from_utf8_lossy(&child.stderr));
        return;
    }
    if possible(detect(MODEL, &by_clock())).is_none() {
        return;
    }
    let limit = |files| {
        let all = getrlimit(Resource::Nofile);
        let files = Rlimit {
            current: Some(files),
            ..all
        };
        setrlimit(Resource::Nofile, files).unwrap();
    };
    limit(120);
    let mut vcpus = Vec::new();
    let refused = loop {
        let Some(machine) = Machine::new(counting_with_all(), NMI) else {
            return;
        };
        match try_attach(&machine, MODEL, &by_clock()) {
            Ok(vcpu) => vcpus.push((machine, vcpu)),
            Err(error) => break error,
        }
        assert!(vcpus.len() < 20);
    };
    assert!(vcpus.len() > 2, "{}", vcpus.len());
    let Error::Perf(PerfError::Descriptors { limit: 120, .. }) = refused else {
        panic!("{refused}");
    };
    assert!(refused.to_string().contains("RLIMIT_NOFILE"), "{refused}");
    // Those that were taken count with each of their counters, all at one time.
    let threads = vcpus.into_iter().map(|(mut machine, mut vcpu)| {
        std::thread::spawn(move || {
            machine.set_cpuid(&vcpu.offer());
            run(&mut machine, &mut vcpu, |_| true);
            let states = (0..4).map(|n| vcpu.counter_state(Counter::new(n).unwrap()).unwrap());
            let states: Vec<CounterState> = states.collect();
            assert_eq!(states, [CounterState::Counting; 4]);
            (machine, vcpu)
        })
    });
    let threads: Vec<_> = threads.collect();
    for thread in threads {
        drop(thread.join().unwrap());
    }
    limit(200);
    let machine = Machine::new(Code::default(), NMI).unwrap();
    assert!(try_attach(&machine, MODEL, &by_clock()).is_ok());
}

/// Counts cycles with each general counter, and reports.
fn counting_with_all() -> Code {
    let code = (0..4).fold(Code::default(), |code, n| {
        code.wrmsr(PERFEVTSEL0 + n, CYCLES)
    });
    code.wrmsr(GLOBAL_CTRL, 0xf).out(super::guest::REPORT)
}
