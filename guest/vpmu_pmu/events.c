// SPDX-License-Identifier: GPL-2.0
/* Which events there are: for perf_event_open(), and in sysfs. */

#include <linux/device.h>
#include <linux/kernel.h>
#include <linux/sysfs.h>

#include "vpmu_pmu.h"

/* Event select, unit mask, edge, inversion, counter mask. */
#define VPMU_PMU_CONFIG	(GENMASK_ULL(15, 0) | BIT_ULL(18) | BIT_ULL(23) | \
			 GENMASK_ULL(31, 24))

/* Architectural events, in the order of their bits. */
static const u64 vpmu_pmu_configs[] = {
	0x003c, 0x00c0, 0x013c, 0x4f2e, 0x412e, 0x00c4, 0x00c5,
};

enum { CYCLES, INSTRUCTIONS, REF_CYCLES, LLC_REFS, LLC_MISSES, BRANCHES,
       BRANCH_MISSES };

static const int vpmu_pmu_generic[PERF_COUNT_HW_MAX] = {
	[PERF_COUNT_HW_CPU_CYCLES]		= CYCLES,
	[PERF_COUNT_HW_INSTRUCTIONS]		= INSTRUCTIONS,
	[PERF_COUNT_HW_CACHE_REFERENCES]	= LLC_REFS,
	[PERF_COUNT_HW_CACHE_MISSES]		= LLC_MISSES,
	[PERF_COUNT_HW_BRANCH_INSTRUCTIONS]	= BRANCHES,
	[PERF_COUNT_HW_BRANCH_MISSES]		= BRANCH_MISSES,
	[PERF_COUNT_HW_BUS_CYCLES]		= -1,
	[PERF_COUNT_HW_STALLED_CYCLES_FRONTEND]	= -1,
	[PERF_COUNT_HW_STALLED_CYCLES_BACKEND]	= -1,
	[PERF_COUNT_HW_REF_CPU_CYCLES]		= REF_CYCLES,
};

static int vpmu_pmu_cache_event(u64 config)
{
	const u64 read = PERF_COUNT_HW_CACHE_LL |
			 PERF_COUNT_HW_CACHE_OP_READ << 8;

	if (config == (read | PERF_COUNT_HW_CACHE_RESULT_ACCESS << 16))
		return LLC_REFS;
	if (config == (read | PERF_COUNT_HW_CACHE_RESULT_MISS << 16))
		return LLC_MISSES;
	return -1;
}

static bool vpmu_pmu_has(int bit)
{
	return bit >= 0 && vpmu_pmu_events & BIT(bit);
}

static int vpmu_pmu_set_config(struct perf_event *event)
{
	u64 config = event->attr.config;
	int bit = -1;

	switch (event->attr.type) {
	case PERF_TYPE_HARDWARE:
		config &= PERF_HW_EVENT_MASK;
		if (config < PERF_COUNT_HW_MAX)
			bit = vpmu_pmu_generic[config];
		break;
	case PERF_TYPE_HW_CACHE:
		bit = vpmu_pmu_cache_event(config & PERF_HW_EVENT_MASK);
		break;
	case PERF_TYPE_RAW:
		if (config & ~VPMU_PMU_CONFIG)
			return -EINVAL;
		for (bit = ARRAY_SIZE(vpmu_pmu_configs) - 1; bit >= 0; bit--)
			if (config == vpmu_pmu_configs[bit])
				break;
		if (bit < 0 && vpmu_pmu_features & VPMU_PMU_RAW) {
			event->hw.config = config;
			return 0;
		}
		break;
	default:
		return -ENOENT;
	}
	if (!vpmu_pmu_has(bit))
		return -ENOENT;
	event->hw.config = vpmu_pmu_configs[bit];
	return 0;
}

/* A group that never fits is refused at once. */
static int vpmu_pmu_check_group(struct perf_event *event)
{
	struct perf_event *sibling, *leader = event->group_leader;
	unsigned int n = 1;

	if (leader == event)
		return 0;
	n += leader->pmu == event->pmu;
	for_each_sibling_event(sibling, leader)
		n += sibling->pmu == event->pmu;
	return n > vpmu_pmu_counters ? -EINVAL : 0;
}

/*
 * Before Linux 6.2 a task that has had an event has a pointer to this PMU until
 * it ends, and the core follows it then.
 */
static void vpmu_pmu_keep_module(struct perf_event *event)
{
#ifndef HAVE_perf_event_pmu_context
	static bool kept;

	if (event->attach_state & PERF_ATTACH_TASK && !xchg(&kept, true))
		__module_get(THIS_MODULE);
#endif
}

