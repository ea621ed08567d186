//! What a guest beside the one that is measured has written to its serial port.

use super::console::{Piece, Splitter, Transcript};
use super::supervise;
use crate::report::result::Second;
use crate::spec::command::Command;
use crate::{Failure, Result};

/// The result of the second of two guests.
#[derive(Debug, Default)]
pub struct SecondOutcome {
    /// Everything that it wrote.
    pub console: Vec<u8>,
    /// Its command's output and figures, where a command ran.
    pub command: Option<(Vec<u8>, Second)>,
}

impl SecondOutcome {
    /// Reads the `console` of a guest that had this `command` to run, if any, and ran it.
    pub(super) fn of(console: Vec<u8>, command: Option<&Command>) -> Result<Self> {
        let Some(command) = command else {
            let command = None;
            return Ok(Self { console, command });
        };
        let mut transcript = Transcript::default();
        let mut splitter = Splitter::default();
        let mut output = Vec::new();
        let mut pieces = splitter.feed(&console);
        pieces.push(Piece::Bytes(splitter.finish()));
        for piece in &pieces {
            output.extend_from_slice(transcript.note(piece));
        }
        let figures = Second::from_records(command.as_line(), &transcript.records);
        let Some(figures) = figures.filter(|_| transcript.ended) else {
            let bad_end = supervise::ended_badly(&transcript);
            let silent = "it was the second guest, which switched itself off";
            let failure = bad_end.unwrap_or_else(|| Failure::NoReport(silent.to_owned()));
            return Err(transcript.failed(failure));
        };
        let command = Some((output, figures));
        Ok(Self { console, command })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::from_words(&["echo".to_owned()]).unwrap()
    }

    const BEGUN: &str =
        "[ 0.1] boot\r\n\x1e{\"vpmu\":\"command\"}\n\x1e{\"vpmu\":\"output\"}\nhello\n";

    #[test]
    fn the_commands_output_and_figures() {
        let meter = r#"{"meter":{"status":3,"signal":0,"real_ns":2000000000,"user_us":1500000,"sys_us":0,"pmis":null,"interrupts":5}}"#;
        let console = format!("{BEGUN}\x1e{meter}\n\x1e{{\"vpmu\":\"end\"}}\nbye\n");
        let outcome = SecondOutcome::of(console.clone().into_bytes(), Some(&command())).unwrap();
        let (output, figures) = outcome.command.unwrap();
        assert_eq!(output, b"hello\n");
        assert_eq!((figures.status, figures.user_s), (3, 1.5));
        assert_eq!(outcome.console, console.into_bytes());
    }

    #[test]
    fn a_guest_that_ended_early_is_an_error() {
        let of = |console: &str| SecondOutcome::of(console.as_bytes().to_vec(), Some(&command()));
        let early = of(BEGUN).unwrap_err().to_string();
        assert!(early.contains("the second guest"), "{early}");
        let panic = of("Kernel panic - not syncing: x\n").unwrap_err();
        assert!(matches!(panic.failure(), Some(Failure::Panic(_))));
        assert!(
            SecondOutcome::of(Vec::new(), None)
                .unwrap()
                .command
                .is_none()
        );
    }
}
