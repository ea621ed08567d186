//! From the bootloader's jump to the guest's first instruction, on the first CPU and on the others.
//!
//! UNSAFETY: reads and writes memory that the bootloader described, writes EL2's control registers.

use alloc::{format, string::String, vec::Vec};
use core::{ops::Range, ptr, slice, sync::atomic::Ordering::Relaxed};

use dtoolkit::fdt::Fdt;
use smccc::{Call as _, Smc, psci::PSCI_CPU_ON_64};
use vpmu::arm::{
    PmuVersion, Register,
    partition::{Features, PmuRegisters},
};
use vpmu_monitor::{
    boot_words::{Design, Settings},
    device_tree::{self, Machine},
    guest_image::{PAYLOAD_OFFSET, Placement},
    pmu::{GuestPmu, Hardware, PmuError},
    psci,
    redistributor::{self, SgiFrame},
    vgic::VirtualInterface,
};

use super::{
    console::{self, say},
    cpu::{self, CPUS, Cpu, MARKS, MAX_CPUS, Monitor, STACK_SIZE},
    end, gic, heap, mmu,
    pmu_registers::PhysicalPmu,
    probe,
    sysreg::{isb, read_sysreg, write_sysreg},
    trap,
};

/// Guest physical page that the guest rings to mark the command being measured: a hole in the
/// address map of QEMU's `virt` machine.
pub(crate) const DOORBELL: Range<u64> = 0x0b00_0000..0x0b00_1000;

/// EL1h with every interrupt masked, as an arm64 kernel is to be entered.
const GUEST_PSTATE: u64 = 0x3c5;

/// Bytes of a device tree's header, which says how long the tree is.
const FDT_HEADER: usize = 40;

/// What a CPU that starts with its MMU off needs; the layout is known to `entry.s`.
#[repr(C)]
struct StartBlock {
    stack: u64,
    mair_el2: u64,
    tcr_el2: u64,
    ttbr0_el2: u64,
    sctlr_el2: u64,
    number: u64,
}

unsafe extern "C" {
    static guest_length: u64;
    static stacks: u8;
    fn start_secondary();
    safe fn enter_guest(x0: u64, stack: u64) -> !;
}

/// Called by `entry.s` with the device tree's address and the monitor's own.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu(tree: u64, base: u64) -> ! {
    match boot(tree, base) {
        Ok(entry) => enter(0, entry, tree),
        Err(error) => {
            say!("error: {error}");
            end::power_off()
        }
    }
}

/// Prepares everything and returns the guest's entry point.
fn boot(tree_at: u64, base: u64) -> Result<u64, String> {
    let tree = tree_bytes(tree_at).ok_or("the bootloader passed no device tree")?;
    let machine = Machine::read(tree).map_err(|error| format!("{error}"))?;
    if let Some(uart) = machine.uart {
        console::set(uart);
    }
    let words = device_tree::command_line(tree).map_err(|error| format!("{error}"))?;
    let settings = Settings::parse(words).map_err(|error| format!("{error}"))?;
    if machine.cpus.len() > MAX_CPUS {
        return Err(format!(
            "the machine has {} CPUs, and at most {MAX_CPUS} can be used",
            machine.cpus.len()
        ));
    }

    let memory = base..base + PAYLOAD_OFFSET;
    let mut holes: Vec<_> = (0..machine.cpus.len())
        .map(|number| cpu::sgi_frame(&machine, number))
        .map(|frame| frame..frame + redistributor::SGI_FRAME)
        .collect();
    holes.push(DOORBELL);
    let translation = mmu::build(&machine, &memory, &holes)
        .map_err(|error| format!("cannot map memory: {error}"))?;
    translation.enable();

    let entry = place_guest(&machine, base)?;
    let changed = device_tree::for_guest(tree, &memory).map_err(|error| format!("{error}"))?;
    if changed.len() > tree.len() {
        return Err(format!(
            "the guest's device tree needs {} bytes and the bootloader left {}",
            changed.len(),
            tree.len()
        ));
    }
    copy(changed.as_ptr() as u64, tree_at, changed.len() as u64);

    let mut owned = 1 << (machine.maintenance_intid & 31);
    if settings.design == Design::Emulated
        && let Some(pmi) = machine.pmu_intid
    {
        owned |= 1 << (pmi & 31);
    }
    let frames = machine.cpus.iter().map(|_| SgiFrame::new(owned)).collect();
    let mte = read_sysreg!("id_aa64pfr1_el1") >> 8 & 0xf != 0;
    let monitor = Monitor::install(Monitor {
        machine,
        settings,
        translation,
        memory,
        frames,
        mte,
    });
    init_cpu(0, monitor).map_err(|error| format!("{error}"))?;
    heap::seal();
    MARKS.lock().entered = cpu::snapshot();
    Ok(entry)
}

