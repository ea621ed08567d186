//! Compares the rule with a processor: each access is one instruction of a guest without handlers, in which a fault is a
//! shutdown.
//!
//! Needs a /dev/kvm that runs guests. Without it, the test says `skipped` on standard error.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

use super::*;

const TABLES: u64 = 0x1000;
const CODE: u64 = 0x8000;
const DATA: u64 = 0x9000;
/// Where the guest has a device: a store there is an exit, in any mode.
const DEVICE: u64 = 0x10_0000;
/// `mov [rcx], eax`.
const END: [u8; 2] = [0x89, 0x01];

/// Runs one instruction at CPL 0, 1 or 3 with these settings. Returns whether it has not faulted.
fn is_permitted(vcpu: &mut VcpuFd, ram: &Ram, case: &Case, cpl: u8) -> Option<bool> {
    let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    // The code is where its own fetch is permitted: it is of the mode that executes it.
    let own = flag(cpl == 3, USER);
    let entry = DATA
        | PRESENT
        | ACCESSED
        | DIRTY
        | flag(case.page.writable, WRITABLE)
        | flag(case.page.user, USER)
        | flag(!case.page.executable, NO_EXECUTE);
    for (at, entry) in [
        (TABLES, TABLES + 0x1067),
        (TABLES + 0x1000, TABLES + 0x2067),
        (TABLES + 0x2000, TABLES + 0x3067),
        (TABLES + 0x3000 + 8 * (CODE / PAGE), CODE | KERNEL | own),
        (TABLES + 0x3000 + 8 * (DATA / PAGE), entry),
        (TABLES + 0x3000 + 8 * (DEVICE / PAGE), DEVICE | KERNEL | own),
    ] {
        ram.write(at, entry);
    }
    let mut sregs = vcpu.get_sregs().ok()?;
    let segment = kvm_segment {
        limit: 0xffff_ffff,
        selector: 0x10 | u16::from(cpl),
        type_: 11,
        present: 1,
        dpl: cpl,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 0x18 | u16::from(cpl),
        type_: 3,
        l: 0,
        db: 1,
        ..segment
    };
    sregs.cs = segment;
    (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
    (sregs.idt.limit, sregs.cr2, sregs.cr3) = (0, 0, TABLES);
    let with = case.system();
    (sregs.cr0, sregs.cr4, sregs.efer) = (with.cr0, with.cr4, with.efer);
    vcpu.set_sregs(&sregs).ok()?;
    let ac = case.mode == Mode::Supervisor { ac: true };
    let regs = kvm_regs {
        rip: if case.access == Access::Fetch {
            DATA
        } else {
            CODE
        },
        rbx: DATA,
        rcx: DEVICE,
        rflags: 2 | flag(ac, 1 << 18),
        ..Default::default()
    };
    vcpu.set_regs(&regs).ok()?;
    // mov eax, [rbx]; mov [rbx], eax
    let instruction: &[u8] = match case.access {
        Access::Load => &[0x8b, 0x03],
        Access::Store => &[0x89, 0x03],
        Access::Fetch => &[],
    };
    ram.write_bytes(CODE, &[instruction, &END].concat());
    ram.write_bytes(DATA, &END);
    match vcpu.run() {
        Ok(VcpuExit::MmioWrite(DEVICE, _)) => Some(true),
        Ok(VcpuExit::Shutdown) => Some(false),
        other => {
            eprintln!("{other:?}");
            None
        }
    }
}

#[test]
#[expect(unsafe_code, reason = "KVM maps memory by its address")]
fn an_access_is_permitted_as_this_processor_does() {
    let ram = Ram::new(0x1_0000);
    let Some((kvm, features)) = Kvm::new().ok().and_then(|kvm| {
        let features = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .ok()?;
        kvm.create_vm().ok()?;
        Some((kvm, features))
    }) else {
        eprintln!("skipped: no /dev/kvm that makes a VM");
        return;
    };
    let region = kvm_userspace_memory_region {
        slot: 0,
        guest_phys_addr: 0,
        memory_size: 0x1_0000,
        userspace_addr: ram.host_address(),
        flags: 0,
    };
    let mut entries = features.as_slice().iter();
    let ebx = entries
        .find(|entry| entry.function == 7)
        .map_or(0, |entry| entry.ebx);
    let (has_smep, has_smap) = (ebx >> 7 & 1 != 0, ebx >> 20 & 1 != 0);
    if !(has_smep && has_smap) {
        eprintln!(
            "this KVM has SMEP: {has_smep}, SMAP: {has_smap}; cases of one it lacks are not compared"
        );
    }
    let (mut compared, mut permitted) = (0, 0);
    for case in Case::all() {
        if case.smep && !has_smep || case.smap && !has_smap {
            continue;
        }
        let cpls: &[u8] = match case.mode {
            Mode::User => &[3],
            Mode::Supervisor { .. } => &[0, 1, 2],
            Mode::Implicit => continue,
        };
        for &cpl in cpls {
            // A VM of its own: a KVM that shadows tables does not see that they were written here, and a shutdown leaves a
            // vCPU in a state that depends on the processor.
            let vm = kvm.create_vm().unwrap();
            // SAFETY: it is mapped as long as `ram` lives, which is longer than the VM.
            unsafe { vm.set_user_memory_region(region) }.unwrap();
            let mut vcpu = vm.create_vcpu(0).unwrap();
            vcpu.set_cpuid2(&features).unwrap();
            let Some(is_permitted) = is_permitted(&mut vcpu, &ram, &case, cpl) else {
                eprintln!("skipped: this KVM does not run such a guest (CPL {cpl}, {case:?})");
                return;
            };
            assert_eq!(case.is_permitted(), is_permitted, "CPL {cpl}: {case:?}");
            compared += 1;
            permitted += u32::from(is_permitted);
        }
    }
    assert!(
        0 < permitted && permitted < compared,
        "{permitted} of {compared}"
    );
}
