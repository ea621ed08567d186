//! ACPI's static tables, written down as a device tree for the monitor. The guest reads ACPI itself.
//!
//! ACPI Specification 6.5: 5.2.5 (RSDP), 5.2.12 (MADT), 5.2.9 (FADT), 5.2.25 (GTDT); SPCR is Microsoft's. Devices that only
//! AML describes are not known here, so the guest gets every address that is not kept from it.

use alloc::{format, string::String, vec::Vec};

use dtoolkit::{
    model::{DeviceTree, DeviceTreeNode},
    standard::AddressSpaceProperties,
};

use super::{
    device_tree::TreeError,
    nodes::{add, reg},
    uefi,
};
use crate::regs::GIC_FRAME;

/// Where the length of a table is, and its checksum.
pub const LENGTH: usize = 4;
const CHECKSUM: usize = 9;
/// Bytes of a table's header.
pub const HEADER: usize = 36;
/// Bytes of an RSDP of ACPI 2.0.
pub const RSDP: usize = 36;

/// Types of the MADT's structures.
mod kind {
    pub(super) const CPU: u8 = 0xb;
    pub(super) const DISTRIBUTOR: u8 = 0xc;
    pub(super) const REDISTRIBUTORS: u8 = 0xe;
    pub(super) const ITS: u8 = 0xf;
    /// Nobody's: the range is an implementer's.
    pub(super) const NOTHING: u8 = 0xff;
}

/// Bytes of a distributor, of a redistributor's frames (GICv3, GICv4), and of an interrupt translation service: GICv4.1's.
const DISTRIBUTOR: u64 = GIC_FRAME;
const REDISTRIBUTOR: [u64; 2] = [2 * GIC_FRAME, 4 * GIC_FRAME];
const ITS: u64 = 4 * GIC_FRAME;

/// Two words for each address and for each length.
const CELLS: AddressSpaceProperties = AddressSpaceProperties {
    address_cells: 2,
    size_cells: 2,
};

/// The tables that say what the monitor must know.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    /// The MADT, which [`hide_its`] changes for the guest.
    pub madt: &'a [u8],
    fadt: &'a [u8],
    gtdt: &'a [u8],
    /// The serial port, where the firmware names one.
    spcr: Option<&'a [u8]>,
}

impl<'a> Tables<'a> {
    /// Finds the tables behind an RSDP. `table` returns what is at an address, as long as its header says.
    ///
    /// # Errors
    ///
    /// [`TreeError::Missing`] names what is absent.
    pub fn find(rsdp: &[u8], table: impl Fn(u64) -> Option<&'a [u8]>) -> Result<Self, TreeError> {
        let missing = TreeError::Missing;
        // The RSDT beside it has addresses of 32 bits, and is absent where RAM begins above them.
        let xsdt = (rsdp.starts_with(b"RSD PTR ")).then(|| number(rsdp, 24, 8));
        let xsdt = xsdt.and_then(&table).ok_or(missing("XSDT (ACPI)"))?;
        let entries = xsdt.get(HEADER..).unwrap_or_default().chunks_exact(8);
        let all: Vec<_> = entries.filter_map(|at| table(number(at, 0, 8))).collect();
        let find = |signature: &[u8]| all.iter().copied().find(|t| t.starts_with(signature));
        Ok(Self {
            madt: find(b"APIC").ok_or(missing("MADT (ACPI)"))?,
            fadt: find(b"FACP").ok_or(missing("FADT (ACPI)"))?,
            gtdt: find(b"GTDT").ok_or(missing("GTDT (ACPI)"))?,
            spcr: find(b"SPCR"),
        })
    }

