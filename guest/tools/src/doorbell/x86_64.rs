//! The VMM's doorbell on x86-64: an I/O port, reached through `/dev/port`.
//!
//! A port that nobody answers reads as all ones and takes any write, so
//! looking first costs nothing.

use core::fmt;

use crate::sys::{self, Errno, Fd, flags};

const PORT: usize = 0x5650;
/// What the port reads as when the VMM is below: "V".
const MAGIC: u8 = 0x56;
const BEGIN: u8 = 1;
const END: u8 = 2;

/// The ports of a machine whose VMM has a doorbell.
pub struct Doorbell(Fd);

/// Why there is no doorbell.
pub enum NoDoorbell {
    /// `/dev/port` could not be opened or read.
    Ports(Errno),
    /// Nobody answers at the doorbell's port.
    Absent,
}

impl fmt::Display for NoDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ports(errno) => write!(f, "failed to use /dev/port: {errno}"),
            Self::Absent => write!(
                f,
                "no VMM answers at port {PORT:#06x}: leave --doorbell away, or boot under vpmu-vmm"
            ),
        }
    }
}

impl Doorbell {
    /// Opens the ports and makes sure that a VMM answers.
    pub fn open() -> Result<Self, NoDoorbell> {
        let ports = sys::open(c"/dev/port", flags::READ_WRITE).map_err(NoDoorbell::Ports)?;
        let mut answer = [0];
        match ports.read_at(&mut answer, PORT) {
            Ok(1) if answer[0] == MAGIC => Ok(Self(ports)),
            Ok(_) => Err(NoDoorbell::Absent),
            Err(errno) => Err(NoDoorbell::Ports(errno)),
        }
    }

    /// Tells the VMM to begin measuring.
    pub fn begin(&self) {
        self.ring(BEGIN);
    }

    /// Tells the VMM to end measuring.
    pub fn end(&self) {
        self.ring(END);
    }

    fn ring(&self, what: u8) {
        // The port answered when it was opened; without the mark the
        // statistics say that nothing was measured.
        let _ = self.0.write_at(&[what], PORT);
    }
}
