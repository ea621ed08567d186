//! Stacks of programs that run here, against a stack of calls that single steps have kept.
//!
//! A program is executed instruction by instruction under ptrace from its first one on. An instruction that pushes its own
//! successor has called; a call has returned, or was left by an exception or longjmp, when RSP is above its return address. So
//! the reference knows each open call and reads no CFI. Every few hundred instructions the program is unwound, and each call
//! is compared.
//!
//! All pages are present: reads of `/proc/PID/mem` bring them in. Programs that take minutes are ignored by default:
//! `cargo test --release -p vpmu-unwind --test native -- --ignored --nocapture`.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod process;
mod shadow;

use std::path::{Path, PathBuf};
use std::process::Command;

use shadow::{Table, compare, compare_running};

/// Compiles a program of `programs/`; `None`: there is no compiler.
fn compile(directory: &Path, name: &str, compiler: &str, flags: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/native/programs");
    let program = directory.join(name);
    let compiled = Command::new(compiler)
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(source.join(name))
        .status();
    match compiled {
        Ok(status) => {
            assert!(status.success(), "{compiler} {name}");
            Some(program)
        }
        Err(_) => {
            println!("skipped: {compiler} is not installed");
            None
        }
    }
}

fn check(name: &str, table: &Table) {
    println!("{name}: {table}");
    assert_eq!(table.wrong, 0, "{name}: {:?}", table.first_wrong);
    assert!(table.stacks > 0 && table.calls > 0, "{name} was not seen");
}

/// A table of what compilers make: each without frame pointers and with, each optimized.
#[test]
fn small_programs_have_no_wrong_frame() {
    let directory = tempfile::tempdir().expect("a directory");
    // A dynamic program is some 100,000 instructions in its loader.
    let (dynamic, fixed) = ((200_000, 101), (50_000, 29));
    for (name, compiler, flags, (steps, every)) in [
        (
            "calls.c",
            "cc",
            &["-O2", "-fomit-frame-pointer"][..],
            dynamic,
        ),
        ("calls.c", "cc", &["-O0"], dynamic),
        (
            "calls.c",
            "cc",
            &["-O2", "-static", "-Wl,--eh-frame-hdr"],
            fixed,
        ),
        ("calls.c", "cc", &["-O1", "-no-pie"], dynamic),
        (
            "throws.cc",
            "c++",
            &["-O2", "-static", "-Wl,--eh-frame-hdr"],
            fixed,
        ),
    ] {
        let Some(program) = compile(directory.path(), name, compiler, flags) else {
            continue;
        };
        let table = compare(&[program.to_str().expect("UTF-8")], steps, every);
        check(&format!("{name} {flags:?}"), &table);
        // The loader's first instructions have no CFI, so that nothing says that they are the first.
        let complete = table.complete + table.full + table.whole;
        assert!(complete * 100 >= table.stacks * 97, "{name}: {table}");
    }
}

/// Programs whose linker wrote no table of their CFI: each function is followed to its return.
#[test]
fn code_without_cfi_has_no_wrong_frame() {
    let directory = tempfile::tempdir().expect("a directory");
    for flags in ["-fomit-frame-pointer", "-fno-omit-frame-pointer"] {
        let flags = ["-O2", "-static", "-Wl,--no-eh-frame-hdr", flags];
        let Some(program) = compile(directory.path(), "calls.c", "cc", &flags) else {
            return;
        };
        let table = compare(&[program.to_str().expect("UTF-8")], 50_000, 29);
        check(&format!("calls.c {flags:?}"), &table);
    }
}

/// Compiles a program of `programs/` by its language's own compiler; `None`: there is none.
fn build(compiler: &str, arguments: &[&str]) -> Option<()> {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/native/programs");
    let built = Command::new(compiler)
        .args(arguments)
        .current_dir(programs)
        .env("GO111MODULE", "off")
        .status();
    let Ok(status) = built else {
        println!("skipped: {compiler} is not installed");
        return None;
    };
    assert!(status.success(), "{compiler}");
    Some(())
}

