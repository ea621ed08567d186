//! Reads and writes of the MSRs.
//!
//! An MSR that the capability does not have is #GP(0). Nothing else is: AMD's processors ignore what is written to
//! reserved bits, and to PerfCntrGlobalStatus, which is read-only (the PPRs' register descriptions).

use super::registers::COUNTER;
use super::{Interface, Msr, Pmu, Registers, perf_ctl};
use crate::counter::{CounterHost, CounterSet, Events};
use crate::x86::{CounterConfig, RawPerfEvtSel};

impl<V: Events> Pmu<V> {
    /// `None`: #GP.
    pub(super) fn read_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        host: &mut H,
    ) -> Option<u64> {
        self.check(msr)?;
        Some(match msr {
            Msr::LegacyCtl(n) | Msr::Ctl(n) => {
                self.registers.selects[self.registers.existing(n)?].0
            }
            Msr::LegacyCtr(n) | Msr::Ctr(n) => self.counter(self.registers.existing(n)?, host),
            Msr::GlobalStatus => self.status(host).bits().into(),
            Msr::GlobalCtl => self.registers.global.bits().into(),
            Msr::GlobalStatusClr | Msr::GlobalStatusSet => 0,
        })
    }

    /// `None`: #GP, and nothing has changed.
    pub(super) fn write_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        value: u64,
        host: &mut H,
    ) -> Option<()> {
        self.check(msr)?;
        let counters = CounterSet::from_bits(value as u32) & self.registers.capability.counters();
        match msr {
            Msr::LegacyCtl(n) | Msr::Ctl(n) => {
                let n = self.registers.existing(n)?;
                let raw = RawPerfEvtSel(value & perf_ctl::EXISTING);
                // An odd one may change what its even neighbour is.
                let pair = CounterSet::of(n) | CounterSet::of(n & !1);
                self.configure(pair, |it: &mut Registers| it.selects[n] = raw, host);
            }
            Msr::LegacyCtr(n) | Msr::Ctr(n) => {
                let n = self.registers.existing(n)?;
                self.set_counter(n, value & COUNTER, host);
            }
            Msr::GlobalStatus => {}
            Msr::GlobalCtl => self.open(counters, |it| it.global = counters, host),
            Msr::GlobalStatusClr => self.clear_status(counters, host),
            Msr::GlobalStatusSet => self.set_status(counters, host),
        }
        Some(())
    }

    /// `None`: the interface does not have `msr`.
    fn check(&self, msr: Msr) -> Option<()> {
        let since = match msr {
            Msr::LegacyCtl(_) | Msr::LegacyCtr(_) => Interface::Legacy,
            Msr::Ctl(_) | Msr::Ctr(_) => Interface::Core,
            Msr::GlobalStatus | Msr::GlobalCtl | Msr::GlobalStatusClr | Msr::GlobalStatusSet => {
                Interface::V2
            }
        };
        (self.registers.capability.interface >= since).then_some(())
    }
}
