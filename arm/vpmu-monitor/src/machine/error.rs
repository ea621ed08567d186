//! What can be wrong with a machine, or with what it is to boot.

use core::ops::Range;

use aarch64_paging::MapError;
use vpmu_monitor::{
    boot::{device_tree::TreeError, guest_image::ImageError, words::WordError},
    world::guest_pmu::PmuError,
};

/// Why the guest cannot begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum BootError {
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    Words(#[from] WordError<'static>),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Pmu(#[from] PmuError),
    #[error("cannot map memory: {0}")]
    Map(#[from] MapError),
    #[error("the bootloader passed no device tree")]
    NoTree,
    #[error("the device tree has no CPU with affinity {0:#x}")]
    UnknownCpu(u64),
    #[error("the CPU with affinity {0:#x} has no redistributor")]
    NoRedistributor(u64),
    #[error("the monitor was not loaded into RAM")]
    NotInRam,
    #[error("RAM lies beyond {0:#x}, where this CPU's addresses end")]
    RamBeyond(u64),
    #[error("the appended guest of {0} bytes does not fit into RAM")]
    GuestTooLong(u64),
    #[error("the guest must run at {guest:#x?}, and the bootloader put something at {other:#x?}")]
    GuestsPlaceTaken {
        guest: Range<u64>,
        other: Range<u64>,
    },
    #[error("no {} MiB of RAM are free for the monitor", .0 >> 20)]
    NoHome(u64),
    #[error("no {} MiB of RAM are free for the second guest", .0 >> 20)]
    NoSecondHome(u64),
    #[error(
        "the PMU's interrupt {0} is no PPI, and only vpmu.pmu=partitioned and untrapped can do with others"
    )]
    PmiIsNoPpi(u32),
    #[error("the machine has no PL011 for the second guest, beside the one of stdout-path")]
    NoSerialPort,
    #[error("the interrupt {0} of the second guest's PL011 is none of its 32 to 287")]
    SerialInterrupt(u32),
    #[error("the device tree names no interrupt of EL2's timer, by which two guests take turns")]
    NoAlarm,
    #[error("the monitor's own stack is too small for this machine: a bug")]
    StackTooSmall,
}
