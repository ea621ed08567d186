//! Any code, registers and page tables, executed by the interpreter of `vpmu-x86` and by this processor, and a second writer
//! between the plan and its commitment.
//!
//! What the interpreter executes, this processor executes step by step, at the same addresses, on memory as it is at the
//! commitment: registers, flags and memory must be the same. A replay that is dropped changes nothing. A page that the tables
//! do not let the guest write stays as it is, by a rule written from the manual here.
#![no_main]

use std::arch::asm;
use std::cell::RefCell;
use std::ptr;
use std::sync::Once;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vpmu_x86::Stop;
use vpmu_x86::cpu::{Registers, System};
use vpmu_x86::memory::{Memory, Store};
use vpmu_x86::replay::{Branched, Budget, Code, Dropped, Goal, Replayer, Start};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

const PAGE: usize = 4096;
/// Where the pages are for the guest and for this processor: code, and two of data.
const CODE: u64 = 0x10_0000_0000;
const DATA: u64 = 0x10_0000_1000;
const PAGES: usize = 3;
/// Where they are in the guest's RAM, behind its tables.
const CODE_AT: usize = 0x8000;
const DATA_AT: usize = 0x9000;
const RAM: usize = 0xb000;
const TABLES: u64 = 0x1000;

/// CF, PF, AF, ZF, SF, OF.
const STATUS: u64 = 0x8d5;
const TF: u64 = 1 << 8;
const RSP: usize = 4;

struct Ram(RefCell<Vec<u8>>);

impl Ram {
    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl Memory for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let ram = self.0.borrow();
        let part = usize::try_from(address)
            .ok()
            .and_then(|at| ram.get(at..at.checked_add(bytes.len())?));
        part.map(|part| bytes.copy_from_slice(part)).is_some()
    }

    fn is_writable(&self, address: u64) -> bool {
        address < RAM as u64
    }

    fn store(&self, stores: &[Store]) {
        for store in stores {
            let at = store.at as usize;
            let mut word = [0; 8];
            assert!(at.is_multiple_of(8) && self.read(store.at, &mut word));
            let word = u64::from_le_bytes(word) & !store.mask | store.value;
            assert_eq!(store.value & !store.mask, 0);
            self.write(at, &word.to_le_bytes());
        }
    }
}

/// So many branches.
struct Branches(u32);

impl Goal for Branches {
    fn is_reached(&self) -> bool {
        self.0 == 0
    }

    fn branch(&mut self, branch: &Branched<'_>) -> std::result::Result<bool, Stop> {
        let _ = branch.kind();
        self.0 = self.0.saturating_sub(1);
        Ok(true)
    }
}

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let ram = Ram(RefCell::new(vec![0; RAM]));
    let settings: u8 = input.arbitrary()?;
    let is_user = settings & 1 != 0;
    let has_wp = settings & 2 == 0;
    let branches = 1 + u32::from(settings >> 2 & 7);
    let mut entries = [0_u64; PAGES];
    for (entry, at) in entries.iter_mut().zip([CODE_AT, DATA_AT, DATA_AT + PAGE]) {
        // Present, writable, user, accessed, dirty; each bit of the input takes one away.
        let without = input.arbitrary::<u8>()?;
        let bits = if is_user { 0x67 } else { 0x63 };
        *entry = at as u64 | bits & !u64::from(without);
    }
    tables(&ram, &entries);
    let mut registers = Registers {
        rip: CODE,
        rflags: u64::from(input.arbitrary::<u16>()?) & STATUS | 0x202,
        ..Registers::default()
    };
    for register in &mut registers.general {
        let kind: u8 = input.arbitrary()?;
        *register = match kind & 3 {
            0 => DATA + u64::from(input.arbitrary::<u16>()? & 0x1ff8),
            1 => u64::from(kind >> 2),
            2 => u64::from(kind >> 2).wrapping_neg(),
            _ => input.arbitrary()?,
        };
    }
    if settings & 0x20 == 0 {
        registers.general[RSP] = DATA + 0x800;
    }
    let mut random: u64 = input.arbitrary::<u32>()?.into();
    for at in (DATA_AT..RAM).step_by(8) {
        random = random
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        let word = if random >> 62 == 0 { 0 } else { random };
        ram.write(at, &word.to_le_bytes());
    }
    let writer = match settings & 0x40 {
        0 => None,
        _ => Some((
            usize::from(input.arbitrary::<u16>()?) & 0x1ff8,
            input.arbitrary::<u64>()?,
        )),
    };
    let code = input.bytes(input.len().min(256))?;
    // Two branches behind it, and a comparison that defines all flags.
    let end = [0xeb, 0, 0x39, 0xc0, 0xeb, 0, 0x0f, 0x0b];
    ram.write(CODE_AT, &[code, &end].concat());
    check(
        &ram,
        &registers,
        &system(is_user, has_wp),
        &entries,
        branches,
        writer,
    );
    Ok(())
}

