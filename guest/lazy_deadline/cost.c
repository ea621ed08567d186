// SPDX-License-Identifier: GPL-2.0
/*
 * What writes cost on this host, and so from which share of avoided ones a slot
 * pays (vpmu's docs/how/lazy-deadline.md).
 *
 * KVM may serve a write of IA32_TSC_DEADLINE on its fast path, without leaving
 * the run loop. One of the slot's register leaves to the VMM. The guest measures
 * both where it pays for both: nobody has to say so, nor say it again on a new host.
 */

#include <linux/math64.h>
#include <linux/minmax.h>
#include <linux/module.h>

#include <asm/barrier.h>
#include <asm/tsc.h>

#include "lazy_deadline.h"

/* Writes of which the fastest counts: the others were disturbed. */
#define LAZY_TRIES	8
/* Deadlines after which writes are measured again: the guest may have moved. */
#define LAZY_WEIGH_EACH	16384

static int break_even = -1;
module_param(break_even, int, 0644);
MODULE_PARM_DESC(break_even, "percent of deadlines that must be avoided for a slot to pay, from the next change of the mode; 0: it always pays; -1 (default): by what writes cost here");

/* TSC ticks of a write. */
static u64 lazy_cost(u32 msr, u64 deadline)
{
	u64 begin, least = U64_MAX;
	int i;

	for (i = 0; i < LAZY_TRIES; i++) {
		begin = rdtsc_ordered();
		wrmsrq(msr, deadline);
		least = min(least, rdtsc_ordered() - begin);
	}
	wrmsrq(msr, 0);
	return least;
}

/* Interrupts off. Nothing is armed afterwards. */
void lazy_weigh(struct lazy_cpu *t)
{
	/* Far enough not to come due, even where the host is slow. */
	u64 deadline = rdtsc() + (u64)tsc_khz * MSEC_PER_SEC;

	WRITE_ONCE(t->slot.pending, deadline);
	virt_mb();
	t->slot_cost = lazy_cost(VPMU_MSR_DEADLINE, deadline);
	WRITE_ONCE(t->slot.pending, 0);
	weak_wrmsr_fence();
	t->msr_cost = lazy_cost(MSR_IA32_TSC_DEADLINE, deadline);

	if (break_even >= 0)
		t->choice.least = min(break_even, 100);
	else if (t->slot_cost > t->msr_cost)
		t->choice.least = 100 - div64_u64(100 * t->msr_cost, t->slot_cost);
	else
		t->choice.least = 0;
	t->weighed++;
	t->since_weighed = 0;
}

/* As lazy_weigh(), where the last time is long ago, before a new deadline. */
void lazy_weigh_again(struct lazy_cpu *t)
{
	if (++t->since_weighed >= LAZY_WEIGH_EACH && READ_ONCE(break_even) < 0)
		lazy_weigh(t);
}
