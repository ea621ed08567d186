//! The same command under several designs, side by side.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use itertools::{Either, Itertools};

use super::supervise::Stage;
use super::{Lab, Sink, once_more};
use crate::host::parallel::{self, lock};
use crate::host::progress::Task;
use crate::image::job::Output;
use crate::report::result::Row;
use crate::spec::Guest;
use crate::spec::design::{Design, Pmu};
use crate::{Error, Failure, Result};

/// The results of all designs.
#[derive(Debug)]
pub struct Comparison {
    /// The rows in the order asked for, without designs that failed.
    pub rows: Vec<Row>,
    /// Designs that could not be run, and why.
    pub failures: Vec<(Design, Error)>,
}

/// Runs the guests of the lab's spec: as many at once as there are processors where
/// instructions are counted, one at a time in real time.
///
/// # Errors
///
/// Only when interrupted. A design that fails leaves the others alone.
pub fn compare(lab: &Lab<'_>) -> Result<Comparison> {
    let guests = &lab.spec.guests;
    let machine = &lab.spec.request.machine;
    let at_once = match guests.iter().all(|guest| guest.is_counted(machine)) {
        true => parallel::processors(),
        false => 1,
    };
    let mut finished = parallel::map(&starting_order(guests), at_once, |guest| {
        let task = lab.session.progress.task(&guest.design.to_string());
        let row = run_tries(lab, guest, &task);
        if let Ok(row) = &row {
            task.say(&format!("done in {:.0} s", row.wall.as_secs_f64()));
        }
        (guest.design, row)
    });
    lab.session.cancel.check()?;
    let place = |design| guests.iter().position(|guest| guest.design == design);
    finished.sort_by_key(|(design, _)| place(*design));
    let results = finished.into_iter();
    let (rows, failures) = results.partition_map(|(design, row)| match row {
        Ok(row) => Either::Left(row),
        Err(error) => Either::Right((design, error)),
    });
    Ok(Comparison { rows, failures })
}

fn run_tries(lab: &Lab<'_>, guest: &Guest, task: &Task) -> Result<Row> {
    let mut phase = 0;
    loop {
        match run_one(lab, guest, phase, task) {
            Err(error) => task.say(once_more(lab, guest, phase, error)?),
            row => return row,
        }
        phase += 1;
    }
}

/// Runs one guest and captures its output.
fn run_one(lab: &Lab<'_>, guest: &Guest, phase: u32, task: &Task) -> Result<Row> {
    lab.session.cancel.check()?;
    let output = Captured::default();
    let sink = Sink {
        output: Output::Buffer,
        to: Box::new(output.clone()),
    };
    let outcome = super::run(lab, guest, phase, sink, &mut |stage| {
        task.say(match stage {
            Stage::Boot => "booting",
            Stage::Command => "running the command",
            Stage::Report => "collecting figures",
        });
    })?;
    let none = || Failure::NoReport("there was none".to_owned()).with(Vec::new());
    let run = outcome.run.ok_or_else(none)?;
    Ok(Row {
        design: guest.design,
        run,
        output: output.take(),
        wall: outcome.wall,
    })
}

/// Orders guests by how long they take, the longest first, so that no long run
/// is left to the end.
fn starting_order(guests: &[Guest]) -> Vec<&Guest> {
    let mut order: Vec<&Guest> = guests.iter().collect();
    order.sort_by_key(|guest| match guest.design.pmu {
        Pmu::Untrapped | Pmu::Direct => 4,
        Pmu::Partitioned => 3,
        Pmu::Native => 2,
        Pmu::Emulated | Pmu::Paravirt | Pmu::Exec | Pmu::Qemu | Pmu::Vmm => 1,
        Pmu::Kvm | Pmu::Mediated => 0,
    });
    order
}

/// Takes a command's output into memory.
#[derive(Clone, Default)]
pub(crate) struct Captured(Arc<Mutex<Vec<u8>>>);

impl Captured {
    pub(crate) fn take(&self) -> Vec<u8> {
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
