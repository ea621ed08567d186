//! Tests, their results, and their output.

use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A line of text without an allocator. Text that does not fit is cut.
#[derive(Clone)]
pub struct Text {
    bytes: [u8; Self::SIZE],
    length: usize,
}

impl Text {
    const SIZE: usize = 200;

    /// Formats `message`.
    pub fn new(message: fmt::Arguments<'_>) -> Self {
        let mut text = Self {
            bytes: [0; Self::SIZE],
            length: 0,
        };
        // A full buffer is no error: the text is cut.
        let _ = text.write_fmt(message);
        text
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or("?")
    }
}

impl Write for Text {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        for character in piece.chars() {
            let end = self.length + character.len_utf8();
            let Some(room) = self.bytes.get_mut(self.length..end) else {
                return Err(fmt::Error);
            };
            character.encode_utf8(room);
            self.length = end;
        }
        Ok(())
    }
}

/// The reason why a test failed.
#[derive(Clone)]
pub struct Failure(pub Text);

/// A known way in which some machine differs from the architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deviation(pub &'static str);

/// The result of a test that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// The machine does what the architecture says.
    Ok,
    /// The machine shows this known deviation.
    Deviates(Deviation),
    /// The test could not run, for this reason.
    Skip(&'static str),
}

/// The result of a test.
pub type Verdict = Result<Pass, Failure>;

/// Compares `got` with `want`.
///
/// # Errors
///
/// A message with both, unless they are equal.
pub fn check(what: impl fmt::Display, got: u64, want: u64) -> Result<(), Failure> {
    if got == want {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{what} (got {got:#x} want {want:#x})"
    ))))
}

/// Compares `got` with the range `least..=most`.
///
/// # Errors
///
/// A message with all three, unless `got` lies in the range.
pub fn check_range(
    what: impl fmt::Display,
    got: u64,
    least: u64,
    most: u64,
) -> Result<(), Failure> {
    if (least..=most).contains(&got) {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{what} (got {got} want {least}..={most})"
    ))))
}

/// Compares like [`check`], with one more value that a known machine gives.
///
/// # Errors
///
/// A message, unless `got` is one of the two.
pub fn check_or(
    what: impl fmt::Display,
    got: u64,
    want: u64,
    (other, deviation): (u64, Deviation),
) -> Verdict {
    if got == other && got != want {
        return Ok(Pass::Deviates(deviation));
    }
    check(what, got, want).map(|()| Pass::Ok)
}

impl Pass {
    /// Returns the worse of two results, so that a deviation is not forgotten.
    pub fn and(self, other: Self) -> Self {
        match self {
            Self::Ok => other,
            _ => self,
        }
    }
}

/// The number of tests with each result. CPUs share it, each working while the
/// others wait.
#[derive(Debug, Default)]
pub struct Tally {
    passed: AtomicU32,
    failed: AtomicU32,
    skipped: AtomicU32,
}

impl Tally {
    /// Returns a tally that has counted no test.
    pub const fn new() -> Self {
        Self {
            passed: AtomicU32::new(0),
            failed: AtomicU32::new(0),
            skipped: AtomicU32::new(0),
        }
    }

    /// Counts the `verdict` of the test `name` on CPU number `cpu` and writes the test's line. With
    /// `strict`, known deviations are failures.
    ///
    /// # Errors
    ///
    /// The error of `out`.
    pub fn record(
        &self,
        out: &mut impl Write,
        (cpu, name): (usize, &str),
        verdict: &Verdict,
        strict: bool,
    ) -> fmt::Result {
        let (count, word) = match verdict {
            Ok(Pass::Skip(_)) => (&self.skipped, "skip"),
            Ok(Pass::Deviates(_)) if strict => (&self.failed, "FAIL"),
            Ok(Pass::Ok | Pass::Deviates(_)) => (&self.passed, "ok"),
            Err(_) => (&self.failed, "FAIL"),
        };
        // This is a load and a store, because exclusive accesses need caches, which a program may
        // have off.
        count.store(count.load(Relaxed) + 1, Relaxed);
        write!(out, "{word} ")?;
        if cpu != 0 {
            write!(out, "cpu{cpu}.")?;
        }
        match verdict {
            Ok(Pass::Ok) => writeln!(out, "{name}"),
            Ok(Pass::Deviates(Deviation(how))) if strict => {
                writeln!(out, "{name}: deviates: {how}")
            }
            Ok(Pass::Deviates(Deviation(how))) => writeln!(out, "{name} (deviates: {how})"),
            Ok(Pass::Skip(reason)) => writeln!(out, "{name}: {reason}"),
            Err(Failure(text)) => writeln!(out, "{name}: {}", text.as_str()),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "payload: {} passed, {} failed, {} skipped",
            self.passed.load(Relaxed),
            self.failed.load(Relaxed),
            self.skipped.load(Relaxed)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAZ: Deviation = Deviation("reads as zero");

    fn line(verdict: Verdict, strict: bool) -> (String, Tally) {
        let tally = Tally::new();
        let mut out = String::new();
        tally.record(&mut out, (1, "x"), &verdict, strict).unwrap();
        (out, tally)
    }

    #[test]
    fn lines() {
        assert_eq!(line(Ok(Pass::Ok), false).0, "ok cpu1.x\n");
        assert_eq!(line(Ok(Pass::Skip("no")), true).0, "skip cpu1.x: no\n");
        let failed = check("PMCR_EL0", 1, 2).map(|()| Pass::Ok);
        let (text, tally) = line(failed, false);
        assert_eq!(text, "FAIL cpu1.x: PMCR_EL0 (got 0x1 want 0x2)\n");
        assert_eq!(tally.to_string(), "payload: 0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn deviations() {
        let verdict = check_or("r", 0, 5, (0, RAZ));
        assert_eq!(
            line(verdict.clone(), false).0,
            "ok cpu1.x (deviates: reads as zero)\n"
        );
        let (text, tally) = line(verdict, true);
        assert_eq!(text, "FAIL cpu1.x: deviates: reads as zero\n");
        assert_eq!(tally.to_string(), "payload: 0 passed, 1 failed, 0 skipped");
        assert!(check_or("r", 1, 5, (0, RAZ)).is_err());
        assert_eq!(Pass::Ok.and(Pass::Deviates(RAZ)), Pass::Deviates(RAZ));
        assert_eq!(Pass::Deviates(RAZ).and(Pass::Ok), Pass::Deviates(RAZ));
    }

    #[test]
    fn long_text_is_cut() {
        let text = Text::new(format_args!("{:>300}", "\u{e9}"));
        assert_eq!(text.as_str().len(), 200);
        let text = Text::new(format_args!("{:199}\u{e9}", "a"));
        assert_eq!(text.as_str().len(), 199);
    }

    #[test]
    fn ranges() {
        assert!(check_range("n", 5, 5, 6).is_ok());
        assert!(check_range("n", 7, 5, 6).is_err());
    }
}