    /// The machine's device tree, without memory. `chosen` is what a boot loader has to say.
    pub fn tree(&self, chosen: Option<DeviceTreeNode>) -> DeviceTree {
        let mut tree = DeviceTree::new();
        let root = &mut tree.root;
        add(root, "#address-cells", 2_u32);
        add(root, "#size-cells", 2_u32);
        let mut chosen = chosen.unwrap_or_else(|| DeviceTreeNode::new_unchecked("chosen"));
        add(&mut chosen, uefi::ACPI, [0_u8; 0].as_slice());
        if let Some((port, path)) = self.console() {
            add(&mut chosen, "stdout-path", path.as_str());
            root.add_child(port);
        }
        root.add_child(chosen);
        root.add_child(self.cpus());
        root.add_child(self.gic());
        let mut timer = compatible("timer", "arm,armv8-timer");
        // Secure, EL1's, the virtual one, EL2's.
        let intids = [48, 56, 64, 72].map(|at| number(self.gtdt, at, 4) as u32);
        add(&mut timer, "interrupts", interrupts(&intids).as_slice());
        root.add_child(timer);
        if let Some(pmu) = self.pmu() {
            root.add_child(pmu);
        }
        // ARM_BOOT_ARCH: PSCI is there; it is called by HVC.
        let flags = number(self.fadt, 129, 2);
        if flags & 1 != 0 {
            let mut psci = DeviceTreeNode::new_unchecked("psci");
            let method = if flags & 2 != 0 { "hvc" } else { "smc" };
            add(&mut psci, "method", method);
            root.add_child(psci);
        }
        // A bus of all addresses, for devices that nothing here describes.
        let mut bus = DeviceTreeNode::new_unchecked("bus");
        add(&mut bus, "#address-cells", 2_u32);
        add(&mut bus, "#size-cells", 2_u32);
        add(&mut bus, "ranges", [0, 0, 0, 0, 1_u32 << 16, 0]);
        root.add_child(bus);
        tree
    }

