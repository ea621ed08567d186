//! Learns where a guest is going, on values of which not every bit is known. Nothing of that changes the guest.
//!
//! Where an instruction is not executed here, only what it may change is known: these registers, flags and words are unknown from
//! then on. What may fault, and what only a processor can do, stops.

mod decoded;
mod shadow;
#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests;

use iced_x86::{Instruction, InstructionInfoFactory, OpAccess, RflagsBits};

use crate::cpu::{Registers, Stop, System};
use crate::flags::Lazy;
use crate::machine::{self, Machine};
use crate::memory::Memory;
use crate::op::{Action, FS, GS};
use crate::paging::{Access, Paging};
use crate::space::{Pages, Space};
use crate::word::{Masked, Word};
use decoded::Decodings;
pub use decoded::{Decoded, Flow};
use shadow::{Shadow, Written};

/// Predicts for one vCPU. Its room is made once.
pub struct Predictor {
    info: InstructionInfoFactory,
    decodings: Decodings,
    pages: Pages,
    written: Written,
}

impl Predictor {
    /// Makes room.
    #[expect(
        clippy::new_without_default,
        reason = "it takes 200 KB, which nobody makes by the way"
    )]
    pub fn new() -> Self {
        Self {
            info: InstructionInfoFactory::new(),
            decodings: Decodings::new(),
            pages: Pages::new(),
            written: Written::new(),
        }
    }

    /// The vCPU may have changed its tables.
    pub fn forget_pages(&mut self) {
        self.pages.forget();
    }

    /// Returns whether the last prediction has stopped because it had stored more than there is room for.
    pub fn is_exhausted(&self) -> bool {
        self.written.is_exhausted()
    }

    /// Begins at a vCPU that stands still.
    pub fn begin<'a, M: Memory + ?Sized>(
        &'a mut self,
        registers: &Registers,
        system: &System,
        memory: &'a M,
    ) -> Prediction<'a, M> {
        self.written.clear();
        let mode = shadow::mode(system.cpl == 3);
        let space = Space::new(Paging::of(system), mode, memory, &mut self.pages);
        Prediction {
            machine: Machine {
                registers: machine::Registers::of(registers, system),
                memory: Shadow {
                    space,
                    written: &mut self.written,
                },
            },
            info: &mut self.info,
            decodings: &mut self.decodings,
        }
    }
}

/// A vCPU at a moment to come.
pub struct Prediction<'a, M: ?Sized> {
    machine: Machine<Masked, Shadow<'a, M>>,
    info: &'a mut InstructionInfoFactory,
    decodings: &'a mut Decodings,
}

