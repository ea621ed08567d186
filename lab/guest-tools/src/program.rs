//! Starts other programs and waits for them.

use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ptr;

use crate::start::Process;
use crate::sys::{self, Child, Errno, Fd};

/// Exit status of a process that could not become the program, as a shell's.
const NOT_FOUND: i32 = 127;

/// Starts the program at the path `words[0]` with these words as its arguments.
/// Its input and output are this process's, except those given.
///
/// # Errors
///
/// When the process cannot be made. If the program cannot be run, the new
/// process says so on standard error and ends with status 127.
pub fn start(
    process: Process,
    words: &[&str],
    input: Option<Fd>,
    output: Option<Fd>,
) -> Result<Child, Errno> {
    let words: Vec<CString> = words
        .iter()
        .map(|&word| CString::new(word).map_err(|_| Errno::ENOENT))
        .collect::<Result<_, _>>()?;
    let mut pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(ptr::null());
    if let Some(child) = sys::fork()? {
        return Ok(child);
    }
    let redirected = [(input, Fd::STDIN), (output, Fd::STDOUT)]
        .into_iter()
        .filter_map(|(file, target)| Some(file?.duplicate_to(target)))
        .collect::<Result<(), _>>();
    let reason = match redirected {
        Ok(()) => sys::execute(&words[0], pointers.as_ptr(), process.environment()),
        Err(errno) => errno,
    };
    Fd::STDERR.say(format_args!(
        "failed to run {}: {}",
        words[0].to_string_lossy(),
        reason.description().unwrap_or_default()
    ));
    sys::exit(NOT_FOUND)
}

/// Starts the program and waits for its end. Returns its status as a shell
/// would show it.
///
/// # Errors
///
/// As [`start`].
pub fn run(
    process: Process,
    words: &[&str],
    input: Option<Fd>,
    output: Option<Fd>,
) -> Result<i32, Errno> {
    let ended = start(process, words, input, output)?.wait()?;
    Ok(ended.end.status())
}
