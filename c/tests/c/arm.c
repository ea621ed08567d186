/* The two Arm designs: emulated on an array of numbers, partitioned on fake registers. */

#include <stdlib.h>

#include "check.h"
#include "vpmu_arm.h"

/* A trapped MSR; bit 0 makes it an MRS. */
#define READ 1u
#define PMCR VPMU_REGISTER(3, 3, 9, 12, 0)
#define PMCNTENSET VPMU_REGISTER(3, 3, 9, 12, 1)
#define PMCNTENCLR VPMU_REGISTER(3, 3, 9, 12, 2)
#define PMOVSCLR VPMU_REGISTER(3, 3, 9, 12, 3)
#define PMINTENSET VPMU_REGISTER(3, 0, 9, 14, 1)
#define PMEVCNTR0 VPMU_REGISTER(3, 3, 14, 8, 0)
#define PMEVTYPER0 VPMU_REGISTER(3, 3, 14, 12, 0)
#define PMEVTYPER1 VPMU_REGISTER(3, 3, 14, 12, 1)
#define SCTLR VPMU_REGISTER(3, 0, 1, 0, 0)

static uint64_t total, period;
static uint32_t running, created;

static int32_t create(void *context, uint8_t counter, const struct vpmu_event *event)
{
	(void)context, (void)counter;
	total = 0;
	created++;
	return event->kind == VPMU_EVENT_ARM && event->number == 0x08 ? VPMU_BACKED
								       : VPMU_LOST_UNSUPPORTED;
}

static void set_period(void *context, uint8_t counter, uint64_t events)
{
	(void)context, (void)counter;
	period = events;
}

static void resume(void *context, uint32_t counters)
{
	(void)context;
	running |= counters;
}

static void pause_them(void *context, uint32_t counters)
{
	(void)context;
	running &= ~counters;
}

static uint64_t read_total(void *context, uint8_t counter)
{
	(void)context, (void)counter;
	return total;
}

static void release(void *context, uint8_t counter)
{
	(void)context;
	running &= ~(1u << counter);
}

/* Under a policy that `recreates`, an overflow makes another host counter. */
static int emulated(uint32_t policy, bool recreates)
{
	struct vpmu_host host = {
		.create = create,
		.set_period = set_period,
		.resume = resume,
		.pause = pause_them,
		.read = read_total,
		.release = release,
	};
	struct vpmu_arm_config config = {
		.id_aa64dfr0 = 6 << 8, /* PMUv3p5 */
		.counters = 6,
		.pmceid = {1 << 0x08 | 1 << 0x11, 0},
		.policy = policy,
	};
	static const struct {
		uint32_t register_;
		uint64_t value;
	} writes[] = {
		{PMEVTYPER0, 0x08}, {PMEVCNTR0, 0xffffffff - 999}, {PMINTENSET, 1},
		{PMCNTENSET, 1},    {PMCR, 1},
	};
	struct vpmu_arm pmu = {0};
	uint64_t value = 0;

	created = 0;
	CHECK(vpmu_arm_init(&pmu, &config, &host) == VPMU_STATUS_OK);
	CHECK(vpmu_arm_access(&pmu, SCTLR | READ, false, &value) == VPMU_OUTCOME_NOT_HANDLED);
	for (size_t i = 0; i < sizeof(writes) / sizeof(writes[0]); i++) {
		value = writes[i].value;
		CHECK(vpmu_arm_access(&pmu, writes[i].register_, false, &value) ==
		      VPMU_OUTCOME_DONE);
	}
	CHECK(running == 1 && period == 1000);
	total = 1000;
	CHECK(!vpmu_arm_line(&pmu));
	CHECK(vpmu_arm_overflow(&pmu, 6, VPMU_REPORT_UNSURE) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_arm_overflow(&pmu, 0, VPMU_REPORT_UNSURE) == VPMU_STATUS_OK);
	CHECK(vpmu_arm_line(&pmu));
	CHECK(vpmu_arm_access(&pmu, PMOVSCLR | READ, false, &value) == VPMU_OUTCOME_VALUE);
	CHECK(value == 1);
	CHECK(vpmu_arm_access(&pmu, PMOVSCLR, false, &value) == VPMU_OUTCOME_DONE);
	CHECK(!vpmu_arm_line(&pmu));
	/* PMUSERENR_EL0 is zero: the guest's kernel hears of it. */
	CHECK(vpmu_arm_access(&pmu, PMCR | READ, true, &value) == VPMU_OUTCOME_TRAP_TO_EL1);
	CHECK((created > 1) == recreates);
	CHECK(vpmu_arm_reset(&pmu) == VPMU_STATUS_OK && running == 0);
	config.policy = 3;
	CHECK(vpmu_arm_init(&pmu, &config, &host) == VPMU_STATUS_CONFIG);
	return 0;
}