/// The device tree's bytes, when there is one at `at`.
fn tree_bytes(at: u64) -> Option<&'static [u8]> {
    if at == 0 || !at.is_multiple_of(8) {
        return None;
    }
    // SAFETY: the boot protocol says that x0 holds the address of a device tree; nothing else uses
    // that memory until the guest gets it. The header says how long it is.
    unsafe {
        let header: &[u8] = slice::from_raw_parts(at as *const u8, FDT_HEADER);
        if header[..4] != [0xd0, 0x0d, 0xfe, 0xed] {
            return None;
        }
        let len = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let tree = slice::from_raw_parts(at as *const u8, len as usize);
        Fdt::new(tree).ok()?;
        Some(tree)
    }
}

/// Puts the appended guest where it is to run, and returns its entry point.
fn place_guest(machine: &Machine, base: u64) -> Result<u64, String> {
    let loaded_at = base + PAYLOAD_OFFSET;
    let ram = machine
        .ram
        .iter()
        .find(|ram| ram.contains(&base))
        .ok_or("the monitor was not loaded into RAM")?;
    // SAFETY: a word of the monitor's own image, which the lab fills in.
    let len = unsafe { ptr::read_volatile(&raw const guest_length) };
    if loaded_at.checked_add(len).is_none_or(|end| end > ram.end) {
        return Err(format!(
            "the appended guest of {len} bytes does not fit into RAM"
        ));
    }
    // SAFETY: in RAM, as checked, and used by nobody else yet.
    let head = unsafe { slice::from_raw_parts(loaded_at as *const u8, len.min(64) as usize) };
    let placement = Placement::decide(head, len, loaded_at, ram.start, base)
        .map_err(|error| format!("{error}"))?;
    if placement.entry + placement.memory > ram.end {
        return Err(format!(
            "the guest needs {} MiB of memory and the machine has too little",
            placement.memory >> 20
        ));
    }
    copy(loaded_at, placement.entry, placement.copy);
    Ok(placement.entry)
}

/// Copies to where the guest will read with its caches off.
fn copy(from: u64, to: u64, len: u64) {
    // SAFETY: callers have checked both ranges to be RAM outside the monitor's own data.
    unsafe {
        ptr::copy(from as *const u8, to as *mut u8, len as usize);
    }
    mmu::clean_to_memory(to..to + len);
}

/// Called by `entry.s` on every CPU but the first, with the MMU on.
#[unsafe(no_mangle)]
extern "C" fn secondary_cpu(block: &StartBlock) -> ! {
    let number = block.number as usize;
    let Some(monitor) = Monitor::installed() else {
        end::power_off()
    };
    if let Err(error) = init_cpu(number, monitor) {
        say!("error: CPU {number}: {error}");
        end::power_off();
    }
    let (entry, context) = *CPUS[number].start.lock();
    enter(number, entry, context)
}

/// Starts CPU `number`, on behalf of the guest, and returns PSCI's answer.
pub(crate) fn start_cpu(number: usize, monitor: &Monitor, entry: u64, context: u64) -> u64 {
    let cpu = &CPUS[number];
    if cpu.on.swap(true, Relaxed) {
        return psci::ALREADY_ON;
    }
    *cpu.start.lock() = (entry, context);
    static BLOCKS: [spin::Mutex<StartBlock>; MAX_CPUS] = [const {
        spin::Mutex::new(StartBlock {
            stack: 0,
            mair_el2: 0,
            tcr_el2: 0,
            ttbr0_el2: 0,
            sctlr_el2: 0,
            number: 0,
        })
    }; MAX_CPUS];
    let mut block = BLOCKS[number].lock();
    let translation = &monitor.translation;
    *block = StartBlock {
        stack: stack_top(number),
        mair_el2: translation.mair_el2,
        tcr_el2: translation.tcr_el2,
        ttbr0_el2: translation.ttbr0_el2,
        sctlr_el2: translation.sctlr_el2,
        number: number as u64,
    };
    let at = &raw const *block as u64;
    mmu::clean_to_memory(at..at + size_of::<StartBlock>() as u64);
    let mut arguments = [0; 17];
    arguments[..3].copy_from_slice(&[
        monitor.machine.cpus[number],
        start_secondary as *const () as u64,
        at,
    ]);
    let answer = Smc::call64(PSCI_CPU_ON_64, arguments)[0];
    if answer != psci::SUCCESS {
        cpu.on.store(false, Relaxed);
    }
    answer
}

