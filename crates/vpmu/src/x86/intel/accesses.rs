//! Reads and writes of the MSRs.
//!
//! A set bit that is reserved, an MSR that the capability lacks, and a write of a read-only MSR are
//! #GP(0), as the SDM has it for WRMSR and RDMSR. Only the high half of a write to IA32_PMCx is
//! ignored: the SDM replaces it by copies of bit 31 (20.2.8).

use super::config::fixed_index;
use super::{
    Msr, Pmu, RawPerfEvtSel, Registers, Version, fixed_ctrl, from_global, global_status, to_global,
};
use crate::counter::{CounterHost, CounterSet, Events, Model};
use crate::x86::CounterConfig;

impl<V: Events> Pmu<V> {
    /// `None`: #GP.
    pub(super) fn read_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        host: &mut H,
    ) -> Option<u64> {
        Some(match msr {
            Msr::PerfEvtSel(n) => self.registers.selects[self.registers.general(n)?].0,
            Msr::Pmc(n) => self.counter(self.registers.general(n)?, host),
            Msr::FullWidthPmc(n) => self.counter(self.full_width(n)?, host),
            Msr::FixedCtr(n) => self.counter(self.registers.fixed(n)?, host),
            Msr::FixedCtrCtrl => self.registers.fixed_ctrl,
            Msr::GlobalStatus => to_global(self.status(host)) | self.registers.status,
            Msr::GlobalCtrl => {
                self.settle_acting(host);
                self.apply(host);
                to_global(self.registers.global)
            }
            Msr::GlobalOvfCtrl => 0,
            Msr::GlobalStatusSet => self.since_v4(0)?,
            Msr::GlobalInuse => self.since_v4(self.in_use())?,
            Msr::PerfCapabilities => {
                let capability = &self.registers.capability;
                capability.pdcm.then(|| capability.perf_capabilities())?
            }
            Msr::DebugCtl => self.registers.debugctl,
            Msr::PebsEnable => self.with_pebs(self.registers.pebs.enable)?,
            Msr::PebsDataCfg => self.with_pebs(self.registers.pebs.data_cfg)?,
            Msr::DsArea => self.with_pebs(self.registers.pebs.ds_area)?,
        })
    }

    /// `None`: #GP, and nothing has changed.
    pub(super) fn write_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        value: u64,
        host: &mut H,
    ) -> Option<()> {
        let capability = self.registers.capability;
        let fits = |reserved: u64| (value & reserved == 0).then_some(());
        match msr {
            Msr::PerfEvtSel(n) => {
                let n = self.registers.general(n)?;
                fits(capability.perfevtsel_reserved())?;
                let write = |it: &mut Registers| it.selects[n] = RawPerfEvtSel(value);
                self.configure(CounterSet::of(n), write, host);
            }
            Msr::Pmc(n) => {
                let n = self.registers.general(n)?;
                let extended = i64::from(value as u32 as i32) as u64;
                self.set_counter(n, extended & capability.counter_mask(n), host);
            }
            Msr::FullWidthPmc(n) => {
                let n = self.full_width(n)?;
                fits(!capability.counter_mask(n))?;
                self.set_counter(n, value, host);
            }
            Msr::FixedCtr(n) => {
                let n = self.registers.fixed(n)?;
                fits(!capability.counter_mask(n))?;
                self.set_counter(n, value, host);
            }
            Msr::FixedCtrCtrl => {
                fits(capability.fixed_ctrl_reserved())?;
                let fixed = from_global(!0 << 32);
                self.configure(fixed, |it| it.fixed_ctrl = value, host);
            }
            Msr::GlobalCtrl => {
                fits(capability.global_ctrl_reserved())?;
                let gate = from_global(value);
                self.open(gate, |it| it.global = gate, host);
            }
            Msr::GlobalOvfCtrl => {
                fits(capability.ovf_ctrl_reserved())?;
                self.clear_status(from_global(value), host);
                self.registers.status &= !value;
            }
            Msr::GlobalStatusSet => {
                self.since_v4(0)?;
                fits(capability.status_set_reserved())?;
                self.set_status(from_global(value), host);
                self.registers.status |= value & !to_global(CounterSet::from_bits(u32::MAX));
            }
            Msr::DebugCtl => {
                fits(capability.debugctl_reserved())?;
                // What overflowed before the guest wanted it to freeze does not freeze.
                if self.registers.debugctl != value {
                    self.settle(self.interrupting, host);
                }
                self.registers.debugctl = value;
            }
            Msr::PebsEnable => {
                self.with_pebs(0)?;
                fits(capability.global_ctrl_reserved())?;
                let all = self.implemented();
                self.configure(all, |it| it.pebs.enable = value, host);
            }
            Msr::PebsDataCfg => {
                fits(capability.pebs?.data_cfg_reserved())?;
                self.settle_sampled(self.sampling.counters(), host);
                self.registers.pebs.data_cfg = value;
            }
            Msr::DsArea => {
                capability.pebs?.is_linear(value).then_some(())?;
                self.registers.pebs.ds_area = value;
            }
            Msr::GlobalStatus | Msr::GlobalInuse | Msr::PerfCapabilities => return None,
        }
        Some(())
    }

    fn full_width(&self, n: u8) -> Option<u8> {
        self.registers
            .general(n)
            .filter(|_| self.registers.capability.full_width_writes)
    }

    fn since_v4(&self, value: u64) -> Option<u64> {
        (self.registers.capability.version >= Version::V4).then_some(value)
    }

    fn with_pebs(&self, value: u64) -> Option<u64> {
        self.registers.capability.pebs.map(|_| value)
    }

    /// Returns IA32_PERF_GLOBAL_INUSE: counters with an event select or an enable field that is not
    /// zero, and bit 63 if a counter asks for an interrupt or for records (SDM 20.2.4.3).
    fn in_use(&self) -> u64 {
        let mut used = CounterSet::EMPTY;
        for n in self.implemented() {
            let is_used = match fixed_index(n) {
                Some(fixed) => {
                    let field = fixed_ctrl::field(self.registers.fixed_ctrl, fixed);
                    field & (fixed_ctrl::OS | fixed_ctrl::USR) != 0
                }
                None => self.registers.selects[n].select() != 0,
            };
            if is_used {
                used.insert(n);
            }
        }
        to_global(used) | u64::from(!self.reported().is_empty()) << 63
    }

    /// Returns the bits of IA32_PERF_GLOBAL_STATUS that can be set and are no counter's.
    pub(super) fn status_bits(&self) -> u64 {
        let counters = to_global(self.implemented());
        !self.registers.capability.status_set_reserved() & !counters | global_status::COND_CHGD
    }
}
