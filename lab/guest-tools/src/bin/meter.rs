//! `meter [--output FILE] [--doorbell] [--ring] [--save] [--sync] [--] PROG [ARGS..]`
//!
//! Runs PROG and reports its cost on one line of standard output, see
//! [`vpmu_measure::Meter`]. meter's exit status is PROG's (128 + signal
//! for a killed one), 127 when PROG is not found, 126 when it cannot be
//! executed, and 125 when meter itself failed.
//!
//! - `--output FILE`: PROG's standard output goes to FILE.
//! - `--doorbell`: tells the hypervisor below to measure while PROG runs.
//! - `--ring`: the same where perhaps nobody answers, as under a VMM that is not
//!   this project's, whose host sees the write of the port (x86-64).
//! - `--save`: makes the VMM below save the machine when PROG has ended. The
//!   machine goes on in another process of the VMM, and here.
//! - `--sync`: prints `\x1ebegin` before and `\x1eend` after, each time waiting
//!   for a line on standard input, so that whoever holds the console can take
//!   snapshots.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
vpmu_guest_tools::start!(meter::run);

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("meter: built for a guest, does nothing on the host");
}

#[cfg(target_os = "none")]
mod meter {
    use vpmu_guest_tools::doorbell::Doorbell;
    use vpmu_guest_tools::files;
    use vpmu_guest_tools::interrupts::Interrupts;
    use vpmu_guest_tools::options::Meter;
    use vpmu_guest_tools::search::{DEFAULT_PATH, candidates};
    use vpmu_guest_tools::start::Process;
    use vpmu_guest_tools::sys::{self, Errno, Fd, flags};
    use vpmu_measure::{self as measure, Record};

    const FAILED: i32 = 125;
    const NOT_EXECUTABLE: i32 = 126;
    const NOT_FOUND: i32 = 127;

    macro_rules! fail {
        ($($message:tt)*) => {{
            Fd::STDERR.say(format_args!("meter: {}", format_args!($($message)*)));
            return FAILED;
        }};
    }

    pub(crate) fn run(process: Process) -> i32 {
        let options = match Meter::parse(process.arguments()) {
            Ok(options) => options,
            Err(error) => fail!(
                "{error}\nusage: meter [--output FILE] [--doorbell] [--ring] [--save] [--sync] [--] PROG [ARGS..]"
            ),
        };
        let output = match options.output.map(|path| sys::open(path, flags::CREATE)) {
            None => None,
            Some(Ok(file)) => Some(file),
            Some(Err(errno)) => fail!("failed to open the output file: {errno}"),
        };
        let open = match options.ring {
            true => Doorbell::open_unasked,
            false => Doorbell::open,
        };
        let wanted = options.doorbell || options.save || options.ring;
        let rings = options.doorbell || options.ring;
        let doorbell = match wanted.then(open) {
            None => None,
            Some(Ok(doorbell)) if options.save && !doorbell.saves() => {
                fail!("--save is for guests of vpmu-vmm")
            }
            Some(Ok(doorbell)) => Some(doorbell),
            Some(Err(error)) => fail!("{error}"),
        };

        if options.sync && !wait_for_line("\x1ebegin\n") {
            fail!("standard input ended before the command began");
        }
        let interrupts_before = interrupts();
        let interactive = sys::ignore_signal(sys::SIGINT);
        if let (true, Some(doorbell)) = (rings, &doorbell) {
            doorbell.begin();
        }
        let begin = sys::monotonic_ns();
        let ended = match sys::fork() {
            Ok(None) => {
                sys::restore_signal(sys::SIGINT, interactive);
                if let Some(file) = output
                    && let Err(errno) = file.duplicate_to(Fd::STDOUT)
                {
                    fail!("failed to redirect standard output: {errno}");
                }
                return execute(process, options.command);
            }
            Ok(Some(child)) => child.wait(),
            Err(errno) => Err(errno),
        };
        let end = sys::monotonic_ns();
        if let (true, Some(doorbell)) = (rings, &doorbell) {
            doorbell.end();
        }
        if let (true, Some(doorbell)) = (options.save, &doorbell) {
            doorbell.save();
        }
        sys::restore_signal(sys::SIGINT, interactive);
        let interrupts_after = interrupts();
        if options.sync && !wait_for_line("\x1eend\n") {
            fail!("standard input ended before the command's end was acknowledged");
        }

        let ended = match ended {
            Ok(ended) => ended,
            Err(errno) => fail!("failed to run the command: {errno}"),
        };
        let (real_ns, end) = (end - begin, ended.end);
        let taken =
            (interrupts_after.zip(interrupts_before)).map(|(after, before)| after.since(before));
        let record = Record::Meter(measure::Meter {
            status: end.status(),
            signal: end.signal(),
            real_ns,
            user_us: ended.user_us,
            sys_us: ended.sys_us,
            pmis: taken.and_then(|taken| taken.pmu),
            interrupts: taken.map(|taken| taken.all),
        });
        if let Err(errno) = Fd::STDOUT.write_all(record.line().as_bytes()) {
            fail!("failed to report: {errno}");
        }
        end.status()
    }

    /// Becomes the command. Returns the exit status when that fails.
    fn execute(process: Process, first: usize) -> i32 {
        let command = process.arguments().nth(first).unwrap_or_default();
        let path = process.variable(b"PATH").unwrap_or(DEFAULT_PATH);
        let mut reason = Errno::ENOENT;
        for candidate in candidates(command, path) {
            let arguments = process.arguments_from(first);
            match sys::execute(&candidate, arguments, process.environment()) {
                Errno::ENOENT | Errno::ENOTDIR => {}
                // This follows execvp: another directory may have a command
                // that can be run.
                Errno::EACCES => reason = Errno::EACCES,
                errno => {
                    reason = errno;
                    break;
                }
            }
        }
        Fd::STDERR.say(format_args!(
            "meter: failed to run {}: {}",
            command.to_str().unwrap_or("the command"),
            reason.description().unwrap_or_default()
        ));
        if reason == Errno::ENOENT {
            NOT_FOUND
        } else {
            NOT_EXECUTABLE
        }
    }

    fn interrupts() -> Option<Interrupts> {
        let text = files::bytes("/proc/interrupts").ok()?;
        Some(Interrupts::parse(&text))
    }

    /// Prints `mark`, then waits for a line. Returns false when the input
    /// ended.
    fn wait_for_line(mark: &str) -> bool {
        if Fd::STDOUT.write_all(mark.as_bytes()).is_err() {
            return false;
        }
        let mut byte = [0];
        loop {
            match Fd::STDIN.read(&mut byte) {
                Ok(1) if byte[0] == b'\n' => return true,
                Ok(1) => {}
                _ => return false,
            }
        }
    }
}
