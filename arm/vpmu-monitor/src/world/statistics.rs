//! What the monitor cost: exits by kind, the time each took, and the machine's own share.
//!
//! A trap path neither prints nor locks, so each CPU has plain counters that only it advances; any
//! CPU may read them. Two moments, begin and end, are marked by the guest's doorbell, so that the
//! figures can be those of one command and not of the whole boot.

use core::{
    fmt,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use vpmu::arm::Register;

use super::second::statistics::{self as second, Figure};

/// Defines the kinds, with the names of those that there is one of.
macro_rules! kinds {
    ($($(#[$about:meta])* $kind:ident = $name:literal,)*) => {
        /// Why the guest was interrupted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$about])* $kind,)*
            /// A trapped PMU register, read or written.
            Pmu(Register, bool),
        }

        const FIXED: &[(Kind, &str)] = &[$((Kind::$kind, $name)),*];

        impl Kind {
            fn index(self) -> usize {
                // On every exit's path, so no search through `FIXED`.
                enum Place { $($kind),* }
                match self {
                    $(Self::$kind => Place::$kind as usize,)*
                    Self::Pmu(register, write) => {
                        FIXED.len() + 2 * register.ordinal() + usize::from(write)
                    }
                }
            }
        }
    };
}

kinds! {
    /// The PMU's overflow interrupt.
    IrqPmu = "irq:pmu",
    /// A timer interrupt.
    IrqTimer = "irq:timer",
    /// A software-generated interrupt.
    IrqSgi = "irq:sgi",
    /// The GIC's maintenance interrupt.
    IrqMaintenance = "irq:maintenance",
    /// Any other interrupt.
    IrqOther = "irq:other",
    /// The guest sends an SGI.
    SendSgi = "sysreg:ICC_SGI1R_EL1:w",
    /// An ID register.
    IdRegister = "sysreg:ID:r",
    /// A system register that does not exist for the guest.
    UnknownRegister = "sysreg:unknown",
    /// A hypervisor call.
    Hvc = "hvc",
    /// A firmware call.
    Smc = "smc",
    /// An access to a redistributor's SGI frame.
    Redistributor = "data_abort:redistributor",
    /// The doorbell.
    Doorbell = "data_abort:doorbell",
    /// A host counter's overflow interrupt; the guest's PMU may have overflowed, too.
    IrqHostPmu = "irq:host-pmu",
    /// An access to nothing, which became an external abort.
    ExternalAbort = "abort:external",
    /// One of two guests waits for an interrupt.
    Wfi = "wfi",
    /// The end of a slice of one of two guests, or the other one's timer.
    IrqSlice = "irq:slice",
    /// Cache maintenance by set and way.
    SetWay = "cache:set_way",
    /// Anything else.
    Other = "other",
}

/// How many kinds there are.
pub const KINDS: usize = FIXED.len() + 2 * Register::COUNT;

/// The figures of a CPU: how many exits of each kind, the ticks that each kind took, three more, and those of switches.
const FIGURES: usize = SWITCHES + Figure::COUNT;
const TICKS: usize = KINDS;
const PMIS: usize = 2 * KINDS;
const INSTRUCTIONS: usize = PMIS + 1;
const LOST: usize = INSTRUCTIONS + 1;
const SWITCHES: usize = LOST + 1;

/// The running figures of one CPU.
#[derive(Debug)]
pub struct CpuStatistics([AtomicU64; FIGURES]);

/// One writer, so a plain load and store; readers elsewhere see a whole value.
fn advance(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

impl CpuStatistics {
    /// All zero.
    pub const fn zero() -> Self {
        Self([const { AtomicU64::new(0) }; FIGURES])
    }

    /// Counts one exit that kept the CPU at EL2 for `ticks` of the system counter.
    pub fn exit(&self, kind: Kind, ticks: u64) {
        let n = kind.index();
        advance(&self.0[n], 1);
        advance(&self.0[TICKS + n], ticks);
    }

    /// Counts one overflow interrupt offered to the guest.
    pub fn pmi(&self) {
        advance(&self.0[PMIS], 1);
    }

    /// Counts counters that the guest had counting, and that the host has taken.
    pub fn lost(&self, counters: u64) {
        advance(&self.0[LOST], counters);
    }

    /// Adds to a figure of switches between two guests.
    pub fn switched(&self, figure: Figure, by: u64) {
        advance(&self.0[SWITCHES + figure.index()], by);
    }

    /// Notes how many instructions this CPU has executed at EL2, as a host counter says.
    pub fn instructions(&self, total: u64) {
        self.0[INSTRUCTIONS].store(total, Relaxed);
    }
}

/// The figures of all CPUs at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// System counter.
    pub now: u64,
    figures: [u64; FIGURES],
}

impl Snapshot {
    /// Nothing counted yet.
    pub const ZERO: Self = Self {
        now: 0,
        figures: [0; FIGURES],
    };

    /// Adds up `cpus` at system-counter time `now`.
    pub fn take<'a>(cpus: impl Iterator<Item = &'a CpuStatistics>, now: u64) -> Self {
        let mut sum = Self { now, ..Self::ZERO };
        for cpu in cpus {
            // Each CPU goes on counting meanwhile: two kinds are not of one moment, each is whole.
            for (to, from) in sum.figures.iter_mut().zip(&cpu.0) {
                *to = to.wrapping_add(from.load(Relaxed));
            }
        }
        sum
    }

    /// How often a counter that the guest had counting was taken from it.
    pub const fn lost(&self) -> u64 {
        self.figures[LOST]
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = self.clone();
        difference.now = self.now.wrapping_sub(earlier.now);
        for (figure, earlier) in difference.figures.iter_mut().zip(earlier.figures) {
            *figure = figure.wrapping_sub(earlier);
        }
        difference
    }
}

/// A [`Snapshot`]'s difference as a JSON object.
pub struct Json<'a> {
    /// The figures; `now` is a duration.
    pub figures: &'a Snapshot,
    /// Ticks of the system counter in a second.
    pub frequency: u64,
    /// Whether a host counter counted the monitor's instructions.
    pub counts_instructions: bool,
    /// Whether PMIs pass through the monitor.
    pub sees_pmis: bool,
}

impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Snapshot { now, figures } = self.figures;
        let (count, ticks) = (&figures[..KINDS], &figures[TICKS..PMIS]);
        // Wrapping, as all sums here: a panic at EL2 would take the guest with it.
        let el2_ticks: u64 = ticks.iter().fold(0, |sum, &t| sum.wrapping_add(t));
        write!(
            f,
            r#"{{"ticks":{now},"el2_ticks":{el2_ticks},"frequency":{},"el2_instructions":{},"pmis":{},"exits":{{"#,
            self.frequency,
            OrNull(self.counts_instructions.then_some(figures[INSTRUCTIONS])),
            OrNull(self.sees_pmis.then_some(figures[PMIS])),
        )?;
        by_kind(f, count, count)?;
        f.write_str(r#"},"exit_ticks":{"#)?;
        by_kind(f, count, ticks)?;
        f.write_str("}")?;
        if let Some(switches) = figures.last_chunk()
            && *switches != [0; Figure::COUNT]
        {
            let switches = second::Json {
                figures: switches,
                counts_instructions: self.counts_instructions,
            };
            write!(f, r#","switches":{switches}"#)?;
        }
        f.write_str("}")
    }
}

/// A number, or an object, as JSON. `None` is null, and not 0: nobody has counted.
pub struct OrNull<T>(pub Option<T>);

impl<T: fmt::Display> fmt::Display for OrNull<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("null"),
        }
    }
}

/// `"kind":value` for every kind that occurred, of which `counts` says how often.
fn by_kind(f: &mut fmt::Formatter<'_>, counts: &[u64], values: &[u64]) -> fmt::Result {
    let mut registers = [""; Register::COUNT];
    for register in Register::all() {
        registers[register.ordinal()] = register.name();
    }
    let mut separator = "";
    for (n, (&value, &count)) in values.iter().zip(counts).enumerate() {
        // By the count and not by the value: an exit of less than a tick is one.
        if count == 0 {
            continue;
        }
        write!(f, "{separator}\"")?;
        separator = ",";
        match FIXED.get(n) {
            Some((_, name)) => f.write_str(name)?,
            None => {
                let pmu = n - FIXED.len();
                let direction = if pmu % 2 == 1 { 'w' } else { 'r' };
                write!(f, "sysreg:{}:{direction}", registers[pmu / 2])?;
            }
        }
        write!(f, "\":{value}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_between_two_moments() {
        let cpus = [CpuStatistics::zero(), CpuStatistics::zero()];
        cpus[0].exit(Kind::IrqTimer, 50);
        let begin = Snapshot::take(cpus.iter(), 1_000);
        cpus[0].exit(Kind::IrqPmu, 100);
        cpus[1].exit(Kind::Pmu(Register::Pmcr, true), 20);
        cpus[1].exit(Kind::Pmu(Register::Pmevtyper(3), false), 30);
        cpus[1].pmi();
        cpus[1].instructions(77);
        let end = Snapshot::take(cpus.iter(), 3_000);
        let json = Json {
            figures: &end.since(&begin),
            frequency: 1_000,
            counts_instructions: true,
            sees_pmis: true,
        };
        assert_eq!(
            json.to_string(),
            concat!(
                r#"{"ticks":2000,"el2_ticks":150,"frequency":1000,"el2_instructions":77,"pmis":1,"#,
                r#""exits":{"irq:pmu":1,"sysreg:PMCR_EL0:w":1,"sysreg:PMEVTYPERn_EL0:r":1},"#,
                r#""exit_ticks":{"irq:pmu":100,"sysreg:PMCR_EL0:w":20,"sysreg:PMEVTYPERn_EL0:r":30}}"#,
            )
        );
    }

    #[test]
    fn switches_are_those_between_two_moments() {
        let cpu = CpuStatistics::zero();
        cpu.switched(Figure::Count, 5);
        let begin = Snapshot::take([&cpu].into_iter(), 0);
        cpu.switched(Figure::Count, 2);
        cpu.switched(Figure::SecondTraps, 3);
        let end = Snapshot::take([&cpu].into_iter(), 0);
        let json = |figures: &Snapshot| {
            let json = Json {
                figures,
                frequency: 1,
                counts_instructions: false,
                sees_pmis: false,
            };
            json.to_string()
        };
        let switches = r#","switches":{"count":2,"pmu_registers":0,"pmu_instructions":null,"second_pmu_traps":3,"#;
        assert!(json(&end.since(&begin)).contains(switches));
        assert!(!json(&end.since(&end)).contains("switches"));
    }

    #[test]
    fn every_kind_has_its_own_place() {
        let mut seen = [false; KINDS];
        let registers = Register::all().flat_map(|r| [Kind::Pmu(r, false), Kind::Pmu(r, true)]);
        for kind in FIXED.iter().map(|&(kind, _)| kind).chain(registers) {
            seen[kind.index()] = true;
        }
        assert!(seen.iter().all(|&s| s));
        for (n, (kind, _)) in FIXED.iter().enumerate() {
            assert_eq!(kind.index(), n);
        }
    }
}
