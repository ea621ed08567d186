//! A write into a monitor's memory, and a run that an observer of the machine must end.

use super::{Context, Test};
use crate::fault::Fault;
use crate::mmio;
use crate::{psci, uart};
use vpmu_payload_harness::BootArgs;
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[("stray", stray)];

/// Writes to the given address, which is a monitor's memory: for this program, there is nothing.
fn stray(cx: &Context) -> Verdict {
    let Some(address) = BootArgs::parse(cx.machine.bootargs).address else {
        return Err(Failure(Text::new(format_args!("needs addr=ADDRESS"))));
    };
    uart::print(format_args!("payload: writing to {address:#x}\n"));
    let fault = mmio::fault_of(|| mmio::write32(address, 0xdead_beef));
    if !fault.is_some_and(Fault::is_external) {
        return Err(Failure(Text::new(format_args!(
            "the write to {address:#x} was not refused (got {fault:x?})"
        ))));
    }
    check(
        "answer to an HVC",
        psci::hypervisor_call(0xc600_ff00),
        u64::MAX,
    )?;
    Ok(Pass::Ok)
}

/// Loops for ever and does nothing.
pub(super) fn hang() -> ! {
    uart::print(format_args!("payload: hanging\n"));
    loop {
        core::hint::spin_loop();
    }
}
