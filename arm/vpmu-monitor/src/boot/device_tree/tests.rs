use core::slice::from_ref;

use dtoolkit::model::{DeviceTreeNode, DeviceTreeProperty};

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

/// So many CPUs, with the phandles 0x100, 0x101 and so on.
fn cpus(count: u32) -> DeviceTreeNode {
    let mut cpus = node(
        "cpus",
        vec![
            property("#address-cells", 1u32),
            property("#size-cells", 0u32),
        ],
    );
    for n in 0..count {
        let properties = vec![
            property("reg", n),
            property("phandle", 0x100 + n),
            property("enable-method", "psci"),
        ];
        cpus.add_child(node(&format!("cpu@{n}"), properties));
    }
    cpus
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
        cpus(2),
        node("psci", vec![property("method", "smc")]),
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
    assert_eq!(machine.pmu_intids, [Some(23), Some(23)]);
    assert_eq!(machine.initrd, Some(0x4800_0000..0x4900_0000));
}

#[test]
fn the_guest_sees_neither_the_monitors_memory_nor_its_words() {
    let tree = for_guest(
        &virt(),
        from_ref(&(0x4020_0000..0x4040_0000)),
        0x4020_0000,
        None,
        None,
    )
    .unwrap();
    let machine = Machine::read(&tree).unwrap();
    assert_eq!(
        machine.ram,
        [0x4000_0000..0x4020_0000, 0x4040_0000..0x8000_0000]
    );
    assert_eq!(command_line(&tree), Ok("console=ttyAMA0 quiet"));
}

/// A tree that `change` has changed.
fn changed(tree: &[u8], change: impl FnOnce(&mut DeviceTree)) -> Vec<u8> {
    let mut changed = DeviceTree::from_fdt(&blob::open(tree).unwrap());
    change(&mut changed);
    changed.to_dtb()
}

#[test]
fn cpus_that_a_guest_could_start_at_el2_are_refused() {
    let refused = Err(TreeError::Missing("PSCI by SMC for its other CPUs"));
    for status in ["okay", "disabled"] {
        let tree = changed(&virt(), |tree| {
            let cpus = tree.root.child_mut("cpus").unwrap();
            let cpu = cpus.child_mut("cpu@1").unwrap();
            add(cpu, "enable-method", "spin-table");
            add(cpu, "status", status);
        });
        assert_eq!(Machine::read(&tree), refused);
    }
    let by_hvc = changed(&virt(), |tree| {
        add(tree.root.child_mut("psci").unwrap(), "method", "hvc");
    });
    assert_eq!(Machine::read(&by_hvc), refused);
    // A machine of one CPU has nothing to start.
    let alone = changed(&by_hvc, |tree| {
        tree.root.child_mut("cpus").unwrap().remove_child("cpu@1");
    });
    assert_eq!(Machine::read(&alone).unwrap().cpus, [0]);
}

#[test]
fn memory_that_no_cpu_may_map_is_known() {
    let tree = changed(&virt(), |tree| {
        let mut reserved = node("reserved-memory", Vec::new());
        for (name, start, attribute) in [
            ("a", 0x4800_0000u32, "reusable"),
            ("b", 0x4900_0000, "no-map"),
        ] {
            let reg = property("reg", [0, start, 0, 0x1000]);
            reserved.add_child(node(
                name,
                vec![reg, property(attribute, [0u8; 0].as_slice())],
            ));
        }
        add(&mut reserved, "#address-cells", 2u32);
        add(&mut reserved, "#size-cells", 2u32);
        tree.root.add_child(reserved);
        // The secure world's, as QEMU has it.
        let secure = [
            property("device_type", "memory"),
            property("status", "disabled"),
            property("reg", [0u32, 0xe00_0000, 0, 0x100_0000]),
        ];
        tree.root.add_child(node("secram@e000000", secure.into()));
    });
    let machine = Machine::read(&tree).unwrap();
    assert_eq!(
        machine.reserved,
        [0x4800_0000..0x4800_1000, 0x4900_0000..0x4900_1000]
    );
    assert_eq!(machine.ram, from_ref(&(0x4000_0000..0x8000_0000)));
    assert_eq!(machine.unmapped, from_ref(&(0x4900_0000..0x4900_1000)));
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
    let tree = for_guest(&virt(), from_ref(&(0..0)), 0, None, None).unwrap();
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
    let tree = for_guest(&virt(), from_ref(&(0..0)), 0x1_2345_6000, None, None).unwrap();
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
    tree.root.add_child(cpus(1));
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
        (machine.maintenance_intid, machine.pmu_intids.as_slice()),
        (25, [Some(23)].as_slice())
    );
    // Two banks, of which one loses its end.
    let guest = for_guest(&blob, from_ref(&(0xbf80_0000..0xc000_0000)), 0, None, None).unwrap();
    assert_eq!(
        Machine::read(&guest).unwrap().ram,
        [0x8000_0000..0xbf80_0000, 0..0x1000_0000]
    );
}

