/*
 * The engine where there is no C library: this program is linked with nothing but it. To be run
 * without a hypervisor it is a Linux program, whose two system calls are written out.
 */
#include "vpmu.h"

static uint64_t total;

static long system_call(long number, long a, long b, long c)
{
	long answer;

	__asm__ volatile("syscall"
			 : "=a"(answer)
			 : "a"(number), "D"(a), "S"(b), "d"(c)
			 : "rcx", "r11", "memory");
	return answer;
}

static int32_t create(void *context, uint8_t counter, const struct vpmu_event *event)
{
	(void)context, (void)counter, (void)event;
	total = 0;
	return VPMU_BACKED;
}

static void set_period(void *context, uint8_t counter, uint64_t events)
{
	(void)context, (void)counter, (void)events;
}

static void start_or_stop(void *context, uint32_t counters)
{
	(void)context, (void)counters;
}

static uint64_t read_total(void *context, uint8_t counter)
{
	(void)context, (void)counter;
	return total;
}

static void release(void *context, uint8_t counter)
{
	(void)context, (void)counter;
}

static int sample(void)
{
	static struct vpmu_x86 pmu;
	struct vpmu_host host = {
		.create = create,
		.set_period = set_period,
		.resume = start_or_stop,
		.pause = start_or_stop,
		.read = read_total,
		.release = release,
	};
	struct vpmu_x86_config config;

	if (vpmu_x86_config(2, &config) != VPMU_STATUS_OK ||
	    vpmu_x86_init(&pmu, &config, &host) != VPMU_STATUS_OK ||
	    vpmu_x86_wrmsr(&pmu, 0x186, 0x005300c0) != VPMU_OUTCOME_DONE ||
	    vpmu_x86_wrmsr(&pmu, 0x4c1, (1ull << 48) - 1000) != VPMU_OUTCOME_DONE ||
	    vpmu_x86_wrmsr(&pmu, 0x38f, 1) != VPMU_OUTCOME_DONE)
		return 1;
	total = 1000;
	if (vpmu_x86_overflow(&pmu, 0, VPMU_REPORT_UNSURE) != VPMU_STATUS_OK)
		return 2;
	return vpmu_x86_take_pmi(&pmu) ? 0 : 3;
}

__attribute__((force_align_arg_pointer, noreturn)) void _start(void)
{
	static const char done[] = "one PMI\n";
	int status = sample();

	if (status == 0)
		system_call(1, 1, (long)done, sizeof(done) - 1);
	for (;;)
		system_call(60, status, 0, 0);
}
