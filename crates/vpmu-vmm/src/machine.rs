//! The machine: memory, processors, threads, and its account.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use kvm_ioctls::VmFd;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR2};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};
use vpmu_kvm::{Backing, Capability};

use super::deadline::{self, Deadline};
use super::host::Snapshot;
use super::ports::Ports;
use super::stats;
use super::vcpu::Vcpu;
use super::{Ending, Error, PmuOptions};
use vpmu_kvm::Statistics;

/// What the vCPUs' threads share.
pub(super) struct Machine {
    pub(super) vm: VmFd,
    pub(super) stop: AtomicBool,
    /// Whether the guest may have it saved.
    pub(super) saves: bool,
    ports: Mutex<Ports<io::Stdout>>,
    accounts: Mutex<Vec<Arc<Mutex<Statistics>>>>,
    deadlines: Vec<Deadline>,
    measure: Mutex<Measure>,
    /// Each vCPU's.
    pmu: Mutex<Option<(Capability, Backing)>>,
}

#[derive(Default)]
struct Measure {
    begin: Option<(Statistics, Snapshot)>,
    span: Option<(Statistics, Snapshot, Snapshot)>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    pub(super) fn new(vm: VmFd, ports: Ports<io::Stdout>, vcpus: &[Vcpu], saves: bool) -> Self {
        Self {
            vm,
            stop: AtomicBool::new(false),
            saves,
            ports: Mutex::new(ports),
            accounts: Mutex::default(),
            deadlines: vcpus
                .iter()
                .filter_map(|vcpu| vcpu.deadline.clone())
                .collect(),
            measure: Mutex::default(),
            pmu: Mutex::default(),
        }
    }

    pub(super) fn ports(&self) -> MutexGuard<'_, Ports<io::Stdout>> {
        locked(&self.ports)
    }

    pub(super) fn add_account(&self, account: Arc<Mutex<Statistics>>) {
        locked(&self.accounts).push(account);
    }

    pub(super) fn say_pmu(&self, capability: Capability, backing: Backing) {
        *locked(&self.pmu) = Some((capability, backing));
    }

    pub(super) fn begin_measuring(&self) {
        *locked(&self.measure) = Measure {
            begin: Some((self.total(), Snapshot::take())),
            span: None,
        };
    }

    pub(super) fn end_measuring(&self) {
        let now = Snapshot::take();
        let mut measure = locked(&self.measure);
        if let Some((before, begin)) = measure.begin.take() {
            measure.span = Some((self.total().since(&before), begin, now));
        }
    }

    /// Whether a measurement is under way.
    pub(super) fn measures(&self) -> bool {
        locked(&self.measure).begin.is_some()
    }

    fn total(&self) -> Statistics {
        let mut total = Statistics::default();
        for account in locked(&self.accounts).iter() {
            total.add(&locked(account));
        }
        for deadline in &self.deadlines {
            total.add_deadline(&deadline.statistics());
        }
        total
    }

    /// What it cost, as JSON.
    pub(super) fn report(&self, pmu: Option<PmuOptions>) -> serde_json::Value {
        let measure = locked(&self.measure);
        let span = measure.span.as_ref();
        let (capability, backing) = locked(&self.pmu).unzip();
        let backing = backing.map(|backing| match backing {
            Backing::Hardware => "hardware",
            Backing::Clock => "clock",
        });
        let policy = pmu.map(|pmu| match pmu.policy {
            vpmu::counter::Policy::Recreate => "recreate",
            vpmu::counter::Policy::Reuse => "reuse",
            vpmu::counter::Policy::ReusePaused => "paused",
        });
        serde_json::json!({"vpmu-vmm": {
            "policy": policy.unwrap_or("none"),
            "backing": backing,
            "pmu_version": capability.map(|it| it.version.number()),
            "general": capability.map(|it| it.general),
            "fixed": capability.map(|it| it.fixed.count_ones()),
            "measured": span.map(|(span, ..)| stats::to_json(span)),
            "total": stats::to_json(&self.total()),
            "host": span.map(|(_, begin, end)| serde_json::json!({
                "begin": begin.to_json(),
                "end": end.to_json(),
            })),
        }})
    }
}

