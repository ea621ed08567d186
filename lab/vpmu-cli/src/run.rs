//! `vpmu run`.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::progress::Progress;
use vpmu_lab::image::cache::Session;
use vpmu_lab::image::job::Output;
use vpmu_lab::report::table;
use vpmu_lab::run::{self, Lab, Sink, Stage};
use vpmu_lab::spec::design::{Pmu, Policy};
use vpmu_lab::{Result, usage};

use crate::options::Guest;

pub(crate) fn run(
    pmu: Pmu,
    policy: Option<Policy>,
    guest: &Guest,
    cancel: &Cancel,
) -> Result<ExitCode> {
    if guest.command.is_empty() && (guest.json.is_some() || guest.html.is_some()) {
        return usage("--json and --html hold a command's figures: give a command after --");
    }
    let spec = guest.spec(&[pmu], policy.as_slice())?;
    let session = Session::new(cancel, Progress::stderr())?;
    let lab = Lab::prepare(&spec, &session)?;
    let task = Progress::terminal().task(&format!("booting {pmu}"));
    let has_command = spec.request.command.is_some();
    let guest_spec = &spec.guests[0];
    let mut phase = 0;
    let outcome = loop {
        let printed = Arc::new(AtomicBool::new(false));
        let sink = Sink {
            output: Output::Stream,
            to: Box::new(Printing(Arc::clone(&printed))),
        };
        let outcome = run::run(&lab, guest_spec, phase, sink, &mut |stage| {
            // The bar makes way for the command's output, or a bare kernel's.
            if stage != Stage::Boot || !has_command {
                task.done();
            }
        });
        match outcome {
            // What has been printed would be printed twice.
            Err(error) if !printed.load(Ordering::Relaxed) => {
                let why = run::once_more(&lab, guest_spec, phase, error)?;
                eprintln!("vpmu: {why}");
            }
            outcome => break outcome?,
        }
        phase += 1;
    };
    task.done();
    let mut second_status = 0;
    if let Some(second) = &outcome.second {
        let (what, bytes) = match &second.command {
            Some((output, figures)) => {
                second_status = figures.status;
                ("output", output)
            }
            None => ("console", &second.console),
        };
        eprintln!("vpmu: the second guest's {what}:");
        // A closed pipe is the reader's choice.
        let _ = io::stdout().write_all(bytes);
    }
    if second_status != 0 {
        eprintln!("vpmu: the second guest's command ended with status {second_status}");
    }
    if let Some(profile) = &outcome.host_profile {
        eprintln!("vpmu: {}", profile.summary());
    }
    let Some(run) = outcome.run else {
        if let Some(monitor) = outcome.monitor {
            let kinds = table::kinds(&monitor.total.exits);
            eprintln!("vpmu: exits to the monitor: {kinds}");
        }
        return Ok(exit_code(second_status));
    };
    for warning in table::uncounted(&run).chain(table::throttled(&run)) {
        eprintln!("vpmu: {warning}");
    }
    let status = match run.status {
        0 => second_status,
        status => status,
    };
    guest.write(vec![run])?;
    Ok(exit_code(status))
}

fn exit_code(status: i32) -> ExitCode {
    ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX))
}

/// Standard output, with a note that something was printed.
struct Printing(Arc<AtomicBool>);

impl Write for Printing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.fetch_or(!bytes.is_empty(), Ordering::Relaxed);
        io::stdout().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}
