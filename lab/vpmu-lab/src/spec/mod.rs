//! The work to run, and the machine to run it on.
//!
//! A [`Request`] is the wish of a user or a bench. [`Request::check`] turns it into a [`Spec`],
//! which decides every fact that follows from others: how each design's guest runs ([`Way`]).

/// Defines choices of the command line, each with a name in lower case, words joined by `-`.
macro_rules! choices {
    ($($(#[$attribute:meta])* pub enum $choice:ident { $($variants:tt)* })*) => {$(
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[derive(strum::EnumString, strum::IntoStaticStr, strum::VariantNames)]
        #[strum(serialize_all = "kebab-case")]
        $(#[$attribute])*
        pub enum $choice { $($variants)* }

        impl $choice {
            /// Returns the name on the command line, also of the VMM and in files.
            pub fn name(self) -> &'static str {
                self.into()
            }
        }
    )*};
}

pub mod arch;
pub mod command;
pub mod design;
pub mod disk;
pub mod profile;
mod request;

use std::path::PathBuf;

pub use request::Request;
use vpmu_measure::Disturb;

use crate::Result;
use crate::host::qemu::{Qemu, Version};
use arch::Arch;
use command::Command;
use design::{Design, Pmu};

/// The machine that a guest runs on; for a nested guest, the guest itself.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// The processors' architecture.
    pub arch: Arch,
    /// The number of processors.
    pub vcpus: u32,
    /// Memory, MiB.
    pub memory: u32,
    /// QEMU's name of the processor's model, with options behind commas;
    /// `None` for the model with everything QEMU has.
    pub cpu: Option<String>,
    /// Real time instead of counted instructions.
    pub realtime: bool,
    /// The QEMU that emulates the machine.
    pub qemu: Qemu,
    /// More options for QEMU.
    pub qemu_args: Vec<String>,
}

impl Machine {
    /// Tells whether the lab gives the x86 machine AMD's PMU: where QEMU has one, unless the user has named a processor,
    /// whose PMU is then its own. In real time QEMU counts no instructions.
    pub fn has_pmu(&self) -> bool {
        let may = self.arch == Arch::X86_64 && self.cpu.is_none() && !self.realtime;
        may && self.qemu.has_x86_pmu()
    }
}

/// A checked request.
#[derive(Debug, Clone)]
pub struct Spec {
    /// The request.
    pub request: Request,
    /// One guest for each design, in the order asked for.
    pub guests: Vec<Guest>,
}

/// A guest under one design.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// The design.
    pub design: Design,
    /// The way to run the guest.
    pub way: Way,
}

/// The ways to run a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Runs directly on the machine that QEMU emulates.
    Native,
    /// Runs on this project's monitor, on that machine.
    Monitor,
    /// Runs in a stock KVM host on that machine, under this VMM.
    Nested(Vmm),
    /// Runs in this machine's own KVM, under this project's VMM.
    Direct,
}

/// A guest beside the one that is measured, on the same processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecondRequest {
    /// What it runs.
    pub payload: SecondPayload,
    /// The command in the lab's Linux; `None`: the first guest's.
    pub command: Option<Command>,
    /// Its command line; words beside the lab's own for the lab's Linux.
    pub append: String,
    /// Its memory, MiB; `None`: as much as its payload wants.
    pub memory: Option<u32>,
    /// Microseconds of a turn; `None`: the monitor's default.
    pub slice: Option<u32>,
    /// Whether the PMU's registers change hands at each switch, needed or not.
    pub eager: bool,
}

/// The payload of a second guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecondPayload {
    /// A program of the user's.
    Image {
        /// Its file: an arm64 `Image` or a raw binary.
        image: PathBuf,
        /// Its initrd, if it wants one.
        initrd: Option<PathBuf>,
    },
    /// The lab's Linux, which runs a command.
    Linux,
}

/// Memory of a second guest that is the lab's Linux, MiB.
const SECOND_LINUX_MEMORY: u32 = 384;

