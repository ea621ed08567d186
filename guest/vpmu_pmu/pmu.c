// SPDX-License-Identifier: GPL-2.0
/*
 * The PMU's operations, and its NMI handler.
 *
 * The perf core works on events with the PMU disabled. Here this is a flag:
 * counters run on, and all that has changed is applied by one doorbell when
 * the PMU is enabled again. Counts are fetched by one doorbell too, which stops
 * all counters: the first event that goes rings it for all that follow.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitops.h>
#include <linux/static_call.h>

#include <asm/barrier.h>
#include <asm/nmi.h>

#include "vpmu_pmu.h"

/* Ticks without an overflow after which the core is to see an exact count. */
#define VPMU_PMU_QUIET	8

/* perf_event_overflow() is not exported. */
DEFINE_STATIC_CALL_NULL(vpmu_pmu_overflow, perf_event_overflow);

static void vpmu_pmu_stop(struct perf_event *event, int flags);

/* The core may not want any more of them. */
static void vpmu_pmu_sample(struct perf_event *event,
			    struct perf_sample_data *data, struct pt_regs *regs)
{
	if (static_call(vpmu_pmu_overflow)(event, data, regs))
		vpmu_pmu_stop(event, 0);
}

static struct vpmu_pmu_counter *vpmu_pmu_words(struct vpmu_pmu_cpu *c, int idx)
{
	return &c->page->counters[idx];
}

static void vpmu_pmu_ring(u64 bits)
{
	this_cpu_inc(vpmu_pmu_cpus.doorbells);
	if (!vpmu_pmu_gone && wrmsrq_safe(VPMU_MSR_PMU_DOORBELL, bits))
		vpmu_pmu_lose();
}

/* Has said why an event does not count. */
static void vpmu_pmu_check(struct vpmu_pmu_cpu *c)
{
	int idx;

	for_each_set_bit(idx, &c->wanted, VPMU_PMU_MOST) {
		u64 state = READ_ONCE(vpmu_pmu_words(c, idx)->state);

		if (c->slots[idx].fresh && state >= VPMU_PMU_LOST) {
			c->refused = c->slots[idx].event->hw.config;
			c->reason = state;
			vpmu_pmu_do_later();
		}
		c->slots[idx].fresh = false;
	}
}

static bool vpmu_pmu_is_stale(struct vpmu_pmu_cpu *c)
{
	if (!c->wanted)
		return c->applied && !c->frozen;
	return c->dirty || c->frozen || c->wanted != c->applied;
}

static void vpmu_pmu_apply(struct vpmu_pmu_cpu *c, u64 more)
{
	if (vpmu_pmu_is_stale(c)) {
		smp_store_release(&c->page->wanted, c->wanted);
		c->applied = c->wanted;
		c->dirty = false;
		c->frozen = false;
		more |= VPMU_PMU_APPLY;
	}
	if (!more)
		return;
	vpmu_pmu_ring(more);
	if (more & VPMU_PMU_APPLY)
		vpmu_pmu_check(c);
}

/* Where neither an enabled PMU nor the handler's end applies what has changed. */
static void vpmu_pmu_apply_now(struct vpmu_pmu_cpu *c)
{
	if (!c->disabled && !c->handling)
		vpmu_pmu_apply(c, 0);
}

/* Stops all counters, with the counts of now in the page. */
static void vpmu_pmu_freeze(struct vpmu_pmu_cpu *c)
{
	if (!c->frozen) {
		vpmu_pmu_ring(VPMU_PMU_FREEZE);
		c->frozen = true;
	}
}

/* Takes what the page has. */
static void vpmu_pmu_update(struct vpmu_pmu_cpu *c, struct perf_event *event)
{
	struct hw_perf_event *hwc = &event->hw;
	struct vpmu_pmu_counter *words = vpmu_pmu_words(c, hwc->idx);
	struct vpmu_pmu_slot *slot = &c->slots[hwc->idx];
	u64 before, now;

	if (slot->fresh || READ_ONCE(words->made) != slot->generation)
		return;
	/* The NMI handler may have been faster. */
	do {
		before = local64_read(&hwc->prev_count);
		now = READ_ONCE(words->count);
	} while (local64_cmpxchg(&hwc->prev_count, before, now) != before);
	local64_add(now - before, &event->count);
	if (is_sampling_event(event)) {
		slot->left = READ_ONCE(words->next) - now;
		local64_set(&hwc->period_left, slot->left);
	}
}

