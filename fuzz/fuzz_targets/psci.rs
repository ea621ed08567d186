//! PSCI calls with any registers: decoding is total, and reads the low half of x0 only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu_monitor::world::psci::Call;

fuzz_target!(|x: [u64; 4]| {
    let call = format!("{:?}", Call::decode(x));
    let high = [x[0] ^ 0xffff_ffff_0000_0000, x[1], x[2], x[3]];
    assert_eq!(call, format!("{:?}", Call::decode(high)));
});
