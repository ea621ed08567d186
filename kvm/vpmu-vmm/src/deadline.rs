//! The work of a thread that waits for a vCPU's deadlines.

use std::sync::atomic::Ordering;

use vpmu_kvm::Deadline;

use super::Error;
use super::machine::Machine;

/// Waits for the expiries of one vCPU's timer until the machine stops and the timer is woken.
pub(super) fn serve(machine: &Machine, deadline: &Deadline) -> Result<(), Error> {
    run_at_once();
    loop {
        deadline
            .wait()
            .map_err(|error| Error::Os("timerfd", error))?;
        if machine.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        deadline.expire()?;
    }
}

/// Makes this thread run as soon as its timer expires, before vCPUs that want the same processor,
/// as a timer of KVM's own would. Where that is not permitted, deadlines come later on a busy host.
#[expect(unsafe_code, reason = "no safe wrapper")]
fn run_at_once() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
}
