//! The monitor's own words on the kernel command line.
//!
//! A bootloader hands over one command line (`/chosen/bootargs`), so monitor and guest share it:
//! words that begin with `vpmu.` are the monitor's, and the guest never sees them.

use core::fmt;

/// How the guest's PMU is realised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// Every access traps; each guest counter is backed by a physical one.
    Emulated,
    /// `MDCR_EL2.HPMN` splits the counters; the guest reaches its own without a trap.
    Partitioned,
    /// All counters are the guest's and nothing traps: the limit of what any design can reach.
    Untrapped,
}

impl Design {
    /// The name used on the command line and in the statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::Partitioned => "partitioned",
            Self::Untrapped => "untrapped",
        }
    }
}

/// How physical interrupts reach the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interrupts {
    /// They arrive at EL2 and go on in list registers.
    #[default]
    Virtual,
    /// They arrive at EL1: the guest has the GIC's CPU interface, and the monitor takes no interrupt.
    Direct,
}

impl Interrupts {
    /// The name used on the command line and in the statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Virtual => "virtual",
            Self::Direct => "direct",
        }
    }
}

/// The most events that the host samples by at once.
pub const MOST_EVENTS: usize = 4;

/// The profile that the host takes of its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileSettings {
    /// Samples a second, of each event.
    pub rate: u32,
    events: [u16; MOST_EVENTS],
    count: usize,
}

impl ProfileSettings {
    /// CPU_CYCLES.
    const DEFAULT_EVENT: u16 = 0x11;
    /// More would leave the guest no time.
    const MOST_RATE: u32 = 10_000;

    /// Reads `RATE[,EVENT...]`, events by their numbers. `None`: it is no such thing.
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(',');
        let rate = words.next()?.parse().ok()?;
        let mut events = [Self::DEFAULT_EVENT; MOST_EVENTS];
        let mut count = 0;
        for word in words {
            let number = match word.strip_prefix("0x") {
                Some(digits) => u16::from_str_radix(digits, 16),
                None => word.parse(),
            };
            // One event too many ends this like a number that is none.
            *events.get_mut(count)? = number.ok()?;
            count += 1;
        }
        (1..=Self::MOST_RATE).contains(&rate).then_some(Self {
            rate,
            events,
            // Without events, the default one stands at place 0 already.
            count: count.max(1),
        })
    }

    /// The events' numbers, at least one.
    pub fn events(&self) -> &[u16] {
        &self.events[..self.count]
    }
}

/// What the command line asks of the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `vpmu.pmu=`, default [`Design::Partitioned`].
    pub design: Design,
    /// `vpmu.host_counters=`, event counters kept from the guest, default 0.
    pub host_counters: u8,
    /// `vpmu.interrupts=`, default [`Interrupts::Virtual`].
    pub interrupts: Interrupts,
    /// `vpmu.host_profile=`, default none.
    pub profile: Option<ProfileSettings>,
    /// `vpmu.borrow`: the profile's counters are the guest's, but for the time that the doorbell marks.
    pub borrow: bool,
    /// `vpmu.slice=`, microseconds that one of two guests runs before the other's turn; default 2,000.
    pub slice: u32,
    /// `vpmu.switch=eager`: the PMU's registers change hands at each switch between two guests.
    pub eager: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            design: Design::Partitioned,
            host_counters: 0,
            interrupts: Interrupts::Virtual,
            profile: None,
            borrow: false,
            slice: 2_000,
            eager: false,
        }
    }
}

/// A `vpmu.` word that cannot be honoured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the word '{word}' of the kernel command line: {problem}")]
pub struct WordError<'a> {
    word: &'a str,
    problem: &'static str,
}

const PREFIX: &str = "vpmu.";