fn stack_top(number: usize) -> u64 {
    (&raw const stacks) as u64 + ((number + 1) * STACK_SIZE) as u64
}

/// Enters the guest on this CPU for the first time.
fn enter(number: usize, entry: u64, x0: u64) -> ! {
    CPUS[number].on.store(true, Relaxed);
    // SAFETY: where and how the guest starts; stage 2 limits what it can reach.
    unsafe {
        write_sysreg!("elr_el2", entry);
        write_sysreg!("spsr_el2", GUEST_PSTATE);
    }
    isb();
    enter_guest(x0, stack_top(number))
}

/// Prepares EL2 and the PMU of this CPU.
fn init_cpu(number: usize, monitor: &Monitor) -> Result<(), PmuError> {
    // SAFETY: the number of this CPU, read back by `Cpu::number`.
    unsafe {
        write_sysreg!("tpidr_el2", number as u64);
    }
    let cpu = Cpu::this();
    let mut local = cpu.local.lock();
    local.interrupts = VirtualInterface::new();
    local.holding = false;
    init_el1();
    let mdcr = open_to_the_guest();

    let hardware = detect_pmu();
    local.mdcr = mdcr;
    local.pmu = match &hardware {
        Some(hardware) => Some(GuestPmu::new(monitor.settings, hardware, &mut PhysicalPmu)?),
        None => None,
    };
    if let Some(pmu) = &mut local.pmu {
        pmu.load(&mut PhysicalPmu);
    }
    trap::apply_traps(&mut local, true);

    monitor.translation.enable_stage_2();
    gic::init_cpu_interface();
    own_interrupts(number, monitor);
    Ok(())
}

/// Enables this CPU's interrupts that belong to the monitor, in its redistributor.
fn own_interrupts(number: usize, monitor: &Monitor) {
    let frame = monitor.sgi_frame(number);
    let owned = monitor.frames[number].owned();
    // SAFETY: this CPU's redistributor, as the device tree says; the guest is not running on it.
    unsafe {
        let group = (frame + redistributor::IGROUPR0) as *mut u32;
        ptr::write_volatile(group, ptr::read_volatile(group) | owned);
        for intid in (0..32).filter(|n| owned >> n & 1 != 0) {
            ptr::write_volatile(
                (frame + redistributor::IPRIORITYR0 + intid) as *mut u8,
                0xa0,
            );
        }
        ptr::write_volatile((frame + redistributor::ISENABLER0) as *mut u32, owned);
    }
}

/// EL1 as a CPU has it after reset, where that matters.
fn init_el1() {
    let (midr, mpidr) = (read_sysreg!("midr_el1"), read_sysreg!("mpidr_el1"));
    // SAFETY: EL1 does not run yet.
    unsafe {
        write_sysreg!("sctlr_el1", 0x30d0_0800_u64);
        write_sysreg!("cpacr_el1", 0_u64);
        write_sysreg!("cntkctl_el1", 0_u64);
        write_sysreg!("cntv_ctl_el0", 0_u64);
        write_sysreg!("cntp_ctl_el0", 0_u64);
        write_sysreg!("cntvoff_el2", 0_u64);
        write_sysreg!("vpidr_el2", midr);
        write_sysreg!("vmpidr_el2", mpidr);
    }
}

/// `HCR_EL2` without stage 2: EL1 is AArch64, physical interrupts and SMC come here, and nothing else
/// that the guest may use traps (pointer authentication, allocation tags, SCXTNUM, RAS fault injection).
const HCR_OPEN: u64 =
    1 << 56 | 1 << 53 | 1 << 47 | 1 << 41 | 1 << 40 | 1 << 31 | 1 << 19 | 1 << 4 | 1 << 3;
