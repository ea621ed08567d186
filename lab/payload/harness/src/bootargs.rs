//! The command line of a test program.

/// The parsed command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BootArgs<'a> {
    /// `test=NAME`: run the tests whose name begins with NAME. Without this word, all of the usual
    /// tests run.
    pub test: Option<&'a str>,
    /// `addr=A`, decimal or with 0x.
    pub address: Option<u64>,
    /// `ms=N`: how long a test takes that could take any time, in milliseconds.
    pub milliseconds: Option<u64>,
    /// `strict`: known deviations from the architecture fail.
    pub strict: bool,
    /// `busy`: while another CPU runs its tests, the boot CPU does not halt. No count may have what it executes.
    pub busy: bool,
}

impl<'a> BootArgs<'a> {
    /// Parses the command line. Ignores unknown words; the last word of a kind counts.
    pub fn parse(text: &'a str) -> Self {
        let mut parsed = Self::default();
        for word in text.split_ascii_whitespace() {
            if word == "strict" {
                parsed.strict = true;
            } else if word == "busy" {
                parsed.busy = true;
            } else if let Some(name) = word.strip_prefix("test=") {
                parsed.test = Some(name);
            } else if let Some(number) = word.strip_prefix("ms=") {
                parsed.milliseconds = number.parse().ok();
            } else if let Some(address) = word.strip_prefix("addr=") {
                parsed.address = match address.strip_prefix("0x") {
                    Some(digits) => u64::from_str_radix(digits, 16).ok(),
                    None => address.parse().ok(),
                };
            }
        }
        parsed
    }

    /// Returns whether the test called `name` shall run.
    pub fn selects(&self, name: &str) -> bool {
        self.test.is_none_or(|wanted| name.starts_with(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(
            BootArgs::parse("console=ttyAMA0 quiet"),
            BootArgs::default()
        );
        let stray = BootArgs::parse("test=stray addr=0x40200000 ms=20 strict");
        assert_eq!(stray.milliseconds, Some(20));
        assert_eq!(stray.test, Some("stray"));
        assert_eq!(stray.address, Some(0x4020_0000));
        assert!(stray.strict);
        assert!(BootArgs::parse("busy").busy && !stray.busy);
        assert_eq!(BootArgs::parse("addr=12").address, Some(12));
        assert_eq!(BootArgs::parse("addr=0xzz").address, None);
    }

    #[test]
    fn selection() {
        assert!(BootArgs::parse("").selects("count.cycles"));
        let some = BootArgs::parse("test=count.");
        assert!(some.selects("count.cycles") && !some.selects("gic.sgi"));
    }
}
