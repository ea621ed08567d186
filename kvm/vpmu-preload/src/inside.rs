//! This library's work on a thread, and what the library says.

use std::cell::Cell;
use std::fmt::Display;
use std::io::{self, Write};

thread_local! {
    /// Whether this library is at work on this thread. Its own calls are then no business of its own.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// This library's work on the calling thread.
pub(crate) struct Inside(());

impl Inside {
    /// Begins work, unless the thread is at work.
    pub(crate) fn enter() -> Option<Self> {
        // `then_some` would make one that is dropped at once, whose end would be the other's.
        (!INSIDE.replace(true)).then(|| Self(()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Says something to the user, who sees the program's standard error.
pub(crate) fn say(text: impl Display) {
    // A program whose standard error is closed goes on.
    let _ = io::stderr().write_all(format!("vpmu exec: {text}\n").as_bytes());
}
