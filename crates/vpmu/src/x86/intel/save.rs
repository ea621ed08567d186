//! A PMU as a value.

use super::{FIXED, Pmu, PmuState, RawPerfEvtSel, RestoreError, from_global, to_global};
use crate::counter::{CounterHost, Events, Model};
use crate::x86::{CounterConfig, pebs};

impl<V: Events> Pmu<V> {
    /// All that the guest could find out, up to this moment. Nothing stops: the PMU can go on.
    ///
    /// Not saved: what belongs to the machine rather than the guest (events, filter, policy).
    pub fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> PmuState {
        self.settle(self.unsettled(), host);
        self.apply(host);
        let capability = &self.registers.capability;
        let mut state = PmuState {
            layout: PmuState::LAYOUT,
            version: capability.version,
            general: (capability.general, capability.general_width),
            fixed: (capability.fixed, capability.fixed_width),
            perfevtsel: [0; 8],
            pmc: [0; 8],
            fixed_ctr: [0; 7],
            fixed_ctr_ctrl: self.registers.fixed_ctrl,
            global_ctrl: to_global(self.registers.global),
            global_status: to_global(self.overflowed) | self.registers.status,
            debugctl: self.registers.debugctl,
            pmi_due: self.pmi_due,
            pebs_enable: self.registers.pebs.enable,
            pebs_data_cfg: self.registers.pebs.data_cfg,
            ds_area: self.registers.pebs.ds_area,
        };
        for ((n, value), raw) in (0..).zip(&mut state.pmc).zip(&mut state.perfevtsel) {
            *value = self.bank.counters[n].value;
            *raw = self.registers.selects[n].0;
        }
        for (n, value) in (FIXED..).zip(&mut state.fixed_ctr) {
            *value = self.bank.counters[n].value;
        }
        state
    }

    /// Goes on from `state`, in place of what was here: on a vCPU that runs, what is enabled
    /// counts at once.
    ///
    /// # Errors
    ///
    /// Refuses a state of another layout, version or set of counters, or with bits set that do not
    /// exist. This PMU is then as it was.
    pub fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        self.check(state)?;
        self.reset(host);
        for ((n, &value), &raw) in (0..).zip(&state.pmc).zip(&state.perfevtsel) {
            self.bank.counters[n].value = value;
            self.registers.selects[n] = RawPerfEvtSel(raw);
        }
        for (n, &value) in (FIXED..).zip(&state.fixed_ctr) {
            self.bank.counters[n].value = value;
        }
        self.registers.fixed_ctrl = state.fixed_ctr_ctrl;
        self.registers.global = from_global(state.global_ctrl);
        self.overflowed = from_global(state.global_status);
        self.registers.status = state.global_status & self.status_bits();
        self.registers.debugctl = state.debugctl;
        self.registers.pebs = pebs::Registers {
            enable: state.pebs_enable,
            data_cfg: state.pebs_data_cfg,
            ds_area: state.ds_area,
        };
        self.pmi_due = state.pmi_due;
        self.classify(self.implemented());
        self.apply(host);
        Ok(())
    }

    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        let capability = &self.registers.capability;
        if !(PmuState::OLDEST_LAYOUT..=PmuState::LAYOUT).contains(&state.layout) {
            return Err(RestoreError::Layout {
                saved: state.layout,
            });
        }
        if state.version != capability.version {
            return Err(RestoreError::Version {
                saved: state.version,
                offered: capability.version,
            });
        }
        let offered = (capability.general, capability.general_width);
        if state.general != offered {
            return Err(RestoreError::General {
                saved: state.general,
                offered,
            });
        }
        let offered = (capability.fixed, capability.fixed_width);
        if state.fixed != offered {
            return Err(RestoreError::Fixed {
                saved: state.fixed,
                offered,
            });
        }
        let exists = |n, reserved| {
            if self.implemented().contains(n) {
                reserved
            } else {
                u64::MAX
            }
        };
        for ((n, &value), &raw) in (0..).zip(&state.pmc).zip(&state.perfevtsel) {
            let types = exists(n, capability.perfevtsel_reserved());
            fits("IA32_PERFEVTSELx", raw, types)?;
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_PMCx", value, values)?;
        }
        for (n, &value) in (FIXED..).zip(&state.fixed_ctr) {
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_FIXED_CTRx", value, values)?;
        }
        let fixed_ctrl = capability.fixed_ctrl_reserved();
        fits("IA32_FIXED_CTR_CTRL", state.fixed_ctr_ctrl, fixed_ctrl)?;
        let global = capability.global_ctrl_reserved();
        fits("IA32_PERF_GLOBAL_CTRL", state.global_ctrl, global)?;
        let status = !(self.status_bits() | to_global(self.implemented()));
        fits("IA32_PERF_GLOBAL_STATUS", state.global_status, status)?;
        fits(
            "IA32_DEBUGCTL",
            state.debugctl,
            capability.debugctl_reserved(),
        )?;
        self.check_pebs(state)
    }

    fn check_pebs(&self, state: &PmuState) -> Result<(), RestoreError> {
        let capability = &self.registers.capability;
        let (enable, groups, is_linear) = match capability.pebs {
            Some(pebs) => (
                capability.global_ctrl_reserved(),
                pebs.data_cfg_reserved(),
                pebs.is_linear(state.ds_area),
            ),
            None => (u64::MAX, u64::MAX, state.ds_area == 0),
        };
        fits("IA32_PEBS_ENABLE", state.pebs_enable, enable)?;
        fits("MSR_PEBS_DATA_CFG", state.pebs_data_cfg, groups)?;
        let area = if is_linear { 0 } else { u64::MAX };
        fits("IA32_DS_AREA", state.ds_area, area)
    }
}

fn fits(register: &'static str, value: u64, reserved: u64) -> Result<(), RestoreError> {
    if value & reserved == 0 {
        Ok(())
    } else {
        Err(RestoreError::Reserved { register, value })
    }
}
