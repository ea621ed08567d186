//! A small VMM with a virtual PMU.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vpmu_kvm::{Options, Perfmon, Skid, Vendor, amd};
use vpmu_vmm::{Config, Ending, Error, PmuOptions, Rdpmc, Restore};

const AFTER: &str = "\
Exit status: 0 when the guest powered off or reset itself, 1 when it could not be run, 2 for a wrong \
command line, 3 after a triple fault of the guest, 4 when it was saved, 130 after Ctrl-C.

The guest's serial line is standard input and output. A guest writes a byte to port 0x5650: 1 begins a measurement and \
2 ends it (with --measure), 3 has the machine saved, as SIGUSR2 does (with --save). At the end one line says what the \
PMU cost: the byte 0x1e, then JSON.";

/// Boots a stock Linux on KVM, with a virtual PMU made of the host's perf events.
///
/// For hosts whose KVM offers none. With --rdpmc load, user space in the guest cannot use RDPMC (write 0 to
/// /sys/bus/event_source/devices/cpu/rdpmc there).
#[derive(Debug, Parser)]
#[command(name = "vpmu-vmm", version, after_help = AFTER, max_term_width = 100)]
struct Cli {
    /// The kernel: a bzImage (gzip, xz, zstd or lz4) or an ELF file
    #[arg(long, value_name = "FILE", required_unless_present = "restore")]
    kernel: Option<PathBuf>,
    /// Its initramfs; several are put one after another, as boot loaders do
    #[arg(long, value_name = "FILE")]
    initrd: Vec<PathBuf>,
    /// The kernel's command line
    #[arg(
        long,
        value_name = "STRING",
        default_value = "console=ttyS0",
        allow_hyphen_values = true
    )]
    append: String,
    /// Virtual processors, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=i64::from(vpmu_vmm::MOST_VCPUS)))]
    vcpus: u8,
    /// Memory, for example 512M or 2G; 64M to 3G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    memory: u64,
    /// Whose PMU the guest is offered, and so whose processor it has
    #[arg(long, value_enum, default_value_t = Model::Auto)]
    model: Model,
    /// The version of Intel's architectural performance monitoring, 2 to 5, and with it Intel's model unless another is
    /// given
    /// [default: 5]
    #[arg(long, value_name = "N", value_parser = perfmon, conflicts_with_all = ["no_pmu", "paravirt"])]
    perfmon: Option<Perfmon>,
    /// Whether the guest has PEBS, Intel's precise samples, and how they are collected
    #[arg(long, value_enum, default_value_t = Pebs::Off, conflicts_with_all = ["no_pmu", "paravirt"])]
    pebs: Pebs,
    /// Let PEBS records be some instructions late, as those of hardware counters are. The guest does not learn of it. Without this, a
    /// host with hardware counters offers no PEBS
    #[arg(long)]
    pebs_skid: bool,
    /// Whether the guest has last branch records (perf record -b), with --pebs also in its precise samples. With them,
    /// --model auto is amd-v2 on AMD's processors
    #[arg(long, value_enum, default_value_t = Lbr::Off, conflicts_with_all = ["no_pmu", "paravirt"])]
    lbr: Lbr,
    /// How the guest is followed for last branch records
    #[arg(long, value_enum, default_value_t = Follow::Ahead, requires = "lbr")]
    follow: Follow,
    /// How the guest's RDPMC comes to the VMM
    #[arg(long, value_enum, default_value_t = Rdpmc::Run, conflicts_with_all = ["no_pmu", "paravirt"])]
    rdpmc: Rdpmc,
    /// When host events are made and given back
    /// [default: paused, or what a saved machine had]
    #[arg(long, value_enum)]
    policy: Option<Policy>,
    /// Where the machine is saved when the guest or SIGUSR2 asks for it; vpmu-vmm then ends
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Goes on with a saved machine. It has kept what it was; --policy, --pebs-skid, --save, --measure and
    /// --statistics are this one's
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "kernel", "initrd", "append", "vcpus", "memory", "no_pmu", "lazy_deadline",
            "approximate_instructions", "backing", "follow", "freeze", "lbr", "model", "paravirt", "pebs", "perfmon", "rdpmc",
        ]
    )]
    restore: Option<PathBuf>,
    /// No PMU
    #[arg(long)]
    no_pmu: bool,
    /// Offer the guest a paravirtual PMU in place of an architectural one; the guest needs the driver
    /// guest/vpmu_pmu
    #[arg(long, conflicts_with = "no_pmu")]
    paravirt: bool,
    /// Have the paravirtual PMU of the restored guest leave it, as on a host that has none
    #[arg(long, requires = "restore")]
    drop_paravirt: bool,
    /// Offer the guest a TSC deadline that moves later without an exit (guest/lazy_deadline)
    #[arg(long)]
    lazy_deadline: bool,
    /// Offer instructions and branches even where only time can be counted: one per cycle
    #[arg(long, conflicts_with = "no_pmu")]
    approximate_instructions: bool,
    /// What counts for the guest
    #[arg(long, value_enum, default_value_t = Backing::Auto, conflicts_with = "no_pmu")]
    backing: Backing,
    /// Which time counts for the guest where a clock does; hardware counters count the guest's alone
    #[arg(long, value_enum, default_value_t = Freeze::Vm, conflicts_with = "no_pmu")]
    freeze: Freeze,
    /// Let the guest measure: 1 to port 0x5650 begins, 2 ends
    #[arg(long)]
    measure: bool,
    /// With --rdpmc load, unpack the kernel at each boot; without this, unpacked and rewritten kernels are kept in
    /// ~/.cache/vpmu/kernels (at most 8, or 512 MiB) and taken from there
    #[arg(long, conflicts_with = "restore")]
    no_kernel_cache: bool,
    /// Where the statistics go
    #[arg(long, value_name = "FILE", default_value = "-")]
    statistics: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    /// AMD's on AMD's processors, else Intel's
    Auto,
    /// Intel's, whatever the processor
    Intel,
    /// AMD's core extension: six counters
    Amd,
    /// AMD's PerfMonV2: the same with global registers
    AmdV2,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backing {
    /// The processor's counters where perf has them, else the time of the vCPU's thread
    Auto,
    /// The processor's counters, and nothing else
    Hardware,
    /// The time of the vCPU's thread: gives way to VMs that KVM gives the PMU to (mediated vPMU)
    Clock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Freeze {
    /// The guest's, and the host's while it completes the guest's exits
    Vm,
    /// The guest's alone: counters stand still while the host works
    Guest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Pebs {
    /// It has none
    Off,
    /// Each overflow is an exit, in which its record is written into the guest's memory
    Exit,
    /// The host's kernel samples the guest into the kernel's ring buffer, without an exit, where the guest's records need
    /// no registers; elsewhere as exit
    #[value(name = "ring")]
    Buffer,
    /// As ring where the host's perf can do that, else as exit
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lbr {
    /// It has none
    Off,
    /// At an overflow, the guest is followed until it has taken as many branches as it records, and then gets its PMI:
    /// 32 with Intel's model, 16 with AMD's
    On,
    /// 8, with Intel's model
    #[value(name = "8")]
    Eight,
    /// 16
    #[value(name = "16")]
    Sixteen,
    /// 32, with Intel's model
    #[value(name = "32")]
    ThirtyTwo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Follow {
    /// By breakpoints as far ahead as its way is known
    Ahead,
    /// Instruction by instruction, for comparison
    Steps,
}

impl Cli {
    /// Returns the model that the options ask for together.
    fn model(&self) -> Result<vpmu_kvm::Model, Error> {
        let pebs = self.pebs != Pebs::Off;
        let is_amd = match self.model {
            // A version is Intel's.
            Model::Auto => self.perfmon.is_none() && Vendor::of_host() == Vendor::Amd,
            Model::Intel => false,
            Model::Amd | Model::AmdV2 => true,
        };
        let refused = |text: &str| Err(Error::Config(text.to_owned()));
        match self.model {
            _ if self.paravirt => Ok(vpmu_kvm::Model::Paravirtual),
            _ if is_amd && pebs => {
                refused("PEBS is Intel's: leave --pebs out, or choose --model intel")
            }
            _ if is_amd && self.perfmon.is_some() => refused(
                "AMD's PMU has no version of architectural performance monitoring: leave --perfmon out, or \
                 choose --model intel",
            ),
            Model::Amd => Ok(vpmu_kvm::Model::Amd(amd::Interface::Core)),
            Model::AmdV2 => Ok(vpmu_kvm::Model::Amd(amd::Interface::V2)),
            Model::Auto if is_amd => Ok(vpmu_kvm::Model::Auto),
            Model::Auto | Model::Intel => Ok(vpmu_kvm::Model::Intel {
                version: self.perfmon.unwrap_or(Perfmon::V5),
                pebs,
            }),
        }
    }

    fn skid(&self) -> Skid {
        match self.pebs_skid {
            true => Skid::Accepted,
            false => Skid::Refused,
        }
    }

    fn pmu(&self, policy: vpmu::counter::Policy) -> Result<Option<PmuOptions>, Error> {
        if self.no_pmu {
            return Ok(None);
        }
        Ok(Some(PmuOptions {
            model: self.model()?,
            options: Options {
                backing: match self.backing {
                    Backing::Auto => None,
                    Backing::Hardware => Some(vpmu_kvm::Backing::Hardware),
                    Backing::Clock => Some(vpmu_kvm::Backing::Clock),
                },
                approximate_instructions: self.approximate_instructions,
                freeze: match self.freeze {
                    Freeze::Vm => vpmu_kvm::Freeze::Vm,
                    Freeze::Guest => vpmu_kvm::Freeze::Guest,
                },
                policy,
                pebs: match self.pebs {
                    Pebs::Off | Pebs::Auto => vpmu_kvm::Pebs::Auto,
                    Pebs::Exit => vpmu_kvm::Pebs::Exit,
                    Pebs::Buffer => vpmu_kvm::Pebs::Buffer,
                },
                skid: self.skid(),
                lbr: match self.lbr {
                    Lbr::Off => vpmu_kvm::Lbr::Off,
                    Lbr::On => vpmu_kvm::Lbr::On,
                    Lbr::Eight => vpmu_kvm::Lbr::Depth(8),
                    Lbr::Sixteen => vpmu_kvm::Lbr::Depth(16),
                    Lbr::ThirtyTwo => vpmu_kvm::Lbr::Depth(32),
                },
                follow: match self.follow {
                    Follow::Ahead => vpmu_kvm::Follow::Ahead,
                    Follow::Steps => vpmu_kvm::Follow::Steps,
                },
                signal: None,
            },
            rdpmc: self.rdpmc,
        }))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Policy {
    /// A new host event for each overflow and each rewrite (the unoptimised baseline)
    Recreate,
    /// Keep the host event: pause, set its period, resume
    Reuse,
    /// As reuse, and leave a paused event alone
    Paused,
}

fn memory(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.strip_suffix(['M', 'm']) {
        Some(number) => (number, 1 << 20),
        None => (text.strip_suffix(['G', 'g']).unwrap_or(""), 1 << 30),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .filter(|size| vpmu_vmm::MEMORY.contains(size))
        .ok_or_else(|| "a size is a number with M or G, from 64M to 3G".to_owned())
}

fn perfmon(text: &str) -> Result<Perfmon, String> {
    let number = text.parse().ok().filter(|number| (2..=5).contains(number));
    number
        .and_then(Perfmon::from_number)
        .ok_or_else(|| "there are versions 2 to 5".to_owned())
}

/// Opens the file for the statistics, before there are any. `None`: standard output.
fn open_statistics(path: &Path) -> Result<Option<File>, Error> {
    if path.as_os_str() == "-" {
        return Ok(None);
    }
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.map(Some)
        .map_err(|error| Error::File(path.display().to_string(), error))
}

/// Takes as many descriptors as this process may have: 64 vCPUs whose guests use all counters want a thousand and more, and
/// a counter without one is lost.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // Without it, guests with fewer counters in use run as well.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// Runs the guest that the options describe, and writes what its PMU has cost.
fn run(cli: Cli) -> Result<Ending, Error> {
    let policy = cli.policy.map(|policy| match policy {
        Policy::Recreate => vpmu::counter::Policy::Recreate,
        Policy::Reuse => vpmu::counter::Policy::Reuse,
        Policy::Paused => vpmu::counter::Policy::ReusePaused,
    });
    let mut statistics = open_statistics(&cli.statistics)?;
    raise_descriptors();
    if let Err(error) = vpmu_kvm::publish() {
        eprintln!("vpmu-vmm: warning: vpmu top will not see this guest: {error}");
    }
    let skid = cli.skid();
    let (ending, line) = match cli.restore {
        Some(file) => vpmu_vmm::restore(&Restore {
            file,
            policy,
            skid,
            save: cli.save,
            measure: cli.measure,
            drop_paravirtual: cli.drop_paravirt,
        })?,
        None => vpmu_vmm::run(&Config {
            pmu: cli.pmu(policy.unwrap_or_default())?,
            // clap has made sure that there is one.
            kernel: cli.kernel.unwrap_or_default(),
            initrd: cli.initrd,
            command_line: cli.append,
            vcpus: cli.vcpus,
            memory: cli.memory,
            lazy_deadline: cli.lazy_deadline,
            save: cli.save,
            measure: cli.measure,
            kernel_cache: !cli.no_kernel_cache,
        })?,
    };
    let written = match &mut statistics {
        Some(file) => file.write_all(line.as_bytes()),
        None => io::stdout().write_all(line.as_bytes()),
    };
    match (written, ending) {
        (Err(error), Ending::PowerOff | Ending::Reset) => {
            return Err(Error::File(cli.statistics.display().to_string(), error));
        }
        // The status says what has become of the guest: that it was saved, above all.
        (Err(error), _) => eprintln!("vpmu-vmm: cannot write statistics: {error}"),
        (Ok(()), _) => {}
    }
    Ok(ending)
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(Ending::PowerOff | Ending::Reset) => ExitCode::SUCCESS,
        Ok(Ending::TripleFault) => {
            eprintln!("vpmu-vmm: the guest died of a triple fault");
            ExitCode::from(3)
        }
        Ok(Ending::Saved) => ExitCode::from(4),
        Ok(Ending::Interrupted) => ExitCode::from(130),
        Err(error) => {
            eprintln!("vpmu-vmm: {error}");
            ExitCode::FAILURE
        }
    }
}
