//! The tests: lists of names and functions, run on every CPU in turn.
//!
//! One CPU runs at a time; the others are off, or halted in WFI (an emulator
//! that counts instructions may count those of all CPUs).

// UNSAFETY: the other CPUs find the machine through a pointer.
#![expect(unsafe_code, reason = "the other CPUs find the machine by a pointer")]

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::gic::{self, Gic};
use crate::machine::Machine;
use crate::pmu::Pmu;
use crate::{percpu, uart};
use vpmu_payload_harness::BootArgs;
use vpmu_payload_harness::{Failure, Tally, Verdict};

mod aarch32;
mod access;
mod attack;
mod counting;
mod el2;
mod filter;
mod firmware;
mod frame;
mod fuzz;
mod interrupt;
mod keeps;
mod memory;
mod mixed;
mod neighbour;
mod nothing;
mod offer;
mod overflow;
mod pending;
mod register;
mod sgi;
mod stray;
mod user;
mod wfi;

/// The values with which a test works.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    machine: &'static Machine<'static>,
    pmu: Pmu,
    gic: Gic,
}

/// A test's name and function. The test finds the PMU reset and all interrupts
/// disabled and masked, and need not clean up.
type Test = (&'static str, fn(&Context) -> Verdict);

/// Tests that run on every CPU.
const EVERY_CPU: &[&[Test]] = &[
    register::TESTS,
    offer::TESTS,
    access::TESTS,
    user::TESTS,
    aarch32::TESTS,
    counting::TESTS,
    filter::TESTS,
    overflow::TESTS,
    interrupt::TESTS,
    mixed::TESTS,
    sgi::TESTS,
    pending::TESTS,
    frame::TESTS,
    nothing::TESTS,
];

/// Tests that run on the other CPUs, and that the boot CPU answers.
const OTHER_CPUS: &[&[Test]] = &[sgi::ANSWERED];

/// Tests that run on the boot CPU. They start the others.
const BOOT_CPU: &[&[Test]] = &[memory::TESTS, firmware::TESTS, pending::BOOT_CPU];

static MACHINE: AtomicPtr<Machine<'static>> = AtomicPtr::new(ptr::null_mut());
static TALLY: Tally = Tally::new();

/// SGI by which a CPU says that its tests are done.
pub(crate) const DONE: u32 = 15;
/// SGI by which a CPU asks the boot CPU for SGIs.
pub(crate) const ASK: u32 = 14;
/// Number of SGIs that the boot CPU then sends: more than a monitor has list
/// registers.
pub(crate) const ANSWERS: u32 = 14;

/// Runs the tests that the command line selects, on the boot CPU.
pub(crate) fn run(mut machine: Machine<'static>) {
    MACHINE.store(&raw mut machine, Relaxed);
    let arguments = BootArgs::parse(machine.bootargs);
    match arguments.test {
        Some(name) if name.starts_with("el2.") => run_lists(&[el2::TESTS], 0),
        Some("fuzzregs") => run_lists(&[fuzz::TESTS], 0),
        Some("attack.its") => run_lists(&[attack::ITS], 0),
        Some("attack.lpi") => run_lists(&[attack::LPI], 0),
        Some("storm") => run_lists(&[neighbour::STORM], 0),
        Some(name) if name.starts_with("switch.") => run_switch(),
        Some("stray") => run_lists(&[stray::TESTS], 0),
        Some("hang") => stray::hang(),
        _ => {
            run_lists(EVERY_CPU, 0);
            run_lists(BOOT_CPU, 0);
        }
    }
    uart::print(format_args!("{TALLY}\n"));
}

/// Runs the tests for every CPU on CPU `index`.
pub(crate) fn run_secondary(index: usize) {
    percpu::this().note_start(gic::now());
    let machine = context_machine();
    let test = BootArgs::parse(machine.bootargs).test;
    if test == Some("storm") {
        neighbour::storm_at(Gic::for_this_cpu(machine));
    }
    if let Some(name) = test.filter(|name| name.starts_with("switch.")) {
        let verdict = neighbour::beside(machine);
        let _ = TALLY.record(&mut uart::Uart, (index, name), &verdict, false);
        gic::send(DONE, machine.cpus[0]);
        return;
    }
    if pending::leave_behind(context_machine()) {
        return;
    }
    run_lists(OTHER_CPUS, index);
    run_lists(EVERY_CPU, index);
    gic::send(DONE, context_machine().cpus[0]);
}

fn context_machine() -> &'static Machine<'static> {
    // SAFETY: stored before anything else; `run` outlives all tests.
    unsafe { &*MACHINE.load(Relaxed) }
}

fn run_lists(lists: &[&[Test]], cpu: usize) {
    let machine = context_machine();
    let arguments = BootArgs::parse(machine.bootargs);
    for (name, test) in lists.iter().copied().flatten() {
        if arguments.selects(name) {
            let verdict = prepare(machine).and_then(|context| test(&context));
            // The UART accepts every byte.
            let _ = TALLY.record(&mut uart::Uart, (cpu, name), &verdict, arguments.strict);
        }
    }
    // The last test's leftovers must not disturb the following work.
    let _ = prepare(machine);
}

/// Runs the selected test of [`neighbour::SWITCH`].
fn run_switch() {
    let machine = context_machine();
    let arguments = BootArgs::parse(machine.bootargs);
    for (name, test) in neighbour::SWITCH {
        if arguments.test == Some(*name) {
            let verdict = test(machine);
            let _ = TALLY.record(&mut uart::Uart, (0, name), &verdict, arguments.strict);
        }
    }
}

/// Prepares the state that every test finds.
fn prepare(machine: &'static Machine<'static>) -> Result<Context, Failure> {
    let pmu = Pmu::identify()?;
    pmu.reset()?;
    gic::stop_timer();
    gic::set_split_end(false);
    let gic = Gic::for_this_cpu(machine);
    percpu::this().reset();
    Ok(Context { machine, pmu, gic })
}
