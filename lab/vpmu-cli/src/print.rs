//! Standard output.

use std::io::{self, Write};

use vpmu_lab::Error;

/// Writes to standard output.
pub(crate) fn print(text: &str) -> vpmu_lab::Result<()> {
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(Error::file("write", "the output"))
}