/* Has the counter made anew, for the period that is left. */
static void vpmu_pmu_wish(struct vpmu_pmu_cpu *c, struct perf_event *event)
{
	struct hw_perf_event *hwc = &event->hw;
	struct vpmu_pmu_counter *words = vpmu_pmu_words(c, hwc->idx);
	struct vpmu_pmu_slot *slot = &c->slots[hwc->idx];
	s64 left = local64_read(&hwc->period_left);
	s64 period = hwc->sample_period;
	u64 flags = 0;

	if (!event->attr.exclude_user)
		flags |= VPMU_PMU_USER;
	if (!event->attr.exclude_kernel)
		flags |= VPMU_PMU_KERNEL;
	if (is_sampling_event(event)) {
		flags |= VPMU_PMU_INTERRUPT;
		if (vpmu_pmu_is_recorded(c, event))
			flags |= VPMU_PMU_RECORD;
		if (left <= -period)
			left = period;
		else if (left <= 0)
			left += period;
		local64_set(&hwc->period_left, left);
		hwc->last_period = period;
	}
	local64_set(&hwc->prev_count, 0);
	slot->fresh = true;
	slot->made = true;
	slot->left = left;
	slot->seen = 0;
	slot->quiet = 0;
	slot->generation = ++c->generation;
	c->dirty = true;
	WRITE_ONCE(words->config, hwc->config);
	WRITE_ONCE(words->flags, flags);
	WRITE_ONCE(words->left, left);
	WRITE_ONCE(words->period, period);
	WRITE_ONCE(words->generation, slot->generation);
}

static void vpmu_pmu_start(struct perf_event *event, int flags)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct hw_perf_event *hwc = &event->hw;
	struct vpmu_pmu_slot *slot = &c->slots[hwc->idx];

	c->touched = true;
	if (WARN_ON_ONCE(!(hwc->state & PERF_HES_STOPPED)) || !c->page)
		return;
	hwc->state = 0;
	/* With the core's own idea of what is left, the counter begins anew. */
	if (!slot->made ||
	    (is_sampling_event(event) &&
	     local64_read(&hwc->period_left) != slot->left))
		vpmu_pmu_wish(c, event);
	else
		WRITE_ONCE(vpmu_pmu_words(c, hwc->idx)->period,
			   hwc->sample_period);
	__set_bit(hwc->idx, &c->wanted);
	vpmu_pmu_apply_now(c);
	perf_event_update_userpage(event);
}

static void vpmu_pmu_stop(struct perf_event *event, int flags)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct hw_perf_event *hwc = &event->hw;
	struct vpmu_pmu_slot *slot = &c->slots[hwc->idx];

	c->touched = true;
	if (!c->page)
		return;
	__clear_bit(hwc->idx, &c->wanted);
	hwc->state |= PERF_HES_STOPPED;
	if ((flags & PERF_EF_UPDATE) && !(hwc->state & PERF_HES_UPTODATE)) {
		/*
		 * The core's tick stops and starts an event to see whether its
		 * period is right. What the last overflow brought is good
		 * enough for that, but not where overflows are records.
		 */
		if (c->disabled && !c->frozen && !slot->fresh && !c->ticked &&
		    (++slot->quiet >= VPMU_PMU_QUIET ||
		     vpmu_pmu_is_recorded(c, event))) {
			slot->quiet = 0;
			c->ticked = true;
			vpmu_pmu_ring(VPMU_PMU_READ);
		}
		vpmu_pmu_update(c, event);
		if (c->disabled)
			vpmu_pmu_drain(c, vpmu_pmu_sample);
		hwc->state |= PERF_HES_UPTODATE;
	}
	vpmu_pmu_apply_now(c);
}

static int vpmu_pmu_add(struct perf_event *event, int flags)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct hw_perf_event *hwc = &event->hw;
	int idx;

	c->touched = true;
	if (!c->page && !vpmu_pmu_gone)
		return -ENODEV;
	for (idx = 0; idx < vpmu_pmu_counters; idx++)
		if (!c->slots[idx].event)
			break;
	if (idx == vpmu_pmu_counters)
		return -EAGAIN;
	c->slots[idx].made = false;
	c->slots[idx].fresh = true;
	if (c->page)
		c->slots[idx].lost = READ_ONCE(vpmu_pmu_words(c, idx)->lost);
	c->slots[idx].event = event;
	hwc->idx = idx;
	hwc->state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		vpmu_pmu_start(event, PERF_EF_RELOAD);
	perf_event_update_userpage(event);
	if (vpmu_pmu_gone)
		vpmu_pmu_lose();
	return 0;
}

