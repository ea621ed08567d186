//! What the device tree says of the machine, and the tree that the guest gets.
//!
//! The guest owns almost every device, so its tree is the machine's own with three changes: the monitor's
//! memory is taken out of `/memory`, the monitor's words out of `/chosen/bootargs`, and the interrupt
//! translation services, which write memory by physical address, are taken out altogether. Devices whose
//! messages went there use their interrupt lines.

use alloc::{string::ToString, vec::Vec};
use core::ops::Range;

use dtoolkit::{
    Node, Property,
    fdt::{Fdt, FdtNode},
    model::{DeviceTree, DeviceTreeNode},
    standard::{NodeStandard as _, ReservedMemory},
};

use super::{
    blob,
    console::{Console, consoles},
    home::without,
    nodes::{self, add, cells, compatible, interrupts, pair, regions, remove_children, text},
    pmu, uefi,
    words::GuestWords,
};

/// Room for a device tree in memory. Kernels take no longer one.
pub const ROOM: u64 = 2 << 20;

/// Property of `/chosen` with the address of the page that the guest rings; `meter` reads it.
const DOORBELL: &str = "vpmu,doorbell";
/// `compatible` of an interrupt translation service.
const ITS: &str = "arm,gic-v3-its";

/// The facts the monitor needs, taken from the tree and never from a board's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// RAM, in the tree's order.
    pub ram: Vec<Range<u64>>,
    /// The end of all that the CPU can address: RAM, devices' registers, windows of buses.
    pub end: u64,
    /// Serial ports to speak through.
    pub consoles: Vec<Console>,
    /// The GICv3's distributor.
    pub distributor: Range<u64>,
    /// Regions of GICv3 redistributors.
    pub redistributors: Vec<Range<u64>>,
    /// Distance between two redistributors, where it is not what they themselves say.
    pub redistributor_stride: Option<u64>,
    /// Registers of interrupt translation services, which the guest does not get.
    pub its: Vec<Range<u64>>,
    /// INTID of the GIC's maintenance interrupt.
    pub maintenance_intid: u32,
    /// INTID of each CPU's PMU overflow interrupt, by the CPU's number: a PPI, or an SPI of its own.
    pub pmu_intids: Vec<Option<u32>>,
    /// INTIDs of the generic timer.
    pub timer_intids: Vec<u32>,
    /// MPIDR affinity of each CPU.
    pub cpus: Vec<u64>,
    /// The `power_state` of each idle state that firmware offers.
    pub suspend_states: Vec<u32>,
    /// The initrd, when there is one.
    pub initrd: Option<Range<u64>>,
    /// RAM that the tree or firmware keeps for something.
    pub reserved: Vec<Range<u64>>,
    /// The part of it that no CPU may map, as it might read there, asked to or not.
    pub unmapped: Vec<Range<u64>>,
}

/// A tree that does not say what the monitor must know, or that no kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// No valid tree.
    #[error("the bootloader passed no valid device tree")]
    Invalid,
    /// A node or property is absent or malformed.
    #[error("the device tree has no usable {0}")]
    Missing(&'static str),
    /// A tree that has been made has so many bytes.
    #[error("the device tree of {0} bytes is more than a kernel takes")]
    TooLong(usize),
}

/// The bytes of a tree that was made for a kernel.
pub(super) fn written(tree: &DeviceTree) -> Result<Vec<u8>, TreeError> {
    let bytes = tree.to_dtb();
    if bytes.len() as u64 > ROOM {
        return Err(TreeError::TooLong(bytes.len()));
    }
    Ok(bytes)
}

/// The kernel command line, monitor's words included; empty when there is none.
///
/// # Errors
///
/// [`TreeError::Invalid`] when `tree` is no device tree.
pub fn command_line(tree: &[u8]) -> Result<&str, TreeError> {
    let tree = blob::open(tree).ok_or(TreeError::Invalid)?;
    // A guest without a command line is one that asks the monitor for nothing.
    Ok(words(tree).unwrap_or(""))
}

fn words(tree: Fdt<'_>) -> Option<&str> {
    text(&tree.find_node("/chosen")?, "bootargs")
}

/// How PSCI is called, where the tree says it: `smc`; or `hvc`, by which firmware is called that is where the monitor would be.
pub fn conduit(tree: &[u8]) -> Option<&str> {
    conduit_of(blob::open(tree)?)
}

fn conduit_of(tree: Fdt<'_>) -> Option<&str> {
    text(&tree.find_node("/psci")?, "method")
}

