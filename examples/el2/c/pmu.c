/* All that a hypervisor writes for its guest's PMU: partitioned, or with EMULATED emulated on the CPU's counters. */

#include "el2.h"

#ifdef EMULATED
#define PMU(call) vpmu_backed_##call
static struct vpmu_backed pmu;
#else
#define PMU(call) vpmu_partition_##call
static struct vpmu_partition pmu;
#endif

/* One vCPU, that of the only CPU. */
static struct vpmu_traps traps;
static uint64_t exits, pmis;

/* What a load, a put or an access may have changed. The hypervisor has no bits of its own in these registers. */
static void apply_traps(void)
{
	static const struct vpmu_traps own;
	struct vpmu_traps wanted;

	PMU(traps)(&pmu, &wanted);
	if (wanted.mdcr_el2 != traps.mdcr_el2 || wanted.hdfgrtr_el2 != traps.hdfgrtr_el2 ||
	    wanted.hdfgwtr_el2 != traps.hdfgwtr_el2) {
		traps = wanted;
		vpmu_el2_set_traps(&wanted, &own);
	}
}

/* At boot, before the first guest. */
void pmu_init(void)
{
	struct vpmu_partition_config cpu;
	struct vpmu_registers registers;
	uint64_t affinity = READ(mpidr_el1);

	if (vpmu_el2_config(&cpu, 0, &affinity, 1) != VPMU_STATUS_OK)
		return;
	vpmu_el2_probe(&cpu);
	vpmu_el2_registers(&registers);
#ifdef EMULATED
	struct vpmu_arm_config told;

	vpmu_el2_backed_config(&told, &cpu);
	vpmu_backed_init(&pmu, &told, &cpu, &registers);
#else
	vpmu_partition_init(&pmu, &cpu, &registers);
#endif
	PMU(load)(&pmu);
	apply_traps();
}

/* First at each exit. */
void pmu_exited(void)
{
#ifndef EMULATED
	if (pmu.acts_at_exit)
		vpmu_partition_exited(&pmu);
#endif
}

/* The computed level goes to the guest when it changes. */
static void show_line(void)
{
#ifdef EMULATED
	bool level;

	if (vpmu_backed_line_changed(&pmu, &level)) {
		pmis += level;
		gic_set_level(level);
	}
#endif
}

/* Serves a trapped access; false: it is none of the PMU. */
bool pmu_access(uint64_t esr, const struct vpmu_el2_vcpu *vcpu)
{
#ifdef EMULATED
	bool served = vpmu_el2_backed_exit(&pmu, esr, vcpu);
#else
	bool served = vpmu_el2_partition_exit(&pmu, esr, vcpu);
#endif
	if (served) {
		exits++;
		apply_traps();
		show_line();
	}
	return served;
}

/* Takes the physical interrupt; returns whether it goes on to the guest as such. */
bool pmu_interrupt(void)
{
	bool guest = false;

	exits++;
#ifdef EMULATED
	vpmu_backed_overflow(&pmu);
	show_line();
#else
	uint32_t host;

	vpmu_partition_overflow(&pmu, &guest, &host);
	pmis += guest;
#endif
	return guest;
}

void pmu_statistics(uint64_t *all, uint64_t *interrupts)
{
	*all = exits;
	*interrupts = pmis;
}