static void vpmu_pmu_del(struct perf_event *event, int flags)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct hw_perf_event *hwc = &event->hw;
	struct vpmu_pmu_slot *slot = &c->slots[hwc->idx];

	c->touched = true;
	if (c->page) {
		if (test_bit(hwc->idx, &c->applied) && !slot->fresh)
			vpmu_pmu_freeze(c);
		vpmu_pmu_update(c, event);
		/* Samples are those of the task that goes. */
		vpmu_pmu_drain(c, vpmu_pmu_sample);
	}
	__clear_bit(hwc->idx, &c->wanted);
	hwc->state |= PERF_HES_STOPPED | PERF_HES_UPTODATE;
	slot->event = NULL;
	vpmu_pmu_apply_now(c);
	perf_event_update_userpage(event);
}

static void vpmu_pmu_read(struct perf_event *event)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);

	if (!c->page)
		return;
	if (!c->frozen && !c->fetched)
		vpmu_pmu_ring(VPMU_PMU_READ);
	/* A sample with all counts of its group, too, is read at one moment. */
	if (c->handling)
		c->fetched = true;
	vpmu_pmu_update(c, event);
}

/* A group is read by one doorbell. It is added with the PMU disabled anyway. */
static void vpmu_pmu_start_txn(struct pmu *pmu, unsigned int flags)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);

	if (flags != PERF_PMU_TXN_READ || !c->page)
		return;
	if (!c->frozen)
		vpmu_pmu_ring(VPMU_PMU_READ);
	c->fetched = true;
}

static int vpmu_pmu_commit_txn(struct pmu *pmu)
{
	this_cpu_write(vpmu_pmu_cpus.fetched, false);
	return 0;
}

static void vpmu_pmu_cancel_txn(struct pmu *pmu)
{
	this_cpu_write(vpmu_pmu_cpus.fetched, false);
}

static void vpmu_pmu_disable(struct pmu *pmu)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);

	c->touched = false;
	WRITE_ONCE(c->disabled, true);
	barrier();
}

/* Whether records may be of an event that a task shares with its relatives. */
static bool vpmu_pmu_is_shared(struct vpmu_pmu_cpu *c)
{
	int idx;

	for_each_set_bit(idx, &c->applied, VPMU_PMU_MOST)
		if (c->slots[idx].event && c->slots[idx].event->attr.inherit &&
		    vpmu_pmu_words(c, idx)->flags & VPMU_PMU_RECORD)
			return true;
	return false;
}

static void vpmu_pmu_enable(struct pmu *pmu)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	u64 more = 0;

	c->ticked = false;
	/*
	 * Between relatives the core exchanges the events of the task that goes
	 * and of the one that comes, and touches none. Records are still of the
	 * first.
	 */
	if (c->page && !c->touched && vpmu_pmu_is_shared(c)) {
		vpmu_pmu_ring(VPMU_PMU_READ);
		vpmu_pmu_drain(c, vpmu_pmu_sample);
	}
	WRITE_ONCE(c->disabled, false);
	barrier();
	if (!c->page)
		return;
	/* From here on an NMI is handled: this one came before. */
	if (xchg(&c->deferred, false))
		more = VPMU_PMU_INJECT;
	vpmu_pmu_apply(c, more);
}

/* The core has changed the period, as it does in search of a frequency. */
static void vpmu_pmu_follow(struct vpmu_pmu_cpu *c, struct perf_event *event,
			    struct vpmu_pmu_counter *words)
{
	u64 before = READ_ONCE(words->period), now = event->hw.sample_period;

	WRITE_ONCE(words->period, now);
	/* It goes an eighth of the way each time. */
	if (event->attr.freq && now - before + before / 64 <= before / 32) {
		event->hw.config_base = VPMU_PMU_SETTLED;
		if (vpmu_pmu_is_recorded(c, event))
			WRITE_ONCE(words->flags,
				   words->flags | VPMU_PMU_RECORD);
	}
}

static void vpmu_pmu_handle(struct vpmu_pmu_cpu *c, int idx,
			    struct pt_regs *regs)
{
	struct vpmu_pmu_counter *words = vpmu_pmu_words(c, idx);
	struct vpmu_pmu_slot *slot = &c->slots[idx];
	struct perf_event *event = slot->event;
	struct perf_sample_data data;
	u64 overflows;

