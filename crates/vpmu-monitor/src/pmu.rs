//! The guest's PMU on one CPU: one of the designs, behind one face.

use core::fmt;

use vpmu::arm::{
    EventFilter, ExceptionLevel, Outcome, PmuVersion, RawPmevtyper, Register,
    emulated::{ConfigError, EmulatedConfig, EmulatedPmu, Identity},
    partition::{
        Features, Isolation, PartitionConfig, PartitionedPmu, Plan, PlanError, PmuRegisters,
        TrapRegisters,
    },
    pmcr, pmuserenr,
};

use crate::{
    backing::Backing,
    boot_words::{Design, Settings},
};

/// The event that counts the monitor's own instructions: INST_RETIRED.
const INST_RETIRED: u16 = 0x0008;

/// `MDCR_EL2.HPME`: counters from HPMN on are enabled.
const MDCR_HPME: u64 = 1 << 7;

/// What a CPU's PMU is and can do.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// What the ID registers say.
    pub features: Features,
    /// What the boot probe found.
    pub isolation: Isolation,
    /// `PMCR_EL0` as EL2 reads it: the real number of counters and the identity.
    pub pmcr: u64,
    /// EL3 exists (`ID_AA64PFR0_EL1.EL3`).
    pub el3: bool,
    /// `PMCEID0_EL0` and `PMCEID1_EL0`.
    pub events: [u64; 2],
    /// `PMMIR_EL1`, 0 before PMUv3p4.
    pub pmmir: u64,
}

impl Hardware {
    /// Event counters that exist.
    pub const fn counters(&self) -> u8 {
        ((self.pmcr & pmcr::N_MASK) >> pmcr::N_SHIFT) as u8
    }

    fn partition(&self, host_counters: u8) -> PartitionConfig {
        PartitionConfig {
            implemented: self.counters(),
            host_counters,
            features: self.features,
            isolation: self.isolation,
            filter: EventFilter::default(),
            events: self.events,
        }
    }

    fn counts_instructions(&self) -> bool {
        self.events[0] >> INST_RETIRED & 1 != 0
    }
}

/// What to do about the guest's overflow interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pmi {
    /// Not the guest's: deactivate the physical interrupt.
    None,
    /// The guest's physical interrupt: pass it on with the hardware bit.
    Physical,
    /// The guest's line is computed: make the virtual interrupt agree with [`GuestPmu::line`].
    Line,
}

