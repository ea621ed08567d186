//! A PMU's registers as one plain value, for migration, snapshots and tests; how it is taken and put back.

use super::registers::from_global;
use super::{
    Capability, FIXED, MAX_FIXED, MAX_GENERAL, RawPerfEvtSel, Registers, Version, to_global,
};
use crate::counter::{Counter, Events};
use crate::x86::counters::{Counters, Global};
use crate::x86::restore::{fits, layout_fits, lbr_fits};
use crate::x86::{RestoreError, lbr, pebs};

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs
/// with equal states are the same to their guests.
///
/// Registers are held as the guest reads them. Those of counters that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// The version that the guest has found.
    pub version: Version,
    /// General counters, and their width in bits.
    // In the state, although the guest's CPUID has it: the next host compares before the guest can notice.
    pub general: (u8, u8),
    /// Fixed counters as a bitmap, and their width in bits.
    pub fixed: (u32, u8),
    /// IA32_PERFEVTSELx.
    pub perfevtsel: [u64; MAX_GENERAL as usize],
    /// IA32_PMCx.
    pub pmc: [u64; MAX_GENERAL as usize],
    /// IA32_FIXED_CTRx.
    pub fixed_ctr: [u64; MAX_FIXED as usize],
    /// IA32_FIXED_CTR_CTRL.
    pub fixed_ctr_ctrl: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub global_ctrl: u64,
    /// IA32_PERF_GLOBAL_STATUS.
    pub global_status: u64,
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// A PMI has been requested and not taken.
    // In no register: without it, an overflow shortly before the save would never interrupt.
    pub pmi_due: bool,
    /// IA32_PEBS_ENABLE.
    pub pebs_enable: u64,
    /// MSR_PEBS_DATA_CFG.
    pub pebs_data_cfg: u64,
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// The registers of the last branch records, where the guest has them.
    pub lbr: Option<lbr::intel::State>,
}

impl PmuState {
    /// The layout this engine writes and reads.
    // Another number for each change of the fields: an older engine then refuses a state that it would misread.
    pub const LAYOUT: u16 = 4;
}

impl Registers {
    pub(in crate::x86) fn save<V: Events>(&self, counters: &Counters<V>) -> PmuState {
        let (capability, global) = (&self.capability, &counters.global);
        let mut state = PmuState {
            layout: PmuState::LAYOUT,
            version: capability.version,
            general: (capability.general, capability.general_width),
            fixed: (capability.fixed, capability.fixed_width),
            perfevtsel: [0; 8],
            pmc: [0; 8],
            fixed_ctr: [0; 7],
            fixed_ctr_ctrl: self.fixed_ctrl,
            global_ctrl: to_global(global.gate),
            global_status: to_global(global.overflowed) | global.status,
            debugctl: self.debugctl,
            pmi_due: global.pmi_due,
            pebs_enable: self.pebs.enable,
            pebs_data_cfg: self.pebs.data_cfg,
            ds_area: self.pebs.ds_area,
            lbr: counters.lbr.save_intel(),
        };
        for ((n, value), raw) in Counter::all()
            .zip(&mut state.pmc)
            .zip(&mut state.perfevtsel)
        {
            *value = counters.value(n);
            *raw = self.selects[n].0;
        }
        for (n, value) in fixed().zip(&mut state.fixed_ctr) {
            *value = counters.value(n);
        }
        state
    }

    pub(in crate::x86) fn restore<V: Events>(
        &mut self,
        state: &PmuState,
        counters: &mut Counters<V>,
    ) {
        counters.global = Global {
            gate: from_global(state.global_ctrl),
            // One register, two fields: the bits that are no counter's freeze, or show the PEBS buffer's state.
            overflowed: from_global(state.global_status),
            status: state.global_status & self.capability.status_bits(),
            pmi_due: state.pmi_due,
        };
        for ((n, &value), &raw) in Counter::all().zip(&state.pmc).zip(&state.perfevtsel) {
            counters.set_value(n, value);
            self.selects[n] = RawPerfEvtSel(raw);
        }
        for (n, &value) in fixed().zip(&state.fixed_ctr) {
            counters.set_value(n, value);
        }
        self.fixed_ctrl = state.fixed_ctr_ctrl;
        self.debugctl = state.debugctl;
        self.pebs = pebs::Registers {
            enable: state.pebs_enable,
            data_cfg: state.pebs_data_cfg,
            ds_area: state.ds_area,
        };
        if let Some(state) = &state.lbr {
            counters.lbr.restore_intel(state);
        }
    }

    /// Refuses a state of another layout, version or set of counters, or with bits set that do not exist.
    pub(in crate::x86) fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        let capability = &self.capability;
        layout_fits(state.layout, PmuState::LAYOUT)?;
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
        let reserved = capability.reserved();
        // Each bit of a counter that does not exist is reserved.
        let exists = |n, reserved| {
            if capability.counters().contains(n) {
                reserved
            } else {
                u64::MAX
            }
        };
        for ((n, &value), &raw) in Counter::all().zip(&state.pmc).zip(&state.perfevtsel) {
            let types = exists(n, reserved.perfevtsel);
            fits("IA32_PERFEVTSELx", raw, types)?;
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_PMCx", value, values)?;
        }
        for (n, &value) in fixed().zip(&state.fixed_ctr) {
            let values = exists(n, !capability.counter_mask(n));
            fits("IA32_FIXED_CTRx", value, values)?;
        }
        fits(
            "IA32_FIXED_CTR_CTRL",
            state.fixed_ctr_ctrl,
            reserved.fixed_ctrl,
        )?;
        fits(
            "IA32_PERF_GLOBAL_CTRL",
            state.global_ctrl,
            reserved.global_ctrl,
        )?;
        let status = !(capability.status_bits() | to_global(capability.counters()));
        fits("IA32_PERF_GLOBAL_STATUS", state.global_status, status)?;
        fits("IA32_DEBUGCTL", state.debugctl, reserved.debugctl)?;
        let lbr = capability.lbr.as_ref();
        lbr_fits(state.lbr.as_ref(), lbr, lbr::intel::State::check)?;
        check_pebs(capability, state)
    }
}

fn check_pebs(capability: &Capability, state: &PmuState) -> Result<(), RestoreError> {
    let (enable, groups, is_linear) = match capability.pebs {
        Some(pebs) => (
            capability.reserved().global_ctrl,
            pebs.data_cfg_reserved(),
            pebs.is_linear(state.ds_area),
        ),
        // Without PEBS the three MSRs do not exist, so all their bits are reserved.
        None => (u64::MAX, u64::MAX, state.ds_area == 0),
    };
    fits("IA32_PEBS_ENABLE", state.pebs_enable, enable)?;
    fits("MSR_PEBS_DATA_CFG", state.pebs_data_cfg, groups)?;
    // Whether an address is canonical is no matter of single bits, so no mask of reserved ones says it.
    let area = if is_linear { 0 } else { u64::MAX };
    fits("IA32_DS_AREA", state.ds_area, area)
}

/// Returns the fixed counters, and what is behind them.
fn fixed() -> impl Iterator<Item = Counter> {
    Counter::all().skip(FIXED.into())
}
