//! What a VM's guest is offered.

use core::ffi::{c_char, c_int};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use vpmu_kvm::{
    Backing, CpuidEntry, Follow, Freeze, Lbr, Model, Offer, Options, Pebs, Perfmon, Rdpmc, Skid,
    amd, intel,
};

use super::handle::{Table, answer, damaged, failed, misuse, needed};
use super::memory::{Memory, VpmuKvmMemory};
use crate::counter::policy;
use crate::room::{self, Mut, Ref, promised};
use crate::state::{self, Saved};
use crate::status::VpmuStatus;

/// AMD's PMU where the host's processor is AMD's, else Intel's.
pub const VPMU_KVM_MODEL_AUTO: u32 = 0;
/// Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
pub const VPMU_KVM_MODEL_INTEL: u32 = 1;
/// AMD's core extension: six counters, without global registers. On hosts of AMD's.
pub const VPMU_KVM_MODEL_AMD: u32 = 2;
/// AMD's PerfMonV2. On hosts of AMD's.
pub const VPMU_KVM_MODEL_AMD_V2: u32 = 3;
/// The paravirtual PMU, for guests with its driver. The VMM offers its guest no other. Needs the guest's memory.
pub const VPMU_KVM_MODEL_PARAVIRTUAL: u32 = 4;
/// No PMU. Nothing is asked of perf.
pub const VPMU_KVM_MODEL_NONE: u32 = 5;

/// The processor's counters where they are available, else a clock.
pub const VPMU_KVM_BACKING_AUTO: u32 = 0;
/// The processor's counters.
pub const VPMU_KVM_BACKING_HARDWARE: u32 = 1;
/// The thread's time on the CPU.
pub const VPMU_KVM_BACKING_CLOCK: u32 = 2;

/// Where a clock counts, the guest's time and the host's while it completes the guest's exits.
pub const VPMU_KVM_FREEZE_VM: u32 = 0;
/// Where a clock counts, the guest's time alone.
pub const VPMU_KVM_FREEZE_GUEST: u32 = 1;

/// The guest has no PEBS.
pub const VPMU_KVM_PEBS_OFF: u32 = 0;
/// The guest has PEBS. The host's kernel samples the guest where perf can do that, else each record takes an exit.
pub const VPMU_KVM_PEBS_AUTO: u32 = 1;
/// The guest has PEBS. Each record takes an exit.
pub const VPMU_KVM_PEBS_EXIT: u32 = 2;
/// The guest has PEBS. The host's kernel samples the guest into its ring buffer.
pub const VPMU_KVM_PEBS_BUFFER: u32 = 3;

/// What a VM's guest is offered, for `vpmu_kvm_open`. Zero is each field's default, but for `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuKvmOptions {
    /// `sizeof(struct vpmu_kvm_options)`: a later library has more fields, and finds those that the program lacks zero.
    pub size: usize,
    /// One of `VPMU_KVM_MODEL_*`.
    pub model: u32,
    /// The version of Intel's architectural performance monitoring, 2 to 5. 0: 5. With Intel's model only.
    pub perfmon: u32,
    /// One of `VPMU_KVM_PEBS_*`. With Intel's model only. Needs the guest's memory.
    pub pebs: u32,
    /// One of `VPMU_KVM_BACKING_*`.
    pub backing: u32,
    /// One of `VPMU_POLICY_*`.
    pub policy: u32,
    /// The real-time signal by which perf reports overflows to the vCPU's thread. 0: SIGRTMIN+1.
    pub signal: c_int,
    /// Where only a clock counts: offer instructions and branches too, one for each cycle.
    pub approximate_instructions: bool,
    /// Whether the guest has the lazy TSC deadline. Needs the guest's memory.
    pub deadline: bool,
    /// Whether the guest's RDPMC comes to the VMM at run time, by way of the guest's own handler of #GP: any 64-bit Linux, user
    /// space included. Needs the guest's memory. Without this, the guest's kernel is one that `vpmu rewrite-kernel` has
    /// rewritten.
    pub rdpmc: bool,
    /// Whether PEBS records may be some instructions late, as those of the processor's counters are: the guest cannot see that.
    /// Without this, such a host offers no PEBS.
    pub pebs_skid: bool,
    /// The bytes of a saved vCPU, whose guest is then offered what it had: `model`, `perfmon` and `deadline` are not
    /// read. Null: a new guest.
    pub saved: *const u8,
    /// How many bytes these are.
    pub saved_length: usize,
    /// One of `VPMU_KVM_FREEZE_*`.
    pub freeze: u32,
    /// 0.
    pub reserved: u32,
}

