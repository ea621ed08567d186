//! The profile that the host takes of its guest: what is asked for.

use std::fmt;
use std::str::FromStr;

/// Events by name; others are given by number.
const NAMES: [(&str, u16); 2] = [("cycles", 0x11), ("instructions", 0x08)];
/// The most events that the monitor samples by at once.
const MOST_EVENTS: usize = 4;
const MOST_RATE: u32 = 10_000;

/// A rate and the events to sample by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileRequest {
    /// Samples a second and processor, of each event.
    pub rate: u32,
    /// Numbers of Arm's PMU events, one or more.
    pub events: Vec<u16>,
    /// The counters are the guest's, but while the command runs.
    pub borrow: bool,
}

impl FromStr for ProfileRequest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let rate = words
            .next()
            .and_then(|word| word.parse().ok())
            .filter(|rate| (1..=MOST_RATE).contains(rate))
            .ok_or_else(|| format!("a rate from 1 to {MOST_RATE} comes first"))?;
        let mut events = words.map(event).collect::<Result<Vec<_>, _>>()?;
        if events.is_empty() {
            events.push(NAMES[0].1);
        }
        if events.len() > MOST_EVENTS {
            return Err(format!("at most {MOST_EVENTS} events are sampled at once"));
        }
        Ok(Self {
            rate,
            events,
            borrow: false,
        })
    }
}

fn event(word: &str) -> Result<u16, String> {
    if let Some((_, number)) = NAMES.iter().find(|(name, _)| *name == word) {
        return Ok(*number);
    }
    let digits = word.strip_prefix("0x").or_else(|| word.strip_prefix('r'));
    digits
        .and_then(|digits| u16::from_str_radix(digits, 16).ok())
        .ok_or_else(|| format!("no event '{word}': cycles, instructions, or a number such as 0x11"))
}

/// Writes the monitor's word.
impl fmt::Display for ProfileRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.rate)?;
        self.events
            .iter()
            .try_for_each(|event| write!(f, ",{event:#x}"))
    }
}

/// Returns an event's name, or its number.
pub fn event_name(event: u16) -> String {
    match NAMES.iter().find(|(_, number)| *number == event) {
        Some((name, _)) => (*name).to_owned(),
        None => format!("r{event:x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_and_events() {
        let parse = |text: &str| text.parse::<ProfileRequest>();
        assert_eq!(parse("1000").unwrap().to_string(), "1000,0x11");
        assert_eq!(
            parse("4000,instructions,0x3,r1b").unwrap().to_string(),
            "4000,0x8,0x3,0x1b"
        );
        for wrong in [
            "",
            "0",
            "10001",
            "cycles",
            "1000,walnuts",
            "1,r1,r2,r3,r4,r5",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            (event_name(0x11), event_name(0x1b)),
            ("cycles".to_owned(), "r1b".to_owned())
        );
    }
}
