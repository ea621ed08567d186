//! The guest's PMU on one CPU: one of the designs, behind one face.

mod counted;
mod describe;

use vpmu::arm::{
    ExceptionLevel, Outcome, RawPmevtyper, Register,
    emulated::{BackedPmu, ConfigError, EmulatedConfig},
    partition::{
        Findings, PartitionConfig, PartitionedPmu, Plan, PlanError, PmuRegisters, Residence,
        TrapRegisters, quiet,
    },
};
use vpmu::counter::{Counter, CounterSet, CounterState};

use crate::{
    boot::words::{Design, Settings},
    regs::MdcrEl2,
};
use counted::Counted;
pub use describe::Description;

/// The event that counts the monitor's own instructions: INST_RETIRED.
const INST_RETIRED: u16 = 0x0008;

/// Counters from HPMN on are enabled.
const MDCR_HPME: u64 = MdcrEl2::HPME.bits();

/// What a CPU's PMU is and can do.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// How it could be divided, by what the ID registers say alone.
    pub partition: PartitionConfig,
    /// The emulated PMU that is the CPU's own.
    pub emulated: EmulatedConfig,
    /// What the boot probe found.
    pub findings: Findings,
}

impl Hardware {
    fn partition(&self, host_counters: u8) -> PartitionConfig {
        PartitionConfig {
            host_counters,
            isolation: self.findings.isolation,
            ..self.partition
        }
    }

