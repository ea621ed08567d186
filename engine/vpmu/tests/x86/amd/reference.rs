//! AMD's core performance counters as naive as the manuals' text: APM vol. 2, 13.2 ("Performance Monitoring
//! Counters"), and the PPRs' pages of the registers. Every event is added at once, nothing is put off. Shares no code
//! with the engine: MSRs are numbers here.

use crate::pair;
use crate::support::Happening;
use vpmu::counter::CounterSet;
use vpmu::x86::amd::{Interface, Msr};
use vpmu::x86::{ArchEvent, Capability, EventFilter, MaskedEvent, Outcome, Ring};

const END: u64 = 1 << 48;

#[derive(Clone, Debug)]
pub(crate) struct Reference {
    /// The number of counters, whether they have addresses of the core extension, and whether there are global
    /// registers.
    count: usize,
    core: bool,
    v2: bool,
    /// Which of cycles, instructions, reference cycles, branches and missed branches the host counts.
    backed: [bool; 5],
    denied: Option<u64>,
    lost: u32,

    control: [u64; 6],
    counter: [u64; 6],
    global: u64,
    status: u64,
    pmi: bool,
}

/// Returns event select and unit mask as one number: bits 35:32 and 15:0 of PERF_CTL.
fn event(control: u64) -> u64 {
    control & 0xf_0000_ffff
}

/// Returns whether the event is Merge: bits 35:32 and 7:0 all ones.
fn is_merge(control: u64) -> bool {
    control & 0xf_0000_00ff == 0xf_0000_00ff
}

/// The meaning of an MSR.
enum Place {
    Control(usize),
    Counter(usize),
    Status,
    Global,
    Clear,
    Set,
}

impl Reference {
    fn place(&self, address: u32) -> Result<Place, Outcome> {
        let (exists, place) = match address {
            0xc001_0000..=0xc001_0003 => (true, Place::Control(address as usize & 3)),
            0xc001_0004..=0xc001_0007 => (true, Place::Counter(address as usize & 3)),
            0xc001_0200..=0xc001_020b => {
                let n = (address as usize & 0xf) / 2;
                let place = if address.is_multiple_of(2) {
                    Place::Control(n)
                } else {
                    Place::Counter(n)
                };
                (self.core, place)
            }
            0xc000_0300 => (self.v2, Place::Status),
            0xc000_0301 => (self.v2, Place::Global),
            0xc000_0302 => (self.v2, Place::Clear),
            0xc000_0303 => (self.v2, Place::Set),
            _ => return Err(Outcome::NotHandled),
        };
        let exists = exists
            && match place {
                Place::Control(n) | Place::Counter(n) => n < self.count,
                _ => true,
            };
        exists.then_some(place).ok_or(Outcome::GeneralProtection)
    }

    fn all(&self) -> u64 {
        (1 << self.count) - 1
    }

    /// Returns whether an enabled Merge in the odd counter makes a pair of `n` and its neighbour, or `n` itself has
    /// that event.
    fn is_merged(&self, n: usize) -> bool {
        let odd = self.control[n | 1];
        is_merge(self.control[n]) || is_merge(odd) && odd >> 22 & 1 != 0
    }

    fn is_unbacked(&self, n: usize) -> bool {
        let known = [0x76, 0xc0, 0x1_0000_0120, 0xc2, 0xc3];
        let unbacked = (known.iter().zip(self.backed))
            .any(|(&known, backed)| event(self.control[n]) == known && !backed);
        unbacked || self.is_merged(n)
    }

    fn counts(&self, n: usize, what: Happening, ring: Ring) -> bool {
        let control = self.control[n];
        let wanted = match what {
            Happening::Instructions => 0xc0,
            Happening::Cycles => 0x76,
            Happening::TscCycles => 0x1_0000_0120,
            Happening::Other(select, umask) => u64::from(umask) << 8 | u64::from(select),
        };
        let level = if ring == Ring::User { 16 } else { 17 };
        control >> 22 & 1 != 0
            && control >> level & 1 != 0
            // Nothing that happens here satisfies edges or thresholds.
            && control & 0xff84_0000 == 0
            // 13.2.1: with either bit, a counter counts only while EFER.SVME is set.
            && control >> 40 & 3 == 0
            && event(control) == wanted
            && self.denied != Some(wanted)
            && self.global >> n & 1 != 0
            && self.lost >> n & 1 == 0
            && !self.is_unbacked(n)
    }
}