impl Machine {
    /// Reads the machine's facts.
    ///
    /// # Errors
    ///
    /// [`TreeError`] names what is absent.
    pub fn read(blob: &[u8]) -> Result<Self, TreeError> {
        let tree = blob::open(blob).ok_or(TreeError::Invalid)?;
        let root = tree.root();
        // Some boards have a node for each bank.
        let ram: Vec<_> = root
            .children()
            .filter(|node| is_memory(node))
            .flat_map(|node| regions(&node))
            .collect();
        if ram.is_empty() {
            return Err(TreeError::Missing("memory node"));
        }

        // GICv2 has no list registers by system registers, and no monitor here.
        let gic = compatible(tree, "arm,gic-v3");
        let gic = gic.first().ok_or(TreeError::Missing("GICv3 node"))?;
        // `reg` of a GICv3: the distributor, the redistributor regions, and legacy interfaces.
        // What follows the redistributors belongs to GICv2's interfaces, which the guest may use and the monitor does not.
        let count = nodes::cell(&gic.node, "#redistributor-regions").unwrap_or(1) as usize;
        let (distributor, rest) = gic
            .registers
            .split_first()
            .ok_or(TreeError::Missing("GICv3 distributor"))?;
        let redistributors = rest
            .get(..count)
            .filter(|regions| !regions.is_empty())
            .ok_or(TreeError::Missing("GICv3 redistributor region"))?;
        let width = nodes::cell(&gic.node, "#interrupt-cells").unwrap_or(3) as usize;
        let timers = compatible(tree, "arm,armv8-timer");
        let timer_intids = timers.first().map(|timer| interrupts(&timer.node, width));
        let maintenance_intid = interrupts(&gic.node, width)
            .first()
            .copied()
            .ok_or(TreeError::Missing("GICv3 maintenance interrupt"))?;

        if cpu_nodes(tree).count() > 1 && !starts_by_firmware(tree) {
            return Err(TreeError::Missing("PSCI by SMC for its other CPUs"));
        }
        let (cpus, phandles): (Vec<_>, Vec<_>) = cpus(tree).into_iter().unzip();
        let chosen = tree.find_node("/chosen");
        let address = |name| {
            let value = chosen?.property(name)?;
            // Bootloaders write either size, whatever #address-cells says.
            Some(match value.value().len() {
                4 => value.value_as::<u32>().ok()?.into(),
                _ => value.value_as::<u64>().ok()?,
            })
        };
        let initrd = address("linux,initrd-start")
            .zip(address("linux,initrd-end"))
            .map(|(start, end)| start..end);

        Ok(Self {
            ram,
            end: end(tree),
            consoles: consoles(blob),
            distributor: distributor.clone(),
            redistributors: redistributors.to_vec(),
            redistributor_stride: gic.node.property("redistributor-stride").map(|stride| {
                cells(stride.value()).fold(0, |all, cell| all << 32 | u64::from(cell))
            }),
            its: its(tree)?,
            maintenance_intid,
            pmu_intids: pmu::intids(tree, &phandles, width),
            timer_intids: timer_intids.unwrap_or_default(),
            cpus,
            // Idle states stand below /cpus/idle-states or /idle-states, and by their property they are known.
            suspend_states: nodes::find(tree, |_| true)
                .iter()
                .filter_map(|found| nodes::cell(&found.node, "arm,psci-suspend-param"))
                .collect(),
            initrd,
            reserved: reserved(tree),
            unmapped: (tree.reserved_memory().into_iter().flatten())
                .filter(ReservedMemory::no_map)
                .flat_map(|node| regions(&node))
                .collect(),
        })
    }
}

/// The tree for the guest: `tree` without the memory in each of `reserved`, without interrupt translation services
/// and without the monitor's words, and with the address of the monitor's doorbell. `taken` is the address of a serial
/// port that is another guest's, `map` the bytes of UEFI's memory map for the guest. A guest of ACPI's gets nothing but
/// `/chosen`: Linux reads ACPI only where there is no more.
///
/// # Errors
///
/// [`TreeError::Invalid`] when `tree` is no device tree, [`TreeError::TooLong`].
pub fn for_guest(
    tree: &[u8],
    reserved: &[Range<u64>],
    doorbell: u64,
    taken: Option<u64>,
    map: Option<u32>,
) -> Result<Vec<u8>, TreeError> {
    let tree = blob::open(tree).ok_or(TreeError::Invalid)?;
    let mut changed = DeviceTree::from_fdt(&tree);
    let root = tree.root();
    for node in root.children() {
        let Some(copy) = changed.root.child_mut(node.name()) else {
            continue;
        };
        if is_memory(&node) {
            let free = regions(&node).flat_map(|ram| without(&ram, reserved));
            add(
                copy,
                "reg",
                nodes::reg(free.map(pair), root.address_space()),
            );
        } else if taken.is_some() && regions(&node).next().map(|port| port.start) == taken {
            // A second guest's serial port stands at the root (`second::tree`).
            changed.root.remove_child(node.name());
        }
    }
    let phandles: Vec<u32> = compatible(tree, ITS)
        .iter()
        // What has no phandle is named by nobody.
        .filter_map(|its| its.node.phandle().ok()?)
        .collect();
    without_its(&mut changed.root, &phandles);
    if map.is_some() {
        // UEFI's map says it all, and these keep what the firmware needs no more: Linux's stub has none, either.
        changed.memory_reservations.clear();
    }
    if let Some(chosen) = changed.root.child_mut("chosen") {
        if let Some(words) = words(tree) {
            add(chosen, "bootargs", GuestWords(words).to_string());
        }
        // As a cell pair: Linux hands the bytes on, and `meter` reads them.
        add(chosen, DOORBELL, doorbell);
        if let Some(map) = map {
            add(chosen, uefi::MAP_SIZE, map);
        }
        if chosen.remove_property(uefi::ACPI).is_some() {
            let chosen = chosen.clone();
            changed = DeviceTree::new();
            changed.root.add_child(chosen);
        }
    }
    written(&changed)
}

