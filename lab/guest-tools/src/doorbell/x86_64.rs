//! The VMM's doorbell on x86-64: an I/O port. Cloud kernels have no
//! `/dev/port`, so the program asks the kernel for the port and uses it.
//!
//! A port that nobody answers reads as all ones and takes any write, so
//! looking first costs nothing.

// UNSAFETY: port instructions have no safe form.
#![expect(unsafe_code, reason = "port instructions")]

use core::arch::asm;
use core::fmt;

use crate::sys::{self, Errno};

const PORT: u16 = 0x5650;
/// The value that the port reads as when the VMM is below: "V".
const MAGIC: u8 = 0x56;
const BEGIN: u8 = 1;
const END: u8 = 2;
const SAVE: u8 = 3;

/// The port, which the kernel has given away.
pub struct Doorbell(());

/// The reason why there is no doorbell.
pub enum NoDoorbell {
    /// The kernel does not give the port away.
    Port(Errno),
    /// Nobody answers at the doorbell's port.
    Absent,
}

impl fmt::Display for NoDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(errno) => write!(f, "failed to use port {PORT:#06x}: {errno}"),
            Self::Absent => write!(
                f,
                "no VMM answers at port {PORT:#06x}: leave --doorbell away, or boot under vpmu-vmm"
            ),
        }
    }
}

impl Doorbell {
    /// Asks for the port and makes sure that a VMM answers.
    ///
    /// # Errors
    ///
    /// Says why there is no doorbell to ring.
    pub fn open() -> Result<Self, NoDoorbell> {
        sys::allow_port(PORT).map_err(NoDoorbell::Port)?;
        let answer: u8;
        // SAFETY: the port is allowed, and reading it does nothing, whether or
        // not it is a doorbell's.
        unsafe {
            asm!("in al, dx", out("al") answer, in("dx") PORT, options(nomem, nostack, preserves_flags));
        }
        if answer == MAGIC {
            Ok(Self(()))
        } else {
            Err(NoDoorbell::Absent)
        }
    }

    /// Asks for the port, whether or not a VMM answers there: the KVM host sees a write of it.
    ///
    /// # Errors
    ///
    /// When the kernel does not give the port away.
    pub fn open_unasked() -> Result<Self, NoDoorbell> {
        sys::allow_port(PORT).map_err(NoDoorbell::Port)?;
        Ok(Self(()))
    }

    /// Tells the VMM to begin measuring.
    pub fn begin(&self) {
        ring(BEGIN);
    }

    /// Tells the VMM to end measuring.
    pub fn end(&self) {
        ring(END);
    }

    /// Returns whether machines can be saved.
    pub fn saves(&self) -> bool {
        true
    }

    /// Makes the VMM save the machine, if it has a place for it.
    pub fn save(&self) {
        ring(SAVE);
    }
}

fn ring(what: u8) {
    // SAFETY: a `Doorbell` exists, so the port is allowed. A write does nothing where nobody answers.
    unsafe {
        asm!("out dx, al", in("al") what, in("dx") PORT, options(nomem, nostack, preserves_flags));
    }
}
