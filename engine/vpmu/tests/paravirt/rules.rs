//! Tests of the page's rules, each rule by itself.

use vpmu::counter::{CounterSet, CounterState, Lost};
use vpmu::paravirt::{
    Device, DeviceState, GuestHalf, NotAPage, Offer, Page, command, flag, state, word,
};
use vpmu::x86::Outcome;

use crate::support::{
    BOTH, CYCLES, Host, Memory, SAMPLING, Vcpu, counting, nth, offer, repeating, sampling,
};

impl Vcpu {
    pub(crate) fn guest_period(&mut self, counter: u8, period: u64) {
        self.page.store(word::period(nth(counter)), period);
    }
}

#[test]
fn memory_without_a_tag_is_left_alone() {
    let page = Memory::new();
    let mut device = Device::new(offer()).unwrap();
    assert_eq!(device.attach(&mut Host::default(), &page), Err(NotAPage));
    assert_eq!(page.load(word::DEVICE), 0);
    let rung = device.doorbell(command::APPLY, &mut Host::default(), Some(&page));
    assert_eq!(rung, Outcome::GeneralProtection);
}

#[test]
fn no_page_has_more_than_16_counters() {
    for counters in [0, 17, 255] {
        assert!(
            Device::new(Offer {
                counters,
                ..offer()
            })
            .is_err()
        );
    }
}

#[test]
fn wishes_hold_from_the_doorbell_on_and_all_at_once() {
    let mut vcpu = Vcpu::new(repeating());
    vcpu.guest.wish(&vcpu.page, nth(0), CYCLES, BOTH, 0, 0);
    vcpu.guest.wish(&vcpu.page, nth(1), 0xc0, BOTH, 0, 0);
    vcpu.want(0b11);
    vcpu.run(10);
    vcpu.ring(command::APPLY);
    vcpu.run(5);
    assert_eq!(vcpu.count_of(0), 0, "nobody has asked");
    vcpu.ring(command::READ);
    assert_eq!((vcpu.count_of(0), vcpu.count_of(1)), (5, 5));
    assert_eq!(vcpu.word(word::state(nth(0))), state::COUNTING);
}

#[test]
fn an_old_generation_goes_on_and_a_new_one_begins() {
    let mut vcpu = Vcpu::new(repeating());
    counting(&mut vcpu, 1);
    vcpu.run(7);
    vcpu.want(0);
    vcpu.ring(command::APPLY);
    assert_eq!(vcpu.word(word::state(nth(0))), state::OFF);
    vcpu.run(100);
    vcpu.want(1);
    vcpu.ring(command::APPLY);
    vcpu.run(7);
    vcpu.ring(command::APPLY);
    assert_eq!(vcpu.count_of(0), 14, "applied twice is applied once");
    counting(&mut vcpu, 1);
    assert_eq!(vcpu.count_of(0), 0);
}

#[test]
fn an_interrupt_that_was_put_off_comes_again_when_asked_for() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 10);
    vcpu.run(10);
    assert!(std::mem::take(&mut vcpu.nmi), "the guest defers it");
    vcpu.run(10);
    assert!(!vcpu.nmi, "one is on its way");
    vcpu.ring(command::INJECT);
    assert_eq!(vcpu.handle(), CounterSet::of(nth(0)));
    assert_eq!(vcpu.word(word::overflows(nth(0))), 2);
    vcpu.ring(command::INJECT);
    assert!(!vcpu.nmi, "acknowledged");
}

#[test]
fn what_is_not_offered_is_refused_and_said_so() {
    let mut vcpu = Vcpu::new(repeating());
    let unsupported = [(0xc4, BOTH), (0x1234, BOTH), (CYCLES | 1 << 22, BOTH)];
    for (config, flags) in unsupported {
        vcpu.guest.wish(&vcpu.page, nth(2), config, flags, 0, 0);
        vcpu.want(0b100);
        vcpu.ring(command::APPLY);
        assert_eq!(
            vcpu.word(word::state(nth(2))),
            state::UNSUPPORTED,
            "{config:#x}"
        );
        let lost = CounterState::Lost(Lost::Unsupported);
        assert_eq!(vcpu.device.counter_state(nth(2)), Some(lost));
    }
    let no_rings = Offer {
        rings: false,
        ..offer()
    };
    vcpu.device = Device::new(no_rings).unwrap();
    vcpu.host = repeating();
    vcpu.device.attach(&mut vcpu.host, &vcpu.page).unwrap();
    vcpu.guest
        .wish(&vcpu.page, nth(0), CYCLES, flag::USER, 0, 0);
    vcpu.want(1);
    vcpu.ring(command::APPLY);
    assert_eq!(vcpu.word(word::state(nth(0))), state::UNSUPPORTED);
}

#[test]
fn a_host_that_was_busy_is_asked_again() {
    let mut vcpu = Vcpu::new(repeating());
    vcpu.host.refuses = Some(Lost::Busy);
    counting(&mut vcpu, 1);
    assert_eq!(vcpu.word(word::state(nth(0))), state::BUSY);
    vcpu.host.refuses = None;
    vcpu.device.end_slice(&mut vcpu.host, Some(&vcpu.page));
    assert_eq!(vcpu.word(word::state(nth(0))), state::COUNTING);
}

