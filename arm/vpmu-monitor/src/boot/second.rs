//! The second guest: where it is put, and the device tree that it gets.
//!
//! Its machine is the first guest's with one CPU, memory of its own, the timer, the PMU and a serial port. The interrupt
//! controller is where the machine's is, and the monitor serves all of it.

use alloc::{string::ToString, vec::Vec};
use core::ops::Range;

use dtoolkit::{
    Node, Property as _,
    model::{DeviceTree, DeviceTreeNode},
    standard::NodeStandard as _,
};

use super::device_tree::{self, Machine, TreeError, is_memory, written};
use super::nodes::{self, add, pair, remove_children};
use super::{blob, guest_image, home};
use crate::regs::GIC_FRAME;

/// Bytes of its memory, where the boot file does not say.
pub const MEMORY: u64 = 128 << 20;
/// Its memory begins at such an address, as machines' does.
const ALIGNMENT: u64 = 128 << 20;

/// A page of any size that Linux has.
const INITRD_ALIGNMENT: u64 = 64 << 10;

/// The redistributor region has room for one more than there is.
const REDISTRIBUTORS: u64 = 4 * GIC_FRAME;

/// The highest place for `size` bytes of the second guest's memory in `ram`, clear of what is `taken`.
pub fn choose(ram: &Range<u64>, size: u64, taken: &[Range<u64>]) -> Option<Range<u64>> {
    // From the top down, away from the first guest's kernel and from what bootloaders leave near the beginning.
    home::choose(ram, taken, size, ALIGNMENT)
}

/// Where the second guest's file would have been loaded, in its memory.
pub const fn loaded_at(memory: &Range<u64>) -> u64 {
    memory.start + guest_image::PAYLOAD_OFFSET
}

/// Where its device tree goes.
pub const fn tree_at(memory: &Range<u64>) -> u64 {
    memory.end - device_tree::ROOM
}

/// Where its initrd of `length` bytes goes, below the tree; `None`: there is no such place in `memory`.
pub fn initrd_at(memory: &Range<u64>, length: u64) -> Option<Range<u64>> {
    let start = tree_at(memory).checked_sub(length)? & !(INITRD_ALIGNMENT - 1);
    (start >= memory.start).then_some(start..start + length)
}

/// What the second guest's device tree says of it.
#[derive(Clone, Debug)]
pub struct Guest<'a> {
    /// Its memory.
    pub memory: &'a Range<u64>,
    /// The address of its serial port.
    pub serial: u64,
    /// The affinity of its CPU.
    pub cpu: u64,
    /// Its initrd, in its memory.
    pub initrd: Option<&'a Range<u64>>,
    /// Its command line.
    pub words: &'a str,
}

/// The device tree of the second `guest`, made from the machine's `tree`.
///
/// # Errors
///
/// [`TreeError`] when something that it needs is not at the root of the machine's tree, or when it becomes too long.
pub fn tree(tree: &[u8], machine: &Machine, guest: &Guest<'_>) -> Result<Vec<u8>, TreeError> {
    let memory = guest.memory;
    let tree = blob::open(tree).ok_or(TreeError::Invalid)?;
    let root = tree.root();
    let cells = root.address_space();
    let mut changed = DeviceTree::from_fdt(&tree);
    let mut path = None;
    for node in root.children() {
        let name = node.name();
        let starts_at = |start| {
            let mut regions = nodes::regions(&node);
            regions.next().is_some_and(|region| region.start == start)
        };
        let Some(copy) = changed.root.child_mut(name) else {
            continue;
        };
        if is_memory(&node) {
            add(copy, "reg", nodes::reg([pair(memory.clone())], cells));
        } else if starts_at(guest.serial) {
            path = Some(name.to_string());
        } else if node.is_compatible("arm,gic-v3") {
            let redistributors = machine.redistributors.first().ok_or(MISSING_GIC)?;
            let reg = [
                (machine.distributor.start, GIC_FRAME),
                (redistributors.start, REDISTRIBUTORS),
            ];
            add(copy, "reg", nodes::reg(reg, cells));
            add(copy, "#redistributor-regions", 1_u32);
            // ITSs: the guest's interrupt controller has none.
            remove_children(copy, |_| true);
        } else if name == "cpus" {
            only_cpu(copy, guest.cpu);
        } else if !(node.is_compatible("arm,armv8-timer")
            || node.is_compatible("arm,armv8-pmuv3")
            || node.is_compatible("fixed-clock")
            || name == "psci"
            || name == "chosen")
        {
            // A device that the tree names would be an abort in a guest that has none of the machine's.
            changed.root.remove_child(name);
        }
    }
    let path = path.ok_or(TreeError::Missing("second serial port at the root"))?;
    changed.root.remove_child("chosen");
    changed.root.add_child(chosen(guest, &path));
    // Without PSCI the guest could not switch itself off, and the machine goes off when both guests have.
    if changed.root.child_mut("psci").is_none() {
        return Err(TreeError::Missing("/psci node"));
    }
    written(&changed)
}

