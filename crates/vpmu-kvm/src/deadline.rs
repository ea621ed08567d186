//! One vCPU's lazy TSC deadline, paravirtual mode, on KVM.
//!
//! The registers are two MSRs of our own, because KVM answers IA32_TSC_DEADLINE before it looks at
//! the MSR filter. The timer is a timerfd of ours: KVM's would wake the guest, and what is to be
//! decided at its expiry is just whether to. The protocol is [`lazy_deadline`]'s.
//!
//! KVM keeps the local APIC to itself, and tells of it only between two runs of the vCPU. So what
//! the LVT timer register says, and how far the vCPU's TSC is from the host's, is looked up at each
//! write of the deadline register, which is an exit anyway, and holds until the next. So these
//! registers have a rule: what changes the LVT or the TSC is followed by a write of the deadline. A
//! guest that masks the LVT and does not write gets the interrupt once more; one that unmasks it and
//! does not write gets none, and one that sets its TSC gets it when it was to come before.
//!
//! The TSC may change unseen, too: a host that has slept gives it back to its guests. Then the timer
//! expires long before its moment by that old offset. The guest is interrupted at once, and what it
//! writes next brings the new one.
//!
//! A thread that waits for a timer runs some microseconds after it, which KVM's own timer does not
//! need. So the timer is set early by as much as the last expiries came late, and what is left is
//! waited for by looking at the TSC; as KVM's `lapic_timer_advance_ns`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::{ReadMsrExit, VcpuFd, VmFd, WriteMsrExit};
use lazy_deadline::{
    DeadlineState, DeadlineTimer, HostStatistics, HostTimer, LvtTimer, Slot, SlotRef, TimerMode,
    Verdict,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_gettime, timerfd_settime,
};
use serde::{Deserialize, Serialize};
use vm_memory::{GuestAddress, GuestMemoryBackend, VolatileMemory};

use crate::error::{Error, kvm};
use crate::lapic::{self, Lapic};
use crate::tsc::tsc;

/// The guest writes where its slot is, with bit 0 set; 0 lets go of it.
pub const DEADLINE_SLOT_MSR: u32 = 0x4b56_4d56;
/// The deadline register.
pub const DEADLINE_MSR: u32 = 0x4b56_4d57;
/// In a write of [`DEADLINE_SLOT_MSR`]: share the slot at this address.
const SLOT_ENABLE: u64 = 1;

/// Moving a timer costs the host some microseconds: no guest has it do so more often.
const FLOOR_NS: u64 = 20_000;
/// The timer is set no earlier than this, ns: the longest that an expiry looks at the TSC.
const ADVANCE_NS: u64 = 10_000;
/// The part of an expiry's lateness by which the next is set earlier.
const ADVANCE_STEP: u64 = 8;

/// One vCPU's deadline. Its exits come from the vCPU's thread, expiries from any other, which waits
/// for [`as_fd`](AsFd::as_fd) to become readable and calls [`expire`](Self::expire).
#[derive(Debug)]
pub struct VcpuDeadline<M> {
    memory: M,
    timer: OwnedFd,
    state: Mutex<State>,
}

/// All that must go with the guest, and its memory, for no deadline to be lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuDeadlineState {
    deadline: DeadlineState,
    slot: Option<u64>,
    written: Option<u64>,
    apic_id: u8,
    vector: u8,
}

#[derive(Debug)]
struct State {
    deadline: DeadlineTimer,
    clock: Clock,
    alarm: Alarm,
    /// The slot's address in the guest's memory.
    slot: Option<u64>,
    /// A write of the deadline register that has not been acted upon.
    written: Option<u64>,
    apic_id: u8,
    vector: u8,
}

/// The vCPU's TSC in terms of the host's.
#[derive(Clone, Copy, Debug)]
struct Clock {
    khz: u32,
    /// What the host's TSC lacks for the vCPU's.
    offset: u64,
}

impl Clock {
    fn now(self) -> u64 {
        rdtsc().wrapping_add(self.offset)
    }
}

/// When the timer was to be there, and how much earlier it was set.
#[derive(Clone, Copy, Debug, Default)]
struct Alarm {
    /// In the vCPU's TSC; `None`: not set.
    at: Option<u64>,
    /// Ticks between the setting and its moment.
    ahead: u64,
    /// Ticks.
    advance: u64,
}

/// What an expiry is one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expiry {
    /// The timer's, or of nothing.
    Due,
    /// The timer's, long before its moment: the vCPU's TSC is another than it was.
    Doubtful,
}

