//! The profile that the monitor takes of its guest: its samples with names, in the forms that viewers read.

use std::collections::BTreeMap;

use itertools::Itertools;
use object::{Object as _, ObjectSymbol as _, SymbolKind};
use vpmu_measure::{HostProfile as Part, HostSample, Record};

use super::profile::{Profile, own};
use crate::image::kallsyms::{self, Symbol};
use crate::spec::profile::event_name;

/// The kernel's exception vectors, by which the kernel's place in memory is found.
const VECTORS: &str = "vectors";
/// Functions in [`HostProfile::summary`].
const NAMED: usize = 5;

/// The names of what a guest executes.
#[derive(Debug, Default)]
pub struct Symbols {
    kernel: Vec<Symbol>,
    /// Beginning, end and name of each function of a program at fixed addresses.
    program: Vec<(u64, u64, String)>,
}

impl Symbols {
    /// Takes the names out of a kernel's image and out of a program that the guest runs at fixed addresses. What has no
    /// names gives none.
    pub fn new(kernel: &[u8], program: &[u8]) -> Self {
        let program = object::File::parse(program).map_or_else(
            |_| Vec::new(),
            |file| {
                file.symbols()
                    .filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0)
                    .filter_map(|symbol| {
                        let end = symbol.address().checked_add(symbol.size())?;
                        Some((symbol.address(), end, symbol.name().ok()?.to_owned()))
                    })
                    .collect()
            },
        );
        Self {
            kernel: kallsyms::functions(kernel).unwrap_or_default(),
            program,
        }
    }

    /// The kernel's beginning, where its vectors are at `vectors`.
    fn base(&self, vectors: u64) -> Option<u64> {
        let (offset, _) = self.kernel.iter().find(|(_, name)| name == VECTORS)?;
        vectors.checked_sub(*offset)
    }

    /// The stack of a sample: the process, the ring where it has no name, the function.
    fn stack(&self, &(_, pc, el, context, ..): &HostSample, base: Option<u64>) -> Vec<String> {
        let process = format!("pid {context}");
        if el == 0 {
            let within = |(begin, end, _): &&(u64, u64, String)| (*begin..*end).contains(&pc);
            let function = self.program.iter().find(within);
            let name = function.map_or("[user]", |(.., name)| name);
            return vec![process, name.to_owned()];
        }
        let function = base
            .and_then(|base| pc.checked_sub(base))
            .and_then(|offset| {
                let behind = self.kernel.partition_point(|(begin, _)| *begin <= offset);
                // Behind the last function are modules, which the image does not name.
                (behind < self.kernel.len()).then(|| self.kernel.get(behind.checked_sub(1)?))?
            });
        let mut stack = vec![process, "[kernel]".to_owned()];
        stack.extend(function.map(|(_, name)| name.clone()));
        stack
    }
}

/// The samples of all processors.
#[derive(Debug, Clone, PartialEq)]
pub struct HostProfile {
    /// The events' names.
    events: Vec<String>,
    /// How often each has occurred in the guest.
    counts: Vec<u64>,
    /// Samples for which there was no room.
    pub lost: u64,
    /// Samples of each event, by stack, outermost frame first.
    stacks: BTreeMap<Vec<String>, Vec<u64>>,
}

impl HostProfile {
    /// Puts the parts in `records` together; `None` where there are none. `symbols` is asked for only if there are.
    pub fn of(records: &[Record], symbols: impl FnOnce() -> Symbols) -> Option<Self> {
        let parts: Vec<&Part> = records
            .iter()
            .filter_map(|record| match record {
                Record::HostProfile(part) => Some(&**part),
                _ => None,
            })
            .collect();
        let first = parts.iter().find(|part| !part.events.is_empty())?;
        let numbers = first.events.iter().map(|(number, _)| *number);
        let events: Vec<String> = numbers.map(event_name).collect();
        let symbols = symbols();
        let base = symbols.base(first.vectors);
        let mut profile = Self {
            counts: vec![0; events.len()],
            events,
            lost: 0,
            stacks: BTreeMap::new(),
        };
        for part in parts {
            profile.lost += part.lost;
            for (count, (_, more)) in profile.counts.iter_mut().zip(&part.events) {
                *count += more;
            }
            for sample in &part.samples {
                let values = profile
                    .stacks
                    .entry(symbols.stack(sample, base))
                    .or_insert_with(|| vec![0; profile.events.len()]);
                if let Some(value) = values.get_mut(usize::from(sample.5)) {
                    *value += 1;
                }
            }
        }
        Some(profile)
    }

