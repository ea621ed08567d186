//! C programs embed the library: with a C library around them, and with none.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const WARNINGS: [&str; 5] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"];

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn example(program: &str) -> PathBuf {
    folder().join("../examples/c").join(program)
}

/// Where cargo has put this test: the profile's folder is above `deps`.
fn target() -> PathBuf {
    let test = env::current_exe().expect("this test's path");
    let deps = test.parent().expect("deps");
    deps.parent()
        .and_then(Path::parent)
        .expect("target")
        .to_path_buf()
}

fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("failed to start {command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?} failed\n{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Builds the static library with these flags of cargo's, and gives the folder that holds it.
fn library<S: AsRef<OsStr>>(flags: &[S], built: &str) -> PathBuf {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(Command::new(cargo)
        .args(["build", "--locked", "-q", "-p", "vpmu-c", "--target-dir"])
        .arg(target())
        .args(flags)
        .current_dir(folder()));
    target().join(built)
}

fn compiler() -> Command {
    let mut cc = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(WARNINGS).arg("-I").arg(folder().join("include"));
    cc
}

/// Builds a program in `room`, and gives its path.
fn program_with_libc(source: &Path, room: &Path) -> PathBuf {
    let library = library::<&str>(&[], "debug");
    let binary = room.join("program");
    run(compiler()
        .arg(source)
        .arg(library.join("libvpmu_c.a"))
        .args(["-lgcc_s", "-lpthread", "-ldl", "-lm", "-o"])
        .arg(&binary));
    binary
}

fn is_installed(program: &str) -> bool {
    let output = Command::new(program).arg("--version").output();
    let installed = output.is_ok_and(|output| output.status.success());
    if !installed {
        println!("skipped: {program} is not installed");
    }
    installed
}

#[test]
fn c_programs_embed_the_engine() {
    let room = tempfile::tempdir().expect("a folder");
    for program in ["tests/c/x86.c", "tests/c/arm.c"] {
        let program = program_with_libc(&folder().join(program), room.path());
        run(&mut Command::new(program));
    }
}

/// Builds a program, and returns what it prints. `None`: this machine cannot run it, as it says.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn output_of(source: &Path) -> Option<String> {
    const SKIPPED: i32 = 77;
    let room = tempfile::tempdir().expect("a folder");
    let program = program_with_libc(source, room.path());
    // A guest that goes astray may run for ever.
    let mut limited = Command::new("timeout");
    let ended = limited.arg("120").arg(&program).output();
    let ended = ended.expect("to start the program");
    let [out, err] = [&ended.stdout, &ended.stderr].map(|text| String::from_utf8_lossy(text));
    if ended.status.code() == Some(SKIPPED) {
        println!("{err}");
        return None;
    }
    assert!(ended.status.success(), "{out}{err}");
    Some(out.into_owned())
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_vmm_in_c_samples_its_guest() {
    if let Some(said) = output_of(&example("kvm.c")) {
        assert_eq!(said, "3 PMIs\n");
    }
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_vmm_in_c_chooses_for_its_guests() {
    output_of(&folder().join("tests/c/kvm.c"));
}

#[test]
fn an_installed_library_is_found_by_pkg_config() {
    if !is_installed("pkg-config") {
        return;
    }
    let room = tempfile::tempdir().expect("a folder");
    let (prefix, binary) = (room.path().join("usr"), room.path().join("x86"));
    run(Command::new(folder().join("install"))
        .arg(&prefix)
        .env("CARGO_TARGET_DIR", target()));
    let flags = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "vpmu"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")));
    run(Command::new("cc")
        .args(WARNINGS)
        .arg(folder().join("tests/c/x86.c"))
        .args(flags.split_whitespace())
        .arg("-o")
        .arg(&binary));
    run(Command::new(&binary).env("LD_LIBRARY_PATH", prefix.join("lib")));
    // A program finds the library by the name that changes with its interface, and each symbol has a version.
    let library = prefix.join("lib/libvpmu.so");
    let output = run(Command::new("readelf").args(["-dW"]).arg(&library));
    assert!(output.contains("soname: [libvpmu.so.1]"), "{output}");
    let symbols = run(Command::new("nm")
        .args(["-D", "--defined-only", "--with-symbol-versions"])
        .arg(&library));
    let names = symbols.lines().filter_map(|line| line.split(' ').nth(2));
    let names: Vec<&str> = names.filter(|name| *name != "VPMU_1").collect();
    assert!(names.contains(&"vpmu_version@@VPMU_1"), "{symbols}");
    let foreign = |name: &&&str| !(name.starts_with("vpmu_") && name.ends_with("@@VPMU_1"));
    assert_eq!(names.iter().find(foreign), None);
}

#[test]
fn a_program_may_be_static() {
    let room = tempfile::tempdir().expect("a folder");
    let library = library::<&str>(&[], "debug");
    let binary = room.path().join("x86");
    run(compiler()
        .arg("-static")
        .arg(folder().join("tests/c/x86.c"))
        .arg(library.join("libvpmu_c.a"))
        .args(["-lgcc_eh", "-lpthread", "-ldl", "-lm", "-o"])
        .arg(&binary));
    run(&mut Command::new(&binary));
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_program_may_be_linked_with_musl() {
    let triple = "x86_64-unknown-linux-musl";
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let folder_of_target =
        run(Command::new(rustc).args(["--print", "target-libdir", "--target", triple]));
    let of_target = PathBuf::from(folder_of_target.trim());
    if !of_target.is_dir() {
        println!("skipped: the compiler has no library for {triple} (rustup target add {triple})");
        return;
    }
    if !is_installed("musl-gcc") {
        return;
    }
    let room = tempfile::tempdir().expect("a folder");
    let library = library(&["--target", triple], &format!("{triple}/debug"));
    let binary = room.path().join("x86");
    // GCC's own unwinder is made for glibc. The compiler brings another.
    run(Command::new("musl-gcc")
        .args(WARNINGS)
        .args(["-static", "-I"])
        .arg(folder().join("include"))
        .arg(folder().join("tests/c/x86.c"))
        .arg(library.join("libvpmu_c.a"))
        .arg("-L")
        .arg(of_target.join("self-contained"))
        .args(["-lunwind", "-o"])
        .arg(&binary));
    run(&mut Command::new(&binary));
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn programs_touch_no_memory_that_is_not_theirs() {
    const SKIPPED: i32 = 77;
    const FOUND: i32 = 99;
    if !is_installed("valgrind") {
        return;
    }
    let room = tempfile::tempdir().expect("a folder");
    for program in ["tests/c/x86.c", "tests/c/arm.c", "tests/c/kvm.c"] {
        let program = program_with_libc(&folder().join(program), room.path());
        let mut checked = Command::new("valgrind");
        checked.args(["-q", "--leak-check=full"]);
        checked.arg(format!("--error-exitcode={FOUND}"));
        let ended = checked.arg(&program).output().expect("to start valgrind");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(matches!(ended.status.code(), Some(0 | SKIPPED)), "{said}");
    }
}

#[test]
fn the_header_is_good_cplusplus() {
    let room = tempfile::tempdir().expect("a folder");
    let source = room.path().join("header.cc");
    fs::write(
        &source,
        "#include \"vpmu.h\"\nint main() { return VPMU_STATUS_OK; }\n",
    )
    .expect("a file");
    run(
        Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()))
            .args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
            .arg(folder().join("include"))
            .arg(&source),
    );
}

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn a_program_without_a_c_library_embeds_the_engine() {
    let triple = "x86_64-unknown-none";
    // script/test says what this compiler needs for the target.
    let own = env::var("X86_FLAGS").unwrap_or_else(|_| format!("--target {triple}"));
    let has_target = own.contains("build-std") || {
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let print = ["--print", "target-libdir", "--target", triple];
        Path::new(run(Command::new(rustc).args(print)).trim()).is_dir()
    };
    if !has_target {
        println!("skipped: the compiler has no library for {triple}: script/setup installs it");
        return;
    }
    let flags = [
        "--release",
        "--no-default-features",
        "--features",
        "arm,x86",
    ]
    .into_iter()
    .chain(own.split_whitespace());
    let library = library(&flags.collect::<Vec<_>>(), "x86_64-unknown-none/release");
    let room = tempfile::tempdir().expect("a folder");
    let binary = room.path().join("bare");
    // Nothing but the library is linked: a symbol that it lacks is an error here.
    run(compiler()
        .args([
            "-ffreestanding",
            "-nostdlib",
            "-static",
            "-fno-pie",
            "-no-pie",
            "-mgeneral-regs-only",
        ])
        .arg(example("bare.c"))
        .arg(library.join("libvpmu_c.a"))
        .arg("-o")
        .arg(&binary));
    assert_eq!(run(&mut Command::new(&binary)), "one PMI\n");
}
