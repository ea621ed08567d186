/* A guest samples every 1000 instructions, with Intel's PMU and with AMD's; the host is an array of numbers. */
#include <string.h>

#include "check.h"
#include "vpmu.h"

struct host {
	struct vpmu_event events[32];
	uint64_t totals[32];
	uint64_t periods[32];
	uint32_t running;
	int calls;
};

static int32_t host_create(void *context, uint8_t counter, const struct vpmu_event *event)
{
	struct host *host = context;

	host->calls++;
	if (event->kind == VPMU_EVENT_X86 && event->number == 0x412e)
		return VPMU_LOST_UNSUPPORTED;
	host->events[counter] = *event;
	host->totals[counter] = 0;
	return VPMU_BACKED;
}

static void host_set_period(void *context, uint8_t counter, uint64_t events)
{
	struct host *host = context;

	host->calls++;
	host->periods[counter] = events;
}

static void host_resume(void *context, uint32_t counters)
{
	struct host *host = context;

	host->calls++;
	host->running |= counters;
}

static void host_pause(void *context, uint32_t counters)
{
	struct host *host = context;

	host->calls++;
	host->running &= ~counters;
}

static uint64_t host_read(void *context, uint8_t counter)
{
	struct host *host = context;

	host->calls++;
	return host->totals[counter];
}

static void host_release(void *context, uint8_t counter)
{
	struct host *host = context;

	host->calls++;
	host->running &= ~(1u << counter);
}

/* AMD's PMU: the same calls, other registers. */
static int amd(struct host *state, const struct vpmu_host *host, const void *intels, size_t size)
{
	struct vpmu_x86_amd_config config = {
		.interface = VPMU_AMD_V2 + 1,
		.events = 0xffffffff,
		.policy = VPMU_POLICY_REUSE_PAUSED,
	};
	struct vpmu_x86 pmu = {0}, other = {0};
	struct vpmu_cpuid leaf;
	unsigned char saved[VPMU_STATE_SIZE];
	size_t length = 0;
	uint64_t value = 0;

	CHECK(vpmu_x86_init_amd(&pmu, NULL, host) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_x86_init_amd(&pmu, &config, host) == VPMU_STATUS_CONFIG);
	config.interface = VPMU_AMD_V2;
	CHECK(vpmu_x86_init_amd(&other, &config, host) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_cpuid(&other, 0x80000022, 0, &leaf) == VPMU_STATUS_OK);
	CHECK(leaf.eax == 1 && leaf.ebx == 6);
	config.interface = VPMU_AMD_CORE;
	CHECK(vpmu_x86_init_amd(&pmu, &config, host) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_cpuid(&pmu, 0x80000001, 0, &leaf) == VPMU_STATUS_OK);
	CHECK(leaf.ecx == 1u << 23);
	CHECK(vpmu_x86_cpuid(&pmu, 0x0a, 0, &leaf) == VPMU_STATUS_OK && leaf.eax == 0);
	/* Neither Intel's registers nor those of a newer interface. */
	CHECK(vpmu_x86_rdmsr(&pmu, 0x38f, &value) == VPMU_OUTCOME_NOT_HANDLED);
	CHECK(vpmu_x86_rdmsr(&pmu, 0xc0000301, &value) == VPMU_OUTCOME_GENERAL_PROTECTION);

	/* EN, INT, OS, USR, instructions; 1000 to go. */
	CHECK(vpmu_x86_wrmsr(&pmu, 0xc0010201, (1ull << 48) - 1000) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_x86_wrmsr(&pmu, 0xc0010200, 0x005300c0) == VPMU_OUTCOME_DONE);
	CHECK(state->running == 1 && state->periods[0] == 1000);
	CHECK(state->events[0].kind == VPMU_EVENT_X86_AMD && state->events[0].number == 0xc0);
	state->totals[0] = 1000;
	CHECK(vpmu_x86_overflow(&pmu, 0, VPMU_REPORT_DUE) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_take_pmi(&pmu));
	CHECK(vpmu_x86_rdpmc(&pmu, 0, false, false, &value) == VPMU_OUTCOME_VALUE && value == 0);
	CHECK(vpmu_x86_rdpmc(&pmu, 6, false, false, &value) == VPMU_OUTCOME_GENERAL_PROTECTION);

	/* A snapshot goes on elsewhere, but not as another vendor's or interface's. */
	CHECK(vpmu_x86_save(&pmu, saved, sizeof(saved), &length) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_restore(&pmu, intels, size) == VPMU_STATUS_STATE);
	CHECK(vpmu_x86_restore(&other, saved, length) == VPMU_STATUS_STATE);
	CHECK(vpmu_x86_reset(&pmu) == VPMU_STATUS_OK && state->running == 0);
	CHECK(vpmu_x86_restore(&pmu, saved, length) == VPMU_STATUS_OK && state->running == 1);
	CHECK(vpmu_x86_reset(&pmu) == VPMU_STATUS_OK && state->running == 0);
	return 0;
}