/// A tree with four CPUs and these PMU nodes, interrupts of `width` cells, and two partitions of two CPUs each.
fn with_pmus(width: u32, pmus: Vec<Vec<DeviceTreeProperty>>) -> Vec<Option<u32>> {
    let mut tree = DeviceTree::from_fdt(&Fdt::new(&virt()).unwrap());
    tree.root.remove_child("pmu");
    tree.root.remove_child("cpus");
    tree.root.add_child(cpus(4));
    let gic = tree.root.child_mut("intc@8000000").unwrap();
    *gic.property_mut("#interrupt-cells").unwrap() = property("#interrupt-cells", width);
    *gic.property_mut("interrupts").unwrap() = property(
        "interrupts",
        [&[1u32, 9, 4][..], &[0].repeat(width as usize - 3)]
            .concat()
            .as_slice(),
    );
    let mut partitions = node("ppi-partitions", vec![]);
    for (n, affinity) in [[0x100u32, 0x101], [0x103, 0x102]].into_iter().enumerate() {
        let phandle = property("phandle", 0x200 + n as u32);
        let affinity = property("affinity", affinity);
        partitions.add_child(node(
            &format!("interrupt-partition-{n}"),
            vec![phandle, affinity],
        ));
    }
    gic.add_child(partitions);
    for (n, properties) in pmus.into_iter().enumerate() {
        tree.root.add_child(node(&format!("pmu-{n}"), properties));
    }
    Machine::read(&tree.to_dtb()).unwrap().pmu_intids
}

/// The binding `arm,pmu`: a cluster's PPI has a partition in its fourth cell.
#[test]
fn clusters_have_pmus_of_their_own() {
    let pmu = |core, ppi: u32, partition: u32| {
        vec![
            property("compatible", core),
            property("interrupts", [1, ppi, 4, partition]),
        ]
    };
    let little = pmu("arm,cortex-a53-pmu", 7, 0x200);
    let big = pmu("arm,cortex-a72-pmu", 6, 0x201);
    assert_eq!(
        with_pmus(4, vec![little.clone(), big]),
        [Some(23), Some(23), Some(22), Some(22)]
    );
    // No partition is zero, or none that there is.
    assert_eq!(
        with_pmus(4, vec![pmu("arm,armv8-pmuv3", 7, 0)]),
        [Some(23); 4]
    );
    assert_eq!(
        with_pmus(4, vec![little, pmu("arm,cortex-a72-pmu", 6, 0x999)]),
        [Some(23), Some(23), None, None]
    );
}

/// One SPI for each CPU, as boards without a PPI for it have; `interrupt-affinity` says which is whose.
#[test]
fn shared_interrupts_are_each_a_cpus() {
    let spis = |numbers: &[u32]| {
        let specifiers: Vec<u32> = numbers.iter().flat_map(|&spi| [0, spi, 4]).collect();
        vec![
            property("compatible", "arm,cortex-a57-pmu"),
            property("interrupts", specifiers.as_slice()),
        ]
    };
    let affine = |numbers: &[u32], cpus: &[u32]| {
        let mut properties = spis(numbers);
        properties.push(property("interrupt-affinity", cpus));
        properties
    };
    let clusters = vec![
        affine(&[10, 11], &[0x103, 0x102]),
        affine(&[20, 21], &[0x100, 0x101]),
    ];
    assert_eq!(
        with_pmus(3, clusters),
        [Some(52), Some(53), Some(43), Some(42)]
    );
    // Without the property, in the order of the CPUs.
    assert_eq!(
        with_pmus(3, vec![spis(&[7, 8, 9, 10])]),
        [Some(39), Some(40), Some(41), Some(42)]
    );
    assert_eq!(with_pmus(3, vec![spis(&[7])]), [Some(39), None, None, None]);
    // More than there are CPUs, fewer than there are interrupts, phandles of nobody.
    assert_eq!(
        with_pmus(3, vec![spis(&[1, 2, 3, 4, 5, 6])]),
        [Some(33), Some(34), Some(35), Some(36)]
    );
    assert_eq!(
        with_pmus(3, vec![affine(&[1, 2, 3], &[0x101, 0x777])]),
        [None, Some(33), None, None]
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
