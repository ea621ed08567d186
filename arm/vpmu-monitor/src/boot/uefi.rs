//! What UEFI hands over, written down as a device tree: the monitor reads one, whoever has started it.
//!
//! The properties of `/chosen` are those that Linux's own EFI stub writes (Linux, `Documentation/arch/arm/uefi.rst`), so that
//! the guest finds firmware's tables and its runtime services as if the stub had started it. UEFI Specification 2.10, 7.2.3
//! (memory map).

use alloc::vec::Vec;
use core::ops::Range;

use dtoolkit::{
    Node, Property,
    fdt::Fdt,
    memreserve::MemoryReservation,
    model::{DeviceTree, DeviceTreeNode},
    standard::NodeStandard as _,
};

use super::device_tree::{TreeError, written};
use super::nodes::{add, pair, reg, remove_children};

/// A property of `/chosen` by which the monitor knows that the rest of the tree is for itself: the guest has ACPI.
pub(super) const ACPI: &str = "vpmu,acpi";
const MAP_START: &str = "linux,uefi-mmap-start";
pub(super) const MAP_SIZE: &str = "linux,uefi-mmap-size";
const MAP_STRIDE: &str = "linux,uefi-mmap-desc-size";

/// Bytes of a page of the map's.
const PAGE: u64 = 0x1000;

/// The types that say who has memory.
mod kind {
    pub(super) const RESERVED: u32 = 0;
    /// A loader's code and data, free memory.
    // Types that a later specification adds are not free: who does not know an owner leaves him his memory. Of the firmware's
    // own until its end, 3 and 4, Linux reads tables later: Memory Attributes (UEFI 2.10, 4.6.4), ESRT.
    pub(super) const FREE: [u32; 3] = [1, 2, 7];
}

/// Attributes: memory, not a device; in use by the firmware after its end.
const WRITE_BACK: u64 = 1 << 3;
const RUNTIME: u64 = 1 << 63;

/// Where a descriptor's fields are, and its bytes, of which later versions may have more.
const KIND: usize = 0;
const PHYSICAL: usize = 8;
const VIRTUAL: usize = 16;
const PAGES: usize = 24;
const ATTRIBUTES: usize = 32;
const DESCRIPTOR: usize = 40;

/// The firmware's memory map.
#[derive(Clone, Copy, Debug)]
pub struct Map<'a> {
    /// Descriptors, one behind the other.
    pub bytes: &'a [u8],
    /// Bytes from one to the next.
    pub stride: usize,
}

/// A piece of memory.
struct Piece {
    kind: u32,
    attributes: u64,
    range: Range<u64>,
}

impl<'a> Map<'a> {
    /// More descriptors that [`without`](Self::without) adds for each range, at the most.
    pub const MORE: usize = 2;

    fn descriptors(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.bytes.chunks_exact(self.stride.max(DESCRIPTOR))
    }

