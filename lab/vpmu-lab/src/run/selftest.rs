//! `vpmu selftest`: what this machine's own counters do, for somebody whose machine nobody here has.
//!
//! Two programs of this project are run: the one that measures perf events checks each backing, and the VMM runs the
//! bare-metal test program in this machine's own KVM.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::cancel::Cancel;
use crate::host::files::write_json;
use crate::host::tool::{Tool, bound_to_us};
use crate::image::artifacts;
use crate::spec::arch::Arch;
use crate::{Error, Result};

/// The bare-metal test program.
const PAYLOAD: &str = "payload.elf";
/// Groups of its tests are named by what stands before the first dot, behind the CPU.
const CPU: &str = "cpu";
const KVM: &str = "/dev/kvm";
const NO_GUEST: &str = "a guest is run on x86-64 only";

/// What was found on a machine.
#[derive(Debug, Deserialize, Serialize)]
pub struct Found {
    /// The facts that distinguish machines.
    pub machine: Value,
    /// The checks, in their order.
    pub checks: Vec<Check>,
}

/// One check.
#[derive(Debug, Deserialize, Serialize)]
pub struct Check {
    /// What is checked.
    pub name: String,
    /// What came of it.
    pub result: Verdict,
    /// What was seen, or why nothing could be.
    pub why: String,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Verdict {
    /// It is as it should be.
    Holds,
    /// It is not.
    Fails,
    /// This machine has nothing to check.
    Cannot,
}

impl Found {
    /// Returns whether no check fails.
    pub fn is_good(&self) -> bool {
        self.count(Verdict::Fails) == 0
    }

    fn count(&self, result: Verdict) -> usize {
        let is_so = |check: &&Check| check.result == result;
        self.checks.iter().filter(is_so).count()
    }

    /// Writes the object to attach to a report.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let found = serde_json::json!({
            "schema": 1, "machine": self.machine, "checks": self.checks,
        });
        write_json(path, &found)
    }
}

/// The table.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            writeln!(f, "{:8} {}", check.result, check.name)?;
            writeln!(f, "{:8} {}", "", check.why)?;
        }
        write!(
            f,
            "\n{} hold, {} fail, {} cannot be checked on this machine",
            self.count(Verdict::Holds),
            self.count(Verdict::Fails),
            self.count(Verdict::Cannot)
        )
    }
}

/// Checks this machine, with no new guest after eight minutes.
///
/// # Errors
///
/// When a program is missing, or says nothing that can be understood.
pub fn selftest(cancel: &Cancel) -> Result<Found> {
    let end = Instant::now() + LONGEST;
    let program = artifacts::find_beside(artifacts::REPROGRAM)?;
    let mut command = bound_to_us(&program)?;
    command.arg("--selftest");
    let said = PERF.run_within(LONGEST_RUN, command, cancel, &|| ())?;
    let mut found: Found = serde_json::from_str(&said).map_err(|error| Error::Program {
        program: artifacts::REPROGRAM.to_owned(),
        status: error.to_string(),
        output: said,
        hint: PERF.hint,
    })?;
    let amd = matches!(
        found.machine["vendor"].as_str(),
        Some("AuthenticAMD" | "HygonGenuine")
    );
    // AMD's models are for AMD's processors only.
    let models: &[&str] = match amd {
        true => &["amd", "amd-v2", "intel"],
        false => &["intel"],
    };
    for model in models {
        let run = || match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Ok(whole(model, Verdict::Cannot, OVER.to_owned())),
            left => guest(model, left.min(LONGEST_RUN), cancel),
        };
        let mut checks = run()?;
        for _ in 1..RUNS {
            if checks.iter().all(|check| check.result != Verdict::Fails) {
                break;
            }
            excuse(&mut checks, &run()?);
        }
        found.checks.extend(checks);
    }
    Ok(found)
}

/// Runs of the test program at most. Where other programs keep the machine busy, chance moves what a clock counts over a
/// bound; a fault fails each time.
const RUNS: usize = 3;
/// The longest that all may take, where a minute is usual.
const LONGEST: Duration = Duration::from_secs(480);
/// The longest that a run may take, where some ten seconds are usual: a test that hangs is a finding, and not a wait for ever.
const LONGEST_RUN: Duration = Duration::from_secs(120);
const OVER: &str =
    "other checks took all the time that there is: something hangs, or the machine is busy";

/// A check that failed and does not in `again` holds, and says so.
fn excuse(checks: &mut [Check], again: &[Check]) {
    for check in checks
        .iter_mut()
        .filter(|check| check.result == Verdict::Fails)
    {
        let other = again.iter().find(|other| other.name == check.name);
        if let Some(other) = other.filter(|other| other.result != Verdict::Fails) {
            check.result = other.result;
            check.why = format!("{}; failed in another run: {}", other.why, check.why);
        }
    }
}

pub(crate) const PERF: Tool = Tool {
    program: artifacts::REPROGRAM,
    fix: "",
    hint: "vpmu doctor says whether perf events can be had",
};
const VMM: Tool = Tool {
    program: artifacts::VMM,
    fix: "",
    hint: "",
};

