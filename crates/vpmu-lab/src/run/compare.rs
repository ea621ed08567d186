//! The same command under several designs, side by side.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use crate::host::cancel::Cancel;
use crate::host::parallel;
use crate::host::progress::{Progress, Task};
use crate::image::cache::Cache;
use crate::image::images::Images;
use crate::image::job::Output;
use crate::report::result::Row;
use crate::run::experiment::{Experiment, Sink};
use crate::run::supervise::Stage;
use crate::spec::design::{Design, Pmu};
use crate::{Error, Result};

/// What came of all.
#[derive(Debug)]
pub struct Comparison {
    /// In the order asked for; those that failed are missing.
    pub rows: Vec<Row>,
    /// Designs that could not be run, and why.
    pub failures: Vec<(Design, Error)>,
}

/// How often a design is tried whose guest was ended by a fault of QEMU's that
/// depends on what happens at which moment.
const TRIES: u32 = 3;

/// Runs `experiment` under each of `designs`.
///
/// Counted instructions do not mind company, so that many run at once as
/// there are processors; in real time only one does. A guest that this machine's
/// own KVM could run is nested like the others where there are others.
///
/// # Errors
///
/// Only when interrupted; what fails in one design leaves the others alone.
pub fn compare(
    experiment: &Experiment,
    designs: &[Design],
    cache: &Cache,
    images: Option<&Images>,
    cancel: &Cancel,
    progress: &Progress,
) -> Result<Comparison> {
    let mut experiment = experiment.clone();
    experiment.nested |= !experiment.are_direct(designs);
    let in_real_time = experiment.machine.realtime || !experiment.nested;
    let at_once = if in_real_time {
        1
    } else {
        parallel::processors()
    };
    let mut finished = parallel::map(&starting_order(designs), at_once, |&design| {
        let task = progress.task(&design.to_string());
        let row = run_tries(&experiment, design, cache, images, cancel, &task);
        if let Ok(row) = &row {
            task.say(&format!("done in {:.0} s", row.wall.as_secs_f64()));
        }
        task.done();
        (design, row)
    });
    cancel.check()?;
    let mut comparison = Comparison {
        rows: Vec::new(),
        failures: Vec::new(),
    };
    finished.sort_by_key(|(design, _)| designs.iter().position(|asked| asked == design));
    for (design, row) in finished {
        match row {
            Ok(row) => comparison.rows.push(row),
            Err(error) => comparison.failures.push((design, error)),
        }
    }
    Ok(comparison)
}

fn run_tries(
    experiment: &Experiment,
    design: Design,
    cache: &Cache,
    images: Option<&Images>,
    cancel: &Cancel,
    task: &Task,
) -> Result<Row> {
    let mut experiment = experiment.clone();
    loop {
        match run_one(&experiment, design, cache, images, cancel, task) {
            // Each phase is as deterministic as the first.
            Err(Error::RepeatedInterrupt { .. }) if experiment.phase + 1 < TRIES => {
                experiment.phase += 1;
                task.say("QEMU seems to have delivered an interrupt twice, or not at all; once more, a bit later");
            }
            Err(Error::HostReset { .. }) if experiment.phase + 1 < TRIES => {
                experiment.phase += 1;
                task.say("QEMU seems to have reset the KVM host; once more");
            }
            result => return result,
        }
    }
}

/// One design, its output captured.
pub(crate) fn run_one(
    experiment: &Experiment,
    design: Design,
    cache: &Cache,
    images: Option<&Images>,
    cancel: &Cancel,
    task: &Task,
) -> Result<Row> {
    cancel.check()?;
    let output = Captured::default();
    let sink = Sink {
        output: Output::Buffer,
        to: Box::new(output.clone()),
    };
    let outcome = experiment.run(design, cache, images, sink, cancel, &mut |stage| {
        task.say(match stage {
            Stage::Boot => "booting",
            Stage::Command => "running the command",
            Stage::Report => "collecting figures",
        });
    })?;
    let run = outcome.run.ok_or(Error::NoReport {
        how: "there was none".to_owned(),
        console: Vec::new(),
    })?;
    Ok(Row {
        design,
        run,
        output: output.take(),
        wall: outcome.wall,
        boot_wall: outcome.boot_wall.unwrap_or_default(),
    })
}

/// The longest first, so that none is left to run alone.
fn starting_order(designs: &[Design]) -> Vec<Design> {
    let mut order = designs.to_vec();
    order.sort_by_key(|design| match design.pmu {
        Pmu::Untrapped => 4,
        Pmu::Partitioned => 3,
        Pmu::Native => 2,
        Pmu::Emulated => 1,
        Pmu::Kvm => 0,
    });
    order
}

/// Takes a command's output into memory.
#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.0))
    }
}

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