    fn pieces(&self) -> impl Iterator<Item = Piece> + use<'a> {
        self.descriptors().map(piece)
    }

    /// RAM of all known owners: in order, neighbours joined.
    pub fn ram(&self) -> Vec<Range<u64>> {
        let known = |piece: &Piece| piece.is_ram() && piece.kind != kind::RESERVED;
        // The secure world's may be reserved: a CPU that maps it may read it, asked to or not.
        let mut all: Vec<_> = self.pieces().filter(known).collect();
        all.sort_by_key(|piece| piece.range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for Piece { range, .. } in all {
            match joined.last_mut() {
                // Two entries are no two pieces: the monitor's home may lie in both.
                Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        joined
    }

    /// RAM in which the guest finds what the firmware has left.
    pub fn kept(&self) -> impl Iterator<Item = Range<u64>> + use<'a> {
        self.pieces()
            .filter(|piece| piece.is_ram() && !kind::FREE.contains(&piece.kind))
            .map(|piece| piece.range)
    }

    /// The map for a guest that gets none of `ranges`. The firmware's own memory is where it was, at its physical address,
    /// as Linux's stub has it with `efi=novamap`.
    pub fn without(&self, ranges: &[Range<u64>]) -> Vec<u8> {
        let mut changed = Vec::with_capacity(self.bytes.len());
        for descriptor in self.descriptors() {
            let whole = piece(descriptor);
            let mut at = whole.range.start;
            while at < whole.range.end {
                let inside = ranges.iter().find(|range| range.contains(&at));
                let edge = match inside {
                    Some(range) => range.end,
                    None => ranges
                        .iter()
                        .map(|range| range.start)
                        .filter(|&start| start > at)
                        .min()
                        .unwrap_or(u64::MAX),
                };
                let end = edge.min(whole.range.end);
                let first = changed.len();
                changed.extend_from_slice(descriptor);
                let part = &mut changed[first..];
                if inside.is_some() {
                    put(part, KIND, kind::RESERVED.into());
                    // With attributes Linux would take it for memory, and keep the doorbell from /dev/mem.
                    put(part, ATTRIBUTES, 0);
                }
                put(part, PHYSICAL, at);
                put(part, PAGES, (end - at) / PAGE);
                // Linux calls no SetVirtualAddressMap after a stub, and takes these addresses for their result.
                if word(part, ATTRIBUTES) & RUNTIME != 0 {
                    put(part, VIRTUAL, at);
                }
                at = end;
            }
        }
        changed
    }
}

impl Piece {
    fn is_ram(&self) -> bool {
        // Not the type: reserved memory is RAM for an owner whom nobody names, and flash memory has a type of its own.
        self.attributes & WRITE_BACK != 0
    }
}

fn piece(descriptor: &[u8]) -> Piece {
    let start = word(descriptor, PHYSICAL);
    let bytes = word(descriptor, PAGES).saturating_mul(PAGE);
    Piece {
        kind: word(descriptor, KIND) as u32,
        attributes: word(descriptor, ATTRIBUTES),
        range: start..start.saturating_add(bytes),
    }
}

fn word(descriptor: &[u8], at: usize) -> u64 {
    descriptor[at..]
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn put(descriptor: &mut [u8], at: usize, value: u64) {
    descriptor[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// What the firmware says of a start.
#[derive(Clone, Debug)]
pub struct Handover<'a> {
    /// The command line.
    pub words: &'a str,
    /// The initrd, where the boot loader offers one by UEFI's means.
    pub initrd: Option<Range<u64>>,
    /// Address of UEFI's system table.
    pub system_table: u64,
    /// The memory map when the firmware went.
    pub map: Map<'a>,
    /// Version of its descriptors.
    pub version: u32,
    /// Where it is, and the room there.
    pub map_at: Range<u64>,
}

/// The tree of a machine that UEFI has started: `machine` is what firmware's own tree, or ACPI, says.
///
/// # Errors
///
/// [`TreeError::TooLong`].
pub fn tree(mut machine: DeviceTree, handover: &Handover<'_>) -> Result<Vec<u8>, TreeError> {
    // The firmware may have changed its memory since it wrote them.
    remove_children(&mut machine.root, |node| {
        let kind = node.property("device_type");
        kind.and_then(|kind| kind.value_as::<&str>().ok()) == Some("memory")
    });
    let ram = handover.map.ram().into_iter().map(pair);
    let reg = reg(ram, machine.root.address_space());
    let mut memory = DeviceTreeNode::new_unchecked("memory");
    add(&mut memory, "device_type", "memory");
    add(&mut memory, "reg", reg);
    machine.root.add_child(memory);

    let kept = handover.map.kept().chain([handover.map_at.clone()]);
    machine
        .memory_reservations
        .extend(kept.map(|range| MemoryReservation::new(range.start, range.end - range.start)));

    let chosen = machine.root.remove_child("chosen");
    let chosen = chosen.unwrap_or_else(|| DeviceTreeNode::new_unchecked("chosen"));
    let chosen = machine.root.add_child_mut(chosen);
    add(chosen, "bootargs", handover.words);
    if let Some(initrd) = &handover.initrd {
        add(chosen, "linux,initrd-start", initrd.start);
        add(chosen, "linux,initrd-end", initrd.end);
    }
    add(chosen, "linux,uefi-system-table", handover.system_table);
    add(chosen, MAP_START, handover.map_at.start);
    add(chosen, MAP_SIZE, handover.map.bytes.len() as u32);
    add(chosen, MAP_STRIDE, handover.map.stride as u32);
    add(chosen, "linux,uefi-mmap-desc-ver", handover.version);
    // Whether the firmware has checked what it started: not known.
    add(chosen, "linux,uefi-secure-boot", 1_u32);
    written(&machine)
}

/// Where `tree` says that the memory map is, and the bytes from one descriptor to the next; `None`: UEFI has not started
/// this machine.
pub fn map(tree: Fdt<'_>) -> Option<(Range<u64>, usize)> {
    let chosen = tree.find_node("/chosen")?;
    let start: u64 = chosen.property(MAP_START)?.value_as().ok()?;
    let number = |name| chosen.property(name)?.value_as::<u32>().ok();
    let size = number(MAP_SIZE)?;
    Some((
        start..start.checked_add(size.into())?,
        number(MAP_STRIDE)? as usize,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::{blob, device_tree};

    const STRIDE: usize = 48;

    fn descriptor(kind: u32, start: u64, end: u64, attributes: u64) -> [u8; STRIDE] {
        let mut bytes = [0; STRIDE];
        put(&mut bytes, KIND, kind.into());
        put(&mut bytes, PHYSICAL, start);
        put(&mut bytes, PAGES, (end - start) / PAGE);
        put(&mut bytes, ATTRIBUTES, attributes);
        bytes
    }

    /// Loader's data, runtime services' data, free memory, a flash memory, ACPI's; what the firmware has used until its end,
    /// what it names no owner of.
    fn machine() -> Vec<u8> {
        [
            descriptor(7, 0x5000_0000, 0x8000_0000, WRITE_BACK),
            descriptor(2, 0x4000_0000, 0x4800_0000, WRITE_BACK),
            descriptor(6, 0x4800_0000, 0x5000_0000, WRITE_BACK | RUNTIME),
            descriptor(11, 0x400_0000, 0x800_0000, RUNTIME | 1),
            descriptor(9, 0x9000_0000, 0x9001_0000, WRITE_BACK),
            descriptor(4, 0x9001_0000, 0x9002_0000, WRITE_BACK),
            descriptor(0, 0x9002_0000, 0x9003_0000, WRITE_BACK),
        ]
        .concat()
    }

    fn map_of(bytes: &[u8]) -> Map<'_> {
        let stride = STRIDE;
        Map { bytes, stride }
    }

    #[test]
    fn ram_is_joined_and_what_the_firmware_keeps_is_known() {
        let bytes = machine();
        let map = map_of(&bytes);
        assert_eq!(
            map.ram(),
            [0x4000_0000..0x8000_0000, 0x9000_0000..0x9002_0000]
        );
        let kept: Vec<_> = map.kept().collect();
        assert_eq!(
            kept,
            [
                0x4800_0000..0x5000_0000,
                0x9000_0000..0x9001_0000,
                0x9001_0000..0x9002_0000,
                0x9002_0000..0x9003_0000,
            ]
        );
    }

    #[test]
    fn the_guests_map_has_holes_and_runtime_services_where_they_are() {
        let bytes = machine();
        let holes = [0x4700_0000..0x4900_0000, 0x7fe0_0000..0x8000_0000];
        let changed = map_of(&bytes).without(&holes);
        let pieces: Vec<_> = map_of(&changed)
            .pieces()
            .map(|piece| (piece.kind, piece.range))
            .collect();
        let expected = [
            (7, 0x5000_0000..0x7fe0_0000),
            (0, 0x7fe0_0000..0x8000_0000),
            (2, 0x4000_0000..0x4700_0000),
            (0, 0x4700_0000..0x4800_0000),
            (0, 0x4800_0000..0x4900_0000),
            (6, 0x4900_0000..0x5000_0000),
            (11, 0x400_0000..0x800_0000),
            (9, 0x9000_0000..0x9001_0000),
            (4, 0x9001_0000..0x9002_0000),
            (0, 0x9002_0000..0x9003_0000),
        ];
        assert_eq!(pieces, expected);
        let added = (changed.len() - bytes.len()) / STRIDE;
        assert!(added <= holes.len() * Map::MORE);
        for descriptor in changed.chunks_exact(STRIDE) {
            let runs = word(descriptor, ATTRIBUTES) & RUNTIME != 0;
            let expected = if runs { word(descriptor, PHYSICAL) } else { 0 };
            assert_eq!(word(descriptor, VIRTUAL), expected);
        }
        // No descriptor, or half of one, is no memory.
        assert!(map_of(&bytes[..STRIDE - 1]).ram().is_empty());
    }

    #[test]
    fn a_tree_says_all_that_the_firmware_does() {
        let bytes = machine();
        let mut firmware = DeviceTree::new();
        add(&mut firmware.root, "#address-cells", 2_u32);
        add(&mut firmware.root, "#size-cells", 2_u32);
        let mut memory = DeviceTreeNode::new_unchecked("memory@0");
        add(&mut memory, "device_type", "memory");
        add(&mut memory, "reg", [0_u32, 0, 1, 0]);
        firmware.root.add_child(memory);
        let handover = Handover {
            words: "vpmu.pmu=emulated quiet",
            initrd: Some(0x4100_0000..0x4200_0000),
            system_table: 0x4fff_0018,
            map: map_of(&bytes),
            version: 1,
            map_at: 0x4300_0000..0x4300_1000,
        };
        let tree = tree(firmware, &handover).unwrap();
        let words = device_tree::command_line(&tree);
        assert_eq!(words, Ok("vpmu.pmu=emulated quiet"));
        let open = blob::open(&tree).unwrap();
        let size = bytes.len() as u64;
        assert_eq!(map(open), Some((0x4300_0000..0x4300_0000 + size, STRIDE)));
        let reserved: Vec<_> = open.memory_reservations().collect();
        assert_eq!(reserved.len(), 5);
        let guest = device_tree::for_guest(&tree, &[], 0, None, Some(48)).unwrap();
        let mut reserved = blob::open(&guest).unwrap().memory_reservations();
        assert!(reserved.next().is_none());
        let memories = open.root().children().filter(device_tree::is_memory);
        assert_eq!(memories.count(), 1);
    }
}
