//! The Linux module's choice in C beside the one that it was transcribed from.

use std::cell::Cell;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use lazy_deadline::{BreakEven, Way};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Reads a percent, then deadlines (0: cancelled) with the moments at which they are asked for.
const PROGRAM: &str = r#"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
typedef uint32_t u32;
typedef uint64_t u64;
#include "break_even.h"

int main(void)
{
	struct break_even choice = { 0 };
	unsigned long long deadline, now;

	if (scanf("%u", &choice.least) != 1)
		return 1;
	while (scanf("%llu %llu", &deadline, &now) == 2) {
		if (deadline)
			printf("%d\n", break_even_choose(&choice, deadline, now));
		else
			break_even_cancel(&choice);
	}
	printf("%llu %llu %llu\n", (unsigned long long)choice.plain_deadlines,
	       (unsigned long long)choice.fell_back,
	       (unsigned long long)choice.came_back);
	return 0;
}
"#;

/// So many requests that are alike: how far ahead, the time to the next, and after how many one is cancelled.
type Phase = (u64, u64, u32, u32);

/// Returns what the program is to read, and to print.
fn choices(percent: u8, phases: &[Phase]) -> (String, String) {
    let (mut asks, mut ways) = (format!("{percent}\n"), String::new());
    let mut choice = BreakEven::new(percent);
    let mut now = 1;
    for &(ahead, pause, times, each) in phases {
        for n in 1..=times {
            writeln!(asks, "{} {now}", now + ahead).unwrap();
            let way = match choice.choose(now + ahead, now) {
                Way::Lazy => 0,
                Way::Plain => 1,
                Way::FallBack => 2,
                Way::ComeBack => 3,
            };
            writeln!(ways, "{way}").unwrap();
            now += pause;
            if n % each == 0 {
                writeln!(asks, "0 {now}").unwrap();
                choice.cancel();
            }
        }
    }
    let statistics = choice.statistics();
    writeln!(
        ways,
        "{} {} {}",
        statistics.plain, statistics.fell_back, statistics.came_back
    )
    .unwrap();
    (asks, ways)
}

#[test]
fn the_linux_module_chooses_alike() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/lazy_deadline");
    let room = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let [source, program] = ["break_even.c", "break_even"].map(|name| room.join(name));
    fs::write(&source, PROGRAM).unwrap();
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut compile = Command::new(&compiler);
    compile
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"])
        .args([&folder, Path::new("-o"), &program, &source]);
    match compile.status() {
        Ok(status) => assert!(status.success(), "{compile:?}"),
        Err(error) => return println!("skipped: {}: {error}", compiler.display()),
    }
    let phase = (1_u64..3_000, 1_u64..3_000, 1_u32..900, 1_u32..900);
    let any = (0_u8..=100, prop::collection::vec(phase, 1..8));
    let changes = Cell::new(0);
    TestRunner::new(Config::with_cases(64))
        .run(&any, |(percent, phases)| {
            let (asks, ways) = choices(percent, &phases);
            let mut child = Command::new(&program)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut input = child.stdin.take().unwrap();
            // The program prints more than a pipe holds before it has read all.
            let writer = std::thread::spawn(move || input.write_all(asks.as_bytes()).unwrap());
            let output = child.wait_with_output().unwrap();
            writer.join().unwrap();
            prop_assert_eq!(String::from_utf8(output.stdout).unwrap(), ways.clone());
            let changed = ways.lines().filter(|way| ["2", "3"].contains(way));
            changes.set(changes.get() + changed.count());
            Ok(())
        })
        .unwrap();
    assert!(changes.get() > 0, "no case in which the way changed");
}