/// What a VM's guest is offered, and how the host counts for it.
#[derive(Debug)]
pub struct VpmuKvmVm {
    _opaque: [u8; 0],
}

/// What `struct vpmu_kvm_vm` stands for.
pub(crate) struct Vm {
    pub(crate) offer: Offer,
    pub(crate) options: Options,
    pub(crate) memory: Arc<Memory>,
    /// The places by which RDPMC comes here at run time; `None`: it does not.
    pub(crate) rdpmc: Option<Arc<Rdpmc>>,
    /// The warning, once it was asked for: what others have of the host's counters changes, and a VMM asks whether there is
    /// one and then for its text.
    warning: OnceLock<Option<&'static str>>,
}

impl Vm {
    /// Returns what only the VMM can say of the offer.
    fn warning(&self) -> Option<&'static str> {
        let ask = || self.offer.warning(&self.options);
        *self.warning.get_or_init(ask)
    }

    /// Returns the MSRs that KVM is to hand over.
    pub(crate) fn msrs(&self) -> Vec<u32> {
        let mut msrs = self.offer.msrs();
        if self.rdpmc.is_some() {
            msrs.extend(Rdpmc::msrs(&self.offer));
        }
        msrs
    }
}

pub(crate) static VMS: Table<Vm> = Table::new();

impl VpmuKvmOptions {
    fn model(&self) -> Option<Option<Model>> {
        let perfmon = match self.perfmon {
            0 => None,
            number @ 2..=5 => Some(Perfmon::from_number(u8::try_from(number).ok()?)?),
            _ => return None,
        };
        let pebs = match self.pebs {
            VPMU_KVM_PEBS_OFF => false,
            VPMU_KVM_PEBS_AUTO | VPMU_KVM_PEBS_EXIT | VPMU_KVM_PEBS_BUFFER => true,
            _ => return None,
        };
        if self.model == VPMU_KVM_MODEL_INTEL {
            let version = perfmon.unwrap_or(Perfmon::V5);
            return Some(Some(Model::Intel { version, pebs }));
        }
        if perfmon.is_some() || pebs {
            return None;
        }
        Some(match self.model {
            VPMU_KVM_MODEL_AUTO => Some(Model::Auto),
            VPMU_KVM_MODEL_AMD => Some(Model::Amd(amd::Interface::Core)),
            VPMU_KVM_MODEL_AMD_V2 => Some(Model::Amd(amd::Interface::V2)),
            VPMU_KVM_MODEL_PARAVIRTUAL => Some(Model::Paravirtual),
            VPMU_KVM_MODEL_NONE => None,
            _ => return None,
        })
    }

    fn options(&self) -> Option<Options> {
        Some(Options {
            backing: match self.backing {
                VPMU_KVM_BACKING_AUTO => None,
                VPMU_KVM_BACKING_HARDWARE => Some(Backing::Hardware),
                VPMU_KVM_BACKING_CLOCK => Some(Backing::Clock),
                _ => return None,
            },
            approximate_instructions: self.approximate_instructions,
            freeze: match self.freeze {
                VPMU_KVM_FREEZE_VM => Freeze::Vm,
                VPMU_KVM_FREEZE_GUEST => Freeze::Guest,
                _ => return None,
            },
            policy: policy(self.policy)?,
            pebs: match self.pebs {
                VPMU_KVM_PEBS_EXIT => Pebs::Exit,
                VPMU_KVM_PEBS_BUFFER => Pebs::Buffer,
                _ => Pebs::Auto,
            },
            skid: match self.pebs_skid {
                true => Skid::Accepted,
                false => Skid::Refused,
            },
            lbr: Lbr::Off,
            follow: Follow::Ahead,
            signal: (self.signal != 0).then_some(self.signal),
        })
    }

