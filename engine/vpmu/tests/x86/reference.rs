//! Architectural performance monitoring as naive as the manual's text: every counter is a number,
//! every event is added at once, nothing is put off, and there is no host. SDM vol. 3B, section
//! 20.2, and vol. 4, table 2-2. Shares no code with the engine: MSRs are numbers here.

// Fuzz targets include this file by its path, and expect its modules beside it.
#[path = "reference/asked.rs"]
mod asked;

use crate::pebs_reference::{Counter, Pebs};
use crate::support::Happening;
use vpmu::x86::{Outcome, Ring};

/// The capability that the guest finds, in plain numbers.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) version: u32,
    pub(crate) general: u32,
    pub(crate) general_width: u32,
    pub(crate) fixed: u64,
    pub(crate) fixed_width: u32,
    pub(crate) events: u64,
    pub(crate) pdcm: bool,
    pub(crate) full_width: bool,
    pub(crate) smm: bool,
    pub(crate) other_debugctl: u64,
    /// Bits of a linear address, where PEBS is offered.
    pub(crate) pebs: Option<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub(crate) capability: Numbers,
    /// Event selects that count nothing, and fixed counters.
    pub(crate) denied: (Vec<u64>, u64),
    /// Counters that count nothing, because the host has nothing for them: general ones from bit 0,
    /// fixed ones from bit 32.
    pub(crate) lost: u64,

    select: [u64; 64],
    counter: [u64; 64],
    fixed_control: u64,
    global: u64,
    status: u64,
    debug: u64,
    pebs: Pebs,
    /// An overflow has requested a PMI that nobody has taken.
    pub(crate) pmi: bool,
}

const FREEZE: u64 = 1 << 59;

impl Reference {
    pub(crate) fn new(capability: Numbers) -> Self {
        Self {
            denied: (Vec::new(), 0),
            lost: 0,
            select: [0; 64],
            counter: [0; 64],
            fixed_control: 0,
            global: (1 << capability.general) - 1,
            status: 0,
            debug: 0,
            pmi: false,
            pebs: Pebs::new(),
            capability,
        }
    }

    fn counters(&self) -> u64 {
        ((1 << self.capability.general) - 1) | self.capability.fixed << 32
    }

    fn exists(&self, n: u32) -> bool {
        n < 64 && self.counters() >> n & 1 != 0
    }

    fn end(&self, n: u32) -> u128 {
        let width = if n < 32 {
            self.capability.general_width
        } else {
            self.capability.fixed_width
        };
        1 << width
    }

    fn control(&self, n: u32) -> u64 {
        (self.fixed_control >> (4 * (n - 32))) & 15
    }

    /// Returns whether `n` asks for an interrupt, or for records.
    fn interrupts(&self, n: u32) -> bool {
        if self.pebs.enable >> n & 1 != 0 {
            return true;
        }
        if n < 32 {
            self.select[n as usize] >> 20 & 1 != 0
        } else {
            self.control(n) & 8 != 0
        }
    }

    /// Returns whether a PMI request stops the counters (18.4.7).
    pub(crate) fn freezes(&self) -> bool {
        self.debug >> 12 & 1 != 0
    }

    /// Returns whether the host is not even asked to back an enabled `n`.
    pub(crate) fn unsupported(&self, n: u32) -> bool {
        if n >= 32 {
            return self.control(n) & 4 != 0;
        }
        let select = self.select[n as usize];
        let architectural = [
            0x003c, 0x00c0, 0x013c, 0x4f2e, 0x412e, 0x00c4, 0x00c5, 0x01a4,
        ];
        // A condition on the event (edge, inversion, a counter mask) leaves the event the same, with one exception:
        // fewer than 16 instructions retire in every cycle, so that condition counts cycles.
        let named = match Self::is_cycles(select) {
            true => 0x3c,
            false => select & 0xffff,
        };
        let absent = (0..)
            .zip(architectural)
            .any(|(bit, event)| named == event && self.capability.events >> bit & 1 == 0);
        absent || select >> 21 & 1 != 0
    }

    /// Returns whether `select` is instructions, inverted, with a counter mask of 16 or more, and no edge.
    fn is_cycles(select: u64) -> bool {
        select & 0x0084_ffff == 0x0080_00c0 && select & 0xf000_0000 != 0
    }

