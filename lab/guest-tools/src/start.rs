//! Process entry, arguments, environment and the panic handler.

// UNSAFETY: the process entry has no safe form, and the kernel hands arguments and environment over as raw pointers
// on the initial stack.
#![expect(unsafe_code, reason = "process entry, arguments and environment")]

use core::arch::naked_asm;
use core::ffi::{CStr, c_char};

use crate::heap;
use crate::sys::{self, Fd};

/// Exit status of a program that panicked, as a shell shows SIGABRT.
const PANICKED: i32 = 134;

/// Makes the program's `fn(Process) -> i32` run after start-up.
#[macro_export]
macro_rules! start {
    ($run:path) => {
        #[expect(unsafe_code, reason = "the runtime finds the program by this name")]
        // SAFETY: the one definition of the symbol that `start::enter` declares,
        // with the same signature.
        #[unsafe(no_mangle)]
        fn vpmu_program(process: $crate::start::Process) -> i32 {
            $run(process)
        }
    };
}

unsafe extern "Rust" {
    fn vpmu_program(process: Process) -> i32;
}

/// The arguments and the environment that the kernel handed to this process.
#[derive(Clone, Copy)]
pub struct Process {
    argc: usize,
    argv: *const *const c_char,
    envp: *const *const c_char,
}

impl Process {
    /// Returns the arguments, the program's own name first.
    pub fn arguments(self) -> impl Iterator<Item = &'static CStr> + Clone {
        (0..self.argc).map(move |index| {
            // SAFETY: argv has argc pointers to strings that live as long as
            // the process.
            unsafe { CStr::from_ptr(*self.argv.add(index)) }
        })
    }

    /// Returns `argv` from argument `first` on, NULL-terminated, as `execve`
    /// takes it. A `first` beyond the end gives the empty vector.
    pub fn arguments_from(self, first: usize) -> *const *const c_char {
        // SAFETY: argv[argc] is the terminating NULL.
        unsafe { self.argv.add(first.min(self.argc)) }
    }

    /// Returns the environment, NULL-terminated, as `execve` takes it.
    pub fn environment(self) -> *const *const c_char {
        self.envp
    }

    /// Returns the value of environment variable `name`.
    pub fn variable(self, name: &[u8]) -> Option<&'static [u8]> {
        let mut entry = self.envp;
        loop {
            // SAFETY: envp is a NULL-terminated vector of strings that live as
            // long as the process; the loop ends at the NULL.
            let text = unsafe {
                if (*entry).is_null() {
                    return None;
                }
                let text = CStr::from_ptr(*entry).to_bytes();
                entry = entry.add(1);
                text
            };
            if let Some(value) = text.strip_prefix(name).and_then(|t| t.strip_prefix(b"=")) {
                return Some(value);
            }
        }
    }
}

/// Enters the program from the kernel. The stack pointer points at `argc`,
/// and is a multiple of 16, as the ABI wants it before a call.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    naked_asm!(
        "xor ebp, ebp",
        "mov rdi, rsp",
        "call {enter}",
        "ud2",
        enter = sym enter,
    )
}

/// Enters the program from the kernel. The stack pointer points at `argc`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    naked_asm!(
        "mov x29, xzr",
        "mov x30, xzr",
        "mov x0, sp",
        "b {enter}",
        enter = sym enter,
    )
}

/// Runs the first Rust code of the process. `stack` points at `argc`.
extern "C" fn enter(stack: *const usize) -> ! {
    // SAFETY: the kernel lays out argc, argv[argc], NULL, envp.., NULL.
    let process = unsafe {
        let argc = *stack;
        let argv = stack.add(1).cast();
        Process {
            argc,
            argv,
            envp: argv.add(argc + 1),
        }
    };
    // SAFETY: the first thing that the process does.
    unsafe { heap::open() };
    // SAFETY: defined by `start!` with this signature.
    let status = unsafe { vpmu_program(process) };
    sys::exit(status)
}

#[panic_handler]
fn panic(information: &core::panic::PanicInfo<'_>) -> ! {
    Fd::STDERR.say(format_args!("{information}"));
    sys::exit(PANICKED)
}
