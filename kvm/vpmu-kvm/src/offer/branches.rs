//! Last branch records, where a VMM offers them.

use vpmu::x86::{Capability, amd, intel, lbr};
use vpmu_perf::Vendor;

use super::pebs::linear_address_bits;
use crate::error::Error;
use crate::options::{Lbr, Model};

/// Bits of IA32_DEBUGCTL that are no business of a PMU, but the register comes to the VMM with it: LBR, which Intel's
/// records of branches have in a register of their own, and BTF (SDM vol. 3B, 18.4.1). KVM refuses neither, whatever the
/// processor has, and does nothing for them.
pub(super) const LBR: u64 = 1 << 0;
pub(super) const BTF: u64 = 1 << 1;

/// Returns the model that has last branch records, where any will do: AMD's have them from PerfMonV2 on.
pub(super) fn with_lbr(model: Model, lbr: bool) -> Model {
    match model {
        Model::Auto if lbr && Vendor::of_host() == Vendor::Amd => Model::Amd(amd::Interface::V2),
        model => model,
    }
}

/// Adds last branch records to the PMU; `None`: the paravirtual one.
pub(super) fn offer_lbr(pmu: Option<&mut Capability>, wanted: Lbr) -> Result<(), Error> {
    match pmu {
        Some(Capability::Intel(pmu)) => {
            if pmu.version < intel::Version::V4 {
                return Err(Error::Lbr("Intel's PMU has them from version 4 on"));
            }
            pmu.lbr = Some(lbr::intel::Capability {
                depths: depths(wanted)?,
                linear_address_bits: linear_address_bits(),
                // The open calls stand on the stack of the guest's program.
                call_stack: true,
                ..lbr::intel::Capability::new()
            });
        }
        Some(Capability::Amd(pmu)) => {
            if pmu.interface != amd::Interface::V2 {
                return Err(Error::Lbr("AMD's PMU has them with PerfMonV2"));
            }
            if !matches!(wanted, Lbr::On | Lbr::Depth(lbr::amd::DEPTH)) {
                return Err(Error::Lbr("AMD's PMU has 16 of them"));
            }
            pmu.lbr = Some(lbr::amd::Capability {
                other_debugctl: BTF,
            });
        }
        None => return Err(Error::Lbr("the paravirtual PMU has none")),
    }
    Ok(())
}

/// Returns the depths that IA32_LBR_DEPTH takes. Linux chooses the greatest, so there is one.
fn depths(wanted: Lbr) -> Result<u8, Error> {
    match wanted {
        Lbr::Depth(depth @ (8 | 16 | 24 | 32)) => Ok(1 << (depth / 8 - 1)),
        Lbr::Depth(_) => Err(Error::Lbr("Intel's PMU has 8, 16, 24 or 32 of them")),
        Lbr::On | Lbr::Off => Ok(lbr::intel::Capability::new().depths),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_gets_the_depth_that_is_asked_for() {
        for depth in 0..=u8::MAX {
            let offered = depths(Lbr::Depth(depth)).ok().map(|depths| {
                let capability = lbr::intel::Capability {
                    depths,
                    ..lbr::intel::Capability::new()
                };
                capability.deepest()
            });
            let exists = matches!(depth, 8 | 16 | 24 | 32);
            assert_eq!(offered, exists.then_some(depth));
        }
    }
}
