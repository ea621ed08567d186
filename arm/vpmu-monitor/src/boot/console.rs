//! Where the monitor can say something: the serial port that `stdout-path` names, or every one that is
//! there when it names none that is known.
//!
//! Devicetree Specification 0.4, 3.6 (`stdout-path`); PL011: Arm DDI 0183; the registers of the 8250 family
//! lie `reg-shift` apart and are `reg-io-width` bytes wide (Linux, `bindings/serial/8250.yaml`).

use alloc::vec::Vec;

use dtoolkit::{
    Node,
    fdt::{Fdt, FdtNode},
    standard::NodeStandard as _,
};

use super::blob;
use super::nodes::{self, cell, is_compatible, is_usable, text};

/// A serial port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Console {
    /// Address of its registers.
    pub base: u64,
    /// How it is driven.
    pub kind: Kind,
}

/// How a serial port is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Arm's.
    Pl011,
    /// An 8250, or one of the many alike.
    Uart8250 {
        /// Registers are 1 << `shift` bytes apart.
        shift: u8,
        /// Bytes of an access: 1 or 4.
        width: u8,
    },
}

/// The consoles that `tree` has; none when it is no device tree.
pub fn consoles(tree: &[u8]) -> Vec<Console> {
    let Some(tree) = blob::open(tree) else {
        return Vec::new();
    };
    let named = standard_output(tree);
    let mut all = Vec::new();
    for found in nodes::find(tree, |node| kind(node).is_some() && is_usable(node)) {
        let (Some(kind), Some(registers)) = (kind(&found.node), found.registers.first()) else {
            continue;
        };
        let console = Console {
            base: registers.start,
            kind,
        };
        // Both names are the same bytes of the tree.
        if named.is_some_and(|named| core::ptr::eq(named.name(), found.node.name())) {
            return Vec::from([console]);
        }
        all.push(console);
    }
    all
}

/// A serial port for a second guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spare {
    /// Address of its registers.
    pub base: u64,
    /// Its interrupt.
    pub intid: Option<u32>,
}

/// A PL011 at the root of the tree that `stdout-path` does not name.
pub fn spare(tree: &[u8]) -> Option<Spare> {
    let tree = blob::open(tree)?;
    let named = standard_output(tree)?;
    let mut nodes = tree.root().children();
    let spare = nodes.find(|node| {
        kind(node) == Some(Kind::Pl011)
            && is_usable(node)
            && !core::ptr::eq(named.name(), node.name())
    })?;
    let gic = nodes::compatible(tree, "arm,gic-v3");
    let width = gic
        .first()
        .and_then(|gic| cell(&gic.node, "#interrupt-cells"));
    let intids = nodes::interrupts(&spare, width.unwrap_or(3) as usize);
    Some(Spare {
        base: nodes::regions(&spare).next()?.start,
        intid: intids.first().copied(),
    })
}

fn kind(node: &FdtNode<'_>) -> Option<Kind> {
    if node.is_compatible("arm,pl011") {
        return Some(Kind::Pl011);
    }
    let number =
        |name, otherwise| cell(node, name).map_or(Some(otherwise), |n| u8::try_from(n).ok());
    is_compatible(node, |name| {
        matches!(name, "snps,dw-apb-uart" | "ns16550a" | "ns16550" | "ns8250")
    })
    .then_some(Kind::Uart8250 {
        // A wrong tree may say any number, and the registers must stay in the page that is mapped.
        shift: number("reg-shift", 0)?.min(4),
        width: match number("reg-io-width", 1)? {
            4 => 4,
            _ => 1,
        },
    })
}

/// The node that `stdout-path` names, by path (`/pl011@9000000`) or by alias (`serial0:115200n8`).
fn standard_output(tree: Fdt<'_>) -> Option<FdtNode<'_>> {
    let path = text(&tree.find_node("/chosen")?, "stdout-path")?;
    let path = path.split(':').next()?;
    let path = if path.starts_with('/') {
        path
    } else {
        text(&tree.find_node("/aliases")?, path)?
    };
    tree.find_node(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

    fn property(name: &str, value: impl dtoolkit::ToPropertyValue) -> DeviceTreeProperty {
        DeviceTreeProperty::new(name, value).unwrap()
    }

    fn node(name: &str, properties: Vec<DeviceTreeProperty>) -> DeviceTreeNode {
        let mut node = DeviceTreeNode::new(name).unwrap();
        for property in properties {
            node.add_property(property);
        }
        node
    }

    /// Two ports behind a bus that moves them to 0x1_0000_0000, a third one at the root.
    fn tree(chosen: Vec<DeviceTreeProperty>) -> Vec<u8> {
        let mut soc = node(
            "soc",
            vec![
                property("#address-cells", 1u32),
                property("#size-cells", 1u32),
                property("ranges", [0u32, 1, 0, 0x1000_0000]),
            ],
        );
        soc.add_child(node(
            "serial@1000",
            vec![
                property("compatible", "snps,dw-apb-uart"),
                property("reg-shift", 2u32),
                property("reg-io-width", 4u32),
                property("reg", [0x1000u32, 0x100]),
            ],
        ));
        soc.add_child(node(
            "serial@2000",
            vec![
                property("compatible", "ns16550a"),
                property("reg", [0x2000u32, 0x100]),
            ],
        ));
        let mut tree = DeviceTree::new();
        tree.root.add_property(property("#address-cells", 2u32));
        tree.root.add_property(property("#size-cells", 1u32));
        tree.root.add_child(soc);
        tree.root.add_child(node(
            "pl011@9000000",
            vec![
                property("compatible", "arm,pl011"),
                property("interrupts", [0u32, 8, 4]),
                property("reg", [0u32, 0x900_0000, 0x1000]),
            ],
        ));
        tree.root.add_child(node(
            "aliases",
            vec![property("serial0", "/soc/serial@1000")],
        ));
        tree.root.add_child(node("chosen", chosen));
        tree.to_dtb()
    }

    const FIRST: Console = Console {
        base: 0x1_0000_1000,
        kind: Kind::Uart8250 { shift: 2, width: 4 },
    };

    #[test]
    fn the_one_that_is_named() {
        let by = |path| consoles(&tree(vec![property("stdout-path", path)]));
        assert_eq!(by("serial0:115200n8"), [FIRST]);
        assert_eq!(by("/soc/serial@1000"), [FIRST]);
        assert_eq!(by("/pl011@9000000")[0].kind, Kind::Pl011);
    }

    #[test]
    fn a_spare_one_is_not_the_console() {
        let with = |named| spare(&tree(vec![property("stdout-path", named)]));
        let port = Spare {
            base: 0x900_0000,
            intid: Some(40),
        };
        assert_eq!(with("serial0"), Some(port));
        assert_eq!(with("/pl011@9000000"), None);
    }

    #[test]
    fn all_when_none_is_named() {
        for chosen in [vec![], vec![property("stdout-path", "/nothing")]] {
            let all = consoles(&tree(chosen));
            assert_eq!(all.len(), 3);
            assert_eq!(all[0], FIRST);
            assert_eq!(all[1].kind, Kind::Uart8250 { shift: 0, width: 1 });
            assert_eq!(all[2].base, 0x900_0000);
        }
        assert!(consoles(&[0; 8]).is_empty());
    }
}
