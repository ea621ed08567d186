//! The models of either vendor, what they decode, and the paravirtual device.

use core::hint::black_box;

use vpmu::paravirt::{Device, GuestHalf, Offer, PAGE_SIZE, Page};
use vpmu::x86::{CounterConfig, EventFilter, MaskedEvent, amd, intel, lbr};

use crate::{Host, Watch};

/// Memory that somebody else writes, and that must not be reached past its end.
struct Memory([u64; PAGE_SIZE / 8]);

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
pub fn any() {
    type Pmu = vpmu::x86::Pmu<Watch>;
    keep! {
        Pmu::with_events as fn(_, _) -> _,
        Pmu::rdmsr::<Host> as fn(_, _, _) -> _,
        Pmu::wrmsr::<Host> as fn(_, _, _, _) -> _,
        Pmu::rdpmc::<Host> as fn(_, _, _, _, _) -> _,
        Pmu::overflow::<Host> as fn(_, _, _, _) -> _,
        Pmu::emulated::<Host> as fn(_, _, _, _, _) -> _,
        Pmu::pmi_due as fn(_) -> _,
        Pmu::take_pmi as fn(_) -> _,
        Pmu::load::<Host> as fn(_, _),
        Pmu::put::<Host> as fn(_, _),
        Pmu::hold::<Host> as fn(_, _),
        Pmu::end_slice::<Host> as fn(_, _),
        Pmu::reset::<Host> as fn(_, _),
        Pmu::set_filter::<Host> as fn(_, _, _),
        Pmu::save::<Host> as fn(_, _) -> _,
        Pmu::restore::<Host> as fn(_, _, _) -> _,
        Pmu::counter_state as fn(_, _) -> _,
        Pmu::capability as fn(_) -> _,
        Pmu::statistics as fn(_) -> _,
        Pmu::pebs_statistics as fn(_) -> _,
        Pmu::branch::<Host> as fn(_, _, _) -> _,
        Pmu::disable_lbr::<Host> as fn(_, _) -> _,
        Pmu::end_following::<Host> as fn(_, _) -> _,
        Pmu::branch_filter as fn(_) -> _,
        Pmu::branches_awaited as fn(_) -> _,
        Pmu::lbr_statistics as fn(_) -> _,
    }
}

#[unsafe(no_mangle)]
pub fn described() {
    type Intel = intel::Capability;
    type Amd = amd::Capability;
    keep! {
        Intel::leaf_01_ecx as fn(_) -> _,
        Intel::leaf_01_edx as fn(_) -> _,
        Intel::leaf_07_edx as fn(_) -> _,
        Intel::leaf_07_1_eax as fn(_) -> _,
        Intel::leaf_0a as fn(_) -> _,
        Intel::leaf_1c as fn(_) -> _,
        Intel::leaf_23 as fn(_, _) -> _,
        Intel::misc_enable as fn(_) -> _,
        Intel::perf_capabilities as fn(_) -> _,
        Intel::counter_mask as fn(_, _) -> _,
        Intel::reserved as fn(_) -> _,
        Amd::leaf_8000_0022 as fn(_) -> _,
        Amd::leaf_8000_0001_ecx as fn(_) -> _,
        Amd::has_event as fn(_, _) -> _,
        intel::Msr::decode as fn(_) -> _,
        intel::Msr::address as fn(_) -> _,
        amd::Msr::decode as fn(_) -> _,
        amd::Msr::address as fn(_) -> _,
        lbr::Filter::passes as fn(_, _) -> _,
        lbr::Stack::record as fn(_, _) -> _,
        EventFilter::with as fn(_, _) -> _,
        EventFilter::allows as fn(_, _) -> _,
        MaskedEvent::from_kvm as fn(_) -> _,
        CounterConfig::raw as fn(_) -> _,
        CounterConfig::architectural as fn(_) -> _,
    }
}

#[unsafe(no_mangle)]
pub fn paravirtual() {
    keep! {
        Offer::leaf as fn(_) -> _,
        Device::new as fn(_) -> _,
        Device::attach::<Host, Memory> as fn(_, _, _) -> _,
        Device::detach::<Host> as fn(_, _),
        Device::doorbell::<Host, Memory> as fn(_, _, _, _) -> _,
        Device::overflow::<Host, Memory> as fn(_, _, _, _, _),
        Device::nmi_due as fn(_) -> _,
        Device::take_nmi as fn(_) -> _,
        Device::put::<Host, Memory> as fn(_, _, _),
        Device::load::<Host, Memory> as fn(_, _, _),
        Device::end_slice::<Host, Memory> as fn(_, _, _),
        Device::leave::<Host, Memory> as fn(_, _, _),
        Device::save::<Host, Memory> as fn(_, _, _) -> _,
        Device::restore::<Host, Memory> as fn(_, _, _, _) -> _,
        Device::counter_state as fn(_, _) -> _,
        Device::is_attached as fn(_) -> _,
        Device::statistics as fn(_) -> _,
        GuestHalf::prepare::<Memory> as fn(_, _),
        GuestHalf::wish::<Memory> as fn(_, _, _, _, _, _, _),
        GuestHalf::want::<Memory> as fn(_, _, _),
        GuestHalf::interrupt::<Memory> as fn(_, _) -> _,
    }
}
