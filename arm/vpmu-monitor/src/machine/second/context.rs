//! What of a CPU is a guest's own, and changes hands between two guests.
//!
//! Which registers these are, and why no others, is in `world/second/registers.rs`.
//!
//! UNSAFETY: writes system registers of EL1 and EL0, of interrupts and of timers. EL2 uses none of them.

use vpmu_monitor::{
    regs::{IchHcrEl2, IdAa64pfr0El1, SCTLR_EL1_RESET},
    world::vgic::{ListRegisters, MOST},
};

use super::super::{
    frame::Frame,
    gic::PhysicalInterface,
    sysreg::{isb, numbered_sysreg, read_sysreg, write_sysreg},
};

unsafe extern "C" {
    fn save_vectors(to: *mut Vectors);
    fn load_vectors(from: *const Vectors);
}

/// The system registers of a guest, by name: how to read and write all of them.
macro_rules! registers {
    // Those of EL1 and EL0 by encoding; behind them those of EL2, and of the physical interrupt interface, that say what a guest
    // sees.
    ($($field:ident = $op1:literal $crn:literal $crm:literal $op2:literal;)*
     [ras] $ras:ident = $ras1:literal $ras2:literal $ras3:literal $ras4:literal;) => {
        registers! {
            [all]
            $($field = concat!("s3_", $op1, "_c", $crn, "_c", $crm, "_", $op2);)*
            sp_el1 = "sp_el1";
            vmpidr_el2 = "vmpidr_el2";
            ich_vmcr_el2 = "ich_vmcr_el2";
            ich_hcr_el2 = "ich_hcr_el2";
            icc_pmr_el1 = "icc_pmr_el1";
            [ras] $ras = concat!("s3_", $ras1, "_c", $ras2, "_c", $ras3, "_", $ras4);
        }
    };
    ([all] $($field:ident = $name:expr;)* [ras] $ras:ident = $ras_name:expr;) => {
        #[derive(Clone, Copy, Default)]
        struct Registers {
            $($field: u64,)*
            $ras: u64,
        }

        impl Registers {
            fn read() -> Self {
                Self {
                    $($field: read_sysreg!($name),)*
                    $ras: if has_ras() { read_sysreg!($ras_name) } else { 0 },
                }
            }

            fn write(&self) {
                // SAFETY: no guest runs, and what they say concerns EL1 and EL0 only.
                unsafe {
                    $(write_sysreg!($name, self.$field);)*
                    if has_ras() {
                        write_sysreg!($ras_name, self.$ras);
                    }
                }
            }
        }
    };
}

vpmu_monitor::switched_registers!(registers);

/// FEAT_RAS: interrupts of errors can be deferred. The guests do not see that, but no control traps the register.
fn has_ras() -> bool {
    read_sysreg!("id_aa64pfr0_el1") >> IdAa64pfr0El1::RAS_SHIFT & 0xf != 0
}

/// The vector registers; the layout is known to `entry.s`.
#[derive(Clone, Default)]
#[repr(C, align(16))]
struct Vectors {
    registers: [u128; 32],
    fpcr: u64,
    fpsr: u64,
}

/// A guest that is not in the CPU.
#[derive(Clone)]
pub(super) struct Context {
    frame: Frame,
    registers: Registers,
    vectors: Vectors,
    list: [u64; MOST],
    /// ICH_AP0R<n>_EL2 and ICH_AP1R<n>_EL2.
    active: [[u64; 4]; 2],
    vttbr: u64,
}

impl Context {
    /// A CPU out of reset that begins at `entry` with `x0`.
    pub(super) fn new(entry: u64, x0: u64, vttbr: u64) -> Self {
        let registers = Registers {
            sctlr_el1: SCTLR_EL1_RESET,
            vmpidr_el2: read_sysreg!("mpidr_el1"),
            ich_hcr_el2: IchHcrEl2::EN.bits(),
            icc_pmr_el1: 0xff,
            ..Registers::default()
        };
        Self {
            frame: Frame::entry(entry, x0),
            registers,
            vectors: Vectors::default(),
            list: [0; MOST],
            active: [[0; 4]; 2],
            vttbr,
        }
    }

    /// When a timer of the guest in the CPU raises its interrupt.
    pub(super) fn next_timer() -> Option<u64> {
        const ENABLE: u64 = 1 << 0;
        const IMASK: u64 = 1 << 1;
        let timers = [
            (read_sysreg!("cntv_ctl_el0"), read_sysreg!("cntv_cval_el0")),
            (read_sysreg!("cntp_ctl_el0"), read_sysreg!("cntp_cval_el0")),
        ];
        let due = timers
            .into_iter()
            .filter(|(control, _)| control & (ENABLE | IMASK) == ENABLE);
        due.map(|(_, at)| at).min()
    }

    /// Takes the guest out of the CPU, whose exit saved `frame`. Its timers stop, and no list register is in use.
    pub(super) fn save(&mut self, frame: &Frame) {
        self.frame = frame.clone();
        // Before the timers stop: their control registers are among these.
        self.registers = Registers::read();
        // SAFETY: the vector registers are the guest's, and EL2 uses none.
        unsafe {
            save_vectors(&raw mut self.vectors);
            write_sysreg!("cntv_ctl_el0", 0_u64);
            write_sysreg!("cntp_ctl_el0", 0_u64);
            write_sysreg!("ich_hcr_el2", 0_u64);
        }
        isb();
        let list = self.list.iter_mut().take(PhysicalInterface.count());
        for (n, value) in list.enumerate() {
            *value = PhysicalInterface.read(n);
            PhysicalInterface.write(n, 0);
        }
        for n in 0..priority_registers() {
            self.active[0][n] = numbered_sysreg!(read "ich_ap0r", n, "_el2"; 0 1 2 3);
            self.active[1][n] = numbered_sysreg!(read "ich_ap1r", n, "_el2"; 0 1 2 3);
        }
        self.vttbr = read_sysreg!("vttbr_el2");
    }

    /// Puts the guest into the CPU, and its registers into `frame`.
    pub(super) fn load(&self, frame: &mut Frame) {
        *frame = self.frame.clone();
        let list = self.list.iter().take(PhysicalInterface.count());
        for (n, &value) in list.enumerate() {
            PhysicalInterface.write(n, value);
        }
        for n in 0..priority_registers() {
            // SAFETY: says which virtual priorities are active.
            unsafe {
                numbered_sysreg!(write "ich_ap0r", n, "_el2", self.active[0][n]; 0 1 2 3);
                numbered_sysreg!(write "ich_ap1r", n, "_el2", self.active[1][n]; 0 1 2 3);
            }
        }
        // No TLB maintenance: entries of the guest before have another VMID.
        // SAFETY: as in `save`; stage 2 is the guest's own, under a VMID of its own.
        unsafe {
            load_vectors(&raw const self.vectors);
            write_sysreg!("vttbr_el2", self.vttbr);
        }
        self.registers.write();
        isb();
    }
}

/// How many ICH_AP1R<n>_EL2 there are: `ICH_VTR_EL2.PREbits` is 5, 6 or 7 bits, less one.
fn priority_registers() -> usize {
    1 << ((read_sysreg!("ich_vtr_el2") >> 26 & 7).saturating_sub(4)).min(2)
}
