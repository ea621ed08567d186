//! The calls that are open at an overflow, for a guest whose last branch records are a stack of calls.
//!
//! They began long before the overflow, so that following the guest does not find them. They stand on the stack of its program
//! ([`vpmu_unwind`]), which is read as the program itself could read it: the guest's user sees in the records what was read.
//!
//! At an overflow in the kernel, the program's registers are where the kernel was entered. Linux pushes them at the top of the
//! task's stack (struct pt_regs; arch/x86/entry/entry_64.S), and is on that stack for as long as they stand there. A kernel that
//! is on another stack, of an interrupt or an NMI, or that pushes them right now, leaves the sample without calls.

use std::cell::OnceCell;

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, Kind};
use vpmu_unwind::{Call, Cut, End, MOST_CALLS, Memory, Registers, Unwinder};
use vpmu_x86::paging::{Access, Mode, PAGE, Paging};

use crate::error::Error;
use crate::guest::{ring, system};
use crate::memory::GuestMemory;
use crate::pmu::VcpuPmu;
use crate::run::Kvm;
use crate::stats::{CallStacks, Statistics};
use crate::sys;
use crate::sys::keys::Keys;

/// Pages that are remembered for one stack.
const PAGES: usize = 32;

/// The memory of the program that a vCPU is in.
struct Program<'a> {
    paging: Paging,
    memory: &'a dyn GuestMemory,
    rights: &'a dyn Fn() -> Option<u32>,
    /// Linear and physical addresses of the pages last found, and which comes next.
    pages: [Option<(u64, u64)>; PAGES],
    next: usize,
}

impl Program<'_> {
    /// Returns the physical address of the page at `address`, where the program may read it.
    fn find(&mut self, address: u64) -> Option<u64> {
        let linear = address & !(PAGE - 1);
        let known = self.pages.iter().flatten().find(|(at, _)| *at == linear);
        if let Some(&(_, physical)) = known {
            return Some(physical);
        }
        let page = self.paging.translate(self.memory, linear)?;
        // PKRU takes KVM 10 us of a sample's 36. A program that forbids itself key 0, that of all pages without another, has
        // neither its stack nor its libraries.
        let rights = || match page.key {
            0 => Some(0),
            _ => (self.rights)(),
        };
        let is_permitted = (self.paging).permits(linear, &page, Access::Load, Mode::User, rights);
        if !is_permitted {
            return None;
        }
        self.pages[self.next] = Some((linear, page.physical));
        self.next = (self.next + 1) % PAGES;
        Some(page.physical)
    }
}

impl Memory for Program<'_> {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        self.find(address)
            .is_some_and(|page| self.memory.read(page + address % PAGE, bytes))
    }

    fn page(&mut self, address: u64) -> Option<u64> {
        self.find(address)
    }

    fn present_below(&mut self, address: u64, lowest: u64) -> Option<u64> {
        self.paging.last_present(self.memory, address, lowest)
    }
}

/// What there is to unwind.
enum Place {
    Program(Registers),
    /// 32-bit code.
    Compatible,
    /// The kernel, where the program's registers are not known.
    Kernel,
}

/// CS of 64-bit user space, and its SS (arch/x86/include/asm/segment.h).
const USER_CS: u64 = 0x33;
const USER_SS: u64 = 0x2b;

/// Finds the open calls of one vCPU's programs.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Made when a guest first wants them.
    unwinder: Option<Box<Unwinder>>,
}

impl Calls {
    /// Fills the records of a guest that wants its open calls: nothing is followed for them.
    pub(super) fn fill(
        &mut self,
        kvm: &Kvm,
        pmu: &mut VcpuPmu,
        keys: &Keys,
        filter: Filter,
        wanted: u8,
    ) -> Result<(), Error> {
        let regs = kvm.regs()?;
        let sregs = sys::GET_SREGS.get(&kvm.vcpu)?;
        // A call of KVM's, for each page otherwise. The program does not run meanwhile.
        let asked = OnceCell::new();
        let rights = || *asked.get_or_init(|| keys.pkru(&kvm.vcpu));
        let mut counts = CallStacks::default();
        if filter.user {
            let (calls, found) = self.find(&regs, &sregs, &*kvm.memory, &rights, &mut counts);
            // Where fewer records are wanted, they are the innermost calls.
            let mut branches = [None; MOST_CALLS];
            for (place, call) in branches.iter_mut().zip(&calls[..found.min(wanted.into())]) {
                *place = Some(branch(call));
            }
            pmu.take_branches(branches.iter().rev().flatten());
        }
        kvm.statistics.lock().add(&Statistics {
            call_stacks: counts,
            ..Statistics::default()
        });
        pmu.end_following();
        Ok(())
    }

