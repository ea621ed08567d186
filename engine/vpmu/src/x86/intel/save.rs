//! A PMU as a value: how it is taken and put back.

use super::msr::from_global;
use super::{Capability, FIXED, PmuState, RawPerfEvtSel, Registers, to_global};
use crate::counter::Counter;
use crate::x86::registers::Counted;
use crate::x86::restore::{fits, layout_fits, lbr_fits};
use crate::x86::{RestoreError, lbr, pebs};

impl PmuState {
    /// Returns what a guest can see of its registers and counters.
    pub(super) fn save(registers: &Registers, counted: &Counted, lbr: Option<&lbr::Unit>) -> Self {
        let capability = &registers.capability;
        let pebs = registers.pebs.unwrap_or_default();
        let mut state = Self {
            layout: Self::LAYOUT,
            version: capability.version,
            general: (capability.general, capability.general_width),
            fixed: (capability.fixed, capability.fixed_width),
            perfevtsel: [0; 8],
            pmc: [0; 8],
            fixed_ctr: [0; 7],
            fixed_ctr_ctrl: registers.fixed_ctrl,
            global_ctrl: to_global(counted.gate),
            global_status: to_global(counted.overflowed) | counted.status,
            debugctl: registers.debugctl,
            pmi_due: counted.pmi_due,
            pebs_enable: pebs.enable,
            pebs_data_cfg: pebs.data_cfg,
            ds_area: pebs.ds_area,
            lbr: lbr.and_then(lbr::Unit::save_intel),
        };
        for ((n, value), raw) in Counter::all()
            .zip(&mut state.pmc)
            .zip(&mut state.perfevtsel)
        {
            *value = counted.values[n];
            *raw = registers.selects[n].0;
        }
        for (n, value) in fixed().zip(&mut state.fixed_ctr) {
            *value = counted.values[n];
        }
        state
    }

    /// Puts a state that was [checked](Self::check) into `registers`, and returns what is not theirs.
    pub(super) fn restore(
        &self,
        registers: &mut Registers,
        lbr: Option<&mut lbr::Unit>,
    ) -> Counted {
        let mut counted = Counted {
            gate: from_global(self.global_ctrl),
            // One register, two fields: the bits that are no counter's freeze, or show the PEBS buffer's state.
            overflowed: from_global(self.global_status),
            status: self.global_status & registers.capability.status_bits(),
            pmi_due: self.pmi_due,
            ..Counted::default()
        };
        for ((n, &value), &raw) in Counter::all().zip(&self.pmc).zip(&self.perfevtsel) {
            counted.values[n] = value;
            registers.selects[n] = RawPerfEvtSel(raw);
        }
        for (n, &value) in fixed().zip(&self.fixed_ctr) {
            counted.values[n] = value;
        }
        registers.fixed_ctrl = self.fixed_ctr_ctrl;
        registers.debugctl = self.debugctl;
        if let Some(pebs) = &mut registers.pebs {
            *pebs = pebs::Registers {
                enable: self.pebs_enable,
                data_cfg: self.pebs_data_cfg,
                ds_area: self.ds_area,
            };
        }
        if let (Some(unit), Some(state)) = (lbr, &self.lbr) {
            unit.restore_intel(state);
        }
        counted
    }

    /// Refuses a state of another layout, version or set of counters, or with bits set that do not exist.
    pub(super) fn check(&self, capability: &Capability) -> Result<(), RestoreError> {
        layout_fits(self.layout, Self::LAYOUT)?;
        if self.version != capability.version {
            return Err(RestoreError::Version {
                saved: self.version,
                offered: capability.version,
            });
        }
        let offered = (capability.general, capability.general_width);
        if self.general != offered {
            return Err(RestoreError::General {
                saved: self.general,
                offered,
            });
        }
        let offered = (capability.fixed, capability.fixed_width);
        if self.fixed != offered {
            return Err(RestoreError::Fixed {
                saved: self.fixed,
                offered,
            });
        }
        let reserved = capability.reserved();
        // Each bit of a counter that does not exist is reserved.
        let exists = |n, reserved| {
            if capability.counters().contains(n) {
                reserved
            } else {
                u64::MAX
            }
        };
        for ((n, &value), &raw) in Counter::all().zip(&self.pmc).zip(&self.perfevtsel) {
            let types = exists(n, reserved.perfevtsel);
            fits("IA32_PERFEVTSELx", raw, types)?;
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_PMCx", value, values)?;
        }
        for (n, &value) in fixed().zip(&self.fixed_ctr) {
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_FIXED_CTRx", value, values)?;
        }
        fits(
            "IA32_FIXED_CTR_CTRL",
            self.fixed_ctr_ctrl,
            reserved.fixed_ctrl,
        )?;
        fits(
            "IA32_PERF_GLOBAL_CTRL",
            self.global_ctrl,
            reserved.global_ctrl,
        )?;
        let status = !(capability.status_bits() | to_global(capability.counters()));
        fits("IA32_PERF_GLOBAL_STATUS", self.global_status, status)?;
        fits("IA32_DEBUGCTL", self.debugctl, reserved.debugctl)?;
        let lbr = capability.lbr.as_ref();
        lbr_fits(self.lbr.as_ref(), lbr, lbr::intel::State::check)?;
        self.check_pebs(capability)
    }

    fn check_pebs(&self, capability: &Capability) -> Result<(), RestoreError> {
        let (enable, groups, is_linear) = match capability.pebs {
            Some(pebs) => (
                capability.reserved().global_ctrl,
                pebs.data_cfg_reserved(),
                pebs.is_linear(self.ds_area),
            ),
            // Without PEBS the three MSRs do not exist, so all their bits are reserved.
            None => (u64::MAX, u64::MAX, self.ds_area == 0),
        };
        fits("IA32_PEBS_ENABLE", self.pebs_enable, enable)?;
        fits("MSR_PEBS_DATA_CFG", self.pebs_data_cfg, groups)?;
        // Whether an address is canonical is no matter of single bits, so no mask of reserved ones says it.
        let area = if is_linear { 0 } else { u64::MAX };
        fits("IA32_DS_AREA", self.ds_area, area)
    }
}

/// Returns the fixed counters, and what is behind them.
fn fixed() -> impl Iterator<Item = Counter> {
    Counter::all().skip(FIXED.into())
}
