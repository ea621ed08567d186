//! Tests that vpmu-vmm saves a guest of a few instructions and continues it, on this machine's own
//! KVM.
//!
//! Needs a /dev/kvm that runs the guest, and perf events. Without them, the tests say `skipped` on
//! standard error. lab/vpmu-cli/tests has a stock guest that is saved.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, Signal};

const LOAD: u64 = 0x10_0000;

/// Instructions of 64-bit mode.
#[derive(Default)]
struct Code(Vec<u8>);

impl Code {
    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }
    fn mov(self, opcode: u8, value: u32) -> Self {
        self.bytes(&[opcode]).bytes(&value.to_le_bytes())
    }
    fn eax(self, value: u32) -> Self {
        self.mov(0xb8, value)
    }
    fn ecx(self, value: u32) -> Self {
        self.mov(0xb9, value)
    }
    fn edx(self, value: u32) -> Self {
        self.mov(0xba, value)
    }
    fn wrmsr(self, index: u32, value: u32) -> Self {
        self.ecx(index).eax(value).edx(0).bytes(&[0x0f, 0x30])
    }
    /// Adds `dec ecx; jnz`.
    fn spin(self, times: u32) -> Self {
        self.ecx(times).bytes(&[0xff, 0xc9, 0x75, 0xfc])
    }
    /// Writes counter 0 and the TSC, 8 bytes each, to the serial line.
    fn report(self) -> Self {
        const SAVE_EDX: [u8; 2] = [0x89, 0xd3]; // mov ebx, edx
        const EDX_TO_EAX: [u8; 2] = [0x89, 0xd8]; // mov eax, ebx
        self.ecx(0xc1)
            .bytes(&[0x0f, 0x32])
            .bytes(&SAVE_EDX)
            .print()
            .bytes(&EDX_TO_EAX)
            .print()
            .bytes(&[0x0f, 0x31])
            .bytes(&SAVE_EDX)
            .print()
            .bytes(&EDX_TO_EAX)
            .print()
    }
    /// Prints EAX, the low byte first.
    fn print(self) -> Self {
        let out = [0xee, 0xc1, 0xe8, 8]; // out dx, al; shr eax, 8
        self.edx(0x3f8).bytes(&[out; 4].concat())
    }
    fn ring(self, what: u32) -> Self {
        self.edx(0x5650).eax(what).bytes(&[0xee])
    }
    /// Adds a `jmp` to the code that is `at` bytes from the beginning.
    fn jump(self, at: usize) -> Self {
        let back = at as u32;
        let from = self.0.len() as u32 + 5;
        self.mov(0xe9, back.wrapping_sub(from))
    }
    /// Adds `out dx, ax; jmp $`.
    fn power_off(self) -> Self {
        self.edx(0x604).eax(0x3400).bytes(&[0x66, 0xef, 0xeb, 0xfe])
    }
}

/// Returns code that counts cycles in counter 0.
fn counting() -> Code {
    Code::default()
        .wrmsr(0x186, 0x0053_003c)
        .wrmsr(0x38f, 1)
        .spin(100_000)
}

/// Returns an ELF file with one segment, and the sections that the search for RDPMC wants.
fn elf(code: &[u8]) -> Vec<u8> {
    let names = b"\0.text\0.shstrtab\0";
    let code_at = 64 + 56;
    let sections_at = code_at + code.len() + names.len();
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64
    for word in [LOAD, 64, sections_at as u64] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 64, 3, 2] {
        file.extend(half.to_le_bytes());
    }
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]); // to be loaded, readable, executable
    let length = code.len() as u64;
    for word in [code_at as u64, LOAD, LOAD, length, length, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file.extend(names);
    let mut section = |name: u32, kind: u32, flags: u64, address: u64, at: usize, size: usize| {
        file.extend([name, kind].map(u32::to_le_bytes).concat());
        for word in [flags, address, at as u64, size as u64, 0, 1, 0] {
            file.extend(word.to_le_bytes());
        }
    };
    section(0, 0, 0, 0, 0, 0);
    section(1, 1, 6, LOAD, code_at, code.len());
    section(7, 3, 0, 0, code_at + code.len(), names.len());
    file
}

struct Files {
    _folder: tempfile::TempDir,
    kernel: PathBuf,
    machine: PathBuf,
}

impl Files {
    fn with(code: Code) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("kernel");
        fs::write(&kernel, elf(&code.0)).unwrap();
        Self {
            kernel,
            machine: folder.path().join("machine"),
            _folder: folder,
        }
    }

    /// Boots the guest, with a place for its save. It programs Intel's registers, whatever the host's processor is.
    fn boot(&self) -> Command {
        let mut command = vmm();
        command
            .args(["--model", "intel", "--memory", "64M", "--kernel"])
            .arg(&self.kernel)
            // This guest has no IDT, by which RDPMC could come at run time.
            .args(["--rdpmc", "load"]);
        command.arg("--save").arg(&self.machine);
        command
    }

    fn restore(&self, file: &Path) -> Output {
        vmm().arg("--restore").arg(file).output().unwrap()
    }
}

fn vmm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vpmu-vmm"));
    command.stdin(Stdio::null());
    command
}

/// Returns whether the guest runs. A machine that cannot run it at all is no failure of saving.
fn runs(output: &Output) -> bool {
    let errors = String::from_utf8_lossy(&output.stderr);
    let missing = [
        "cannot open /dev/kvm",
        "this KVM cannot",
        "perf_event_paranoid",
        "no perf events",
    ];
    let skip = output.status.code() == Some(1) && missing.iter().any(|word| errors.contains(word));
    if skip {
        eprintln!("skipped: {errors}");
    }
    !skip
}