/// Returns one check, of the test program as a whole.
fn whole(model: &str, result: Verdict, why: String) -> Vec<Check> {
    vec![Check {
        name: format!("{model} guest: the test program runs in this machine's KVM"),
        result,
        why,
    }]
}

/// Runs the test program in this machine's own KVM, with this model of the PMU, for so long at most.
fn guest(model: &str, longest: Duration, cancel: &Cancel) -> Result<Vec<Check>> {
    let whole = |result, why| whole(model, result, why);
    // Two vCPUs that wait for each other on one processor wait for the scheduler, each time.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let vcpus = processors.min(2).to_string();
    if std::env::consts::ARCH != Arch::X86_64.name() {
        return Ok(whole(Verdict::Cannot, NO_GUEST.to_owned()));
    }
    if let Err(error) = OpenOptions::new().read(true).write(true).open(KVM) {
        return Ok(whole(Verdict::Cannot, format!("{KVM}: {error}")));
    }
    let (vmm, payload) = (
        artifacts::find_beside(artifacts::VMM)?,
        artifacts::find(Arch::X86_64, PAYLOAD)?,
    );
    let mut command = bound_to_us(&vmm)?;
    command.arg("--kernel").arg(payload);
    command.args(["--memory", "64M", "--vcpus", &vcpus, "--model", model]);
    command.stdin(std::process::Stdio::null());
    match VMM.run_within(longest, command, cancel, &|| ()) {
        Ok(console) => Ok(of_console(model, &console.replace('\r', ""))),
        Err(error @ Error::Interrupted) => Err(error),
        Err(error) => Ok(whole(Verdict::Fails, error.to_string())),
    }
}

/// Returns a check for each group of tests, whose lines are `ok NAME`, `skip NAME: why` and `FAIL NAME: why`.
fn of_console(model: &str, console: &str) -> Vec<Check> {
    #[derive(Default)]
    struct Group<'a> {
        passed: usize,
        failed: Vec<&'a str>,
        skipped: Vec<&'a str>,
    }
    let mut groups: BTreeMap<&str, Group<'_>> = BTreeMap::new();
    for line in console.lines() {
        let Some((what, test)) = line.split_once(' ') else {
            continue;
        };
        if !matches!(what, "ok" | "skip" | "FAIL") {
            continue;
        }
        let group = match test.split_once('.') {
            Some((cpu, rest)) if cpu.starts_with(CPU) => rest.split('.').next(),
            Some((group, _)) => Some(group),
            None => None,
        };
        let group = groups.entry(group.unwrap_or("start")).or_default();
        match what {
            "ok" => group.passed += 1,
            "FAIL" => group.failed.push(test),
            _ => group.skipped.push(test),
        }
    }
    let checks = groups.into_iter().map(|(name, group)| {
        let (result, why) = match group {
            Group { failed, .. } if !failed.is_empty() => (Verdict::Fails, failed.join("; ")),
            Group { passed, .. } if passed > 0 => (Verdict::Holds, format!("{passed} tests")),
            Group { skipped, .. } => {
                let first = skipped.first().and_then(|test| test.split_once(": "));
                let why = first.map_or("nothing to test", |(_, why)| why);
                (Verdict::Cannot, why.to_owned())
            }
        };
        Check {
            name: format!("{model} guest: {name}"),
            result,
            why,
        }
    });
    checks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_becomes_a_check_for_each_group() {
        let console = "ok cpu0.register.reset\nok cpu1.register.bits (deviates: x)\n\
            skip cpu0.pebs.reload: no PEBS\nFAIL cpu1.pmi.nmi: late (got 0x1 want 0x2)\nok cpu0.pmi.nmi\n\
            ok isolation.counts\npayload: 4 passed, 1 failed, 1 skipped\n";
        let checks = of_console("intel", console);
        let verdict = |name: &str| {
            let check = checks.iter().find(|check| check.name == name).unwrap();
            (check.result, check.why.as_str())
        };
        assert_eq!(
            verdict("intel guest: register"),
            (Verdict::Holds, "2 tests")
        );
        assert_eq!(verdict("intel guest: pebs"), (Verdict::Cannot, "no PEBS"));
        let late = "cpu1.pmi.nmi: late (got 0x1 want 0x2)";
        assert_eq!(verdict("intel guest: pmi"), (Verdict::Fails, late));
        assert_eq!(
            (verdict("intel guest: isolation").0, checks.len()),
            (Verdict::Holds, 4)
        );
        let found = Found {
            machine: Value::Null,
            checks,
        };
        assert!(!found.is_good());
        let mut checks = of_console("intel", console);
        excuse(
            &mut checks,
            &of_console("intel", "FAIL cpu1.pmi.nmi: late\n"),
        );
        assert!(checks.iter().any(|check| check.result == Verdict::Fails));
        excuse(&mut checks, &of_console("intel", "ok cpu1.pmi.nmi\n"));
        assert!(checks.iter().all(|check| check.result != Verdict::Fails));
        assert!(
            checks
                .iter()
                .any(|check| check.why.contains("in another run: cpu1.pmi.nmi: late"))
        );
        assert!(
            found
                .to_string()
                .ends_with("2 hold, 1 fail, 1 cannot be checked on this machine")
        );
    }
}