int vpmu_pmu_event_init(struct perf_event *event)
{
	struct perf_event_attr *attr = &event->attr;
	struct hw_perf_event *hwc = &event->hw;
	int err;

	err = vpmu_pmu_set_config(event);
	if (err)
		return err;
	if (vpmu_pmu_gone)
		return -ENODEV;
	if (attr->precise_ip || has_branch_stack(event))
		return -EOPNOTSUPP;
	if (attr->exclude_user && attr->exclude_kernel)
		return -EINVAL;
	/* Nothing tells this guest's own guests apart from it. */
	if (attr->exclude_host)
		return -EOPNOTSUPP;
	if (attr->exclude_user != attr->exclude_kernel &&
	    !(vpmu_pmu_features & VPMU_PMU_RINGS))
		return -EOPNOTSUPP;
	if (!is_sampling_event(event)) {
		/* Never reached: without the interrupt's flag nothing ends. */
		hwc->sample_period = S64_MAX;
		hwc->last_period = hwc->sample_period;
		local64_set(&hwc->period_left, hwc->sample_period);
	}
	hwc->idx = -1;
	err = vpmu_pmu_check_group(event);
	if (!err)
		vpmu_pmu_keep_module(event);
	return err;
}

PMU_FORMAT_ATTR(event, "config:0-7");
PMU_FORMAT_ATTR(umask, "config:8-15");
PMU_FORMAT_ATTR(edge, "config:18");
PMU_FORMAT_ATTR(inv, "config:23");
PMU_FORMAT_ATTR(cmask, "config:24-31");

static struct attribute *vpmu_pmu_formats[] = {
	&format_attr_event.attr,
	&format_attr_umask.attr,
	&format_attr_edge.attr,
	&format_attr_inv.attr,
	&format_attr_cmask.attr,
	NULL,
};

static const struct attribute_group vpmu_pmu_format_group = {
	.name = "format",
	.attrs = vpmu_pmu_formats,
};

PMU_EVENT_ATTR_STRING(cpu-cycles, vpmu_pmu_cycles, "event=0x3c");
PMU_EVENT_ATTR_STRING(instructions, vpmu_pmu_instructions, "event=0xc0");
PMU_EVENT_ATTR_STRING(ref-cycles, vpmu_pmu_ref_cycles, "event=0x3c,umask=0x01");
PMU_EVENT_ATTR_STRING(cache-references, vpmu_pmu_refs, "event=0x2e,umask=0x4f");
PMU_EVENT_ATTR_STRING(cache-misses, vpmu_pmu_misses, "event=0x2e,umask=0x41");
PMU_EVENT_ATTR_STRING(branch-instructions, vpmu_pmu_branches, "event=0xc4");
PMU_EVENT_ATTR_STRING(branch-misses, vpmu_pmu_branch_misses, "event=0xc5");

/* In the order of the events' bits. */
static struct attribute *vpmu_pmu_named[] = {
	&vpmu_pmu_cycles.attr.attr,
	&vpmu_pmu_instructions.attr.attr,
	&vpmu_pmu_ref_cycles.attr.attr,
	&vpmu_pmu_refs.attr.attr,
	&vpmu_pmu_misses.attr.attr,
	&vpmu_pmu_branches.attr.attr,
	&vpmu_pmu_branch_misses.attr.attr,
	NULL,
};

static umode_t vpmu_pmu_is_visible(struct kobject *kobj, struct attribute *attr,
				   int bit)
{
	return vpmu_pmu_has(bit) ? attr->mode : 0;
}

static const struct attribute_group vpmu_pmu_event_group = {
	.name = "events",
	.attrs = vpmu_pmu_named,
	.is_visible = vpmu_pmu_is_visible,
};

/* User space that wants RDPMC finds none. */
static ssize_t rdpmc_show(struct device *dev, struct device_attribute *attr,
			  char *buf)
{
	return sysfs_emit(buf, "0\n");
}

static ssize_t rdpmc_store(struct device *dev, struct device_attribute *attr,
			   const char *buf, size_t count)
{
	unsigned long value;
	int err = kstrtoul(buf, 0, &value);

	if (err)
		return err;
	return value ? -EOPNOTSUPP : count;
}
static DEVICE_ATTR_RW(rdpmc);

static struct attribute *vpmu_pmu_attrs[] = {
	&dev_attr_rdpmc.attr,
	NULL,
};

static const struct attribute_group vpmu_pmu_attr_group = {
	.attrs = vpmu_pmu_attrs,
};

const struct attribute_group *vpmu_pmu_groups[] = {
	&vpmu_pmu_attr_group,
	&vpmu_pmu_format_group,
	&vpmu_pmu_event_group,
	NULL,
};