#[test]
#[ignore = "Go's and Java's compilers, and a minute of single steps"]
fn programs_with_frame_pointers_have_no_wrong_frame() {
    let directory = tempfile::tempdir().expect("a directory");
    let folder = directory.path().to_str().expect("UTF-8");
    let go = format!("{folder}/calls");
    if build("go", &["build", "-o", &go, "calls.go"]).is_some() {
        let mut command = Command::new(&go);
        command.envs([("GOGC", "off"), ("GODEBUG", "asyncpreemptoff=1")]);
        check("go", &compare_running(&mut command, 200_000, 101));
    }
    if build("javac", &["-d", folder, "Calls.java"]).is_some() {
        let mut command = Command::new("java");
        command.args(["-XX:+PreserveFramePointer", "-XX:+UseSerialGC"]);
        command.args(["-cp", folder, "Calls"]);
        check("java", &compare_running(&mut command, 200_000, 101));
    }
}

/// Writes the address spaces of a small program, as far as they are read for its calls: the corpus of the fuzz target `unwind`.
#[test]
#[ignore = "writes fuzz/corpus/unwind"]
fn keep_spaces() {
    let directory = tempfile::tempdir().expect("a directory");
    let flags = [
        "-O1",
        "-nostdlib",
        "-static",
        "-Wl,--eh-frame-hdr",
        "-fno-stack-protector",
        "-z",
        "noseparate-code",
    ];
    let program = compile(directory.path(), "tiny.c", "cc", &flags).expect("a compiler");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/unwind");
    std::fs::create_dir_all(&folder).expect("made");
    for steps in [30, 60, 64, 90] {
        let bytes = shadow::space(&[program.to_str().expect("UTF-8")], steps);
        std::fs::write(folder.join(format!("tiny-{steps}")), bytes).expect("written");
    }
}

#[test]
#[ignore = "minutes of single steps"]
fn programs_of_a_distribution_have_no_wrong_frame() {
    let directory = tempfile::tempdir().expect("a directory");
    let c = directory.path().join("a.c");
    let text = directory.path().join("text");
    std::fs::write(&c, "#include <stdio.h>\nint main(int n, char **v) { for (int i = 0; i < n; i++) puts(v[i]); return 0; }\n")
        .expect("written");
    let lines: String = (0..400).map(|n| format!("{}\n", n * 7919 % 1009)).collect();
    std::fs::write(&text, lines).expect("written");
    let (c, text) = (c.to_str().expect("UTF-8"), text.to_str().expect("UTF-8"));
    let cc1 = Command::new("gcc").arg("-print-prog-name=cc1").output();
    let cc1 = cc1.map_or(String::new(), |out| {
        String::from_utf8_lossy(&out.stdout).trim().into()
    });
    let python = "def f(n):\n return n if n < 2 else f(n-1)+f(n-2)\nprint(f(9), sorted([3,1,2], key=lambda x: -x))";
    let perl = "sub f { my $n = shift; $n < 2 ? $n : f($n-1) + f($n-2) } print f(9), sort { $b <=> $a } 1..9";
    let programs: [(&str, &[&str]); 6] = [
        ("python3", &["/usr/bin/python3", "-S", "-c", python]),
        ("perl", &["/usr/bin/perl", "-e", perl]),
        ("sort", &["/usr/bin/sort", text]),
        ("openssl", &["/usr/bin/openssl", "dgst", "-sha256", text]),
        ("cc1", &[&cc1, "-quiet", "-O2", c, "-o", "/dev/null"]),
        ("gdb", &["/usr/bin/gdb", "--version"]),
    ];
    let mut calls = 0;
    for (name, arguments) in programs {
        if !Path::new(arguments[0]).exists() {
            println!("skipped: {name} is not installed");
            continue;
        }
        let table = compare(arguments, 1_200_000, 499);
        check(name, &table);
        calls += table.calls;
    }
    println!("{calls} frames");
}