#[test]
fn a_period_below_the_floor_is_stretched_and_said_so() {
    let floor = 100;
    let mut vcpu = Vcpu::new(Host {
        floor,
        ..repeating()
    });
    vcpu.sample(0, 1, 1);
    vcpu.sample(1, 500, 500);
    vcpu.want(0b11);
    vcpu.ring(command::APPLY);
    assert_eq!(vcpu.word(word::FLOOR), 200, "two share it");
    vcpu.run(1000);
    vcpu.handle();
    assert_eq!(vcpu.word(word::overflows(nth(0))), 5);
    assert_eq!(vcpu.word(word::last_period(nth(0))), 200);
    assert_eq!(vcpu.count_of(0), 1000);
    assert_eq!(vcpu.word(word::overflows(nth(1))), 2);
}

#[test]
fn a_page_that_was_let_go_of_is_not_written() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 10);
    vcpu.device.detach(&mut vcpu.host);
    let before = vcpu.page.clone();
    vcpu.run(100);
    let (host, page) = (&mut vcpu.host, &vcpu.page);
    assert_eq!(
        vcpu.device.doorbell(command::READ, host, Some(page)),
        Outcome::GeneralProtection
    );
    vcpu.device.load(host, Some(page));
    vcpu.device.put(host, Some(page));
    assert!((0..512).all(|n| page.load(n) == before.load(n)));
    assert!(!vcpu.device.take_nmi());
}

#[test]
fn a_device_that_leaves_says_so_and_interrupts() {
    let mut vcpu = Vcpu::new(repeating());
    counting(&mut vcpu, 1);
    vcpu.run(50);
    vcpu.device.leave(&mut vcpu.host, Some(&vcpu.page));
    assert!(vcpu.device.take_nmi());
    assert_eq!(vcpu.count_of(0), 50);
    assert_eq!(vcpu.word(word::DEVICE), state::GONE);
    let rung = vcpu
        .device
        .doorbell(command::READ, &mut vcpu.host, Some(&vcpu.page));
    assert_eq!(rung, Outcome::GeneralProtection);
}

#[test]
fn a_device_that_leaves_sends_no_interrupt_behind_another() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 100);
    vcpu.run(150);
    assert_eq!(vcpu.nmis, 1);
    vcpu.device.leave(&mut vcpu.host, Some(&vcpu.page));
    assert!(!vcpu.device.take_nmi());
    assert_eq!(vcpu.word(word::DEVICE), state::GONE);
    vcpu.handle();
    assert_eq!(vcpu.word(word::SEQ), vcpu.word(word::ACK));
}

#[test]
fn memory_that_has_gone_ends_the_sharing() {
    let mut vcpu = Vcpu::new(repeating());
    counting(&mut vcpu, 2);
    let rung = vcpu
        .device
        .doorbell(command::READ, &mut vcpu.host, None::<&Memory>);
    assert_eq!(rung, Outcome::GeneralProtection);
    assert!(!vcpu.device.is_attached());
}

#[test]
fn a_saved_device_goes_on_in_another() {
    let mut vcpu = Vcpu::new(repeating());
    vcpu.sample(0, 100, 100);
    vcpu.guest.wish(&vcpu.page, nth(3), CYCLES, BOTH, 0, 0);
    vcpu.want(0b1001);
    vcpu.ring(command::APPLY);
    vcpu.run(150);
    let state = vcpu.device.save(&mut vcpu.host, Some(&vcpu.page));
    let mut other = Device::new(offer()).unwrap();
    let mut host = repeating();
    other.restore(&state, &mut host, Some(&vcpu.page)).unwrap();
    assert_eq!(other.save(&mut host, Some(&vcpu.page)), state);
    (vcpu.device, vcpu.host) = (other, host);
    vcpu.run(50);
    assert_eq!(vcpu.word(word::overflows(nth(0))), 2);
    vcpu.ring(command::READ);
    assert_eq!((vcpu.count_of(0), vcpu.count_of(3)), (200, 200));
}

#[test]
fn a_state_of_another_kind_is_refused() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 100);
    let good = vcpu.device.save(&mut vcpu.host, Some(&vcpu.page));
    let mut refuse = |change: fn(&mut DeviceState)| {
        let mut state = good.clone();
        change(&mut state);
        let restored = vcpu
            .device
            .restore(&state, &mut vcpu.host, Some(&vcpu.page));
        assert!(restored.is_err());
        assert_eq!(vcpu.device.save(&mut vcpu.host, Some(&vcpu.page)), good);
    };
    refuse(|state| state.layout = 99);
    refuse(|state| state.wanted = 1 << 5);
    refuse(|state| state.counters[0].next = u64::MAX);
    refuse(|state| state.counters[0].next = state.counters[0].count);
}

#[test]
fn an_nmi_of_somebody_else_is_left_to_them() {
    let vcpu = Vcpu::new(repeating());
    let mut guest = GuestHalf::new();
    assert_eq!(guest.interrupt(&vcpu.page), None);
    assert_eq!(SAMPLING & BOTH, BOTH);
}
