//! The payload's command line: words of `/chosen/bootargs`.

/// What to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Run {
    /// Every test (no `test=`).
    #[default]
    All,
    /// `test=NAME`: the tests whose name begins with NAME.
    Matching,
    /// `test=fuzzregs`: read and write every system register encoding.
    FuzzRegisters,
    /// `test=stray addr=A`: write to A, which a monitor below must stop.
    Stray,
    /// `test=hang`: print a line, then never do anything again.
    Hang,
}

/// The parsed command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BootArgs<'a> {
    /// What to run.
    pub run: Run,
    /// The NAME of [`Run::Matching`].
    pub matching: &'a str,
    /// `addr=A`, decimal or with 0x.
    pub address: Option<u64>,
    /// `strict`: known deviations from the architecture fail.
    pub strict: bool,
}

impl<'a> BootArgs<'a> {
    /// Parses; words of others are ignored, the last of a kind holds.
    pub fn parse(text: &'a str) -> Self {
        let mut parsed = Self::default();
        for word in text.split_ascii_whitespace() {
            if word == "strict" {
                parsed.strict = true;
            } else if let Some(name) = word.strip_prefix("test=") {
                parsed.run = match name {
                    "all" => Run::All,
                    "fuzzregs" => Run::FuzzRegisters,
                    "stray" => Run::Stray,
                    "hang" => Run::Hang,
                    _ => Run::Matching,
                };
                parsed.matching = name;
            } else if let Some(address) = word.strip_prefix("addr=") {
                parsed.address = match address.strip_prefix("0x") {
                    Some(digits) => u64::from_str_radix(digits, 16).ok(),
                    None => address.parse().ok(),
                };
            }
        }
        parsed
    }

    /// Whether the test called `name` shall run.
    pub fn selects(&self, name: &str) -> bool {
        match self.run {
            Run::All => true,
            Run::Matching => name.starts_with(self.matching),
            Run::FuzzRegisters | Run::Stray | Run::Hang => false,
        }
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
        let stray = BootArgs::parse("test=stray addr=0x40200000 strict");
        assert_eq!(stray.run, Run::Stray);
        assert_eq!(stray.address, Some(0x4020_0000));
        assert!(stray.strict);
        assert_eq!(BootArgs::parse("addr=12").address, Some(12));
        assert_eq!(BootArgs::parse("addr=0xzz").address, None);
    }

    #[test]
    fn selection() {
        assert!(BootArgs::parse("").selects("count.cycles"));
        let one = BootArgs::parse("test=count.");
        assert!(one.selects("count.cycles") && !one.selects("gic.sgi"));
        assert!(!BootArgs::parse("test=hang").selects("hang"));
    }
}
