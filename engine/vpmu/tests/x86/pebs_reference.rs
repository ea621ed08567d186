//! PEBS as naive as the manual's text: SDM vol. 3B, 20.9, and 18.4.9 for the DS save area. A record is a list of words,
//! and is written at the moment its counter overflows.

use crate::guest::FakeGuest;
use vpmu::x86::Ring;
use vpmu::x86::pebs::{Fault, Guest, Statistics};

/// The registers of PEBS, and the guest around them.
#[derive(Clone, Debug)]
pub(crate) struct Pebs {
    /// IA32_PEBS_ENABLE.
    pub(crate) enable: u64,
    /// MSR_PEBS_DATA_CFG.
    pub(crate) config: u64,
    /// IA32_DS_AREA.
    pub(crate) area: u64,
    pub(crate) guest: FakeGuest,
    /// The last branches before a record, the most recent first: FROM, TO and INFO of each.
    pub(crate) branches: Vec<[u64; 3]>,
    pub(crate) statistics: Statistics,
}

impl Pebs {
    pub(crate) fn new() -> Self {
        Self {
            enable: 0,
            config: 0,
            area: 0,
            guest: FakeGuest::new(),
            branches: Vec::new(),
            statistics: Statistics::default(),
        }
    }

    /// Returns the field at this offset of the DS save area.
    fn field(&mut self, offset: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        let at = self.area.checked_add(offset)?;
        self.guest.read(at, &mut bytes).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Returns the record, as words.
    fn words(&mut self, counter: u32, groups: u64) -> Result<Vec<u64>, Fault> {
        let place = self.guest.sample()?;
        let mut words = vec![0, place.ip, 1 << counter, place.tsc];
        if groups & 1 != 0 {
            words.extend([0; 4]);
        }
        if groups & 2 != 0 {
            let r = self.guest.general()?;
            words.extend([r.rflags, r.rip]);
            words.extend(r.general);
        }
        if groups & 4 != 0 {
            let halves = |xmm: u128| [(xmm & u128::from(u64::MAX)) as u64, (xmm >> 64) as u64];
            words.extend(self.guest.xmm()?.into_iter().flat_map(halves));
        }
        if groups & 8 != 0 {
            let number = (groups >> 24 & 0x1f) as usize + 1;
            let known = self.branches.iter().copied();
            words.extend(known.chain([[0; 3]; 32]).take(number).flatten());
        }
        words[0] = (words.len() as u64 * 8) << 48 | groups;
        Ok(words)
    }

    /// Appends the record to the buffer between `base` and `maximum`, and returns the new index.
    fn append(&mut self, index: u64, base: u64, maximum: u64, words: &[u64]) -> Option<u64> {
        let end = u128::from(index) + words.len() as u128 * 8;
        if index < base || end > u128::from(maximum) {
            return None;
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.guest.write(index, &bytes).ok()?;
        let place = self.area.checked_add(0x28)?;
        self.guest.write(place, &(end as u64).to_le_bytes()).ok()?;
        Some(end as u64)
    }

    /// Handles an overflow of a counter that asks for records, and returns whether a PMI is requested.
    pub(crate) fn sample(&mut self, counter: Counter<'_>) -> bool {
        let n = counter.n;
        let reset = match n {
            ..32 => 0x40 + 8 * u64::from(n),
            _ => 0x80 + 8 * u64::from(n - 32),
        };
        // The head is read as a whole, so a head that is there only in part counts as missing.
        let head = [0x20, 0x28, 0x30, 0x38].map(|offset| self.field(offset));
        let ([Some(base), Some(index), Some(maximum), Some(threshold)], Some(reset)) =
            (head, self.field(reset))
        else {
            self.statistics.lost += 1;
            return false;
        };

        let reset = u128::from(reset) % counter.end;
        let period = counter.end - reset;
        let beyond = u128::from(*counter.value);
        *counter.value = (reset + beyond % period) as u64;
        self.statistics.skipped += (beyond / period) as u64;

        let counted = match self.guest.sample().map(|place| place.ring) {
            Ok(Ring::User) => counter.user,
            Ok(Ring::Kernel) => counter.kernel,
            // Without the place there is no record either.
            Err(Fault) => true,
        };
        if !counted {
            self.statistics.filtered += 1;
            return false;
        }
        let groups = if counter.adaptive { self.config } else { 0 };
        let words = self.words(n, groups);
        let appended = words
            .ok()
            .and_then(|words| self.append(index, base, maximum, &words));
        match appended {
            Some(_) => self.statistics.records += 1,
            None => self.statistics.lost += 1,
        }
        appended.unwrap_or(index) >= threshold
    }
}

/// A counter, numbered as in the global registers.
pub(crate) struct Counter<'a> {
    pub(crate) n: u32,
    /// One above the counter's largest value.
    pub(crate) end: u128,
    pub(crate) value: &'a mut u64,
    pub(crate) user: bool,
    pub(crate) kernel: bool,
    /// Whether its records have the groups that MSR_PEBS_DATA_CFG selects.
    pub(crate) adaptive: bool,
}
