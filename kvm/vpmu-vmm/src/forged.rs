//! Forged files of saved machines, for the fuzz target `saved`.

use std::sync::Arc;

use kvm_bindings::CpuId;
use lazy_deadline::HostTimer;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use vpmu_kvm::{DeadlineState, Perfmon, Pmu, State, intel};

use super::ports::{Offers, Ports, PortsState};
use super::saved::{self, Backed, MachineState, Reader, VcpuState, VmState};
use super::{Error, vm};

/// Returns the state, as a file has it, of a machine with two vCPUs that has done nothing yet.
pub fn blank() -> Vec<u8> {
    let capability = intel::Capability::new(Perfmon::V5);
    let memory = Arc::new(GuestMemoryMmap::<()>::new());
    let saved = State::fresh(&Pmu::Architectural(capability.into()), memory);
    let vcpu = || {
        let mut vcpu = VcpuState::blank();
        vcpu.parts = State {
            deadline: Some(DeadlineState::new(Some(0x1000))),
            ..saved.clone()
        };
        vcpu
    };
    let state = MachineState {
        memory: 64 << 20,
        backing: Some(Backed::default()),
        rdpmc: None,
        measuring: false,
        vcpus: vec![vcpu(), vcpu()],
        vm: VmState::default(),
        clock: saved::Clock::default(),
        ports: PortsState::default(),
    };
    postcard::to_stdvec(&state).expect("plain data")
}

/// Returns a file of this state and of pages of memory, each with the place that it claims. Its checksums are right.
pub fn file(state: &[u8], pages: &[(u64, Vec<u8>)]) -> Vec<u8> {
    saved::forge(state, pages)
}

/// Continues the machine in `file`, as [`restore`](crate::restore) does, as far as that needs no KVM.
pub fn read(file: &[u8]) -> Result<(), Error> {
    let (state, reader) = Reader::new(file, "a forged file".to_owned())?;
    let size = state.memory as usize;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), size)])
        .map_err(|_| Error::Memory("the machine"))?;
    reader.memory(&memory)?;
    // A host without any feature.
    let nothing = CpuId::new(0).expect("no leaves");
    let checked = vm::check(&state, state.pmu_options().as_ref(), &nothing);
    for saved in &state.vcpus {
        saved.cpuid()?;
        saved.parts.try_restore(Arc::new(memory.clone()));
        if let Some(deadline) = &saved.parts.deadline {
            deadline.try_restore(&memory, &mut Moment(state.memory));
        }
    }
    let interrupt = EventFd::new(0).map_err(|e| Error::Os("eventfd", e))?;
    Ports::new(&state.ports, interrupt, Vec::new(), Offers::default())?;
    checked
}

/// A clock that stands still, and a timer that nobody waits for.
struct Moment(u64);

impl HostTimer for Moment {
    fn now(&mut self) -> u64 {
        self.0
    }

    fn host_clock(&mut self) -> u64 {
        self.0
    }

    fn arm(&mut self, deadline: u64) {
        self.0 = self.0.max(deadline);
    }

    fn disarm(&mut self) {}
}
