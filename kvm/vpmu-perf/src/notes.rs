//! The signal handler's notes for the thread that it interrupts: the perf events that have overflowed.
//!
//! The handler finds the counter by its file descriptor, notes it in a word of memory, and kicks. Without the kick, a
//! signal that comes between the last check and KVM_RUN would be seen only at the next exit, which may never come.
//!
//! The signal is a real-time signal, because these queue. Of two overflows at one time, a second SIGUSR1 would be
//! dropped, and with it the report that was promised. A full queue makes the kernel send SIGIO instead. SIGIO names no
//! counter, and would end the process if nobody expected it.
//!
//! The handler's thread and the host share the notes. The host may be on another thread by then. The thread keeps its
//! notes until it ends or takes others, so the handler never finds them gone. The kick's target belongs to the host,
//! which releases it only when no handler is at work (`retire`).

use std::cell::RefCell;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use vpmu::counter::{Counter, CounterSet, Slots};

use crate::error::PerfError;
use crate::kick::{KICKED, Kick};

/// The value of a timer's signal (`sigev_value`) that only kicks: the timer is an embedder's, and sends the overflows'
/// signal to the thread.
pub const ALARM: i32 = i32::MIN;

const NO_FD: i32 = -1;

/// A [`Kick`], as a handler does it.
#[derive(Debug)]
enum Target {
    Nothing,
    /// Atomic for its type alone: threads may share it.
    Flag(AtomicPtr<AtomicU8>),
    EventFd(libc::c_int),
    Signal(libc::c_int),
}

