//! Process entry, arguments, environment and the panic handler.

// UNSAFETY: the kernel hands arguments and environment over as raw pointers
// on the initial stack.
#![expect(unsafe_code, reason = "arguments and environment are raw pointers")]

use core::ffi::{CStr, c_char};

use crate::heap;
use crate::sys::{self, Fd};

/// Exit status of a program that panicked, as a shell shows SIGABRT.
const PANICKED: i32 = 134;

/// Defines the program's `fn(Process) -> i32` as what runs after start-up.
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

/// What the kernel handed to this process.
#[derive(Clone, Copy)]
pub struct Process {
    argc: usize,
    argv: *const *const c_char,
    envp: *const *const c_char,
}

impl Process {
    /// The arguments, the program's own name first.
    pub fn arguments(self) -> impl Iterator<Item = &'static CStr> + Clone {
        (0..self.argc).map(move |index| {
            // SAFETY: argv has argc pointers to strings that live as long as
            // the process.
            unsafe { CStr::from_ptr(*self.argv.add(index)) }
        })
    }

    /// `argv` from argument `first` on, NULL-terminated, as `execve` takes it.
    /// `first` beyond the end gives the empty vector.
    pub fn arguments_from(self, first: usize) -> *const *const c_char {
        // SAFETY: argv[argc] is the terminating NULL.
        unsafe { self.argv.add(first.min(self.argc)) }
    }

    /// The environment, NULL-terminated, as `execve` takes it.
    pub fn environment(self) -> *const *const c_char {
        self.envp
    }

    /// The value of environment variable `name`.
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

/// First Rust code of the process; `stack` points at `argc`.
pub(crate) extern "C" fn enter(stack: *const usize) -> ! {
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