fn system(is_user: bool, has_wp: bool) -> System {
    System {
        cr0: 0x8000_0001 | u64::from(has_wp) << 16,
        cr3: TABLES,
        cr4: 0x20,
        efer: 0xd01,
        cpl: if is_user { 3 } else { 0 },
        is_long: true,
        fs_base: base(0x1003),
        gs_base: base(0x1004),
    }
}

/// Returns a segment's base as this processor has it, ARCH_GET_FS or ARCH_GET_GS.
fn base(request: i32) -> u64 {
    let mut base = 0_u64;
    // SAFETY: the kernel fills a local.
    unsafe { libc::syscall(libc::SYS_arch_prctl, request, &raw mut base) };
    base
}

fn tables(ram: &Ram, entries: &[u64; PAGES]) {
    let mut table = TABLES as usize;
    for level in [3, 2, 1] {
        let index = CODE >> (12 + 9 * level) & 0x1ff;
        let next = table + PAGE;
        ram.write(
            table + 8 * index as usize,
            &(next as u64 | 0x67).to_le_bytes(),
        );
        table = next;
    }
    for (n, entry) in entries.iter().enumerate() {
        ram.write(table + 8 * n, &entry.to_le_bytes());
    }
}

fn check(
    ram: &Ram,
    registers: &Registers,
    system: &System,
    entries: &[u64; PAGES],
    branches: u32,
    writer: Option<(usize, u64)>,
) {
    let (mut replayer, mut cache) = (Replayer::new(), Code::new());
    let start = Start {
        registers,
        system,
        pkru: &|| None,
    };
    let budget = Budget {
        instructions: 200,
        between: 100,
    };
    let goal = &mut Branches(branches);
    let Some(executed) = replayer.plan(&start, ram, &mut cache, budget, goal) else {
        return;
    };
    assert!(executed.instructions <= budget.instructions && executed.taken <= executed.branches);
    if let Some((offset, value)) = writer {
        ram.write(DATA_AT + offset, &value.to_le_bytes());
    }
    let before = ram.0.borrow().clone();
    let after = match replayer.commit(registers, ram) {
        Some(Ok((after, committed))) => {
            assert_eq!(committed, executed);
            after
        }
        Some(Err(Dropped)) => {
            assert!(writer.is_some() && *ram.0.borrow() == before);
            return;
        }
        None => panic!("a plan is committed or dropped"),
    };
    let now = ram.0.borrow().clone();
    // SDM vol. 3A, 4.6.1: user mode needs R/W; the supervisor, too, with CR0.WP. 4.8: a store sets A and D, which is not
    // done here.
    let is_supervisor = system.cpl == 0;
    let has_wp = system.cr0 >> 16 & 1 != 0;
    for (n, entry) in entries.iter().enumerate() {
        let may_write = entry & 0x61 == 0x61
            && (entry & 2 != 0 || is_supervisor && !has_wp)
            && (entry & 4 != 0 || is_supervisor);
        let page = CODE_AT + n * PAGE..CODE_AT + (n + 1) * PAGE;
        assert!(may_write && n > 0 || now[page.clone()] == before[page]);
    }
    assert_eq!(now[..CODE_AT], before[..CODE_AT], "tables");
    let (expected, memory) = native(&before[CODE_AT..], registers, executed.instructions);
    let cut = |registers: &Registers| Registers {
        rflags: registers.rflags & STATUS,
        ..*registers
    };
    assert_eq!(cut(&after), cut(&expected));
    assert!(now[CODE_AT..] == memory, "memory");
}