/// The timer, as the engine has it.
struct Timer<'a> {
    fd: BorrowedFd<'a>,
    clock: Clock,
    alarm: &'a mut Alarm,
}

impl<M: GuestMemoryBackend> VcpuDeadline<M> {
    /// Nothing armed, nothing shared. The vCPU's TSC must run as fast as the host's, and
    /// KVM_CAP_X2APIC_API be off.
    ///
    /// # Errors
    ///
    /// When the host has no timer to give, or does not tell its TSC's rate.
    pub fn new(vcpu: &VcpuFd, memory: M) -> Result<Self, Error> {
        let khz = kvm("KVM_GET_TSC_KHZ", vcpu.get_tsc_khz())?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
            .map_err(|error| Error::Timer(error.into()))?;
        let floor = ticks(FLOOR_NS, khz);
        Ok(Self {
            memory,
            timer,
            state: Mutex::new(State {
                deadline: DeadlineTimer::new().with_floor(floor),
                clock: Clock { khz, offset: 0 },
                alarm: Alarm::default(),
                slot: None,
                written: None,
                apic_id: 0,
                vector: 0,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often what happened.
    pub fn statistics(&self) -> HostStatistics {
        self.state().deadline.statistics()
    }

    /// Completes an RDMSR of one of the two. `false`: another MSR.
    pub fn rdmsr(&self, exit: &mut ReadMsrExit<'_>) -> bool {
        let state = &mut *self.state();
        *exit.data = match exit.index {
            DEADLINE_SLOT_MSR => state.slot.map_or(0, |at| at | SLOT_ENABLE),
            DEADLINE_MSR => {
                let (deadline, at) = (&mut state.deadline, state.slot);
                with_slot(&self.memory, at, |slot| deadline.read(slot))
            }
            _ => return false,
        };
        *exit.error = 0;
        true
    }

    /// Completes a WRMSR of one of the two. `false`: another MSR. What it asks of the timer is done
    /// by [`before_run`](Self::before_run).
    pub fn wrmsr(&self, exit: &mut WriteMsrExit<'_>) -> bool {
        let state = &mut *self.state();
        let fine = match exit.index {
            DEADLINE_SLOT_MSR => self.share(state, exit.data),
            DEADLINE_MSR => {
                state.written = Some(exit.data);
                true
            }
            _ => return false,
        };
        *exit.error = u8::from(!fine);
        true
    }

    /// The guest shares the slot that `value` names, or none.
    fn share(&self, state: &mut State, value: u64) -> bool {
        let deadline = &mut state.deadline;
        if value == 0 {
            let timer = &mut Timer {
                fd: self.timer.as_fd(),
                clock: state.clock,
                alarm: &mut state.alarm,
            };
            let at = state.slot.take();
            with_slot(&self.memory, at, |slot| deadline.detach(slot, timer));
            return true;
        }
        let at = value & !SLOT_ENABLE;
        if value & SLOT_ENABLE == 0 || !at.is_multiple_of(Slot::SIZE as u64) {
            return false;
        }
        let shared = with_slot(&self.memory, Some(at), |slot| {
            slot.is_some_and(|slot| deadline.attach(slot).is_ok())
        });
        if shared {
            state.slot = Some(at);
        }
        shared
    }

    /// Does what the guest has written. To be called on the vCPU's thread before it runs.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn before_run(&self, vm: &VmFd, vcpu: &VcpuFd) -> Result<(), Error> {
        let state = &mut *self.state();
        let Some(value) = state.written.take() else {
            return Ok(());
        };
        let lapic = Lapic::of(vcpu)?;
        state.apic_id = lapic.id();
        state.vector = lapic.lvt_timer() as u8;
        if value != 0 {
            state.clock.offset = tsc_offset(vcpu)?;
        }
        let timer = &mut Timer {
            fd: self.timer.as_fd(),
            clock: state.clock,
            alarm: &mut state.alarm,
        };
        let (deadline, at) = (&mut state.deadline, state.slot);
        let verdict = with_slot(&self.memory, at, |slot| {
            // The LVT's mode is IA32_TSC_DEADLINE's business: these registers work in each, so
            // that a guest may have both timers.
            let lvt = LvtTimer {
                mode: TimerMode::TscDeadline,
                masked: LvtTimer::decode(lapic.lvt_timer()).masked,
            };
            deadline.set_lvt(lvt, slot, timer);
            deadline.write(value, slot, timer)
        });
        state.follow(verdict, vm)
    }

    /// The timer's descriptor has become readable.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn expire(&self, vm: &VmFd) -> Result<(), Error> {
        let state = &mut *self.state();
        let timer = &mut Timer {
            fd: self.timer.as_fd(),
            clock: state.clock,
            alarm: &mut state.alarm,
        };
        let expiry = timer.wait();
        let (deadline, at) = (&mut state.deadline, state.slot);
        let verdict = with_slot(&self.memory, at, |slot| match expiry {
            Expiry::Due => deadline.expire(slot, timer),
            Expiry::Doubtful => deadline.expire_unknown_tsc(slot),
        });
        state.follow(verdict, vm)
    }

    /// What is to be saved, while the vCPU does not run. Nothing may expire here any more, unless the
    /// guest goes on here.
    pub fn save(&self) -> VcpuDeadlineState {
        let state = &mut *self.state();
        let (deadline, at) = (&mut state.deadline, state.slot);
        VcpuDeadlineState {
            deadline: with_slot(&self.memory, at, |slot| deadline.save(slot)),
            slot: state.slot,
            written: state.written,
            apic_id: state.apic_id,
            vector: state.vector,
        }
    }

    /// Goes on from `saved`, before the vCPU runs: when its TSC, its local APIC and its memory are
    /// what they were.
    ///
    /// # Errors
    ///
    /// When the slot is not in the guest's memory, the vCPU's TSC has another rate than the host's, or
    /// KVM refuses.
    pub fn restore(
        &self,
        saved: &VcpuDeadlineState,
        vm: &VmFd,
        vcpu: &VcpuFd,
    ) -> Result<(), Error> {
        let state = &mut *self.state();
        let (guest, host) = (kvm("KVM_GET_TSC_KHZ", vcpu.get_tsc_khz())?, state.clock.khz);
        if guest != host {
            return Err(Error::ScaledTsc { guest, host });
        }
        state.clock.offset = tsc_offset(vcpu)?;
        let timer = &mut Timer {
            fd: self.timer.as_fd(),
            clock: state.clock,
            alarm: &mut state.alarm,
        };
        let deadline = &mut state.deadline;
        let verdict = with_slot(&self.memory, saved.slot, |slot| {
            deadline.restore(&saved.deadline, slot, timer)
        })
        .map_err(Error::Deadline)?;
        state.slot = saved.slot;
        state.written = saved.written;
        state.apic_id = saved.apic_id;
        state.vector = saved.vector;
        state.follow(verdict, vm)
    }

    /// Waits for the next expiry.
    ///
    /// # Errors
    ///
    /// When the descriptor cannot be read.
    pub fn wait(&self) -> io::Result<()> {
        let mut expirations = [0; 8];
        loop {
            match rustix::io::read(&self.timer, &mut expirations) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Ends another thread's [`wait`](Self::wait) now.
    pub fn wake(&self) {
        // The deadline is as far as it was: no reason for doubt.
        self.state().alarm.ahead = u64::MAX;
        set(self.timer.as_fd(), 1);
    }
}

impl<M> AsFd for VcpuDeadline<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl State {
    fn follow(&self, verdict: Verdict, vm: &VmFd) -> Result<(), Error> {
        match verdict {
            Verdict::Quiet => Ok(()),
            // The vectors below 16 are reserved: an APIC does not deliver them.
            Verdict::Inject(_) if self.vector < 16 => Ok(()),
            Verdict::Inject(_) => lapic::signal(vm, self.apic_id, self.vector),
        }
    }
}

/// The slot at this address, if the guest has memory there.
fn with_slot<M: GuestMemoryBackend, R>(
    memory: &M,
    at: Option<u64>,
    body: impl FnOnce(Option<SlotRef<'_>>) -> R,
) -> R {
    let slice = at.and_then(|at| memory.get_slice(GuestAddress(at), Slot::SIZE).ok());
    let word = |offset| slice.as_ref()?.get_atomic_ref::<AtomicU64>(offset).ok();
    let slot = word(Slot::ARMED)
        .zip(word(Slot::PENDING))
        .zip(word(Slot::TAG_WORD));
    body(slot.map(|((armed, pending), tag)| SlotRef {
        armed,
        pending,
        tag,
    }))
}

impl Timer<'_> {
    /// Lets the moment come that the timer was set early for, and learns how early the next is to be.
    fn wait(&mut self) -> Expiry {
        let longest = ticks(ADVANCE_NS, self.clock.khz);
        let Some(at) = self.alarm.at.take() else {
            return Expiry::Due;
        };
        let ahead = self.alarm.ahead;
        let begin = self.now();
        let advance = &mut self.alarm.advance;
        match at.checked_sub(begin) {
            // It was late.
            None => {
                *advance = longest.min(*advance + (begin - at).div_ceil(ADVANCE_STEP));
            }
            Some(left) if left <= longest => {
                *advance -= (left / ADVANCE_STEP).min(*advance);
                // Not until `at`: after the last tick of all comes the first.
                while self.now().wrapping_sub(begin) < left {
                    std::hint::spin_loop();
                }
            }
            Some(left) if left > self.difference(ahead) && !is_set(self.fd) => {
                return Expiry::Doubtful;
            }
            // Another wake-up, and the timer is still to come; or its clock is somewhat fast.
            Some(_) => self.alarm.at = Some(at),
        }
        Expiry::Due
    }

    /// How far the timer's clock and the TSC may come apart in so many ticks: adjtimex(2) makes the
    /// clock up to 10 % faster.
    fn difference(&self, ticks: u64) -> u64 {
        u64::from(self.clock.khz) + ticks / 8
    }
}

impl HostTimer for Timer<'_> {
    fn now(&mut self) -> u64 {
        self.clock.now()
    }

    fn arm(&mut self, deadline: u64) {
        let left = deadline.saturating_sub(self.now());
        self.alarm.ahead = left;
        let left = left.saturating_sub(self.alarm.advance);
        self.alarm.at = Some(deadline);
        set(self.fd, nanoseconds(left, self.clock.khz).max(1));
    }

    fn disarm(&mut self) {
        self.alarm.at = None;
        set(self.fd, 0);
    }
}

const ZERO: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Once, after so many nanoseconds; 0: not at all.
fn set(fd: BorrowedFd<'_>, ns: u64) {
    const SECOND: u64 = 1_000_000_000;
    let value = Itimerspec {
        it_interval: ZERO,
        it_value: Timespec {
            tv_sec: (ns / SECOND).cast_signed(),
            tv_nsec: (ns % SECOND).cast_signed(),
        },
    };
    // It fails for what is no timerfd or no time. These are.
    let _ = timerfd_settime(fd, TimerfdTimerFlags::empty(), &value);
}

/// Whether it is still to expire.
fn is_set(fd: BorrowedFd<'_>) -> bool {
    // It fails for what is no timerfd. This is one.
    timerfd_gettime(fd).is_ok_and(|left| left.it_value != ZERO)
}

/// Rounded up, so that the timer is not early. A time beyond these 64 bits is some centuries off.
fn nanoseconds(ticks: u64, khz: u32) -> u64 {
    let ns = (u128::from(ticks) * 1_000_000).div_ceil(u128::from(khz.max(1)));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

fn ticks(ns: u64, khz: u32) -> u64 {
    (u128::from(ns) * u128::from(khz) / 1_000_000) as u64
}

/// What is to be added to the host's TSC for the vCPU's. Where KVM does not tell, it is somewhat less,
/// and deadlines are somewhat late: time goes by while KVM is asked what the vCPU's TSC is.
fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, Error> {
    if let Some(offset) = told_offset(vcpu) {
        return Ok(offset);
    }
    Ok(tsc(vcpu)?.wrapping_sub(rdtsc()))
}

/// Linux 5.16 and later.
#[expect(unsafe_code, reason = "kvm-ioctls has no such call for a vCPU")]
fn told_offset(vcpu: &VcpuFd) -> Option<u64> {
    // _IOW(KVMIO, 0xe2, struct kvm_device_attr)
    const KVM_GET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee2;
    let mut offset = 0_u64;
    let attribute = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: (&raw mut offset).expose_provenance() as u64,
    };
    let (fd, attribute) = (vcpu.as_raw_fd(), &raw const attribute);
    // SAFETY: the call reads `attribute` and writes 64 bits to where it says. Both are locals.
    let answer = unsafe { libc::ioctl(fd, KVM_GET_DEVICE_ATTR, attribute) };
    (answer == 0).then_some(offset)
}

#[expect(unsafe_code, reason = "an instruction without a safe wrapper")]
fn rdtsc() -> u64 {
    // SAFETY: it reads a counter, and user space may unless it has forbidden that to itself.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestMemoryMmap};

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap()
    }

    #[test]
    fn a_slot_is_the_guests_memory() {
        let memory = memory();
        memory
            .write_obj(Slot::TAG, GuestAddress(64 + 0x10))
            .unwrap();
        with_slot(&memory, Some(64), |slot| {
            let slot = slot.unwrap();
            let order = std::sync::atomic::Ordering::Relaxed;
            assert_eq!(slot.tag.load(order), Slot::TAG);
            slot.armed.store(7, order);
        });
        assert_eq!(memory.read_obj::<u64>(GuestAddress(64)).unwrap(), 7);
    }

    #[test]
    fn what_is_no_memory_is_no_slot() {
        for at in [
            None,
            Some(4096),
            Some(4096 - 32),
            Some(u64::MAX - 63),
            Some(1 << 52),
        ] {
            assert!(with_slot(&memory(), at, |slot| slot.is_none()), "{at:x?}");
        }
    }

    #[test]
    fn a_timer_is_never_early() {
        assert_eq!(nanoseconds(3, 2_000_000), 2);
        assert_eq!(nanoseconds(0, 2_000_000), 0);
        assert_eq!(nanoseconds(u64::MAX, 1), u64::MAX);
        assert_eq!(ticks(FLOOR_NS, 2_500_000), 50_000);
    }

    #[test]
    fn the_descriptor_becomes_readable_in_time() {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK).unwrap();
        let clock = Clock {
            khz: 1_000_000,
            offset: 0,
        };
        let mut timer = Timer {
            fd: fd.as_fd(),
            clock,
            alarm: &mut Alarm::default(),
        };
        let begin = std::time::Instant::now();
        let deadline = timer.now() + 5_000_000;
        timer.arm(deadline);
        let mut bytes = [0; 8];
        while rustix::io::read(&fd, &mut bytes).is_err() {
            std::thread::yield_now();
        }
        assert!(begin.elapsed() >= std::time::Duration::from_millis(4));
        timer.arm(u64::MAX);
        timer.disarm();
        set(fd.as_fd(), u64::MAX);
        assert!(rustix::io::read(&fd, &mut bytes).is_err());
    }

    #[test]
    fn an_expiry_waits_for_its_moment_and_learns_from_its_lateness() {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK).unwrap();
        let khz = 1_000_000;
        let clock = Clock { khz, offset: 0 };
        let mut alarm = Alarm::default();
        let mut timer = Timer {
            fd: fd.as_fd(),
            clock,
            alarm: &mut alarm,
        };
        let longest = ticks(ADVANCE_NS, khz);
        timer.wait();
        assert_eq!(timer.alarm.advance, 0, "nothing was set");
        // Late by any time, it is set earlier, but not by any time.
        for _ in 0..2 * ADVANCE_STEP {
            let now = timer.now();
            timer.arm(now + longest);
            while timer.now() <= now + 2 * longest {}
            timer.wait();
        }
        assert_eq!((timer.alarm.at, timer.alarm.advance), (None, longest));
        // Early, it waits, and is set less early.
        let at = timer.now() + longest - 1;
        timer.arm(at);
        timer.wait();
        assert!(timer.now() >= at);
        assert!(timer.alarm.advance <= longest);
        // Woken for another reason it waits for nothing.
        let far = timer.now() + 1000 * longest;
        timer.arm(far);
        timer.wait();
        assert_eq!(timer.alarm.at, Some(far));
        assert!(timer.now() < far);
        timer.disarm();
        assert_eq!(timer.alarm.at, None);
    }

    #[test]
    fn no_wait_is_longer_than_what_is_left() {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK).unwrap();
        let khz = 1_000_000;
        let mut alarm = Alarm {
            at: Some(u64::MAX),
            ..Alarm::default()
        };
        let mut timer = Timer {
            fd: fd.as_fd(),
            clock: Clock { khz, offset: 0 },
            alarm: &mut alarm,
        };
        let begin = std::time::Instant::now();
        // The guest's TSC is about to begin again at 0.
        timer.clock.offset = (u64::MAX - ticks(ADVANCE_NS, khz) / 2).wrapping_sub(rdtsc());
        assert_eq!(timer.wait(), Expiry::Due);
        assert!(begin.elapsed() < std::time::Duration::from_secs(5));
    }

    #[test]
    fn a_timer_that_expires_long_before_its_moment_is_doubted() {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::empty()).unwrap();
        let khz = 1_000_000;
        let mut alarm = Alarm::default();
        let mut timer = Timer {
            fd: fd.as_fd(),
            clock: Clock { khz, offset: 0 },
            alarm: &mut alarm,
        };
        timer.arm(timer.clock.now() + 1_000_000);
        let slept = 3600 * u64::from(khz) * 1000;
        timer.clock.offset = timer.clock.offset.wrapping_sub(slept);
        let mut bytes = [0; 8];
        rustix::io::read(&fd, &mut bytes).unwrap();
        assert_eq!(timer.wait(), Expiry::Doubtful);
        // One that was set anew in between is not.
        timer.arm(timer.clock.now() + slept);
        assert_eq!(timer.wait(), Expiry::Due);
    }
}
