//! The threads that wait for the vCPUs' deadlines.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};

use vm_memory::GuestMemoryMmap;

use super::machine::{Machine, Vital};
use super::{Ending, Error};
use vpmu_kvm::VcpuDeadline;

pub(super) type Deadline = Arc<VcpuDeadline<GuestMemoryMmap>>;

/// Waits for the expiries of one vCPU's timer until the machine stops and the timer is woken. What
/// goes wrong ends the machine.
pub(super) fn spawn(
    machine: &Arc<Machine>,
    deadline: &Deadline,
    ending: &Sender<Result<Ending, Error>>,
) -> io::Result<JoinHandle<()>> {
    let (machine, deadline, ending) = (Arc::clone(machine), Arc::clone(deadline), ending.clone());
    thread::Builder::new()
        .name("deadline".to_owned())
        .spawn(move || {
            run_at_once();
            let ending = Vital(ending);
            if let Err(error) = serve(&machine, &deadline) {
                let _ = ending.0.send(Err(error));
            }
        })
}

fn serve(machine: &Machine, deadline: &Deadline) -> Result<(), Error> {
    loop {
        deadline
            .wait()
            .map_err(|error| Error::Os("timerfd", error))?;
        if machine.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        deadline.expire(&machine.vm)?;
    }
}

/// Has this thread run as soon as its timer expires, before vCPUs that want the same processor, as
/// a timer of KVM's own would. Where that is not permitted, deadlines come later on a busy host.
#[expect(unsafe_code, reason = "no safe wrapper")]
fn run_at_once() {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
}
