//! The `vpmu` command: a thin layer over `vpmu_lab`.

mod bench;
mod compare;
mod doctor;
mod exec;
// Guests with this PMU on KVM are those of x86-64 hosts.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod fleet;
mod manual;
mod monitor;
mod offer;
mod options;
mod print;
mod report;
mod rewrite_kernel;
mod run;
mod selftest;
mod values;
mod vmm;

use std::io;
use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use vpmu_lab::Error;
use vpmu_lab::host::cancel::Cancel;

use options::{Cli, Verb};

/// When vpmu or the guest failed, as `env`, `timeout` and `docker` have it.
const FAILED: u8 = 125;
const USAGE: u8 = 2;
const INTERRUPTED: u8 = 130;

/// Returns whether this process was started to ignore SIGHUP, as by nohup (proc_pid_status(5)).
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> (SIGHUP - 1) & 1 != 0)
}

/// Parses the command line. The error of a command without its `--` says so.
fn parsed() -> Cli {
    Cli::try_parse().unwrap_or_else(|mut error| {
        let is_word = |value: &ContextValue| matches!(value, ContextValue::String(word) if !word.starts_with('-'));
        let unknown = error.kind() == ErrorKind::UnknownArgument;
        if unknown && error.get(ContextKind::InvalidArg).is_some_and(is_word) {
            let tip = "a command to run stands behind --".into();
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
        }
        error.exit()
    })
}

fn main() -> ExitCode {
    let cli = parsed();
    let cancel = Cancel::default();
    let signals: &[i32] = match &cli.verb {
        // They are those of the program that it becomes.
        Verb::Exec(_) => &[],
        _ if ignores_hangup() => &[SIGINT, SIGTERM],
        _ => &[SIGHUP, SIGINT, SIGTERM],
    };
    for &signal in signals {
        // Twice: the first asks politely, the second ends vpmu at once.
        let registered = signal_hook::flag::register_conditional_shutdown(
            signal,
            INTERRUPTED.into(),
            cancel.flag(),
        )
        .and_then(|_| signal_hook::flag::register(signal, cancel.flag()));
        if let Err(error) = registered {
            eprintln!("vpmu: failed to handle signals: {error}");
            return FAILED.into();
        }
    }
    let success = |()| ExitCode::SUCCESS;
    let result = match &cli.verb {
        Verb::Doctor { arch, qemu } => doctor::doctor(*arch, qemu.as_deref()),
        Verb::Selftest { json } => selftest::selftest(json.as_deref(), &cancel),
        Verb::Run { pmu, policy, guest } => run::run(*pmu, *policy, guest, &cancel),
        Verb::RewriteKernel {
            input,
            output,
            bzimage,
        } => rewrite_kernel::rewrite_kernel(input, output, *bzimage, &cancel),
        Verb::Exec(options) => exec::exec(options),
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        Verb::Top(options) => fleet::top::top(options, &cancel).map(success),
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        Verb::Metrics(options) => fleet::metrics::metrics(options, &cancel).map(success),
        Verb::Manual { folder } => manual::manual(folder).map(success),
        Verb::Compare { pmu, policy, guest } => compare::compare(pmu, policy, guest, &cancel),
        Verb::Report { folder, output } => report::report(folder, output.as_deref()).map(success),
        Verb::Bench(options) => bench::bench(options, &cancel).map(success),
    };
    result.unwrap_or_else(|error| {
        if is_closed_output(&error) {
            return ExitCode::from(FAILED);
        }
        eprintln!("vpmu: {error}");
        ExitCode::from(match error {
            Error::Usage(_) => USAGE,
            Error::Interrupted => INTERRUPTED,
            _ => FAILED,
        })
    })
}

/// `vpmu run ... | head` is no error worth a message.
fn is_closed_output(error: &Error) -> bool {
    matches!(error, Error::File { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
}
