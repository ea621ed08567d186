//! Tests of samples that the host takes by itself, as records in the guest's buffer.

use vpmu::counter::{CounterHost as _, CounterSet};
use vpmu::paravirt::{RECORDS, command, word};

use crate::support::{BUFFER, CYCLES, Host, RECORDING, Vcpu, nth, repeating};

const PERIOD: u64 = 1000;

fn sampler() -> Host {
    Host {
        room: 2560,
        ..repeating()
    }
}

impl Vcpu {
    /// Has counter 0 record a sample each `PERIOD` events.
    fn recording(host: Host) -> Self {
        let mut vcpu = Self::new(host);
        vcpu.put(word::BUFFER, BUFFER);
        vcpu.record(0, PERIOD);
        vcpu.want(1);
        vcpu.ring(command::APPLY);
        vcpu
    }

    fn put(&self, word: usize, value: u64) {
        vpmu::paravirt::Page::store(&self.page, word, value);
    }

    fn record(&mut self, counter: u8, period: u64) {
        let (page, counter) = (&self.page, nth(counter));
        self.guest
            .wish(page, counter, CYCLES, RECORDING, period, period);
    }

    /// Takes the records that there are.
    fn take_records(&self) -> Vec<[u64; 4]> {
        let (tail, head) = (self.word(word::TAIL), self.word(word::HEAD));
        assert!(head - tail <= RECORDS, "{head} {tail}");
        self.put(word::TAIL, head);
        (tail..head).map(|n| self.page.record(n)).collect()
    }

    /// Runs, and handles each interrupt. Returns the records, and how many overflows were interrupts.
    fn run_handling(&mut self, periods: u64) -> (Vec<[u64; 4]>, usize) {
        let (mut records, mut interrupts) = (Vec::new(), 0);
        for _ in 0..periods {
            self.run(PERIOD);
            if self.nmi {
                interrupts += self.handle().len() as usize;
                records.extend(self.take_records());
            }
        }
        (records, interrupts)
    }
}

/// The first overflow is an interrupt, and 256 records are one. Each period has a sample.
#[test]
fn samples_are_records_and_few_are_interrupts() {
    let mut vcpu = Vcpu::recording(sampler());
    let (mut records, interrupts) = vcpu.run_handling(2000);
    assert_eq!((interrupts, vcpu.nmis), (1, 1 + 1999 / 256));
    vcpu.ring(command::READ);
    records.extend(vcpu.take_records());
    assert_eq!(records.len(), 1999);
    for (record, n) in records.iter().zip(2..) {
        // The samples of this host are in user space at even addresses.
        assert_eq!(*record, [n * PERIOD, n * PERIOD, PERIOD, 1 << 8]);
    }
    assert_eq!(vcpu.count_of(0), 2000 * PERIOD);
    assert_eq!(vcpu.word(word::overflows(nth(0))), 1);
    assert_eq!(vcpu.word(word::next(nth(0))), 2001 * PERIOD);
    let statistics = vcpu.device.record_statistics();
    assert_eq!((statistics.records, statistics.lost), (1999, 0));
}

/// As where adjtimex(2) has made the clock of the host's timers 1.4 % fast.
#[test]
fn a_timer_that_gains_on_the_count_makes_no_period_pass_without_a_sample() {
    let mut vcpu = Vcpu::recording(Host {
        timer_gains_in: 73,
        ..sampler()
    });
    let mut records = 0;
    for _ in 0..200 {
        records += vcpu.run_handling(40).0.len() as u64;
        vcpu.ring(command::READ);
        records += vcpu.take_records().len() as u64;
        let ahead = vcpu.count_of(0) - vcpu.host.read(nth(0));
        assert!(ahead < PERIOD, "{ahead} events that have not been");
    }
    assert_eq!(vcpu.device.record_statistics().skipped, 0);
    assert_eq!(records, 200 * 40 - 1);
    assert!(
        vcpu.nmis <= 1 + 7999 / 256,
        "{}: no report of what is left",
        vcpu.nmis
    );
}

#[test]
fn half_a_buffer_of_records_reads_once() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run_handling(1);
    let before = vcpu.operations();
    vcpu.run_handling(2560);
    assert_eq!(vcpu.operations(), before + 10);
}

#[test]
fn a_host_that_takes_no_samples_interrupts() {
    for (room, buffer) in [(0, BUFFER), (8, BUFFER), (2560, 0)] {
        let mut vcpu = Vcpu::new(Host {
            room,
            ..repeating()
        });
        vcpu.put(word::BUFFER, buffer);
        vcpu.record(0, PERIOD);
        vcpu.want(1);
        vcpu.ring(command::APPLY);
        let (records, interrupts) = vcpu.run_handling(100);
        assert_eq!((records.len(), interrupts), (0, 100), "{room} {buffer:#x}");
    }
}

#[test]
fn a_host_that_misses_its_samples_interrupts_again() {
    let mut vcpu = Vcpu::recording(Host {
        takes_one_of: 4,
        ..sampler()
    });
    let (_, interrupts) = vcpu.run_handling(1000);
    // The next overflow begins the sampling anew.
    assert!((2..10).contains(&interrupts), "{interrupts}");
    assert!(vcpu.device.record_statistics().skipped > 100);
}