impl<M: Memory + ?Sized> Prediction<'_, M> {
    /// Returns the instruction at `ip`; `None`: there is none, or it may not be executed.
    pub fn decode(&mut self, ip: u64) -> Option<Decoded> {
        let memory = &mut self.machine.memory;
        let (bytes, length) = memory.space.code(ip);
        self.decodings.at(ip, &bytes, length)
    }

    /// Returns the general registers.
    pub fn general(&self) -> [Masked; 16] {
        self.machine.registers.general()
    }

    /// Sets a general register by its number.
    pub fn set_register(&mut self, number: usize, value: Masked) {
        self.machine.registers.set_whole(number, value);
    }

    /// Sets RFLAGS, all of which are known.
    pub fn set_flags(&mut self, rflags: u64, firm: bool) {
        self.machine.registers.flags = Lazy::of(rflags, firm);
    }

    /// Nothing is known of the status flags.
    pub fn forget_flags(&mut self) {
        self.machine.registers.flags.forget();
    }

    /// The vCPU is at CPL 3 from now on, or in its kernel.
    pub fn set_user(&mut self, is_user: bool) {
        self.machine.memory.space.mode = shadow::mode(is_user);
    }

    /// Pops a word of 64 bits.
    ///
    /// # Errors
    ///
    /// Where the stack is not known, or the load may fault.
    pub fn pop(&mut self) -> Result<Masked, Stop> {
        self.machine.pop()
    }

    /// Returns the word of 64 bits that the processor reads for itself at `address`.
    pub fn word(&mut self, address: u64) -> Option<u64> {
        self.machine.memory.space.word(address)
    }

    /// Returns whether `address` is canonical.
    pub fn is_canonical(&self, address: u64) -> bool {
        self.machine.memory.space.is_canonical(address)
    }

    /// Takes a near branch that has no condition, and returns where it leads to.
    ///
    /// # Errors
    ///
    /// Where the target is not known, or the branch may fault.
    pub fn branch(&mut self, decoded: &Decoded) -> Result<u64, Stop> {
        self.machine.branch(&decoded.op)?.bits().ok_or(Stop)
    }

    /// Returns whether a near branch with a condition is taken (`None`: nobody knows), and whether that comes from registers
    /// alone.
    pub fn decide(&mut self, decoded: &Decoded) -> (Option<bool>, bool) {
        self.machine.decide(&decoded.op)
    }

    /// Forgets the general registers that the instruction writes.
    pub fn forget_written(&mut self, decoded: &Decoded) {
        for register in self.info.info(&decoded.instruction).used_registers() {
            if register.access() != OpAccess::Read && register.register().is_gpr() {
                let number = register.register().full_register().number();
                self.machine.registers.set_whole(number, Masked::UNKNOWN);
            }
        }
    }

    /// Executes an instruction that is no branch.
    ///
    /// # Errors
    ///
    /// Where an address is not known, a fault is possible, or only a processor can do it.
    pub fn execute(&mut self, decoded: &Decoded) -> Result<(), Stop> {
        if decoded.is_opaque() {
            return Err(Stop);
        }
        match decoded.op.action {
            Action::Unknown => self.forget(&decoded.instruction),
            _ => self.machine.compute(&decoded.op),
        }
    }

    /// An instruction of which nothing is known but what it may change.
    fn forget(&mut self, instruction: &Instruction) -> Result<(), Stop> {
        let info = self.info.info(instruction);
        let (registers, memory) = (&mut self.machine.registers, &mut self.machine.memory);
        let reads = |access| matches!(access, OpAccess::None | OpAccess::Read | OpAccess::CondRead);
        for used in info.used_memory() {
            if used.access() == OpAccess::NoMemAccess {
                continue;
            }
            let size = used.memory_size().size();
            let address = used.virtual_address(0, |register, _, _| match register {
                // WRFSBASE and its kin stop a prediction: the bases are those with which the vCPU stood still.
                iced_x86::Register::FS => registers.get(FS).bits(),
                iced_x86::Register::GS => registers.get(GS).bits(),
                // In 64-bit code the others' bases count as 0.
                register if register.is_segment_register() => Some(0),
                register if register.is_gpr() => {
                    let whole = registers.get(register.full_register().number() as u8);
                    whole
                        .cut(crate::flags::mask(register.size().min(8) as u8))
                        .bits()
                }
                _ => None,
            });
            // A store to a place that is not known may change anything that is read later.
            let (Some(address), 1..) = (address, size) else {
                return Err(Stop);
            };
            match reads(used.access()) {
                true => memory.space.check(address, size, Access::Load)?,
                false => memory.forget(address, size)?,
            }
        }
        // PUSHF and its kin say nothing of RSP but that they change it.
        const RSP: usize = 4;
        let stack = registers.general()[RSP];
        for register in info.used_registers() {
            if !reads(register.access()) && register.register().is_gpr() {
                registers.set_whole(
                    register.register().full_register().number(),
                    Masked::UNKNOWN,
                );
            }
        }
        if instruction.is_stack_instruction() {
            let by = i64::from(instruction.stack_pointer_increment());
            // Behind the registers that are forgotten, of which RSP is one.
            registers.set_whole(RSP, stack.map(|at| at.wrapping_add_signed(by)));
        }
        const FLAGS: u32 = RflagsBits::CF
            | RflagsBits::PF
            | RflagsBits::AF
            | RflagsBits::ZF
            | RflagsBits::SF
            | RflagsBits::OF;
        if instruction.rflags_modified() & FLAGS != 0 {
            registers.flags.forget();
        }
        Ok(())
    }
}
