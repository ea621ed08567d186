//! The PMU as members of the statistics' JSON object.

use core::fmt;

use vpmu::arm::{
    Register,
    partition::{Findings, Isolation},
};

use super::GuestPmu;

/// See [`GuestPmu::describe`].
pub struct Description<'a>(pub(super) &'a GuestPmu);

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pmu = self.0;
        let cpu = &pmu.hardware.partition;
        let Findings {
            isolation:
                Isolation {
                    partition,
                    hpmd,
                    hccd,
                },
            open,
            unproven,
        } = pmu.hardware.findings;
        write!(
            f,
            r#""pmuver":{},"fgt":{},"implemented":{},"guest_counters":{},"host_counters":{},"#,
            cpu.features.version.pmuver(),
            cpu.features.fgt,
            cpu.implemented,
            pmu.plan.hpmn(),
            pmu.plan.host_counters().len(),
        )?;
        write!(
            f,
            r#""isolation":{{"partition":{partition},"hpmd":{hpmd},"hccd":{hccd},"#
        )?;
        names(f, "open", open.iter())?;
        f.write_str(",")?;
        names(f, "unproven", unproven.iter())?;
        f.write_str("},")?;
        // Of the indexed registers, the first stands for all.
        let trapped = Register::all()
            .filter(|r| !matches!(r, Register::Pmevcntr(1..) | Register::Pmevtyper(1..)))
            .flat_map(|register| [(register, false), (register, true)])
            .filter(|&(register, write)| pmu.is_trapped(register, write));
        names(f, "traps", trapped)?;
        write!(
            f,
            r#","filtered_at_exit":{},"switch_register_accesses":{}"#,
            pmu.filtered_at_exit().len(),
            pmu.switch_accesses
        )
    }
}

/// `"key":["PMSWINC_EL0:w",...]`
fn names(
    f: &mut fmt::Formatter<'_>,
    key: &str,
    accesses: impl Iterator<Item = (Register, bool)>,
) -> fmt::Result {
    write!(f, r#""{key}":["#)?;
    let mut separator = "";
    for (register, write) in accesses {
        let direction = if write { 'w' } else { 'r' };
        write!(f, r#"{separator}"{}:{direction}""#, register.name())?;
        separator = ",";
    }
    f.write_str("]")
}
