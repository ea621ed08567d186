/* SPDX-License-Identifier: GPL-2.0 */
/*
 * For a test: an older kernel's headers with what Linux 7.1 changed for this
 * module. The MSR accessors have only their new names, and the timer in use says
 * that it is coupled to the TSC, so that the module has to refuse it.
 */
#ifndef AS_LINUX_7_1_H
#define AS_LINUX_7_1_H

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

/* First all that uses the old names. */
#include <linux/clockchips.h>
#include <linux/cpu.h>
#include <linux/debugfs.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/reboot.h>
#include <linux/suspend.h>

#include <asm/io.h>
#include <asm/msr.h>
#include <asm/tsc.h>

static inline u64 as_linux_7_1_read(u32 msr)
{
	u64 value;

	rdmsrl(msr, value);
	return value;
}

static inline void wrmsrq(u32 msr, u64 value)
{
	wrmsrl(msr, value);
}

static inline int wrmsrq_safe(u32 msr, u64 value)
{
	return wrmsrl_safe(msr, value);
}

#define rdmsrq(msr, value)	((value) = as_linux_7_1_read(msr))

#undef rdmsrl
#define wrmsrl		no_longer_there
#define wrmsrl_safe	no_longer_there

/* A feature that every TSC-deadline timer has. */
#define CLOCK_EVT_FEAT_CLOCKSOURCE_COUPLED	CLOCK_EVT_FEAT_ONESHOT

#endif
