//! What the device tree says of the machine, and the tree that the guest gets.
//!
//! The guest owns every device, so its tree is the machine's own with two changes: the monitor's
//! memory is taken out of `/memory`, and the monitor's words out of `/chosen/bootargs`.

use alloc::{string::ToString, vec::Vec};
use core::ops::Range;

use dtoolkit::{
    Node, Property,
    fdt::{Fdt, FdtNode},
    model::{DeviceTree, DeviceTreeProperty},
};

use super::words::GuestWords;

/// The facts the monitor needs, taken from the tree and never from a board's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// RAM, in the tree's order.
    pub ram: Vec<Range<u64>>,
    /// The console: registers of a PL011, when `stdout-path` names one.
    pub uart: Option<u64>,
    /// The GICv3 distributor.
    pub distributor: Range<u64>,
    /// GICv3 redistributors, one region of two 64 KiB frames for each CPU.
    pub redistributors: Range<u64>,
    /// INTID of the GIC's maintenance interrupt.
    pub maintenance_intid: u32,
    /// INTID of the PMU's overflow interrupt, a PPI.
    pub pmu_intid: Option<u32>,
    /// INTIDs of the generic timer.
    pub timer_intids: Vec<u32>,
    /// MPIDR affinity of each CPU.
    pub cpus: Vec<u64>,
    /// The initrd, when there is one.
    pub initrd: Option<Range<u64>>,
}

/// A tree that does not say what the monitor must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// No valid tree.
    #[error("the bootloader passed no valid device tree")]
    Invalid,
    /// A node or property is absent or malformed.
    #[error("the device tree has no usable {0}")]
    Missing(&'static str),
}

/// The kernel command line, monitor's words included; empty when there is none.
///
/// # Errors
///
/// [`TreeError::Invalid`] when `tree` is no device tree.
pub fn command_line(tree: &[u8]) -> Result<&str, TreeError> {
    let tree = Fdt::new(tree).map_err(|_| TreeError::Invalid)?;
    Ok(tree
        .find_node("/chosen")
        .and_then(|chosen| chosen.property("bootargs"))
        .and_then(|words| words.value_as::<&str>().ok())
        .unwrap_or(""))
}

impl Machine {
    /// Reads the machine's facts.
    ///
    /// # Errors
    ///
    /// [`TreeError`] names what is absent.
    pub fn read(tree: &[u8]) -> Result<Self, TreeError> {
        let tree = Fdt::new(tree).map_err(|_| TreeError::Invalid)?;
        let root = tree.root();
        let ram: Vec<_> = root
            .children()
            .filter(|node| is_memory(node))
            .flat_map(|node| regions(&node))
            .collect();
        if ram.is_empty() {
            return Err(TreeError::Missing("memory node"));
        }

        let gic = compatible(root, "arm,gic-v3").ok_or(TreeError::Missing("GICv3 node"))?;
        // `reg` of a GICv3: the distributor, then the redistributor regions.
        let distributor = regions(&gic)
            .next()
            .ok_or(TreeError::Missing("GICv3 distributor"))?;
        let redistributors = regions(&gic)
            .nth(1)
            .ok_or(TreeError::Missing("GICv3 redistributor region"))?;
        let maintenance_intid = interrupts(&gic)
            .first()
            .copied()
            .ok_or(TreeError::Missing("GICv3 maintenance interrupt"))?;

        let chosen = tree.find_node("/chosen");
        let address = |name| {
            let value = chosen?.property(name)?;
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
            uart: console(tree),
            distributor,
            redistributors,
            maintenance_intid,
            pmu_intid: compatible(root, "arm,armv8-pmuv3")
                .and_then(|pmu| interrupts(&pmu).first().copied()),
            timer_intids: compatible(root, "arm,armv8-timer")
                .map(|timer| interrupts(&timer))
                .unwrap_or_default(),
            cpus: cpus(tree),
            initrd,
        })
    }
}

