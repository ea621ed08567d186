//! The machine: memory, processors, threads, and its account.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use signal_hook::consts::{SIGINT, SIGTERM};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};
use vpmu_perf::Backing;

use super::deadline::{self, Deadline};
use super::host::Snapshot;
use super::ports::{COM1_IRQ, Interrupt, Ports};
use super::vcpu::Vcpu;
use super::{Config, Ending, Error, boot, kvm};
use crate::{DEADLINE_MSR, DEADLINE_SLOT_MSR, Statistics, VcpuDeadline};

/// Where Intel's processors want three pages of their own, below the firmware's.
const TSS: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;
/// The largest memory: above it is where devices are.
const MOST_MEMORY: u64 = 3 << 30;
const LEAST_MEMORY: u64 = 64 << 20;

/// What the vCPUs' threads share.
pub(super) struct Machine {
    pub(super) vm: VmFd,
    pub(super) stop: AtomicBool,
    ports: Mutex<Ports<io::Stdout>>,
    accounts: Mutex<Vec<Arc<Mutex<Statistics>>>>,
    deadlines: Vec<Deadline>,
    measure: Mutex<Measure>,
    backing: Mutex<Option<Backing>>,
}

#[derive(Default)]
struct Measure {
    begin: Option<(Statistics, Snapshot)>,
    span: Option<(Statistics, Snapshot, Snapshot)>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    pub(super) fn ports(&self) -> MutexGuard<'_, Ports<io::Stdout>> {
        locked(&self.ports)
    }

    pub(super) fn add_account(&self, account: Arc<Mutex<Statistics>>) {
        locked(&self.accounts).push(account);
    }

    pub(super) fn say_backing(&self, backing: Backing) {
        *locked(&self.backing) = Some(backing);
    }

    pub(super) fn begin_measuring(&self) {
        *locked(&self.measure) = Measure {
            begin: Some((self.total(), Snapshot::take())),
            span: None,
        };
    }

    pub(super) fn end_measuring(&self) {
        let now = Snapshot::take();
        let mut measure = locked(&self.measure);
        if let Some((before, begin)) = measure.begin.take() {
            measure.span = Some((self.total().since(&before), begin, now));
        }
    }

    fn total(&self) -> Statistics {
        let mut total = Statistics::default();
        for account in locked(&self.accounts).iter() {
            total.add(&locked(account));
        }
        for deadline in &self.deadlines {
            total.add_deadline(&deadline.statistics());
        }
        total
    }

    fn report(&self, config: &Config) -> serde_json::Value {
        let measure = locked(&self.measure);
        let span = measure.span.as_ref();
        let backing = locked(&self.backing).map(|backing| match backing {
            Backing::Hardware => "hardware",
            Backing::Clock => "clock",
        });
        let policy = config.pmu.map(|pmu| match pmu.policy {
            vpmu::counter::Policy::Recreate => "recreate",
            vpmu::counter::Policy::Reuse => "reuse",
            vpmu::counter::Policy::ReusePaused => "paused",
        });
        let counters = config.pmu.map(|_| (2, 4, 3));
        serde_json::json!({"vpmu-vmm": {
            "policy": policy.unwrap_or("none"),
            "backing": backing,
            "pmu_version": counters.map(|(version, ..)| version),
            "general": counters.map(|(_, general, _)| general),
            "fixed": counters.map(|(.., fixed)| fixed),
            "measured": span.map(|(span, ..)| span.to_json()),
            "total": self.total().to_json(),
            "host": span.map(|(_, begin, end)| serde_json::json!({
                "begin": begin.to_json(),
                "end": end.to_json(),
            })),
        }})
    }
}

