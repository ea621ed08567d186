//! The boot probe: a partition is attacked before it is trusted.
//!
//! DDI 0487 (D13, and the register pages of MDCR_EL2 and of each PMU register) makes host counters
//! vanish below EL2. Emulators break that, errata might, and no ID register shows it. So [`probe`] does
//! from EL1 and EL0, with counters divided, what a hostile guest would do, and reads the host's
//! half from EL2.
//!
//! An attack that changes nothing proves nothing by itself: its register may have been without
//! effect at that moment, as PMSWINC_EL0 is on a disabled counter. Hence two rules. Each attack
//! starts from a freshly programmed PMU. And each is made twice: with HPMN lowered, where it must
//! show and change nothing, and with all counters the guest's, where it must be seen to work. A
//! register whose attack never works counts as open.

use core::{fmt, iter};

use super::{Features, Isolation, PmuRegisters, quiet, traps::mdcr};
use crate::arm::{
    CPU_CYCLES, CYCLE_COUNTER, MAX_EVENT_COUNTERS, PmuVersion, RawPmevtyper, Register, SW_INCR,
    pmcr, pmuserenr,
};
use crate::counter::{Counter, CounterSet};

/// Where an attack is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attacker {
    /// EL1, in AArch64.
    El1,
    /// EL0, in AArch64.
    El0,
    /// EL0, in AArch32: MRC and MCR of coprocessor 15, with the CRn, CRm and op2 of the register's
    /// [`encoding`](Register::encoding).
    El0AArch32,
}

impl Attacker {
    /// Returns the instruction that writes x1 (r1) to `register`, or reads it into x0 (r0): an MSR or MRS in A64, an
    /// MCR or MRC in A32.
    pub const fn instruction(self, register: Register, write: bool) -> u32 {
        let name = register.encoding();
        let (op0, op1, op2) = (name.op0 as u32, name.op1 as u32, name.op2 as u32);
        let (crn, crm) = (name.crn as u32, name.crm as u32);
        let (read, rt) = (!write as u32, write as u32);
        match self {
            Self::El1 | Self::El0 => {
                0xd500_0000
                    | read << 21
                    | op0 << 19
                    | op1 << 16
                    | crn << 12
                    | crm << 8
                    | op2 << 5
                    | rt
            }
            Self::El0AArch32 => 0xee00_0f10 | read << 20 | crn << 16 | rt << 12 | op2 << 5 | crm,
        }
    }
}

/// A CPU that is to be probed, at EL2, with no guest on it.
pub trait ProbedCpu: PmuRegisters {
    /// Writes the PMU's fields of MDCR_EL2, and an ISB. All other traps of the PMU are off:
    /// HDFGRTR_EL2 and HDFGWTR_EL2 are zero.
    fn set_mdcr_el2(&mut self, value: u64);

    /// Executes one access of `register` below EL2: a write of a value, or a read, whose value it
    /// returns. An instruction that traps or is undefined does nothing and reads as 0.
    fn attack(&mut self, from: Attacker, register: Register, write: Option<u64>) -> u64;

    /// Executes some instructions here.
    fn spend_time_at_el2(&mut self);
}

/// What [`probe`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What is proven.
    pub isolation: Isolation,
    /// Through which accesses host counters were seen or changed.
    pub open: Accesses,
    /// Accesses whose attack was never seen to work, so that nothing is known of them.
    pub unproven: Accesses,
}

/// A set of accesses: registers, each for reads and for writes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Accesses(u64);

impl Accesses {
    const fn bit(register: Register, write: bool) -> u64 {
        1 << (2 * register.ordinal() + write as usize)
    }

    const fn insert(&mut self, register: Register, write: bool) {
        self.0 |= Self::bit(register, write);
    }

    /// Returns whether a read (or write) of `register` is a member. Indexed registers of a kind are one.
    pub const fn contains(self, register: Register, write: bool) -> bool {
        self.0 & Self::bit(register, write) != 0
    }

