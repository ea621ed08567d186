//! The guest's console: separates records from output as the bytes arrive.
//!
//! Everything comes over one serial line: kernel messages, the command's own bytes, and records.
//! Records are taken out wherever they are. The command's bytes are passed on unchanged, whatever
//! they are. A 0x1e among them that begins no record is just a byte.

use std::collections::VecDeque;

use vpmu_measure::{MARK, Phase, Record};

use crate::{Error, Failure};

/// A longer line is no record of ours.
const LONGEST_RECORD: usize = 256 << 10;
/// Console lines remembered for error messages.
const REMEMBERED: usize = 12;
/// Bytes of a line that are remembered.
const LONGEST_LINE: usize = 400;

/// The kinds of pieces of the stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    /// Bytes of the console.
    Bytes(Vec<u8>),
    /// One record.
    Record(Record),
}

/// Splits a stream, however it is cut into chunks.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    /// The bytes from a mark on, while they may still become a record.
    held: Vec<u8>,
}

impl Splitter {
    /// Takes the next chunk and returns the pieces that are complete.
    pub(crate) fn feed(&mut self, chunk: &[u8]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut plain = Vec::new();
        for &byte in chunk {
            if self.held.is_empty() {
                if byte == MARK {
                    self.held.push(byte);
                } else {
                    plain.push(byte);
                }
                continue;
            }
            if byte == MARK {
                plain.append(&mut self.held);
            }
            self.held.push(byte);
            if byte == b'\n' {
                match Record::parse(self.held[1..].trim_ascii_end()) {
                    Some(record) => {
                        flush(&mut plain, &mut pieces);
                        pieces.push(Piece::Record(record));
                        self.held.clear();
                    }
                    None => plain.append(&mut self.held),
                }
            } else if self.is_no_record() {
                plain.append(&mut self.held);
            }
        }
        flush(&mut plain, &mut pieces);
        pieces
    }

    /// Returns the bytes held back, at the end of the stream.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    fn is_no_record(&self) -> bool {
        let start = b"{\"";
        let begun = &self.held[1..self.held.len().min(1 + start.len())];
        !start.starts_with(begun) || self.held.len() > LONGEST_RECORD
    }
}

fn flush(plain: &mut Vec<u8>, pieces: &mut Vec<Piece>) {
    if !plain.is_empty() {
        pieces.push(Piece::Bytes(std::mem::take(plain)));
    }
}

/// The output of a console so far. No `Clone`: a transcript holds every record.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    /// The records, in the order they came.
    pub(crate) records: Vec<Record>,
    /// Whether the command has begun.
    pub(crate) begun: bool,
    /// Whether the guest has said that the command is over.
    pub(crate) ended: bool,
    /// The first line in which a kernel gave up.
    pub(crate) panic: Option<String>,
    /// The first line in which the monitor gave up.
    pub(crate) monitor: Option<String>,
    lines: VecDeque<String>,
    line: Vec<u8>,
    in_output: bool,
}

impl Transcript {
    /// Notes a piece and returns the bytes of the command's output in it.
    pub(crate) fn note<'a>(&mut self, piece: &'a Piece) -> &'a [u8] {
        match piece {
            Piece::Record(record) => {
                match record {
                    Record::Vpmu(Phase::Command) => self.begun = true,
                    Record::Vpmu(Phase::Output) => self.in_output = true,
                    Record::Vpmu(Phase::End) => (self.in_output, self.ended) = (false, true),
                    _ => {}
                }
                self.records.push(record.clone());
                &[]
            }
            Piece::Bytes(bytes) => {
                self.note_lines(bytes);
                if self.in_output { bytes } else { &[] }
            }
        }
    }

    /// Makes the error of a guest that failed and has left this console.
    pub(crate) fn failed(&self, failure: Failure) -> Error {
        failure.with(self.last_lines())
    }

    /// Returns the last lines, without control characters.
    pub(crate) fn last_lines(&self) -> Vec<String> {
        self.lines
            .iter()
            .cloned()
            .chain(clean(&self.line))
            .collect()
    }

    fn note_lines(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() < LONGEST_LINE {
                    self.line.push(byte);
                }
                continue;
            }
            let Some(line) = clean(&std::mem::take(&mut self.line)) else {
                continue;
            };
            if self.panic.is_none() && is_panic(&line) {
                self.panic = Some(line.clone());
            }
            if self.monitor.is_none() && is_monitor_failure(&line) {
                self.monitor = Some(line.clone());
            }
            if self.lines.len() == REMEMBERED {
                self.lines.pop_front();
            }
            self.lines.push_back(line);
        }
    }
}