impl Target {
    fn of(kick: &Kick) -> Self {
        match kick {
            Kick::Nothing => Self::Nothing,
            Kick::Flag(flag) => Self::Flag(ptr::from_ref(flag.flag()).cast_mut().into()),
            Kick::EventFd(fd) => Self::EventFd(fd.as_raw_fd()),
            Kick::Signal(signal) => Self::Signal(*signal),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Notes {
    /// The perf event of each counter.
    fds: Slots<AtomicI32>,
    pending: AtomicU32,
    /// Whether any counter may have overflowed.
    overrun: AtomicBool,
    /// Number of handlers at work.
    busy: AtomicU32,
    /// Kicked with each note.
    target: Target,
    process: libc::pid_t,
    thread: libc::pid_t,
    /// Whether a host uses the notes, and keeps the target.
    claimed: AtomicBool,
}

thread_local! {
    // Constant and without a destructor: a signal handler may read it at any time.
    static CURRENT: AtomicPtr<Notes> = const { AtomicPtr::new(ptr::null_mut()) };
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// The guard that keeps this thread's notes where its handler finds them.
struct Kept(Arc<Notes>);

impl Drop for Kept {
    fn drop(&mut self) {
        // The handler runs on this thread: it has either ended or not begun.
        CURRENT.with(|current| current.store(ptr::null_mut(), Ordering::Relaxed));
    }
}

impl Notes {
    /// Takes the calling thread's notes. `None`: somebody else has them.
    pub(crate) fn claim(kick: &Kick) -> Option<Arc<Self>> {
        KEPT.with(|kept| {
            let mut kept = kept.borrow_mut();
            let taken = |kept: &Kept| kept.0.claimed.load(Ordering::Relaxed);
            if kept.as_ref().is_some_and(taken) {
                return None;
            }
            let notes = Arc::new(Self::new(kick));
            *kept = Some(Kept(Arc::clone(&notes)));
            let pointer = Arc::as_ptr(&notes).cast_mut();
            CURRENT.with(|current| current.store(pointer, Ordering::Relaxed));
            Some(notes)
        })
    }

    #[expect(
        unsafe_code,
        reason = "getpid is a C function, and gettid a system call"
    )]
    fn new(kick: &Kick) -> Self {
        // musl's gettid is null in a static program with link-time optimization: the standard library's weak reference
        // to gettid wins there, and nothing then links the function.
        // SAFETY: both take nothing and cannot fail.
        let (process, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
        // A thread's ID is a pid_t.
        let thread = thread as libc::pid_t;
        Self {
            fds: Slots::from_fn(|| AtomicI32::new(NO_FD)),
            pending: AtomicU32::new(0),
            overrun: AtomicBool::new(false),
            busy: AtomicU32::new(0),
            target: Target::of(kick),
            process,
            thread,
            claimed: AtomicBool::new(true),
        }
    }

    /// Returns the thread whose overflows are noted.
    pub(crate) fn thread(&self) -> libc::pid_t {
        self.thread
    }

    /// Returns whether that thread is the calling one.
    pub(crate) fn is_here(&self) -> bool {
        CURRENT.with(|current| ptr::eq(current.load(Ordering::Relaxed), self))
    }

    /// Returns the thread as perf_event_open takes it: the calling thread needs fewer rights.
    pub(crate) fn target(&self) -> libc::pid_t {
        if self.is_here() { 0 } else { self.thread }
    }

    /// Sets the perf event of `counter`; `None`: none.
    pub(crate) fn watch(&self, counter: Counter, fd: Option<libc::c_int>) {
        self.fds[counter].store(fd.unwrap_or(NO_FD), Ordering::Relaxed);
    }

    /// Drops the note of `counter`.
    pub(crate) fn forget(&self, counter: Counter) {
        let others = !counter.alone().bits();
        self.pending.fetch_and(others, Ordering::Relaxed);
    }

    /// Returns whether there is a note of `counter`.
    pub(crate) fn has(&self, counter: Counter) -> bool {
        CounterSet::from_bits(self.pending.load(Ordering::Relaxed)).contains(counter)
    }

    /// Returns whether there is anything to take.
    pub(crate) fn any(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0 || self.overrun.load(Ordering::Relaxed)
    }

    /// Takes the counters noted since the last call.
    pub(crate) fn take(&self) -> CounterSet {
        if self.pending.load(Ordering::Relaxed) == 0 {
            return CounterSet::EMPTY;
        }
        CounterSet::from_bits(self.pending.swap(0, Ordering::Relaxed))
    }

    /// Returns whether any counter may have overflowed without a note since the last call.
    pub(crate) fn take_overrun(&self) -> bool {
        self.overrun.load(Ordering::Relaxed) && self.overrun.swap(false, Ordering::Relaxed)
    }

    /// Stops all notes and kicks. The kick's target may go after this.
    pub(crate) fn retire(&self) {
        self.claimed.store(false, Ordering::SeqCst);
        // A handler that has said that it is at work may have seen that they are claimed. A handler that says so later
        // sees that they are not. A handler can be at work only if this is another thread than its own.
        while self.busy.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
    }

    /// Notes an overflow, in the handler.
    fn note(&self, fd: Option<libc::c_int>) {
        self.busy.fetch_add(1, Ordering::SeqCst);
        let found = match fd {
            None => {
                self.overrun.store(true, Ordering::Relaxed);
                true
            }
            Some(ALARM) => true,
            Some(fd) => {
                let its = |(_, slot): &(Counter, &AtomicI32)| slot.load(Ordering::Relaxed) == fd;
                let counter = self.fds.iter().find(its);
                if let Some((counter, _)) = counter {
                    let bit = counter.alone().bits();
                    self.pending.fetch_or(bit, Ordering::Relaxed);
                }
                counter.is_some()
            }
        };
        if found && self.claimed.load(Ordering::SeqCst) {
            self.kick();
        }
        self.busy.fetch_sub(1, Ordering::SeqCst);
    }

    #[expect(
        unsafe_code,
        reason = "the flag is behind a pointer, the rest are system calls"
    )]
    fn kick(&self) {
        // SAFETY: the flag is the `Kick`'s, which the host keeps until `retire` has seen that no handler is at work. errno
        // is this thread's, and what the handler has interrupted may read it. The write reads 8 bytes of a local.
        unsafe {
            let errno = *libc::__errno_location();
            match &self.target {
                Target::Nothing => {}
                Target::Flag(flag) => {
                    let flag = &*flag.load(Ordering::Relaxed);
                    // The VMM's own request is not overwritten. The VMM clears it by itself.
                    let _ = flag.compare_exchange(0, KICKED, Ordering::SeqCst, Ordering::Relaxed);
                }
                Target::EventFd(fd) => {
                    let one = 1_u64;
                    libc::write(*fd, (&raw const one).cast(), size_of::<u64>());
                }
                // raise() would change the signal mask, by further system calls.
                Target::Signal(signal) => {
                    libc::syscall(libc::SYS_tgkill, self.process, self.thread, *signal);
                }
            }
            *libc::__errno_location() = errno;
        }
    }
}

#[expect(unsafe_code, reason = "the notes are behind a thread's pointer")]
fn with_current(body: impl FnOnce(&Notes)) {
    let notes = CURRENT.with(|current| current.load(Ordering::Relaxed));
    // SAFETY: null or this thread's notes, which `KEPT` keeps as long as `CURRENT` has them.
    if let Some(notes) = unsafe { notes.as_ref() } {
        body(notes);
    }
}

/// Notes that any counter of the calling thread may have overflowed: for the SIGIO handler of a VMM that has
/// one. The kernel sends SIGIO in place of an overflow's own signal when too many signals wait. May be called
/// in a signal handler.
pub fn overrun() {
    with_current(|notes| notes.note(None));
}

/// Does the work of the handler: `event` has overflowed, or with `None` any.
#[cfg(test)]
pub(crate) fn signalled(event: Option<libc::c_int>) {
    with_current(|notes| notes.note(event));
}

#[expect(unsafe_code, reason = "a signal handler gets raw pointers")]
extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// The values that the kernel puts behind si_code for SIGIO-like signals (`_sigpoll`).
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
    // A timer's value is where the descriptor is.
    // SAFETY: the kernel hands a siginfo_t of 128 bytes to a handler with SA_SIGINFO, aligned for
    // longs; SigPoll is a prefix of it. Whoever sent the signal, these bytes are initialised, and
    // `fd` is only compared.
    let fd = unsafe { (*info.cast::<SigPoll>()).fd };
    with_current(|notes| notes.note((signal != libc::SIGIO).then_some(fd)));
}