    /// Returns whether there is no member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the members. Of indexed registers, number 0 stands for all.
    pub fn iter(self) -> impl Iterator<Item = (Register, bool)> {
        Register::all()
            .filter(|r| !matches!(r, Register::Pmevtyper(1..) | Register::Pmevcntr(1..)))
            .flat_map(|register| [(register, false), (register, true)])
            .filter(move |&(register, write)| self.contains(register, write))
    }
}

/// The members' names: "PMSWINC_EL0:w".
impl fmt::Debug for Accesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut set = f.debug_set();
        for (register, write) in self.iter() {
            let direction = if write { 'w' } else { 'r' };
            set.entry(&format_args!("\"{}:{direction}\"", register.name()));
        }
        set.finish()
    }
}

/// Attacks the host's half of this CPU's PMU, through each register, each way and from each
/// exception level, and tries whether MDCR_EL2 keeps counters from counting at EL2.
///
/// `host_counters` of `implemented` event counters are the host's. With none, one is divided off
/// for the time of the probe, if there are two. `aarch32`: EL0 can execute in AArch32.
///
/// Every counter is stopped and zero afterwards, and MDCR_EL2.HPMN is `implemented`.
pub fn probe<C: ProbedCpu>(
    cpu: &mut C,
    implemented: u8,
    host_counters: u8,
    features: &Features,
    aarch32: bool,
) -> Findings {
    let mut findings = Findings::default();
    let implemented = implemented.min(MAX_EVENT_COUNTERS);
    let hpmn = implemented.saturating_sub(host_counters.max(1));
    if hpmn < implemented && (hpmn > 0 || features.hpmn0) {
        let mut probe = Probe {
            cpu,
            implemented,
            host: CounterSet::first(implemented) - CounterSet::first(hpmn),
        };
        findings = probe.partition(hpmn, aarch32);
    }
    (findings.isolation.hpmd, findings.isolation.hccd) = prohibitions(cpu, implemented, features);
    reset(cpu, implemented);
    cpu.set_mdcr_el2(implemented.into());
    findings
}

/// FNV-1a over words. Two parts that differ in one register have different digests.
const fn digest(before: u64, word: u64) -> u64 {
    (before ^ word).wrapping_mul(0x100_0000_01b3)
}

struct Probe<'a, C> {
    cpu: &'a mut C,
    implemented: u8,
    host: CounterSet,
}

/// What is written: nothing set, everything set, and a PMCR_EL0 that changes where counters overflow
/// without resetting them.
const VALUES: [u64; 3] = [0, u64::MAX, pmcr::E | pmcr::LC | pmcr::LP];