int main(void)
{
	struct host state = {0};
	struct vpmu_host host = {
		.context = &state,
		.create = host_create,
		.set_period = host_set_period,
		.resume = host_resume,
		.pause = host_pause,
		.read = host_read,
		.release = host_release,
		.reports_promptly = true,
	};
	struct vpmu_x86_config config;
	struct vpmu_x86 pmu = {0}, other = {0};
	struct vpmu_cpuid leaf;
	unsigned char saved[VPMU_STATE_SIZE];
	uint32_t msrs[64];
	size_t length = 0;
	uint64_t value = 0;

	/* What a careless caller does. */
	memset(&pmu, 0xa5, sizeof(pmu));
	CHECK(vpmu_x86_rdmsr(&pmu, 0x38f, &value) == VPMU_OUTCOME_MISUSE);
	CHECK(vpmu_x86_rdmsr(NULL, 0x38f, &value) == VPMU_OUTCOME_MISUSE);
	CHECK(vpmu_x86_config(9, &config) == VPMU_STATUS_CONFIG);
	CHECK(vpmu_x86_config(2, &config) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_init(&pmu, &config, NULL) == VPMU_STATUS_MISUSE);
	config.general = 9;
	CHECK(vpmu_x86_init(&pmu, &config, &host) == VPMU_STATUS_CONFIG);
	config.general = 4;

	CHECK(vpmu_x86_init(&pmu, &config, &host) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_cpuid(&pmu, 0x0a, 0, &leaf) == VPMU_STATUS_OK);
	CHECK((leaf.eax & 0xffff) == 0x0402);
	CHECK(vpmu_x86_rdmsr(&pmu, 0x10, &value) == VPMU_OUTCOME_NOT_HANDLED);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x38f, 1ull << 40) == VPMU_OUTCOME_GENERAL_PROTECTION);

	/* What is to be intercepted, whatever the room. */
	CHECK(vpmu_x86_msrs(&pmu, NULL, 1, &length) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_x86_msrs(&pmu, NULL, 0, &length) == VPMU_STATUS_ROOM && length > 20);
	msrs[1] = 0;
	CHECK(vpmu_x86_msrs(&pmu, msrs, 1, &length) == VPMU_STATUS_ROOM && msrs[0] && !msrs[1]);
	CHECK(vpmu_x86_msrs(&pmu, msrs, 64, &length) == VPMU_STATUS_OK && length <= 64);
	for (size_t i = 0; i < length; i++)
		CHECK(vpmu_x86_rdmsr(&pmu, msrs[i], &value) != VPMU_OUTCOME_NOT_HANDLED);

	/* IA32_DEBUGCTL.BTF is the hypervisor's, which says so. */
	CHECK(vpmu_x86_wrmsr(&pmu, 0x1d9, 2) == VPMU_OUTCOME_GENERAL_PROTECTION);
	config.other_debugctl = 2;
	CHECK(vpmu_x86_init(&pmu, &config, &host) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x1d9, 2) == VPMU_OUTCOME_DONE);

	/* Out of reset IA32_PERF_GLOBAL_CTRL enables the general counters. */
	CHECK(vpmu_x86_wrmsr(&pmu, 0x38f, 0) == VPMU_OUTCOME_DONE);
	/* EN, INT, OS, USR, instructions; 1000 to go; global enable. */
	CHECK(vpmu_x86_wrmsr(&pmu, 0x186, 0x005300c0) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x4c1, (1ull << 48) - 1000) == VPMU_OUTCOME_DONE);
	CHECK(state.calls == 0);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x38f, 1) == VPMU_OUTCOME_DONE);
	CHECK(state.running == 1 && state.periods[0] == 1000);
	CHECK(state.events[0].number == 0xc0 && state.events[0].user && state.events[0].kernel);
	CHECK(vpmu_x86_counter_state(&pmu, 0) == VPMU_COUNTER_COUNTING);
	CHECK(vpmu_x86_counter_state(&pmu, 15) == VPMU_STATUS_MISUSE);

	state.totals[0] = 1000;
	CHECK(vpmu_x86_overflow(&pmu, 0, 7) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_x86_overflow(&pmu, 200, VPMU_REPORT_DUE) == VPMU_STATUS_MISUSE);
	CHECK(!vpmu_x86_take_pmi(&pmu));
	CHECK(vpmu_x86_overflow(&pmu, 0, VPMU_REPORT_DUE) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_take_pmi(&pmu));
	CHECK(!vpmu_x86_take_pmi(&pmu));
	CHECK(vpmu_x86_rdmsr(&pmu, 0x38e, &value) == VPMU_OUTCOME_VALUE && value == 1);
	CHECK(vpmu_x86_rdpmc(&pmu, 0, false, false, &value) == VPMU_OUTCOME_VALUE && value == 0);
	CHECK(vpmu_x86_rdpmc(&pmu, 0, true, false, &value) == VPMU_OUTCOME_GENERAL_PROTECTION);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x390, 1) == VPMU_OUTCOME_DONE);

	/* An event that this host lacks is lost, and said to be. */
	CHECK(vpmu_x86_wrmsr(&pmu, 0x187, 0x0053412e) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_x86_wrmsr(&pmu, 0x38f, 3) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_x86_counter_state(&pmu, 1) == VPMU_COUNTER_LOST);

	/* A snapshot goes on elsewhere; a damaged one does not. */
	state.calls = 0;
	CHECK(vpmu_x86_save(&pmu, NULL, sizeof(saved), &length) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_x86_save(&pmu, saved, sizeof(saved), NULL) == VPMU_STATUS_MISUSE);
	CHECK(state.calls == 0);
	CHECK(vpmu_x86_save(&pmu, saved, 3, &length) == VPMU_STATUS_ROOM);
	CHECK(vpmu_x86_save(&pmu, saved, sizeof(saved), &length) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_put(&pmu) == VPMU_STATUS_OK && state.running == 0);
	CHECK(vpmu_x86_init(&other, &config, &host) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_restore(&other, saved, length - 1) == VPMU_STATUS_STATE);
	CHECK(vpmu_x86_restore(&other, saved, length) == VPMU_STATUS_OK);
	CHECK(vpmu_x86_rdmsr(&other, 0x186, &value) == VPMU_OUTCOME_VALUE && value == 0x005300c0);
	CHECK(vpmu_x86_reset(&other) == VPMU_STATUS_OK && state.running == 0);
	CHECK(vpmu_x86_reset(&pmu) == VPMU_STATUS_OK);
	return amd(&state, &host, saved, length);
}
