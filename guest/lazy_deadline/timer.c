// SPDX-License-Identifier: GPL-2.0
/*
 * The clock event device of each CPU, taken over and given back, and what is
 * written for a deadline. lazy_guest_only() and lazy_paravirtual() are the guest
 * halves of vpmu's docs/how/lazy-deadline.md, line by line.
 *
 * The device's functions are called on its own CPU with interrupts off, so the
 * state of a CPU needs no lock. It is also taken over and given back there, with
 * interrupts off: no function of this module is running on that CPU then, and
 * none is called later.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpumask.h>
#include <linux/math64.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/static_call.h>
#include <linux/string.h>

#include <asm/barrier.h>
#include <asm/io.h>
#include <asm/processor.h>
#include <asm/tsc.h>

#include "lazy_deadline.h"

/* The head of struct tick_device, which is private to the kernel. */
struct tick_device_head {
	struct clock_event_device *evtdev;
};

static struct tick_device_head *lazy_no_device(int cpu)
{
	return NULL;
}

/* tick_get_device(), once lazy_find_device() has found it. */
DEFINE_STATIC_CALL(lazy_tick_get_device, lazy_no_device);

static unsigned int lazy_divisor;	/* TSC ticks in a tick of the device */
static u64 lazy_microsecond;		/* TSC ticks */

static void lazy_write(u64 deadline)
{
	/* As the stock driver: the write must not pass one to the LVT. */
	weak_wrmsr_fence();
	wrmsrq(MSR_IA32_TSC_DEADLINE, deadline);
}

/* True if the timer is armed early enough for @deadline. */
static bool lazy_guest_only(struct lazy_cpu *t, u64 deadline)
{
	t->wanted = deadline;
	/*
	 * An armed time that has passed is not trusted to bring an interrupt:
	 * it may have come and gone while the LVT was masked.
	 */
	if (deadline && t->armed <= deadline && rdtsc() < t->armed)
		return true;
	t->armed = deadline;
	lazy_write(deadline);
	return false;
}

static bool lazy_slot(struct lazy_cpu *t, u64 deadline)
{
	u64 armed;

	t->wanted = deadline;
	WRITE_ONCE(t->slot.pending, deadline);
	/* Pairs with the host's: clear armed; barrier; read pending. */
	virt_mb();
	armed = READ_ONCE(t->slot.armed);
	if (deadline && armed && armed <= deadline)
		return true;
	wrmsrq(VPMU_MSR_DEADLINE, deadline);
	return false;
}

static bool lazy_plain(struct lazy_cpu *t, u64 deadline)
{
	t->wanted = deadline;
	lazy_write(deadline);
	return false;
}

/*
 * By the slot where it pays. One register is armed at a time: a change of the
 * way disarms the other, after which the host fires nothing for it. What it has
 * fired before comes early, and runs the handler, as any interrupt here does.
 */
static bool lazy_paravirtual(struct lazy_cpu *t, u64 deadline)
{
	enum lazy_way way = t->choice.plain ? WAY_PLAIN : WAY_LAZY;

	if (deadline) {
		lazy_weigh_again(t);
		way = break_even_choose(&t->choice, deadline, rdtsc());
	} else {
		break_even_cancel(&t->choice);
	}
	switch (way) {
	case WAY_FALL_BACK:
		lazy_slot(t, 0);
		return lazy_plain(t, deadline);
	case WAY_PLAIN:
		return lazy_plain(t, deadline);
	case WAY_COME_BACK:
		lazy_plain(t, 0);
		return lazy_slot(t, deadline);
	default:
		return lazy_slot(t, deadline);
	}
}

/* Asks for the handler to run at @deadline; 0: disarms, with an exit. */
static void lazy_request(struct lazy_cpu *t, u64 deadline)
{
	bool avoided;

	t->counters.asked++;
	switch (lazy_mode) {
	case GUEST_ONLY:
		avoided = lazy_guest_only(t, deadline);
		break;
	case PARAVIRTUAL:
		avoided = lazy_paravirtual(t, deadline);
		break;
	default:
		avoided = lazy_plain(t, deadline);
	}
	if (avoided)
		t->counters.avoided++;
	else
		t->counters.written++;
}