    fn counts(&self, n: u32, what: Happening, ring: Ring) -> bool {
        let enabled = if n < 32 {
            let select = self.select[n as usize];
            let level = if ring == Ring::User { 16 } else { 17 };
            select >> 22 & 1 != 0
                && select >> level & 1 != 0
                && (select & 0xff84_0000 == 0 || Self::is_cycles(select))
                && !self.denied.0.contains(&(select & 0xffff))
                && match what {
                    _ if Self::is_cycles(select) => what == Happening::Cycles,
                    Happening::Instructions => select & 0xffff == 0xc0,
                    Happening::Cycles => select & 0xffff == 0x3c,
                    Happening::TscCycles => false,
                    Happening::Other(event, umask) => {
                        select & 0xffff == u64::from(umask) << 8 | u64::from(event)
                    }
                }
        } else {
            let own = match what {
                Happening::Instructions => 32,
                Happening::Cycles => 33,
                Happening::TscCycles => 34,
                Happening::Other(..) => 99,
            };
            let level = if ring == Ring::User { 2 } else { 1 };
            self.control(n) & level != 0 && n == own && self.denied.1 >> (n - 32) & 1 == 0
        };
        enabled
            && self.exists(n)
            && self.global >> n & 1 != 0
            && self.status & FREEZE == 0
            && self.lost >> n & 1 == 0
            && !self.unsupported(n)
    }

    /// Counts `what` `times` times, all at once.
    pub(crate) fn emulate(&mut self, what: Happening, ring: Ring, times: u64) {
        let exist = (0..64).filter(|&n| self.exists(n));
        let concerned: Vec<u32> = exist.filter(|&n| self.counts(n, what, ring)).collect();
        let mut pmi = false;
        for n in concerned {
            let sum = u128::from(self.counter[n as usize]) + u128::from(times);
            self.counter[n as usize] = (sum % self.end(n)) as u64;
            if sum >= self.end(n) && self.pebs.enable >> n & 1 != 0 {
                pmi |= self.sample(n);
            } else if sum >= self.end(n) {
                // 20.2.2: the counter "will generate an interrupt on overflow". The text does not
                // mention the status bit, nor that the bit must be clear before.
                self.status |= 1 << n;
                pmi |= self.interrupts(n);
            }
        }
        self.pmi |= pmi;
        // 18.4.7: the legacy way clears the enables, the streamlined way of version 4 sets a bit.
        match (pmi && self.freezes(), self.capability.version) {
            (false, _) => {}
            (true, ..=3) => self.global = 0,
            (true, _) => self.status |= FREEZE,
        }
    }

    /// Handles an overflow of counter `n`, which asks for records, and returns whether a PMI is requested.
    fn sample(&mut self, n: u32) -> bool {
        let control = match n {
            // The bits are kernel, user and adaptive, as in the fixed counters' register.
            ..32 => {
                let select = self.select[n as usize];
                select >> 17 & 1 | (select >> 16 & 1) << 1 | (select >> 34 & 1) << 32
            }
            _ => self.fixed_control >> (4 * (n - 32)),
        };
        let end = self.end(n);
        let due = self.pebs.sample(Counter {
            n,
            end,
            value: &mut self.counter[n as usize],
            user: control & 2 != 0,
            kernel: control & 1 != 0,
            adaptive: control >> 32 & 1 != 0,
        });
        self.status |= u64::from(due) << 62;
        due
    }

    fn is_canonical(&self, address: u64) -> bool {
        let Some(bits) = self.capability.pebs else {
            return false;
        };
        let high = address >> (bits - 1);
        high == 0 || high == u64::MAX >> (bits - 1)
    }

    pub(crate) fn rdpmc(&self, ecx: u32, ring: Ring, pce: bool) -> Outcome {
        let n = match ecx {
            0..32 => ecx,
            0x4000_0000..0x4000_0020 => ecx - 0x4000_0000 + 32,
            _ => return Outcome::GeneralProtection,
        };
        if !self.exists(n) || ring == Ring::User && !pce {
            return Outcome::GeneralProtection;
        }
        Outcome::Value(self.counter[n as usize])
    }