    /// Returns what the guest is offered.
    fn offer(&self, options: &Options) -> Result<Offer, VpmuStatus> {
        if !self.saved.is_null() {
            let source = promised!(state::source(Ref::of(self.saved), self.saved_length));
            let (vcpu, _) = state::read::<Saved>(source).ok_or_else(damaged)?;
            let offer = vcpu.offer();
            offer.check(options).map_err(failed)?;
            return Ok(offer);
        }
        let model = self.model().ok_or_else(|| {
            misuse("a model, a version or a way of PEBS that there is not, or the last two without Intel's model")
        })?;
        let offer = match model {
            None => Offer::default(),
            Some(model) => vpmu_kvm::detect(model, options).map_err(failed)?,
        };
        Ok(Offer {
            deadline: self.deadline,
            ..offer
        })
    }
}

/// Returns whether a part of the offer lives in the guest's memory.
fn needs_memory(offer: &Offer) -> bool {
    let has_page = matches!(offer.pmu, Some(vpmu_kvm::Pmu::Paravirtual(_)));
    let has_pebs = matches!(
        offer.capability(),
        Some(vpmu_kvm::Capability::Intel(intel::Capability {
            pebs: Some(_),
            ..
        }))
    );
    has_page || has_pebs || offer.deadline
}

/// Finds what this host can offer a VM's guest, and puts it into `*vm`. May be called before there is a VM. `memory` is
/// copied; NULL: nothing that is offered needs it. Give the VM back by `vpmu_kvm_close`.
///
/// The functions of `memory` may be called with its context until the VM is closed and its last PMU
/// is detached.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_open(
    options: Ref<'_, VpmuKvmOptions>,
    memory: Ref<'_, VpmuKvmMemory>,
    vm: Mut<'_, *mut VpmuKvmVm>,
) -> VpmuStatus {
    let size = options.size();
    if size.is_some_and(|size| size != size_of::<VpmuKvmOptions>()) {
        return misuse(
            "options.size is not sizeof(struct vpmu_kvm_options) of this library's header",
        );
    }
    let (Some(given), Some(vm)) = (options.get(), vm.get()) else {
        return misuse("options, and a place for the VM, at addresses that are multiples of 8");
    };
    answer(|| {
        if given.reserved != 0 {
            return Err(misuse("options.reserved is not 0"));
        }
        let options = needed(given.options(), "a backing or a policy that there is not")?;
        options.check().map_err(failed)?;
        let offer = given.offer(&options)?;
        let none = VpmuKvmMemory {
            context: std::ptr::null_mut(),
            map: None,
            written: None,
        };
        let memory = memory.get().copied().unwrap_or(none);
        if (needs_memory(&offer) || given.rdpmc) && memory.map.is_none() {
            return Err(misuse(
                "PEBS, RDPMC at run time, a paravirtual PMU and a deadline need the guest's memory",
            ));
        }
        *vm = VMS.add(Vm {
            offer,
            options,
            memory: Arc::new(Memory(memory)),
            rdpmc: given.rdpmc.then(Arc::default),
            warning: OnceLock::new(),
        });
        Ok(())
    })
}

/// Gives a VM back. PMUs that are attached stay. NULL is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_close(vm: *mut VpmuKvmVm) -> VpmuStatus {
    VMS.remove(vm)
}

/// Returns what the VM's guest cannot find out, for the VMM's log, a string that stays; NULL: nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_warning(vm: *const VpmuKvmVm) -> *const c_char {
    // There are a few such texts.
    static TEXTS: Mutex<BTreeMap<&str, CString>> = Mutex::new(BTreeMap::new());
    let warning = VMS.find(vm).ok().and_then(|vm| vm.warning());
    warning.map_or(std::ptr::null(), |text| {
        let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let made = || CString::new(text).unwrap_or_default();
        texts.entry(text).or_insert_with(made).as_ptr()
    })
}

