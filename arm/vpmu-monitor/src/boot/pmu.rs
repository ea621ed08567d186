//! Which interrupt each CPU's PMU raises.
//!
//! A tree says it in one of three ways (the binding `arm,pmu`, and how Linux reads it): one PPI for all CPUs; a PPI for
//! each cluster, where the fourth cell of the interrupt names a partition of the GIC's `ppi-partitions`; or one SPI for
//! each CPU, in the order of `interrupt-affinity`, and without this property in the order of the CPUs. A cluster of other
//! cores has a node of its own.

use alloc::vec::Vec;

use dtoolkit::{
    Node, Property,
    fdt::{Fdt, FdtNode},
    standard::NodeStandard as _,
};

use super::nodes::{self, Found, cells};

/// A set of CPUs that a phandle names.
struct Named {
    phandle: u32,
    /// The CPUs' numbers.
    cpus: Vec<usize>,
}

/// The INTID of each CPU's PMU, by CPU number. `cpus` are the CPUs' phandles, `width` the GIC's `#interrupt-cells`.
pub(super) fn intids(tree: Fdt<'_>, cpus: &[Option<u32>], width: usize) -> Vec<Option<u32>> {
    let number = |phandle: u32| cpus.iter().position(|&cpu| cpu == Some(phandle));
    let partitions: Vec<Named> = nodes::find(tree, |node| node.property("affinity").is_some())
        .iter()
        .filter_map(|found| {
            let affinity = found.node.property("affinity")?;
            Some(Named {
                phandle: found.node.phandle().ok()??,
                cpus: cells(affinity.value()).filter_map(number).collect(),
            })
        })
        .collect();
    let mut intids = cpus.iter().map(|_| None).collect::<Vec<_>>();
    for Found { node, .. } in nodes::find(tree, |node| nodes::is_compatible(node, is_of_a_cpu)) {
        for (intid, cpu) in lines(&node, width, cpus.len(), number, &partitions) {
            // The first node that has the CPU.
            if let Some(known @ None) = intids.get_mut(cpu) {
                *known = Some(intid);
            }
        }
    }
    intids
}

/// `arm,armv8-pmuv3`, or the name of a core's. DSU, CMN and their like have PMUs that are not a CPU's.
fn is_of_a_cpu(name: &str) -> bool {
    name == "arm,armv8-pmuv3"
        || name.ends_with("-pmu")
            && ["arm,cortex-", "arm,neoverse-"]
                .iter()
                .any(|core| name.starts_with(core))
}

/// What a node says: INTIDs and the numbers of the CPUs that raise them.
fn lines(
    node: &FdtNode<'_>,
    width: usize,
    count: usize,
    number: impl Fn(u32) -> Option<usize>,
    partitions: &[Named],
) -> Vec<(u32, usize)> {
    let affinity: Option<Vec<u32>> = node
        .property("interrupt-affinity")
        .map(|property| cells(property.value()).collect());
    let mut lines = Vec::new();
    for (n, specifier) in nodes::specifiers(node, width).iter().enumerate() {
        let Some(intid) = nodes::intid(specifier) else {
            continue;
        };
        if intid >= 32 {
            let cpu = match &affinity {
                Some(cpus) => cpus.get(n).copied().and_then(&number),
                None => Some(n),
            };
            lines.extend(cpu.map(|cpu| (intid, cpu)));
            continue;
        }
        match specifier.get(3) {
            None | Some(0) => lines.extend((0..count).map(|cpu| (intid, cpu))),
            Some(partition) => {
                let named = partitions.iter().find(|named| named.phandle == *partition);
                let cpus = named.into_iter().flat_map(|named| &named.cpus);
                lines.extend(cpus.map(|&cpu| (intid, cpu)));
            }
        }
    }
    lines
}
