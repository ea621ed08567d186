//! The threads of a machine: vCPUs, deadlines, signals and the serial line's input.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR2};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};
use vpmu_kvm::Deadline;

use super::machine::Machine;
use super::vcpu::Vcpu;
use super::{Ending, Error};

type Ended = Result<Ending, Error>;

/// Runs the vCPUs, the serial line on standard input and output, until the guest ends or a signal
/// comes: SIGINT, SIGTERM, and where it `saves` SIGUSR2. Nothing is left running. Returns the
/// vCPUs, with no exit waiting for its completion.
pub(super) fn run(
    machine: &Arc<Machine>,
    vcpus: Vec<Vcpu>,
    saves: bool,
) -> Result<(Ending, Vec<Vcpu>), Error> {
    // Takes a vCPU out of the guest by its arrival. The handler itself does nothing.
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), nothing)
        .map_err(|error| Error::Os("sigaction", error.into()))?;
    let (ending, ended) = mpsc::channel();
    let signals = Signals::watch(&ending, saves)?;
    feed_input(machine);

    // No vCPU runs before each has its thread: a guest goes on whole or not at all.
    let start = Arc::new(OnceLock::new());
    let timers = machine.deadlines.iter().map(|deadline| {
        let (machine, deadline) = (Arc::clone(machine), Arc::clone(deadline));
        let start = Arc::clone(&start);
        spawn("deadline".to_owned(), &ending, move |ending| {
            if *start.wait()
                && let Err(error) = serve(&machine, &deadline)
            {
                let _ = ending.send(Err(error));
            }
        })
    });
    let timers: Vec<_> = timers.collect();
    let threads = vcpus.into_iter().map(|mut vcpu| {
        let (machine, start) = (Arc::clone(machine), Arc::clone(&start));
        spawn(format!("vcpu{}", vcpu.id), &ending, move |ending| {
            if *start.wait() {
                let _ = ending.send(vcpu.run(&machine));
            }
            vcpu
        })
    });
    let threads: Vec<_> = threads.collect();
    drop(ending);

    let is_whole = timers.iter().all(Option::is_some) && threads.iter().all(Option::is_some);
    let _ = start.set(is_whole);
    // Where a thread is missing, its error has been sent.
    let end = ended.iter().find(|end| is_whole || end.is_err());
    let mut end = end.unwrap_or(Ok(Ending::Interrupted));
    // A guest that is saved is lost with the process.
    if !matches!(end, Ok(Ending::Saved)) {
        signals.stopping.store(true, Ordering::Relaxed);
    }
    machine.stop.store(true, Ordering::Relaxed);
    // All vCPUs are collected, whatever happened to one.
    let vcpus = threads.into_iter().flatten();
    let vcpus: Vec<_> = vcpus.map(|thread| join(machine, thread)).collect();
    let timers = timers.into_iter().flatten();
    let timers: Vec<_> = timers.map(|thread| join(machine, thread)).collect();
    signals.end();
    let _ = machine.ports().console().flush();
    // A guest that has ended in the meantime cannot be saved.
    if matches!(end, Ok(Ending::Saved)) {
        let mut others = ended.try_iter();
        let ended = |it: &Ended| !matches!(it, Ok(Ending::Saved | Ending::Interrupted));
        end = others.find(ended).unwrap_or(end);
    }
    let end = end?;
    timers.into_iter().collect::<Result<(), _>>()?;
    Ok((end, vcpus.into_iter().collect::<Result<_, _>>()?))
}

/// Spawns a thread that reports how the machine ends, if that thread knows first. Where there can be none, that is reported.
fn spawn<T: Send + 'static>(
    name: String,
    ending: &Sender<Ended>,
    body: impl FnOnce(&Sender<Ended>) -> T + Send + 'static,
) -> Option<JoinHandle<T>> {
    let vital = Vital(ending.clone());
    let thread = thread::Builder::new()
        .name(name)
        .spawn(move || body(&vital.0));
    let failed = |error| ending.send(Err(Error::Os("thread", error)));
    thread.map_err(failed).ok()
}

/// The thread that takes the process's signals.
struct Signals {
    handle: signal_hook::iterator::Handle,
    thread: JoinHandle<()>,
    /// Once set, a signal ends the process as it would without a handler, so that a console that nobody reads from cannot
    /// keep the process. The first SIGINT or SIGTERM sets it.
    stopping: Arc<AtomicBool>,
}

impl Signals {
    fn watch(ending: &Sender<Ended>, saves: bool) -> Result<Self, Error> {
        let error = |error| Error::Os("signals", error);
        let known = [SIGINT, SIGTERM, SIGUSR2];
        let known = &known[..if saves { 3 } else { 2 }];
        let mut signals = signal_hook::iterator::Signals::new(known).map_err(error)?;
        let handle = signals.handle();
        let stopping = Arc::default();
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stopping))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stopping)))
                .map_err(error)?;
        }
        let ending = ending.clone();
        let thread = thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let _ = ending.send(Ok(match signal {
                    SIGUSR2 => Ending::Saved,
                    _ => Ending::Interrupted,
                }));
            }
        });
        Ok(Self {
            handle,
            thread,
            stopping,
        })
    }

    fn end(self) {
        self.handle.close();
        let _ = self.thread.join();
    }
}

/// Waits for the expiries of one vCPU's timer until the machine stops and the timer is woken.
fn serve(machine: &Machine, deadline: &Deadline) -> Result<(), Error> {
    run_at_once();
    loop {
        deadline
            .wait()
            .map_err(|error| Error::Os("timerfd", error))?;
        if machine.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        deadline.expire()?;
    }
}

/// Makes this thread run as soon as its timer expires, before vCPUs that want the same processor,
/// as a timer of KVM's own would. Where that is not permitted, deadlines come later on a busy host.
#[expect(unsafe_code, reason = "no safe wrapper")]
fn run_at_once() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
}

/// Gives standard input to the guest's serial line. Its thread ends with the process, because
/// nothing can take it out of read().
fn feed_input(machine: &Arc<Machine>) {
    let input = Arc::downgrade(machine);
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
}

/// A thread whose panic ends the machine, as its error would.
struct Vital(Sender<Ended>);

impl Drop for Vital {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.send(Err(Error::Panicked));
        }
    }
}

/// Waits for a thread that is about to stop.
fn join<T>(machine: &Machine, thread: JoinHandle<T>) -> Result<T, Error> {
    // The signal is sent again and again, because one that comes just before the guest is entered
    // is not seen there.
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