/// Removes interrupt translation services below `node`, and the properties that send messages to them.
fn without_its(node: &mut DeviceTreeNode, phandles: &[u32]) {
    // A device whose messages go nowhere would wait for its first interrupt for ever. Without the property its driver asks for
    // a line.
    let uses = |node: &DeviceTreeNode, name, at, every| {
        node.property(name).is_some_and(|property| {
            cells(property.value())
                .skip(at)
                .step_by(every)
                .any(|phandle| phandles.contains(&phandle))
        })
    };
    if uses(node, "msi-parent", 0, 1) {
        node.remove_property("msi-parent");
    }
    // Requester, controller, first message, how many.
    if uses(node, "msi-map", 1, 4) {
        node.remove_property("msi-map");
        node.remove_property("msi-map-mask");
    }
    remove_children(node, |child| child.is_compatible(ITS));
    for child in node.children_mut() {
        without_its(child, phandles);
    }
}

pub(super) fn is_memory(node: &FdtNode<'_>) -> bool {
    text(node, "device_type") == Some("memory")
        // The secure world's memory has a node, too.
        && nodes::is_usable(node)
}

/// Registers of the interrupt translation services. One without an address could not be kept from the guest.
fn its(tree: Fdt<'_>) -> Result<Vec<Range<u64>>, TreeError> {
    let all = compatible(tree, ITS);
    // An ITS writes memory by physical address, past stage 2.
    if all.iter().any(|its| its.registers.is_empty()) {
        return Err(TreeError::Missing(
            "address of an interrupt translation service",
        ));
    }
    Ok(all.into_iter().flat_map(|its| its.registers).collect())
}

/// The end of everything in the tree.
fn end(tree: Fdt<'_>) -> u64 {
    // Stage 2 is as large as this, and what is beyond it faults.
    nodes::find(tree, |_| true)
        .iter()
        .flat_map(|found| found.registers.iter().chain(&found.windows))
        .map(|range| range.end)
        .max()
        .unwrap_or(0)
}

/// The reservation block and the children of `/reserved-memory` that say where they are.
fn reserved(tree: Fdt<'_>) -> Vec<Range<u64>> {
    let block = tree
        .memory_reservations()
        .map(|entry| entry.address()..entry.address().saturating_add(entry.size()));
    let nodes = tree.reserved_memory().into_iter().flatten();
    block.chain(nodes.flat_map(|node| regions(&node))).collect()
}

fn cpu_nodes<'a>(tree: Fdt<'a>) -> impl Iterator<Item = FdtNode<'a>> + use<'a> {
    let all = tree.find_node("/cpus").into_iter();
    all.flat_map(|cpus| cpus.children())
        // `/cpus` has cpu-map, caches and idle states, too.
        .filter(|node| node.name_without_address() == "cpu")
}

/// Whether firmware at EL3 starts all CPUs.
fn starts_by_firmware(tree: Fdt<'_>) -> bool {
    // Another waits at EL2 for a word in memory, which the guest can write, and would run the guest's code there. One that is
    // `disabled` waits, too (Devicetree Specification 0.4, 3.8.1).
    let is_psci = |node| text(&node, "enable-method") == Some("psci");
    conduit_of(tree) == Some("smc") && cpu_nodes(tree).all(is_psci)
}

/// MPIDR affinity and phandle of each CPU.
fn cpus(tree: Fdt<'_>) -> Vec<(u64, Option<u32>)> {
    cpu_nodes(tree)
        // Firmware marks CPUs that do not exist.
        .filter(nodes::is_usable)
        .filter_map(|node| {
            let affinity = node.reg().ok()??.next()?.address().ok()?;
            Some((affinity, node.phandle().ok().flatten()))
        })
        .collect()
}

#[cfg(test)]
mod tests;
