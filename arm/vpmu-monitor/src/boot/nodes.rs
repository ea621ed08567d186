//! Finding nodes in a device tree, wherever a bus puts them, with their registers as the CPU addresses them.
//!
//! Devicetree Specification 0.4, 2.3.6 (`reg`) and 2.3.8 (`ranges`).

use alloc::{string::String, vec::Vec};
use core::ops::Range;

use dtoolkit::{
    Node, Property, ToPropertyValue,
    fdt::{Fdt, FdtNode},
    model::{DeviceTreeNode, DeviceTreeProperty},
    standard::{AddressSpaceProperties, NodeStandard as _},
};

/// Buses inside buses beyond this are not searched.
const DEPTH: usize = 16;

/// A node and where its registers are.
#[derive(Clone)]
pub(super) struct Found<'a> {
    pub(super) node: FdtNode<'a>,
    /// Its `reg`, as CPU addresses; empty when a bus on the way does not translate.
    pub(super) registers: Vec<Range<u64>>,
    /// What its `ranges` hands on to devices behind it, as CPU addresses.
    pub(super) windows: Vec<Range<u64>>,
}

/// The nodes that `wanted` wants, in the tree's order.
pub(super) fn find<'a>(tree: Fdt<'a>, wanted: impl Fn(&FdtNode<'a>) -> bool) -> Vec<Found<'a>> {
    let mut found = Vec::new();
    visit(tree.root(), &Some, DEPTH, &wanted, &mut found);
    found
}

/// The nodes that are compatible with `name`.
pub(super) fn compatible<'a>(tree: Fdt<'a>, name: &str) -> Vec<Found<'a>> {
    find(tree, |node| node.is_compatible(name))
}

/// Whether one of the node's `compatible` strings is right.
pub(super) fn is_compatible(node: &FdtNode<'_>, right: impl Fn(&str) -> bool) -> bool {
    node.compatible().is_some_and(|mut all| all.any(right))
}

/// Whether the node's `status` says that it can be used.
pub(super) fn is_usable(node: &FdtNode<'_>) -> bool {
    text(node, "status").is_none_or(|status| matches!(status, "okay" | "ok"))
}

type Translate<'t> = &'t dyn Fn(Range<u64>) -> Option<Range<u64>>;

/// Visits the children of `bus`, whose addresses `translate` makes CPU addresses.
fn visit<'a>(
    bus: FdtNode<'a>,
    translate: Translate<'_>,
    depth: usize,
    wanted: &impl Fn(&FdtNode<'a>) -> bool,
    found: &mut Vec<Found<'a>>,
) {
    for node in bus.children() {
        if wanted(&node) {
            found.push(Found {
                node,
                registers: regions(&node).filter_map(translate).collect(),
                windows: windows(&node).filter_map(translate).collect(),
            });
        }
        // Hostile or broken trees nest without end; real ones by four or five.
        if depth > 0 {
            let translate = |region| translate(to_parent(&node, region)?);
            visit(node, &translate, depth - 1, wanted, found);
        }
    }
}

/// A region of `bus`'s children as its parent addresses it; `None` when it does not.
fn to_parent(bus: &FdtNode<'_>, region: Range<u64>) -> Option<Range<u64>> {
    // An empty property says that the addresses are the same.
    // Without the property the addresses behind the bus are not the CPU's: I2C, SPI, `/cpus`.
    if bus.property("ranges")?.value().is_empty() {
        return Some(region);
    }
    bus.ranges().ok()??.find_map(|range| {
        let child: u64 = range.child_bus_address().ok()?;
        let parent: u64 = range.parent_bus_address().ok()?;
        let length: u64 = range.length().ok()?;
        // The region begins and ends in one window, or it is none of the CPU's.
        let offset = region.start.checked_sub(child)?;
        let size = region.end.checked_sub(region.start)?;
        let start = parent.checked_add(offset)?;
        (offset.checked_add(size)? <= length).then_some(start..start.checked_add(size)?)
    })
}