impl<C: ProbedCpu> Probe<'_, C> {
    fn partition(&mut self, hpmn: u8, aarch32: bool) -> Findings {
        let mut findings = Findings::default();
        // AArch32 for itself: an emulator decodes coprocessor accesses in another place, with faults of its own.
        for from in [Attacker::El1, Attacker::El0, Attacker::El0AArch32] {
            if from == Attacker::El0AArch32 && !aarch32 {
                continue;
            }
            let (mut open, mut works) = (Accesses::default(), Accesses::default());
            for enabled in [true, false] {
                self.attack_all(from, hpmn, enabled, &mut open);
                self.attack_all(from, self.implemented, enabled, &mut works);
            }
            let expected = Register::all()
                .flat_map(|register| [(register, false), (register, true)])
                .filter(|&(register, write)| reaches_counters(register, write, from));
            for (register, write) in expected.filter(|&(r, w)| !works.contains(r, w)) {
                findings.unproven.insert(register, write);
            }
            findings.open.0 |= open.0;
        }
        findings.isolation.partition = findings.open.is_empty() && findings.unproven.is_empty();
        findings
    }

    /// Notes in `seen` which accesses show or change the host's part with this HPMN.
    fn attack_all(&mut self, from: Attacker, hpmn: u8, enabled: bool, seen: &mut Accesses) {
        self.program(hpmn, enabled);
        let untouched = self.host_part();
        // The lowest and the topmost counter of the host stand for those between.
        let (low, top) = (
            self.implemented - self.host.len() as u8,
            self.implemented - 1,
        );
        for register in Register::all() {
            let indices = match register {
                Register::Pmevtyper(n) | Register::Pmevcntr(n) if n != low && n != top => continue,
                Register::Pmxevtyper | Register::Pmxevcntr => [low, top],
                _ => [0, 0],
            };
            for selection in indices {
                for write in iter::once(None).chain(VALUES.map(Some)) {
                    if !register.is_accessible(write.is_some()) {
                        continue;
                    }
                    self.program(hpmn, enabled);
                    self.cpu.write(Register::Pmselr, selection.into());
                    let value = self.cpu.attack(from, register, write);
                    // A read is checked twice: it may show something, and it may change something.
                    let shown = write.is_none() && self.shows(register, value);
                    if shown || self.host_part() != untouched {
                        seen.insert(register, write.is_some());
                    }
                }
            }
        }
    }

    /// Whether a value read below EL2 shows a host's counter. All of the guest's hold zero.
    fn shows(&self, register: Register, value: u64) -> bool {
        match register {
            Register::Pmcr => value & pmcr::N_MASK == u64::from(self.implemented) << pmcr::N_SHIFT,
            Register::PmcntenSet
            | Register::PmcntenClr
            | Register::PmintenSet
            | Register::PmintenClr
            | Register::PmovsSet
            | Register::PmovsClr => value & u64::from(self.host.bits()) != 0,
            Register::Pmevcntr(_)
            | Register::Pmevtyper(_)
            | Register::Pmxevcntr
            | Register::Pmxevtyper => value != 0,
            _ => false,
        }
    }

    /// Programs the whole PMU anew. Host counters are about to overflow at 2^32. Either they count
    /// software increments at each level, with their interrupts enabled, or they are disabled and
    /// have overflowed: so there is something to clear, and something to set, in each register.
    fn program(&mut self, hpmn: u8, enabled: bool) {
        reset(self.cpu, self.implemented);
        // Neither HPMD nor a trap: the partition alone has to keep the attack out.
        self.cpu.set_mdcr_el2(u64::from(hpmn) | mdcr::HPME);
        for n in self.host {
            let increments = u64::from(SW_INCR) | RawPmevtyper::NSH;
            self.cpu.write(Register::Pmevtyper(n.number()), increments);
            self.cpu.write(Register::Pmevcntr(n.number()), 0xffff_ffff);
        }
        let host = self.host.bits().into();
        if enabled {
            self.cpu.write(Register::PmcntenSet, host);
            self.cpu.write(Register::PmintenSet, host);
        } else {
            self.cpu.write(Register::PmovsSet, host);
        }
        self.cpu.write(Register::Pmuserenr, pmuserenr::MASK);
        self.cpu.write(Register::Pmcr, pmcr::E | pmcr::LC);
    }

    /// Returns what of the PMU the host owns, as a digest: which counters are enabled, have their interrupt enabled, have
    /// overflowed, and have overflowed after one more increment; their values and types after that. The increment shows
    /// whether its counters still count, and where they overflow.
    // Not the registers themselves: the probe runs on a hypervisor's stack.
    fn host_part(&mut self) -> u64 {
        let host = u64::from(self.host.bits());
        let mut part = 0;
        for register in [
            Register::PmcntenSet,
            Register::PmintenSet,
            Register::PmovsSet,
        ] {
            part = digest(part, self.cpu.read(register) & host);
        }
        self.cpu.write(Register::Pmswinc, host);
        part = digest(part, self.cpu.read(Register::PmovsSet) & host);
        for n in self.host.iter().map(Counter::number) {
            part = digest(part, self.cpu.read(Register::Pmevcntr(n)));
            part = digest(part, self.cpu.read(Register::Pmevtyper(n)));
        }
        part
    }
}

