//! A device as a value. The page is part of the guest's memory, and is saved with it.

use core::fmt;

use super::device::Device;
use super::page::{MAX_COUNTERS, Page, flag};
use super::wish::{LONGEST, Wish};
use crate::counter::{Counter, CounterHost, CounterSet, Model};
use crate::x86::CounterConfig;

/// One counter of a saved device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SavedCounter {
    /// What is counted.
    pub config: u64,
    /// How.
    pub flags: u64,
    /// Events in the periods to come.
    pub period: u64,
    /// The wish's number.
    pub generation: u64,
    /// What has been counted.
    pub count: u64,
    /// The count at the next overflow.
    pub next: u64,
    /// Events in the period that the next overflow ends.
    pub length: u64,
    /// Events in the period that the last overflow ended.
    pub last: u64,
    /// Overflows.
    pub overflows: u64,
}

/// All that the host knows of one vCPU's page.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeviceState {
    /// The layout of this value: [`DeviceState::LAYOUT`].
    pub layout: u16,
    /// Whether a page is shared.
    pub attached: bool,
    /// Whether all counters are stopped.
    pub frozen: bool,
    /// Counters that shall count.
    pub wanted: u32,
    /// Interrupts requested.
    pub seq: u64,
    /// The last of them has not been taken.
    // Not in the page: without it, an interrupt that was counted in `seq` would never come.
    pub nmi_due: bool,
    /// Each counter.
    pub counters: [SavedCounter; MAX_COUNTERS as usize],
}

impl DeviceState {
    /// The layout this engine writes and reads.
    pub const LAYOUT: u16 = 1;
}

/// Why a saved device cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by an engine with another layout.
    Layout(u16),
    /// These counters are used, and some of them are not offered here.
    Counters(u32),
    /// A distance that no device has.
    Counter(Counter),
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layout(saved) => write!(
                f,
                "restore a paravirtual PMU of layout {saved}, not {}",
                DeviceState::LAYOUT
            ),
            Self::Counters(saved) => write!(
                f,
                "restore a paravirtual PMU that uses counters {saved:#x}, which are not all offered"
            ),
            Self::Counter(n) => write!(
                f,
                "restore counter {n} of a paravirtual PMU: no device has that"
            ),
        }
    }
}

impl core::error::Error for RestoreError {}

impl Device {
    /// Returns what the host knows at this moment, and brings the page up to date. Nothing stops: the device can go on.
    pub fn save<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        host: &mut H,
        page: Option<&P>,
    ) -> DeviceState {
        // As for a doorbell: what is settled may begin another period.
        self.load_periods(page);
        self.settle(self.unsettled(), host);
        if let Some(page) = page {
            self.overflowed |= self.write_records(host, page);
        }
        self.apply(host);
        self.publish_all(page);
        let mut state = DeviceState {
            layout: DeviceState::LAYOUT,
            attached: self.attached,
            frozen: self.frozen,
            wanted: self.wanted.bits(),
            seq: self.seq,
            nmi_due: self.nmi_due,
            counters: Default::default(),
        };
        for (n, saved) in Counter::all().zip(&mut state.counters) {
            let wish = &self.wishes[n];
            *saved = SavedCounter {
                config: wish.config,
                flags: wish.flags,
                period: wish.period,
                generation: wish.generation,
                count: self.bank.counters[n].value,
                next: wish.next,
                length: wish.length,
                last: wish.last,
                overflows: wish.overflows,
            };
        }
        state
    }

    /// Replaces the device's state by `state`. The page must be as it was at the save. On a vCPU that runs, what is
    /// wanted counts at once.
    ///
    /// # Errors
    ///
    /// Refuses a state that no such device can have. This device is then as it was.
    pub fn restore<H: CounterHost<CounterConfig>, P: Page + ?Sized>(
        &mut self,
        state: &DeviceState,
        host: &mut H,
        page: Option<&P>,
    ) -> Result<(), RestoreError> {
        self.check(state)?;
        // The host events of the guest before would add their counts to the restored ones.
        self.detach(host);
        self.attached = state.attached;
        self.frozen = state.frozen;
        self.wanted = CounterSet::from_bits(state.wanted);
        self.seq = state.seq;
        self.nmi_due = state.nmi_due;
        for (n, saved) in Counter::all().zip(&state.counters) {
            self.wishes[n] = Wish {
                config: saved.config,
                flags: saved.flags,
                period: saved.period,
                generation: saved.generation,
                next: saved.next,
                length: saved.length,
                last: saved.last,
                overflows: saved.overflows,
            };
            self.bank.counters[n].value = saved.count;
        }
        if let Some(page) = page {
            self.samples.go_on(page);
        }
        self.reclassify(self.implemented());
        // Another host may allow other periods.
        self.find_floor(host);
        self.apply(host);
        self.publish_all(page);
        Ok(())
    }

    fn check(&self, state: &DeviceState) -> Result<(), RestoreError> {
        if state.layout != DeviceState::LAYOUT {
            return Err(RestoreError::Layout(state.layout));
        }
        if state.wanted & !self.implemented().bits() != 0 {
            return Err(RestoreError::Counters(state.wanted));
        }
        for (n, saved) in Counter::all().zip(&state.counters) {
            let interrupts = saved.flags & flag::INTERRUPT != 0;
            let distance = saved.next.wrapping_sub(saved.count);
            // A distance of 0 is refused, too: no host event reports an overflow that is due already, so its interrupt
            // would be lost.
            if interrupts && !(1..=LONGEST).contains(&distance) {
                return Err(RestoreError::Counter(n));
            }
        }
        Ok(())
    }
}
