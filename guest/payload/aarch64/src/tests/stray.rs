//! Runs that a monitor, or an observer of the machine, must end.

use super::{Context, Test};
use crate::mmio;
use crate::uart;
use vpmu_payload_harness::BootArgs;
use vpmu_payload_harness::{Failure, Text, Verdict};

pub(super) const TESTS: &[Test] = &[("stray", stray)];

/// Writes to the given address; a monitor whose memory it is ends the guest.
fn stray(cx: &Context) -> Verdict {
    let Some(address) = BootArgs::parse(cx.machine.bootargs).address else {
        return Err(Failure(Text::new(format_args!("needs addr=ADDRESS"))));
    };
    uart::print(format_args!("payload: writing to {address:#x}\n"));
    mmio::write32(address, 0xdead_beef);
    Err(Failure(Text::new(format_args!(
        "the write to {address:#x} was not stopped"
    ))))
}

/// Loops for ever and does nothing.
pub(super) fn hang() -> ! {
    uart::print(format_args!("payload: hanging\n"));
    loop {
        core::hint::spin_loop();
    }
}