/* The timer is, or will be, written by somebody else. */
static void lazy_forget(struct lazy_cpu *t)
{
	t->armed = 0;
	t->wanted = 0;
	t->written_deadline = 0;
	t->asked_deadline = 0;
}

/* On the CPU with interrupts off. */
static void lazy_record_latency(struct lazy_latency *l, u64 ticks)
{
	unsigned int top = fls64(ticks | (HIST_STEPS - 1));
	unsigned int bucket = (top - HIST_BITS) * HIST_STEPS;

	if (top > HIST_BITS)
		bucket += (ticks >> (top - HIST_BITS - 1)) & (HIST_STEPS - 1);
	else
		bucket += ticks;
	l->buckets[min_t(unsigned int, bucket, HIST_BUCKETS - 1)]++;
	if (!l->count || ticks < l->min)
		l->min = ticks;
	if (ticks > l->max)
		l->max = ticks;
	l->count++;
}

/* A timer interrupt: true if the handler is to run. */
static bool lazy_interrupt(struct lazy_cpu *t)
{
	bool idle = is_idle_task(current);
	u64 now = rdtsc();

	t->counters.interrupts++;
	/*
	 * Spent, even if its time is still to come: hypervisors keep time with
	 * another clock and may be early. If it is not, because this interrupt
	 * was on its way when the MSR was written, it will be one too many.
	 */
	t->armed = 0;
	if (t->wanted && t->wanted <= now) {
		lazy_record_latency(&t->latency, now - t->wanted);
		t->counters.idle_due += idle;
		t->wanted = 0;
		return true;
	}
	t->counters.idle_extra += idle;
	if (!t->wanted) {
		t->counters.stray++;
		/*
		 * Not stopped, and no event either: the core leaves it to an
		 * interrupt that is on its way, as after a deep idle state.
		 */
		return lazy_mode != GUEST_ONLY || clockevent_state_oneshot(t->evt);
	}
	t->counters.early++;
	if (lazy_mode != GUEST_ONLY)
		return true;
	t->armed = t->wanted;
	lazy_write(t->wanted);
	t->counters.rearmed++;
	return false;
}

static void lazy_event_handler(struct clock_event_device *evt);

/* The core's handler may have changed: to high resolution, after boot. */
static void lazy_hook_handler(struct lazy_cpu *t, struct clock_event_device *evt)
{
	if (evt->event_handler == lazy_event_handler)
		return;
	t->event_handler = evt->event_handler;
	evt->event_handler = lazy_event_handler;
}

static void lazy_event_handler(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	/* Another device may have inherited this handler; or nobody stops here. */
	if (evt == t->evt && !t->masked && !lazy_interrupt(t))
		return;
	/* The periodic handler goes on only where it finds itself. */
	evt->event_handler = t->event_handler;
	t->event_handler(evt);
	if (evt == t->evt)
		lazy_hook_handler(t, evt);
}

/*
 * The core makes a deadline of an event anew each time, with a clock whose rate
 * is steered: the same event may come out some ticks earlier than it is armed.
 */
static u64 lazy_deadline(struct lazy_cpu *t, ktime_t event, u64 deadline)
{
	if (event == t->written_event &&
	    deadline - t->written_deadline + lazy_microsecond <= 2 * lazy_microsecond)
		deadline = t->written_deadline;
	else if (event == t->asked_event &&
		 deadline - t->asked_deadline + lazy_microsecond <= 2 * lazy_microsecond)
		deadline = t->asked_deadline;
	return deadline;
}

