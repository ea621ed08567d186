use dtoolkit::model::DeviceTreeNode;

use core::slice::from_ref;

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
    let its = |name, phandle: u32| {
        node(
            name,
            vec![
                property("compatible", ITS),
                property("phandle", phandle),
                property("reg", [0u32, 0x808_0000, 0, 0x2_0000]),
            ],
        )
    };
    for mut child in [
        node(
            "pcie@10000000",
            vec![
                property("compatible", "pci-host-ecam-generic"),
                property("msi-map", [0u32, 0x8007, 0, 0x1_0000]),
                property("msi-map-mask", 0xffffu32),
                property("#address-cells", 3u32),
                property("#size-cells", 2u32),
                property("ranges", [0x300_0000u32, 0x80, 0, 0x80, 0, 0x80, 0]),
            ],
        ),
        // Sends its messages elsewhere.
        node("other@0", vec![property("msi-parent", 0x9009u32)]),
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
                property("#interrupt-cells", 3u32),
                property("#address-cells", 2u32),
                property("#size-cells", 2u32),
                property("ranges", [0u8; 0].as_slice()),
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
        if child.name().starts_with("intc") {
            child.add_child(its("its@8080000", 0x8007));
        }
        tree.root.add_child(child);
    }
    tree.to_dtb()
}

#[test]
fn facts_come_from_the_tree() {
    let machine = Machine::read(&virt()).unwrap();
    assert_eq!(machine.ram, vec![0x4000_0000..0x8000_0000]);
    assert_eq!(machine.consoles[0].base, 0x900_0000);
    assert_eq!(machine.redistributors, from_ref(&(0x80a_0000..0x900_0000)));
    assert_eq!(machine.maintenance_intid, 25);
    assert_eq!(machine.pmu_intid, Some(23));
    assert_eq!(machine.initrd, Some(0x4800_0000..0x4900_0000));
}

#[test]
fn the_guest_sees_neither_the_monitors_memory_nor_its_words() {
    let tree = for_guest(&virt(), &(0x4020_0000..0x4040_0000), 0x4020_0000).unwrap();
    let machine = Machine::read(&tree).unwrap();
    assert_eq!(
        machine.ram,
        [0x4000_0000..0x4020_0000, 0x4040_0000..0x8000_0000]
    );
    assert_eq!(command_line(&tree), Ok("console=ttyAMA0 quiet"));
}

#[test]
fn what_lies_highest_is_found() {
    // The PCI host's window.
    assert_eq!(Machine::read(&virt()).unwrap().end, 0x100_0000_0000);
}

#[test]
fn the_guest_has_no_interrupt_translation_service() {
    assert_eq!(
        Machine::read(&virt()).unwrap().its,
        from_ref(&(0x808_0000..0x80a_0000))
    );
    let tree = for_guest(&virt(), &(0..0), 0).unwrap();
    assert_eq!(Machine::read(&tree).unwrap().its, []);
    let tree = Fdt::new(&tree).unwrap();
    let pcie = tree.find_node("/pcie@10000000").unwrap();
    assert!(pcie.property("msi-map").is_none());
    assert!(pcie.property("msi-map-mask").is_none());
    assert!(pcie.property("ranges").is_some());
    let other = tree.find_node("/other@0").unwrap();
    assert!(other.property("msi-parent").is_some());
}

#[test]
fn the_guest_is_told_where_the_doorbell_is() {
    let tree = for_guest(&virt(), &(0..0), 0x1_2345_6000).unwrap();
    let tree = Fdt::new(&tree).unwrap();
    let property = tree.find_node("/chosen").unwrap();
    let property = property.property(DOORBELL).unwrap();
    assert_eq!(property.value(), 0x1_2345_6000_u64.to_be_bytes());
}

/// A board with one cell for an address, RAM in two nodes, a bus, several redistributor regions, a
/// GIC with four cells to an interrupt and a PMU of the core's own name.
#[test]
fn boards_differ() {
    let mut tree = DeviceTree::new();
    tree.root.add_property(property("#address-cells", 1u32));
    tree.root.add_property(property("#size-cells", 1u32));
    for (name, reg) in [
        ("memory@80000000", [0x8000_0000u32, 0x4000_0000]),
        ("memory@0", [0, 0x1000_0000]),
    ] {
        let kind = property("device_type", "memory");
        tree.root
            .add_child(node(name, vec![kind, property("reg", reg)]));
    }
    let mut soc = node(
        "soc",
        vec![
            property("#address-cells", 1u32),
            property("#size-cells", 1u32),
            property("ranges", [0u32, 0xf000_0000, 0x0100_0000]),
        ],
    );
    soc.add_child(node(
        "interrupt-controller@10000",
        vec![
            property("compatible", "arm,gic-v3"),
            property("#interrupt-cells", 4u32),
            property("#redistributor-regions", 2u32),
            property("redistributor-stride", [0u32, 0x4_0000]),
            property("interrupts", [1u32, 9, 4, 0]),
            property(
                "reg",
                [
                    0x1_0000u32,
                    0x1_0000,
                    0x10_0000,
                    0x10_0000,
                    0x30_0000,
                    0x10_0000,
                    0x50_0000,
                    0x1000,
                ],
            ),
        ],
    ));
    tree.root.add_child(soc);
    for (name, compatible, number) in [
        ("dsu", "arm,dsu-pmu", 5u32),
        ("pmu", "arm,cortex-a72-pmu", 7),
    ] {
        let properties = vec![
            property("compatible", compatible),
            property("interrupts", [1, number, 4, 0]),
        ];
        tree.root.add_child(node(name, properties));
    }
    let blob = tree.to_dtb();
    let machine = Machine::read(&blob).unwrap();
    assert_eq!(machine.ram, [0x8000_0000..0xc000_0000, 0..0x1000_0000]);
    assert_eq!(machine.distributor, 0xf001_0000..0xf002_0000);
    assert_eq!(
        machine.redistributors,
        [0xf010_0000..0xf020_0000, 0xf030_0000..0xf040_0000]
    );
    assert_eq!(machine.redistributor_stride, Some(0x4_0000));
    assert_eq!(
        (machine.maintenance_intid, machine.pmu_intid),
        (25, Some(23))
    );
    // Two banks, of which one loses its end.
    let guest = for_guest(&blob, &(0xbf80_0000..0xc000_0000), 0).unwrap();
    assert_eq!(
        Machine::read(&guest).unwrap().ram,
        [0x8000_0000..0xbf80_0000, 0..0x1000_0000]
    );
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