/// This processor's run: the handler of SIGTRAP takes it from step to step.
struct Stepped {
    /// What is left to be executed; `None`: the guest does not run.
    left: Option<u32>,
    host: [i64; 23],
    guest: Registers,
}

static mut STEPPED: Stepped = Stepped {
    left: None,
    host: [0; 23],
    guest: Registers {
        general: [0; 16],
        rip: 0,
        rflags: 0,
    },
};

/// The general registers of a signal's frame, in the order of their numbers.
const ORDER: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn step(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands over the frame, and one thread alone steps.
    let (stepped, frame) = unsafe {
        let stepped = &mut *&raw mut STEPPED;
        (
            stepped,
            &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs,
        )
    };
    let (rip, flags) = (libc::REG_RIP as usize, libc::REG_EFL as usize);
    match stepped.left {
        // Behind INT3: the guest's first instruction is next.
        None => {
            stepped.host = *frame;
            for (at, value) in ORDER.into_iter().zip(stepped.guest.general) {
                frame[at as usize] = value.cast_signed();
            }
            frame[rip] = stepped.guest.rip.cast_signed();
            frame[flags] = (stepped.guest.rflags | TF).cast_signed();
            stepped.left = Some(STEPS.load(std::sync::atomic::Ordering::Relaxed));
        }
        Some(1) => {
            for (at, value) in ORDER.into_iter().zip(&mut stepped.guest.general) {
                *value = frame[at as usize].cast_unsigned();
            }
            stepped.guest.rip = frame[rip].cast_unsigned();
            stepped.guest.rflags = frame[flags].cast_unsigned();
            *frame = stepped.host;
            stepped.left = None;
        }
        Some(left) => stepped.left = Some(left - 1),
    }
}

static STEPS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Maps the guest's pages, and has signals come on a stack of their own: the guest's RSP may be anything.
fn prepare() {
    const STACK: usize = 1 << 16;
    // SAFETY: new mappings, at addresses that nothing else has; structures of integers and pointers.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let at = ptr::without_provenance_mut(CODE as usize);
        let page = libc::mmap(
            at,
            PAGES * PAGE,
            all,
            flags | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        );
        assert_eq!(page, at);
        let stack = libc::mmap(
            ptr::null_mut(),
            STACK,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        assert_ne!(stack, libc::MAP_FAILED);
        let stack = libc::stack_t {
            ss_sp: stack,
            ss_flags: 0,
            ss_size: STACK,
        };
        assert_eq!(libc::sigaltstack(&raw const stack, ptr::null_mut()), 0);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(
            libc::sigaction(libc::SIGTRAP, &raw const action, ptr::null_mut()),
            0
        );
    }
}

/// Executes `steps` instructions on these pages, and returns the registers and the pages thereafter.
fn native(pages: &[u8], registers: &Registers, steps: u32) -> (Registers, Vec<u8>) {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(prepare);
    if steps == 0 {
        return (*registers, pages.to_vec());
    }
    let at: *mut u8 = ptr::with_exposed_provenance_mut(CODE as usize);
    STEPS.store(steps, std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the pages are mapped. What the guest executes there reaches them alone, or it would not have been executed by the
    // interpreter; the handler brings all registers back.
    unsafe {
        ptr::copy_nonoverlapping(pages.as_ptr(), at, PAGES * PAGE);
        (*&raw mut STEPPED).guest = *registers;
        asm!("int3");
        let mut after = vec![0; PAGES * PAGE];
        ptr::copy_nonoverlapping(at, after.as_mut_ptr(), PAGES * PAGE);
        ((*&raw const STEPPED).guest, after)
    }
}