/// Installs the handler, once for each signal: for `signal`, which nobody else may have a handler for, and for SIGIO unless
/// somebody else has.
pub(crate) fn install(signal: libc::c_int) -> Result<(), PerfError> {
    static INSTALLED: Mutex<Vec<libc::c_int>> = Mutex::new(Vec::new());
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if installed.contains(&signal) {
        return Ok(());
    }
    if has_handler(signal)? {
        return Err(PerfError::SignalTaken(signal));
    }
    let others = !installed.is_empty() || has_handler(libc::SIGIO)?;
    handle(signal)?;
    if !others {
        handle(libc::SIGIO)?;
    }
    installed.push(signal);
    Ok(())
}

/// Checks that the handler of `signal` is [`install`]'s, and unblocks the signal for the calling thread.
pub(crate) fn reach_thread(signal: libc::c_int) -> Result<(), PerfError> {
    if handler(signal)? != on_signal as *const () as usize {
        return Err(PerfError::SignalTaken(signal));
    }
    // A signal that nobody takes fills the user's queue of signals, of which each program of that user has a part.
    unblock(signal)
}

#[expect(unsafe_code, reason = "pthread_sigmask is a C interface")]
fn unblock(signal: libc::c_int) -> Result<(), PerfError> {
    // SAFETY: all zeroes is a valid set, which sigaddset changes.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a local, which the first call fills and the second reads.
    let error = unsafe {
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        error => Err(PerfError::Open(error)),
    }
}

fn has_handler(signal: libc::c_int) -> Result<bool, PerfError> {
    Ok(![libc::SIG_DFL, libc::SIG_IGN].contains(&handler(signal)?))
}

#[expect(unsafe_code, reason = "sigaction is a C interface")]
fn handler(signal: libc::c_int) -> Result<libc::sighandler_t, PerfError> {
    // SAFETY: all zeroes is a valid sigaction: no flags, an empty mask.
    let mut present: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads the present action, and sets none.
    if unsafe { libc::sigaction(signal, ptr::null(), &mut present) } != 0 {
        return Err(refused());
    }
    Ok(present.sa_sigaction)
}

#[expect(unsafe_code, reason = "sigaction is a C interface")]
fn handle(signal: libc::c_int) -> Result<(), PerfError> {
    // SAFETY: as in `has_handler`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    // SA_RESTART stays clear, because the signal must end KVM_RUN.
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: `on_signal` has the signature of SA_SIGINFO, and does only what a handler may.
    match unsafe { libc::sigaction(signal, &action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(refused()),
    }
}

fn refused() -> PerfError {
    PerfError::Open(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}
