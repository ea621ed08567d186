//! The monitor's doorbell on AArch64: a page of the guest's physical memory at which a
//! program tells the monitor below to begin and to end measuring.
//!
//! Without the monitor the page is a hole in the machine's map, and touching
//! it may kill the process (SIGBUS). So a child looks first.

// UNSAFETY: the doorbell is a device register.
#![expect(unsafe_code, reason = "the doorbell is a device register")]

use core::fmt;

use crate::arch::{device_read, device_write};
use crate::sys::{self, Errno, flags};

const ADDRESS: usize = 0x0b00_0000;
const LENGTH: usize = 0x1000;
/// What the register reads as when a monitor is below: "VPMV".
const MAGIC: u32 = 0x564d_5056;
const BEGIN: u32 = 1;
const END: u32 = 2;

/// The mapped doorbell of a monitor that is really there.
pub struct Doorbell(*mut u32);

/// Why there is no doorbell.
pub enum NoDoorbell {
    /// `/dev/mem` could not be opened or mapped.
    Memory(Errno),
    /// The looking child could not be started.
    Probe(Errno),
    /// Nobody answers at the doorbell's address.
    Absent,
}

impl fmt::Display for NoDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(errno) => write!(f, "failed to map /dev/mem: {errno}"),
            Self::Probe(errno) => write!(f, "failed to fork: {errno}"),
            Self::Absent => write!(
                f,
                "no monitor answers at {ADDRESS:#010x}: leave --doorbell away, or boot under vpmu-monitor"
            ),
        }
    }
}

impl Doorbell {
    /// Maps the doorbell after making sure that a monitor answers.
    pub fn open() -> Result<Self, NoDoorbell> {
        let register = sys::open(c"/dev/mem", flags::READ_WRITE_SYNC)
            .and_then(|memory| memory.map(ADDRESS, LENGTH))
            .map_err(NoDoorbell::Memory)?
            .cast::<u32>();
        match sys::fork().map_err(NoDoorbell::Probe)? {
            None => {
                // SAFETY: mapped above; at worst this child dies.
                let answered = unsafe { device_read(register) } == MAGIC;
                sys::exit(i32::from(!answered))
            }
            Some(child) => match child.wait() {
                Ok(ended) if ended.status == 0 => Ok(Self(register)),
                Ok(_) => Err(NoDoorbell::Absent),
                Err(errno) => Err(NoDoorbell::Probe(errno)),
            },
        }
    }

    /// Tells the monitor to begin measuring.
    pub fn begin(&self) {
        // SAFETY: mapped, and the monitor answered.
        unsafe { device_write(self.0, BEGIN) }
    }

    /// Tells the monitor to end measuring.
    pub fn end(&self) {
        // SAFETY: mapped, and the monitor answered.
        unsafe { device_write(self.0, END) }
    }

    /// Whether machines can be saved.
    pub fn saves(&self) -> bool {
        false
    }

    /// Does nothing.
    pub fn save(&self) {}
}