    fn counts_instructions(&self) -> bool {
        self.partition.events[0] >> INST_RETIRED & 1 != 0
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
    /// Host counters sample the guest.
    samples: bool,
    /// Physical register accesses made by [`Self::load`] and [`Self::put`].
    pub switch_accesses: u64,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per CPU, in static memory")]
enum PmuKind {
    Emulated(BackedPmu),
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
    /// The host has fewer counters than events to sample by.
    #[error("cannot sample the guest: there are fewer host counters than events")]
    Profile,
    /// There is nothing to sample the guest by.
    #[error("cannot sample the guest: the CPU has no PMU")]
    NoPmu,
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
        // Only the monitor could stop what counts and interrupts beyond HPMN.
        quiet(registers);
        // The one place that knows what the boot probe found; a partition is never taken on trust.
        let config = hardware.partition(settings.host_counters);
        let plan = match settings.design {
            // No isolation is asked for: the guest has all there is, and no host counter is beside it.
            Design::Untrapped => Plan::untrapped(config.implemented, config.features)?,
            Design::Emulated | Design::Partitioned => Plan::new(&config)?,
        };
        let kind = match settings.design {
            Design::Untrapped => PmuKind::Untrapped,
            Design::Partitioned if settings.eager => {
                PmuKind::Partitioned(PartitionedPmu::eager(plan))
            }
            Design::Partitioned => PmuKind::Partitioned(PartitionedPmu::new(plan)),
            Design::Emulated => {
                let config = EmulatedConfig {
                    // As many as the partition would leave: each is backed by the counter of its own number.
                    counters: plan.hpmn(),
                    ..hardware.emulated.clone()
                };
                PmuKind::Emulated(BackedPmu::new(config, plan, registers)?)
            }
        };
        let host_counters = plan.host_counters();
        let sampled = settings.profile.map_or(0, |profile| profile.events().len());
        let own_counter = host_counters
            .iter()
            // The highest: a profile takes the lower ones.
            .last()
            .map(Counter::number)
            .filter(|_| hardware.counts_instructions() && host_counters.len() as usize > sampled);
        if let Some(n) = own_counter {
            // P and U exclude EL1 and EL0, NSH includes EL2.
            let only_el2 = RawPmevtyper::P | RawPmevtyper::U | RawPmevtyper::NSH;
            registers.write(Register::Pmevtyper(n), only_el2 | u64::from(INST_RETIRED));
            // UNKNOWN out of reset; figures are differences, but 64-bit counters are read as 32 bits without PMUv3p5.
            registers.write(Register::Pmevcntr(n), 0);
            registers.write(Register::PmcntenSet, 1 << n);
        }
        Ok(Self {
            kind,
            plan,
            hardware: hardware.clone(),
            own_counter,
            samples: settings.profile.is_some(),
            switch_accesses: 0,
        })
    }

    /// The PMU's part of `MDCR_EL2` and the fine-grained traps. It may change in
    /// [`Self::access`], [`Self::load`] and [`Self::put`]: read it again.
    pub fn trap_registers(&self) -> TrapRegisters {
        let mut traps = match &self.kind {
            PmuKind::Emulated(pmu) => pmu.trap_registers(),
            PmuKind::Partitioned(pmu) => pmu.trap_registers(),
            PmuKind::Untrapped => self.plan.traps(),
        };
        // HPME alone lets counters from HPMN on count: a machine without host counters keeps it clear.
        if self.own_counter.is_some() || self.samples {
            traps.mdcr_el2 |= MDCR_HPME;
        }
        traps
    }

    /// A trapped read, or the write of a value.
    pub fn access<R: PmuRegisters>(
        &mut self,
        register: Register,
        el: ExceptionLevel,
        written: Option<u64>,
        registers: &mut R,
    ) -> Outcome {
        match (&mut self.kind, written) {
            (PmuKind::Emulated(pmu), Some(value)) => pmu.write(register, el, value, registers),
            (PmuKind::Emulated(pmu), None) => pmu.read(register, el, registers),
            (PmuKind::Partitioned(pmu), Some(value)) => pmu.write(register, el, value, registers),
            (PmuKind::Partitioned(pmu), None) => pmu.read(register, el, registers),
            // Nothing of the PMU traps, so that an access which arrives here is another fault's.
            (PmuKind::Untrapped, _) => Outcome::NotHandled,
        }
    }

    /// The guest has been left. Comes first at each exit.
    pub fn exited<R: PmuRegisters>(&mut self, registers: &mut R) {
        // Where a type's bits have the guest's counter count at EL2, they are cleared before EL2 does more.
        if let PmuKind::Partitioned(pmu) = &mut self.kind {
            pmu.exited(registers);
        }
    }

    /// The physical overflow interrupt has arrived. Returns what is to be done about the guest's interrupt, and which of the
    /// host's counters have overflowed; their bits in PMOVSSET_EL0 are clear again.
    pub fn interrupt<R: PmuRegisters>(&mut self, registers: &mut R) -> (Pmi, CounterSet) {
        match &mut self.kind {
            PmuKind::Emulated(pmu) => {
                // The host's first: a sample is of the moment of the exit.
                let host = if self.samples {
                    overflowed(self.plan.host_counters(), registers)
                } else {
                    CounterSet::EMPTY
                };
                pmu.overflow(registers);
                (Pmi::Line, host)
            }
            PmuKind::Partitioned(pmu) => {
                let split = pmu.overflow(registers);
                // With no cause in sight the wire is still the guest's: it may have stopped its
                // counters (PMCR_EL0.E) with an overflow pending, which lowers the line on some
                // machines later than on others. Kept from the guest, it would fire for ever.
                let pmi = if split.guest || split.host.is_empty() {
                    Pmi::Physical
                } else {
                    Pmi::None
                };
                (pmi, split.host)
            }
            PmuKind::Untrapped => (Pmi::Physical, CounterSet::EMPTY),
        }
    }

    /// The counters of the host that may sample the guest: all but the one that counts the monitor's instructions.
    pub fn free_host_counters(&self) -> CounterSet {
        let own = self.own_counter.map_or(0, |n| 1 << n);
        CounterSet::from_bits(self.plan.host_counters().bits() & !own)
    }

    /// The counters that the host would have beside [`Self::free_host_counters`] if it kept so many more. `None`: it cannot.
    pub fn borrowed_counters(&self, more: u8) -> Option<CounterSet> {
        let now = self.plan.host_counters();
        let most = self.hardware.partition(now.len() as u8 + more);
        Some(Plan::new(&most).ok()?.host_counters() - now)
    }

    /// How many counters the host keeps.
    pub fn kept(&self) -> u8 {
        self.plan.host_counters().len() as u8
    }

    /// Has the host keep `host_counters` from now on, more or fewer than before. A counter that the guest has counting and
    /// that the host takes stands still until it is given back. Returns how many those are. `None`: there are not so many, or
    /// the design divides nothing; nothing has changed then.
    pub fn keep<R: PmuRegisters>(&mut self, host_counters: u8, registers: &mut R) -> Option<u64> {
        // The registers are written back under the old plan and loaded under the new one: no counter is in the hardware while
        // its owner changes.
        self.put(registers);
        let taken = self.replan(host_counters);
        self.load(None, registers);
        Some(self.lost(taken?, registers))
    }

    /// Does what [`Self::keep`] does while the guest's registers are not in the CPU. Returns the counters that the host takes,
    /// for [`Self::lost`] after the load.
    #[cold]
    pub fn replan(&mut self, host_counters: u8) -> Option<CounterSet> {
        let plan = Plan::new(&self.hardware.partition(host_counters)).ok()?;
        // `migrate` changes nothing where it fails, and the plan stays.
        match &mut self.kind {
            PmuKind::Emulated(pmu) => pmu.migrate(plan).ok()?,
            PmuKind::Partitioned(pmu) => pmu.migrate(plan).ok()?,
            PmuKind::Untrapped => return None,
        }
        let before = core::mem::replace(&mut self.plan, plan);
        Some(plan.host_counters() - before.host_counters())
    }

    /// How many of the counters that [`Self::replan`] has `taken` the guest has counting.
    #[cold]
    pub fn lost<R: PmuRegisters>(&self, taken: CounterSet, registers: &mut R) -> u64 {
        let is_lost = |n: &Counter| {
            let state = match &self.kind {
                PmuKind::Emulated(pmu) => pmu.counter_state(*n),
                PmuKind::Partitioned(pmu) => pmu.counter_state(*n, registers),
                PmuKind::Untrapped => None,
            };
            // A counter that the guest had stopped has lost nothing.
            matches!(state, Some(CounterState::Lost(_)))
        };
        taken.into_iter().filter(is_lost).count() as u64
    }

    /// The guest's overflow line, where it is computed and not a wire.
    pub fn line(&self) -> Option<bool> {
        match &self.kind {
            PmuKind::Emulated(pmu) => Some(pmu.line()),
            PmuKind::Partitioned(_) | PmuKind::Untrapped => None,
        }
    }

    /// The vCPU begins to run on this CPU, which `left` has been put from since any other PMU was here.
    pub fn load<R: PmuRegisters>(&mut self, left: Option<&Self>, registers: &mut R) {
        let mut counted = Counted::new(registers);
        match (&mut self.kind, left.map(|left| &left.kind)) {
            (PmuKind::Emulated(pmu), _) => pmu.load(&mut counted),
            (PmuKind::Partitioned(pmu), Some(PmuKind::Partitioned(left))) => {
                // Where both guests use their PMU, the registers that both have need one write each, and no clearing between.
                pmu.load_after(left, &mut counted);
            }
            (PmuKind::Partitioned(pmu), _) => pmu.load(&mut counted),
            (PmuKind::Untrapped, _) => {}
        }
        self.switch_accesses += counted.accesses;
    }

    /// The vCPU stops running on this CPU.
    pub fn put<R: PmuRegisters>(&mut self, registers: &mut R) {
        let mut counted = Counted::new(registers);
        match &mut self.kind {
            PmuKind::Emulated(pmu) => pmu.put(&mut counted),
            PmuKind::Partitioned(pmu) => pmu.put(&mut counted),
            PmuKind::Untrapped => {}
        }
        self.switch_accesses += counted.accesses;
    }

    /// Where the guest's registers are. `None`: the design keeps none of them in the hardware.
    pub const fn residence(&self) -> Option<Residence> {
        match &self.kind {
            PmuKind::Partitioned(pmu) => Some(pmu.residence()),
            PmuKind::Emulated(_) | PmuKind::Untrapped => None,
        }
    }

    /// Whether a guest that waits for an interrupt must be woken after [`Self::put`].
    pub fn wakes<R: PmuRegisters>(&self, registers: &mut R) -> bool {
        match &self.kind {
            PmuKind::Emulated(pmu) => pmu.line(),
            PmuKind::Partitioned(pmu) => pmu.line(registers),
            PmuKind::Untrapped => false,
        }
    }

    /// Instructions the monitor has executed on this CPU, when a host counter counts them.
    pub fn own_instructions<R: PmuRegisters>(&self, registers: &mut R) -> Option<u64> {
        let n = self.own_counter?;
        // It counts on at EL2: what is read includes the exit that reads it.
        Some(registers.read(Register::Pmevcntr(n)))
    }

    /// What the PMU is, as members of a JSON object.
    pub fn describe(&self) -> Description<'_> {
        Description(self)
    }

    fn filtered_at_exit(&self) -> CounterSet {
        match self.kind {
            PmuKind::Partitioned(_) => self.plan.filtered_at_exit(),
            PmuKind::Emulated(_) | PmuKind::Untrapped => CounterSet::EMPTY,
        }
    }

    fn is_trapped(&self, register: Register, write: bool) -> bool {
        match &self.kind {
            PmuKind::Emulated(pmu) => pmu.is_trapped(register, write),
            PmuKind::Partitioned(_) | PmuKind::Untrapped => {
                self.plan.is_trapped(register, write).is_some()
            }
        }
    }
}

/// Those of `counters` that have overflowed with their interrupt enabled. Clears their bits in PMOVSSET_EL0.
fn overflowed<R: PmuRegisters>(counters: CounterSet, registers: &mut R) -> CounterSet {
    let bits = registers.read(Register::PmovsSet) & registers.read(Register::PmintenSet);
    let overflowed = CounterSet::from_bits(bits as u32 & counters.bits());
    if !overflowed.is_empty() {
        // Only those that were seen: another may overflow between the read and this write, and interrupts again.
        registers.write(Register::PmovsClr, u64::from(overflowed.bits()));
    }
    overflowed
}

#[cfg(test)]
mod tests;
