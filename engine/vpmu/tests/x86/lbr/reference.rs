//! Last branch records as naive as the manuals' text: SDM vol. 3B, chapter 19, and APM vol. 2, 13.1.1; with one counter,
//! whose overflow asks for a PMI, and where the guest has PEBS, another, whose overflow asks for a record. It knows nothing
//! of the engine but what is handed to it.

// Fuzz targets include this file by its path, and expect its modules beside it.
#[path = "reference/branch.rs"]
mod branch;

use std::collections::VecDeque;

use crate::pebs_reference::{Counter, Pebs};
use branch::extend;
use vpmu::x86::Capability;
use vpmu::x86::lbr::{Branch, Kind};

const ENABLED: u64 = 1 << 0;
const RECORDS_FROZEN: u64 = 1 << 58;
const COUNTERS_FROZEN: u64 = 1 << 59;
const BUFFER: u64 = 1 << 62;
/// One above the largest value of a counter of 48 bits.
const END: u64 = 1 << 48;

/// A record: address, target, and Intel's information.
type Record = [u64; 3];

/// One vCPU's records, its counter 0, which is set to count and to interrupt, and its counter 1, which counts in user space.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    capability: Capability,
    follows: bool,
    /// IA32_LBR_CTL, or LbrSelect.
    control: u64,
    /// DebugExtnCtl. Intel has none.
    extension: u64,
    debugctl: u64,
    /// As many as the depth.
    records: VecDeque<Record>,
    /// IA32_PERF_GLOBAL_CTRL.
    counting: u64,
    status: u64,
    pub(crate) due: bool,
    /// Branches since the guest is followed.
    held: Option<usize>,
    /// What waits for them: a PMI, and a record of counter 1.
    pmi_waits: bool,
    record_waits: bool,
    pub(crate) pebs: Option<Pebs>,
    /// What counter 1 has counted.
    value: u64,
    /// Whether the unit could record when the guest last did something.
    ready: bool,
}

impl Reference {
    pub(crate) fn new(capability: Capability, follows: bool, pebs: Option<Pebs>) -> Self {
        let depth = match capability {
            Capability::Intel(intel) => {
                let depths = intel.lbr.expect("offered").depths;
                (1..=4)
                    .filter(|n| depths >> (n - 1) & 1 != 0)
                    .max()
                    .map_or(0, |n| 8 * n)
            }
            Capability::Amd(_) => 16,
        };
        Self {
            capability,
            follows,
            control: 0,
            extension: 0,
            debugctl: 0,
            records: vec![[0; 3]; depth].into(),
            counting: if pebs.is_some() { 3 } else { 1 },
            status: 0,
            due: false,
            held: None,
            pmi_waits: false,
            record_waits: false,
            pebs,
            value: 0,
            ready: false,
        }
    }

    fn is_intel(&self) -> bool {
        matches!(self.capability, Capability::Intel(_))
    }

    fn intel(&self) -> vpmu::x86::lbr::intel::Capability {
        match self.capability {
            Capability::Intel(intel) => intel.lbr.expect("offered"),
            Capability::Amd(_) => panic!("AMD's"),
        }
    }

    /// Returns the register at `address` as record and column; `None`: it is no record's.
    fn cell(&self, address: u32) -> Option<(usize, usize)> {
        let places: &[(u32, u32, u32, usize)] = match self.capability {
            // The first register, registers, their distance, the column.
            Capability::Intel(_) => &[(0x1500, 32, 1, 0), (0x1600, 32, 1, 1), (0x1200, 32, 1, 2)],
            Capability::Amd(_) => &[(0xc001_0300, 16, 2, 0), (0xc001_0301, 16, 2, 1)],
        };
        places.iter().find_map(|&(first, count, step, column)| {
            let offset = address.checked_sub(first)?;
            let inside = offset % step == 0 && offset / step < count;
            inside.then_some(((offset / step) as usize, column))
        })
    }