/// Runs the vCPUs, the serial line on standard input and output, until the guest ends or a signal
/// comes. Nothing is left running. Gives the vCPUs back, with no exit waiting for its completion.
pub(super) fn run(
    machine: &Arc<Machine>,
    vcpus: Vec<Vcpu>,
    pmu: Option<PmuOptions>,
) -> Result<(Ending, Vec<Vcpu>), Error> {
    // Takes a vCPU out of the guest. That it has come is all.
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), nothing)
        .map_err(|error| Error::Os("sigaction", error.into()))?;
    let (ending, ended) = mpsc::channel();

    let known = [SIGINT, SIGTERM, SIGUSR2];
    let known = &known[..if machine.saves { 3 } else { 2 }];
    let mut signals =
        signal_hook::iterator::Signals::new(known).map_err(|error| Error::Os("signals", error))?;
    let closer = signals.handle();
    // A second one ends the process as it would without a handler: a console that nobody reads from
    // cannot keep it.
    let stopping = Arc::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stopping))
            .map_err(|error| Error::Os("signals", error))?;
    }
    let interrupted = ending.clone();
    let signals = thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _ = interrupted.send(Ok(match signal {
                SIGUSR2 => Ending::Saved,
                _ => Ending::Interrupted,
            }));
        }
    });
    let input = Arc::downgrade(machine);
    // Ends with the process: nothing can take it out of read().
    thread::spawn(move || {
        let mut byte = [0];
        while matches!(io::stdin().read(&mut byte), Ok(1)) {
            loop {
                let Some(machine) = input.upgrade() else {
                    return;
                };
                if machine.ports().receive(&byte) == 1 {
                    break;
                }
                drop(machine);
                thread::sleep(Duration::from_millis(1));
            }
        }
    });

    let timers: Vec<_> = machine
        .deadlines
        .iter()
        .map(|deadline| deadline::spawn(machine, deadline, &ending))
        .collect();
    let threads: Vec<_> = vcpus
        .into_iter()
        .map(|mut vcpu| {
            let (machine, ending) = (Arc::clone(machine), ending.clone());
            thread::Builder::new()
                .name(format!("vcpu{}", vcpu.id))
                .spawn(move || {
                    let ending = Vital(ending);
                    let _ = ending.0.send(vcpu.run(&machine, pmu));
                    vcpu
                })
        })
        .collect();
    drop(ending);
    let failed = threads
        .iter()
        .filter_map(|thread| thread.as_ref().err())
        .chain(timers.iter().filter_map(|thread| thread.as_ref().err()))
        .map(|error| io::Error::new(error.kind(), error.to_string()))
        .next();
    let mut end = match failed {
        Some(error) => Err(Error::Os("thread", error)),
        None => ended.recv().unwrap_or(Ok(Ending::Interrupted)),
    };
    stopping.store(true, Ordering::Relaxed);
    machine.stop.store(true, Ordering::Relaxed);
    // All of them, whatever has become of one.
    let vcpus: Vec<_> = threads
        .into_iter()
        .flatten()
        .map(|thread| join(machine, thread))
        .collect();
    let timers: Vec<_> = timers
        .into_iter()
        .flatten()
        .map(|thread| join(machine, thread))
        .collect();
    closer.close();
    let _ = signals.join();
    let _ = machine.ports().console().flush();
    // A guest that has ended in the meantime has nothing to be saved.
    if matches!(end, Ok(Ending::Saved)) {
        let others = ended.try_iter();
        let mut others =
            others.filter(|other| !matches!(other, Ok(Ending::Saved | Ending::Interrupted)));
        end = others.next().unwrap_or(end);
    }
    let end = end?;
    timers.into_iter().collect::<Result<(), _>>()?;
    Ok((end, vcpus.into_iter().collect::<Result<_, _>>()?))
}

/// A thread whose panic ends the machine, as its error would.
pub(super) struct Vital(pub(super) Sender<Result<Ending, Error>>);

impl Drop for Vital {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.send(Err(Error::Panicked));
        }
    }
}

/// Waits for a thread that is to stop.
fn join<T>(machine: &Machine, thread: thread::JoinHandle<T>) -> Result<T, Error> {
    // Again and again: one that comes just before the guest is entered is not seen there.
    while !thread.is_finished() {
        let _ = thread.kill(SIGRTMIN());
        machine
            .deadlines
            .iter()
            .for_each(|deadline| deadline.wake());
        thread::sleep(Duration::from_millis(1));
    }
    thread.join().map_err(|_| Error::Panicked)
}