static int lazy_set_next_event(unsigned long delta,
			       struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);
	u64 deadline = rdtsc() + (u64)delta * lazy_divisor;
	u64 written = t->counters.written;

	lazy_hook_handler(t, evt);
	if (lazy_mode != PLAIN)
		deadline = lazy_deadline(t, evt->next_event, deadline);
	lazy_request(t, deadline);
	t->asked_event = evt->next_event;
	t->asked_deadline = deadline;
	if (t->counters.written != written) {
		t->written_event = evt->next_event;
		t->written_deadline = deadline;
	}
	return 0;
}

static int lazy_set_state_oneshot(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	/* Back from a stop that changed nothing. */
	if (!t->masked)
		return 0;
	t->masked = false;
	return t->set_state_oneshot(evt);
}

/* No event at all until the next set_next_event: left armed, and ignored. */
static int lazy_set_state_oneshot_stopped(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	t->counters.asked++;
	if (lazy_mode == PLAIN) {
		t->counters.written++;
		lazy_forget(t);
		t->masked = true;
		return t->set_state_oneshot_stopped(evt);
	}
	t->counters.avoided++;
	t->wanted = 0;
	if (lazy_mode == PARAVIRTUAL) {
		break_even_cancel(&t->choice);
		WRITE_ONCE(t->slot.pending, 0);
	}
	return 0;
}

/* Sleep, another device, or the CPU goes: all that is armed is gone after it. */
static int lazy_set_state_shutdown(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	if (lazy_mode != PLAIN)
		lazy_request(t, 0);
	lazy_forget(t);
	t->masked = true;
	return t->set_state_shutdown(evt);
}

static bool lazy_is_deadline(int cpu, const struct clock_event_device *evt)
{
	return evt && evt->name && !strcmp(evt->name, "lapic-deadline") &&
	       !(evt->features & CLOCK_EVT_FEAT_DUMMY) &&
	       cpumask_equal(evt->cpumask, cpumask_of(cpu));
}

/*
 * Linux 7.1 and newer: where a device is coupled to the clock source, the core
 * makes a TSC value of an event and writes the MSR itself, without a call that
 * this module could take over. Without the feature it calls set_next_event with
 * a distance, as before.
 */
#ifndef CLOCK_EVT_FEAT_CLOCKSOURCE_COUPLED
#define CLOCK_EVT_FEAT_CLOCKSOURCE_COUPLED	0
#endif

/* Interrupts off from here to lazy_give_back. */
static int lazy_attach(struct lazy_cpu *t)
{
	t->slot.armed = 0;
	t->slot.pending = 0;
	t->slot.tag = VPMU_DEADLINE_TAG;
	return wrmsrq_safe(VPMU_MSR_SLOT, __pa(&t->slot) | VPMU_SLOT_ENABLE);
}

static void lazy_detach(struct lazy_cpu *t)
{
	wrmsrq(VPMU_MSR_SLOT, 0);
	t->slot.tag = 0;
	t->slot.pending = 0;
}

static int lazy_take_over(struct lazy_cpu *t, struct clock_event_device *evt)
{
	u64 deadline;
	int err;

	rdmsrq(MSR_IA32_TSC_DEADLINE, deadline);
	if (lazy_mode == PARAVIRTUAL) {
		err = lazy_attach(t);
		if (err)
			return err;
		wrmsrq(MSR_IA32_TSC_DEADLINE, 0);
		memset(&t->choice, 0, sizeof(t->choice));
		lazy_weigh(t);
	}
	lazy_forget(t);
	t->evt = evt;
	t->masked = !clockevent_state_oneshot(evt);
	t->event_handler = evt->event_handler;
	t->set_next_event = evt->set_next_event;
	t->set_state_oneshot = evt->set_state_oneshot;
	t->set_state_oneshot_stopped = evt->set_state_oneshot_stopped;
	t->set_state_shutdown = evt->set_state_shutdown;
	t->coupled = evt->features & CLOCK_EVT_FEAT_CLOCKSOURCE_COUPLED;
	evt->features &= ~CLOCK_EVT_FEAT_CLOCKSOURCE_COUPLED;
	evt->event_handler = lazy_event_handler;
	evt->set_next_event = lazy_set_next_event;
	evt->set_state_oneshot = lazy_set_state_oneshot;
	evt->set_state_oneshot_stopped = lazy_set_state_oneshot_stopped;
	evt->set_state_shutdown = lazy_set_state_shutdown;
	/*
	 * 0: its interrupt is on its way, or the event is past. One interrupt
	 * too many does no harm.
	 */
	if (!t->masked)
		lazy_request(t, deadline ?: rdtsc());
	return 0;
}

