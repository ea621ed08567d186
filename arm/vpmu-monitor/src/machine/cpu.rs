//! What the monitor keeps for the whole machine and for each CPU.

use alloc::{vec, vec::Vec};
use core::{mem::ManuallyDrop, ops::Range, sync::atomic::AtomicBool};

use spin::Once;
use vpmu::arm::partition::TrapRegisters;
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    boot::{device_tree::Machine, words::Settings},
    lock::{Own, Shared},
    world::{
        guest_pmu::{GuestPmu, Hardware},
        offer::{self, Sharing},
        profile::{Profile, Sample},
        redistributor::{Redistributor, View},
        second::spi::KeptSpi,
        statistics::CpuStatistics,
        vgic::{Place, VirtualInterface},
    },
};

use super::{mmu::Translation, sysreg::read_sysreg};

/// Bytes of each CPU's stack. A PMU of some KiB is made on it.
pub(crate) const STACK_SIZE: usize = 40 * 1024;
/// Bytes below each stack that are not mapped: a page. What needs more stack ends there, with a message, and not in what
/// another CPU has.
const GUARD: usize = 4096;

/// The stacks of all CPUs, each above its guard.
pub(crate) struct Stacks {
    memory: Vec<u128>,
    count: usize,
}

impl Stacks {
    /// Makes the stacks of `count` CPUs.
    pub(crate) fn new(count: usize) -> Self {
        // One guard more, of which alignment takes a part.
        let bytes = count * (GUARD + STACK_SIZE) + GUARD;
        Self {
            memory: vec![0; bytes / size_of::<u128>()],
            count,
        }
    }

    /// The guard of CPU `number`'s stack.
    fn guard(&self, number: usize) -> Range<u64> {
        let first = (self.memory.as_ptr() as u64).next_multiple_of(GUARD as u64);
        let start = first + (number * (GUARD + STACK_SIZE)) as u64;
        start..start + GUARD as u64
    }

    /// Makes the CPUs that have the stacks, each with memory for so many samples.
    pub(crate) fn into_cpus(self, samples: usize) -> Vec<Cpu> {
        let cpus = self
            .guards()
            .map(|guard| Cpu::new(guard.end + STACK_SIZE as u64, samples));
        let cpus = cpus.collect();
        // Nothing is given back to this heap.
        let _ = ManuallyDrop::new(self);
        cpus
    }

    /// All guards.
    pub(crate) fn guards(&self) -> impl Iterator<Item = Range<u64>> {
        (0..self.count).map(|number| self.guard(number))
    }
}

/// What is fixed once the machine is known.
pub(crate) struct Monitor {
    pub(crate) machine: Machine,
    pub(crate) settings: Settings,
    pub(crate) translation: Translation,
    /// The monitor's memory.
    pub(crate) memory: Range<u64>,
    /// By number, which is in `TPIDR_EL2`.
    pub(crate) cpus: Vec<Cpu>,
    /// Every redistributor, with the guest's view of it: first the CPUs', by number.
    pub(crate) redistributors: Vec<(Redistributor, View)>,
    /// Where there is a second guest: the number of the CPU that it shares with the first.
    pub(crate) shared: Option<usize>,
    /// An interrupt of the second guest's that the first has not.
    pub(crate) kept_spi: Option<KeptSpi>,
}

/// Bytes of the doorbell's page, the last of the monitor's memory.
pub(crate) const DOORBELL_PAGE: u64 = 0x1000;

impl Monitor {
    /// The page that the guest rings to mark the command being measured. The device tree says where it is.
    pub(crate) fn doorbell(&self) -> u64 {
        self.memory.end - DOORBELL_PAGE
    }

    /// Whether the machine is one guest's or two guests'.
    pub(crate) fn sharing(&self) -> Sharing {
        match self.shared {
            None => Sharing::Alone,
            Some(_) => Sharing::Two,
        }
    }

    /// Whether GICD_CTLR.EnableGrp1 stays set: the monitor counts on interrupts of its own, which end a turn or take a sample.
    pub(crate) fn keeps_group1(&self) -> bool {
        self.shared.is_some() || self.settings.profile.is_some()
    }