    /// The MADT's structures of a type.
    fn structures(&self, kind: u8) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        structures(self.madt)
            .filter(move |&(_, of, _)| of == kind)
            .map(|(_, _, structure)| structure)
    }

    /// The CPUs that can be used.
    fn usable(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        // A CPU that could be plugged in later has no redistributor yet.
        self.structures(kind::CPU)
            .filter(|cpu| number(cpu, 12, 4) & 1 != 0)
    }

    fn cpus(&self) -> DeviceTreeNode {
        let mut cpus = DeviceTreeNode::new_unchecked("cpus");
        add(&mut cpus, "#address-cells", 2_u32);
        add(&mut cpus, "#size-cells", 0_u32);
        for (n, cpu) in self.usable().enumerate() {
            let mut node = DeviceTreeNode::new_unchecked(format!("cpu@{n}"));
            add(&mut node, "reg", number(cpu, 68, 8));
            // Linux takes the parking protocol only where PSCI is missing; a mailbox would be there all the same.
            if number(cpu, 24, 8) == 0 {
                add(&mut node, "enable-method", "psci");
            }
            cpus.add_child(node);
        }
        cpus
    }

    /// The interrupt controller. Before GICv3 it is none that the monitor knows.
    fn gic(&self) -> DeviceTreeNode {
        let distributor = self.structures(kind::DISTRIBUTOR).next();
        let version = distributor.map_or(0, |distributor| number(distributor, 20, 1));
        // The reader then says that there is no GICv3.
        let name = if version >= 3 { "arm,gic-v3" } else { "none" };
        let mut gic = compatible("intc", name);
        let mut regions: Vec<_> = self
            .structures(kind::REDISTRIBUTORS)
            .map(|structure| (number(structure, 4, 8), number(structure, 12, 4)))
            .collect();
        // Firmware describes them by regions or by CPUs, not both.
        if regions.is_empty() {
            let length = REDISTRIBUTOR[usize::from(version > 3)];
            regions.extend(self.usable().map(|cpu| (number(cpu, 60, 8), length)));
        }
        let count = regions.len() as u32;
        let start = distributor.map_or(0, |distributor| number(distributor, 8, 8));
        regions.insert(0, (start, DISTRIBUTOR));
        add(&mut gic, "reg", reg(regions, CELLS));
        add(&mut gic, "#redistributor-regions", count);
        add(&mut gic, "#interrupt-cells", 3_u32);
        add(&mut gic, "#address-cells", 2_u32);
        add(&mut gic, "#size-cells", 2_u32);
        add(&mut gic, "ranges", [0_u8; 0].as_slice());
        let maintenance = self.usable().next().map(|cpu| number(cpu, 56, 4) as u32);
        let maintenance = interrupts(maintenance.as_slice());
        add(&mut gic, "interrupts", maintenance.as_slice());
        for (n, its) in self.structures(kind::ITS).enumerate() {
            let mut node = compatible(&format!("its@{n}"), "arm,gic-v3-its");
            add(&mut node, "reg", reg([(number(its, 8, 8), ITS)], CELLS));
            gic.add_child(node);
        }
        gic
    }

    /// The PMU: one PPI for all CPUs, or an SPI for each.
    fn pmu(&self) -> Option<DeviceTreeNode> {
        let mut intids: Vec<u32> = self.usable().map(|cpu| number(cpu, 20, 4) as u32).collect();
        let first = *intids.first()?;
        if (16..32).contains(&first) {
            // A CPU without it, whose number is 0, leaves all without: the tree has no word for that.
            intids.retain(|&intid| intid != first);
            if !intids.is_empty() {
                return None;
            }
            intids.push(first);
        } else if intids.iter().any(|&intid| intid < 32) {
            return None;
        }
        let mut pmu = compatible("pmu", "arm,armv8-pmuv3");
        add(&mut pmu, "interrupts", interrupts(&intids).as_slice());
        Some(pmu)
    }

    /// The serial port, a PL011 or the part of it that SBSA asks for, and its path.
    fn console(&self) -> Option<(DeviceTreeNode, String)> {
        let spcr = self.spcr?;
        let (kind, space) = (number(spcr, 36, 1), number(spcr, 40, 1));
        // An 8250 of a SPCR does not say how far its registers are apart.
        if !matches!(kind, 3 | 0xd | 0xe) || space != 0 {
            return None;
        }
        let base = number(spcr, 44, 8);
        let name = format!("serial@{base:x}");
        let mut port = compatible(&name, "arm,pl011");
        add(&mut port, "reg", reg([(base, 0x1000)], CELLS));
        Some((port, format!("/{name}")))
    }
}

/// Takes interrupt translation services, which write memory by physical address, out of a MADT.
pub fn hide_its(madt: &mut [u8]) {
    let found: Vec<usize> = structures(madt)
        .filter(|&(_, of, _)| of == kind::ITS)
        .map(|(at, _, _)| at)
        .collect();
    for at in found {
        // All bytes of a table add up to zero.
        madt[CHECKSUM] = madt[CHECKSUM].wrapping_sub(kind::NOTHING.wrapping_sub(madt[at]));
        madt[at] = kind::NOTHING;
    }
}

/// The structures of a MADT: place, type, bytes. They end at one that cannot be.
fn structures(madt: &[u8]) -> impl Iterator<Item = (usize, u8, &[u8])> {
    let mut at = HEADER + 8;
    core::iter::from_fn(move || {
        let rest = madt.get(at..)?;
        let &[of, length, ..] = rest else {
            return None;
        };
        // One of no length would be found for ever.
        let structure = rest.get(..usize::from(length).max(2))?;
        let place = at;
        at += structure.len();
        Some((place, of, structure))
    })
}

/// A little-endian number of so many bytes; 0 where there is none.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    // Tables of earlier versions are shorter.
    let bytes = bytes.get(at..at + length).unwrap_or_default();
    bytes
        .iter()
        .rev()
        .fold(0, |all, &byte| all << 8 | u64::from(byte))
}

fn compatible(name: &str, with: &str) -> DeviceTreeNode {
    let mut node = DeviceTreeNode::new_unchecked(name);
    add(&mut node, "compatible", with);
    node
}

