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

/// The INTID of each CPU's PMU, by CPU number. `cpus` are the CPUs' phandles, `width` the GIC's `#interrupt-cells`.
pub(super) fn intids(tree: Fdt<'_>, cpus: &[Option<u32>], width: usize) -> Vec<Option<u32>> {
    let mut intids = cpus.iter().map(|_| None).collect::<Vec<_>>();
    for Found { node, .. } in nodes::find(tree, |node| nodes::is_compatible(node, is_of_a_cpu)) {
        for (intid, cpu) in lines(tree, &node, width, cpus) {
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
    tree: Fdt<'_>,
    node: &FdtNode<'_>,
    width: usize,
    cpus: &[Option<u32>],
) -> Vec<(u32, usize)> {
    let number = |phandle: u32| cpus.iter().position(|&cpu| cpu == Some(phandle));
    let affinity = named(node, "interrupt-affinity");
    let mut lines = Vec::new();
    for (n, specifier) in nodes::specifiers(node, width).iter().enumerate() {
        let Some(intid) = nodes::intid(specifier) else {
            continue;
        };
        if intid >= 32 {
            let cpu = match &affinity {
                Some(cpus) => cpus.get(n).copied().and_then(number),
                None => Some(n),
            };
            lines.extend(cpu.map(|cpu| (intid, cpu)));
            continue;
        }
        match specifier.get(3) {
            None | Some(0) => lines.extend((0..cpus.len()).map(|cpu| (intid, cpu))),
            Some(&partition) => {
                let is_it = |node: &FdtNode<'_>| node.phandle().ok().flatten() == Some(partition);
                let found = nodes::find(tree, is_it);
                let phandles = found
                    .iter()
                    .find_map(|found| named(&found.node, "affinity"));
                let cpus = phandles.into_iter().flatten().filter_map(number);
                lines.extend(cpus.map(|cpu| (intid, cpu)));
            }
        }
    }
    lines
}

/// The phandles in a node's property.
fn named(node: &FdtNode<'_>, property: &str) -> Option<Vec<u32>> {
    Some(cells(node.property(property)?.value()).collect())
}
