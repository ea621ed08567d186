//! Measures `perf record --call-graph lbr` of a guest: its shares beside those of a native `--call-graph dwarf`, how many stacks are
//! complete, and what one costs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::parts::{Figure, QUIET, figure, first, sample_cost, timed_program};
use super::{Bench, Context, Row, emulated};
use crate::Result;
use crate::host::qemu::X86_PMU;
use crate::image::{artifacts, program};
use crate::report::result;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Lbr, Model, Pebs, Pmu, Policy};

pub(super) const BENCH: Bench = Bench {
    name: "callstacks",
    has_models: false,
    // Hosts that record no branches seldom have counters. The native machine has some, for its own profile.
    has_counters: false,
    page: include_str!("page.md"),
    rows,
};

/// The program of the published page, built of `ftest.c` beside this file by script/build.
const FTEST: &str = "ftest";
/// What brings the CFI into the guest's memory.
const COMPANION: &str = "vpmu-callstacks";

/// Sampling periods of the profiles. Primes, so that none beats with the program's loops as another does.
const PERIODS: [u32; 3] = [20_011, 21_001, 22_003];
const FUNCTIONS: [&str; 5] = ["main", "foo", "bar", "qux", "random"];

fn record(graph: &str, period: u32, program: &str) -> String {
    format!(
        "perf record --no-bpf-event -q -m 8M -o perf.data -e cycles:u -c {period} {graph} -- {program}"
    )
}

/// Prints shares with children and without, and the number of samples, of profiles that `before` takes with `graph`.
fn profile(before: &str, graph: &str) -> String {
    // The alias of random() that a library names first is the linker's affair.
    const SHARES: &str = r#"awk -F, -v period=PERIOD '/^ *[0-9.]+%/ {
        split($3, word, " "); name = word[2]; sub(/^_*random$/, "random", name)
        print "children:" period ":" name, $1 + 0; print "self:" period ":" name, $2 + 0 }'"#;
    let one = |period: u32| {
        let record = record(graph, period, "./ftest 100000");
        let shares = SHARES.replace("PERIOD", &period.to_string());
        format!(
            "{before} {record} && \
             perf report -i perf.data --stdio --children -g none --comms ftest --percentage relative \
             -F overhead_children,overhead,sym -t , 2>/dev/null | {shares} && \
             perf report -i perf.data --stdio --no-children -g none --comms ftest --sort comm -F sample,comm -t , 2>/dev/null | \
             awk -F, '/^ *[0-9]/ {{ print \"samples:{period}\", $1 + 0 }}'"
        )
    };
    format!("{QUIET}{}", PERIODS.map(one).join(" && "))
}

/// Shares of the functions, the mean of the periods; and how many samples there were.
fn shares(row: &result::Row) -> Result<(BTreeMap<String, f64>, f64)> {
    let mut all = BTreeMap::new();
    for kind in ["children", "self"] {
        for function in FUNCTIONS {
            let of = |period| first(row, &format!("{kind}:{period}:{function}"));
            let sum: f64 = PERIODS.into_iter().map(of).sum::<Result<f64>>()?;
            all.insert(format!("{kind}:{function}"), sum / PERIODS.len() as f64);
        }
    }
    let samples = PERIODS.map(|period| first(row, &format!("samples:{period}")));
    Ok((all, samples.into_iter().sum::<Result<f64>>()?))
}

fn of_profiles(native: &result::Row, guest: &result::Row) -> Result<Vec<(&'static str, Figure)>> {
    let (theirs, samples_native) = shares(native)?;
    let (ours, samples) = shares(guest)?;
    let difference = |(name, share): (&String, &f64)| (share - theirs[name]).abs();
    let largest = ours.iter().map(difference).fold(0.0, f64::max);
    let largest = figure("largest_share_difference_points", Some(largest), "points");
    let mut rows = vec![
        ("native", figure("samples", Some(samples_native), "samples")),
        ("guest", figure("samples", Some(samples), "samples")),
        ("guest", largest),
    ];
    for (mode, shares) in [("native", &theirs), ("guest", &ours)] {
        rows.extend((shares.iter()).map(|(name, share)| (mode, figure(name, Some(*share), "%"))));
    }
    Ok(rows)
}