/// The guest's PMU on one CPU.
#[derive(Debug)]
pub struct GuestPmu {
    kind: PmuKind,
    plan: Plan,
    hardware: Hardware,
    /// The host counter that counts the monitor's instructions.
    own_counter: Option<u8>,
    /// Physical register accesses made by [`Self::load`] and [`Self::put`].
    switch_accesses: u64,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per CPU, in static memory")]
enum PmuKind {
    Emulated { pmu: EmulatedPmu, backing: Backing },
    Partitioned(PartitionedPmu),
    Untrapped,
}

/// Why the PMU asked for cannot be had on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PmuError {
    /// The partition cannot be made.
    #[error("cannot {0}")]
    Plan(#[from] PlanError),
    /// The emulated PMU cannot be made.
    #[error("cannot {0}")]
    Config(#[from] ConfigError),
}

impl GuestPmu {
    /// Builds the PMU of one CPU and programs what the monitor keeps for itself.
    ///
    /// # Errors
    ///
    /// [`PmuError`], when the machine cannot do what `settings` ask for.
    pub fn new<R: PmuRegisters>(
        settings: Settings,
        hardware: &Hardware,
        registers: &mut R,
    ) -> Result<Self, PmuError> {
        let config = hardware.partition(settings.host_counters);
        let plan = match settings.design {
            Design::Untrapped => Plan::untrapped(hardware.counters(), hardware.features)?,
            Design::Emulated | Design::Partitioned => Plan::new(&config)?,
        };
        let kind = match settings.design {
            Design::Untrapped => PmuKind::Untrapped,
            Design::Partitioned => PmuKind::Partitioned(PartitionedPmu::new(plan)),
            Design::Emulated => {
                let version = hardware.features.version;
                let pmu = EmulatedPmu::new(EmulatedConfig {
                    counters: plan.hpmn(),
                    version,
                    el3: hardware.el3,
                    identity: Identity::from_pmcr(hardware.pmcr),
                    events: hardware.events,
                    pmmir: hardware.pmmir,
                    filter: EventFilter::default(),
                })?;
                let long = if version >= PmuVersion::V3p5 {
                    pmcr::LP
                } else {
                    0
                };
                registers.write(Register::Pmcr, pmcr::E | pmcr::LC | long);
                PmuKind::Emulated {
                    pmu,
                    backing: Backing::new(version.counter_mask()),
                }
            }
        };
        let own_counter = hardware
            .counts_instructions()
            .then(|| plan.host_counters().iter().last())
            .flatten();
        if let Some(n) = own_counter {
            let only_el2 = RawPmevtyper::P | RawPmevtyper::U | RawPmevtyper::NSH;
            registers.write(Register::Pmevtyper(n), only_el2 | u64::from(INST_RETIRED));
            registers.write(Register::Pmevcntr(n), 0);
            registers.write(Register::PmcntenSet, 1 << n);
        }
        Ok(Self {
            kind,
            plan,
            hardware: *hardware,
            own_counter,
            switch_accesses: 0,
        })
    }

    /// The PMU's part of `MDCR_EL2` and the fine-grained traps. It changes with the first access of
    /// a lazy PMU, so look again after [`Self::read`], [`Self::write`], [`Self::load`] and [`Self::put`].
    pub fn trap_registers(&self) -> TrapRegisters {
        let mut traps = match &self.kind {
            PmuKind::Emulated { .. } => self.plan.trap_all(),
            PmuKind::Partitioned(pmu) => pmu.trap_registers(),
            PmuKind::Untrapped => self.plan.traps(),
        };
        if self.own_counter.is_some() {
            traps.mdcr_el2 |= MDCR_HPME;
        }
        traps
    }

    /// Whether an access can change [`Self::trap_registers`].
    pub fn is_lazy(&self) -> bool {
        matches!(self.kind, PmuKind::Partitioned(_))
    }

    /// A trapped read.
    pub fn read<R: PmuRegisters>(
        &mut self,
        register: Register,
        el: ExceptionLevel,
        registers: &mut R,
    ) -> Outcome {
        match &mut self.kind {
            PmuKind::Emulated { pmu, backing } => {
                if matches!(register, Register::PmovsSet | Register::PmovsClr) {
                    // As the host promises: what has overflowed by now is in the guest's register.
                    report_overflows(pmu, backing, registers);
                }
                pmu.read(register, el, &mut backing.host(registers))
            }
            PmuKind::Partitioned(pmu) => pmu.read(register, el, registers),
            PmuKind::Untrapped => Outcome::NotHandled,
        }
    }

    /// A trapped write.
    pub fn write<R: PmuRegisters>(
        &mut self,
        register: Register,
        el: ExceptionLevel,
        value: u64,
        registers: &mut R,
    ) -> Outcome {
        match &mut self.kind {
            PmuKind::Emulated { pmu, backing } => {
                let outcome = pmu.write(register, el, value, &mut backing.host(registers));
                // Physical too, so that a guest that forbids everything to EL0 has it forbidden
                // without an exit. Any permission is given as EN, and the engine looks again: QEMU
                // lets what ER, CR or SW permit reach the counters without asking MDCR_EL2.TPM.
                if register == Register::Pmuserenr && outcome == Outcome::Done {
                    let some = value & pmuserenr::MASK != 0;
                    registers.write(register, if some { pmuserenr::EN } else { 0 });
                }
                outcome
            }
            PmuKind::Partitioned(pmu) => pmu.write(register, el, value, registers),
            PmuKind::Untrapped => Outcome::NotHandled,
        }
    }

    /// The physical overflow interrupt has arrived.
    pub fn interrupt<R: PmuRegisters>(&mut self, registers: &mut R) -> Pmi {
        match &mut self.kind {
            PmuKind::Emulated { pmu, backing } => {
                report_overflows(pmu, backing, registers);
                Pmi::Line
            }
            PmuKind::Partitioned(pmu) => {
                let split = pmu.overflow(registers);
                // With no cause in sight the wire is still the guest's: it may have stopped its
                // counters (PMCR_EL0.E) with an overflow pending, which lowers the line on some
                // machines later than on others. Kept from the guest, it would fire for ever.
                if split.guest || split.host.is_empty() {
                    Pmi::Physical
                } else {
                    Pmi::None
                }
            }
            PmuKind::Untrapped => Pmi::Physical,
        }
    }

    /// The guest's overflow line, where it is computed and not a wire.
    pub fn line(&self) -> Option<bool> {
        match &self.kind {
            PmuKind::Emulated { pmu, .. } => Some(pmu.line()),
            PmuKind::Partitioned(_) | PmuKind::Untrapped => None,
        }
    }

    /// The vCPU begins to run on this CPU.
    pub fn load<R: PmuRegisters>(&mut self, registers: &mut R) {
        let mut counted = Counted::new(registers);
        match &mut self.kind {
            PmuKind::Emulated { pmu, backing } => pmu.load(&mut backing.host(&mut counted)),
            PmuKind::Partitioned(pmu) => pmu.load(&mut counted),
            PmuKind::Untrapped => {}
        }
        self.switch_accesses += counted.accesses;
    }

    /// The vCPU stops running on this CPU.
    pub fn put<R: PmuRegisters>(&mut self, registers: &mut R) {
        let mut counted = Counted::new(registers);
        match &mut self.kind {
            PmuKind::Emulated { pmu, backing } => pmu.put(&mut backing.host(&mut counted)),
            PmuKind::Partitioned(pmu) => pmu.put(&mut counted),
            PmuKind::Untrapped => {}
        }
        self.switch_accesses += counted.accesses;
    }

    /// Instructions the monitor has executed on this CPU, when a host counter counts them.
    pub fn own_instructions<R: PmuRegisters>(&self, registers: &mut R) -> Option<u64> {
        let n = self.own_counter?;
        Some(registers.read(Register::Pmevcntr(n)))
    }

    /// What the PMU is, as members of a JSON object.
    pub fn describe(&self) -> Description<'_> {
        Description(self)
    }

    fn is_trapped(&self, register: Register, write: bool) -> bool {
        match self.kind {
            PmuKind::Emulated { .. } => register.is_accessible(write),
            PmuKind::Partitioned(_) | PmuKind::Untrapped => {
                self.plan.is_trapped(register, write).is_some()
            }
        }
    }
}

/// Tells the engine of the physical overflows that it waits for.
fn report_overflows<R: PmuRegisters>(
    pmu: &mut EmulatedPmu,
    backing: &mut Backing,
    registers: &mut R,
) {
    for counter in backing.take_overflows(registers) {
        pmu.overflow(counter, &mut backing.host(registers));
    }
}

/// See [`GuestPmu::describe`].
pub struct Description<'a>(&'a GuestPmu);

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pmu = self.0;
        let Isolation {
            pmcnten,
            pminten,
            pmovs,
            pmcr_p,
            pmswinc,
            indexed,
            el2_prohibited,
        } = pmu.hardware.isolation;
        write!(
            f,
            r#""implemented":{},"guest_counters":{},"host_counters":{},"#,
            pmu.hardware.counters(),
            pmu.plan.hpmn(),
            pmu.plan.host_counters().len(),
        )?;
        write!(
            f,
            r#""isolation":{{"pmcnten":{pmcnten},"pminten":{pminten},"pmovs":{pmovs},"pmcr_p":{pmcr_p},"pmswinc":{pmswinc},"indexed":{indexed},"el2_prohibited":{el2_prohibited}}},"#
        )?;
        f.write_str(r#""traps":["#)?;
        let mut separator = "";
        // Of the indexed registers, the first stands for all.
        for register in Register::all()
            .filter(|r| !matches!(r, Register::Pmevcntr(1..) | Register::Pmevtyper(1..)))
        {
            for (write, direction) in [(false, 'r'), (true, 'w')] {
                if pmu.is_trapped(register, write) {
                    write!(f, r#"{separator}"{}:{direction}""#, register.name())?;
                    separator = ",";
                }
            }
        }
        write!(f, r#"],"switch_register_accesses":{}"#, pmu.switch_accesses)
    }
}

/// Counts accesses on their way to the registers.
struct Counted<'a, R> {
    registers: &'a mut R,
    accesses: u64,
}

