//! The threads that wait for the vCPUs' deadlines.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};

use lazy_deadline::{Slot, SlotRef};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use super::machine::{Machine, Vital};
use super::{Ending, Error};
use vpmu_kvm::{SlotMemory, VcpuDeadline};

pub(super) type Deadline = Arc<VcpuDeadline<Memory>>;

/// The guest's memory, where its slots are.
#[derive(Debug)]
pub(super) struct Memory(pub(super) GuestMemoryMmap);

impl SlotMemory for Memory {
    fn with_slot<R>(&self, at: Option<u64>, body: impl FnOnce(Option<SlotRef<'_>>) -> R) -> R {
        let slice = at.and_then(|at| self.0.get_slice(GuestAddress(at), Slot::SIZE).ok());
        let word = |offset| slice.as_ref()?.get_atomic_ref::<AtomicU64>(offset).ok();
        let slot = word(Slot::ARMED)
            .zip(word(Slot::PENDING))
            .zip(word(Slot::TAG_WORD));
        body(slot.map(|((armed, pending), tag)| SlotRef {
            armed,
            pending,
            tag,
        }))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn memory() -> Memory {
        Memory(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap())
    }

    #[test]
    fn a_slot_is_the_guests_memory() {
        let memory = memory();
        memory
            .0
            .write_obj(Slot::TAG, GuestAddress(64 + 0x10))
            .unwrap();
        memory.with_slot(Some(64), |slot| {
            let slot = slot.unwrap();
            let order = Ordering::Relaxed;
            assert_eq!(slot.tag.load(order), Slot::TAG);
            slot.armed.store(7, order);
        });
        assert_eq!(memory.0.read_obj::<u64>(GuestAddress(64)).unwrap(), 7);
    }

    #[test]
    fn what_is_no_memory_is_no_slot() {
        for at in [
            None,
            Some(4096),
            Some(4096 - 32),
            Some(u64::MAX - 63),
            Some(1 << 52),
        ] {
            assert!(memory().with_slot(at, |slot| slot.is_none()), "{at:x?}");
        }
    }
}