/* Plain memory in place of registers, but for the pair that enables counters. */
static uint64_t file[1 << 22];
static unsigned int written;

static uint64_t register_read(void *context, uint32_t iss)
{
	(void)context;
	return file[iss == PMCNTENCLR ? PMCNTENSET : iss];
}

static void register_write(void *context, uint32_t iss, uint64_t value)
{
	(void)context;
	written++;
	if (iss == PMCNTENSET)
		file[PMCNTENSET] |= value;
	else if (iss == PMCNTENCLR)
		file[PMCNTENSET] &= ~value;
	else
		file[iss] = value;
}

static const struct vpmu_registers registers = {.read = register_read, .write = register_write};

static void write_nobodys(void *context, uint32_t iss, uint64_t value)
{
	(void)context;
	fprintf(stderr, "write of %x: %llx\n", iss, (unsigned long long)value);
	abort();
}

static const struct vpmu_registers nobodys = {.read = register_read, .write = write_nobodys};

/* A CPU of which the host keeps nothing. */
static const struct vpmu_partition_config whole = {
	.id_aa64dfr0 = 6 << 8,
	.id_aa64mmfr0 = 1ull << 56, /* FEAT_FGT */
	.implemented = 6,
	.isolation = VPMU_ISOLATES_PARTITION | VPMU_ISOLATES_HPMD | VPMU_ISOLATES_HCCD,
};

/* Two guests on one CPU, whose counter 1 counts different events. */
static int switched(void)
{
	struct vpmu_partition guests[2] = {0}, none = {0};
	struct {
		unsigned int writes;
		uint64_t event, enabled;
	} loads[2];

	for (int i = 0; i < 2; i++) {
		/* A guest whose PMU is off waits for its next access. */
		uint64_t enable = 1 << 1, event = 0x08 + i, on = 1;

		CHECK(vpmu_partition_init(&guests[i], &whole, &registers) == VPMU_STATUS_OK);
		CHECK(vpmu_partition_access(&guests[i], PMCR, false, &on) == VPMU_OUTCOME_DONE);
		CHECK(vpmu_partition_access(&guests[i], PMEVTYPER1, false, &event) ==
		      VPMU_OUTCOME_DONE);
		CHECK(vpmu_partition_access(&guests[i], PMCNTENSET, false, &enable) ==
		      VPMU_OUTCOME_DONE);
		CHECK(vpmu_partition_put(&guests[i]) == VPMU_STATUS_OK);
	}
	for (int after = 0; after < 2; after++) {
		CHECK(vpmu_partition_load(&guests[1]) == VPMU_STATUS_OK && file[PMEVTYPER1] == 0x09);
		CHECK(vpmu_partition_put(&guests[1]) == VPMU_STATUS_OK);
		written = 0;
		CHECK((after ? vpmu_partition_load_after(&guests[0], &guests[1])
			     : vpmu_partition_load(&guests[0])) == VPMU_STATUS_OK);
		loads[after].writes = written;
		loads[after].event = file[PMEVTYPER1];
		loads[after].enabled = file[PMCNTENSET];
		CHECK(vpmu_partition_put(&guests[0]) == VPMU_STATUS_OK);
	}
	for (int after = 0; after < 2; after++)
		CHECK(loads[after].event == 0x08 && loads[after].enabled == 1 << 1);
	CHECK(loads[1].writes < loads[0].writes);
	CHECK(vpmu_partition_load_after(&guests[0], &guests[0]) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_partition_load_after(&guests[0], &none) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_partition_load_after(NULL, &guests[0]) == VPMU_STATUS_MISUSE);
	return 0;
}

