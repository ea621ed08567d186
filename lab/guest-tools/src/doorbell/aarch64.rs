//! The monitor's doorbell on AArch64: a page of the guest's physical address space at which a
//! program tells the monitor below to begin and to end measuring. The monitor writes the page's
//! address into the guest's device tree. Without a monitor, the tree has no such address.

// UNSAFETY: the doorbell is a device register.
#![expect(unsafe_code, reason = "the doorbell is a device register")]

use core::arch::asm;
use core::fmt;

use crate::files;
use crate::sys::{self, Errno, flags};

/// The device tree as the kernel has got it. A kernel that reads ACPI shows it nowhere else.
const TREE: &str = "/sys/firmware/fdt";
/// The address, big-endian with 64 bits.
const NAME: &[u8] = b"vpmu,doorbell\0";
const ADDRESS: &str = "/proc/device-tree/chosen/vpmu,doorbell";
const LENGTH: usize = 0x1000;
/// The value that the register reads as when a monitor is below: "VPMV".
const MAGIC: u32 = 0x564d_5056;
const BEGIN: u32 = 1;
const END: u32 = 2;

/// The mapped doorbell of a monitor that is really there.
pub struct Doorbell(*mut u32);

/// The reason why there is no doorbell.
pub enum NoDoorbell {
    /// `/dev/mem` could not be opened or mapped.
    Memory(Errno),
    /// No address in the device tree, or nobody answers there.
    Absent,
}

impl fmt::Display for NoDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(errno) => write!(f, "failed to map /dev/mem: {errno}"),
            Self::Absent => {
                f.write_str("no monitor answers: leave --doorbell away, or boot under vpmu-monitor")
            }
        }
    }
}

/// Bytes of a tree that has nothing but `/chosen`.
const TREE_ROOM: usize = 8192;

/// The doorbell's address in a device tree (Devicetree Specification 0.4, chapter 5).
fn in_tree(tree: &[u8]) -> Option<u64> {
    const PROPERTY: u32 = 3;
    let word = |at: usize| Some(u32::from_be_bytes(*tree.get(at..)?.first_chunk()?));
    let (structure, strings) = (word(8)? as usize, word(12)? as usize);
    let mut names = tree.get(strings..)?.windows(NAME.len());
    let name = names.position(|name| name == NAME)? as u32;
    let property = [PROPERTY, size_of::<u64>() as u32, name].map(u32::to_be_bytes);
    let mut words = tree.get(structure..)?.windows(20).step_by(4);
    let found = words.find(|words| words.starts_with(property.as_flattened()))?;
    Some(u64::from_be_bytes(*found.last_chunk()?))
}

impl Doorbell {
    /// Maps the doorbell after making sure that a monitor answers.
    ///
    /// # Errors
    ///
    /// [`NoDoorbell`] says what is missing.
    pub fn open() -> Result<Self, NoDoorbell> {
        let read = |path| files::bytes(path).ok();
        let address = read(ADDRESS)
            .and_then(|bytes| Some(u64::from_be_bytes(bytes.try_into().ok()?)))
            .or_else(|| in_tree(&read(TREE).filter(|tree| tree.len() < TREE_ROOM)?))
            .ok_or(NoDoorbell::Absent)?;
        let register = sys::open(c"/dev/mem", flags::READ_WRITE_SYNC)
            .and_then(|memory| memory.map(address as usize, LENGTH))
            .map_err(NoDoorbell::Memory)?
            .cast::<u32>();
        // SAFETY: mapped above, and nobody's memory: a monitor says that it is a register.
        if unsafe { device_read(register) } == MAGIC {
            Ok(Self(register))
        } else {
            Err(NoDoorbell::Absent)
        }
    }

    /// As [`open`](Self::open): a doorbell in memory is nowhere unless a monitor says where.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_unasked() -> Result<Self, NoDoorbell> {
        Self::open()
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

    /// Returns whether machines can be saved.
    pub fn saves(&self) -> bool {
        false
    }

    /// Does nothing.
    pub fn save(&self) {}
}

/// Reads a 32-bit device register.
///
/// Spelled out, because a hypervisor can complete a trapped load only when it
/// has no write-back (ESR_ELx.ISV).
///
/// # Safety
///
/// `register` must be mapped and aligned.
unsafe fn device_read(register: *const u32) -> u32 {
    let value: u32;
    // SAFETY: the caller's duty.
    unsafe {
        asm!("ldr {0:w}, [{1}]", out(reg) value, in(reg) register, options(nostack));
    }
    value
}

/// Writes a 32-bit device register, see [`device_read`].
///
/// # Safety
///
/// `register` must be mapped and aligned.
unsafe fn device_write(register: *mut u32, value: u32) {
    // SAFETY: the caller's duty.
    unsafe {
        asm!("str {0:w}, [{1}]", in(reg) value, in(reg) register, options(nostack));
    }
}