fn clean(line: &[u8]) -> Option<String> {
    let text: String = String::from_utf8_lossy(line)
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

fn is_panic(line: &str) -> bool {
    [
        "Kernel panic - not syncing",
        "Internal error: Oops",
        "Unable to handle kernel",
        "Unhandled exception", // bare-metal programs
    ]
    .iter()
    .any(|text| line.contains(text))
}

fn is_monitor_failure(line: &str) -> bool {
    [
        "vpmu-monitor: error:",
        "vpmu-monitor: guest stopped:",
        "vpmu-vmm: ",
    ]
    .iter()
    .any(|text| line.starts_with(text))
        // The guest runs on.
        && !line.starts_with("vpmu-vmm: warning:")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b"[ 0.1] boot\r\n\x1e{\"vpmu\":\"command\"}\n\x1e{\"vpmu\":\"output\"}\r\n\
        bin\x00\xff\x1e\x1e{\x1e{\"x\":1}\n\x1e{\"vpmu\":\"end\"}\nKernel panic - not syncing: x\n\x1e{\"vp";

    fn read(chunks: impl Iterator<Item = &'static [u8]>) -> (Vec<u8>, Vec<u8>, Transcript) {
        let mut splitter = Splitter::default();
        let mut transcript = Transcript::default();
        let (mut all, mut output) = (Vec::new(), Vec::new());
        for chunk in chunks {
            for piece in splitter.feed(chunk) {
                output.extend_from_slice(transcript.note(&piece));
                if let Piece::Bytes(bytes) = piece {
                    all.extend(bytes);
                }
            }
        }
        all.extend(splitter.finish());
        (all, output, transcript)
    }

    #[test]
    fn a_vmm_that_warns_has_not_failed() {
        assert!(is_monitor_failure(
            "vpmu-vmm: the guest died of a triple fault"
        ));
        assert!(!is_monitor_failure(
            "vpmu-vmm: warning: a clock counts here"
        ));
    }

    #[test]
    fn split_at_any_byte() {
        for at in 0..=STREAM.len() {
            let (first, second) = STREAM.split_at(at);
            let (all, output, transcript) = read([first, second].into_iter());
            assert_eq!(
                output, b"bin\x00\xff\x1e\x1e{\x1e{\"x\":1}\n",
                "split at {at}"
            );
            assert!(all.ends_with(b"not syncing: x\n\x1e{\"vp"), "split at {at}");
            assert_eq!(transcript.records.len(), 3);
            assert!(transcript.begun && transcript.ended);
        }
    }

    #[test]
    fn byte_by_byte() {
        let (_, output, transcript) = read(STREAM.chunks(1));
        assert_eq!(output, b"bin\x00\xff\x1e\x1e{\x1e{\"x\":1}\n");
        assert_eq!(
            transcript.panic.as_deref(),
            Some("Kernel panic - not syncing: x")
        );
        assert_eq!(transcript.last_lines().first().unwrap(), "[ 0.1] boot");
    }

    #[test]
    fn an_endless_line_is_passed_on() {
        let mut splitter = Splitter::default();
        let mut line = b"\x1e{\"".to_vec();
        line.resize(LONGEST_RECORD + 10, b'a');
        let passed: usize = splitter
            .feed(&line)
            .iter()
            .map(|piece| match piece {
                Piece::Bytes(bytes) => bytes.len(),
                Piece::Record(_) => 0,
            })
            .sum();
        assert_eq!(passed, line.len());
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let mut transcript = Transcript::default();
        for number in 0..100 {
            let bytes = format!("line {number}\n").into_bytes();
            transcript.note(&Piece::Bytes(bytes));
        }
        let lines = transcript.last_lines();
        assert_eq!(lines.len(), REMEMBERED);
        assert_eq!(lines.last().unwrap(), "line 99");
    }
}
