//! Kinds of instructions.

use iced_x86::{CodeSize, FlowControl, Instruction, Mnemonic, OpKind};

/// Returns whether only a processor can execute the instruction, or the vCPU is to do so alone.
pub(super) fn is_opaque(instruction: &Instruction) -> bool {
    let repeats = instruction.has_rep_prefix() || instruction.has_repne_prefix();
    let loads_segment = instruction.op_count() > 0
        && instruction.op0_kind() == OpKind::Register
        && !instruction.op0_register().is_gpr()
        && !instruction.op0_register().is_vector_register()
        && !instruction.op0_register().is_k()
        && !instruction.op0_register().is_mm()
        && !instruction.op0_register().is_st();
    match instruction.mnemonic() {
        // They only change bits of RFLAGS that no condition reads.
        Mnemonic::Cli
        | Mnemonic::Sti
        | Mnemonic::Clac
        | Mnemonic::Stac
        | Mnemonic::Cld
        | Mnemonic::Std => false,
        // Zero divisors fault.
        Mnemonic::Div | Mnemonic::Idiv => true,
        // TF would be the guest's.
        Mnemonic::Popf | Mnemonic::Popfq => true,
        // They change what addresses are made of and may reach, or come to the host.
        Mnemonic::Wrfsbase
        | Mnemonic::Wrgsbase
        | Mnemonic::Wrpkru
        | Mnemonic::Cpuid
        | Mnemonic::Rdpmc
        | Mnemonic::Vmcall
        | Mnemonic::Vmmcall => true,
        _ => {
            instruction.flow_control() != FlowControl::Next
                || instruction.code_size() == CodeSize::Code16
                || instruction.is_privileged()
                || instruction.is_save_restore_instruction()
                || (repeats && instruction.is_string_instruction())
                || loads_segment
        }
    }
}

/// SETcc.
pub(super) fn is_set(mnemonic: Mnemonic) -> bool {
    use Mnemonic::{
        Seta, Setae, Setb, Setbe, Sete, Setg, Setge, Setl, Setle, Setne, Setno, Setnp, Setns, Seto,
        Setp, Sets,
    };
    matches!(
        mnemonic,
        Seta | Setae
            | Setb
            | Setbe
            | Sete
            | Setg
            | Setge
            | Setl
            | Setle
            | Setne
            | Setno
            | Setnp
            | Setns
            | Seto
            | Setp
            | Sets
    )
}

/// CMOVcc.
pub(super) fn is_conditional_move(mnemonic: Mnemonic) -> bool {
    use Mnemonic::{
        Cmova, Cmovae, Cmovb, Cmovbe, Cmove, Cmovg, Cmovge, Cmovl, Cmovle, Cmovne, Cmovno, Cmovnp,
        Cmovns, Cmovo, Cmovp, Cmovs,
    };
    matches!(
        mnemonic,
        Cmova
            | Cmovae
            | Cmovb
            | Cmovbe
            | Cmove
            | Cmovg
            | Cmovge
            | Cmovl
            | Cmovle
            | Cmovne
            | Cmovno
            | Cmovnp
            | Cmovns
            | Cmovo
            | Cmovp
            | Cmovs
    )
}