/// What the node hands on to devices behind it, in its bus's addresses.
fn windows<'a>(node: &FdtNode<'a>) -> impl Iterator<Item = Range<u64>> + use<'a> {
    let all = node.ranges().into_iter().flatten().flatten();
    all.filter_map(|range| {
        let start: u64 = range.parent_bus_address().ok()?;
        Some(start..start.checked_add(range.length().ok()?)?)
    })
}

/// The node's `reg`, in its bus's addresses.
pub(super) fn regions<'a>(node: &FdtNode<'a>) -> impl Iterator<Item = Range<u64>> + use<'a> {
    let all = node.reg().into_iter().flatten().flatten();
    all.filter_map(|reg| {
        // Three cells, as PCI has, are no number.
        let start: u64 = reg.address().ok()?;
        let size: u64 = reg.size().ok()?;
        Some(start..start.checked_add(size)?)
    })
}

/// A property's text.
pub(super) fn text<'a>(node: &FdtNode<'a>, name: &str) -> Option<&'a str> {
    node.property(name)?.value_as().ok()
}

/// A property's first cell.
pub(super) fn cell(node: &FdtNode<'_>, name: &str) -> Option<u32> {
    cells(node.property(name)?.value()).next()
}

/// The big-endian words of a property.
pub(super) fn cells(value: &[u8]) -> impl Iterator<Item = u32> {
    let (words, _) = value.as_chunks();
    words.iter().copied().map(u32::from_be_bytes)
}

/// A node's `interrupts`, each of `width` cells: kind (0 = SPI, 1 = PPI), number, trigger, and in four a partition of CPUs.
pub(super) fn specifiers(node: &FdtNode<'_>, width: usize) -> Vec<Vec<u32>> {
    let Some(property) = node.property("interrupts") else {
        return Vec::new();
    };
    let words: Vec<u32> = cells(property.value()).collect();
    words
        // A width of 0 or 1 would be a hostile tree's: `chunks_exact(0)` panics.
        .chunks_exact(width.max(2))
        .map(<[u32]>::to_vec)
        .collect()
}

/// The INTID of one of [`specifiers`]. Extended PPIs (3) and SPIs (2) begin at 1056 and 4096 (the binding `arm,gic-v3`).
pub(super) fn intid(specifier: &[u32]) -> Option<u32> {
    let &[kind, number, ..] = specifier else {
        return None;
    };
    let first = match kind {
        0 => 32,
        1 => 16,
        2 => 4096,
        3 => 1056,
        _ => return None,
    };
    number.checked_add(first)
}

/// INTIDs of a node's `interrupts`.
pub(super) fn interrupts(node: &FdtNode<'_>, width: usize) -> Vec<u32> {
    let specifiers = specifiers(node, width);
    specifiers.iter().filter_map(|one| intid(one)).collect()
}

/// A `reg` of pairs of a start and a length, on a bus with these `cells`.
pub(super) fn reg(
    pairs: impl IntoIterator<Item = (u64, u64)>,
    cells: AddressSpaceProperties,
) -> Vec<u8> {
    let mut property = Vec::new();
    let mut push = |value: u64, cells| {
        for cell in (0..cells).rev() {
            let word = value.checked_shr(32 * cell).unwrap_or(0) as u32;
            property.extend_from_slice(&word.to_be_bytes());
        }
    };
    for (start, length) in pairs {
        push(start, cells.address_cells);
        push(length, cells.size_cells);
    }
    property
}

/// A range as [`reg`] takes it.
pub(super) fn pair(range: Range<u64>) -> (u64, u64) {
    (range.start, range.end - range.start)
}

/// Removes the children of `node` that are `unwanted`.
pub(super) fn remove_children(
    node: &mut DeviceTreeNode,
    unwanted: impl Fn(&DeviceTreeNode) -> bool,
) {
    let children = node.children().filter(|child| unwanted(child));
    let names: Vec<String> = children.map(|child| child.name().into()).collect();
    for name in names {
        node.remove_child(&name);
    }
}

/// Sets a property.
pub(super) fn add(node: &mut DeviceTreeNode, name: &str, value: impl ToPropertyValue) {
    node.add_property(DeviceTreeProperty::new_unchecked(name, value));
}