    /// `Err`: #GP.
    pub(crate) fn read(&mut self, address: u32) -> Result<u64, ()> {
        self.end_run();
        let value = match (address, self.is_intel()) {
            (0x14ce, true) | (0xc000_010e, false) => Ok(self.control),
            (0x14cf, true) => Ok(self.records.len() as u64),
            (0xc000_010f, false) => Ok(self.extension),
            (0x1d9, _) => Ok(self.debugctl),
            (0x38e, true) | (0xc000_0300, false) => Ok(self.status),
            (0x38f, true) | (0xc000_0301, false) => Ok(self.counting),
            (0x3f1 | 0x3f2 | 0xc2, true) => match (&self.pebs, address) {
                (None, _) => Err(()),
                (Some(pebs), 0x3f1) => Ok(pebs.enable),
                (Some(pebs), 0x3f2) => Ok(pebs.config),
                (Some(_), _) => Ok(self.value),
            },
            _ => {
                let (n, column) = self.cell(address).ok_or(())?;
                self.records.get(n).map(|record| record[column]).ok_or(())
            }
        };
        self.find_ready();
        value
    }

    /// `Err`: #GP.
    pub(crate) fn write(&mut self, address: u32, value: u64) -> Result<(), ()> {
        self.end_run();
        let written = self.set(address, value);
        self.find_ready();
        written
    }

    fn set(&mut self, address: u32, value: u64) -> Result<(), ()> {
        let mut status = ENABLED | RECORDS_FROZEN | COUNTERS_FROZEN;
        if self.pebs.is_some() {
            status |= 2 | BUFFER;
        }
        match (address, self.is_intel()) {
            (0x14ce, true) => {
                let mut allowed = 0b111 | 0x7f << 16;
                if self.intel().call_stack {
                    allowed |= 1 << 3;
                }
                if value & !allowed != 0 {
                    return Err(());
                }
                self.control = value;
            }
            (0x14cf, true) => {
                let offered = [8, 16, 24, 32]
                    .into_iter()
                    .enumerate()
                    .any(|(n, depth)| depth == value && self.intel().depths >> n & 1 != 0);
                if !offered {
                    return Err(());
                }
                self.records = vec![[0; 3]; value as usize].into();
            }
            (0xc000_010e, false) => self.control = value & 0x1ff,
            (0xc000_010f, false) => self.extension = value & 1 << 6,
            (0x1d9, _) => {
                if value & !(1 << 11 | 1 << 12) != 0 {
                    return Err(());
                }
                self.debugctl = value;
            }
            (0x38f, true) | (0xc000_0301, false) => self.counting = value,
            (0x390, true) | (0xc000_0302, false) => self.status &= !(value & status),
            (0x391, true) | (0xc000_0303, false) => self.status |= value & status,
            (0x3f1, true) => self.pebs.as_mut().ok_or(())?.enable = value,
            (0x3f2, true) => self.pebs.as_mut().ok_or(())?.config = value,
            _ => {
                let (n, column) = self.cell(address).ok_or(())?;
                let kept = self.kept(column, value);
                self.records.get_mut(n).ok_or(())?[column] = kept;
            }
        }
        Ok(())
    }

    /// Returns what a record's register holds of `value`.
    fn kept(&self, column: usize, value: u64) -> u64 {
        match (self.is_intel(), column) {
            (false, _) => value,
            (true, 2) => {
                let mut bits = 0xf << 56;
                if self.intel().mispredict {
                    bits |= 1 << 63;
                }
                if self.intel().cycles {
                    bits |= 1 << 60 | 0xffff;
                }
                value & bits
            }
            (true, _) => extend(value, u32::from(self.intel().linear_address_bits)),
        }
    }

    fn enabled(&self) -> bool {
        match self.is_intel() {
            true => self.control & 1 != 0,
            false => self.extension & 1 << 6 != 0,
        }
    }

    fn call_stack(&self) -> bool {
        self.is_intel() && self.control & 1 << 3 != 0
    }

    fn frozen(&self) -> bool {
        self.status & RECORDS_FROZEN != 0
    }

    pub(crate) fn branch(&mut self, branch: &Branch) {
        let wanted =
            self.enabled() && !self.frozen() && self.ring(branch.to_ring) && self.kind(branch.kind);
        if !wanted {
            return;
        }
        let depth = self.records.len();
        if self.call_stack() {
            match branch.kind {
                Kind::RelativeCall | Kind::IndirectCall => {}
                Kind::Return => {
                    self.records.pop_front();
                    self.records.push_back([0; 3]);
                    return;
                }
                _ => return,
            }
        }
        let record = match self.is_intel() {
            true => self.intel_record(branch),
            false => self.amd_record(branch),
        };
        self.records.push_front(record);
        self.records.truncate(depth);
        if let Some(held) = &mut self.held {
            *held += 1;
            if *held == depth {
                self.end_run();
            }
        }
    }

