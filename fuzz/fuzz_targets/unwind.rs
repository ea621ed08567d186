//! The calls of a program whose address space is anything: no panic, and no more reads than the budget has.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../kvm/vpmu-unwind/tests/hostile/space.rs"]
mod space;

fuzz_target!(|bytes: &[u8]| {
    let _ = space::check(bytes);
});
