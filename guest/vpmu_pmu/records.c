// SPDX-License-Identifier: GPL-2.0
/*
 * Samples that the host has taken by itself, as records in a buffer.
 *
 * They come without an interrupt for each, so the core gets them late, as it
 * gets those of a PEBS buffer: before their task leaves the CPU, at a tick of
 * an event with a frequency, and when half of it is full.
 */

#include <linux/bitops.h>
#include <linux/math64.h>
#include <linux/static_call.h>

#include <asm/msr.h>
#include <asm/segment.h>
#include <asm/tsc.h>

#include "vpmu_pmu.h"

/* What a record has, and what is the task's, which is still on the CPU. */
#define VPMU_PMU_SAMPLE	(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | \
			 PERF_SAMPLE_ID | PERF_SAMPLE_CPU | \
			 PERF_SAMPLE_STREAM_ID | PERF_SAMPLE_PERIOD | \
			 PERF_SAMPLE_IDENTIFIER)

/* Not exported, and there since Linux 4.1. */
DEFINE_STATIC_CALL_NULL(vpmu_pmu_log_lost, perf_log_lost_samples);

/* Whether samples of this event may be records. */
bool vpmu_pmu_is_recorded(struct vpmu_pmu_cpu *c, struct perf_event *event)
{
	struct perf_event_attr *attr = &event->attr;

	/* With each interrupt the core comes nearer to its frequency. */
	if (!c->buffer || (attr->freq && event->hw.config_base != VPMU_PMU_SETTLED))
		return false;
	/* A program (BPF) is called by the core, and wants the registers. */
	if (!attr->sample_type)
		return false;
#ifdef CONFIG_BPF_SYSCALL
	if (event->prog)
		return false;
#endif
	/* Who wants to be woken by a sample wants it at once. */
	if (attr->wakeup_events && !attr->watermark)
		return false;
	/* Of a CPU's event nobody says that the task changes. */
	return event->attach_state & PERF_ATTACH_TASK && !attr->sigtrap &&
	       !(attr->sample_type & ~VPMU_PMU_SAMPLE);
}

/*
 * A moment by the event's clock, whichever that is: as long ago by the TSC as
 * the sample was.
 */
static void vpmu_pmu_set_time(struct perf_event *event,
			      struct perf_sample_data *data, u64 tsc)
{
	s64 ago = rdtsc() - tsc;

	data->time = event->clock() -
		     mul_u64_u32_div(max(ago, 0), NSEC_PER_MSEC, tsc_khz);
	data->sample_flags |= PERF_SAMPLE_TIME;
}

static void vpmu_pmu_put(struct perf_event *event,
			 const struct vpmu_pmu_record *record,
			 vpmu_pmu_sampled sampled)
{
	struct perf_sample_data data;
	struct pt_regs regs = {
		.ip	= record->ip,
		.cs	= record->place & VPMU_PMU_OF_USER ? __USER_CS :
							     __KERNEL_CS,
	};

	perf_sample_data_init(&data, 0, record->period);
	vpmu_pmu_set_time(event, &data, record->tsc);
	/*
	 * The core counts the last alone as an interrupt. To an event with a
	 * frequency it would seem that no other had been since the last tick.
	 */
	if (!sampled || event->attr.freq)
		event->overflow_handler(event, &data, &regs);
	else
		sampled(event, &data, &regs);
}

static void vpmu_pmu_tell_lost(struct vpmu_pmu_cpu *c)
{
	int idx;

	for (idx = 0; idx < VPMU_PMU_MOST; idx++) {
		struct vpmu_pmu_slot *slot = &c->slots[idx];
		u64 lost = READ_ONCE(c->page->counters[idx].lost);

		if (!slot->event || lost == slot->lost)
			continue;
		static_call_cond(vpmu_pmu_log_lost)(slot->event,
						    lost - slot->lost);
		slot->lost = lost;
	}
}

/*
 * Hands over all records, the last of each event by @sampled. On their CPU,
 * where the core does not work on its events, or has disabled the PMU: the NMI
 * handler comes here, too.
 */
void vpmu_pmu_drain(struct vpmu_pmu_cpu *c, vpmu_pmu_sampled sampled)
{
	u64 last[VPMU_PMU_MOST] = {};
	u64 head, tail, n;

	if (!c->buffer)
		return;
	/* The host writes the head last. */
	head = smp_load_acquire(&c->page->head);
	tail = c->page->tail;
	if (head - tail - 1 >= VPMU_PMU_BUFFER)
		return;
	for (n = tail; n != head; n++) {
		const struct vpmu_pmu_record *record =
			&c->buffer[n % VPMU_PMU_BUFFER];
		unsigned int idx = (record->place & VPMU_PMU_OF_COUNTER) %
				   VPMU_PMU_MOST;

		last[idx] = n;
	}
	for (n = tail; n != head; n++) {
		const struct vpmu_pmu_record *record =
			&c->buffer[n % VPMU_PMU_BUFFER];
		unsigned int idx = (record->place & VPMU_PMU_OF_COUNTER) %
				   VPMU_PMU_MOST;
		struct perf_event *event = c->slots[idx].event;

		if (event)
			vpmu_pmu_put(event, record,
				     n == last[idx] ? sampled : NULL);
	}
	smp_store_release(&c->page->tail, head);
	vpmu_pmu_tell_lost(c);
}

/* Without it nobody is told of records that found no room. */
void vpmu_pmu_find_lost(void)
{
	void *lost = vpmu_find_function("perf_log_lost_samples");

	if (lost)
		static_call_update(vpmu_pmu_log_lost, lost);
}