    fn counts(&self, counter: u64) -> bool {
        self.counting >> counter & 1 != 0 && self.status & COUNTERS_FROZEN == 0
    }

    /// Counter 0 overflows, if it counts.
    pub(crate) fn overflow(&mut self) {
        if self.counts(0) {
            self.status |= ENABLED;
            self.ask_for_pmi();
        }
    }

    fn ask_for_pmi(&mut self) {
        if self.follow() {
            self.pmi_waits = true;
        } else {
            self.request();
            self.find_ready();
        }
    }

    /// Follows the guest from here on, or further, if its branches can be recorded and no PMI is due.
    fn follow(&mut self) -> bool {
        let follows = self.ready && !self.due;
        if follows && self.held.is_none() {
            self.clear();
            self.held = Some(0);
        }
        follows
    }

    /// Counter 1 counts so many events of user space, if it counts.
    pub(crate) fn count(&mut self, times: u64) {
        if !self.counts(1) {
            return;
        }
        let Some(pebs) = &self.pebs else { return };
        let (enabled, has_branches) = (pebs.enable & 2 != 0, pebs.config & 8 != 0);
        let sum = self.value + times;
        self.value = sum % END;
        if sum < END {
            return;
        }
        if !enabled {
            self.status |= 2;
        } else if has_branches && self.follow() {
            self.record_waits = true;
        } else {
            self.record(Self::ask_for_pmi);
        }
    }

    /// Writes a record of counter 1, and asks for a PMI where the buffer is full up to its threshold.
    fn record(&mut self, ask: impl Fn(&mut Self)) {
        // Records that go on without the guest being followed are not its last branches.
        let are_last = self.held.is_some() || !self.ready;
        let Some(pebs) = &mut self.pebs else { return };
        pebs.branches = match are_last {
            true => self.records.iter().copied().collect(),
            false => Vec::new(),
        };
        let is_due = pebs.sample(Counter {
            n: 1,
            end: END.into(),
            value: &mut self.value,
            user: true,
            kernel: false,
            adaptive: true,
        });
        if is_due {
            self.status |= BUFFER;
            ask(self);
        }
    }

    pub(crate) fn awaited(&self) -> u8 {
        self.held
            .map_or(0, |held| (self.records.len() - held) as u8)
    }

    /// What was handed over for a PMI that waits are not the last branches.
    pub(crate) fn lose(&mut self) {
        if self.held.is_some() {
            self.held = Some(0);
            self.clear();
        }
    }

    /// Nobody follows the guest any more: what has waited is done.
    pub(crate) fn end_run(&mut self) {
        if self.held.is_none() {
            return;
        }
        if std::mem::take(&mut self.record_waits) {
            self.record(Self::request);
        }
        self.held = None;
        if std::mem::take(&mut self.pmi_waits) {
            self.request();
        }
        self.find_ready();
    }

    /// The state goes on elsewhere, where it is found out anew whether a PMI has to wait.
    pub(crate) fn migrate(&mut self) {
        self.end_run();
        self.find_ready();
    }

    pub(crate) fn disable(&mut self) -> bool {
        let was = self.enabled();
        match self.is_intel() {
            true => self.control &= !1,
            false => self.extension = 0,
        }
        self.find_ready();
        was
    }

    fn request(&mut self) {
        self.due = true;
        if self.debugctl & 1 << 11 != 0 {
            self.status |= RECORDS_FROZEN;
        }
        if self.debugctl & 1 << 12 != 0 {
            self.status |= COUNTERS_FROZEN;
        }
    }

    /// Records of an earlier run are not what a guest that goes on has taken last.
    fn find_ready(&mut self) {
        let ready = self.follows && self.enabled() && !self.frozen();
        if ready && !self.ready {
            self.clear();
        }
        self.ready = ready;
        if !ready {
            self.end_run();
        }
    }

    fn clear(&mut self) {
        self.records.iter_mut().for_each(|record| *record = [0; 3]);
    }

    /// Power-on reset: the counters are set up anew.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.capability, self.follows, self.pebs.take());
    }
}
