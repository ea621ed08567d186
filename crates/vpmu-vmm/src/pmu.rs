//! The PMU that a vCPU has: an architectural or a paravirtual one.

use std::sync::{Arc, Mutex};

use vpmu_kvm::{
    Backing, Capability, Offer, Options, Statistics, VcpuParavirt, VcpuPmu, detect_paravirt,
};

use super::machine::Machine;
use super::slot::Memory;
use super::vcpu::Vcpu;
use super::{Error, PmuOptions};

/// The PMU of one vCPU.
#[expect(clippy::large_enum_variant, reason = "there is one for each vCPU")]
pub(super) enum GuestPmu {
    Architectural(VcpuPmu),
    Paravirtual(VcpuParavirt<Memory>),
}

impl GuestPmu {
    pub(super) fn capability(&self) -> Option<Capability> {
        match self {
            Self::Architectural(pmu) => Some(pmu.capability()),
            Self::Paravirtual(_) => None,
        }
    }

    pub(super) fn offer(&self) -> Option<&Offer> {
        match self {
            Self::Architectural(_) => None,
            Self::Paravirtual(pmu) => Some(pmu.offer()),
        }
    }

    pub(super) fn backing(&self) -> Backing {
        match self {
            Self::Architectural(pmu) => pmu.backing(),
            Self::Paravirtual(pmu) => pmu.backing(),
        }
    }

    pub(super) fn statistics(&self) -> Arc<Mutex<Statistics>> {
        match self {
            Self::Architectural(pmu) => pmu.statistics(),
            Self::Paravirtual(pmu) => pmu.statistics(),
        }
    }

    pub(super) fn before_run(&mut self) -> Result<(), Error> {
        Ok(match self {
            Self::Architectural(pmu) => pmu.before_run(),
            Self::Paravirtual(pmu) => pmu.before_run(),
        }?)
    }

    pub(super) fn after_run(&mut self) -> Result<bool, Error> {
        match self {
            Self::Architectural(pmu) => Ok(pmu.after_run()?),
            Self::Paravirtual(pmu) => Ok(pmu.after_run()),
        }
    }
}

impl Vcpu {
    /// Attaches the vCPU's PMU, which continues where it was if it was saved.
    pub(super) fn attach_pmu(
        &mut self,
        machine: &Machine,
        options: PmuOptions,
    ) -> Result<GuestPmu, Error> {
        if options.paravirtual {
            return self.attach_paravirtual(options).map(GuestPmu::Paravirtual);
        }
        let saved = self.pmu.take();
        let told = saved.as_ref().map(|state| state.capability);
        let options = Options {
            memory: Some(Arc::new(self.memory.clone())),
            ..options.for_guest(told)
        };
        let mut pmu = VcpuPmu::attach(&machine.vm, &self.fd, options)?;
        if let Some(state) = &saved {
            pmu.restore(state)?;
        }
        Ok(GuestPmu::Architectural(pmu))
    }

    fn attach_paravirtual(&mut self, options: PmuOptions) -> Result<VcpuParavirt<Memory>, Error> {
        let (saved, memory) = (self.paravirtual.take(), self.memory.clone());
        let options = options.for_guest(None);
        let Some(state) = saved else {
            let offer = detect_paravirt(&options)?;
            return Ok(VcpuParavirt::attach(&self.fd, memory, offer, &options)?);
        };
        if self.drop_paravirtual {
            return Ok(VcpuParavirt::leave(&self.fd, memory, &state)?);
        }
        let mut pmu = VcpuParavirt::attach(&self.fd, memory, state.offer(), &options)?;
        pmu.restore(&state)?;
        Ok(pmu)
    }
}