/// How the VMM's stacks ended.
fn stacks(row: &result::Row) -> Vec<Figure> {
    let vmm = row.run.vmm.as_ref();
    let span = vmm.and_then(|vmm| vmm.measured.as_ref());
    let counts = span.and_then(|span| span.more.get("call_stacks")?.as_object());
    let of = |name: &str| counts.and_then(|counts| counts.get(name)?.as_f64());
    // All but the calls are outcomes of a stack.
    let outcomes: Vec<&String> = (counts.into_iter().flatten())
        .map(|(name, _)| name)
        .filter(|name| *name != "calls")
        .collect();
    let stacks: f64 = outcomes.iter().filter_map(|name| of(name)).sum();
    let percent = |count: f64| (stacks > 0.0).then(|| 100.0 * count / stacks);
    let whole = of("complete").zip(of("full")).map(|(a, b)| a + b);
    let calls = of("calls").filter(|_| stacks > 0.0);
    let calls = calls.map(|calls| calls / stacks);
    let mut figures = vec![
        figure("stacks", Some(stacks), "stacks"),
        figure("complete_percent", whole.and_then(percent), "%"),
        figure("calls_per_stack", calls, "calls"),
    ];
    for name in outcomes {
        let share = of(name).filter(|&count| count > 0.0).and_then(percent);
        if share.is_some() && name != "complete" {
            figures.push(figure(format!("ends:{name}"), share, "%"));
        }
    }
    figures
}

/// A program of this machine, with its libraries beside the guest's C library; empty where the machine has none.
fn theirs(path: &Path) -> Vec<PathBuf> {
    const GUESTS: [&str; 3] = ["ld-linux", "libc.so", "libm.so"];
    let is_guests = |file: &Path| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        GUESTS.iter().any(|begin| name.starts_with(begin))
    };
    let Ok(libraries) = program::libraries(path) else {
        return Vec::new();
    };
    // By the names by which programs ask for them.
    let files = libraries.keys().map(|place| Path::new("/").join(place));
    let files = files.filter(|file| !is_guests(file));
    files.chain([path.to_owned()]).collect()
}

fn cc1() -> PathBuf {
    let output = std::process::Command::new("gcc")
        .arg("-print-prog-name=cc1")
        .output();
    let path = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    path.unwrap_or_default().into()
}

const ELF: [&str; 6] = [
    "./ftest 100000",
    // The shell has one of its own, which is preferred.
    "/usr/bin/gzip -c part > /dev/null",
    "perf report -i kept --stdio > /dev/null",
    r#"./perl -e "sub f { my \$n = shift; \$n < 2 ? \$n : f(\$n-1) + f(\$n-2) } print f(20)" > /dev/null"#,
    "./sort lines > /dev/null",
    "./openssl dgst -sha256 random.bin > /dev/null",
];
// Preprocessed: the guest has no headers, and cc1 fails where there is not even a folder of them.
const CC1: [&str; 1] = ["./cc1 -quiet -O2 -fpreprocessed program.c -o /dev/null"];
const PREPARE: &str = r#"head -c 1000000 random.bin > part
    seq 1 20000 | awk '{ print $1 * 7919 % 20011 }' > lines
    perf record -q -o kept -e cpu-clock -c 1000000 ./ftest 20000
    awk 'BEGIN { for (n = 0; n < 40; n++)
        print "int f" n "(int *a, int n) { int s = " n "; for (int i = 0; i < n; i++) s += a[i] * (i ^ " n "); return s; }" }' > program.c; "#;

