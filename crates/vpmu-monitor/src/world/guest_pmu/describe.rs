//! The PMU as members of the statistics' JSON object.

use core::fmt;

use vpmu::arm::{Register, partition::Isolation};

use super::GuestPmu;

/// See [`GuestPmu::describe`].
pub struct Description<'a>(pub(super) &'a GuestPmu);

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pmu = self.0;
        let Isolation {
            pmcnten,
            pminten,
            pmovs,
            pmcr_p,
            pmswinc,
            indexed,
            el2_prohibited,
        } = pmu.hardware.isolation;
        write!(
            f,
            r#""implemented":{},"guest_counters":{},"host_counters":{},"#,
            pmu.hardware.counters(),
            pmu.plan.hpmn(),
            pmu.plan.host_counters().len(),
        )?;
        write!(
            f,
            r#""isolation":{{"pmcnten":{pmcnten},"pminten":{pminten},"pmovs":{pmovs},"pmcr_p":{pmcr_p},"pmswinc":{pmswinc},"indexed":{indexed},"el2_prohibited":{el2_prohibited}}},"#
        )?;
        f.write_str(r#""traps":["#)?;
        let mut separator = "";
        // Of the indexed registers, the first stands for all.
        for register in Register::all()
            .filter(|r| !matches!(r, Register::Pmevcntr(1..) | Register::Pmevtyper(1..)))
        {
            for (write, direction) in [(false, 'r'), (true, 'w')] {
                if pmu.is_trapped(register, write) {
                    write!(f, r#"{separator}"{}:{direction}""#, register.name())?;
                    separator = ",";
                }
            }
        }
        write!(f, r#"],"switch_register_accesses":{}"#, pmu.switch_accesses)
    }
}
