//! Last branch records, where a VMM offers them.

use vpmu::x86::{Capability, amd, intel, lbr};
use vpmu_perf::Vendor;

use super::{BTF, Pmu, linear_address_bits};
use crate::error::Error;
use crate::options::Model;

/// Returns the model that has last branch records, where any will do: AMD's have them from PerfMonV2 on.
pub(super) fn with_lbr(model: Model, lbr: bool) -> Model {
    match model {
        Model::Auto if lbr && Vendor::of_host() == Vendor::Amd => Model::Amd(amd::Interface::V2),
        model => model,
    }
}

/// Adds last branch records to what the guest is offered.
pub(super) fn offer_lbr(pmu: &mut Pmu) -> Result<(), Error> {
    match pmu {
        Pmu::Architectural(Capability::Intel(pmu)) => {
            if pmu.pebs.is_some() {
                return Err(Error::Lbr("there are none beside PEBS"));
            }
            if pmu.version < intel::Version::V4 {
                return Err(Error::Lbr("Intel's PMU has them from version 4 on"));
            }
            pmu.lbr = Some(lbr::intel::Capability {
                linear_address_bits: linear_address_bits(),
                ..lbr::intel::Capability::new()
            });
        }
        Pmu::Architectural(Capability::Amd(pmu)) => {
            if pmu.interface != amd::Interface::V2 {
                return Err(Error::Lbr("AMD's PMU has them with PerfMonV2"));
            }
            pmu.lbr = Some(lbr::amd::Capability {
                other_debugctl: BTF,
            });
        }
        Pmu::Paravirtual(_) => {
            return Err(Error::Lbr("the paravirtual PMU has none"));
        }
    }
    Ok(())
}