impl Settings {
    /// Reads the monitor's words out of `line`; the last one of a kind counts.
    ///
    /// # Errors
    ///
    /// [`WordError`] for a `vpmu.` word that is unknown or has a bad value.
    pub fn parse(line: &str) -> Result<Self, WordError<'_>> {
        let mut settings = Self::default();
        for word in line.split_ascii_whitespace() {
            let Some(own) = word.strip_prefix(PREFIX) else {
                continue;
            };
            let fail = |problem| WordError { word, problem };
            // The one word without a value.
            if own == "borrow" {
                settings.borrow = true;
                continue;
            }
            match own.split_once('=') {
                Some(("pmu", "emulated")) => settings.design = Design::Emulated,
                Some(("pmu", "partitioned")) => settings.design = Design::Partitioned,
                Some(("pmu", "untrapped")) => settings.design = Design::Untrapped,
                Some(("pmu", _)) => {
                    return Err(fail("the designs are emulated, partitioned and untrapped"));
                }
                Some(("host_counters", number)) => {
                    settings.host_counters = number
                        .parse()
                        .ok()
                        .filter(|&n| n <= 31)
                        .ok_or(fail("a number of counters from 0 to 31 is needed"))?;
                }
                Some(("interrupts", "virtual")) => settings.interrupts = Interrupts::Virtual,
                Some(("interrupts", "direct")) => settings.interrupts = Interrupts::Direct,
                Some(("host_profile", profile)) => {
                    settings.profile = Some(ProfileSettings::parse(profile).ok_or(fail(
                        "a rate from 1 to 10000 is needed, and at most 4 events by number behind it",
                    ))?);
                }
                Some(("interrupts", _)) => return Err(fail("interrupts are virtual or direct")),
                Some(("slice", number)) => {
                    settings.slice = number
                        .parse()
                        .ok()
                        .filter(|n| (10..=1_000_000).contains(n))
                        .ok_or(fail(
                            "a number of microseconds from 10 to 1000000 is needed",
                        ))?;
                }
                Some(("switch", "lazy")) => settings.eager = false,
                Some(("switch", "eager")) => settings.eager = true,
                Some(("switch", _)) => return Err(fail("a switch is lazy or eager")),
                _ => {
                    return Err(fail(
                        "the words are vpmu.pmu=, vpmu.host_counters=, vpmu.host_profile=, vpmu.interrupts=, \
                         vpmu.borrow, vpmu.slice= and vpmu.switch=",
                    ));
                }
            }
        }
        // Not word by word: what contradicts a later word is not known before.
        settings.check()?;
        Ok(settings)
    }

    /// How many counters the host has on each CPU, while the profile's are `borrowed` or while they are not.
    pub fn kept_counters(&self, borrowed: bool) -> u8 {
        let more = self.profile.filter(|_| borrowed);
        self.host_counters + more.map_or(0, |profile| profile.events().len() as u8)
    }

    /// Refuses what two guests on one CPU cannot have.
    ///
    /// # Errors
    ///
    /// [`WordError`] names the word.
    pub fn check_two_guests(&self) -> Result<(), WordError<'static>> {
        let (word, problem) = if self.interrupts == Interrupts::Direct {
            (
                "vpmu.interrupts=direct",
                "two guests take turns by an interrupt of EL2's; leave that out",
            )
        } else if self.design == Design::Untrapped {
            (
                "vpmu.pmu=untrapped",
                "each of two guests has a PMU of its own; take vpmu.pmu=partitioned",
            )
        } else {
            return Ok(());
        };
        Err(WordError { word, problem })
    }

    /// Refuses words that contradict each other.
    fn check(&self) -> Result<(), WordError<'static>> {
        let refuse = |word, problem| Err(WordError { word, problem });
        if self.design == Design::Untrapped && self.host_counters != 0 {
            return refuse(
                "vpmu.pmu=untrapped",
                "this design gives the guest every counter; leave vpmu.host_counters out",
            );
        }
        let direct = self.interrupts == Interrupts::Direct;
        if self.design == Design::Emulated && direct {
            return refuse(
                "vpmu.interrupts=direct",
                "the emulated PMU computes the guest's interrupt from overflows that arrive at EL2; \
                 take vpmu.pmu=partitioned",
            );
        }
        let Some(profile) = &self.profile else {
            return Ok(());
        };
        if direct {
            return refuse(
                "vpmu.host_profile=",
                "a host counter that overflows must interrupt EL2, which takes no interrupt with \
                 vpmu.interrupts=direct; leave that out",
            );
        }
        if !self.borrow && profile.events().len() > usize::from(self.host_counters) {
            return refuse(
                "vpmu.host_profile=",
                "each event takes a host counter; ask for more with vpmu.host_counters=, or for vpmu.borrow",
            );
        }
        Ok(())
    }
}