/// The tree for the guest: `tree` without the memory in `reserved` and without the monitor's words.
///
/// # Errors
///
/// [`TreeError::Invalid`] when `tree` is no device tree.
pub fn for_guest(tree: &[u8], reserved: &Range<u64>) -> Result<Vec<u8>, TreeError> {
    let tree = Fdt::new(tree).map_err(|_| TreeError::Invalid)?;
    let mut changed = DeviceTree::from_fdt(&tree);
    for node in tree.root().children().filter(|node| is_memory(node)) {
        let mut reg = Vec::new();
        for region in regions(&node).flat_map(|ram| without(&ram, reserved)) {
            // QEMU, U-Boot and EDK II all describe memory with two address and two size cells.
            reg.extend_from_slice(&region.start.to_be_bytes());
            reg.extend_from_slice(&(region.end - region.start).to_be_bytes());
        }
        set(&mut changed, node.name(), "reg", reg.as_slice());
    }
    if let Some(words) = tree
        .find_node("/chosen")
        .and_then(|chosen| chosen.property("bootargs"))
        .and_then(|words| words.value_as::<&str>().ok())
    {
        set(
            &mut changed,
            "chosen",
            "bootargs",
            GuestWords(words).to_string().as_str(),
        );
    }
    Ok(changed.to_dtb())
}

/// `ram` without `reserved`: none, one or two pieces.
fn without(ram: &Range<u64>, reserved: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    [
        ram.start..ram.end.min(reserved.start),
        ram.start.max(reserved.end)..ram.end,
    ]
    .into_iter()
    .filter(|piece| piece.start < piece.end)
}

fn set(tree: &mut DeviceTree, child: &str, name: &str, value: impl dtoolkit::ToPropertyValue) {
    if let Some(property) = tree
        .root
        .child_mut(child)
        .and_then(|node| node.property_mut(name))
    {
        *property = DeviceTreeProperty::new_unchecked(name, value);
    }
}

fn is_memory(node: &FdtNode<'_>) -> bool {
    node.property("device_type")
        .and_then(|kind| kind.value_as::<&str>().ok())
        == Some("memory")
}

fn regions<'a>(node: &FdtNode<'a>) -> impl Iterator<Item = Range<u64>> + use<'a> {
    node.reg()
        .ok()
        .flatten()
        .into_iter()
        .flatten()
        .filter_map(|reg| {
            let start: u64 = reg.address().ok()?;
            let size: u64 = reg.size().ok()?;
            Some(start..start.checked_add(size)?)
        })
}

/// INTIDs of a node's `interrupts`, which has three cells each: kind (0 = SPI, 1 = PPI), number, trigger.
fn interrupts(node: &FdtNode<'_>) -> Vec<u32> {
    let Some(property) = node.property("interrupts") else {
        return Vec::new();
    };
    let cell = |bytes: &[u8]| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    property
        .value()
        .chunks_exact(12)
        .filter_map(|triple| match cell(&triple[..4]) {
            0 => cell(&triple[4..8]).checked_add(32),
            1 => cell(&triple[4..8]).checked_add(16),
            _ => None,
        })
        .collect()
}

fn compatible<'a>(root: FdtNode<'a>, name: &str) -> Option<FdtNode<'a>> {
    root.children().find(|node| {
        node.compatible()
            .is_some_and(|mut all| all.any(|c| c == name))
    })
}

/// The PL011 that `stdout-path` names, by path (`/pl011@9000000`) or by alias (`serial0:115200n8`).
fn console(tree: Fdt<'_>) -> Option<u64> {
    let path = tree
        .find_node("/chosen")?
        .property("stdout-path")?
        .value_as::<&str>()
        .ok()?;
    let path = path.split(':').next()?;
    let path = if path.starts_with('/') {
        path
    } else {
        tree.find_node("/aliases")?
            .property(path)?
            .value_as::<&str>()
            .ok()?
    };
    let node = tree.find_node(path)?;
    node.compatible()?.any(|c| c == "arm,pl011").then_some(())?;
    Some(regions(&node).next()?.start)
}