/// Returns the count and the TSC that a guest has printed.
fn reported(output: &Output) -> (u64, u64) {
    let word = |at| u64::from_le_bytes(output.stdout[at..at + 8].try_into().unwrap());
    (word(0), word(8))
}

#[test]
fn a_guest_goes_on_where_it_was_saved() {
    let files = Files::with(
        counting()
            .report()
            .ring(3)
            .report()
            .spin(100_000)
            .power_off(),
    );
    let begin = tsc();
    let saved = files.boot().output().unwrap();
    let end = tsc();
    if !runs(&saved) {
        return;
    }
    assert_eq!(saved.status.code(), Some(4), "{saved:?}");
    assert_eq!(
        saved.stdout[16], 0x1e,
        "it went on after the save: {saved:?}"
    );
    for _ in 0..2 {
        // The pause is long beside the time for which the guest ran, however slow the machine is.
        while tsc() - end < 2 * (end - begin) {
            sleep(Duration::from_millis(100));
        }
        let again = tsc();
        let restored = files.restore(&files.machine);
        let ran = (end - begin) + (tsc() - again);
        assert_eq!(restored.status.code(), Some(0), "{restored:?}");
        let ((before, tsc_before), (after, tsc_after)) = (reported(&saved), reported(&restored));
        // The counter has kept its value, and goes on. Neither the counter nor the TSC has seen the
        // pause.
        assert!(before > 0 && after > before, "{before} {after}");
        let text = String::from_utf8_lossy(&restored.stdout[16..]).into_owned();
        assert!(text.contains(r#""backing":"#), "{text}");
        if (begin..=end).contains(&tsc_before) {
            eprintln!("skipped in part: this KVM gives guests the host's own TSC");
        } else {
            // A new guest's TSC begins at 0, and runs as fast as the host's.
            let passed = tsc_after - tsc_before;
            assert!(
                tsc_before <= end - begin && passed <= ran,
                "{passed} of {ran}"
            );
        }
        // Where a clock counts, cycles are the TSC's ticks; no processor makes eight cycles of one
        // tick.
        let clock = text.contains(r#""backing":"clock""#);
        let most = if clock { ran + ran / 50 } else { 8 * ran };
        assert!(after - before <= most, "{} of {most}", after - before);
    }
}

/// Returns this machine's time-stamp counter.
#[expect(unsafe_code, reason = "an instruction")]
fn tsc() -> u64 {
    // SAFETY: reads a counter that every x86-64 processor has.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[test]
fn what_is_no_whole_machine_is_refused() {
    let files = Files::with(counting().ring(3).power_off());
    let saved = files.boot().output().unwrap();
    if !runs(&saved) {
        return;
    }
    assert_eq!(saved.status.code(), Some(4), "{saved:?}");
    let whole = fs::read(&files.machine).unwrap();
    let other = files.machine.with_extension("other");
    let mut cases = vec![
        (files.kernel.clone(), "it holds no machine"),
        (files.machine.with_extension("absent"), "No such file"),
    ];
    let mut case = |name: &str, bytes: &[u8], says| {
        let path = other.with_extension(name);
        fs::write(&path, bytes).unwrap();
        cases.push((path, says));
    };
    case("cut", &whole[..whole.len() / 2], "it ends too early");
    case("header", &whole[..12], "it ends too early");
    case("longer", &[&whole[..], b"x"].concat(), "something follows");
    let mut changed = whole.clone();
    changed[whole.len() - 100] ^= 1;
    case("changed", &changed, "its checksum");
    changed = whole.clone();
    changed[8] = 99;
    case("newer", &changed, "its format is 99");
    for (path, says) in cases {
        let output = files.restore(&path);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{}: {errors}",
            path.display()
        );
        assert!(errors.contains(says), "{}: {errors}", path.display());
    }
}

#[test]
fn nothing_but_a_file_is_replaced() {
    let files = Files::with(counting());
    let _socket = UnixListener::bind(&files.machine).unwrap();
    let refused = files.boot().output().unwrap();
    if !runs(&refused) {
        return;
    }
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("no file"),
        "{said}"
    );
    assert!(!fs::metadata(&files.machine).unwrap().is_file());
}

#[test]
fn a_signal_saves_a_guest_that_never_asks() {
    let code = counting();
    let again = code.0.len();
    let files = Files::with(code.report().spin(1_000_000).jump(again));
    let mut child = files.boot().stdout(Stdio::piped()).spawn().unwrap();
    let signal = |child: &Child, signal| {
        let pid = Pid::from_child(child);
        rustix::process::kill_process(pid, signal).unwrap();
    };
    wait_for_output(&mut child);
    signal(&child, Signal::USR2);
    // While it is written, or as soon as that begins: the guest would be lost.
    sleep(Duration::from_millis(5));
    signal(&child, Signal::TERM);
    let saved = child.wait_with_output().unwrap();
    if !runs(&saved) {
        return;
    }
    assert_eq!(saved.status.code(), Some(4), "{saved:?}");
    let mut restored = vmm()
        .arg("--restore")
        .arg(&files.machine)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for_output(&mut restored);
    signal(&restored, Signal::TERM);
    let ended = restored.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
}

/// Waits until the guest has printed, or is gone.
fn wait_for_output(child: &mut Child) {
    use std::io::Read;
    let mut first = [0];
    let _ = child.stdout.as_mut().unwrap().read(&mut first);
}
