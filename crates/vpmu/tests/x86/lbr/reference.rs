//! Last branch records as naive as the manuals' text: SDM vol. 3B, chapter 20, and APM vol. 2, 13.1.1; with one counter,
//! whose overflow asks for a PMI. It knows nothing of the engine but what is handed to it.

use std::collections::VecDeque;

use vpmu::x86::lbr::{Branch, Kind};
use vpmu::x86::{Capability, Ring};

const ENABLED: u64 = 1 << 0;
const RECORDS_FROZEN: u64 = 1 << 58;
const COUNTERS_FROZEN: u64 = 1 << 59;

/// A record: address, target, and Intel's information.
type Record = [u64; 3];

/// One vCPU's records and its counter 0, which is set to count and to interrupt.
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
    counting: bool,
    status: u64,
    pub(crate) due: bool,
    /// Branches that a PMI has waited for.
    held: Option<usize>,
    /// Whether the unit could record when the guest last did something.
    ready: bool,
}

impl Reference {
    pub(crate) fn new(capability: Capability, follows: bool) -> Self {
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
            counting: true,
            status: 0,
            due: false,
            held: None,
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
            (0x38f, true) | (0xc000_0301, false) => Ok(u64::from(self.counting)),
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
        let status = ENABLED | RECORDS_FROZEN | COUNTERS_FROZEN;
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
            (0x38f, true) | (0xc000_0301, false) => self.counting = value & 1 != 0,
            (0x390, true) | (0xc000_0302, false) => self.status &= !(value & status),
            (0x391, true) | (0xc000_0303, false) => self.status |= value & status,
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

    fn ring(&self, ring: Ring) -> bool {
        match (self.is_intel(), ring) {
            (true, Ring::Kernel) => self.control & 1 << 1 != 0,
            (true, Ring::User) => self.control & 1 << 2 != 0,
            (false, Ring::Kernel) => self.control & 1 << 0 == 0,
            (false, Ring::User) => self.control & 1 << 1 == 0,
        }
    }

    fn kind(&self, kind: Kind) -> bool {
        // The bit that lets pass, and the bit that keeps out.
        let (intel, amd) = match kind {
            Kind::Conditional => (16, 2),
            Kind::RelativeJump => (17, 7),
            Kind::IndirectJump => (18, 6),
            Kind::RelativeCall | Kind::NextCall => (19, 3),
            Kind::IndirectCall => (20, 4),
            Kind::Return => (21, 5),
            Kind::Other => (22, 8),
        };
        match self.is_intel() {
            true => self.control & 1 << intel != 0,
            false => self.control & 1 << amd == 0,
        }
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
        if self.call_stack() {
            return;
        }
        if let Some(held) = &mut self.held {
            *held += 1;
            if *held == depth {
                self.end_run();
            }
        }
    }

    fn intel_record(&self, branch: &Branch) -> Record {
        let bits = u32::from(self.intel().linear_address_bits);
        let from = match self.ring(branch.from_ring) {
            true => extend(branch.from, bits),
            false => u64::MAX,
        };
        let kind = match branch.kind {
            Kind::Conditional => 0,
            Kind::IndirectJump => 1,
            Kind::RelativeJump => 2,
            Kind::IndirectCall => 3,
            Kind::RelativeCall | Kind::NextCall => 4,
            Kind::Return => 5,
            Kind::Other => 8,
        };
        let mut info = kind << 56;
        if let (true, Some(cycles)) = (self.intel().cycles, branch.cycles) {
            info |= u64::from(cycles) + (1 << 60);
        }
        if self.intel().mispredict && branch.mispredicted == Some(true) {
            info |= 1 << 63;
        }
        [from, extend(branch.to, bits), info]
    }

    fn amd_record(&self, branch: &Branch) -> Record {
        let from = if self.ring(branch.from_ring) {
            branch.from
        } else {
            0
        };
        // Bits 57:0 are the address and bits 60:58 its sign, in both. Bits 62:61 are a sign, or reserved and speculative;
        // bit 63 is mispredicted, or valid.
        let (from, to) = (extend(from, 58), extend(branch.to, 58));
        let mispredicted = u64::from(branch.mispredicted == Some(true));
        [
            from << 1 >> 1 | mispredicted << 63,
            to << 3 >> 3 | 1 << 63,
            0,
        ]
    }

    /// Counter 0 overflows, if it counts.
    pub(crate) fn overflow(&mut self) {
        if !self.counting || self.status & COUNTERS_FROZEN != 0 {
            return;
        }
        self.status |= ENABLED;
        if self.ready && !self.due {
            if self.held.is_none() {
                self.clear();
                self.held = Some(0);
            }
        } else {
            self.request();
            self.find_ready();
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

    /// Nobody follows the guest any more: the PMI that has waited is requested.
    pub(crate) fn end_run(&mut self) {
        if self.held.take().is_some() {
            self.request();
            self.find_ready();
        }
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
        if self.held.is_some() {
            self.end_run();
        }
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
        let ready = self.follows && self.enabled() && !self.frozen() && !self.call_stack();
        if ready && !self.ready {
            self.clear();
        }
        self.ready = ready;
    }

    fn clear(&mut self) {
        self.records.iter_mut().for_each(|record| *record = [0; 3]);
    }

    /// Power-on reset leaves a counter that does not count.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.capability, self.follows);
    }
}

/// Returns `value` with its bit `bits` - 1 repeated above.
fn extend(value: u64, bits: u32) -> u64 {
    match value >> (bits - 1) & 1 {
        0 => value & ((1 << bits) - 1),
        _ => value | !((1 << bits) - 1),
    }
}