/// A guest that takes no records keeps those that it has, and is told how many there were more.
#[test]
fn a_full_buffer_loses_what_comes_and_says_so() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run(1201 * PERIOD);
    assert_eq!(vcpu.nmis, 1, "none is acknowledged");
    vcpu.ring(command::READ);
    assert_eq!(vcpu.word(word::lost(nth(0))), 1200 - RECORDS);
    let records = vcpu.take_records();
    assert_eq!(records.len() as u64, RECORDS);
    assert_eq!(records[0][0], 2 * PERIOD);
}

/// A buffer that is no memory, and a tail that is no tail, lose the guest its records.
#[test]
fn a_wrong_buffer_has_no_records() {
    for (at, tail) in [
        (BUFFER + 0x1000, 0),
        (!0xfff, 0),
        (BUFFER, 5),
        (BUFFER, u64::MAX - 600),
    ] {
        let mut vcpu = Vcpu::recording(sampler());
        vcpu.put(word::BUFFER, at);
        vcpu.put(word::TAIL, tail);
        vcpu.ring(command::APPLY);
        vcpu.run(500 * PERIOD);
        vcpu.ring(command::READ);
        let head = vcpu.word(word::HEAD);
        assert!(head < 499 && (at == BUFFER + 0x1000 || head == 0), "{head}");
        assert_eq!(vcpu.word(word::lost(nth(0))), 499 - head, "{at:#x} {tail}");
    }
}

/// A switch of tasks takes the samples with the count, and the next wish begins with an interrupt.
#[test]
fn a_switch_brings_the_samples_of_the_task_that_goes() {
    let mut vcpu = Vcpu::recording(sampler());
    for _ in 0..10 {
        let (records, interrupts) = vcpu.run_handling(20);
        assert_eq!((records.len(), interrupts), (0, 1));
        vcpu.ring(command::FREEZE);
        assert_eq!(vcpu.take_records().len(), 19);
        // Nothing counts, and nothing is sampled.
        vcpu.run(50 * PERIOD);
        vcpu.record(0, PERIOD);
        vcpu.ring(command::APPLY);
        assert!(vcpu.take_records().is_empty());
    }
}

/// The same wish goes on in the middle of a period.
#[test]
fn a_pause_keeps_the_period() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run_handling(3);
    vcpu.run(PERIOD / 2);
    vcpu.ring(command::FREEZE);
    vcpu.run(7 * PERIOD);
    vcpu.ring(command::APPLY);
    vcpu.run(PERIOD / 2);
    vcpu.ring(command::READ);
    let records = vcpu.take_records();
    let addresses: Vec<u64> = records.iter().map(|record| record[0]).collect();
    assert_eq!(addresses, [2000, 3000, 4000]);
}

/// `-F` changes the period a little at each tick, and sometimes much.
#[test]
fn a_new_period_samples_anew_from_the_next_doorbell() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run_handling(11);
    vcpu.guest_period(0, PERIOD + PERIOD / 32);
    vcpu.ring(command::READ);
    let before = vcpu.operations();
    vcpu.run_handling(10);
    vcpu.ring(command::READ);
    assert_eq!(vcpu.take_records().len(), 20, "as before");
    assert_eq!(vcpu.operations() - before, 1, "the read");
    vcpu.guest_period(0, 400);
    vcpu.ring(command::READ);
    vcpu.run(10 * 400);
    vcpu.ring(command::READ);
    let records = vcpu.take_records();
    let of_period: Vec<u64> = records.iter().map(|record| record[2]).collect();
    assert_eq!(of_period, [400; 10]);
    assert_eq!(vcpu.word(word::next(nth(0))), 21 * PERIOD + 11 * 400);
}

#[test]
fn several_counters_share_the_buffer() {
    let mut vcpu = Vcpu::new(sampler());
    vcpu.put(word::BUFFER, BUFFER);
    (0..3).for_each(|n| vcpu.record(n, PERIOD + u64::from(n)));
    vcpu.want(0b111);
    vcpu.ring(command::APPLY);
    let (mut records, interrupts) = vcpu.run_handling(3000);
    assert_eq!(interrupts, 3);
    vcpu.ring(command::READ);
    records.extend(vcpu.take_records());
    for n in 0..3 {
        let own = records.iter().filter(|record| record[3] & 0xff == n);
        assert_eq!(own.count() as u64, 3000 * PERIOD / (PERIOD + n) - 1);
    }
}

/// A save makes records of all samples, and the next host goes on behind them.
#[test]
fn a_saved_device_goes_on_with_its_buffer() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run_handling(101);
    let state = vcpu.device.save(&mut vcpu.host, Some(&vcpu.page));
    let restored = vcpu
        .device
        .restore(&state, &mut vcpu.host, Some(&vcpu.page));
    restored.unwrap();
    vcpu.take_nmi();
    assert!(vcpu.nmi, "the guest is to take them");
    let (records, interrupts) = vcpu.run_handling(100);
    assert_eq!((records.len(), interrupts), (100, 1));
    vcpu.ring(command::READ);
    assert_eq!(vcpu.take_records().len(), 99);
}

/// A host event that is given back takes its samples along, and nobody waits for them.
#[test]
fn a_counter_that_is_given_back_interrupts_again() {
    let mut vcpu = Vcpu::recording(sampler());
    vcpu.run_handling(10);
    vcpu.ring(command::FREEZE);
    for _ in 0..2 {
        vcpu.device.end_slice(&mut vcpu.host, Some(&vcpu.page));
    }
    assert_eq!(vcpu.device.statistics().releases, 1);
    vcpu.ring(command::APPLY);
    let overflows = CounterSet::of(nth(0));
    vcpu.run(PERIOD);
    assert_eq!(vcpu.handle(), overflows);
}
