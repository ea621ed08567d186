//! One entry of `.eh_frame`, interpreted in memory of its own.
//!
//! A function's entry (FDE) and what it has in common with others (CIE) are anywhere in a section of megabytes. Both are copied
//! behind each other, the FDE's pointer to its CIE is set to where that is now, and the copy is a section.

use alloc::boxed::Box;
use alloc::vec;

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameOffset, EndianSlice, Evaluation, EvaluationResult,
    EvaluationStorage, Expression, LittleEndian, Location, Piece, Reader as Section, ReaderOffset,
    Register, RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow,
    Value,
};

use crate::bytes::Reader;
use crate::object::Object;
use crate::rules::{KEPT, RBP, RIP, RSP, Rule};
use crate::{Cut, Registers};

/// Bytes of a CIE and an FDE. Functions of 20 KiB of CFI exist.
const LONGEST: usize = 32 * 1024;
/// Steps of a DWARF expression. Those of compilers and C libraries have ten.
const MOST_STEPS: u32 = 64;

#[derive(Debug)]
struct Fixed;

impl<T: ReaderOffset> UnwindContextStorage<T> for Fixed {
    type Rules = [(Register, RegisterRule<T>); 32];
    type Stack = [UnwindTableRow<T, Self>; 6];
}

impl<R: Section> EvaluationStorage<R> for Fixed {
    type Stack = [Value; 32];
    type ExpressionStack = [(R, R); 2];
    type Result = [Piece<R>; 1];
}

/// What an entry says of an instruction.
pub(crate) enum Found {
    /// It is of another function.
    Nothing,
    /// A rule for whoever comes there.
    Rule(Rule),
    /// The function's start, whether it is a signal handler's return, and the caller's registers.
    Caller(u64, bool, Option<Registers>),
}

/// Interprets entries.
pub(crate) struct Entries {
    copy: Box<[u8]>,
    context: Box<UnwindContext<usize, Fixed>>,
}

impl Entries {
    pub(crate) fn new() -> Self {
        Self {
            copy: vec![0; LONGEST].into_boxed_slice(),
            context: Box::new(UnwindContext::new_in()),
        }
    }

    /// Returns what the entry at `fde` says of the instruction at `at`, where a program has the registers `now`, of which only RIP,
    /// RSP and RBP are known if `is_partial`.
    pub(crate) fn rule(
        &mut self,
        reader: &mut Reader<'_>,
        object: &Object,
        fde: u64,
        at: u64,
        now: &Registers,
        is_partial: bool,
    ) -> Result<Found, Cut> {
        let (cie, end) = self.copy(reader, fde)?;
        let mut section = EhFrame::new(&self.copy[..end], LittleEndian);
        section.set_address_size(8);
        let bases = BaseAddresses::default().set_eh_frame(fde.wrapping_sub(cie as u64));
        let entry = section
            .fde_from_offset(&bases, EhFrameOffset(cie), EhFrame::cie_from_offset)
            .map_err(bad)?;
        // The table has starts alone: `at` may be behind the last function, or between two.
        if !entry.contains(at) {
            return Ok(Found::Nothing);
        }
        let start = entry.initial_address();
        let is_signal = entry.is_signal_trampoline();
        let encoding = entry.cie().encoding();
        let row = entry
            .unwind_info_for_address(&section, &bases, &mut self.context, at)
            .map_err(bad)?;
        if is_elsewhere(row) {
            return Err(Cut::BadCfi);
        }
        // A rule does not say that its function is a signal handler's return.
        if !is_signal && let Some(rule) = compact(row, start.wrapping_sub(object.base)) {
            return Ok(Found::Rule(rule));
        }
        let mut caller = Caller {
            reader,
            now,
            is_partial,
            section: &section,
            encoding,
        };
        let next = caller.registers(row)?;
        Ok(Found::Caller(start, is_signal, next))
    }

    /// Copies the CIE and the FDE. Returns the length of the first, and of both.
    fn copy(&mut self, reader: &mut Reader<'_>, fde: u64) -> Result<(usize, usize), Cut> {
        let [length, pointer] = words(reader.array(fde)?);
        let here = fde.wrapping_add(4);
        let cie = here.wrapping_sub(pointer.into());
        let [cie_length, id] = words(reader.array(cie)?);
        // Neither is of the 64-bit format, which begins with a length of all ones.
        let (cie_end, fde_length) = (cie_length as usize + 4, length as usize + 4);
        let is_possible = id == 0
            && pointer != 0
            && cie_end >= 12
            && fde_length >= 12
            && cie_end <= LONGEST
            && fde_length <= LONGEST - cie_end;
        if !is_possible {
            return Err(Cut::BadCfi);
        }
        let end = cie_end + fde_length;
        // Each byte may be an instruction.
        reader.spend(end as u32 / 4)?;
        reader.read(cie, &mut self.copy[..cie_end])?;
        reader.read(fde, &mut self.copy[cie_end..end])?;
        // The program may have changed them meanwhile.
        let distance = cie_end as u32 + 4;
        self.copy[..8].copy_from_slice(&join([cie_length, id]));
        self.copy[cie_end..cie_end + 8].copy_from_slice(&join([length, distance]));
        Ok((cie_end, end))
    }
}

fn words(bytes: [u8; 8]) -> [u32; 2] {
    let both = u64::from_le_bytes(bytes);
    [both as u32, (both >> 32) as u32]
}

fn join([low, high]: [u32; 2]) -> [u8; 8] {
    (u64::from(low) | u64::from(high) << 32).to_le_bytes()
}

fn bad(_: gimli::Error) -> Cut {
    Cut::BadCfi
}

