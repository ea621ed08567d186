/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a vCPU and its host share: vpmu's docs/how/paravirtual-pmu.md. A word has one
 * writer.
 */
#ifndef VPMU_PMU_PAGE_H
#define VPMU_PMU_PAGE_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/stddef.h>
#include <linux/types.h>

/* The leaf that tells of the device, where the host has VPMU_FEATURE_PMU. */
#define VPMU_CPUID_PMU		0x40000102
#define VPMU_PMU_COUNTERS	GENMASK(7, 0)	/* EAX */
#define VPMU_PMU_RINGS		BIT(8)
#define VPMU_PMU_RAW		BIT(9)
#define VPMU_PMU_RECORDS	BIT(10)
#define VPMU_PMU_LAYOUT		1		/* ECX */

#define VPMU_MSR_PMU_PAGE	0x4b564d58
#define VPMU_PMU_PAGE_ENABLE	BIT_ULL(0)
#define VPMU_MSR_PMU_DOORBELL	0x4b564d59
#define VPMU_PMU_APPLY		BIT_ULL(0)
#define VPMU_PMU_READ		BIT_ULL(1)
#define VPMU_PMU_FREEZE		BIT_ULL(2)
#define VPMU_PMU_INJECT		BIT_ULL(3)

/* "vpmuPMU", layout 1. */
#define VPMU_PMU_TAG		0x76706d75504d5501ULL
#define VPMU_PMU_MOST		16

#define VPMU_PMU_USER		BIT_ULL(0)
#define VPMU_PMU_KERNEL		BIT_ULL(1)
#define VPMU_PMU_INTERRUPT	BIT_ULL(2)
#define VPMU_PMU_RECORD		BIT_ULL(3)

/* A buffer of records, of samples that the host has taken by itself. */
#define VPMU_PMU_BUFFER		512
#define VPMU_PMU_BUFFER_ORDER	2	/* of pages */
#define VPMU_PMU_OF_COUNTER	GENMASK_ULL(7, 0)
#define VPMU_PMU_OF_USER	BIT_ULL(8)

struct vpmu_pmu_record {
	u64 ip, tsc, period, place;
};

static_assert(VPMU_PMU_BUFFER * sizeof(struct vpmu_pmu_record) ==
	      4096 << VPMU_PMU_BUFFER_ORDER);

#define VPMU_PMU_GONE		2
#define VPMU_PMU_LOST		2	/* this state and those above */

struct vpmu_pmu_counter {
	/* The guest's. */
	u64 config, flags, left, period, generation;
	u64 reserved[3];
	/* The host's. */
	u64 count, overflows, last_period, next, made, state, lost;
	u64 reserved_too;
};

struct vpmu_pmu_page {
	/* The guest's. */
	u64 tag, ack, wanted, buffer, tail;
	u64 reserved[3];
	/* The host's. */
	u64 seq, device, floor, head;
	u64 reserved_too[20];
	struct vpmu_pmu_counter counters[VPMU_PMU_MOST];
};

static_assert(offsetof(struct vpmu_pmu_page, seq) == 0x40);
static_assert(offsetof(struct vpmu_pmu_page, counters) == 0x100);
static_assert(sizeof(struct vpmu_pmu_counter) == 0x80);

#endif
