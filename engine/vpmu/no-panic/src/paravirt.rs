//! The paravirtual device, with a page that may hold anything.

use core::hint::black_box;

use vpmu::counter::{Counter, CounterState, Report, Statistics};
use vpmu::paravirt::{
    BadOffer, Device, DeviceState, GuestHalf, NotAPage, Offer, PAGE_SIZE, Page, RestoreError,
};
use vpmu::x86::{CpuidLeaf, Outcome};

use crate::Host;

/// Memory that somebody else writes, and that must not be reached past its end.
pub struct Memory([u64; PAGE_SIZE / 8]);

impl Page for Memory {
    fn load(&self, word: usize) -> u64 {
        black_box(self.0.get(word).copied()).unwrap_or(0)
    }
    fn store(&self, word: usize, value: u64) {
        black_box((word, value));
    }
    fn fence(&self) {
        black_box(());
    }
}

#[unsafe(no_mangle)]
pub fn paravirt_new(offer: Offer) -> Result<Device, BadOffer> {
    Device::new(offer)
}

#[unsafe(no_mangle)]
pub fn paravirt_leaf(offer: &Offer) -> CpuidLeaf {
    offer.leaf()
}

#[unsafe(no_mangle)]
pub fn paravirt_attach(
    device: &mut Device,
    host: &mut Host,
    page: &Memory,
) -> Result<(), NotAPage> {
    device.attach(host, page)
}

#[unsafe(no_mangle)]
pub fn paravirt_detach(device: &mut Device, host: &mut Host) {
    device.detach(host);
}

#[unsafe(no_mangle)]
pub fn paravirt_doorbell(
    device: &mut Device,
    bits: u64,
    host: &mut Host,
    page: Option<&Memory>,
) -> Outcome {
    device.doorbell(bits, host, page)
}

#[unsafe(no_mangle)]
pub fn paravirt_overflow(
    device: &mut Device,
    counter: Counter,
    report: Report,
    host: &mut Host,
    page: Option<&Memory>,
) -> bool {
    device.overflow(counter, report, host, page);
    device.nmi_due() && device.take_nmi()
}

#[unsafe(no_mangle)]
pub fn paravirt_slices(device: &mut Device, host: &mut Host, page: Option<&Memory>) {
    device.put(host, page);
    device.load(host, page);
    device.end_slice(host, page);
    device.leave(host, page);
}

#[unsafe(no_mangle)]
pub fn paravirt_save(device: &mut Device, host: &mut Host, page: Option<&Memory>) -> DeviceState {
    device.save(host, page)
}

#[unsafe(no_mangle)]
pub fn paravirt_restore(
    device: &mut Device,
    state: &DeviceState,
    host: &mut Host,
    page: Option<&Memory>,
) -> Result<(), RestoreError> {
    device.restore(state, host, page)
}

#[unsafe(no_mangle)]
pub fn paravirt_state(
    device: &Device,
    counter: Counter,
) -> (Option<CounterState>, bool, Statistics) {
    let state = device.counter_state(counter);
    (state, device.is_attached(), device.statistics())
}

#[unsafe(no_mangle)]
pub fn paravirt_guest(guest: &mut GuestHalf, page: &Memory, counter: Counter, value: u64) -> u32 {
    guest.prepare(page);
    guest.wish(page, counter, value, value, value, value);
    guest.want(page, black_box(counter.alone()));
    guest
        .interrupt(page)
        .map_or(0, vpmu::counter::CounterSet::bits)
}
