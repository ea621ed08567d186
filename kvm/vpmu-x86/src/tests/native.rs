//! Compares with this processor: random instructions, executed here and by it.
//!
//! UNSAFETY: executes code that the test has written, on a stack and memory of the test's.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::arch::global_asm;
use std::ptr;

use super::{KERNEL, Ram, map, system};
use crate::code::Code;
use crate::cpu::Registers as CpuRegisters;
use crate::flags::STATUS;
use crate::journal::{Journal, Journaled, Rule};
use crate::machine::{Machine, Registers};
use crate::memory::Memory;
use crate::op::{Action, Op};
use crate::space::{Pages, Space};
use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register};

/// The general registers in the order of their numbers, RFLAGS, and RSP of the test.
type State = [u64; 18];

global_asm!(
    ".pushsection .data.vpmu_x86, \"aw\"",
    ".balign 8",
    "vpmu_x86_state: .quad 0",
    "vpmu_x86_code: .quad 0",
    "vpmu_x86_rdi: .quad 0",
    ".popsection",
    // Called with a state and the code to execute with it.
    ".globl vpmu_x86_go",
    "vpmu_x86_go:",
    "push rbx; push rbp; push r12; push r13; push r14; push r15",
    "mov [rdi + 136], rsp",
    "mov [rip + vpmu_x86_state], rdi",
    "mov [rip + vpmu_x86_code], rsi",
    "push qword ptr [rdi + 128]; popfq",
    "mov rax, [rdi]; mov rcx, [rdi + 8]; mov rdx, [rdi + 16]; mov rbx, [rdi + 24]",
    "mov rsp, [rdi + 32]; mov rbp, [rdi + 40]; mov rsi, [rdi + 48]",
    "mov r8, [rdi + 64]; mov r9, [rdi + 72]; mov r10, [rdi + 80]; mov r11, [rdi + 88]",
    "mov r12, [rdi + 96]; mov r13, [rdi + 104]; mov r14, [rdi + 112]; mov r15, [rdi + 120]",
    "mov rdi, [rdi + 56]",
    "jmp qword ptr [rip + vpmu_x86_code]",
    // The code ends with a jump to here.
    ".globl vpmu_x86_done",
    "vpmu_x86_done:",
    "mov [rip + vpmu_x86_rdi], rdi",
    "mov rdi, [rip + vpmu_x86_state]",
    "mov [rdi], rax; mov [rdi + 8], rcx; mov [rdi + 16], rdx; mov [rdi + 24], rbx",
    "mov [rdi + 32], rsp; mov [rdi + 40], rbp; mov [rdi + 48], rsi",
    "mov [rdi + 64], r8; mov [rdi + 72], r9; mov [rdi + 80], r10; mov [rdi + 88], r11",
    "mov [rdi + 96], r12; mov [rdi + 104], r13; mov [rdi + 112], r14; mov [rdi + 120], r15",
    "mov rsp, [rdi + 136]",
    "pushfq; pop qword ptr [rdi + 128]",
    "mov rax, [rip + vpmu_x86_rdi]; mov [rdi + 56], rax",
    "pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
    "ret",
);

unsafe extern "C" {
    fn vpmu_x86_go(state: *mut State, code: *const u8);
    fn vpmu_x86_done();
}

const PAGE: usize = 4096;
const RSP: usize = 4;
const RSI: usize = 6;

/// A page of code and one of data, of this program.
struct Program {
    code: *mut u8,
    data: *mut [u64; PAGE / 8],
}

impl Program {
    fn new() -> Self {
        let page = |protection| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping, at an address that the kernel chooses.
            let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, protection, flags, -1, 0) };
            assert_ne!(page, libc::MAP_FAILED);
            page
        };
        let write = libc::PROT_READ | libc::PROT_WRITE;
        Self {
            code: page(write | libc::PROT_EXEC).cast(),
            data: page(write).cast(),
        }
    }
}

impl Program {
    /// Executes `code` on `data`, from this state on, and sets what it leaves.
    fn execute(&self, code: &[u8], data: &[u64; PAGE / 8], state: &mut State) {
        assert!(code.len() < PAGE);
        // SAFETY: both pages are this test's; the code there reaches the page of data alone, and ends where it is to.
        unsafe {
            ptr::copy_nonoverlapping(code.as_ptr(), self.code, code.len());
            self.data.write(*data);
            vpmu_x86_go(state, self.code);
        }
    }

    fn data(&self) -> [u64; PAGE / 8] {
        // SAFETY: the page is mapped as long as the program.
        unsafe { self.data.read() }
    }
}

/// Numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.next() >> 8) as usize % all.len()]
    }

    /// A number, often one at an edge.
    fn number(&mut self) -> u64 {
        let edges = [
            0,
            1,
            0x7f,
            0x80,
            0xff,
            0x7fff,
            0x8000,
            0x7fff_ffff,
            0x8000_0000,
            u64::MAX,
        ];
        match self.next() >> 60 {
            0..6 => self.of(&edges),
            6..9 => 1 << (self.next() >> 58),
            _ => self.next(),
        }
    }

    /// Returns an instruction with a ModRM byte, of registers or of memory at [rsi + n].
    fn with_modrm(&mut self) -> Vec<u8> {
        let mut code = Vec::new();
        if self.next() >> 62 == 0 {
            code.push(0x66);
        }
        let is_memory = self.next() >> 62 == 0;
        let rex = (self.next() >> 60) as u8 & if is_memory { 0b1110 } else { 0b1111 };
        if self.next() >> 61 != 0 {
            code.push(0x40 | rex & if is_memory { 0b1100 } else { 0b1111 });
        }
        let one = [
            0x00, 0x01, 0x02, 0x03, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12, 0x13, 0x18, 0x19,
            0x1a, 0x1b, 0x20, 0x21, 0x22, 0x23, 0x28, 0x29, 0x2a, 0x2b, 0x30, 0x31, 0x32, 0x33,
            0x38, 0x39, 0x3a, 0x3b, 0x63, 0x80, 0x81, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89,
            0x8a, 0x8b, 0x8d, 0xc0, 0xc1, 0xc6, 0xc7, 0xd0, 0xd1, 0xd2, 0xd3, 0xf6, 0xf7, 0xfe,
            0xff, 0x69, 0x6b,
        ];
        let two = [0x1f, 0xa3, 0xaf, 0xb6, 0xb7, 0xba, 0xbe, 0xbf];
        match self.next() >> 60 {
            0..12 => code.push(self.of(&one)),
            12 => code.extend([0x0f, self.of(&two)]),
            13 => code.extend([0x0f, 0x40 | (self.next() >> 60) as u8]),
            _ => code.extend([0x0f, 0x90 | (self.next() >> 60) as u8]),
        }
        let fields = (self.next() >> 58) as u8;
        match is_memory {
            true => code.extend([0x46 | fields & 0x38, 8 * (self.next() >> 60) as u8]),
            false => code.push(0xc0 | fields),
        }
        code
    }

    /// Returns an instruction that is executed exactly and leaves RSI, and RSP but for pushes and pops.
    fn instruction(&mut self, depth: &mut i32) -> (Vec<u8>, Op) {
        loop {
            let mut code = match self.next() >> 60 {
                0 => vec![0x50 | (self.next() >> 61) as u8],
                1 => vec![0x58 | (self.next() >> 61) as u8],
                2 => vec![0xb8 | (self.next() >> 61) as u8],
                3 => vec![0x48, 0xb8 | (self.next() >> 61) as u8],
                4 => vec![0x6a],
                5 => self
                    .of(&[
                        &[0x48, 0x8d, 0x44, 0x8e][..],
                        &[0x98],
                        &[0x48, 0x98],
                        &[0x66, 0x98],
                    ])
                    .to_vec(),
                _ => self.with_modrm(),
            };
            // An immediate, if there is one.
            code.extend(self.number().to_le_bytes());
            let mut decoder = Decoder::new(64, &code, DecoderOptions::NONE);
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                continue;
            }
            let op = Op::of(&instruction);
            code.truncate(instruction.len());
            let mut factory = InstructionInfoFactory::new();
            let changes = |register: Register| {
                let full = register.full_register();
                matches!(full, Register::RSI | Register::RSP)
            };
            let is_stack = matches!(op.action, Action::Push | Action::Pop);
            let changed = factory
                .info(&instruction)
                .used_registers()
                .iter()
                .any(|used| {
                    let is_write = !matches!(
                        used.access(),
                        OpAccess::Read | OpAccess::CondRead | OpAccess::None
                    );
                    is_write
                        && changes(used.register())
                        && !(is_stack && used.register() == Register::RSP)
                });
            let pops_stack =
                op.action == Action::Pop && instruction.op0_register() == Register::RSP;
            let is_jump = matches!(
                op.action,
                Action::CallIndirect | Action::JumpIndirect | Action::Rdmsr
            );
            if op.action == Action::Unknown || changed || pops_stack || is_jump {
                continue;
            }
            let by = i32::from(op.action == Action::Push) - i32::from(op.action == Action::Pop);
            if !(-8..=8).contains(&(*depth + by)) {
                continue;
            }
            *depth += by;
            return (code, op);
        }
    }
}

