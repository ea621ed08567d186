//! Tests, what they may say, and how it is printed.

use core::fmt::{self, Write};

/// A line of text without an allocator; what does not fit is cut.
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
        // Full is no error: the text is cut.
        let _ = text.write_fmt(message);
        text
    }

    /// The text.
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

/// An exception that an access raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// ESR_EL1.
    pub syndrome: u64,
}

impl Fault {
    /// ESR_EL1 of an instruction that is UNDEFINED: EC 0, IL.
    pub const UNDEFINED: Self = Self { syndrome: 1 << 25 };

    /// The exception class.
    pub const fn class(self) -> u64 {
        self.syndrome >> 26 & 0x3f
    }
}

/// Why a test failed.
#[derive(Clone)]
pub struct Failure(pub Text);

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self(Text::new(format_args!(
            "unexpected exception (got ESR {:#x} want none)",
            fault.syndrome
        )))
    }
}

/// A known way in which some machine differs from the architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deviation(pub &'static str);

/// How a test that did not fail ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// As the architecture says.
    Ok,
    /// As this known deviation says.
    Deviates(Deviation),
    /// It could not be tried, for this reason.
    Skip(&'static str),
}

/// What a test returns.
pub type Verdict = Result<Pass, Failure>;

/// Fails with a message unless `got` is `want`.
pub fn check(what: fmt::Arguments<'_>, got: u64, want: u64) -> Result<(), Failure> {
    if got == want {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{what} (got {got:#x} want {want:#x})"
    ))))
}

/// Fails with a message unless `got` lies in `least..=most`.
pub fn check_range(
    what: fmt::Arguments<'_>,
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

/// As [`check`], with one more value that a known machine gives.
pub fn check_or(
    what: fmt::Arguments<'_>,
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
    /// The worse of two: a deviation is not forgotten.
    pub fn and(self, other: Self) -> Self {
        match self {
            Self::Ok => other,
            _ => self,
        }
    }
}

/// How many tests ended how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Passed, deviations included.
    pub passed: u32,
    /// Failed.
    pub failed: u32,
    /// Not tried.
    pub skipped: u32,
}

impl Tally {
    /// Counts `verdict` and writes the test's line. `prefix` stands before the
    /// name; with `strict`, known deviations are failures.
    pub fn record(
        &mut self,
        out: &mut impl Write,
        (prefix, name): (&str, &str),
        verdict: &Verdict,
        strict: bool,
    ) -> fmt::Result {
        match verdict {
            Ok(Pass::Ok) => {
                self.passed += 1;
                writeln!(out, "ok {prefix}{name}")
            }
            Ok(Pass::Deviates(Deviation(how))) if strict => {
                self.failed += 1;
                writeln!(out, "FAIL {prefix}{name}: deviates: {how}")
            }
            Ok(Pass::Deviates(Deviation(how))) => {
                self.passed += 1;
                writeln!(out, "ok {prefix}{name} (deviates: {how})")
            }
            Ok(Pass::Skip(reason)) => {
                self.skipped += 1;
                writeln!(out, "skip {prefix}{name}: {reason}")
            }
            Err(Failure(text)) => {
                self.failed += 1;
                writeln!(out, "FAIL {prefix}{name}: {}", text.as_str())
            }
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "payload: {} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAZ: Deviation = Deviation("reads as zero");

    fn line(verdict: Verdict, strict: bool) -> (String, Tally) {
        let mut tally = Tally::default();
        let mut out = String::new();
        tally
            .record(&mut out, ("cpu1.", "x"), &verdict, strict)
            .unwrap();
        (out, tally)
    }

    #[test]
    fn lines() {
        assert_eq!(line(Ok(Pass::Ok), false).0, "ok cpu1.x\n");
        assert_eq!(line(Ok(Pass::Skip("no")), true).0, "skip cpu1.x: no\n");
        let failed = check(format_args!("PMCR_EL0"), 1, 2).map(|()| Pass::Ok);
        let (text, tally) = line(failed, false);
        assert_eq!(text, "FAIL cpu1.x: PMCR_EL0 (got 0x1 want 0x2)\n");
        assert_eq!(tally.to_string(), "payload: 0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn deviations() {
        let verdict = check_or(format_args!("r"), 0, 5, (0, RAZ));
        assert_eq!(
            line(verdict.clone(), false).0,
            "ok cpu1.x (deviates: reads as zero)\n"
        );
        let (text, tally) = line(verdict, true);
        assert_eq!(text, "FAIL cpu1.x: deviates: reads as zero\n");
        assert_eq!(tally.failed, 1);
        assert!(check_or(format_args!("r"), 1, 5, (0, RAZ)).is_err());
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
        assert!(check_range(format_args!("n"), 5, 5, 6).is_ok());
        assert!(check_range(format_args!("n"), 7, 5, 6).is_err());
    }
}