fn cpus(tree: Fdt<'_>) -> Vec<u64> {
    tree.find_node("/cpus")
        .into_iter()
        .flat_map(|cpus| cpus.children())
        .filter(|node| node.name_without_address() == "cpu")
        .filter_map(|node| node.reg().ok()??.next()?.address().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use dtoolkit::model::DeviceTreeNode;

    use super::*;

    fn node(name: &str, properties: Vec<DeviceTreeProperty>) -> DeviceTreeNode {
        let mut node = DeviceTreeNode::new(name).unwrap();
        for property in properties {
            node.add_property(property);
        }
        node
    }

    fn property(name: &str, value: impl dtoolkit::ToPropertyValue) -> DeviceTreeProperty {
        DeviceTreeProperty::new(name, value).unwrap()
    }

    /// The parts of QEMU's `virt` tree that matter here.
    fn virt() -> Vec<u8> {
        let mut tree = DeviceTree::new();
        tree.root.add_property(property("#address-cells", 2u32));
        tree.root.add_property(property("#size-cells", 2u32));
        for child in [
            node(
                "memory@40000000",
                vec![
                    property("device_type", "memory"),
                    property("reg", [0u32, 0x4000_0000, 0, 0x4000_0000]),
                ],
            ),
            node(
                "intc@8000000",
                vec![
                    property("compatible", "arm,gic-v3"),
                    property("interrupts", [1u32, 9, 4]),
                    property(
                        "reg",
                        [0u32, 0x800_0000, 0, 0x1_0000, 0, 0x80a_0000, 0, 0xf6_0000],
                    ),
                ],
            ),
            node(
                "pmu",
                vec![
                    property("compatible", "arm,armv8-pmuv3"),
                    property("interrupts", [1u32, 7, 4]),
                ],
            ),
            node(
                "pl011@9000000",
                vec![
                    property("compatible", "arm,pl011"),
                    property("reg", [0u32, 0x900_0000, 0, 0x1000]),
                ],
            ),
            node(
                "chosen",
                vec![
                    property("stdout-path", "/pl011@9000000"),
                    property("bootargs", "console=ttyAMA0 vpmu.pmu=emulated quiet"),
                    property("linux,initrd-start", 0x4800_0000u32),
                    property("linux,initrd-end", 0x4900_0000u32),
                ],
            ),
        ] {
            tree.root.add_child(child);
        }
        tree.to_dtb()
    }

    #[test]
    fn facts_come_from_the_tree() {
        let machine = Machine::read(&virt()).unwrap();
        assert_eq!(machine.ram, vec![0x4000_0000..0x8000_0000]);
        assert_eq!(machine.uart, Some(0x900_0000));
        assert_eq!(machine.redistributors.start, 0x80a_0000);
        assert_eq!(machine.maintenance_intid, 25);
        assert_eq!(machine.pmu_intid, Some(23));
        assert_eq!(machine.initrd, Some(0x4800_0000..0x4900_0000));
    }

    #[test]
    fn the_guest_sees_neither_the_monitors_memory_nor_its_words() {
        let tree = for_guest(&virt(), &(0x4020_0000..0x4040_0000)).unwrap();
        let machine = Machine::read(&tree).unwrap();
        assert_eq!(
            machine.ram,
            [0x4000_0000..0x4020_0000, 0x4040_0000..0x8000_0000]
        );
        assert_eq!(command_line(&tree), Ok("console=ttyAMA0 quiet"));
    }

    #[test]
    fn a_bad_tree_is_an_error() {
        assert_eq!(Machine::read(&[]), Err(TreeError::Invalid));
        assert_eq!(Machine::read(&[0xff; 64]), Err(TreeError::Invalid));
        let mut tree = DeviceTree::new();
        tree.root.add_property(property("#address-cells", 2u32));
        assert!(matches!(
            Machine::read(&tree.to_dtb()),
            Err(TreeError::Missing(_))
        ));
    }
}