static void lazy_give_back(struct lazy_cpu *t)
{
	struct clock_event_device *now, *evt = t->evt;
	u64 wanted = t->wanted;

	if (lazy_mode == PARAVIRTUAL) {
		if (!t->masked)
			lazy_request(t, 0);
		lazy_detach(t);
	}
	evt->set_next_event = t->set_next_event;
	evt->set_state_oneshot = t->set_state_oneshot;
	evt->set_state_oneshot_stopped = t->set_state_oneshot_stopped;
	evt->set_state_shutdown = t->set_state_shutdown;
	evt->features |= t->coupled;
	if (evt->event_handler == lazy_event_handler)
		evt->event_handler = t->event_handler;
	/* A device that replaced this one since has inherited its handler. */
	now = static_call(lazy_tick_get_device)(smp_processor_id())->evtdev;
	if (now && now->event_handler == lazy_event_handler)
		now->event_handler = t->event_handler;
	t->evt = NULL;
	if (clockevent_state_oneshot(evt)) {
		weak_wrmsr_fence();
		wrmsrq(MSR_IA32_TSC_DEADLINE, wanted ?: rdtsc());
	} else if (clockevent_state_oneshot_stopped(evt) && !t->masked) {
		evt->set_state_oneshot_stopped(evt);
	}
}

int lazy_online(unsigned int cpu)
{
	struct lazy_cpu *t = per_cpu(lazy_cpus, cpu);
	struct clock_event_device *evt;
	unsigned long flags;
	int err = -ENODEV;

	local_irq_save(flags);
	evt = static_call(lazy_tick_get_device)(cpu)->evtdev;
	if (lazy_is_deadline(cpu, evt))
		err = lazy_take_over(t, evt);
	local_irq_restore(flags);
	/* A CPU comes online even so, and keeps its timer. */
	if (err)
		pr_warn("cpu%u: its timer is left alone (%d)\n", cpu, err);
	return 0;
}

int lazy_offline(unsigned int cpu)
{
	struct lazy_cpu *t = per_cpu(lazy_cpus, cpu);
	unsigned long flags;

	local_irq_save(flags);
	if (t->evt)
		lazy_give_back(t);
	local_irq_restore(flags);
	return 0;
}

int lazy_find_device(void)
{
	void *tick_get_device = vpmu_find_function("tick_get_device");
	struct clock_event_device *evt;
	bool deadline;
	int cpu;
	u64 hz;

	if (!tick_get_device) {
		pr_err("cannot find tick_get_device: are kprobes permitted?\n");
		return -ENOENT;
	}
	static_call_update(lazy_tick_get_device, tick_get_device);

	cpu = get_cpu();
	evt = static_call(lazy_tick_get_device)(cpu)->evtdev;
	deadline = lazy_is_deadline(cpu, evt);
	if (deadline) {
		hz = ((u64)evt->mult * NSEC_PER_SEC) >> evt->shift;
		lazy_divisor = DIV_ROUND_CLOSEST_ULL((u64)tsc_khz * 1000, hz);
	}
	put_cpu();
	if (!deadline) {
		pr_err("the timer in use is not the local APIC's TSC deadline\n");
		return -ENODEV;
	}
	lazy_microsecond = tsc_khz / 1000;
	return 0;
}
