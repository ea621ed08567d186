//! Measures the cost of an overflow for a host with real perf events, under each policy.
//!
//! The published experiment of 2018 without its virtual machine: the engine drives perf events of
//! this thread as it would for a vCPU, and the overflows are real ones. Each policy gets the same
//! guest: it profiles with Linux's handler.
//!
//! The program counts its own thread, so it runs on any machine with perf events, also in a guest. The events there are
//! hardware ones if the guest has a PMU. `--check` tests the promises on which the engine relies.

mod check;
mod selftest;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};
use vpmu::counter::Policy;
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::{Outcome, Pmu, PmuConfig, Ring};
use vpmu_perf::{Backing, PerfHost, check_sampling, support};

use crate::check::{CHECKS, Unseen, host_of, options};

/// Measures what handling a guest's overflow, and rewriting a running counter, costs with this
/// machine's perf events, under each policy.
///
/// Exit status: 0, or 1 when perf events cannot be had or a check fails.
#[derive(Debug, Parser)]
#[command(name = "vpmu-reprogram", version)]
struct Cli {
    /// Where the figures go, `-` for standard output; without it a table is printed
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Overflows for each policy
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    overflows: u32,
    /// What is to count; without it hardware events where there are any
    #[arg(long, value_parser = PossibleValuesParser::new(Backing::ALL.map(Backing::name)).try_map(backing))]
    backing: Option<Backing>,
    /// Measure nothing, but check that the events keep what the engine relies on
    #[arg(long, conflicts_with_all = ["json", "overflows"])]
    check: bool,
    /// Measure nothing, but say what counts here, and then whether the kernel can sample a guest
    #[arg(long, conflicts_with_all = ["json", "overflows", "check"])]
    probe: bool,
    /// Measure nothing, but check each backing and what this machine's counters are, and print that as JSON
    #[arg(long, conflicts_with_all = ["json", "overflows", "check", "probe", "backing"])]
    selftest: bool,
}

/// A counter that counts nanoseconds, or cycles on hardware: either way some 5000 a second.
const PERIOD: u64 = 200_000;
const WIDTH_MASK: u64 = (1 << 48) - 1;

const EVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const OVF_CTRL: u32 = 0x390;
/// Cycles in both rings, with an interrupt, enabled.
const CYCLES: u64 = 0x3c | 1 << 16 | 1 << 17 | 1 << 20 | 1 << 22;

fn backing(name: String) -> Result<Backing, &'static str> {
    let mut all = Backing::ALL.into_iter();
    all.find(|it| it.name() == name).ok_or("no such backing")
}

struct Guest {
    pmu: Pmu,
    host: PerfHost,
}

struct Figures {
    handle_overflow: Duration,
    rewrite_counter: Duration,
    host_operations: f64,
}

impl Guest {
    fn new(policy: Policy, backing: Option<Backing>) -> Result<Self, String> {
        let host = host_of(options(backing))?;
        let config = PmuConfig {
            policy,
            ..PmuConfig::new(Capability::new(Version::V2))
        };
        let pmu = Pmu::new(config).map_err(|error| format!("{error:?}"))?;
        Ok(Self { pmu, host })
    }

    fn write(&mut self, msr: u32, value: u64) -> Result<(), String> {
        match self.pmu.wrmsr(msr, value, &mut self.host) {
            Outcome::Done => Ok(()),
            other => Err(format!("WRMSR {msr:#x} gave {other:?}")),
        }
    }

    /// Uses the CPU until an overflow comes, and returns the time that the engine took for it.
    fn overflow(&mut self) -> Result<Duration, String> {
        let waiting = Instant::now();
        loop {
            let mut took = Duration::ZERO;
            for (counter, report) in self.host.take_overflows() {
                let start = Instant::now();
                self.pmu.overflow(counter, report, &mut self.host);
                took += start.elapsed();
            }
            if self.pmu.take_pmi() {
                return Ok(took);
            }
            if waiting.elapsed() > Duration::from_secs(5) {
                return Err("perf events do not overflow on this machine".to_owned());
            }
        }
    }

    /// Does the work of Linux's handler with the PMU for one sample.
    fn handle(&mut self) -> Result<(), String> {
        self.write(GLOBAL_CTRL, 0)?;
        let _ = self.pmu.rdmsr(GLOBAL_STATUS, &mut self.host);
        self.write(OVF_CTRL, 1)?;
        let _ = self.pmu.rdpmc(0, Ring::Kernel, true, &mut self.host);
        self.write(PMC0, WIDTH_MASK + 1 - PERIOD)?;
        let _ = self.pmu.rdmsr(GLOBAL_STATUS, &mut self.host);
        self.write(GLOBAL_CTRL, 1)
    }

