//! Measures samples with last branch records of a guest that is followed for them, and checks each record.

use std::fmt::Write;

use super::parts::{
    Figure, Part, QUIET, SHARES, figure, first, share_difference, timed, us_per_sample,
};
use super::{Bench, Context, Row, emulated};
use crate::Result;
use crate::report::markdown::{Group, Page};
use crate::report::result;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Model, Policy};

pub(super) const BENCH: Bench = Bench {
    name: "lbr",
    about: "perf record -b: exits, guest time and full stacks of a sample, and wrong branches (x86_64)",
    has_models: true,
    page: Page {
        title: "Last branch records: results",
        intro: include_str!("lbr.md"),
        groups: &[Group {
            suffix: "",
            heading: "Samples with a stack of branches",
        }],
    },
    rows,
};

/// The guest is followed by breakpoints at places that are found ahead of it.
const MODE: &str = "predict";

const RECORD: &str = "perf record --no-bpf-event -q -b -o perf.data -e cycles";
const SCALE: u32 = 3400;
/// 1.6 times the workload's unit: as in the bench `pebs`.
const PERIOD: u32 = 169_559;

/// Bits that the workload's `bar` shifts out, one each round: as `guest/tools/src/mix.rs` has them.
fn bits_of_bar() -> String {
    const SEED: u16 = 0xace1;
    const FEEDBACK: u16 = 0xb400;
    const ROUNDS: usize = 4285;
    let (mut state, mut bits) = (SEED, String::new());
    for _ in 0..ROUNDS {
        let bit = state & 1;
        let _ = write!(bits, "{bit}");
        state = state >> 1 ^ if bit == 1 { FEEDBACK } else { 0 };
    }
    bits
}

/// Returns a program for awk that reads what `perf script -F brstacksym` prints of the workload. It names each branch by a
/// letter, and checks that the program takes the letters of a sample one after the other: loops are longer than a
/// stack, so that one has no more than the end of one loop and the beginning of the next. Which way `bar` goes follows
/// from the bits that it shifts out.
fn checker() -> String {
    const PROGRAM: &str = r#"
function hex(text,   n, i) { n = 0; for (i = 1; i <= length(text); i++) n = n * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1; return n }
function letter(from, to,   a, b, by) {
    split(from, a, /\+0x/); split(to, b, /\+0x/); by = hex(b[2]) - hex(a[2])
    if (a[1] == b[1]) {
        if (a[1] == "foo" && by < 0) return "f"
        if (a[1] == "qux" && by < 0) return "q"
        if (a[1] == "main" && by < 0) return by > -8 ? "m" : "u"
        if (a[1] == "bar") return by < 0 ? "l" : by == 6 ? "0" : by == 4 ? "1" : "?"
        return "?"
    }
    if (a[1] == "main" && hex(b[2]) == 0) return b[1] == "foo" ? "F" : b[1] == "bar" ? "B" : b[1] == "qux" ? "Q" : "e"
    if (b[1] == "main" && hex(b[2]) > 0) return a[1] == "foo" ? "x" : a[1] == "bar" ? "y" : a[1] == "qux" ? "z" : "e"
    return "e"
}
function in_bar(path, begins, ends,   bits, at) {
    if (path !~ /^l?([01]l)*[01]?$/ || (begins && path ~ /^l/) || (ends && path ~ /l$/)) return 0
    bits = path; gsub(/l/, "", bits)
    if (begins) return substr(BITS, 1, length(bits)) == bits
    if (ends) return substr(BITS, length(BITS) - length(bits) + 1) == bits
    return index(BITS, bits) > 0
}
function right(path,   part) {
    if (path ~ /^m*(Ff*)?$/ || path ~ /^q*(zum*)?$/) return 1
    if (path ~ /^f*(xB[01l]*)?$/) { part = path; return path !~ /B/ || (sub(/^f*xB/, "", part) && in_bar(part, 1, 0)) }
    if (path ~ /^[01l]*(yQq*)?$/) { part = path; return path ~ /y/ ? (sub(/yQq*$/, "", part) && in_bar(part, 0, 1)) : in_bar(part, 0, 0) }
    return 0
}
NF > 0 {
    path = ""
    for (i = 1; i <= NF; i++) { split($i, word, "/"); path = letter(word[1], word[2]) path }
    samples++; full += NF == DEPTH
    if (path ~ /e/) next
    branches += NF
    if (!right(path)) { wrong += NF; if (shown++ < 5) print "path", path, $0 }
}
END { print "checked", branches + 0; print "wrong", wrong + 0; print "full", 100 * full / samples }"#;
    PROGRAM.replace("BITS", &format!("\"{}\"", bits_of_bar()))
}

/// Prints the share of samples with a full stack.
fn full(depth: u32) -> String {
    format!(
        "perf script -i perf.data -F brstack 2>/dev/null | awk 'NF > 0 {{ n++; full += NF == {depth} }} \
         END {{ print \"samples\", n; print \"full\", 100 * full / n }}'"
    )
}

