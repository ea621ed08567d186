//! The PMU as EL1 and EL0 see it below MDCR_EL2.HPMN and the traps (DDI 0487: the register pages' access pseudocode).

use vpmu::arm::{ExceptionLevel, PmuVersion, Register};

use super::{C, CYCLE, EVENTS, Exit, LC, LP, Machine, P, Place, access_bit, bit, counter_mask};

impl Machine {
    /// Performs an instruction of the guest.
    pub(crate) fn guest(
        &mut self,
        register: Register,
        write: Option<u64>,
        el: ExceptionLevel,
    ) -> Exit {
        let (register, trap_as) = match register {
            Register::Pmxevtyper if self.selected() == CYCLE => (Register::Pmccfiltr, register),
            Register::Pmxevtyper => (Register::Pmevtyper(self.selected()), register),
            Register::Pmxevcntr => (Register::Pmevcntr(self.selected()), register),
            other => (other, other),
        };
        if let Register::Pmevtyper(n) | Register::Pmevcntr(n) = register
            && n >= self.implemented
        {
            return Exit::Undefined;
        }
        if let Some(refused) = self.refuse(trap_as, write.is_some(), el) {
            return refused;
        }
        if self.traps_to_el2(trap_as, write.is_some(), el) {
            return Exit::TrapToEl2;
        }
        let open = self.is_open(trap_as, write.is_some(), el);
        if let Register::Pmevtyper(n) | Register::Pmevcntr(n) = register
            && n >= self.hpmn()
            && !open
        {
            return if self.features.fgt {
                Exit::TrapToEl2
            } else {
                Exit::Undefined
            };
        }
        match write {
            _ if self.quirks.dead & access_bit(trap_as, write.is_some()) != 0 => match write {
                Some(_) => Exit::Done,
                None => Exit::Value(0),
            },
            Some(value) => {
                self.write_below_el2(register, value, el, open);
                Exit::Done
            }
            None => Exit::Value(self.read_below_el2(register, open)),
        }
    }

    /// Returns whether this machine lets the access reach host counters.
    fn is_open(&self, register: Register, write: bool, el: ExceptionLevel) -> bool {
        let from = match el {
            ExceptionLevel::El1 => 0,
            ExceptionLevel::El0 if self.aarch32 => 2,
            ExceptionLevel::El0 => 1,
        };
        self.quirks.open & access_bit(register, write) != 0 && bit(self.quirks.from.into(), from)
    }

    fn selected(&self) -> u8 {
        (self.selr & 0x1f) as u8
    }

    fn refuse(&self, register: Register, write: bool, el: ExceptionLevel) -> Option<Exit> {
        use Register as R;
        let missing = match register {
            R::Pmswinc => !write,
            R::Pmmir => write || self.features.version < PmuVersion::V3p4,
            R::Pmceid0 | R::Pmceid1 => write,
            _ => false,
        };
        if missing {
            return Some(Exit::Undefined);
        }
        if el == ExceptionLevel::El1 {
            return None;
        }
        let [en, sw, cr, er] = [0, 1, 2, 3].map(|n| bit(self.userenr, n));
        let allowed = match register {
            R::PmintenSet | R::PmintenClr | R::Pmmir => return Some(Exit::Undefined),
            R::Pmuserenr if write => return Some(Exit::Undefined),
            R::Pmuserenr => true,
            R::Pmswinc => en || sw,
            R::Pmccntr if !write => en || cr,
            R::Pmevcntr(_) | R::Pmxevcntr if !write => en || er,
            R::Pmselr => en || er,
            _ => en,
        };
        (!allowed).then_some(Exit::TrapToEl1)
    }

    fn traps_to_el2(&self, register: Register, write: bool, el: ExceptionLevel) -> bool {
        use Register as R;
        let bit_number = match register {
            R::Pmevcntr(_) | R::Pmxevcntr => 12,
            R::Pmevtyper(_) | R::Pmxevtyper => 13,
            R::Pmccfiltr => 14,
            R::Pmccntr => 15,
            R::PmcntenSet | R::PmcntenClr => 16,
            R::PmintenSet | R::PmintenClr => 17,
            R::PmovsSet | R::PmovsClr => 18,
            R::Pmselr => 19,
            R::Pmswinc => 20,
            R::Pmcr => 21,
            R::Pmmir => 22,
            R::Pmuserenr => 57,
            R::Pmceid0 | R::Pmceid1 => 58,
        };
        let fine = if write {
            self.traps.hdfgwtr_el2
        } else {
            self.traps.hdfgrtr_el2
        };
        let (tpm, tpmcr) = (bit(self.traps.mdcr_el2, 6), bit(self.traps.mdcr_el2, 5));
        let by_fine = self.features.fgt && bit(fine, bit_number);
        // HDFGRTR_EL2 has no bit for PMCR_EL0.
        let by_fine = by_fine && (write || register != R::Pmcr);
        let unasked =
            self.quirks.tpm_asks_only_en && el == ExceptionLevel::El0 && !bit(self.userenr, 0);
        by_fine || (tpm || tpmcr && register == R::Pmcr) && !unasked
    }