/// Runs a guest, its serial line on standard input and output, until it ends or a signal does.
/// Answers how it ended and what it cost, as JSON.
///
/// # Errors
///
/// When it cannot be started, or KVM gives up on it. Nothing is left running.
pub fn run(config: &Config) -> Result<(Ending, serde_json::Value), Error> {
    if !(LEAST_MEMORY..=MOST_MEMORY).contains(&config.memory) {
        return Err(Error::Config("--memory takes 64M to 3G".to_owned()));
    }
    if !(1..=64).contains(&config.vcpus) {
        return Err(Error::Config("--vcpus takes 1 to 64".to_owned()));
    }
    let system = Kvm::new().map_err(Error::NoKvm)?;
    let vm = kvm("KVM_CREATE_VM", system.create_vm())?;
    kvm(
        "KVM_SET_IDENTITY_MAP_ADDR",
        vm.set_identity_map_address(IDENTITY_MAP),
    )?;
    kvm("KVM_SET_TSS_ADDR", vm.set_tss_address(TSS))?;
    kvm("KVM_CREATE_IRQCHIP", vm.create_irq_chip())?;
    let pit = kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    kvm("KVM_CREATE_PIT2", vm.create_pit2(pit))?;
    let pmu = config.pmu.iter().flat_map(|_| crate::pmu_msrs());
    let deadline = [DEADLINE_SLOT_MSR, DEADLINE_MSR];
    let deadline = deadline.into_iter().filter(|_| config.lazy_deadline);
    if config.pmu.is_some() || config.lazy_deadline {
        crate::intercept(&vm, pmu.chain(deadline))?;
    }

    let size = config.memory as usize;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), size)])
        .map_err(|_| Error::Memory("what --memory asks for"))?;
    give_memory(&vm, &memory)?;
    let entry = boot::load(&memory, config)?;

    let interrupt = EventFd::new(EFD_NONBLOCK).map_err(|e| Error::Os("eventfd", e))?;
    kvm("KVM_IRQFD", vm.register_irqfd(&interrupt, COM1_IRQ))?;
    let cpuid = kvm(
        "KVM_GET_SUPPORTED_CPUID",
        system.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES),
    )?;
    let vcpus = (0..config.vcpus)
        .map(|id| {
            let fd = kvm("KVM_CREATE_VCPU", vm.create_vcpu(id.into()))?;
            let deadline = match config.lazy_deadline {
                true => Some(Arc::new(VcpuDeadline::new(&fd, memory.clone())?)),
                false => None,
            };
            Ok(Vcpu {
                fd,
                id,
                entry: (id == 0).then_some(entry),
                cpuid: cpuid.clone(),
                deadline,
            })
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let machine = Arc::new(Machine {
        vm,
        stop: AtomicBool::new(false),
        ports: Mutex::new(Ports::new(Interrupt(interrupt), io::stdout())),
        accounts: Mutex::default(),
        deadlines: vcpus
            .iter()
            .filter_map(|vcpu| vcpu.deadline.clone())
            .collect(),
        measure: Mutex::default(),
        backing: Mutex::default(),
    });
    let ended = run_threads(&machine, vcpus, config);
    // All threads are through: nobody uses the memory any more.
    drop(memory);
    Ok((ended?, machine.report(config)))
}

fn run_threads(machine: &Arc<Machine>, vcpus: Vec<Vcpu>, config: &Config) -> Result<Ending, Error> {
    // Takes a vCPU out of the guest. That it has come is all.
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), nothing)
        .map_err(|error| Error::Os("sigaction", error.into()))?;
    let (ending, ended) = mpsc::channel();

    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])
        .map_err(|error| Error::Os("signals", error))?;
    let closer = signals.handle();
    let interrupted = ending.clone();
    let signals = thread::spawn(move || {
        if signals.forever().next().is_some() {
            let _ = interrupted.send(Ok(Ending::Interrupted));
        }
    });
    let input = Arc::downgrade(machine);
    // Ends with the process: nothing can take it out of read().
    thread::spawn(move || {
        let mut byte = [0];
        while matches!(io::stdin().read(&mut byte), Ok(1)) {
            loop {
                let Some(machine) = input.upgrade() else {
                    return;
                };
                if machine.ports().receive(&byte) == 1 {
                    break;
                }
                drop(machine);
                thread::sleep(Duration::from_millis(1));
            }
        }
    });

    let timers: Vec<_> = machine
        .deadlines
        .iter()
        .map(|deadline| deadline::spawn(machine, deadline, &ending))
        .collect();
    let threads: Vec<_> = vcpus
        .into_iter()
        .map(|vcpu| {
            let (machine, pmu, ending) = (Arc::clone(machine), config.pmu, ending.clone());
            thread::Builder::new()
                .name(format!("vcpu{}", vcpu.id))
                .spawn(move || {
                    let _ = ending.send(vcpu.run(&machine, pmu));
                })
        })
        .collect();
    drop(ending);
    let first = if let Some(error) = threads
        .iter()
        .chain(&timers)
        .find_map(|thread| thread.as_ref().err())
    {
        Err(Error::Os(
            "thread",
            io::Error::new(error.kind(), error.to_string()),
        ))
    } else {
        ended.recv().unwrap_or(Ok(Ending::Interrupted))
    };
    machine.stop.store(true, Ordering::Relaxed);
    for thread in threads.into_iter().chain(timers).flatten() {
        // Again and again: one that comes just before the guest is entered is not seen there.
        while !thread.is_finished() {
            let _ = thread.kill(SIGRTMIN());
            machine
                .deadlines
                .iter()
                .for_each(|deadline| deadline.wake());
            thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            return Err(Error::Stopped("a thread panicked".to_owned()));
        }
    }
    closer.close();
    let _ = signals.join();
    let _ = machine.ports().console().flush();
    first
}

#[expect(unsafe_code, reason = "KVM maps this memory by its address")]
fn give_memory(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), Error> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the region is mapped, and `run` keeps it so until every vCPU has stopped.
        kvm("KVM_SET_USER_MEMORY_REGION", unsafe {
            vm.set_user_memory_region(region)
        })?;
    }
    Ok(())
}
