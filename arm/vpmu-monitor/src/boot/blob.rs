//! Opening a device tree as machines have it.
//!
//! The specification gives a name 31 characters and an alphabet (Devicetree Specification 0.4, 2.2.1 and 2.2.4). Linux
//! asks for neither, and its bindings have longer names (`snps,quirk-frame-length-adjustment`), so that a tree with such
//! names is none for a strict reader and a good one for every kernel.

use dtoolkit::{error::FdtErrorKind, fdt::Fdt};

const BEGIN_NODE: u32 = 1;
const END_NODE: u32 = 2;
const PROP: u32 = 3;
const NOP: u32 = 4;
const END: u32 = 9;

/// The tree in `bytes`, its names of any length and any characters; `None` when it is none.
pub fn open(bytes: &[u8]) -> Option<Fdt<'_>> {
    match Fdt::new(bytes) {
        Ok(tree) => Some(tree),
        // Header and reservations are checked before the first name, and what comes after it is checked here.
        Err(error)
            if matches!(
                error.kind,
                FdtErrorKind::InvalidNodeName | FdtErrorKind::InvalidPropertyName
            ) =>
        {
            is_whole(bytes)?;
            Some(Fdt::new_unchecked(bytes))
        }
        Err(_) => None,
    }
}

/// Bytes of the tree's structure and strings (5.2), without what a machine leaves free behind them.
pub fn used(bytes: &[u8]) -> u64 {
    let word = |at| u64::from(word(bytes, at).unwrap_or(0));
    word(32) + word(36)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Walks the structure block (5.4): each token is one that may be there, and all of it lies in the tree.
fn is_whole(bytes: &[u8]) -> Option<()> {
    let word = |at| word(bytes, at);
    let name = |at: usize, end: usize| {
        let rest = bytes.get(at..end)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        core::str::from_utf8(&rest[..end]).ok()
    };
    // Header and size of both blocks are right.
    let strings = word(12)? as usize;
    let strings_end = strings + word(32)? as usize;
    let mut at = word(8)? as usize;
    let mut depth = 0_usize;
    // A node's properties come before its children.
    let mut properties = false;
    loop {
        let token = word(at)?;
        at += 4;
        match token {
            BEGIN_NODE => {
                let name = name(at, bytes.len())?;
                // The root has no name, and nothing else is without.
                if name.is_empty() != (depth == 0) {
                    return None;
                }
                at = (at + name.len() + 1).next_multiple_of(4);
                depth += 1;
                properties = true;
            }
            PROP if properties => {
                let length = word(at)? as usize;
                name(strings + word(at + 4)? as usize, strings_end)?;
                let end = (at + 8).checked_add(length)?;
                bytes.get(..end)?;
                at = end.next_multiple_of(4);
            }
            END_NODE => {
                depth = depth.checked_sub(1)?;
                properties = false;
                if depth == 0 {
                    return (word(at)? == END).then_some(());
                }
            }
            NOP => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::{borrow::ToOwned, string::String, vec::Vec};

    use dtoolkit::{
        Node, Property,
        model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty},
    };

    use super::*;

    /// Names as boards have them, and as none should.
    const NODE: &str = "a-node-whose-name-is-longer-than-31-characters@0";
    const PROPERTIES: [&str; 3] = [
        "snps,quirk-frame-length-adjustment",
        "odd~name",
        "compatible",
    ];

    fn tree() -> Vec<u8> {
        let mut tree = DeviceTree::new();
        let mut node = DeviceTreeNode::new_unchecked(NODE);
        for name in PROPERTIES {
            node.add_property(DeviceTreeProperty::new_unchecked(name, 7_u32));
        }
        tree.root.add_child(node);
        tree.root
            .add_child(DeviceTreeNode::new("another@1").unwrap());
        tree.to_dtb()
    }

    #[test]
    fn names_may_be_anything() {
        let tree = tree();
        assert!(Fdt::new(&tree).is_err());
        let tree = open(&tree).unwrap();
        let node = tree.root().children().next().unwrap();
        assert_eq!(node.name(), NODE);
        let names: Vec<String> = node.properties().map(|it| it.name().to_owned()).collect();
        assert_eq!(names, PROPERTIES);
        assert_eq!(tree.root().children().count(), 2);
    }

    #[test]
    fn a_tree_that_is_cut_or_changed_is_none_or_can_be_read() {
        let whole = tree();
        for length in 0..whole.len() {
            let mut cut = whole[..length].to_vec();
            if let Some(total) = cut.get_mut(4..8) {
                total.copy_from_slice(&(length as u32).to_be_bytes());
            }
            assert!(open(&cut).is_none(), "{length}");
        }
        let mut opened = 0;
        for at in 0..whole.len() {
            for change in [1, 2, 0x10, 0xff] {
                let mut changed = whole.clone();
                changed[at] = changed[at].wrapping_add(change);
                if let Some(tree) = open(&changed) {
                    // Reads every token.
                    let _ = DeviceTree::from_fdt(&tree).to_dtb();
                    opened += 1;
                }
            }
        }
        assert!(opened > 100, "{opened}");
    }
}