    /// Returns the open calls, the innermost first, and counts how their stack ended.
    fn find(
        &mut self,
        regs: &kvm_regs,
        sregs: &kvm_sregs,
        memory: &dyn GuestMemory,
        rights: &dyn Fn() -> Option<u32>,
        counts: &mut CallStacks,
    ) -> ([Call; MOST_CALLS], usize) {
        let mut calls = [Call::default(); MOST_CALLS];
        let paging = Paging::of(&system(sregs));
        let registers = match place(regs, sregs, &paging, memory) {
            Place::Program(registers) => registers,
            Place::Compatible => {
                counts.compatible += 1;
                return (calls, 0);
            }
            Place::Kernel => {
                counts.kernel += 1;
                return (calls, 0);
            }
        };
        let mut program = Program {
            paging,
            memory,
            rights,
            pages: [None; PAGES],
            next: 0,
        };
        let unwinder = self
            .unwinder
            .get_or_insert_with(|| Box::new(Unwinder::new()));
        let outcome = unwinder.unwind(&mut program, paging.root(), &registers, &mut calls);
        counts.calls += outcome.calls as u64;
        let count = match outcome.end {
            End::Complete => &mut counts.complete,
            End::Full => &mut counts.full,
            End::Cut(Cut::NoCfi) => &mut counts.no_cfi,
            End::Cut(Cut::PageAbsent) => &mut counts.page_absent,
            End::Cut(Cut::StackAbsent) => &mut counts.stack_absent,
            End::Cut(Cut::BadCfi) => &mut counts.bad_cfi,
            End::Cut(Cut::Budget) => &mut counts.budget,
        };
        *count += 1;
        (calls, outcome.calls)
    }
}

fn place(regs: &kvm_regs, sregs: &kvm_sregs, paging: &Paging, memory: &dyn GuestMemory) -> Place {
    match (ring(sregs, regs), sregs.cs.l != 0) {
        (Ring::User, true) => Place::Program(Registers {
            general: [
                regs.rax, regs.rdx, regs.rcx, regs.rbx, regs.rsi, regs.rdi, regs.rbp, regs.rsp,
                regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
            ],
            rip: regs.rip,
        }),
        (Ring::User, false) => Place::Compatible,
        (Ring::Kernel, _) => {
            entered(regs.rsp, paging, memory).map_or(Place::Kernel, Place::Program)
        }
    }
}

