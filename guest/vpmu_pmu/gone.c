// SPDX-License-Identifier: GPL-2.0
/*
 * What becomes of events when the host takes its PMU away.
 *
 * Nothing counts any more, and user space must not take a count that stands
 * still for a count. So each event goes into the error state, from which a read
 * returns nothing, as soon as it is on a CPU: those that are there now, and
 * those of tasks that run later.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/irq_work.h>
#include <linux/spinlock.h>
#include <linux/static_call.h>

#include "vpmu_pmu.h"

bool vpmu_pmu_gone;

/* perf_event_disable_local() is not exported. */
DEFINE_STATIC_CALL_NULL(vpmu_pmu_disable_local, perf_event_disable_local);

static void vpmu_pmu_fail(struct perf_event *event)
{
	struct perf_event_context *ctx = event->ctx;

	static_call(vpmu_pmu_disable_local)(event);
	raw_spin_lock(&ctx->lock);
	if (event->state == PERF_EVENT_STATE_OFF) {
		event->state = PERF_EVENT_STATE_ERROR;
		/*
		 * When its task ends, the error is forgotten. A count of no time
		 * at all is "not counted" to perf then.
		 */
		event->total_time_running = 0;
	}
	raw_spin_unlock(&ctx->lock);
}

/*
 * Interrupts are off, so the CPU keeps its task, and what was on the CPU is not
 * freed before this ends.
 */
static void vpmu_pmu_fail_all(struct vpmu_pmu_cpu *c)
{
	struct perf_event *events[VPMU_PMU_MOST];
	int idx;

	/* First all: a leader takes its group off the CPU. */
	for (idx = 0; idx < VPMU_PMU_MOST; idx++)
		events[idx] = c->slots[idx].event;
	for (idx = 0; idx < VPMU_PMU_MOST; idx++)
		if (events[idx])
			vpmu_pmu_fail(events[idx]);
}

/* What the core's lock of the runqueue forbids: to print takes others. */
static void vpmu_pmu_later(struct irq_work *work)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);

	if (c->reason)
		pr_warn_once("the host cannot count event %#llx (%llu)\n",
			     c->refused, c->reason);
	if (READ_ONCE(vpmu_pmu_gone)) {
		pr_err_once("the host's PMU has gone: nothing counts any more\n");
		vpmu_pmu_fail_all(c);
	}
}

static DEFINE_PER_CPU(struct irq_work, vpmu_pmu_work);

/* In any context. */
void vpmu_pmu_do_later(void)
{
	irq_work_queue(this_cpu_ptr(&vpmu_pmu_work));
}

/* On a CPU that has found it out, in any context. */
void vpmu_pmu_lose(void)
{
	WRITE_ONCE(vpmu_pmu_gone, true);
	vpmu_pmu_do_later();
}

/* Before anything can be lost. */
int vpmu_pmu_begin_losing(void)
{
	void *disable = vpmu_find_function("perf_event_disable_local");
	int cpu;

	if (!disable) {
		pr_err("cannot find perf_event_disable_local: are kprobes permitted?\n");
		return -ENOENT;
	}
	static_call_update(vpmu_pmu_disable_local, disable);
	/* Linux 6.12 does not relocate a module's initial per-CPU data. */
	for_each_possible_cpu(cpu)
		*per_cpu_ptr(&vpmu_pmu_work, cpu) =
			IRQ_WORK_INIT_HARD(vpmu_pmu_later);
	return 0;
}

/* Before the module's code goes. */
void vpmu_pmu_end_losing(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		irq_work_sync(per_cpu_ptr(&vpmu_pmu_work, cpu));
}
