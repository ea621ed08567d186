/* SPDX-License-Identifier: GPL-2.0 */
/* The parts of lazy_deadline: main.c, timer.c, cost.c and stats.c. */
#ifndef LAZY_DEADLINE_H
#define LAZY_DEADLINE_H

#include <linux/bits.h>
#include <linux/clockchips.h>
#include <linux/ktime.h>
#include <linux/percpu.h>
#include <linux/types.h>

#include "break_even.h"
#include "vpmu_guest.h"

/* The host's two registers, where it has VPMU_FEATURE_DEADLINE. */
#define VPMU_MSR_SLOT		0x4b564d56
#define VPMU_MSR_DEADLINE	0x4b564d57
#define VPMU_SLOT_ENABLE	BIT_ULL(0)

/* "vpmuTSC", layout 1. */
#define VPMU_DEADLINE_TAG	0x76706d7554534301ULL

/* What this CPU and its host share. */
struct vpmu_deadline_slot {
	u64 armed;	/* host: reads pending at this TSC; 0: write the MSR */
	u64 pending;	/* guest: the deadline wanted; 0: none. Host: fired -> 0 */
	u64 tag;	/* guest: VPMU_DEADLINE_TAG while this is a slot */
	u64 reserved[5];
} __aligned(64);

enum lazy_mode { OFF, PLAIN, GUEST_ONLY, PARAVIRTUAL };

struct lazy_counters {
	u64 asked;		/* deadlines, and stops of the timer */
	u64 avoided;		/* of these: nothing was written */
	u64 written;		/* of these: the MSR was, or the LVT masked */
	u64 interrupts;		/* timer interrupts */
	u64 early;		/* of these: before the deadline in force */
	u64 rearmed;		/* of these: the MSR was written for it */
	u64 stray;		/* of these: no deadline was in force */
	u64 idle_due;		/* of these: due, on an idle CPU */
	u64 idle_extra;		/* of these: early or stray, on an idle CPU */
};

/* Latencies in TSC ticks: 2^HIST_BITS steps in each power of two. */
#define HIST_BITS	5
#define HIST_STEPS	BIT(HIST_BITS)
#define HIST_BUCKETS	((40 - HIST_BITS) * HIST_STEPS)

struct lazy_latency {
	u64 min, max, count;
	u64 buckets[HIST_BUCKETS];
};

struct lazy_cpu {
	struct vpmu_deadline_slot slot;
	struct clock_event_device *evt;		/* NULL: not taken over */

	/* The device's own functions. */
	void (*event_handler)(struct clock_event_device *evt);
	int (*set_next_event)(unsigned long delta,
			      struct clock_event_device *evt);
	int (*set_state_oneshot)(struct clock_event_device *evt);
	int (*set_state_oneshot_stopped)(struct clock_event_device *evt);
	int (*set_state_shutdown)(struct clock_event_device *evt);

	u64 armed;	/* guest-only: what the MSR holds; 0: nothing, or unknown */
	u64 wanted;	/* the deadline in force; 0: none */
	bool masked;	/* the device's own function has masked the LVT */
	unsigned int coupled;	/* the device's feature that was taken away, or 0 */

	/* The event and the deadline made of it: last written, last asked. */
	ktime_t written_event, asked_event;
	u64 written_deadline, asked_deadline;

	/* Paravirtual: whether the slot pays, by the ticks of a write of either MSR. */
	struct break_even choice;
	u64 slot_cost, msr_cost;
	u64 weighed;		/* how often they were measured */
	u64 since_weighed;	/* deadlines since */

	struct lazy_counters counters;
	struct lazy_latency latency;
};

DECLARE_PER_CPU(struct lazy_cpu *, lazy_cpus);

/* main.c; changes under a mutex, while no CPU's timer is taken over. */
extern enum lazy_mode lazy_mode;

/*
 * timer.c. lazy_find_device() returns 0, or why this module cannot work here;
 * the other two are for CPU hotplug.
 */
int lazy_find_device(void);
int lazy_online(unsigned int cpu);
int lazy_offline(unsigned int cpu);

/* cost.c: measures what writes cost, and from which share a slot pays. */
void lazy_weigh(struct lazy_cpu *t);
void lazy_weigh_again(struct lazy_cpu *t);

/* stats.c; @mode is the file of the mode. */
struct file_operations;
void lazy_create_files(const struct file_operations *mode);
void lazy_remove_files(void);

#endif
