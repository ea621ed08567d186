//! The tests: lists of names and functions, run on every CPU in turn.

// UNSAFETY: other CPUs find the boot loader's data through a pointer.
#![expect(unsafe_code, reason = "other CPUs find the machine by a pointer")]

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use vpmu_payload_harness::BootArgs;
use vpmu_payload_harness::{Failure, Pass, Tally, Verdict};

use crate::boot::Boot;
use crate::instructions::interruptible;
use crate::pmu::{Pmu, pass};
use crate::smp::{self, Job};
use crate::{percpu, ports};

mod access;
mod amd;
mod counting;
mod deadline;
mod hostile;
mod identity;
mod interrupt;
mod isolation;
mod native;
mod overflow;
mod paravirt;
mod pebs;
mod rdpmc;
mod register;
mod svm;

/// The values with which a test works.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    pmu: Pmu,
    boot: &'static Boot,
}

/// A test's name and function. The test finds the PMU reset and interrupts
/// masked, and need not clean up.
type Test = (&'static str, fn(&Context) -> Verdict);

/// Tests that run on every CPU.
const EVERY_CPU: &[&[Test]] = &[
    identity::TESTS,
    register::TESTS,
    access::TESTS,
    counting::TESTS,
    overflow::TESTS,
    rdpmc::TESTS,
    interrupt::TESTS,
    pebs::TESTS,
    hostile::TESTS,
    deadline::TESTS,
];

/// Tests that run on every CPU of AMD's, in place of these.
const EVERY_AMD_CPU: &[&[Test]] = &[amd::TESTS];

/// Tests that run on every CPU of AMD's whose own PMU it is, before these.
const EVERY_NATIVE_AMD_CPU: &[&[Test]] = &[native::TESTS, svm::TESTS];

/// Tests that run on the boot CPU, while another CPU works.
const BOOT_CPU: &[&[Test]] = &[isolation::TESTS];

/// Cycles, enough for an interrupt that waits.
const DRAIN: u64 = 10_000;

/// The values with which every CPU works.
struct Machine {
    boot: Boot,
    arguments: BootArgs<'static>,
}

static MACHINE: AtomicPtr<Machine> = AtomicPtr::new(ptr::null_mut());
static TALLY: Tally = Tally::new();

/// Runs the tests that the command line selects, on the boot CPU.
pub(crate) fn run(boot: Boot, command_line: &'static str) {
    let arguments = BootArgs::parse(command_line);
    let mut machine = Machine { boot, arguments };
    MACHINE.store(&raw mut machine, Relaxed);
    if paravirt::is_offered() {
        run_paravirt();
        return;
    }
    run_every_cpus(0);
    for cpu in 1..boot.cpus {
        let started = smp::start(&boot, cpu).map(|()| Pass::Ok);
        record(cpu, "start", &started);
        if started.is_ok() {
            smp::hand_out(&boot, cpu, Job::Tests);
            if machine.arguments.busy {
                while !smp::is_done(cpu) {
                    core::hint::spin_loop();
                }
            }
            smp::wait_for(cpu);
        }
    }
    if !amd::is_here() {
        run_lists(BOOT_CPU, 0);
    }
    ports::print(format_args!("{TALLY}\n"));
}

/// Runs the tests of a PMU that stands in for all registers.
fn run_paravirt() {
    for (name, test) in paravirt::TESTS {
        if machine().arguments.selects(name) {
            record(0, name, &test());
        }
    }
    ports::print(format_args!("{TALLY}\n"));
}

pub(crate) use paravirt::acknowledge as acknowledge_page;

/// Does `work` on another CPU.
pub(crate) fn on_other_cpu(cpu: usize, work: Job) {
    match work {
        Job::None | Job::Start => {}
        Job::Tests => run_every_cpus(cpu),
        // The check finds the values that the CPU had before it was started
        // again.
        Job::CheckFilled => {
            let left = context().and_then(|context| register::check_filled(&context));
            isolation::note(cpu, &left);
        }
        Job::Fill => {
            let filled = prepare().and_then(|context| register::fill(&context));
            isolation::note(cpu, &filled);
        }
        Job::Disturb | Job::Storm | Job::Work => {
            let done = prepare().and_then(|context| isolation::next_door(&context, work));
            isolation::note(cpu, &done);
            // The job's leftovers must not disturb the following work.
            let _ = prepare();
        }
    }
}

/// Returns the boot CPU's APIC identifier.
pub(crate) fn boot_cpu_id() -> u8 {
    machine().boot.apic_ids[0]
}

fn machine() -> &'static Machine {
    // SAFETY: stored before anything else; `run` outlives all tests.
    unsafe { &*MACHINE.load(Relaxed) }
}

/// Runs the tests for every CPU, with the PMU that this CPU has.
fn run_every_cpus(cpu: usize) {
    if amd::is_here() {
        amd::note_reset();
        if machine().boot.native {
            run_lists(EVERY_NATIVE_AMD_CPU, cpu);
        }
        run_lists(EVERY_AMD_CPU, cpu);
    } else {
        register::note_reset();
        run_lists(EVERY_CPU, cpu);
    }
}

fn run_lists(lists: &[&[Test]], cpu: usize) {
    for (name, test) in lists.iter().copied().flatten() {
        if machine().arguments.selects(name) {
            let verdict = prepare().and_then(|context| test(&context));
            record(cpu, name, &verdict);
        }
    }
    // The last test's leftovers must not disturb the following work. The next CPU must not find the values that AMD's
    // last test leaves.
    if !amd::is_here() {
        let _ = prepare();
    }
}

fn record(cpu: usize, name: &str, verdict: &Verdict) {
    let strict = machine().arguments.strict;
    // The serial port accepts every byte.
    let _ = TALLY.record(&mut ports::Serial, (cpu, name), verdict, strict);
}

/// Prepares the state that every test finds.
fn prepare() -> Result<Context, Failure> {
    if amd::is_here() {
        amd::reset()?;
    } else {
        Pmu::identify()?.reset()?;
    }
    // The last test's leftovers must not disturb the following work.
    interruptible(|| pass(DRAIN));
    percpu::this().reset();
    context()
}

fn context() -> Result<Context, Failure> {
    let pmu = Pmu::identify()?;
    let boot = &machine().boot;
    Ok(Context { pmu, boot })
}