    pub(crate) fn read(&self, address: u32) -> Outcome {
        let when = |there, value| {
            if there {
                Outcome::Value(value)
            } else {
                Outcome::GeneralProtection
            }
        };
        let general = |n, values: &[u64; 64]| when(n < self.capability.general, values[n as usize]);
        let v4 = self.capability.version >= 4;
        match address {
            0xc1..=0xc8 => general(address - 0xc1, &self.counter),
            0x4c1..=0x4c8 if self.capability.full_width => general(address - 0x4c1, &self.counter),
            0x4c1..=0x4c8 => Outcome::GeneralProtection,
            0x186..=0x18d => general(address - 0x186, &self.select),
            0x309..=0x30f => {
                let n = address - 0x309 + 32;
                when(self.exists(n), self.counter[n as usize])
            }
            0x38d => Outcome::Value(self.fixed_control),
            0x38e => Outcome::Value(self.status),
            0x38f => Outcome::Value(self.global),
            0x390 => Outcome::Value(0),
            0x391 => when(v4, 0),
            0x392 => when(v4, self.in_use()),
            0x345 => {
                let full_width = u64::from(self.capability.full_width) << 13;
                let pebs = if self.capability.pebs.is_some() {
                    0x44c0
                } else {
                    0
                };
                let smm = u64::from(self.capability.smm) << 12;
                when(self.capability.pdcm, full_width | smm | pebs)
            }
            0x3f1 => when(self.capability.pebs.is_some(), self.pebs.enable),
            0x3f2 => when(self.capability.pebs.is_some(), self.pebs.config),
            0x600 => when(self.capability.pebs.is_some(), self.pebs.area),
            0x1d9 => Outcome::Value(self.debug),
            _ => Outcome::NotHandled,
        }
    }

    fn in_use(&self) -> u64 {
        let mut value = 0;
        for n in (0..64).filter(|&n| self.exists(n)) {
            let used = if n < 32 {
                self.select[n as usize] & 0xff != 0
            } else {
                self.control(n) & 3 != 0
            };
            value |= u64::from(used) << n | u64::from(self.interrupts(n)) << 63;
        }
        value
    }

    pub(crate) fn write(&mut self, address: u32, value: u64) -> Outcome {
        let v4 = self.capability.version >= 4;
        let any_thread = matches!(self.capability.version, 3 | 4);
        let pebs = self.capability.pebs.is_some();
        let counters = self.counters();
        let index = address as usize;
        let allowed = match address {
            0xc1..=0xc8 if address - 0xc1 < self.capability.general => u64::MAX,
            0x4c1..=0x4c8
                if self.capability.full_width && address - 0x4c1 < self.capability.general =>
            {
                (self.end(0) - 1) as u64
            }
            0x186..=0x18d if address - 0x186 < self.capability.general => {
                0xffdf_ffff | u64::from(any_thread) << 21 | u64::from(pebs) << 34
            }
            0x309..=0x30f if self.exists(address - 0x309 + 32) => (self.end(32) - 1) as u64,
            0x38d => {
                let field = if any_thread { 15 } else { 11 } | u64::from(pebs) << 32;
                (0..16)
                    .filter(|n| self.capability.fixed >> n & 1 != 0)
                    .map(|n| field << (4 * n))
                    .sum()
            }
            0x38f => counters,
            0x390 if v4 => counters | 3 << 62 | 3 << 58,
            0x390 => counters | 3 << 62,
            0x391 if v4 => counters | 1 << 62 | 1 << 59,
            0x1d9 => {
                let freeze =
                    u64::from(self.capability.pdcm) << 12 | u64::from(self.capability.smm) << 14;
                freeze | self.capability.other_debugctl
            }
            0x3f1 if pebs => counters,
            0x3f2 if pebs => 0x1f00_000f,
            0x600 if self.is_canonical(value) => u64::MAX,
            0xc1..=0xc8
            | 0x4c1..=0x4c8
            | 0x186..=0x18d
            | 0x309..=0x30f
            | 0x38e
            | 0x391
            | 0x392
            | 0x345
            | 0x3f1
            | 0x3f2
            | 0x600 => return Outcome::GeneralProtection,
            _ => return Outcome::NotHandled,
        };
        if value & !allowed != 0 {
            return Outcome::GeneralProtection;
        }
        match address {
            0xc1..=0xc8 => {
                let mut extended = value & 0xffff_ffff;
                if extended >> 31 != 0 {
                    extended |= 0xffff_ffff_0000_0000;
                }
                self.counter[index - 0xc1] = (u128::from(extended) % self.end(0)) as u64;
            }
            0x4c1..=0x4c8 => self.counter[index - 0x4c1] = value,
            0x186..=0x18d => self.select[index - 0x186] = value,
            0x309..=0x30f => self.counter[index - 0x309 + 32] = value,
            0x38d => self.fixed_control = value,
            0x38f => self.global = value,
            0x390 => self.status &= !value,
            0x391 => self.status |= value,
            0x3f1 => self.pebs.enable = value,
            0x3f2 => self.pebs.config = value,
            0x600 => self.pebs.area = value,
            _ => self.debug = value,
        }
        Outcome::Done
    }
}