impl<'a, R> Counted<'a, R> {
    fn new(registers: &'a mut R) -> Self {
        Self {
            registers,
            accesses: 0,
        }
    }
}

impl<R: PmuRegisters> PmuRegisters for Counted<'_, R> {
    fn read(&mut self, register: Register) -> u64 {
        self.accesses += 1;
        self.registers.read(register)
    }

    fn write(&mut self, register: Register, value: u64) {
        self.accesses += 1;
        self.registers.write(register, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeRegisters;

    const DESIGNS: [Design; 3] = [Design::Emulated, Design::Partitioned, Design::Untrapped];

    /// Six counters of PMUv3p5 with INST_RETIRED and CPU_CYCLES, as QEMU's.
    fn hardware(isolation: Isolation) -> Hardware {
        Hardware {
            features: Features {
                version: PmuVersion::V3p5,
                fgt: true,
                hpmn0: true,
                mtpmu: false,
                multithreaded: false,
            },
            isolation,
            el3: false,
            pmcr: 6 << pmcr::N_SHIFT,
            events: [1 << 0x11 | 1 << INST_RETIRED, 0],
            pmmir: 0,
        }
    }

    fn pmu(design: Design, host_counters: u8, registers: &mut FakeRegisters) -> GuestPmu {
        let settings = Settings {
            design,
            host_counters,
        };
        GuestPmu::new(settings, &hardware(Isolation::ALL), registers).unwrap()
    }

    #[test]
    fn a_guest_that_never_touches_its_pmu_costs_no_register_access_at_a_switch() {
        for design in DESIGNS {
            let registers = &mut FakeRegisters::default();
            let mut pmu = pmu(design, 0, registers);
            registers.writes.clear();
            for _ in 0..3 {
                pmu.load(registers);
                pmu.put(registers);
            }
            assert_eq!(pmu.switch_accesses, 0, "{design:?}");
            assert!(registers.writes.is_empty(), "{design:?}");
        }
    }

    #[test]
    fn the_emulated_line_follows_the_physical_overflow() {
        let registers = &mut FakeRegisters::default();
        let mut pmu = pmu(Design::Emulated, 0, registers);
        for (register, value) in [
            (Register::Pmevtyper(1), INST_RETIRED.into()),
            (Register::Pmevcntr(1), 0xffff_ff00),
            (Register::PmintenSet, 0b10),
            (Register::PmcntenSet, 0b10),
            (Register::Pmcr, pmcr::E),
        ] {
            let outcome = pmu.write(register, ExceptionLevel::El1, value, registers);
            assert_eq!(outcome, Outcome::Done);
        }
        assert_eq!(
            registers.get(Register::Pmevcntr(1)),
            0x100_u64.wrapping_neg()
        );
        assert_eq!(pmu.line(), Some(false));

        registers.count(Register::Pmevcntr(1), 0x100, u64::MAX);
        registers.set(Register::PmovsSet, 0b10);
        assert_eq!(pmu.interrupt(registers), Pmi::Line);
        assert_eq!(pmu.line(), Some(true));
        assert_eq!(registers.last_write(Register::PmovsClr), Some(0b10));

        let read = pmu.read(Register::PmovsClr, ExceptionLevel::El1, registers);
        assert_eq!(read, Outcome::Value(0b10));
        let write = pmu.write(Register::PmovsClr, ExceptionLevel::El1, 0b10, registers);
        assert_eq!(write, Outcome::Done);
        assert_eq!(pmu.line(), Some(false));
    }

    #[test]
    fn el0_gets_no_physical_permission_beyond_en() {
        let registers = &mut FakeRegisters::default();
        let mut pmu = pmu(Design::Emulated, 0, registers);
        for value in [
            0,
            pmuserenr::EN,
            pmuserenr::ER,
            pmuserenr::CR | pmuserenr::SW,
        ] {
            let _ = pmu.write(Register::Pmuserenr, ExceptionLevel::El1, value, registers);
            let physical = registers.get(Register::Pmuserenr);
            assert_eq!(physical, u64::from(value != 0), "guest wrote {value:#x}");
        }
    }

    #[test]
    fn a_partitioned_interrupt_without_a_cause_is_the_guests() {
        let registers = &mut FakeRegisters::default();
        let mut pmu = pmu(Design::Partitioned, 2, registers);
        let _ = pmu.write(Register::Pmcr, ExceptionLevel::El1, pmcr::E, registers);
        registers.set(Register::PmovsSet, 0);
        assert_eq!(pmu.interrupt(registers), Pmi::Physical);
    }

    #[test]
    fn the_monitors_own_counter_is_the_topmost_and_counts_only_el2() {
        for design in [Design::Emulated, Design::Partitioned] {
            let registers = &mut FakeRegisters::default();
            let pmu = pmu(design, 2, registers);
            assert_eq!(pmu.own_counter, Some(5));
            let kind = registers.get(Register::Pmevtyper(5));
            let filters = RawPmevtyper::P | RawPmevtyper::U | RawPmevtyper::NSH;
            assert_eq!(kind, filters | u64::from(INST_RETIRED));
            assert_eq!(
                pmu.trap_registers().mdcr_el2 & (MDCR_HPME | 0x1f),
                MDCR_HPME | 4
            );
            registers.set(Register::Pmevcntr(5), 77);
            assert_eq!(pmu.own_instructions(registers), Some(77));
        }
    }

    #[test]
    fn what_is_trapped_is_what_is_told() {
        for design in DESIGNS {
            let registers = &mut FakeRegisters::default();
            let text = pmu(design, 0, registers).describe().to_string();
            let traps_pmcr = text.contains("\"PMCR_EL0:w\"");
            assert_eq!(traps_pmcr, design == Design::Emulated, "{text}");
            assert!(
                text.contains(r#""implemented":6,"guest_counters":6"#),
                "{text}"
            );
        }
    }

    #[test]
    fn an_impossible_reservation_is_an_error_with_both_numbers() {
        let settings = Settings {
            design: Design::Partitioned,
            host_counters: 7,
        };
        let registers = &mut FakeRegisters::default();
        let error = GuestPmu::new(settings, &hardware(Isolation::ALL), registers).unwrap_err();
        let text = error.to_string();
        assert!(text.contains('7') && text.contains('6'), "{text}");
    }
}
