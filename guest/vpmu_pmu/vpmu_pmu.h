/* SPDX-License-Identifier: GPL-2.0 */
/* The parts of vpmu_pmu: main.c, pmu.c, records.c, events.c and gone.c. */
#ifndef VPMU_PMU_H
#define VPMU_PMU_H

#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/types.h>

#include "page.h"
#include "vpmu_guest.h"

/* In config_base of an event whose period has come near its frequency. */
#define VPMU_PMU_SETTLED	1

struct vpmu_pmu_slot {
	struct perf_event *event;	/* NULL: free */
	u64 generation;			/* of the last wish */
	u64 seen;			/* overflows that have been handled */
	u64 lost;			/* records that perf knows to be lost */
	s64 left;			/* period_left, as last set here */
	unsigned int quiet;		/* ticks without an overflow */
	bool fresh;			/* the wish has not been applied */
	bool made;			/* there has been a wish for this event */
};

struct vpmu_pmu_cpu {
	struct vpmu_pmu_page *page;	/* NULL: not shared */
	struct vpmu_pmu_record *buffer;	/* NULL: the host has none */
	struct vpmu_pmu_slot slots[VPMU_PMU_MOST];
	unsigned long wanted;		/* counters that shall count */
	unsigned long applied;		/* those that the host knows of */
	u64 generation;
	bool dirty;			/* wishes have changed */
	bool frozen;			/* nothing counts until an APPLY */
	bool disabled;			/* the core is at work on the events */
	bool deferred;			/* an NMI came meanwhile */
	bool handling;			/* the NMI handler is at work */
	bool fetched;			/* counts are those of now: a group is read */
	bool ticked;			/* counts have been read for this tick */
	bool touched;			/* an event, since the PMU was disabled */
	u64 refused;			/* an event that the host cannot count */
	u64 reason;			/* 0: none was refused */
	u64 doorbells;			/* rung */
	u64 interrupts;			/* the host's NMIs */
};

DECLARE_PER_CPU(struct vpmu_pmu_cpu, vpmu_pmu_cpus);

/* main.c; set once. */
extern unsigned int vpmu_pmu_counters;
extern u32 vpmu_pmu_features;		/* EAX of the leaf */
extern u32 vpmu_pmu_events;		/* EBX */

/* events.c */
extern const struct attribute_group *vpmu_pmu_groups[];
int vpmu_pmu_event_init(struct perf_event *event);

/* pmu.c. The last two are called on the CPU with interrupts off. */
extern struct pmu vpmu_pmu;
int vpmu_pmu_find_core(void);
int vpmu_pmu_nmi(unsigned int cmd, struct pt_regs *regs);
void vpmu_pmu_pause(struct vpmu_pmu_cpu *c);
void vpmu_pmu_resume(struct vpmu_pmu_cpu *c);

/* records.c */
bool vpmu_pmu_is_recorded(struct vpmu_pmu_cpu *c, struct perf_event *event);
typedef void (*vpmu_pmu_sampled)(struct perf_event *event,
				 struct perf_sample_data *data,
				 struct pt_regs *regs);
void vpmu_pmu_drain(struct vpmu_pmu_cpu *c, vpmu_pmu_sampled sampled);
void vpmu_pmu_find_lost(void);

/* gone.c */
extern bool vpmu_pmu_gone;
int vpmu_pmu_begin_losing(void);
void vpmu_pmu_lose(void);
void vpmu_pmu_do_later(void);
void vpmu_pmu_end_losing(void);

#endif