	/* The host writes overflows last. */
	overflows = smp_load_acquire(&words->overflows);
	if (!event || slot->fresh || overflows == slot->seen ||
	    READ_ONCE(words->made) != slot->generation)
		return;
	slot->seen = overflows;
	slot->quiet = 0;
	vpmu_pmu_update(c, event);
	event->hw.last_period = READ_ONCE(words->last_period);
	perf_sample_data_init(&data, 0, event->hw.last_period);
	if (static_call(vpmu_pmu_overflow)(event, &data, regs))
		vpmu_pmu_stop(event, 0);
	/* Holds from the next overflow on, as after a processor's reload. */
	else if (READ_ONCE(words->period) != event->hw.sample_period)
		vpmu_pmu_follow(c, event, words);
}

int vpmu_pmu_nmi(unsigned int cmd, struct pt_regs *regs)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct vpmu_pmu_page *page = c->page;
	unsigned long wanted;
	bool fetched;
	u64 seq;
	int idx;

	if (!page)
		return NMI_DONE;
	seq = READ_ONCE(page->seq);
	if (seq == page->ack)
		return NMI_DONE;
	c->interrupts++;
	/* Events that the core is at work on must not be touched. */
	if (c->disabled && !vpmu_pmu_gone) {
		c->deferred = true;
		return NMI_HANDLED;
	}
	WRITE_ONCE(page->ack, seq);
	virt_mb();	/* pairs with the host's: overflows, device; mb; read ack */
	if (READ_ONCE(page->device) == VPMU_PMU_GONE)
		vpmu_pmu_lose();
	if (vpmu_pmu_gone)
		return NMI_HANDLED;
	c->handling = true;
	fetched = c->fetched;
	c->fetched = false;
	wanted = c->wanted;
	for_each_set_bit(idx, &wanted, VPMU_PMU_MOST)
		vpmu_pmu_handle(c, idx, regs);
	vpmu_pmu_drain(c, vpmu_pmu_sample);
	c->fetched = fetched;
	c->handling = false;
	vpmu_pmu_apply(c, 0);
	/* What follows back to back has an NMI of its own. */
	return NMI_HANDLED;
}

/* Before the page is let go of, with events on this CPU. */
void vpmu_pmu_pause(struct vpmu_pmu_cpu *c)
{
	int idx;

	vpmu_pmu_freeze(c);
	for (idx = 0; idx < VPMU_PMU_MOST; idx++)
		if (c->slots[idx].event)
			vpmu_pmu_update(c, c->slots[idx].event);
	vpmu_pmu_drain(c, vpmu_pmu_sample);
}

/* With a new page, events that were there before go on. */
void vpmu_pmu_resume(struct vpmu_pmu_cpu *c)
{
	int idx;

	c->applied = 0;
	c->frozen = false;
	c->deferred = false;
	for (idx = 0; idx < VPMU_PMU_MOST; idx++) {
		/* The page counts them anew. */
		c->slots[idx].lost = 0;
		if (c->slots[idx].event)
			vpmu_pmu_wish(c, c->slots[idx].event);
	}
	vpmu_pmu_apply_now(c);
}

int vpmu_pmu_find_core(void)
{
	void *overflow = vpmu_find_function("perf_event_overflow");

	if (!overflow) {
		pr_err("cannot find perf_event_overflow: are kprobes permitted?\n");
		return -ENOENT;
	}
	static_call_update(vpmu_pmu_overflow, overflow);
	vpmu_pmu_find_lost();
	return vpmu_pmu_begin_losing();
}

struct pmu vpmu_pmu = {
	.module		= THIS_MODULE,
	.attr_groups	= vpmu_pmu_groups,
	.task_ctx_nr	= perf_hw_context,
#ifdef PERF_PMU_CAP_HETEROGENEOUS_CPUS
	/* Without it Linux 6.1 takes no second PMU for tasks, nor this one again. */
	.capabilities	= PERF_PMU_CAP_HETEROGENEOUS_CPUS,
#endif
	.pmu_enable	= vpmu_pmu_enable,
	.pmu_disable	= vpmu_pmu_disable,
	.event_init	= vpmu_pmu_event_init,
	.add		= vpmu_pmu_add,
	.del		= vpmu_pmu_del,
	.start		= vpmu_pmu_start,
	.stop		= vpmu_pmu_stop,
	.read		= vpmu_pmu_read,
	.start_txn	= vpmu_pmu_start_txn,
	.commit_txn	= vpmu_pmu_commit_txn,
	.cancel_txn	= vpmu_pmu_cancel_txn,
};
