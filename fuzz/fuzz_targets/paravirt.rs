//! A guest of the paravirtual PMU that writes anything into its page, and rings anything.
//!
//! The host that checks how it is called must find nothing to complain of, and nothing may panic.
#![no_main]

#[path = "../../engine/vpmu/tests/paravirt/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use support::{Host, Vcpu};
use vpmu::counter::{Counter, Lost, Report};
use vpmu::paravirt::{DeviceState, Page};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let mut vcpu = Vcpu::new(Host {
        repeats: input.arbitrary()?,
        floor: 16,
        ..Host::default()
    });
    while !input.is_empty() {
        vcpu.nmi = false;
        step(input, &mut vcpu)?;
        vcpu.take_nmi();
    }
    Ok(())
}

fn step(input: &mut Unstructured<'_>, vcpu: &mut Vcpu) -> Result<()> {
    if input.ratio(1, 4)? {
        vcpu.run(u64::from(input.arbitrary::<u16>()? >> 4));
        return Ok(());
    }
    let (device, host, page) = (&mut vcpu.device, &mut vcpu.host, &vcpu.page);
    match input.int_in_range(0..=12)? {
        0..=4 => page.store(place(input)?, value(input)?),
        5..=6 => {
            let _ = device.doorbell(u64::from(input.arbitrary::<u8>()? & 0x1f), host, Some(page));
        }
        7 => {
            let report = *input.choose(&[Report::Due, Report::Moved, Report::Unsure])?;
            if let Some(counter) = Counter::new(input.arbitrary()?) {
                device.overflow(counter, report, host, Some(page));
            }
        }
        8 => device.put(host, Some(page)),
        9 => device.load(host, Some(page)),
        10 => device.end_slice(host, Some(page)),
        11 => {
            let mut state = device.save(host, Some(page));
            if input.arbitrary()? {
                forge(input, &mut state)?;
            }
            // A forged state may be refused.
            let _ = device.restore(&state, host, Some(page));
        }
        _ => {
            host.refuses = *input.choose(&[None, Some(Lost::Busy), Some(Lost::Unsupported)])?;
            if input.arbitrary()? {
                let _ = device.attach(host, page);
            } else {
                device.detach(host);
            }
        }
    }
    Ok(())
}

fn forge(input: &mut Unstructured<'_>, state: &mut DeviceState) -> Result<()> {
    let n = input.int_in_range(0..=15_usize)?;
    let counter = &mut state.counters[n];
    let words = [
        &mut counter.count,
        &mut counter.next,
        &mut counter.period,
        &mut counter.length,
        &mut counter.flags,
        &mut counter.config,
    ];
    for word in words {
        if input.arbitrary()? {
            *word = value(input)?;
        }
    }
    state.wanted = input.arbitrary()?;
    Ok(())
}

fn place(input: &mut Unstructured<'_>) -> Result<usize> {
    Ok(match input.arbitrary()? {
        true => 32 + 16 * input.int_in_range(0..=4_usize)? + input.int_in_range(0..=13_usize)?,
        false => input.int_in_range(0..=511_usize)?,
    })
}

fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=3)? {
        0 => u64::from(input.arbitrary::<u8>()?),
        1 => 1 << input.int_in_range(0..=63)?,
        2 => u64::MAX - u64::from(input.arbitrary::<u8>()?),
        _ => input.arbitrary()?,
    })
}
