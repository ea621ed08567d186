//! The machine as its device tree describes it.

use core::ops::Range;

use dtoolkit::fdt::{Fdt, FdtNode};
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property};

/// The program leaves further CPUs alone.
pub const MAX_CPUS: usize = 8;

/// The instruction that calls the firmware.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Conduit {
    /// `HVC`
    Hvc,
    /// `SMC`
    Smc,
}

/// The facts about the machine that the tests need.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// The PL011's address.
    pub uart: u64,
    /// The PL011's interrupt, where the tree has one.
    pub uart_interrupt: Option<u32>,
    /// The GICv3 distributor's address.
    pub distributor: u64,
    /// The first region of GICv3 redistributors.
    pub redistributors: Range<u64>,
    /// The ITS, where the tree has one.
    pub its: Option<u64>,
    /// The first piece of RAM.
    pub ram: Range<u64>,
    /// Number of pieces of RAM.
    pub pieces_of_ram: usize,
    /// The instruction that calls PSCI.
    pub conduit: Conduit,
    /// The PMU's interrupt.
    pub pmi: u32,
    /// The virtual timer's interrupt.
    pub timer: u32,
    /// MPIDR affinities of the CPUs, the first [`MAX_CPUS`].
    pub cpus: [u64; MAX_CPUS],
    /// Number of these CPUs.
    pub cpu_count: usize,
    /// The page that a program writes when a measurement begins or ends, where there is one.
    pub doorbell: Option<u64>,
    /// The command line.
    pub bootargs: &'a str,
}

/// Address of the PL011 of QEMU's `virt` machine, for complaints before the
/// device tree is understood.
pub const FALLBACK_UART: u64 = 0x0900_0000;

impl<'a> Machine<'a> {
    /// Reads the device tree.
    ///
    /// # Errors
    ///
    /// Names the missing part.
    pub fn from_device_tree(tree: Fdt<'a>) -> Result<Self, &'static str> {
        let root = tree.root();
        let uart = find(root, "arm,pl011").ok_or("no arm,pl011 in the device tree")?;
        let gic = find(root, "arm,gic-v3").ok_or("no arm,gic-v3 in the device tree")?;
        let pmu = find(root, "arm,armv8-pmuv3").ok_or("no arm,armv8-pmuv3 in the device tree")?;
        let timer = find(root, "arm,armv8-timer").ok_or("no arm,armv8-timer in the device tree")?;
        let method = tree
            .find_node("/psci")
            .and_then(|node| node.property("method"))
            .ok_or("no /psci method in the device tree")?;
        let conduit = match method.value_as::<&str>() {
            Ok("hvc") => Conduit::Hvc,
            Ok("smc") => Conduit::Smc,
            _ => return Err("unknown /psci method in the device tree"),
        };
        let mut cpus = [0; MAX_CPUS];
        let mut cpu_count = 0;
        for cpu in tree
            .cpus()
            .map_err(|_| "no /cpus in the device tree")?
            .cpus()
            .take(MAX_CPUS)
        {
            let reg = cpu.property("reg").ok_or("a CPU without reg")?;
            cpus[cpu_count] = reg
                .value()
                .iter()
                .fold(0, |id, &byte| id << 8 | u64::from(byte));
            cpu_count += 1;
        }
        Ok(Self {
            uart: address(uart, 0).ok_or("the PL011 has no address")?,
            uart_interrupt: shared_interrupt(uart),
            distributor: address(gic, 0).ok_or("the GIC has no distributor")?,
            redistributors: region(gic, 1).ok_or("the GIC has no redistributors")?,
            its: gic
                .children()
                .find(|node| node.is_compatible("arm,gic-v3-its"))
                .and_then(|node| address(node, 0)),
            ram: pieces_of_ram(root).next().ok_or("no RAM")?,
            pieces_of_ram: pieces_of_ram(root).count(),
            conduit,
            pmi: private_interrupt(pmu, 0).ok_or("the PMU has no private interrupt")?,
            // The timer's interrupts are secure, non-secure, virtual,
            // hypervisor.
            timer: private_interrupt(timer, 2).ok_or("the timer has no virtual interrupt")?,
            cpus,
            cpu_count,
            doorbell: tree
                .find_node("/chosen")
                .and_then(|node| node.property("vpmu,doorbell"))
                .and_then(|doorbell| doorbell.value_as().ok()),
            bootargs: tree
                .find_node("/chosen")
                .and_then(|node| node.property("bootargs"))
                .and_then(|arguments| arguments.value_as::<&str>().ok())
                .unwrap_or_default(),
        })
    }
}

fn pieces_of_ram(root: FdtNode<'_>) -> impl Iterator<Item = Range<u64>> {
    root.children()
        .filter(|node| node.name_without_address() == "memory")
        .flat_map(|node| node.reg().ok().flatten().into_iter().flatten())
        .filter_map(|reg| {
            let start: u64 = reg.address().ok()?;
            Some(start..start.checked_add(reg.size::<u64>().ok()?)?)
        })
}

/// Returns the node with `compatible` at the root or one level below.
fn find<'a>(root: FdtNode<'a>, compatible: &str) -> Option<FdtNode<'a>> {
    root.children()
        .find(|node| node.is_compatible(compatible))
        .or_else(|| {
            root.children()
                .flat_map(|node| node.children())
                .find(|node| node.is_compatible(compatible))
        })
}

fn address(node: FdtNode<'_>, index: usize) -> Option<u64> {
    node.reg().ok()??.nth(index)?.address().ok()
}

fn region(node: FdtNode<'_>, index: usize) -> Option<Range<u64>> {
    let reg = node.reg().ok()??.nth(index)?;
    let start: u64 = reg.address().ok()?;
    Some(start..start.checked_add(reg.size::<u64>().ok()?)?)
}

/// Returns the INTID of the first interrupt, which must be an SPI.
fn shared_interrupt(node: FdtNode<'_>) -> Option<u32> {
    const SPI: u32 = 0;
    match interrupt(node, 0)? {
        (SPI, number @ 0..988) => Some(32 + number),
        _ => None,
    }
}

/// Returns the INTID of the `index`th interrupt, which must be a PPI.
fn private_interrupt(node: FdtNode<'_>, index: usize) -> Option<u32> {
    const PPI: u32 = 1;
    match interrupt(node, index)? {
        (PPI, number @ 0..16) => Some(16 + number),
        _ => None,
    }
}

/// Returns kind and number of the `index`th interrupt. An interrupt has three
/// cells: kind, number, flags.
fn interrupt(node: FdtNode<'_>, index: usize) -> Option<(u32, u32)> {
    let property = node.property("interrupts")?;
    let mut cells = property
        .value()
        .chunks_exact(4)
        .map(|cell| u32::from_be_bytes([cell[0], cell[1], cell[2], cell[3]]))
        .skip(index * 3);
    Some((cells.next()?, cells.next()?))
}