static int partitioned(void)
{
	struct vpmu_partition_config config = whole;
	struct vpmu_partition pmu = {0};
	struct vpmu_traps traps;
	unsigned char saved[VPMU_STATE_SIZE];
	size_t length = 0;
	uint64_t value = 1 << 5 | 1 << 1;
	uint32_t host = 0;
	bool guest = true;

	config.host_counters = 7;
	CHECK(vpmu_partition_init(&pmu, &config, &registers) == VPMU_STATUS_CONFIG);
	config.host_counters = 2;
	CHECK(vpmu_partition_init(&pmu, &config, &registers) == VPMU_STATUS_OK);
	CHECK(vpmu_partition_traps(&pmu, &traps) == VPMU_STATUS_OK);
	CHECK((traps.mdcr_el2 & 0x1f) == 4); /* HPMN: 6 counters less the host's two */

	/* Everything traps until the first access; it reaches counter 1, and not the host's 5. */
	CHECK(vpmu_partition_access(&pmu, PMCNTENSET, false, &value) == VPMU_OUTCOME_DONE);
	CHECK(file[PMCNTENSET] == 1 << 1);
	CHECK(vpmu_partition_exited(&pmu) == VPMU_STATUS_OK);
	CHECK(vpmu_partition_access(&pmu, PMCR | READ, false, &value) == VPMU_OUTCOME_VALUE);
	CHECK((value >> 11 & 0x1f) == 4);
	CHECK(vpmu_partition_overflow(&pmu, &guest, &host) == VPMU_STATUS_OK);
	CHECK(!guest && host == 0);
	CHECK(vpmu_partition_migrate(&pmu, &config) == VPMU_STATUS_STATE);
	CHECK(vpmu_partition_save(&pmu, NULL, sizeof(saved), &length) == VPMU_STATUS_MISUSE);
	CHECK(file[PMCNTENSET] == 1 << 1);
	CHECK(vpmu_partition_put(&pmu) == VPMU_STATUS_OK && file[PMCNTENSET] == 0);
	/* A CPU with fewer for the guest, whose others are lost meanwhile; one with more than the guest knows of; and one
	 * with more counters, of which the host keeps as many more. */
	config.implemented = 8;
	config.host_counters = 6;
	CHECK(vpmu_partition_migrate(&pmu, &config) == VPMU_STATUS_OK);
	config.host_counters = 9;
	CHECK(vpmu_partition_migrate(&pmu, &config) == VPMU_STATUS_CONFIG);
	config.host_counters = 2;
	CHECK(vpmu_partition_migrate(&pmu, &config) == VPMU_STATUS_STATE);
	config.host_counters = 4;
	CHECK(vpmu_partition_migrate(&pmu, &config) == VPMU_STATUS_OK);
	CHECK(vpmu_partition_save(&pmu, saved, sizeof(saved), &length) == VPMU_STATUS_OK);
	CHECK(vpmu_partition_restore(&pmu, saved, length) == VPMU_STATUS_OK);
	CHECK(vpmu_partition_restore(&pmu, saved, length - 1) == VPMU_STATUS_STATE);
	CHECK(!vpmu_partition_line(&pmu));
	CHECK(vpmu_partition_reset(&pmu) == VPMU_STATUS_OK);

	/* What MDCR_EL2 does not keep from counting at EL2 is looked at by each exit while the guest uses its PMU. */
	config = whole;
	config.isolation = VPMU_ISOLATES_PARTITION | VPMU_ISOLATES_HPMD;
	CHECK(vpmu_partition_init(&pmu, &config, &registers) == VPMU_STATUS_OK && !pmu.acts_at_exit);
	CHECK(vpmu_partition_access(&pmu, PMCNTENSET, false, &value) == VPMU_OUTCOME_DONE);
	CHECK(pmu.acts_at_exit && vpmu_partition_put(&pmu) == VPMU_STATUS_OK && !pmu.acts_at_exit);
	return 0;
}

