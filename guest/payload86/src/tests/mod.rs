//! The tests: lists of names and functions.

use vpmu_payload::bootargs::BootArgs;
use vpmu_payload::harness::{Failure, Tally, Verdict};

use crate::boot::Boot;
use crate::instructions::interruptible;
use crate::pmu::{Pmu, pass};
use crate::{percpu, ports};

mod access;
mod counting;
mod hostile;
mod identity;
mod interrupt;
mod overflow;
mod rdpmc;
mod register;

/// What a test works with.
#[derive(Clone, Copy)]
pub(crate) struct Context {
    pmu: Pmu,
}

/// A test's name and what it does. It finds the PMU reset and interrupts
/// masked, and need not clean up.
type Test = (&'static str, fn(&Context) -> Verdict);

/// The first finds the PMU out of reset.
const LISTS: &[&[Test]] = &[
    identity::TESTS,
    register::TESTS,
    access::TESTS,
    counting::TESTS,
    overflow::TESTS,
    rdpmc::TESTS,
    interrupt::TESTS,
    hostile::TESTS,
];

/// Long enough for an interrupt that waits, cycles.
const DRAIN: u64 = 10_000;

/// Runs what the command line asks for.
pub(crate) fn run(boot: &Boot, command_line: &str) {
    let _ = boot;
    let arguments = BootArgs::parse(command_line);
    let mut tally = Tally::default();
    register::note_reset();
    for (name, test) in LISTS.iter().copied().flatten() {
        if !arguments.selects(name) {
            continue;
        }
        let verdict = prepare().and_then(|context| test(&context));
        // The serial port takes everything.
        let _ = tally.record(&mut ports::Serial, ("", name), &verdict, arguments.strict);
    }
    ports::print(format_args!("{tally}\n"));
}

/// What every test finds.
fn prepare() -> Result<Context, Failure> {
    let pmu = Pmu::identify()?;
    pmu.reset()?;
    // Nothing of the last test must disturb what follows.
    interruptible(|| pass(DRAIN));
    percpu::this().reset();
    Ok(Context { pmu })
}
