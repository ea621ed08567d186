//! Command lines of the two programs.

use core::ffi::CStr;
use core::fmt;

use crate::mix::Functions;

/// The reason why a command line makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsageError {
    /// An unknown option.
    Unknown,
    /// An option lacks its value.
    Value,
    /// `--scale` wants a number.
    Number,
    /// An unknown function.
    Function,
    /// `meter` has no command to run.
    Command,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown option",
            Self::Value => "option lacks its value",
            Self::Number => "--scale takes a number from 1 to 18446744073709551615",
            Self::Function => "no such function (main, foo, bar or qux)",
            Self::Command => "no command to run",
        })
    }
}

/// The request to `meter`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Meter<'a> {
    /// File that takes the command's standard output.
    pub output: Option<&'a CStr>,
    /// Ring the monitor's doorbell around the command.
    pub doorbell: bool,
    /// Ring it though perhaps nobody has one.
    pub ring: bool,
    /// Have the VMM save the machine after the command.
    pub save: bool,
    /// Wait for a line on standard input before and after.
    pub sync: bool,
    /// Index of the command in the arguments.
    pub command: usize,
}

impl<'a> Meter<'a> {
    /// Parses all arguments, the program's own name first.
    ///
    /// # Errors
    ///
    /// Names the first wrong argument, and the mistake.
    pub fn parse(arguments: impl Iterator<Item = &'a CStr>) -> Result<Self, UsageError> {
        let mut options = Self::default();
        let mut arguments = arguments.enumerate().skip(1).peekable();
        while let Some((_, argument)) =
            arguments.next_if(|(_, argument)| argument.to_bytes().starts_with(b"-"))
        {
            match argument.to_bytes() {
                b"--output" => {
                    options.output = Some(arguments.next().ok_or(UsageError::Value)?.1);
                }
                b"--doorbell" => options.doorbell = true,
                b"--ring" => options.ring = true,
                b"--save" => options.save = true,
                b"--sync" => options.sync = true,
                b"--" => break,
                _ => return Err(UsageError::Unknown),
            }
        }
        options.command = arguments.next().ok_or(UsageError::Command)?.0;
        Ok(options)
    }
}

/// The request to `workload`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workload {
    /// Number of units of work.
    pub scale: u64,
    /// The functions that each unit calls.
    pub functions: Functions,
}

impl Workload {
    /// Units of work without `--scale`: 100 million instructions.
    pub const DEFAULT_SCALE: u64 = 1000;

    /// Parses all arguments, the program's own name first.
    ///
    /// # Errors
    ///
    /// Names the first wrong argument, and the mistake.
    pub fn parse<'a>(arguments: impl Iterator<Item = &'a CStr>) -> Result<Self, UsageError> {
        let mut options = Self {
            scale: Self::DEFAULT_SCALE,
            functions: Functions::ALL,
        };
        let mut arguments = arguments.skip(1);
        while let Some(argument) = arguments.next() {
            match argument.to_bytes() {
                b"--scale" => {
                    let text = arguments.next().ok_or(UsageError::Value)?;
                    options.scale = str::from_utf8(text.to_bytes())
                        .ok()
                        .and_then(|text| text.parse().ok())
                        .filter(|&scale| scale > 0)
                        .ok_or(UsageError::Number)?;
                }
                name if name.starts_with(b"-") => return Err(UsageError::Unknown),
                name => {
                    options.functions = Functions::named(name).ok_or(UsageError::Function)?;
                }
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter() {
        let parse = |arguments: &[&'static CStr]| Meter::parse(arguments.iter().copied());
        assert_eq!(
            parse(&[
                c"meter",
                c"--doorbell",
                c"--output",
                c"/o",
                c"--",
                c"ls",
                c"--sync"
            ]),
            Ok(Meter {
                output: Some(c"/o"),
                doorbell: true,
                ring: false,
                save: false,
                sync: false,
                command: 5,
            })
        );
        assert_eq!(parse(&[c"meter", c"ls"]).map(|m| m.command), Ok(1));
        assert_eq!(parse(&[c"meter", c"--", c"--x"]).map(|m| m.command), Ok(2));
        assert!(parse(&[c"meter", c"--save", c"ls"]).unwrap().save);
        assert!(parse(&[c"meter", c"--ring", c"ls"]).unwrap().ring);
        assert_eq!(parse(&[c"meter", c"--sync"]), Err(UsageError::Command));
        assert_eq!(parse(&[c"meter", c"--"]), Err(UsageError::Command));
        assert_eq!(parse(&[]), Err(UsageError::Command));
        assert_eq!(parse(&[c"meter", c"--output"]), Err(UsageError::Value));
        assert_eq!(parse(&[c"meter", c"-x", c"ls"]), Err(UsageError::Unknown));
    }

    #[test]
    fn workload() {
        let parse = |arguments: &[&'static CStr]| Workload::parse(arguments.iter().copied());
        assert_eq!(
            parse(&[c"workload"]),
            Ok(Workload {
                scale: 1000,
                functions: Functions::ALL,
            })
        );
        let bar = parse(&[c"workload", c"--scale", c"7", c"bar"]).unwrap();
        assert_eq!((bar.scale, bar.functions), (7, Functions::BAR));
        assert_eq!(parse(&[c"w", c"--scale"]), Err(UsageError::Value));
        assert_eq!(parse(&[c"w", c"--scale", c"0"]), Err(UsageError::Number));
        assert_eq!(parse(&[c"w", c"--scale", c"-1"]), Err(UsageError::Number));
        assert_eq!(parse(&[c"w", c"baz"]), Err(UsageError::Function));
        assert_eq!(parse(&[c"w", c"--help"]), Err(UsageError::Unknown));
    }
}
