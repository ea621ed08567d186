//! The exits that are the program's, where the guest may measure: read from `kvm_run`.

use std::ffi::c_int;
use std::ptr::{self, NonNull};

use kvm_bindings::{KVM_EXIT_IO, KVM_EXIT_MMIO, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR, kvm_run};
use vpmu_kvm::{Error, Exit};
use vpmu_measure::{BEGIN, DOORBELL_ID, END, Measurement};

/// The page of `kvm_run`, and that of the data of port accesses behind it.
const SIZE: usize = 2 * 4096;
const OUT: u8 = 1;

/// The two pages of a vCPU.
#[derive(Debug)]
pub(crate) struct Page(NonNull<kvm_run>);

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Page {}

/// Reads a field of the page.
macro_rules! field {
    ($page:expr, $($field:tt)+) => {{
        let page = $page.0.as_ptr();
        // SAFETY: mapped as long as `self`; the kernel writes no field while the vCPU does not run.
        unsafe { (&raw const (*page).$($field)+).read_volatile() }
    }};
}

impl Page {
    pub(crate) fn map(vcpu: c_int) -> Result<Self, Error> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let page = unsafe { libc::mmap(ptr::null_mut(), SIZE, access, kind, vcpu, 0) };
        match NonNull::new(page) {
            Some(mapped) if page != libc::MAP_FAILED => Ok(Self(mapped.cast())),
            _ => Err(Error::Kvm("mmap of kvm_run", crate::next::errno())),
        }
    }

    /// Returns what the last exit was.
    pub(crate) fn exit(&self) -> Exit {
        match field!(self, exit_reason) {
            KVM_EXIT_IO => Exit::Port(field!(self, __bindgen_anon_1.io).port),
            KVM_EXIT_MMIO => Exit::Memory,
            KVM_EXIT_X86_RDMSR => Exit::MsrRead(field!(self, __bindgen_anon_1.msr.index)),
            KVM_EXIT_X86_WRMSR => Exit::MsrWrite(field!(self, __bindgen_anon_1.msr.index)),
            _ => Exit::Other,
        }
    }

    /// Answers the doorbell of measurements. Returns `false` where the last exit, of this port, is none that it knows.
    pub(crate) fn answer(&self, measurement: &Measurement) -> bool {
        let io = field!(self, __bindgen_anon_1.io);
        let (1, 1, Some(data)) = (io.size, io.count, self.data()) else {
            return false;
        };
        if io.direction != OUT {
            // SAFETY: `data` is within the mapping.
            unsafe { data.write_volatile(DOORBELL_ID) };
            return true;
        }
        // SAFETY: as above.
        match unsafe { data.read_volatile() } {
            BEGIN => measurement.begin(),
            END => measurement.end(),
            _ => return false,
        }
        true
    }

    /// Returns the place of the first byte of a port access.
    fn data(&self) -> Option<*mut u8> {
        let offset = field!(self, __bindgen_anon_1.io).data_offset as usize;
        // SAFETY: an offset that is smaller is within the mapping.
        (offset < SIZE).then(|| unsafe { self.0.as_ptr().cast::<u8>().add(offset) })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a pointer any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}