/// Returns some instructions, with jumps over one, and calls and returns.
fn program(random: &mut Random) -> Vec<u8> {
    let (mut code, mut depth) = (Vec::new(), 0);
    for _ in 0..1 + (random.next() >> 61) {
        let before = depth;
        let (next, _) = random.instruction(&mut depth);
        match random.next() >> 61 {
            // What may be jumped over may not move the stack.
            0 | 1 if depth == before => {
                code.extend([0x70 | (random.next() >> 60) as u8, next.len() as u8]);
            }
            // call +2; jmp +1; ret
            2 => code.extend([0xe8, 2, 0, 0, 0, 0xeb, 1, 0xc3]),
            _ => {}
        }
        code.extend(next);
    }
    code
}

fn to_cpu(state: &State, rip: u64) -> CpuRegisters {
    CpuRegisters {
        general: std::array::from_fn(|n| state[n]),
        rip,
        rflags: state[16],
    }
}

/// Returns an action without its numbers.
fn name(action: Action) -> String {
    let name = format!("{action:?}");
    match action {
        Action::Alu(_) | Action::Shift(_) | Action::Rotate(_) => name,
        _ => name.split('(').next().unwrap_or_default().to_owned(),
    }
}

#[test]
fn random_instructions_do_what_this_processor_does() {
    /// Where the page of data is in the guest.
    const DATA: u64 = 0x9000;
    const CODE: u64 = 0x8000;
    let pages = Program::new();
    let (code_at, data_at) = (pages.code as u64, pages.data as u64);
    let ram = Ram::new(0x1_0000);
    map(&ram, code_at, CODE | KERNEL);
    map(&ram, data_at, DATA | KERNEL);
    let (mut random, mut executed, mut stopped) = (Random(0x9e37_79b9_7f4a_7c15), 0, 0);
    let mut actions = std::collections::BTreeSet::new();
    for n in 0..10_000 {
        let program = program(&mut random);
        let mut whole = program.clone();
        whole.extend([0xff, 0x25, 0, 0, 0, 0]);
        whole.extend((vpmu_x86_done as *const () as u64).to_le_bytes());
        let mut state: State = std::array::from_fn(|_| random.number());
        (state[RSP], state[RSI]) = (data_at + 2048, data_at + 512);
        // CF, PF, AF, ZF, SF, OF; and 1, IF.
        state[16] = state[16] & STATUS | 0x202;
        let data: [u64; PAGE / 8] = std::array::from_fn(|_| random.number());
        let bytes: Vec<u8> = data.iter().flat_map(|word| word.to_le_bytes()).collect();
        ram.write_bytes(CODE, &whole);
        ram.write_bytes(DATA, &bytes);
        // Here.
        let (mut journal, mut found, mut code) = (Journal::new(), Pages::new(), Code::new());
        let before = to_cpu(&state, code_at);
        let rule = Rule::of(&before, &system());
        let space = Space::new(rule.paging, rule.mode, &ram, &mut found);
        let mut machine = Machine {
            registers: Registers::<u64>::of(&before, &system()),
            memory: Journaled::new(space, &mut journal, rule, &|| None),
        };
        code.begin();
        let end = code_at + program.len() as u64;
        let mut is_executed = true;
        while machine.registers.ip != end {
            let at = code.at(machine.registers.ip, &mut machine.memory).unwrap();
            let op = code.ops(at)[0];
            let next = match op.is_last {
                true => machine.branch(&op),
                false => machine.compute(&op).map(|()| op.next),
            };
            let Ok(next) = next else {
                is_executed = false;
                break;
            };
            machine.registers.ip = next;
            actions.insert(name(op.action));
            executed += 1;
        }
        let (registers, rule) = (machine.registers, machine.memory.rule);
        if !is_executed {
            // An undefined flag was asked for.
            stopped += 1;
            continue;
        }
        assert_eq!(journal.commit(&rule, &ram), Ok(()));
        pages.execute(&whole, &data, &mut state);
        let undefined = registers.flags.get().undefined;
        let expected = to_cpu(&state, end);
        let cut = |regs: CpuRegisters| CpuRegisters {
            rflags: regs.rflags & STATUS & !undefined,
            ..regs
        };
        assert_eq!(
            cut(registers.to_cpu(0)),
            cut(expected),
            "{n}: {program:02x?}"
        );
        let mut after = vec![0; PAGE];
        assert!(ram.read(DATA, &mut after));
        let expected = pages.data();
        let expected: Vec<u8> = expected
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert!(after == expected, "{n}: {program:02x?}");
    }
    assert!(executed > 10_000 && stopped < 5_000, "{executed} {stopped}");
    // All but indirect calls and jumps, LEAVE, LOOP, JRCXZ and RDMSR.
    assert_eq!(actions.len(), 48, "{actions:?}");
}