/// The command line as the guest gets it: `line` without the monitor's words.
pub struct GuestWords<'a>(pub &'a str);

impl fmt::Display for GuestWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for word in self.0.split_ascii_whitespace() {
            if !word.starts_with(PREFIX) {
                write!(f, "{separator}{word}")?;
                separator = " ";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_hidden() {
        let line = "console=ttyAMA0 vpmu.pmu=emulated  vpmu.host_counters=2 quiet";
        let settings = Settings::parse(line).unwrap();
        assert_eq!(settings.design, Design::Emulated);
        assert_eq!(settings.host_counters, 2);
        assert_eq!(settings.interrupts, Interrupts::Virtual);
        let direct = Settings::parse("vpmu.interrupts=direct vpmu.host_counters=1").unwrap();
        assert_eq!(direct.interrupts, Interrupts::Direct);
        assert_eq!(GuestWords(line).to_string(), "console=ttyAMA0 quiet");
    }

    #[test]
    fn a_profile_has_a_rate_and_events() {
        let line = "vpmu.host_counters=2 vpmu.host_profile=4000,0x11,8";
        let profile = Settings::parse(line).unwrap().profile.unwrap();
        assert_eq!((profile.rate, profile.events()), (4000, &[0x11, 8][..]));
        let borrowed = Settings::parse("vpmu.borrow vpmu.host_profile=1000").unwrap();
        assert!(borrowed.borrow && borrowed.profile.is_some());
        assert_eq!([false, true].map(|it| borrowed.kept_counters(it)), [0, 1]);
        let line = "vpmu.host_counters=1 vpmu.host_profile=1000";
        let profile = Settings::parse(line).unwrap().profile.unwrap();
        assert_eq!((profile.rate, profile.events()), (1000, &[0x11][..]));
    }

    #[test]
    fn two_guests_need_interrupts_at_el2_and_a_pmu_each() {
        let check = |line| Settings::parse(line).unwrap().check_two_guests();
        assert!(check("vpmu.slice=100 vpmu.switch=eager").is_ok());
        assert!(check("vpmu.pmu=emulated").is_ok());
        assert!(check("vpmu.interrupts=direct").is_err());
        assert!(check("vpmu.pmu=untrapped").is_err());
    }

    #[test]
    fn nothing_said_means_partitioned_with_all_counters_the_guests() {
        assert_eq!(Settings::parse("").unwrap(), Settings::default());
    }

    #[test]
    fn bad_words_are_named() {
        for line in [
            "vpmu.pmu=fast",
            "vpmu.host_counters=-1",
            "vpmu.host_counters=32",
            "vpmu.counters=1",
            "vpmu.pmu",
            "vpmu.pmu=untrapped vpmu.host_counters=1",
            "vpmu.interrupts=none",
            "vpmu.interrupts=direct vpmu.pmu=emulated",
            "vpmu.host_profile=0 vpmu.host_counters=1",
            "vpmu.host_profile=1000",
            "vpmu.host_profile=1000,1,2 vpmu.host_counters=1",
            "vpmu.host_profile=1000,cycles vpmu.host_counters=1",
            "vpmu.host_profile=1000,1,2,3,4,5 vpmu.host_counters=6",
            "vpmu.host_profile=1000 vpmu.host_counters=1 vpmu.interrupts=direct",
            "vpmu.slice=0",
            "vpmu.switch=now",
        ] {
            let error = Settings::parse(line).unwrap_err().to_string();
            assert!(error.contains("vpmu."), "{error}");
        }
    }
}