    /// The redistributor of CPU `number`, or that with this number, and the guest's view of it.
    pub(crate) fn redistributor(&self, number: usize) -> &(Redistributor, View) {
        &self.redistributors[number]
    }

    /// The address of the frame that has the state of an interrupt of this CPU.
    pub(crate) fn frame_of(&self, place: &Place) -> u64 {
        if place.redistributor {
            self.redistributor(Cpu::number()).0.sgi_frame()
        } else {
            self.machine.distributor.start
        }
    }

    /// The interrupt of CPU `number`'s PMU.
    pub(crate) fn pmu_intid(&self, number: usize) -> Option<u32> {
        self.machine.pmu_intids.get(number).copied().flatten()
    }

    /// The number of the redistributor that has `address`.
    pub(crate) fn redistributor_at(&self, address: u64) -> Option<usize> {
        let mut all = self.redistributors.iter();
        all.position(|(place, _)| place.frames.contains(&address))
    }
}

static MONITOR: Once<Monitor> = Once::new();

impl Monitor {
    /// Makes `monitor` the machine's. Called once, before the first guest instruction, when the MMU is on: the lock needs caches.
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
    /// What it reads when it starts.
    pub(crate) block: Shared<StartBlock>,
    pub(crate) local: Own<Local>,
    /// The interrupt of the guest's PMU is active, and the guest does not have it yet.
    pub(crate) pmi_waits: AtomicBool,
    /// Where its stack begins.
    pub(crate) stack_top: u64,
}

/// What only the CPU itself touches.
#[derive(Default)]
pub(crate) struct Local {
    /// Memory for the host's samples, until there is a profile.
    pub(crate) samples: Vec<Sample>,
    /// The host's profile of the guest on this CPU, where one is wanted.
    pub(crate) profile: Option<Profile>,
    /// What the CPU's PMU can do, once tried; none where there is no PMU.
    pub(crate) hardware: Option<Hardware>,
    pub(crate) pmu: Option<GuestPmu>,
    pub(crate) interrupts: VirtualInterface,
    /// What the trap registers hold.
    pub(crate) traps: TrapRegisters,
    /// What the CPU's ID registers say.
    pub(crate) machine: offer::Machine,
    pub(crate) sharing: Sharing,
    /// The second guest is in the CPU, and the PMU here is its.
    pub(crate) is_second: bool,
}

/// What a CPU that starts with its MMU off needs; the layout is known to `entry.s`.
#[derive(Default)]
#[repr(C)]
pub(crate) struct StartBlock {
    pub(super) stack: u64,
    pub(super) translation: Translation,
    pub(super) number: u64,
    /// Where the guest wants it to start, and with what in x0.
    pub(super) entry: u64,
    pub(super) context: u64,
}

/// Every CPU, by number.
pub(crate) fn cpus() -> &'static [Cpu] {
    // Before `Monitor::install` there is one CPU, which has no number yet.
    Monitor::installed().map_or(&[], |monitor| &monitor.cpus)
}

impl Cpu {
    fn new(stack_top: u64, samples: usize) -> Self {
        Self {
            statistics: CpuStatistics::zero(),
            on: AtomicBool::new(false),
            pmi_waits: AtomicBool::new(false),
            block: Shared::new(StartBlock::default()),
            stack_top,
            local: Own::new(Local {
                samples: Vec::with_capacity(samples),
                ..Local::default()
            }),
        }
    }

    /// Whether `address` is below the end of its stack, where nothing is.
    pub(crate) fn is_below_stack(&self, address: u64) -> bool {
        let end = self.stack_top - STACK_SIZE as u64;
        (end - GUARD as u64..end).contains(&address)
    }

    /// The number of the CPU this runs on.
    pub(crate) fn number() -> usize {
        read_sysreg!("tpidr_el2") as usize
    }

    /// The CPU this runs on.
    pub(crate) fn this() -> &'static Self {
        // TPIDR_EL2 is EL2's own, and was set from the list.
        &cpus()[Self::number()]
    }
}

impl Local {
    /// The CPU has just left the guest. Each exit begins with it.
    pub(crate) fn at_exit(&mut self) {
        if let Some(pmu) = &mut self.pmu {
            pmu.exited(&mut PhysicalPmu);
        }
    }
}