    fn measure(&mut self, overflows: u32) -> Result<Figures, String> {
        self.write(GLOBAL_CTRL, 0)?;
        self.write(EVTSEL0, CYCLES)?;
        self.write(PMC0, WIDTH_MASK + 1 - PERIOD)?;
        self.write(GLOBAL_CTRL, 1)?;
        for _ in 0..10 {
            self.overflow()?;
            self.handle()?;
        }
        let before = self.pmu.statistics().host_operations();
        let mut times = Vec::new();
        for _ in 0..overflows {
            times.push(self.overflow()?);
            self.handle()?;
        }
        let operations = self.pmu.statistics().host_operations() - before;

        // Each value is so far from the end that nothing happens meanwhile, and each time another.
        let mut rewrites = Vec::new();
        for n in 0..u64::from(overflows) {
            let start = Instant::now();
            self.write(PMC0, n << 20)?;
            rewrites.push(start.elapsed());
        }
        self.pmu.reset(&mut self.host);
        Ok(Figures {
            handle_overflow: median(times),
            rewrite_counter: median(rewrites),
            host_operations: operations as f64 / f64::from(overflows),
        })
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The figures of each policy, by its name on the command line.
type All = Vec<(&'static str, Figures)>;

fn measure(overflows: u32, wanted: Option<Backing>) -> Result<(Backing, All), String> {
    let mut backing = Backing::Clock;
    let mut all = Vec::new();
    for policy in Policy::ALL {
        let mut guest = Guest::new(policy, wanted)?;
        backing = guest.host.backing();
        all.push((policy.name(), guest.measure(overflows)?));
    }
    Ok((backing, all))
}

fn to_json(backing: Backing, all: &All) -> Value {
    let mut rows = Vec::new();
    for (mode, figures) in all {
        let mut row = |figure: &str, measured: f64, unit: &str| {
            rows.push(json!({
                "figure": figure, "mode": mode, "measured": measured, "unit": unit,
            }));
        };
        let ns = |time: Duration| time.as_nanos() as f64;
        row("handle_overflow_ns", ns(figures.handle_overflow), "ns");
        row("rewrite_counter_ns", ns(figures.rewrite_counter), "ns");
        row("host_ops_per_pmi", figures.host_operations, "operations");
    }
    json!({
        "backing": backing.name(),
        "rows": rows,
    })
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.backing {
        _ if cli.selftest => selftest::selftest().map(|found| println!("{found}")),
        wanted if cli.check => check(wanted),
        wanted if cli.probe => probe(wanted),
        wanted => report(&cli, wanted),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vpmu-reprogram: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the backing that counts a vCPU's guest on this machine; `sampled` or the reason why guests cannot be; how many
/// counters are free, or `any`; and `mediated` while another VM has them, or `free`.
fn probe(wanted: Option<Backing>) -> Result<(), String> {
    let options = options(wanted);
    let support = support(&options).map_err(|error| error.to_string())?;
    println!("{}", support.backing.name());
    match check_sampling(&options) {
        Ok(()) => println!("sampled"),
        Err(error) => println!("{error}"),
    }
    match support.counters {
        Some(free) => println!("{free}"),
        None => println!("any"),
    }
    println!("{}", if support.mediated { "mediated" } else { "free" });
    Ok(())
}

fn check(wanted: Option<Backing>) -> Result<(), String> {
    let backing = host_of(options(wanted))?.backing();
    println!("{} events", backing.name());
    let mut failed = Vec::new();
    for (promise, check) in CHECKS {
        match check(backing) {
            Ok(seen) => println!("ok       {promise}: {seen}"),
            Err(Unseen::Skipped(reason)) => println!("skipped  {promise}: {reason}"),
            Err(Unseen::Broken(seen)) => {
                println!("FAILED   {promise}: {seen}");
                failed.push(format!("{promise}: {seen}"));
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    // Once more at the end, which is what a log is cut down to.
    let (count, all) = (failed.len(), CHECKS.len());
    Err(format!(
        "{count} of {all} checks failed: {}",
        failed.join("; ")
    ))
}

fn report(cli: &Cli, wanted: Option<Backing>) -> Result<(), String> {
    let file = cli.json.as_ref().filter(|path| path.as_os_str() != "-");
    if let Some(path) = file {
        // The file is opened first, so that no measurement is lost.
        let opened = File::options().create(true).append(true).open(path);
        opened.map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let (backing, all) = measure(cli.overflows, wanted)?;
    let written = match &cli.json {
        None => {
            println!("{} events, medians\n", backing.name());
            println!("            overflow ns  rewrite ns  host operations per PMI");
            for (mode, figures) in &all {
                println!(
                    "{mode:10} {:12} {:11} {:24.2}",
                    figures.handle_overflow.as_nanos(),
                    figures.rewrite_counter.as_nanos(),
                    figures.host_operations
                );
            }
            Ok(())
        }
        Some(path) if path.as_os_str() == "-" => {
            writeln!(io::stdout(), "{}", to_json(backing, &all))
        }
        Some(path) => fs::write(path, format!("{}\n", to_json(backing, &all))),
    };
    written.map_err(|error| error.to_string())
}