/// Returns whether the row leads elsewhere than to the caller: longjmp and setcontext say where they go, by a frame or a return
/// address in registers that no function keeps. Those that they leave are still open.
fn is_elsewhere(row: &UnwindTableRow<usize, Fixed>) -> bool {
    // RAX, RDX, RCX, RSI, RDI, R8, R9, R11. A frame that is realigned has its CFA in R10 for some instructions.
    const VOLATILE: [u16; 8] = [0, 1, 2, 4, 5, 8, 9, 11];
    let of_register = |register: usize| {
        let rule = row.register(Register(register as u16));
        matches!(rule, Some(RegisterRule::Register(_)))
    };
    let is_volatile = match row.cfa() {
        CfaRule::RegisterAndOffset { register, .. } => VOLATILE.contains(&register.0),
        CfaRule::Expression(_) => false,
    };
    is_volatile || of_register(RIP) || of_register(RSP)
}

/// Returns the row in a few bytes, where it has no expression and keeps everything where compilers do.
fn compact(row: &UnwindTableRow<usize, Fixed>, start: u64) -> Option<Rule> {
    let small = |offset: i64| i32::try_from(offset).ok();
    let CfaRule::RegisterAndOffset { register, offset } = *row.cfa() else {
        return None;
    };
    let is_outermost = match row.register(Register(RIP as u16)) {
        Some(RegisterRule::Undefined) => true,
        Some(RegisterRule::Offset(-8)) => false,
        _ => return None,
    };
    let mut saved = [0; KEPT.len()];
    for (place, number) in saved.iter_mut().zip(KEPT) {
        match row.register(Register(number as u16)) {
            None | Some(RegisterRule::SameValue | RegisterRule::Undefined) => {}
            Some(RegisterRule::Offset(offset)) if offset != 0 => *place = small(offset)?,
            Some(_) => return None,
        }
    }
    Some(Rule {
        start,
        cfa: (
            u8::try_from(register.0).ok().filter(|&n| n < 16)?,
            small(offset)?,
        ),
        saved,
        is_outermost,
    })
}

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// What finds a caller by rules of any kind.
struct Caller<'a, 'b, 'c> {
    reader: &'a mut Reader<'b>,
    now: &'a Registers,
    is_partial: bool,
    section: &'a EhFrame<Bytes<'c>>,
    encoding: gimli::Encoding,
}

impl<'c> Caller<'_, '_, 'c> {
    fn registers(&mut self, row: &UnwindTableRow<usize, Fixed>) -> Result<Option<Registers>, Cut> {
        let cfa = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => {
                self.register(*register)?.wrapping_add_signed(*offset)
            }
            CfaRule::Expression(expression) => {
                let expression = expression.get(self.section).map_err(bad)?;
                self.evaluate(expression, None)?
            }
        };
        let mut next = *self.now;
        // Where nothing else is said, the caller's RSP is the CFA.
        next.general[RSP] = cfa;
        let places = next.general.iter_mut().chain([&mut next.rip]);
        for (n, place) in places.enumerate() {
            *place = match row.register(Register(n as u16)) {
                None | Some(RegisterRule::SameValue) => continue,
                Some(RegisterRule::Undefined) if n == RIP => return Ok(None),
                Some(RegisterRule::Undefined) => continue,
                Some(RegisterRule::Offset(offset)) => {
                    self.reader.word(cfa.wrapping_add_signed(offset))?
                }
                Some(RegisterRule::ValOffset(offset)) => cfa.wrapping_add_signed(offset),
                Some(RegisterRule::Register(register)) => self.register(register)?,
                Some(RegisterRule::Expression(expression)) => {
                    let expression = expression.get(self.section).map_err(bad)?;
                    let address = self.evaluate(expression, Some(cfa))?;
                    self.reader.word(address)?
                }
                Some(RegisterRule::ValExpression(expression)) => {
                    let expression = expression.get(self.section).map_err(bad)?;
                    self.evaluate(expression, Some(cfa))?
                }
                Some(_) => return Err(Cut::BadCfi),
            };
        }
        Ok(Some(next))
    }

    fn register(&self, register: Register) -> Result<u64, Cut> {
        let number = usize::from(register.0);
        if self.is_partial && !matches!(number, RBP | RSP | RIP) {
            return Err(Cut::NoCfi);
        }
        let value = match number {
            RIP => Some(&self.now.rip),
            _ => self.now.general.get(number),
        };
        value.copied().ok_or(Cut::BadCfi)
    }

    fn evaluate(
        &mut self,
        expression: Expression<Bytes<'c>>,
        initial: Option<u64>,
    ) -> Result<u64, Cut> {
        let mut evaluation = Evaluation::<_, Fixed>::new_in(expression.0, self.encoding);
        evaluation.set_max_iterations(MOST_STEPS);
        if let Some(value) = initial {
            evaluation.set_initial_value(value);
        }
        let mut result = evaluation.evaluate().map_err(bad)?;
        loop {
            self.reader.spend(1)?;
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = Value::Generic(self.register(register)?);
                    evaluation.resume_with_register(value)
                }
                // Smaller reads are of no compiler's CFI.
                EvaluationResult::RequiresMemory {
                    address, size: 8, ..
                } => {
                    let value = Value::Generic(self.reader.word(address)?);
                    evaluation.resume_with_memory(value)
                }
                _ => return Err(Cut::BadCfi),
            }
            .map_err(bad)?;
        }
        match evaluation.as_result().last().map(|piece| &piece.location) {
            Some(Location::Address { address }) => Ok(*address),
            _ => Err(Cut::BadCfi),
        }
    }
}