/// Records the programs, of which each has run once before: with the companion, or by themselves.
fn completeness(programs: &[&str], before: &str) -> String {
    let mut command = format!("{QUIET}{PREPARE}");
    for program in programs {
        let name = program.split_whitespace().next().unwrap_or_default();
        // The guest's own programs have the guest's libraries.
        let libraries = match name.starts_with("./") {
            true => "export LD_LIBRARY_PATH=/root; ",
            false => "",
        };
        let both = format!(
            "printf '%s\\n' '{libraries}{program}' > line; if command -v {name} >/dev/null; then sh line || exit; echo program; {before} {}; fi; ",
            record("--call-graph lbr", 50_021, "sh line")
        );
        command += &both;
    }
    command + "true"
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let ftest = artifacts::find(Arch::X86_64, FTEST)?;
    let companion = artifacts::find(Arch::X86_64, COMPANION)?;
    let ours = emulated(&[Policy::Paused]);
    let with = format!("./{COMPANION}");
    let guest = |more: &[PathBuf]| Request {
        model: Model::Intel,
        lbr: Lbr::On,
        // Beside native.
        own_kvm: false,
        add: [&[ftest.clone(), companion.clone()], more].concat(),
        ..Request::new(Arch::X86_64)
    };
    let mut native = Request {
        add: vec![ftest.clone()],
        ..Request::new(Arch::X86_64)
    };
    native.machine.cpu = Some(format!("max,{X86_PMU}"));
    let dwarf = profile("", "--call-graph dwarf,4096");
    let native = context.compare(native, "native", &[Design::from(Pmu::Native)], &dwarf)?;
    let lbr = profile(&with, "--call-graph lbr");
    let profiled = context.compare(guest(&[]), "shares", &ours, &lbr)?;
    let figures = of_profiles(&native[0], &profiled[0])?;
    let ends = stacks(&profiled[0]).into_iter().map(|one| ("guest", one));
    let figures = figures.into_iter().chain(ends);
    let mut rows: Vec<Row> = figures.map(|(mode, one)| one.row("", mode)).collect();
    let calls = "--call-graph lbr";
    for (mode, pebs, event, graph) in [
        ("plain", Pebs::Off, "cycles:u", ""),
        ("guest", Pebs::Off, "cycles:u", calls),
        ("plain-pebs", Pebs::Exit, "cycles:upp", ""),
        ("guest-pebs", Pebs::Exit, "cycles:upp", calls),
    ] {
        let record =
            format!("{with} perf record --no-bpf-event -q -o perf.data -e {event} {graph}");
        let command = timed_program(&record, "-c 100003", FTEST, "./ftest 200000");
        let guest = Request { pebs, ..guest(&[]) };
        for row in &context.compare(guest, &format!("time-{mode}"), &ours, &command)? {
            rows.push(sample_cost(row)?.row("", mode));
        }
    }
    let elf = ["/usr/bin/perl", "/usr/bin/sort", "/usr/bin/openssl"];
    let elf = elf
        .iter()
        .flat_map(|path| theirs(Path::new(path)))
        .collect();
    let groups: [(&str, Vec<PathBuf>, &[&str]); 2] =
        [(":elf", elf, &ELF), (":cc1", theirs(&cc1()), &CC1)];
    for (suffix, mut more, programs) in groups {
        more.sort();
        more.dedup();
        for (mode, before) in [("companion", with.as_str()), ("alone", "")] {
            let command = completeness(programs, before);
            let part = format!("{}-{mode}", &suffix[1..]);
            for row in &context.compare(guest(&more), &part, &ours, &command)? {
                let output = String::from_utf8_lossy(&row.output);
                let ran = output.lines().filter(|line| *line == "program").count();
                let ran = figure("programs", Some(ran as f64), "programs");
                let all = [ran].into_iter().chain(stacks(row));
                rows.extend(all.map(|one| one.row(suffix, mode)));
            }
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::parts::part;
    use crate::bench::parts::tests::assert_valid_shell;

    #[test]
    fn commands_are_valid_shell() {
        let part = |command| part("callstacks", command, |_| Ok(Vec::new()));
        assert_valid_shell(&[
            part(profile("", "--call-graph dwarf")),
            part(completeness(&ELF, "./vpmu-callstacks")),
            part(completeness(&CC1, "")),
        ]);
    }
}
