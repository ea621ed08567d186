//! `vpmu compare`.

use std::process::ExitCode;

use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::progress::Progress;
use vpmu_lab::image::cache::Session;
use vpmu_lab::report::result::{Row, Run};
use vpmu_lab::report::table;
use vpmu_lab::run::compare::Comparison;
use vpmu_lab::run::{self, Lab};
use vpmu_lab::spec::design::{Pmu, Policy};
use vpmu_lab::{Result, usage};

use crate::FAILED;
use crate::options::Guest;
use crate::print::print;

/// Of a failed command's output, the lines shown.
const SHOWN_LINES: usize = 10;

pub(crate) fn compare(
    pmus: &[Pmu],
    policies: &[Policy],
    guest: &Guest,
    cancel: &Cancel,
) -> Result<ExitCode> {
    if guest.command.is_empty() {
        return usage("nothing to compare: give a command after --");
    }
    let spec = guest.spec(pmus, policies)?;
    let session = Session::new(cancel, Progress::stderr())?;
    let lab = Lab::prepare(&spec, &session)?;
    let comparison = run::compare::compare(&lab)?;
    let runs: Vec<Run> = comparison.rows.iter().map(|row| row.run.clone()).collect();
    // A full disk takes no figures away, and a closed pipe no files.
    let shown = show(&comparison);
    guest.write(runs)?;
    shown?;
    Ok(match comparison.failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => FAILED.into(),
    })
}

fn show(comparison: &Comparison) -> Result<()> {
    let rows = &comparison.rows;
    if !rows.is_empty() {
        let exits = match table::exits(rows) {
            none if none.is_empty() => none,
            exits => format!("exits by kind:\n{exits}\n"),
        };
        print(&format!(
            "{}\n\n{exits}{}\n{}{}",
            table::table(rows),
            table::LEGEND,
            table::backing(rows.iter().map(|row| &row.run))
                .map_or_else(String::new, |line| line + "\n"),
            table::qemu(rows[0].run.qemu.as_deref()).unwrap_or_default()
        ))?;
    }
    for row in rows.iter().filter(|row| row.run.status != 0) {
        eprintln!("\nvpmu: what the command printed under {}:", row.design);
        eprint!("{}", last_lines(row));
    }
    for warning in table::warnings(rows) {
        eprintln!("vpmu: warning: {warning}");
    }
    for (design, error) in &comparison.failures {
        eprintln!("vpmu: {design}: {error}");
    }
    Ok(())
}

fn last_lines(row: &Row) -> String {
    let text = String::from_utf8_lossy(&row.output);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..]
        .iter()
        .map(|line| format!("  | {line}\n"))
        .collect()
}