/// Returns the program's registers, where Linux has pushed them: at the top of the stack that has `rsp`.
fn entered(rsp: u64, paging: &Paging, memory: &dyn GuestMemory) -> Option<Registers> {
    /// THREAD_SIZE, which the stack is aligned by.
    const STACK: u64 = 16384;
    const WORDS: usize = 21;
    /// Where R15 to RBX, R11 to R8, RAX, RCX, RDX, RSI, RDI and RSP are, in the order of [`Registers::general`].
    const GENERAL: [usize; 16] = [10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0];
    /// TOP_OF_KERNEL_STACK_PADDING: none, or with CONFIG_X86_FRED (Linux 6.9) two words.
    const PADDINGS: [u64; 2] = [0, 16];
    const RFLAGS_ONE: u64 = 1 << 1;
    const RFLAGS_IF: u64 = 1 << 9;
    let top = (rsp & !(STACK - 1)).checked_add(STACK)?;
    PADDINGS.into_iter().find_map(|padding| {
        let at = top - padding - 8 * WORDS as u64;
        // Not all of them are pushed yet, or some are popped again.
        if rsp > at {
            return None;
        }
        let page = paging.translate(memory, at)?;
        let mut bytes = [0; 8 * WORDS];
        if page.user || !memory.read(page.physical + at % PAGE, &mut bytes) {
            return None;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let word = |n: usize| u64::from_le_bytes(words[n]);
        let (rip, flags, rsp) = (word(16), word(18), word(19));
        let is_users = word(17) == USER_CS
            && word(20) == USER_SS
            && flags & (RFLAGS_ONE | RFLAGS_IF) == RFLAGS_ONE | RFLAGS_IF
            && [rip, rsp].iter().all(|address| address >> 63 == 0);
        is_users.then(|| Registers {
            general: GENERAL.map(word),
            rip,
        })
    })
}

fn branch(call: &Call) -> Branch {
    Branch {
        from: call.from,
        to: call.to,
        kind: match call.is_direct {
            true => Kind::RelativeCall,
            false => Kind::IndirectCall,
        },
        from_ring: Ring::User,
        to_ring: Ring::User,
        mispredicted: None,
        cycles: None,
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    /// Returns memory whose first 64 KiB are the kernel's at the same addresses, and tables above.
    fn memory() -> (GuestMemoryMmap, Paging) {
        const KERNEL: u64 = 0x63;
        let ram: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2_0000)]).unwrap();
        let put = |at: u64, entry: u64| assert!(GuestMemory::write(&ram, at, &entry.to_le_bytes()));
        put(0x1_0000, 0x1_1000 | KERNEL);
        put(0x1_1000, 0x1_2000 | KERNEL);
        put(0x1_2000, 0x1_3000 | KERNEL);
        for page in 0..16 {
            put(0x1_3000 + 8 * page, (page * PAGE) | KERNEL);
        }
        let sregs = kvm_sregs {
            cr0: 0x8001_0001,
            cr3: 0x1_0000,
            cr4: 0x20,
            efer: 0xd01,
            ..Default::default()
        };
        (ram, Paging::of(&system(&sregs)))
    }

    #[test]
    fn the_programs_registers_are_at_the_top_of_the_kernels_stack() {
        // The stack from 0x4000 to 0x8000, without FRED's padding and with it.
        for padding in [0, 16] {
            let (ram, paging) = memory();
            let at = 0x8000 - padding - 168;
            let put = |n: u64, word: u64| {
                assert!(GuestMemory::write(&ram, at + 8 * n, &word.to_le_bytes()));
            };
            let found = |rsp| entered(rsp, &paging, &ram);
            assert_eq!(found(0x6000), None, "nobody was entered");
            for n in 0..16 {
                put(n, 0x100 + n);
            }
            let frame = [0x40_1234, USER_CS, 0x202, 0x7fff_0000, USER_SS];
            for (n, word) in (16..).zip(frame) {
                put(n, word);
            }
            let registers = found(0x6000).expect("they are there");
            assert_eq!(registers.rip, 0x40_1234);
            // RAX, RDX, RCX, RBX, RSI, RDI, RBP, RSP, R8 to R15.
            let expected = [
                0x10a,
                0x10c,
                0x10b,
                0x105,
                0x10d,
                0x10e,
                0x104,
                0x7fff_0000,
                0x109,
                0x108,
                0x107,
                0x106,
                0x103,
                0x102,
                0x101,
                0x100,
            ];
            assert_eq!(registers.general, expected);
            // The registers are pushed, or popped.
            assert_eq!(found(at + 8), None);
            assert_eq!(found(at), Some(registers));
            // Another stack.
            assert_eq!(found(0x3ff8), None);
            for (n, word) in [(17, 0x10), (18, 0x2), (16, 1 << 63), (20, 0x18)] {
                put(n, word);
                assert_eq!(found(0x6000), None, "word {n}");
                put(n, frame[n as usize - 16]);
            }
            assert!(found(0x6000).is_some());
        }
        let (ram, paging) = memory();
        assert_eq!(entered(u64::MAX, &paging, &ram), None);
    }
}
