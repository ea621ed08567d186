//! `self-monitor`
//!
//! Reads a counter of its own with RDPMC, as the kernel's `struct perf_event_mmap_page` tells how, and compares each
//! value with the one before and with the kernel's. Prints
//!
//! ```text
//! self-monitor: rdpmc N backwards N outside N fallbacks N ns N
//! ```
//!
//! the RDPMCs that gave a value; values lower than the one before; values that are not between two `read()`s around
//! them; reads that the kernel had to serve; and the time of one RDPMC. Returns 0 when all values were right, 1
//! otherwise, and 3 where the kernel offers no RDPMC. x86-64 only.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
vpmu_guest_tools::start!(x86_64::run);
#[cfg(all(target_os = "none", not(target_arch = "x86_64")))]
vpmu_guest_tools::start!(elsewhere);

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("self-monitor: built for a guest, does nothing on the host");
}

#[cfg(all(target_os = "none", not(target_arch = "x86_64")))]
fn elsewhere(_: vpmu_guest_tools::start::Process) -> i32 {
    3
}

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod x86_64 {
    // UNSAFETY: RDPMC is an instruction without a safe form, and the kernel writes the page meanwhile.
    #![expect(unsafe_code, reason = "RDPMC, a page that the kernel writes")]

    use core::arch::asm;
    use core::sync::atomic::{Ordering, fence};

    use vpmu_guest_tools::start::Process;
    use vpmu_guest_tools::sys::{Errno, Fd, count_hardware, monotonic_ns};

    const CPU_CYCLES: u64 = 0;
    const PAGE: usize = 4096;
    const READS: u64 = 2000;

    /// Words of `struct perf_event_mmap_page`, by their offsets in bytes.
    const LOCK: usize = 8;
    const INDEX: usize = 12;
    const OFFSET: usize = 16;
    const CAPABILITIES: usize = 40;
    const PMC_WIDTH: usize = 48;
    const CAP_USER_RDPMC: u64 = 1 << 2;

    struct Page(*const u8);

    impl Page {
        fn get<T: Copy>(&self, offset: usize) -> T {
            // SAFETY: the page is mapped for the whole program; the kernel's structure has an integer of this
            // size there.
            unsafe { self.0.add(offset).cast::<T>().read_volatile() }
        }

        /// Returns the event's count. `None`: no counter counts the event now.
        fn count(&self) -> Option<u64> {
            loop {
                let lock: u32 = self.get(LOCK);
                fence(Ordering::SeqCst);
                let index: u32 = self.get(INDEX);
                let offset: u64 = self.get(OFFSET);
                let width: u16 = self.get(PMC_WIDTH);
                let counter = index.checked_sub(1).map(rdpmc);
                fence(Ordering::SeqCst);
                if self.get::<u32>(LOCK) == lock {
                    let unused = 64 - u32::from(width);
                    let counter = counter?.cast_signed() << unused >> unused;
                    return Some(offset.wrapping_add(counter.cast_unsigned()));
                }
            }
        }
    }

    fn rdpmc(counter: u32) -> u64 {
        let (low, high): (u64, u64);
        // SAFETY: reads a counter, or faults; changes nothing.
        unsafe {
            asm!("rdpmc", in("ecx") counter, out("rax") low, out("rdx") high, options(nomem, nostack));
        }
        high << 32 | low
    }

    fn read(event: Fd) -> Result<u64, Errno> {
        let mut count = [0; 8];
        event.read(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    pub(super) fn run(_: Process) -> i32 {
        match monitor() {
            Ok(status) => status,
            Err(error) => {
                Fd::STDERR.say(format_args!("self-monitor: perf: {error}"));
                1
            }
        }
    }

    fn monitor() -> Result<i32, Errno> {
        let event = count_hardware(CPU_CYCLES)?;
        let page = Page(event.map(0, PAGE)?);
        if page.get::<u64>(CAPABILITIES) & CAP_USER_RDPMC == 0 {
            Fd::STDERR.say(format_args!("self-monitor: the kernel offers no RDPMC"));
            return Ok(3);
        }
        let (mut rdpmcs, mut backwards, mut outside, mut fallbacks) = (0_u64, 0_u64, 0_u64, 0_u64);
        let mut last = 0;
        for n in 0..READS {
            let before = if n % 20 == 0 { read(event)? } else { last };
            let Some(count) = page.count() else {
                fallbacks += 1;
                continue;
            };
            rdpmcs += 1;
            backwards += u64::from(count < last);
            outside += u64::from(count < before);
            last = count;
            if n % 20 == 0 {
                outside += u64::from(read(event)? < count);
            }
        }
        let begin = monotonic_ns();
        let timed = (0..READS).filter(|_| page.count().is_some()).count() as u64;
        let ns = (monotonic_ns() - begin) / timed.max(1);
        Fd::STDOUT.say(format_args!(
            "self-monitor: rdpmc {rdpmcs} backwards {backwards} outside {outside} fallbacks {fallbacks} ns {ns}"
        ));
        Ok(i32::from(
            backwards + outside + fallbacks > 0 || rdpmcs == 0,
        ))
    }
}
