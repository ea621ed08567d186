//! A program under ptrace.
#![expect(
    unsafe_code,
    reason = "UNSAFETY: ptrace has no safe form in this workspace's crates"
)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vpmu_unwind::{Memory, PAGE, Registers};

/// A program that has stopped. It ends with this value.
pub(crate) struct Process {
    child: Child,
    /// The thread that is traced.
    thread: i32,
    memory: File,
    /// What is mapped, and readable.
    maps: Vec<(u64, u64)>,
}

/// How a step ended.
pub(crate) enum Step {
    Done,
    /// A signal is to be delivered.
    Signal(i32),
    Exited,
}

impl Process {
    /// Starts a program, which stops at its first instruction.
    pub(crate) fn start(arguments: &[&str]) -> io::Result<Self> {
        let mut command = Command::new(arguments[0]);
        command.args(&arguments[1..]);
        command.env_clear().env("PATH", "/usr/bin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: ptrace(PTRACE_TRACEME) is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        let child = command.spawn()?;
        let memory = File::open(format!("/proc/{}/mem", child.id()))?;
        let mut this = Self {
            thread: child.id().cast_signed(),
            child,
            memory,
            maps: Vec::new(),
        };
        this.wait();
        // The memory of what was executed, not of what was there before.
        this.memory = File::open(format!("/proc/{}/mem", this.child.id()))?;
        Ok(this)
    }

    /// Starts a program, and stops the thread that has worked most after a while.
    pub(crate) fn attach(command: &mut Command, after: Duration) -> io::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn()?;
        std::thread::sleep(after);
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id()))?;
        let worked = |thread: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{}/task/{thread}/stat", child.id()));
            let stat = stat.unwrap_or_default();
            // utime is the twelfth word behind the name.
            let words = stat.rsplit(')').next().unwrap_or_default();
            let word = words.split_whitespace().nth(11);
            word.and_then(|word| word.parse().ok()).unwrap_or(0_u64)
        };
        let threads = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        let thread = threads.max_by_key(worked).expect("a thread");
        let this = Self {
            thread,
            memory: File::open(format!("/proc/{}/mem", child.id()))?,
            child,
            maps: Vec::new(),
        };
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            // SAFETY: these requests read and write no memory of this process.
            if unsafe { libc::ptrace(request, thread, 0, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        this.wait();
        Ok(this)
    }

    fn wait(&self) -> Step {
        /// A thread that waits this long for others is left.
        const LONGEST: Duration = Duration::from_secs(5);
        let begun = Instant::now();
        let mut status = 0;
        let waited = loop {
            // SAFETY: `status` is valid for the call.
            let waited =
                unsafe { libc::waitpid(self.thread, &mut status, libc::__WALL | libc::WNOHANG) };
            if waited != 0 || begun.elapsed() > LONGEST {
                break waited;
            }
            std::thread::yield_now();
        };
        match waited == self.thread && libc::WIFSTOPPED(status) {
            true if libc::WSTOPSIG(status) == libc::SIGTRAP => Step::Done,
            true => Step::Signal(libc::WSTOPSIG(status)),
            false => Step::Exited,
        }
    }

    /// Executes one instruction, after the delivery of `signal` if that is not 0.
    pub(crate) fn step(&self, signal: i32) -> Step {
        // SAFETY: the request reads and writes no memory of this process.
        let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.thread, 0, signal) };
        match stepped {
            0 => self.wait(),
            _ => Step::Exited,
        }
    }

    pub(crate) fn registers(&self) -> Registers {
        let mut all = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
        // SAFETY: the request writes one structure of this type, for which any bytes are valid.
        let all = unsafe {
            libc::ptrace(libc::PTRACE_GETREGS, self.thread, 0, all.as_mut_ptr());
            all.assume_init()
        };
        Registers {
            general: [
                all.rax, all.rdx, all.rcx, all.rbx, all.rsi, all.rdi, all.rbp, all.rsp, all.r8,
                all.r9, all.r10, all.r11, all.r12, all.r13, all.r14, all.r15,
            ],
            rip: all.rip,
        }
    }

    /// Reads anew what is mapped.
    pub(crate) fn read_maps(&mut self) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()));
        self.maps = maps
            .unwrap_or_default()
            .lines()
            .filter(|line| line.contains(" r") && !line.contains("[vsyscall]"))
            .filter_map(|line| {
                let (from, to) = line.split_once(' ')?.0.split_once('-')?;
                let number = |text| u64::from_str_radix(text, 16).ok();
                Some((number(from)?, number(to)?))
            })
            .collect();
    }
}

impl Memory for Process {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        self.memory.read_exact_at(bytes, address).is_ok()
    }

    fn page(&mut self, address: u64) -> Option<u64> {
        let mapped = |&&(from, to): &&(u64, u64)| from <= address && address < to;
        self.maps.iter().find(mapped).map(|_| address / PAGE)
    }

    fn present_below(&mut self, address: u64, lowest: u64) -> Option<u64> {
        let last = self.maps.iter().rev().find(|&&(from, _)| from <= address);
        let page = last.map(|&(_, to)| (address & !(PAGE - 1)).min(to - PAGE));
        page.filter(|&page| page >= lowest)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // A traced thread's end is reported first.
        while self.thread != self.child.id().cast_signed() && !matches!(self.wait(), Step::Exited) {
        }
        let _ = self.child.wait();
    }
}
