//! `vpmu selftest`.

use std::path::Path;
use std::process::ExitCode;

use vpmu_lab::Result;
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::files::check_writable;
use vpmu_lab::host::progress::Progress;
use vpmu_lab::run::selftest;

use crate::print::print;

pub(crate) fn selftest(json: Option<&Path>, cancel: &Cancel) -> Result<ExitCode> {
    if let Some(path) = json {
        // Before the work, so that no minute is lost.
        check_writable(path)?;
    }
    let progress = Progress::stderr();
    let task = progress.task("checking this machine's counters");
    let found = selftest::selftest(cancel)?;
    task.done();
    print(&format!("{found}\n"))?;
    if let Some(path) = json {
        found.write(path)?;
    }
    Ok(ExitCode::from(u8::from(!found.is_good())))
}