/// `/chosen` of `guest`, whose serial port is the node `serial` at the root.
fn chosen(guest: &Guest<'_>, serial: &str) -> DeviceTreeNode {
    let mut chosen = DeviceTreeNode::new_unchecked("chosen");
    let path = ["/", serial].concat();
    add(&mut chosen, "stdout-path", path);
    add(&mut chosen, "bootargs", guest.words);
    if let Some(initrd) = guest.initrd {
        add(&mut chosen, "linux,initrd-start", initrd.start);
        add(&mut chosen, "linux,initrd-end", initrd.end);
    }
    chosen
}

const MISSING_GIC: TreeError = TreeError::Missing("GICv3 redistributor region");

/// Leaves of `/cpus` the CPU with this affinity.
fn only_cpu(cpus: &mut DeviceTreeNode, affinity: u64) {
    remove_children(cpus, |node| {
        let reg = node.property("reg").map(|reg| {
            let bytes = reg.value().iter();
            bytes.fold(0_u64, |all, &byte| all << 8 | u64::from(byte))
        });
        reg != Some(affinity)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_highest_place_that_is_free() {
        let ram = 0x4000_0000..0x8000_0000;
        let choose = |ram: &_, taken: &[_]| choose(ram, MEMORY, taken);
        assert_eq!(choose(&ram, &[]), Some(0x7800_0000..0x8000_0000));
        let initrd = 0x7900_0000..0x7a00_0000;
        let taken = [initrd, 0x4000_0000..0x4400_0000];
        assert_eq!(choose(&ram, &taken), Some(0x7000_0000..0x7800_0000));
        assert_eq!(choose(&(0x4000_0000..0x4000_0000 + 100 * MIB), &[]), None);
        assert_eq!(choose(&ram, core::slice::from_ref(&ram)), None);
    }

    #[test]
    fn a_larger_one_in_whole_blocks() {
        let ram = 0x4000_0000..0x8000_0000;
        let place = choose(&ram, 383 * MIB + 1, &[]);
        assert_eq!(place, Some(0x6800_0000..0x8000_0000));
        assert_eq!(choose(&ram, 200 * MIB, &[]), Some(0x7000_0000..0x7c80_0000));
        for size in [1025 * MIB, u64::MAX] {
            assert_eq!(choose(&ram, size, &[]), None);
        }
    }

    #[test]
    fn the_initrd_is_below_the_tree() {
        let memory = 0x7000_0000..0x8000_0000;
        let initrd = initrd_at(&memory, 0x1_2345).unwrap();
        assert_eq!(initrd, 0x7fde_0000..0x7fdf_2345);
        assert_eq!(initrd_at(&memory, 256 * MIB), None);
        assert_eq!(initrd_at(&memory, u64::MAX), None);
    }
}