impl pair::Reference for Reference {
    fn of(capability: Capability) -> Self {
        let Capability::Amd(capability) = capability else {
            panic!("AMD's");
        };
        let core = capability.interface != Interface::Legacy;
        let count = match capability.interface {
            Interface::Legacy => 4,
            Interface::Core => 6,
            Interface::V2 => capability.v2_counters.into(),
        };
        Self {
            count,
            core,
            v2: capability.interface == Interface::V2,
            backed: [0, 1, 2, 5, 6].map(|bit| capability.events >> bit & 1 != 0),
            denied: None,
            lost: 0,
            control: [0; 6],
            counter: [0; 6],
            global: (1 << count) - 1,
            status: 0,
            pmi: false,
        }
    }

    fn read(&self, address: u32) -> Outcome {
        Outcome::Value(match self.place(address) {
            Err(outcome) => return outcome,
            Ok(Place::Control(n)) => self.control[n],
            Ok(Place::Counter(n)) => self.counter[n],
            Ok(Place::Status) => self.status,
            Ok(Place::Global) => self.global,
            Ok(Place::Clear | Place::Set) => 0,
        })
    }

    fn write(&mut self, address: u32, value: u64) -> Outcome {
        match self.place(address) {
            Err(outcome) => return outcome,
            // Bits 19, 21, 39:36 and 63:42 are reserved.
            Ok(Place::Control(n)) => self.control[n] = value & 0x30f_ffd7_ffff,
            Ok(Place::Counter(n)) => self.counter[n] = value % END,
            Ok(Place::Status) => {}
            Ok(Place::Global) => self.global = value & self.all(),
            Ok(Place::Clear) => self.status &= !value,
            Ok(Place::Set) => self.status |= value & self.all(),
        }
        Outcome::Done
    }

    fn rdpmc(&self, ecx: u32, ring: Ring, pce: bool) -> Outcome {
        let exists = (ecx as usize) < self.count;
        if !exists || ring == Ring::User && !pce {
            return Outcome::GeneralProtection;
        }
        Outcome::Value(self.counter[ecx as usize])
    }

    fn emulate(&mut self, what: Happening, ring: Ring, times: u64) {
        for n in 0..self.count {
            if self.counts(n, what, ring) {
                let sum = self.counter[n] + times;
                self.counter[n] = sum % END;
                if sum >= END {
                    self.status |= if self.v2 { 1 << n } else { 0 };
                    self.pmi |= self.control[n] >> 20 & 1 != 0;
                }
            }
        }
    }

    fn happening(event: ArchEvent) -> Option<Happening> {
        Some(match event {
            ArchEvent::Instructions => Happening::Instructions,
            ArchEvent::CoreCycles => Happening::Cycles,
            ArchEvent::ReferenceCycles => Happening::TscCycles,
            ArchEvent::Branches => Happening::Other(0xc2, 0),
            _ => return None,
        })
    }

    fn pmi(&mut self) -> &mut bool {
        &mut self.pmi
    }

    fn lose(&mut self, lost: CounterSet) {
        self.lost = lost.bits();
    }

    fn deny(&mut self, deny: bool) -> EventFilter {
        let all = EventFilter::default();
        self.denied = deny.then_some(0x1_0000_0120);
        match deny {
            true => all.with(MaskedEvent::one(0x120, 1)).expect("one fits"),
            false => all,
        }
    }

    fn freezes(&self) -> bool {
        false
    }

    fn unsupported(&self, n: u8) -> bool {
        self.is_unbacked(n.into())
    }

    fn interrupts(&self, n: u8) -> bool {
        self.control[usize::from(n)] >> 20 & 1 != 0
    }

    fn addresses() -> Vec<u32> {
        let own = Msr::all().map(Msr::address);
        // These MSRs are neighbours: HWCR, a northbridge counter, LBR_SELECT.
        own.chain([0xc001_0015, 0xc001_0240, 0xc000_010e]).collect()
    }
}