impl SecondRequest {
    /// Returns the guest's memory, MiB; `None`: the monitor's default.
    pub fn memory(&self) -> Option<u32> {
        let is_linux = self.payload == SecondPayload::Linux;
        self.memory.or(is_linux.then_some(SECOND_LINUX_MEMORY))
    }
}

/// A VMM on stock KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// QEMU, from the host's packages.
    Stock,
    /// The same, in a host whose KVM hands the processor's PMU over to the guest.
    Mediated,
    /// The same under `vpmu exec`.
    Exec,
    /// A QEMU that embeds the PMU.
    Patched,
    /// This project's VMM.
    Ours,
    /// The user's.
    Theirs {
        /// Whether `vpmu exec` gives its guests the PMU.
        under_exec: bool,
    },
}

impl Spec {
    /// Asks the QEMU of the spec's guests for its version; `None` where this machine's own KVM runs them all.
    pub(crate) fn qemu(&self) -> Result<Option<Version>> {
        let mut guests = self.guests.iter();
        let emulated = guests.any(|guest| !guest.is_direct());
        let machine = &self.request.machine;
        emulated
            .then(|| machine.qemu.version(&machine.arch.qemu()))
            .transpose()
    }

    /// Tells whether Debian packages are needed.
    pub fn needs_images(&self) -> bool {
        let runs_linux = |second: &SecondRequest| second.payload == SecondPayload::Linux;
        self.request.command.is_some()
            || self.request.disk.is_some()
            || self.request.second.as_ref().is_some_and(runs_linux)
            || (self.guests.iter()).any(|guest| matches!(guest.way, Way::Nested(_)))
    }

    /// Tells whether a guest has a Linux module of this project. All guests then have the kernel
    /// for which these modules are built.
    pub(crate) fn needs_modules(&self) -> bool {
        (self.guests.iter()).any(|guest| guest.design.pmu == Pmu::Paravirt)
    }

    /// Tells whether a guest has a host with the newest kernel.
    pub(crate) fn needs_newest_kernel(&self) -> bool {
        (self.guests.iter()).any(|guest| guest.way == Way::Nested(Vmm::Mediated))
    }
}

impl Guest {
    /// Tells whether this machine's own KVM runs the guest. Other work of this
    /// machine is then in the machine's statistics, too.
    pub fn is_direct(&self) -> bool {
        self.way == Way::Direct
    }

    /// Tells whether the guest's time on `machine` is counted instructions: repeated runs give the same figures. Else it is
    /// real time.
    pub fn is_counted(&self, machine: &Machine) -> bool {
        !machine.realtime && !self.is_direct()
    }

    /// Tells whether a KVM host's statistics give its share of time fairly.
    ///
    /// A host ticks as often as its guest. The host would see the same moment of the guest's tick
    /// each time, so its clock is made a little fast. The exception is stock QEMU for x86 with
    /// counted instructions, on a `machine` without a PMU. There the guest samples by timers, and a host's tick that
    /// comes while the guest's kernel handles a timer makes QEMU 10.0 deliver that interrupt twice.
    pub(crate) fn has_fair_shares(&self, machine: &Machine) -> bool {
        // Nobody knows whether the guest of a user's VMM has a PMU.
        let may_have_none = match self.design.pmu {
            Pmu::Kvm | Pmu::Mediated => !machine.has_pmu(),
            Pmu::Vmm => true,
            _ => false,
        };
        !(machine.arch == Arch::X86_64 && self.is_counted(machine) && may_have_none)
    }
}

/// Returns what happens to a guest while it measures, if this option of the patched QEMU's says so. QEMU does not see it.
pub(crate) fn disturbance(option: &str) -> Option<Disturb> {
    let (kind, times) = option.strip_prefix("--disturb=")?.split_once(':')?;
    let times = times.parse().ok()?;
    match kind {
        "migrate" => Some(Disturb::Migrate(times)),
        "loadvm" => Some(Disturb::Loadvm(times)),
        "reset" => Some(Disturb::Reset(times)),
        _ => None,
    }
}
