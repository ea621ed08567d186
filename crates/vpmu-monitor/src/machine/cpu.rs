//! What the monitor keeps for the whole machine and for each CPU.

use alloc::vec::Vec;
use core::{ops::Range, sync::atomic::AtomicBool};

use spin::{Mutex, Once};
use vpmu::arm::partition::TrapRegisters;
use vpmu_monitor::{
    boot::{device_tree::Machine, words::Settings},
    world::{
        guest_pmu::GuestPmu,
        offer,
        redistributor::{self, SgiFrame},
        statistics::{CpuStatistics, Snapshot},
        vgic::VirtualInterface,
    },
};

use super::{mmu::Translation, pmu_registers::PhysicalPmu, sysreg::read_sysreg};

/// How many CPUs the monitor starts at most.
pub(crate) const MAX_CPUS: usize = 8;

/// Bytes of each CPU's stack.
pub(crate) const STACK_SIZE: usize = 16 * 1024;

/// What is fixed once the machine is known.
pub(crate) struct Monitor {
    pub(crate) machine: Machine,
    pub(crate) settings: Settings,
    pub(crate) translation: Translation,
    /// The monitor's memory.
    pub(crate) memory: Range<u64>,
    /// The guest's view of each CPU's redistributor.
    pub(crate) frames: Vec<SgiFrame>,
    /// Interrupt group 0 is the monitor's; else it is the firmware's.
    pub(crate) group0: bool,
    /// PSTATE.TCO exists.
    pub(crate) mte: bool,
}

impl Monitor {
    /// Where the SGI frame of CPU `number` lies.
    pub(crate) fn sgi_frame(&self, number: usize) -> u64 {
        sgi_frame(&self.machine, number)
    }
}

/// Where the SGI frame of CPU `number` lies.
pub(crate) fn sgi_frame(machine: &Machine, number: usize) -> u64 {
    machine.redistributors.start + number as u64 * redistributor::STRIDE + redistributor::SGI_FRAME
}

static MONITOR: Once<Monitor> = Once::new();

impl Monitor {
    /// Makes `monitor` the machine's. Called once, before the first guest instruction.
    pub(crate) fn install(monitor: Self) -> &'static Self {
        MONITOR.call_once(|| monitor)
    }

    /// The installed monitor; none before [`Self::install`].
    pub(crate) fn installed() -> Option<&'static Self> {
        MONITOR.get()
    }
}

/// One CPU.
pub(crate) struct Cpu {
    pub(crate) statistics: CpuStatistics,
    /// The guest runs on it, or is about to.
    pub(crate) on: AtomicBool,
    /// Where the guest wants it to start, and with what in x0.
    pub(crate) start: Mutex<(u64, u64)>,
    /// Used by this CPU only, so never contended.
    pub(crate) local: Mutex<Local>,
}

/// What only the CPU itself touches.
pub(crate) struct Local {
    pub(crate) pmu: Option<GuestPmu>,
    pub(crate) interrupts: VirtualInterface,
    /// What the trap registers hold.
    pub(crate) traps: TrapRegisters,
    /// What the CPU's ID registers say.
    pub(crate) machine: offer::Machine,
}

/// Every CPU, by number; the number is in `TPIDR_EL2`.
pub(crate) static CPUS: [Cpu; MAX_CPUS] = [const {
    Cpu {
        statistics: CpuStatistics::new(),
        on: AtomicBool::new(false),
        start: Mutex::new((0, 0)),
        local: Mutex::new(Local {
            pmu: None,
            interrupts: VirtualInterface::new(),
            traps: TrapRegisters {
                mdcr_el2: 0,
                hdfgrtr_el2: 0,
                hdfgwtr_el2: 0,
            },
            machine: offer::Machine::NONE,
        }),
    }
}; MAX_CPUS];

impl Cpu {
    /// The number of the CPU this runs on.
    pub(crate) fn number() -> usize {
        read_sysreg!("tpidr_el2") as usize % MAX_CPUS
    }

    /// The CPU this runs on.
    pub(crate) fn this() -> &'static Self {
        &CPUS[Self::number()]
    }

    /// The CPU this runs on, which has just left the guest. Each exit begins with it.
    pub(crate) fn at_exit() -> &'static Self {
        let cpu = Self::this();
        if let Some(pmu) = &mut cpu.local.lock().pmu {
            pmu.exited(&mut PhysicalPmu);
        }
        cpu
    }
}

/// The moments that the guest's doorbell marked.
pub(crate) struct Marks {
    pub(crate) entered: Snapshot,
    pub(crate) begin: Option<Snapshot>,
    pub(crate) end: Option<Snapshot>,
}

pub(crate) static MARKS: Mutex<Marks> = Mutex::new(Marks {
    entered: Snapshot::ZERO,
    begin: None,
    end: None,
});

/// The figures of all CPUs, now.
pub(crate) fn snapshot() -> Snapshot {
    Snapshot::take(CPUS.iter().map(|cpu| &cpu.statistics), super::sysreg::now())
}