const HCR_VM: u64 = 1 << 0;

/// Opens every feature that the CPU has to the guest, and returns the bits of `MDCR_EL2` for that.
fn open_to_the_guest() -> u64 {
    let pfr0 = read_sysreg!("id_aa64pfr0_el1");
    let pfr1 = read_sysreg!("id_aa64pfr1_el1");
    let dfr0 = read_sysreg!("id_aa64dfr0_el1");
    let mmfr0 = read_sysreg!("id_aa64mmfr0_el1");
    let mmfr1 = read_sysreg!("id_aa64mmfr1_el1");
    let field = |register: u64, at: u32| register >> at & 0xf;

    // SAFETY: these registers say what of the guest traps; none gives it the monitor's memory.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN | HCR_VM);
        // Floating point, SVE, SME and trace untrapped; the rest of the bits are RES1.
        write_sysreg!("cptr_el2", 0x22ff_u64);
        write_sysreg!("hstr_el2", 0_u64);
        // EL1 uses the physical counter and timer as well as the virtual ones.
        write_sysreg!("cnthctl_el2", 3_u64);
        isb();
        if field(pfr0, 32) != 0 {
            write_sysreg!("s3_4_c1_c2_0", 0xf_u64); // ZCR_EL2: every vector length
        }
        if field(pfr1, 24) != 0 {
            write_sysreg!("s3_4_c1_c2_6", 0xc000_000f_u64); // SMCR_EL2: the same, FA64 and ZT0
        }
        if field(mmfr1, 40) != 0 {
            // HCRX_EL2: EnAS0, EnALS, EnASR, MSCEn, TCR2En, SCTLR2En, D128En, EnIDCP128, GCSEn, EnFPM
            let open = [0, 1, 2, 11, 14, 15, 17, 21, 22, 23];
            write_sysreg!(
                "s3_4_c1_c2_2",
                open.iter().fold(0_u64, |bits, n| bits | 1 << n)
            );
        }
        if field(mmfr0, 56) != 0 {
            // Fine-grained traps whose *zero* means "trap" (their names begin with n).
            write_sysreg!("s3_4_c1_c1_4", 0xfffc_0000_0000_0000_u64); // HFGRTR_EL2
            write_sysreg!("s3_4_c1_c1_5", 0xfffc_0000_0000_0000_u64); // HFGWTR_EL2
            write_sysreg!("s3_4_c1_c1_6", 0x0f80_0000_0000_0000_u64); // HFGITR_EL2
        }
    }
    isb();
    // MDCR_EL2.E2PB and E2TB = 0b11: profiling and trace buffers belong to EL1.
    let spe = if field(dfr0, 32) != 0 { 3 << 12 } else { 0 };
    let trbe = if field(dfr0, 44) != 0 { 3 << 24 } else { 0 };
    spe | trbe
}

/// This CPU's PMU, after trying its partition; `None` when there is no PMUv3.
fn detect_pmu() -> Option<Hardware> {
    let dfr0 = read_sysreg!("id_aa64dfr0_el1");
    let version = PmuVersion::from_id_aa64dfr0(dfr0)?;
    let features = Features::from_registers(
        dfr0,
        read_sysreg!("id_aa64mmfr0_el1"),
        read_sysreg!("mpidr_el1"),
    )?;
    let pmu = &mut PhysicalPmu;
    let pmcr = pmu.read(Register::Pmcr);
    let counters = (pmcr >> 11 & 0x1f) as u8;
    // The trial's own accesses at EL1 must neither trap nor see a stage 2.
    // SAFETY: the guest is not running.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN);
    }
    isb();
    let isolation = probe::isolation(counters, &features);
    // SAFETY: as above.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN | HCR_VM);
    }
    isb();
    Some(Hardware {
        features,
        isolation,
        el3: read_sysreg!("id_aa64pfr0_el1") >> 12 & 0xf != 0,
        pmcr,
        events: [pmu.read(Register::Pmceid0), pmu.read(Register::Pmceid1)],
        pmmir: if version >= PmuVersion::V3p4 {
            pmu.read(Register::Pmmir)
        } else {
            0
        },
    })
}
