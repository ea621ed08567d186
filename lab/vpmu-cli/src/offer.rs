//! What an x86-64 guest is offered.

use clap::Args;
use vpmu_lab::spec::design::{Backing, Freeze, Lbr, Model, Pebs};

use crate::values::choice;

#[derive(Debug, Args)]
pub(crate) struct Offer {
    /// Whose PMU the guest has, and so whose processor (x86_64, emulated and exec)
    ///
    /// By default the vendor of the machine that the guest runs on; QEMU's max is AMD's.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = choice::<Model>())]
    pub(crate) model: Model,
    /// The version of Intel's architectural performance monitoring, 2 to 5, and with it Intel's model (x86_64, emulated and exec)
    ///
    /// With Intel's model, the default is 5.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=5))]
    pub(crate) perfmon: Option<u8>,
    /// Whether the guest has PEBS, and how its records are made (x86_64, emulated with Intel's model)
    ///
    /// exit: at each overflow, by an exit. ring: the host's kernel samples the guest into its ring buffer, where the guest's
    /// records need no registers. auto: as ring where the host can do that, else as exit. docs/how/pebs.md says when PEBS is
    /// worth its price.
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = choice::<Pebs>())]
    pub(crate) pebs: Pebs,
    /// Whether the guest has last branch records, and how many (x86_64, emulated)
    ///
    /// Intel's model has 32 by default, AMD's has 16. At an overflow the guest is followed until it has taken as many
    /// branches as it records. With --pebs, precise samples have them in their records, which costs a fifth. The
    /// processor is Intel's with --model intel, and else AMD's with PerfMonV2 where that is the vendor. Intel's has call
    /// stacks, too: perf record --call-graph lbr (docs/how/lbr.md).
    #[arg(long, value_name = "NUMBER", default_value = "off", value_parser = choice::<Lbr>())]
    pub(crate) lbr: Lbr,
    /// What counts for the guest (x86_64, emulated, paravirt and exec)
    ///
    /// By default the processor's counters where the machine that the guest runs on has some, as on the QEMU that
    /// script/qemu builds, and else the time of the vCPU's thread.
    #[arg(long, value_name = "WHAT", value_parser = choice::<Backing>())]
    pub(crate) backing: Option<Backing>,
    /// The time that counts for the guest where a clock does (x86_64, emulated and paravirt)
    ///
    /// vm: the guest's, and the host's while it completes the guest's exits. guest: the guest's alone; counters stand still
    /// while the host works. Hardware counters always count the guest alone.
    #[arg(long, value_name = "MODE", default_value = "vm", value_parser = choice::<Freeze>())]
    pub(crate) freeze: Freeze,
}