/* The emulated PMU on the counters of the CPU, of whose events the guest may count one. */
static int backed(void)
{
	struct vpmu_arm_config config = {.id_aa64dfr0 = 6 << 8, .counters = 6, .pmceid = {1 << 0x08 | 1 << 0x11}};
	struct vpmu_backed pmu = {0};
	struct vpmu_traps traps;
	unsigned char saved[VPMU_STATE_SIZE];
	size_t length = 0;
	uint64_t value;
	bool level = true;

	config.filter = (struct vpmu_arm_filter){.deny = true, .count = 1, .rules = {{0x08, 0x08, true}}};
	CHECK(vpmu_backed_line(&pmu) == false && vpmu_backed_load(&pmu) == VPMU_STATUS_MISUSE);
	config.counters = 7;
	CHECK(vpmu_backed_init(&pmu, &config, &whole, &registers) == VPMU_STATUS_CONFIG);
	CHECK(vpmu_backed_load(&pmu) == VPMU_STATUS_MISUSE);
	config.counters = 6;
	config.filter.count = 17;
	CHECK(vpmu_backed_init(&pmu, &config, &whole, &registers) == VPMU_STATUS_CONFIG);
	config.filter.count = 1;
	CHECK(vpmu_backed_init(&pmu, &config, &whole, &registers) == VPMU_STATUS_OK);
	/* Registers that come with a refused configuration are not used. */
	config.counters = 7;
	CHECK(vpmu_backed_init(&pmu, &config, &whole, &nobodys) == VPMU_STATUS_CONFIG);
	config.counters = 6;
	CHECK(vpmu_backed_traps(&pmu, &traps) == VPMU_STATUS_OK && traps.mdcr_el2 & 1 << 6);

	/* PMCEID0_EL0 has SW_INCR and INST_RETIRED alone. */
	CHECK(vpmu_backed_access(&pmu, VPMU_REGISTER(3, 3, 9, 12, 6) | READ, false, &value) == VPMU_OUTCOME_VALUE);
	CHECK((value & 0xffffffff) == (1 << 0x08 | 1 << 0 | 1 << 0x1e));
	value = 1;
	CHECK(vpmu_backed_access(&pmu, PMINTENSET, false, &value) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_backed_access(&pmu, VPMU_REGISTER(3, 3, 9, 14, 3), false, &value) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_backed_access(&pmu, PMCR, false, &value) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_backed_line_changed(&pmu, &level) && level && vpmu_backed_line(&pmu));
	CHECK(!vpmu_backed_line_changed(&pmu, &level) && level);
	CHECK(vpmu_backed_save(&pmu, saved, sizeof(saved), &length) == VPMU_STATUS_OK && length < sizeof(saved));
	CHECK(vpmu_backed_reset(&pmu) == VPMU_STATUS_OK);
	CHECK(vpmu_backed_line_changed(&pmu, &level) && !level);
	CHECK(vpmu_backed_restore(&pmu, saved, length) == VPMU_STATUS_OK && vpmu_backed_line(&pmu));
	saved[2] = 9; /* no version of the PMU */
	CHECK(vpmu_backed_restore(&pmu, saved, length) == VPMU_STATUS_STATE && vpmu_backed_line(&pmu));
	CHECK(vpmu_backed_counter_state(&pmu, 0) == VPMU_COUNTER_PAUSED);
	config.filter.count = 0;
	CHECK(vpmu_backed_set_filter(&pmu, &config.filter) == VPMU_STATUS_OK);
	CHECK(vpmu_backed_put(&pmu) == VPMU_STATUS_OK && file[PMCNTENSET] == 0);
	CHECK(vpmu_backed_migrate(&pmu, &whole) == VPMU_STATUS_OK && vpmu_backed_load(&pmu) == VPMU_STATUS_OK);
	return 0;
}

int main(void)
{
	return emulated(VPMU_POLICY_REUSE_PAUSED, false) || emulated(VPMU_POLICY_REUSE, false) ||
	       emulated(VPMU_POLICY_RECREATE, true) || partitioned() || switched() ||
	       backed();
}