/// Whether this access reaches event counters that are the guest's, so that an attack by it must be
/// seen to work on them.
const fn reaches_counters(register: Register, write: bool, from: Attacker) -> bool {
    match register {
        Register::PmintenSet | Register::PmintenClr => matches!(from, Attacker::El1),
        Register::Pmswinc => write,
        Register::Pmcr
        | Register::PmcntenSet
        | Register::PmcntenClr
        | Register::PmovsSet
        | Register::PmovsClr
        | Register::Pmxevtyper
        | Register::Pmxevcntr
        | Register::Pmevtyper(_)
        | Register::Pmevcntr(_) => true,
        Register::Pmselr
        | Register::Pmccntr
        | Register::Pmccfiltr
        | Register::Pmuserenr
        | Register::Pmceid0
        | Register::Pmceid1
        | Register::Pmmir => false,
    }
}

/// Whether HPMD stops an event counter, and HCCD the cycle counter, that ask to count at EL2. Each
/// must be seen to count there without.
fn prohibitions<C: ProbedCpu>(cpu: &mut C, implemented: u8, features: &Features) -> (bool, bool) {
    let mut moves = |prohibited: u64| {
        reset(cpu, implemented);
        cpu.set_mdcr_el2(prohibited | u64::from(implemented));
        let mut enable = u64::from(CounterSet::of(CYCLE_COUNTER).bits());
        if implemented > 0 {
            let cycles = u64::from(CPU_CYCLES) | RawPmevtyper::NSH;
            cpu.write(Register::Pmevtyper(0), cycles);
            enable |= 1;
        }
        cpu.write(Register::Pmccfiltr, RawPmevtyper::NSH);
        cpu.write(Register::PmcntenSet, enable);
        cpu.write(Register::Pmcr, pmcr::E | pmcr::LC);
        cpu.spend_time_at_el2();
        // Stopped first, so that what is read is the time at EL2 and not that of the reads.
        cpu.write(Register::Pmcr, pmcr::LC);
        let event = implemented > 0 && cpu.read(Register::Pmevcntr(0)) != 0;
        (event, cpu.read(Register::Pmccntr) != 0)
    };
    let (event, cycle) = moves(0);
    let (event_anyway, cycle_anyway) = moves(mdcr::HPMD | mdcr::HCCD);
    (
        event && !event_anyway && features.version >= PmuVersion::V3p1,
        cycle && !cycle_anyway && features.version >= PmuVersion::V3p5,
    )
}

/// Stops and zeroes everything.
fn reset<C: ProbedCpu>(cpu: &mut C, implemented: u8) {
    // HPMN as large as it gets: P resets all counters then, wherever it is written.
    cpu.set_mdcr_el2(implemented.into());
    quiet(cpu);
    cpu.write(Register::Pmccfiltr, 0);
    for n in 0..implemented {
        cpu.write(Register::Pmevtyper(n), 0);
    }
    cpu.write(Register::Pmselr, 0);
    cpu.write(Register::Pmuserenr, 0);
    cpu.write(Register::Pmcr, pmcr::P | pmcr::C);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_are_the_instructions_that_an_assembler_makes() {
        let code =
            |from: Attacker, register| [false, true].map(|write| from.instruction(register, write));
        let (a64, a32) = (Attacker::El1, Attacker::El0AArch32);
        assert_eq!(code(a64, Register::Pmcr), [0xd53b_9c00, 0xd51b_9c01]);
        assert_eq!(code(a64, Register::PmintenSet), [0xd538_9e20, 0xd518_9e21]);
        assert_eq!(
            code(a64, Register::Pmevtyper(9)),
            [0xd53b_ed20, 0xd51b_ed21]
        );
        assert_eq!(code(a32, Register::Pmcr), [0xee19_0f1c, 0xee09_1f1c]);
        assert_eq!(code(a32, Register::Pmevcntr(9)), [0xee1e_0f39, 0xee0e_1f39]);
        assert_eq!(
            a64.instruction(Register::Pmcr, true),
            Attacker::El0.instruction(Register::Pmcr, true)
        );
    }
}