/// The device tree's `interrupts` for INTIDs: PPIs (1) begin at 16, SPIs (0) at 32; all are levels.
fn interrupts(intids: &[u32]) -> Vec<u32> {
    intids
        .iter()
        .flat_map(|&intid| match intid {
            32.. => [0, intid - 32, 4],
            _ => [1, intid.saturating_sub(16), 4],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::{
        blob,
        console::Kind,
        device_tree::{Machine, for_guest},
        uefi::{Handover, Map},
    };
    use core::slice::from_ref;

    use dtoolkit::Node as _;

    fn table(signature: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
        let mut table = signature.to_vec();
        table.resize(HEADER, 0);
        for part in parts {
            table.extend_from_slice(part);
        }
        let length = table.len() as u32;
        table[LENGTH..LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        table[CHECKSUM] = sum.wrapping_neg();
        table
    }

    fn fields(length: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = alloc::vec![0; length];
        for &(at, field) in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
        }
        bytes
    }

    /// A CPU that is there, or only could be.
    fn cpu(affinity: u64, pmi: u32, enabled: u8) -> Vec<u8> {
        let redistributor = 0x80a_0000_u64 + (affinity << 17);
        fields(
            80,
            &[
                (0, &[kind::CPU, 80]),
                (12, &[enabled]),
                (20, &pmi.to_le_bytes()),
                (56, &25_u32.to_le_bytes()),
                (60, &redistributor.to_le_bytes()),
                (68, &affinity.to_le_bytes()),
            ],
        )
    }

    fn madt(pmis: [u32; 2]) -> Vec<u8> {
        let distributor = fields(
            24,
            &[
                (0, &[kind::DISTRIBUTOR, 24]),
                (8, &0x800_0000_u64.to_le_bytes()),
                (20, &[3]),
            ],
        );
        let its = fields(
            20,
            &[(0, &[kind::ITS, 20]), (8, &0x808_0000_u64.to_le_bytes())],
        );
        table(
            b"APIC",
            &[
                &[0; 8],
                &cpu(0, pmis[0], 1),
                &distributor,
                &its,
                &cpu(1, pmis[1], 1),
                &cpu(2, 23, 0),
            ],
        )
    }

    /// All tables of a machine, each at a multiple of 0x1000, and its RSDP.
    fn machine(pmis: [u32; 2]) -> (Vec<u8>, Vec<Vec<u8>>) {
        let timers: Vec<u8> = [29_u32, 0, 30, 0, 27, 0, 26]
            .iter()
            .flat_map(|intid| intid.to_le_bytes())
            .collect();
        let entries: Vec<u8> = (1..5_u64)
            .flat_map(|n| (n * 0x1000).to_le_bytes())
            .collect();
        let port = fields(40, &[(0, &[3]), (8, &0x900_0000_u64.to_le_bytes())]);
        let tables = alloc::vec![
            table(b"XSDT", &[&entries]),
            madt(pmis),
            table(b"FACP", &[&fields(100, &[(93, &[1])])]),
            table(b"GTDT", &[&[0; 12], &timers]),
            table(b"SPCR", &[&port]),
        ];
        let mut rsdp = b"RSD PTR ".to_vec();
        rsdp.resize(RSDP, 0);
        (rsdp, tables)
    }

    fn read<'a>(rsdp: &[u8], tables: &'a [Vec<u8>]) -> Result<Tables<'a>, TreeError> {
        let table = |at: u64| tables.get(at as usize / 0x1000).map(Vec::as_slice);
        Tables::find(rsdp, table)
    }

    fn tree(pmis: [u32; 2]) -> Vec<u8> {
        let (rsdp, tables) = machine(pmis);
        tree_of(&rsdp, &tables)
    }

    fn tree_of(rsdp: &[u8], tables: &[Vec<u8>]) -> Vec<u8> {
        let mut memory = alloc::vec![0; 48];
        memory[0] = 7;
        memory[8..16].copy_from_slice(&0x4000_0000_u64.to_le_bytes());
        memory[24..32].copy_from_slice(&0x4_0000_u64.to_le_bytes());
        memory[32] = 8;
        let handover = Handover {
            words: "vpmu.host_counters=1 quiet",
            initrd: None,
            system_table: 0x4000_0000,
            map: Map {
                bytes: &memory,
                stride: 48,
            },
            version: 1,
            map_at: 0x4100_0000..0x4100_1000,
        };
        let tables = read(rsdp, tables).unwrap();
        uefi::tree(tables.tree(None), &handover).unwrap()
    }

    #[test]
    fn cpus_that_wait_for_a_word_in_memory_are_refused() {
        let (rsdp, mut tables) = machine([23, 23]);
        let second = cpu(1, 23, 1);
        let at = tables[1].windows(80).position(|bytes| bytes == second);
        tables[1][at.unwrap() + 24] = 0x80;
        let machine = Machine::read(&tree_of(&rsdp, &tables));
        assert!(matches!(machine, Err(TreeError::Missing(_))));
    }

    #[test]
    fn a_machine_is_read_from_its_tables() {
        let machine = Machine::read(&tree([23, 23])).unwrap();
        assert_eq!(machine.ram, from_ref(&(0x4000_0000..0x8000_0000)));
        assert_eq!(machine.end, 1 << 48);
        assert_eq!(machine.cpus, [0, 1]);
        assert_eq!(machine.distributor, 0x800_0000..0x801_0000);
        assert_eq!(
            machine.redistributors,
            [0x80a_0000..0x80c_0000, 0x80c_0000..0x80e_0000]
        );
        assert_eq!(machine.its, from_ref(&(0x808_0000..0x80c_0000)));
        assert_eq!(machine.maintenance_intid, 25);
        assert_eq!(machine.pmu_intids, [Some(23), Some(23)]);
        assert_eq!(machine.timer_intids, [29, 30, 27, 26]);
        assert_eq!(machine.consoles[0].kind, Kind::Pl011);
        assert_eq!(machine.consoles[0].base, 0x900_0000);
        let spis = Machine::read(&tree([40, 41])).unwrap();
        assert_eq!(spis.pmu_intids, [Some(40), Some(41)]);
        // A PMU without an interrupt on one CPU has none.
        let none = Machine::read(&tree([23, 0])).unwrap();
        assert_eq!(none.pmu_intids, [None, None]);
    }

    #[test]
    fn the_guest_gets_nothing_but_what_a_boot_loader_says() {
        let tree = tree([23, 23]);
        let guest = for_guest(
            &tree,
            from_ref(&(0x7fe0_0000..0x8000_0000)),
            0x7fff_f000,
            None,
            Some(48),
        );
        let guest = guest.unwrap();
        let guest = blob::open(&guest).unwrap();
        let names: Vec<_> = guest.root().children().map(|node| node.name()).collect();
        assert_eq!(names, ["chosen"]);
        assert!(guest.memory_reservations().next().is_none());
    }

    #[test]
    fn an_its_is_hidden_and_the_table_still_adds_up() {
        let mut madt = madt([23, 23]);
        hide_its(&mut madt);
        let sum = madt.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(sum, 0);
        assert!(structures(&madt).all(|(_, of, _)| of != kind::ITS));
        assert_eq!(structures(&madt).count(), 5);
    }

    #[test]
    fn what_is_absent_is_named_and_what_is_cut_is_read_no_further() {
        let (rsdp, tables) = machine([23, 23]);
        assert!(read(&[0; RSDP], &tables).is_err());
        assert!(matches!(
            read(&rsdp, &tables[..2]),
            Err(TreeError::Missing("FADT (ACPI)"))
        ));
        for length in 0..tables[1].len() {
            let mut cut = tables.clone();
            cut[1].truncate(length.max(4));
            let _ = read(&rsdp, &cut).unwrap().tree(None).to_dtb();
            hide_its(&mut cut[1]);
        }
    }
}
