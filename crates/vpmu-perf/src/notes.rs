//! What the signal handler notes for the thread it interrupts: which perf events have overflowed.
//!
//! The handler finds the counter by its file descriptor and does nothing but two atomic writes. The
//! second one tells KVM not to enter the guest: without it, a signal that comes between the last
//! look and KVM_RUN would be seen at the next exit only, which may be never.
//!
//! It is a real-time signal, because these queue: of two overflows at one time, a second SIGUSR1
//! would be dropped, and with it the report that was promised. A queue that is full makes the kernel
//! send SIGIO instead, which says of no counter in particular that it has overflowed, and would end
//! the process if nobody expected it.

use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

use vpmu::counter::CounterSet;

const COUNTERS: usize = 32;

struct Notes {
    /// The perf event of each counter; -1: none.
    fds: [AtomicI32; COUNTERS],
    pending: AtomicU32,
    /// Any counter may have overflowed.
    overrun: AtomicBool,
    /// Written 1 with each note, unless null.
    kick: AtomicPtr<u8>,
    /// Somebody uses them.
    claimed: AtomicBool,
}

thread_local! {
    // Constant and without a destructor: a signal handler may look at it at any time.
    static NOTES: Notes = const {
        Notes {
            fds: [const { AtomicI32::new(-1) }; COUNTERS],
            pending: AtomicU32::new(0),
            overrun: AtomicBool::new(false),
            kick: AtomicPtr::new(ptr::null_mut()),
            claimed: AtomicBool::new(false),
        }
    };
}

/// Not the first of them, which VMMs use to take a vCPU out of the guest.
pub(crate) fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

#[expect(unsafe_code, reason = "a signal handler gets raw pointers")]
extern "C" fn note(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// What the kernel puts behind si_code for SIGIO-like signals (`_sigpoll`).
    #[repr(C)]
    struct SigPoll {
        head: [libc::c_int; 3],
        align: libc::c_int,
        band: libc::c_long,
        fd: libc::c_int,
    }
    if info.is_null() {
        return;
    }
    // SAFETY: the kernel hands a siginfo_t of 128 bytes to a handler with SA_SIGINFO, aligned for
    // longs; SigPoll is a prefix of it. Whoever sent the signal, these bytes are initialised, and
    // `fd` is only compared.
    let fd = unsafe { (*info.cast::<SigPoll>()).fd };
    NOTES.with(|notes| {
        if signal == libc::SIGIO {
            notes.overrun.store(true, Ordering::Relaxed);
        } else {
            let Some(counter) = notes
                .fds
                .iter()
                .position(|slot| slot.load(Ordering::Relaxed) == fd)
            else {
                return;
            };
            notes.pending.fetch_or(1 << counter, Ordering::Relaxed);
        }
        let kick = notes.kick.load(Ordering::Relaxed);
        if !kick.is_null() {
            // SAFETY: `set_kick`'s caller keeps it valid as long as it is set, and only this thread
            // and the kernel, within this thread's system calls, write to it.
            unsafe { kick.write_volatile(1) };
        }
    });
}

/// Installs the handler, once for the process: for our signal, and for SIGIO unless somebody else has
/// a handler for it.
#[expect(unsafe_code, reason = "sigaction is a C interface")]
pub(crate) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    let errno = *INSTALLED.get_or_init(|| {
        // SAFETY: all zeroes is a valid sigaction: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = note as *const () as usize;
        // Not SA_RESTART: the signal is there to end KVM_RUN.
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: as above.
        let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `note` has the signature of SA_SIGINFO, and does only what a handler may.
        let done = unsafe {
            libc::sigaction(signal(), &action, ptr::null_mut()) == 0
                && libc::sigaction(libc::SIGIO, ptr::null(), &mut before) == 0
                && (before.sa_sigaction != libc::SIG_DFL
                    || libc::sigaction(libc::SIGIO, &action, ptr::null_mut()) == 0)
        };
        if done {
            return 0;
        }
        io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EINVAL)
    });
    match errno {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Takes this thread's notes. `false`: somebody else has them.
pub(crate) fn claim() -> bool {
    NOTES.with(|notes| !notes.claimed.swap(true, Ordering::Relaxed))
}

/// Leaves this thread's notes as they were before [`claim`].
pub(crate) fn give_back() {
    set_kick(ptr::null_mut());
    (0..COUNTERS as u8).for_each(|counter| watch(counter, -1));
    NOTES.with(|notes| notes.claimed.store(false, Ordering::Relaxed));
}

/// The perf event of `counter` on this thread; -1: none.
pub(crate) fn watch(counter: u8, fd: libc::c_int) {
    NOTES.with(|notes| {
        if let Some(slot) = notes.fds.get(usize::from(counter)) {
            slot.store(fd, Ordering::Relaxed);
        }
    });
}

/// Where the handler writes 1; null: nowhere.
pub(crate) fn set_kick(kick: *mut u8) {
    NOTES.with(|notes| notes.kick.store(kick, Ordering::Relaxed));
}

/// Drops what has been noted of `counter`.
pub(crate) fn forget(counter: u8) {
    let others = !CounterSet::of(counter).bits();
    NOTES.with(|notes| notes.pending.fetch_and(others, Ordering::Relaxed));
}

/// The counters noted since the last time.
pub(crate) fn take() -> CounterSet {
    NOTES.with(|notes| {
        if notes.pending.load(Ordering::Relaxed) == 0 {
            return CounterSet::EMPTY;
        }
        CounterSet::from_bits(notes.pending.swap(0, Ordering::Relaxed))
    })
}

/// Whether since the last time any counter may have overflowed without a note.
pub(crate) fn take_overrun() -> bool {
    NOTES.with(|notes| {
        notes.overrun.load(Ordering::Relaxed) && notes.overrun.swap(false, Ordering::Relaxed)
    })
}
