//! Forged files of saved machines, for the fuzz target `saved`.

use kvm_bindings::CpuId;
use lazy_deadline::HostTimer;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use vpmu_kvm::{Backing, Kick, Options, Policy, VcpuDeadlineState, VcpuPmu};

use super::ports::{Interrupt, Offers, Ports};
use super::saved::{self, Clock, MachineState, Pmu, Reader, VcpuState, VmState};
use super::slot::Memory;
use super::{Error, vm};

/// Returns a PMU that this machine's clock backs, or none where there are no perf events.
fn pmu(capability: Option<vpmu_kvm::Capability>) -> Option<VcpuPmu> {
    VcpuPmu::without_descriptors(Options {
        capability,
        backing: Some(Backing::Clock),
        approximate_instructions: true,
        kick: Some(Kick::Nothing),
        tsc_hz: Some(1_000_000_000),
        ..Options::default()
    })
    .ok()
}

/// Returns the state, as a file has it, of a machine with two vCPUs that has done nothing yet.
pub fn blank() -> Vec<u8> {
    let interrupt = Interrupt(EventFd::new(0).expect("a descriptor"));
    let ports = Ports::new(interrupt, Vec::new(), Offers::default());
    let mut pmu = pmu(None);
    let saved = pmu.as_mut().map(VcpuPmu::save);
    let vcpu = || {
        let mut vcpu = VcpuState::blank();
        vcpu.pmu = saved.clone();
        vcpu.deadline = Some(VcpuDeadlineState::new(Some(0x1000)));
        vcpu
    };
    let state = MachineState {
        memory: 64 << 20,
        pmu: pmu.as_ref().map(|pmu| Pmu {
            capability: pmu.capability(),
            policy: Policy::default(),
            approximate_instructions: true,
        }),
        measuring: false,
        vcpus: vec![vcpu(), vcpu()],
        vm: VmState::default(),
        clock: Clock::default(),
        ports: ports.state(),
    };
    postcard::to_stdvec(&state).expect("plain data")
}

/// Returns a file of this state and of pieces of memory, each with the place and the length that it claims. Its
/// checksums are right.
pub fn file(state: &[u8], pieces: &[(u64, u64, Vec<u8>)]) -> Vec<u8> {
    saved::forge(state, pieces)
}

/// Continues the machine in `file`, as [`restore`](crate::restore) does, as far as that needs no KVM.
pub fn read(file: &[u8]) -> Result<(), Error> {
    let (state, reader) = Reader::new(file, "a forged file".to_owned())?;
    let size = state.memory as usize;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), size)])
        .map_err(|_| Error::Memory("the machine"))?;
    reader.memory(&memory)?;
    let options = state.pmu.map(|pmu| pmu.options());
    // A host without any feature.
    let nothing = CpuId::new(0).expect("no leaves");
    let checked = vm::check(&state, options, &nothing);
    for saved in &state.vcpus {
        saved.cpuid()?;
        if let Some(told) = &saved.pmu
            && let Some(mut pmu) = pmu(Some(told.capability))
            && pmu.restore(told).is_ok()
        {
            // A state that was restored is saved as it was, and can be restored again.
            let again = pmu.save();
            pmu.restore(&again).expect("its own state");
            assert_eq!(pmu.save(), again);
        }
        if let Some(deadline) = &saved.deadline {
            deadline.try_restore(&Memory(memory.clone()), &mut Moment(state.memory));
        }
    }
    let interrupt = Interrupt(EventFd::new(0).map_err(|e| Error::Os("eventfd", e))?);
    Ports::from_state(&state.ports, interrupt, Vec::new(), Offers::default())?;
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