    /// Returns the samples of the first event as folded stacks.
    pub fn folded(&self) -> Profile {
        self.folded_of(0)
    }

    fn folded_of(&self, event: usize) -> Profile {
        let stacks = self.stacks.iter();
        let folded = stacks
            .map(|(stack, values)| (stack.join(";"), values[event]))
            .filter(|(_, value)| *value > 0);
        Profile {
            folded: folded.collect(),
        }
    }

    /// Returns each event's name with the text of a file of folded stacks, which flame graphs are made of.
    pub fn folded_texts(&self) -> impl Iterator<Item = (&str, String)> {
        self.events.iter().enumerate().map(|(index, event)| {
            let stacks = self.folded_of(index).folded.into_iter();
            let lines = stacks.map(|(stack, samples)| format!("{stack} {samples}\n"));
            (event.as_str(), lines.collect())
        })
    }

    /// Returns one line: counts, samples, and where most of them are.
    pub fn summary(&self) -> String {
        let folded = self.folded();
        let mut functions: Vec<_> = own(&folded).into_iter().collect();
        let samples: u64 = functions.iter().map(|(_, samples)| samples).sum();
        let counts = self.events.iter().zip(&self.counts);
        let counts = counts.map(|(event, count)| format!("{count} {event}"));
        functions.sort_by_key(|&(name, samples)| (std::cmp::Reverse(samples), name));
        let shares = functions.iter().take(NAMED).map(|(name, own)| {
            let share = 100.0 * *own as f64 / samples.max(1) as f64;
            format!("{name} {share:.1} %")
        });
        format!(
            "host's profile: {samples} samples ({} lost) in {}: {}",
            self.lost,
            counts.format(", "),
            shares.format(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let lines = [
            r#"{"host-profile":{"cpu":0,"lost":1,"vectors":4096,"events":[[17,1000],[3,20]],"samples":[[1,2304,1,7,0,0],[2,5,0,7,0,0]]}}"#,
            r#"{"host-profile":{"cpu":0,"samples":[[3,2308,1,7,0,0],[3,9,0,8,0,1]]}}"#,
            r#"{"host-profile":{"cpu":1,"lost":2,"vectors":4096,"events":[[17,500],[3,1]],"samples":[[1,64,1,0,0,0]]}}"#,
        ];
        lines
            .iter()
            .map(|line| Record::parse(line.as_bytes()).unwrap())
            .collect()
    }

    fn symbols() -> Symbols {
        let kernel = [
            (0x100, "schedule"),
            (0x200, "tick"),
            (0x800, "vectors"),
            (0x900, "_etext"),
        ];
        Symbols {
            kernel: kernel.map(|(at, name)| (at, name.to_owned())).to_vec(),
            program: vec![(4, 8, "foo".to_owned())],
        }
    }

    #[test]
    fn parts_of_all_processors_are_one_profile() {
        let profile = HostProfile::of(&records(), symbols).unwrap();
        assert_eq!((profile.lost, &profile.counts[..]), (3, &[1500, 21][..]));
        // The kernel begins at 0x800: its vectors are at 0x1000.
        let cycles = "pid 0;[kernel] 1\npid 7;[kernel];schedule 2\npid 7;foo 1\n";
        let texts = [("cycles", cycles), ("r3", "pid 8;[user] 1\n")]
            .map(|(event, text)| (event, text.to_owned()));
        assert_eq!(profile.folded_texts().collect::<Vec<_>>(), texts);
        assert_eq!(
            profile.summary(),
            "host's profile: 4 samples (3 lost) in 1500 cycles, 21 r3: schedule 50.0 %, [kernel] 25.0 %, foo 25.0 %"
        );
        assert!(HostProfile::of(&[], symbols).is_none());
    }
}