    /// Returns the bits of a set/clear pair that EL1 reaches.
    fn reach(&self, open: bool) -> u64 {
        if open { self.all() } else { self.guests() }
    }

    pub(super) fn read_below_el2(&self, register: Register, open: bool) -> u64 {
        use Register as R;
        match register {
            R::Pmcr if open => self.pmcr_with(self.implemented),
            R::Pmcr => self.pmcr_with(self.hpmn()),
            R::PmcntenSet | R::PmcntenClr => self.cnten & self.reach(open),
            R::PmintenSet | R::PmintenClr => self.inten & self.reach(open),
            R::PmovsSet | R::PmovsClr => self.ovs & self.reach(open),
            R::Pmselr => self.selr,
            R::Pmuserenr => self.userenr,
            R::Pmevtyper(n) => self.evtyper[usize::from(n)],
            R::Pmevcntr(n) => self.evcntr[usize::from(n)],
            R::Pmccfiltr => self.evtyper[31],
            R::Pmccntr => self.evcntr[31],
            R::Pmceid0 => self.filter.pmceid(EVENTS)[0],
            R::Pmceid1 => self.filter.pmceid(EVENTS)[1],
            R::Pmmir => 5,
            R::Pmswinc | R::Pmxevtyper | R::Pmxevcntr => unreachable!("{register:?}"),
        }
    }

    fn write_below_el2(&mut self, register: Register, value: u64, el: ExceptionLevel, open: bool) {
        use Register as R;
        let bits = value & self.reach(open);
        match register {
            R::Pmcr if open => self.write_pmcr(value, self.implemented),
            R::Pmcr => self.write_pmcr(value, self.hpmn()),
            R::PmcntenSet => self.cnten |= bits,
            R::PmcntenClr => self.cnten &= !bits,
            R::PmintenSet => self.inten |= bits,
            R::PmintenClr => self.inten &= !bits,
            R::PmovsSet => self.ovs |= bits,
            R::PmovsClr => self.ovs &= !bits,
            R::Pmswinc => {
                let place = match el {
                    ExceptionLevel::El0 => Place::El0,
                    ExceptionLevel::El1 => Place::El1,
                };
                self.software_increment(bits, place);
            }
            other => self.write_plain(other, value),
        }
    }

    pub(super) fn software_increment(&mut self, counters: u64, place: Place) {
        for n in (0..self.implemented).filter(|n| bit(counters, u32::from(*n))) {
            if self.counts(n, 0, place) {
                self.increment(n, place);
            }
        }
    }

    pub(super) fn write_pmcr(&mut self, value: u64, reset: u8) {
        if value & P != 0 {
            self.evcntr[..usize::from(reset)].fill(0);
        }
        if value & C != 0 {
            self.evcntr[31] = 0;
        }
        let long = if self.features.version >= PmuVersion::V3p5 {
            LP
        } else {
            0
        };
        let res1 = if self.long_cycles { LC } else { 0 };
        self.pmcr = value & (0x79 | long) | res1;
    }

    pub(super) fn pmcr_with(&self, n: u8) -> u64 {
        self.pmcr | u64::from(n) << 11 | 0x4101 << 16
    }

    /// Writes a register whose write does not depend on the exception level.
    pub(super) fn write_plain(&mut self, register: Register, value: u64) {
        use Register as R;
        match register {
            R::Pmselr => self.selr = value & 0x1f,
            R::Pmuserenr => self.userenr = value & 0xf,
            R::Pmevtyper(n) => {
                // Bits 23 and 19 to 16 are RES0, and this machine has no thresholds.
                self.evtyper[usize::from(n)] = value & 0xff70_ffff;
            }
            R::Pmccfiltr => self.evtyper[31] = value & 0xff70_0000,
            R::Pmevcntr(n) => {
                self.evcntr[usize::from(n)] = value & counter_mask(self.features.version, n);
            }
            R::Pmccntr => self.evcntr[31] = value,
            other => unreachable!("{other:?} is not writable"),
        }
    }
}
