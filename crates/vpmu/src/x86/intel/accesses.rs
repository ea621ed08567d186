//! Reads and writes of the MSRs, and RDPMC.
//!
//! A set bit that is reserved, an MSR that the capability does not have, a write of one that is
//! read-only: each is #GP(0), as the SDM has it for WRMSR and RDMSR. Nothing is ignored but the high
//! half of a write to IA32_PMCx, which the SDM says is replaced by copies of bit 31 (20.2.8).

use super::config::fixed_index;
use super::{
    FIXED, MAX_FIXED, Msr, Pmu, RawPerfEvtSel, Version, fixed_ctrl, from_global, global_status,
    to_global,
};
use crate::counter::{CounterHost, CounterSet, Events, Model};
use crate::x86::{CounterConfig, Outcome, Ring};

impl<V: Events> Pmu<V> {
    /// Performs RDMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn rdmsr<H: CounterHost<CounterConfig>>(&mut self, address: u32, host: &mut H) -> Outcome {
        match Msr::decode(address) {
            Some(msr) => self.read(msr, host),
            None => Outcome::NotHandled,
        }
    }

    /// Performs WRMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        match Msr::decode(address) {
            Some(msr) => self.write(msr, value, host),
            None => Outcome::NotHandled,
        }
    }

    /// Performs a read of `msr`.
    pub fn read<H: CounterHost<CounterConfig>>(&mut self, msr: Msr, host: &mut H) -> Outcome {
        match self.read_existing(msr, host) {
            Some(value) => Outcome::Value(value),
            None => Outcome::GeneralProtection,
        }
    }

    /// Performs a write of `msr`.
    pub fn write<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        self.settle_freeze(host);
        let written = self.write_existing(msr, value, host);
        self.apply(host);
        match written {
            Some(()) => Outcome::Done,
            None => Outcome::GeneralProtection,
        }
    }

    /// Performs RDPMC with this ECX (SDM vol. 2B). `ring` is who executes it, and `pce` is CR4.PCE:
    /// user space may read counters only with it.
    ///
    /// ECX\[31:16\] is the type: 0 for general counters, 0x4000 for fixed ones; the others, among
    /// them 0x2000 for performance metrics and the fast reads of processors without architectural
    /// performance monitoring, are not there.
    pub fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        ecx: u32,
        ring: Ring,
        pce: bool,
        host: &mut H,
    ) -> Outcome {
        let index = u8::try_from(ecx & 0xffff).ok();
        let counter = match (ecx >> 16, index) {
            (0, Some(n)) => self.general(n),
            (0x4000, Some(n)) => self.fixed(n),
            _ => None,
        };
        match counter {
            Some(n) if ring == Ring::Kernel || pce => Outcome::Value(self.counter(n, host)),
            _ => Outcome::GeneralProtection,
        }
    }

    /// `None`: #GP.
    fn read_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        host: &mut H,
    ) -> Option<u64> {
        Some(match msr {
            Msr::PerfEvtSel(n) => self.selects[self.general(n)?].0,
            Msr::Pmc(n) => self.counter(self.general(n)?, host),
            Msr::FullWidthPmc(n) => self.counter(self.full_width(n)?, host),
            Msr::FixedCtr(n) => self.counter(self.fixed(n)?, host),
            Msr::FixedCtrCtrl => self.fixed_ctrl,
            Msr::GlobalStatus => {
                // A counter whose bit is set already cannot change anything.
                let clear = self.implemented() - self.overflowed;
                self.settle(self.bank.hosted.in_doubt(clear, host), host);
                self.apply(host);
                to_global(self.overflowed) | self.status
            }
            Msr::GlobalCtrl => {
                self.settle_freeze(host);
                self.apply(host);
                to_global(self.global)
            }
            Msr::GlobalOvfCtrl => 0,
            Msr::GlobalStatusSet => self.since_v4(0)?,
            Msr::GlobalInuse => self.since_v4(self.in_use())?,
            Msr::PerfCapabilities => {
                let capability = &self.config.capability;
                capability.pdcm.then(|| capability.perf_capabilities())?
            }
            Msr::DebugCtl => self.debugctl,
        })
    }

    /// `None`: #GP, and nothing has changed.
    fn write_existing<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: Msr,
        value: u64,
        host: &mut H,
    ) -> Option<()> {
        let capability = self.config.capability;
        let fits = |reserved: u64| (value & reserved == 0).then_some(());
        match msr {
            Msr::PerfEvtSel(n) => {
                let n = self.general(n)?;
                fits(capability.perfevtsel_reserved())?;
                self.configure(n, RawPerfEvtSel(value), host);
            }
            Msr::Pmc(n) => {
                let n = self.general(n)?;
                let extended = i64::from(value as u32 as i32) as u64;
                self.set_counter(n, extended & capability.counter_mask(n), host);
            }
            Msr::FullWidthPmc(n) => {
                let n = self.full_width(n)?;
                fits(!capability.counter_mask(n))?;
                self.set_counter(n, value, host);
            }
            Msr::FixedCtr(n) => {
                let n = self.fixed(n)?;
                fits(!capability.counter_mask(n))?;
                self.set_counter(n, value, host);
            }
            Msr::FixedCtrCtrl => {
                fits(capability.fixed_ctrl_reserved())?;
                self.configure_fixed(value, host);
            }
            Msr::GlobalCtrl => {
                fits(capability.global_ctrl_reserved())?;
                let new = from_global(value);
                let changed = (new - self.global) | (self.global - new);
                self.bank.hosted.touch(changed & self.enabled, host);
                self.global = new;
            }
            Msr::GlobalOvfCtrl => {
                fits(capability.ovf_ctrl_reserved())?;
                // What overflowed before this write is cleared by it, noticed or not.
                let cleared = from_global(value);
                self.settle(self.bank.hosted.in_doubt(cleared, host), host);
                self.overflowed -= cleared;
                self.status &= !value;
            }
            Msr::GlobalStatusSet => {
                self.since_v4(0)?;
                fits(capability.status_set_reserved())?;
                let new = from_global(value) - self.overflowed;
                self.settle(new, host);
                self.overflowed |= new;
                self.status |= value & !to_global(CounterSet::from_bits(u32::MAX));
            }
            Msr::DebugCtl => {
                fits(capability.debugctl_reserved())?;
                // What overflowed before the guest wanted it to freeze does not freeze.
                if self.debugctl != value {
                    self.settle(self.interrupting, host);
                }
                self.debugctl = value;
            }
            Msr::GlobalStatus | Msr::GlobalInuse | Msr::PerfCapabilities => return None,
        }
        Some(())
    }

    fn counter<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) -> u64 {
        self.settle_freeze(host);
        self.look(n, host);
        self.apply(host);
        self.bank.counters[n].value
    }

    fn set_counter<H: CounterHost<CounterConfig>>(&mut self, n: u8, value: u64, host: &mut H) {
        self.look(n, host);
        self.bank.counters[n].value = value;
        self.rearm(n, host);
    }

    fn configure<H: CounterHost<CounterConfig>>(
        &mut self,
        n: u8,
        raw: RawPerfEvtSel,
        host: &mut H,
    ) {
        let old = self.selects[n];
        if old == raw {
            return;
        }
        let only = CounterSet::of(n);
        let version = self.config.capability.version;
        let any_thread = (old.0 ^ raw.0) & RawPerfEvtSel::ANY_THREAD != 0;
        self.bank.hosted.touch(only, host);
        if any_thread || old.config(version) != raw.config(version) || !raw.has(RawPerfEvtSel::EN) {
            self.bank.hosted.stop(only, host);
        }
        // Under the old register, and after the pause, so that once is enough.
        self.settle(only, host);
        self.selects[n] = raw;
        self.classify(only);
    }

    fn configure_fixed<H: CounterHost<CounterConfig>>(&mut self, value: u64, host: &mut H) {
        let old = self.fixed_ctrl;
        let mut changed = CounterSet::EMPTY;
        let mut otherwise = CounterSet::EMPTY;
        for n in 0..MAX_FIXED {
            let (before, after) = (fixed_ctrl::field(old, n), fixed_ctrl::field(value, n));
            if before != after {
                changed.insert(FIXED + n);
            }
            if (before ^ after) & !fixed_ctrl::PMI != 0 {
                otherwise.insert(FIXED + n);
            }
        }
        self.bank.hosted.touch(changed, host);
        self.bank.hosted.stop(otherwise, host);
        self.settle(changed, host);
        self.fixed_ctrl = value;
        self.classify(changed);
    }

    fn full_width(&self, n: u8) -> Option<u8> {
        self.general(n)
            .filter(|_| self.config.capability.full_width_writes)
    }

    fn since_v4(&self, value: u64) -> Option<u64> {
        (self.config.capability.version >= Version::V4).then_some(value)
    }

    /// IA32_PERF_GLOBAL_INUSE: counters with an event select or an enable field that is not zero,
    /// and bit 63 if any asks for an interrupt (SDM 20.2.4.3).
    fn in_use(&self) -> u64 {
        let mut used = CounterSet::EMPTY;
        for n in self.implemented() {
            let is_used = match fixed_index(n) {
                Some(fixed) => {
                    let field = fixed_ctrl::field(self.fixed_ctrl, fixed);
                    field & (fixed_ctrl::OS | fixed_ctrl::USR) != 0
                }
                None => self.selects[n].select() != 0,
            };
            if is_used {
                used.insert(n);
            }
        }
        to_global(used) | u64::from(!self.interrupting.is_empty()) << 63
    }

    /// Bits of IA32_PERF_GLOBAL_STATUS that can be set and are no counter's.
    pub(super) fn status_bits(&self) -> u64 {
        let counters = to_global(self.implemented());
        !self.config.capability.status_set_reserved() & !counters | global_status::COND_CHGD
    }
}