fn parts(depth: u32) -> Vec<Part> {
    let scale = SCALE * 32 / depth;
    let check = checker().replace("DEPTH", &depth.to_string());
    vec![
        Part {
            name: "fixed",
            command: format!(
                "{QUIET}{RECORD}:u -c 100000 -- workload --scale {scale} && \
                 perf script -i perf.data --comm workload -F brstacksym 2>/dev/null > stacks && awk '{check}' stacks"
            ),
            figures: of_fixed,
        },
        Part {
            name: "time",
            command: timed(RECORD, "-c 100000", 1000),
            figures: |row| {
                let time = us_per_sample(row)?;
                Ok(vec![figure("guest_us_per_sample", time, "us")])
            },
        },
        Part {
            name: "profile",
            command: format!(
                "{QUIET}{RECORD} -c {PERIOD} -- workload --scale {SCALE} && {}",
                SHARES.replace("perf report", "perf report --no-branch-stack")
            ),
            figures: |row| {
                let difference = Some(share_difference(row));
                Ok(vec![figure(
                    "largest_share_difference_points",
                    difference,
                    "points",
                )])
            },
        },
        Part {
            name: "kernel",
            command: format!(
                "{QUIET}echo 'i=0; while [ $i -lt 60 ]; do /bin/busybox true; i=$((i + 1)); done' > forks && \
                 {RECORD} -c 300000 -- sh forks && {}",
                full(depth)
            ),
            figures: |row| {
                let full = Some(first(row, "full")?);
                let exits = per_sample(row, first(row, "samples")?, &["follow"]);
                Ok(vec![
                    figure("full_stacks_percent:kernel", full, "%"),
                    figure("exits_per_sample:kernel", exits, "exits"),
                ])
            },
        },
    ]
}

/// Returns exits of these kinds for each sample.
fn per_sample(row: &result::Row, samples: f64, kinds: &[&str]) -> Option<f64> {
    let exits = row.run.exits.as_ref()?;
    let is_one = |kind: &str| kinds.iter().any(|&begin| kind.starts_with(begin));
    let count: u64 = (exits.iter())
        .filter(|(kind, _)| is_one(kind))
        .map(|(_, count)| count)
        .sum();
    (samples > 0.0).then(|| count as f64 / samples)
}

fn of_fixed(row: &result::Row) -> Result<Vec<Figure>> {
    /// Reads of records: Intel's and AMD's.
    const READS: [&str; 4] = [
        "msr:read:0x12",
        "msr:read:0x15",
        "msr:read:0x16",
        "msr:read:0xc00103",
    ];
    let samples = row.run.samples.unwrap_or(0) as f64;
    Ok(vec![
        figure("samples", Some(samples), "samples"),
        figure(
            "exits_per_sample",
            per_sample(row, samples, &["follow"]),
            "exits",
        ),
        figure(
            "reads_per_sample",
            per_sample(row, samples, &READS),
            "exits",
        ),
        figure("full_stacks_percent", Some(first(row, "full")?), "%"),
        figure("checked_branches", Some(first(row, "checked")?), "branches"),
        figure("wrong_branches", Some(first(row, "wrong")?), "branches"),
    ])
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&[Policy::Paused]);
    // AMD's core extension has no records.
    let (model, depth) = match context.model {
        Model::Auto | Model::Intel => (Model::Intel, 32),
        Model::Amd | Model::AmdV2 => (Model::AmdV2, 16),
    };
    let mut rows = Vec::new();
    for part in parts(depth) {
        let request = Request {
            model,
            lbr: true,
            ..Request::new(Arch::X86_64)
        };
        for row in &context.compare_as(request, part.name, &designs, &part.command)? {
            rows.extend((part.figures)(row)?.into_iter().map(|figure| Row {
                figure: figure.name.to_owned(),
                mode: MODE,
                measured: figure.value,
                published: None,
                unit: figure.unit,
            }));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_valid_shell() {
        crate::bench::parts::tests::assert_valid_shell(&parts(32));
    }

    /// Returns what the checker says of one sample's stack, the last branch first.
    fn checked(stack: &str) -> String {
        let program = checker().replace("DEPTH", "3");
        let script = format!("printf '%s\\n' '{stack}' | awk '{program}'");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .output();
        let output = output.expect("a shell");
        String::from_utf8(output.stdout).expect("text")
    }

    #[test]
    fn a_stack_that_the_program_cannot_take_is_wrong() {
        let foo = "foo+0xf/foo+0x5";
        let right = format!("{foo} {foo} main+0x1a/foo+0x0");
        assert_eq!(checked(&right), "checked 3\nwrong 0\nfull 100\n");
        let wrong = format!("{foo} main+0x1a/foo+0x0 {foo}");
        assert!(checked(&wrong).contains("wrong 3"));
        // `bar` begins with a 1, and then has 0000.
        let begins = |bit: &str| checked(&format!("{bit} main+0x24/bar+0x0 foo+0x11/main+0x1f"));
        assert!(begins("bar+0x16/bar+0x1a").contains("wrong 0"));
        assert!(begins("bar+0x12/bar+0x18").contains("wrong 3"));
    }
}
