//! Registers as KVM_GET_MSRS and KVM_SET_MSRS have them: accesses of the VMM's, for machines that save registers by number.
//!
//! They differ from the guest's accesses as KVM's own do: a write of a read-only register that the guest's state needs
//! is taken, a counter is written whole by either of its names, and nothing is counted as an exit.

use vpmu::counter::CounterHost;
use vpmu::x86::{CounterConfig, Outcome, PmuState, amd, intel};

use super::{Engine, VcpuPmu};
use crate::paravirt::PMU_DOORBELL_MSR;
use crate::state::SavedPmu;

impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// Returns the value of an MSR, or `None` where the PMU has none that can be read.
    pub(crate) fn msr(&mut self, index: u32) -> Option<u64> {
        match each!(&mut self.engine, pmu => pmu.rdmsr(index, &mut self.host)) {
            Outcome::Value(value) => Some(value),
            Outcome::NotHandled | Outcome::Done | Outcome::GeneralProtection => None,
        }
    }

    /// Sets an MSR.
    pub(crate) fn set_msr(&mut self, index: u32, value: u64) -> Outcome {
        if index == PMU_DOORBELL_MSR && !self.is_architectural() {
            // The doorbell is a request, and no state.
            return Outcome::GeneralProtection;
        }
        let outcome = match self.with_register(index, value) {
            Some(state) => match self.restore(&state) {
                Ok(()) => Outcome::Done,
                Err(_) => Outcome::GeneralProtection,
            },
            None => each!(&mut self.engine, pmu => pmu.wrmsr(index, value, &mut self.host)),
        };
        self.publish();
        // A register that cannot be written may be given the value that it has.
        if outcome == Outcome::GeneralProtection && self.msr(index) == Some(value) {
            return Outcome::Done;
        }
        outcome
    }

    /// Returns the state with `value` in a register that a guest could not write so. `None`: the guest's way serves.
    fn with_register(&mut self, index: u32, value: u64) -> Option<SavedPmu> {
        // Saving reads each counter's event, which a plain register need not pay for.
        if !is_special(index) {
            return None;
        }
        let SavedPmu::Architectural(capability, mut state) = self.state() else {
            return None;
        };
        match &mut state {
            PmuState::Intel(registers) => match intel::Msr::decode(index)? {
                // KVM_SET_MSRS writes it, too: a status without its PMI would be lost in a migration.
                intel::Msr::GlobalStatus => registers.global_status = value,
                intel::Msr::Pmc(n) if n < registers.general.0 => {
                    // QEMU migrates counters by the legacy names, whose writes by a guest have 32 bits.
                    let mask = u64::MAX >> (64 - u32::from(registers.general.1));
                    *registers.pmc.get_mut(usize::from(n))? = value & mask;
                }
                _ => return None,
            },
            PmuState::Amd(registers) => match amd::Msr::decode(index)? {
                amd::Msr::GlobalStatus if registers.interface == amd::Interface::V2 => {
                    registers.global_status = value;
                }
                _ => return None,
            },
        }
        Some(SavedPmu::Architectural(capability, state))
    }
}

fn is_special(index: u32) -> bool {
    use intel::Msr::{GlobalStatus, Pmc};

    matches!(intel::Msr::decode(index), Some(GlobalStatus | Pmc(_)))
        || amd::Msr::decode(index) == Some(amd::Msr::GlobalStatus)
}