/// Writes the MSRs of the offered parts, for a VMM with a filter of its own in place of `vpmu_kvm_intercept`: their number to
/// `count`, and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there are more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_msrs(
    vm: *const VpmuKvmVm,
    msrs: Mut<'_, u32>,
    room: usize,
    count: Mut<'_, usize>,
) -> VpmuStatus {
    match VMS.find(vm) {
        Ok(vm) => promised!(room::list(vm.msrs().into_iter(), msrs, room, count)),
        Err(status) => status,
    }
}

/// Has KVM hand the offered parts' MSRs over, and no others, and switches off KVM's own PMU. Before the first vCPU is made.
/// A VMM with other MSRs of its own uses `vpmu_kvm_intercept_beside`.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_intercept(vm: *const VpmuKvmVm, vm_fd: c_int) -> VpmuStatus {
    answer(|| vpmu_kvm::intercept(&vm_fd, &VMS.find(vm)?.msrs()).map_err(failed))
}

/// One entry of a vCPU's CPUID, laid out as Linux's `struct kvm_cpuid_entry2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuKvmCpuid {
    /// The leaf.
    pub function: u32,
    /// The subleaf.
    pub index: u32,
    /// Bit 0: the subleaf matters.
    pub flags: u32,
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
    /// Zero.
    pub padding: [u32; 3],
}

/// Makes the CPUID in `*count` entries that of a processor with the offered parts, after the VMM's own changes. There is
/// room for `room` entries; the parts may need six more than there are.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_cpuid(
    vm: *const VpmuKvmVm,
    entries: Mut<'_, VpmuKvmCpuid>,
    count: Mut<'_, usize>,
    room: usize,
    tsc_khz: u32,
) -> VpmuStatus {
    const MOST: usize = 1 << 16;
    let Ok(vm) = VMS.find(vm) else {
        return VpmuStatus::Misuse;
    };
    let (Some(entries), Some(count)) = (promised!(entries.slice(room, MOST)), count.get()) else {
        return misuse(
            "entries, at most 65536, and their number, at addresses that are multiples of 4 and 8",
        );
    };
    if *count > room {
        return misuse("more entries than there is room for");
    }
    let numbers = |e: &VpmuKvmCpuid| [e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx];
    let given = entries.iter().take(*count);
    let mut leaves: Vec<CpuidEntry> = given.map(|entry| numbers(entry).into()).collect();
    vm.offer.set_cpuid(&mut leaves, tsc_khz);
    if leaves.len() > room {
        return VpmuStatus::Room;
    }
    *count = leaves.len();
    for (entry, leaf) in entries.iter_mut().zip(leaves) {
        let [function, index, flags, eax, ebx, ecx, edx] = leaf.into();
        *entry = VpmuKvmCpuid {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            padding: [0; 3],
        };
    }
    VpmuStatus::Ok
}

/// Changes bits 11 and 12 of `*value`, the guest's IA32_MISC_ENABLE, to what the offered PMU has. The VMM gives the register
/// this value before the vCPU runs.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_misc_enable(vm: *const VpmuKvmVm, value: Mut<'_, u64>) -> VpmuStatus {
    answer(|| {
        let vm = VMS.find(vm)?;
        let what = "a place for the value, at an address that is a multiple of 8";
        let value = needed(value.get(), what)?;
        *value = vm.offer.misc_enable(*value);
        Ok(())
    })
}

/// Returns the system calls of a vCPU's thread for its PMU, as seccompiler's JSON. The text stays for ever.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_seccomp_rules() -> *const c_char {
    static RULES: OnceLock<CString> = OnceLock::new();
    let rules = RULES.get_or_init(|| CString::new(vpmu_kvm::seccomp_rules()).unwrap_or_default());
    rules.as_ptr()
}

/// Returns the system calls of a thread that makes VMs, in the same form: those of `vpmu_kvm_open`, `_intercept`, `_attach`,
/// `_restore` and `_detach`.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_seccomp_setup_rules() -> *const c_char {
    static RULES: OnceLock<CString> = OnceLock::new();
    let made = || CString::new(vpmu_kvm::seccomp_setup_rules()).unwrap_or_default();
    RULES.get_or_init(made).as_ptr()
}

/// To be called by a VMM's own handler of SIGIO: the kernel sends it in place of the overflows' signal when its queue is
/// full. Without such a handler, the library's does.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_overrun() {
    vpmu_kvm::overrun();
}
