//! A vCPU with a paravirtual deadline, a host behind it, and a clock that both read.

use lazy_deadline::{
    DeadlineTimer, GuestCpu, HostTimer, LvtTimer, ParavirtualTimer, Request, Slot, SlotRef, Verdict,
};

#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// The vCPU's TSC.
    pub(crate) tsc: u64,
    /// The vCPU's TSC less the host's clock: what the guest has changed.
    pub(crate) offset: u64,
    pub(crate) armed: Option<u64>,
    /// How late the host's timer expires.
    pub(crate) late: u64,
    pub(crate) arms: u64,
}

impl HostTimer for Clock {
    fn now(&mut self) -> u64 {
        self.tsc
    }
    fn host_clock(&mut self) -> u64 {
        self.tsc.wrapping_sub(self.offset)
    }
    fn arm(&mut self, deadline: u64) {
        self.arms += 1;
        self.armed = Some(deadline);
    }
    fn disarm(&mut self) {
        self.armed = None;
    }
}

/// The host's side of one vCPU.
pub(crate) struct Host {
    pub(crate) timer: DeadlineTimer,
    pub(crate) clock: Clock,
    /// What was injected: when, and for which deadline.
    pub(crate) injected: Vec<(u64, u64)>,
}

impl Host {
    fn new() -> Self {
        let mut host = Self {
            timer: DeadlineTimer::new(),
            clock: Clock {
                tsc: 1_000,
                ..Clock::default()
            },
            injected: Vec::new(),
        };
        host.timer
            .set_lvt(LvtTimer::decode(0x4_00ec), None, &mut host.clock);
        host
    }

    pub(crate) fn act(&mut self, verdict: Verdict) {
        if let Verdict::Inject(deadline) = verdict {
            self.injected.push((self.clock.tsc, deadline));
        }
    }

    pub(crate) fn write(&mut self, value: u64, slot: SlotRef<'_>) {
        let verdict = self.timer.write(value, Some(slot), &mut self.clock);
        self.act(verdict);
    }

    pub(crate) fn expire(&mut self, slot: SlotRef<'_>) {
        let verdict = self.timer.expire(Some(slot), &mut self.clock);
        self.act(verdict);
    }

    /// Runs to the next expiry of the host's timer.
    pub(crate) fn advance_to_expiry(&mut self, slot: SlotRef<'_>) {
        if let Some(at) = self.clock.armed {
            self.advance(at.saturating_add(self.clock.late), slot);
        }
    }

    /// Runs to `to`, with every expiry of the host's timer on the way.
    pub(crate) fn advance(&mut self, to: u64, slot: SlotRef<'_>) {
        while let Some(at) = self.clock.armed {
            let at = at.saturating_add(self.clock.late);
            if at > to {
                break;
            }
            self.clock.tsc = self.clock.tsc.max(at);
            self.clock.armed = None;
            self.expire(slot);
        }
        self.clock.tsc = to;
    }
}

/// The guest's way to its MSR: an exit to `host`.
pub(crate) struct Cpu<'a> {
    pub(crate) host: &'a mut Host,
    pub(crate) slot: SlotRef<'a>,
}

impl GuestCpu for Cpu<'_> {
    fn tsc(&mut self) -> u64 {
        self.host.clock.tsc
    }
    fn write_deadline(&mut self, deadline: u64) {
        self.host.write(deadline, self.slot);
    }
}

/// A guest that knows its slot, and its host.
pub(crate) struct Vm {
    pub(crate) guest: ParavirtualTimer,
    pub(crate) slot: Box<Slot>,
    pub(crate) host: Host,
}

impl Vm {
    /// With a slot shared.
    pub(crate) fn new() -> Self {
        let mut vm = Self {
            guest: ParavirtualTimer::new(),
            slot: Box::default(),
            host: Host::new(),
        };
        vm.attach();
        vm
    }

    pub(crate) fn now(&self) -> u64 {
        self.host.clock.tsc
    }

    pub(crate) fn armed(&self) -> u64 {
        self.slot
            .words()
            .armed
            .load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) fn attach(&mut self) {
        self.guest.prepare(self.slot.words());
        self.host
            .timer
            .attach(self.slot.words())
            .expect("a prepared slot");
    }

    /// As a CPU goes offline.
    pub(crate) fn detach(&mut self) {
        let _ = self.set(0);
        self.host
            .timer
            .detach(Some(self.slot.words()), &mut self.host.clock);
        self.guest.retire(self.slot.words());
    }

    pub(crate) fn set(&mut self, deadline: u64) -> Request {
        let slot = self.slot.words();
        let mut cpu = Cpu {
            host: &mut self.host,
            slot,
        };
        self.guest.set(deadline, slot, &mut cpu)
    }

    pub(crate) fn cancel(&mut self) {
        self.guest.cancel(self.slot.words());
    }

    /// A write by a kernel that does not know the slot.
    pub(crate) fn direct(&mut self, deadline: u64) {
        self.host.write(deadline, self.slot.words());
    }

    pub(crate) fn rdmsr(&mut self) -> u64 {
        self.host.timer.read(Some(self.slot.words()))
    }

    pub(crate) fn set_lvt(&mut self, register: u32) {
        self.host.timer.set_lvt(
            LvtTimer::decode(register),
            Some(self.slot.words()),
            &mut self.host.clock,
        );
    }

    pub(crate) fn advance(&mut self, ticks: u64) {
        let to = self.now() + ticks;
        self.host.advance(to, self.slot.words());
    }

    /// Moves to another host, with another history and the same memory; the guest's TSC is ahead by
    /// `jump` when it goes on.
    pub(crate) fn migrate(&mut self, jump: u64) {
        let state = self.host.timer.save(Some(self.slot.words()));
        let mut there = Host::new();
        there.clock.tsc = self.now() + jump;
        there.clock.late = self.host.clock.late;
        there.injected = std::mem::take(&mut self.host.injected);
        let verdict = there
            .timer
            .restore(&state, Some(self.slot.words()), &mut there.clock)
            .expect("a state of this engine");
        there.act(verdict);
        self.host = there;
    }
}
