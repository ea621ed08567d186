/* What a process chooses for its guests, and what is said of it. No /dev/kvm. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "vpmu.h"

#define SKIPPED 77

static bool has(const uint32_t *msrs, size_t count, uint32_t msr)
{
	for (size_t i = 0; i < count; i++)
		if (msrs[i] == msr)
			return true;
	return false;
}

int main(void)
{
	static const struct vpmu_kvm_options wrong[] = {
		{.model = 4}, {.perfmon = 1}, {.perfmon = 6}, {.backing = 3},
	};
	struct vpmu_kvm_options options = {.model = VPMU_KVM_MODEL_INTEL, .perfmon = 2};
	static const unsigned char bytes[] = "no guest";
	uint32_t msrs[64];
	size_t count = 0;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
		CHECK(vpmu_kvm_choose(&wrong[i]) == VPMU_STATUS_MISUSE);
	CHECK(strstr(vpmu_kvm_seccomp_rules(), "perf_event_open"));
	CHECK(vpmu_kvm_counter_state(NULL, 0) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_kvm_backing(NULL) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_kvm_reset(NULL) == VPMU_STATUS_MISUSE);
	vpmu_kvm_overrun();

	options.saved = bytes;
	options.saved_length = sizeof(bytes);
	CHECK(vpmu_kvm_choose(&options) == VPMU_STATUS_STATE);
	CHECK(strstr(vpmu_kvm_error(), "no saved PMU"));

	options.saved = NULL;
	CHECK(vpmu_kvm_choose(&options) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_msrs(msrs, 64, NULL) == VPMU_STATUS_MISUSE);
	if (vpmu_kvm_msrs(msrs, 64, &count) == VPMU_STATUS_HOST) {
		fprintf(stderr, "skipped: %s\n", vpmu_kvm_error());
		return SKIPPED;
	}
	CHECK(has(msrs, count, 0x38f) && !has(msrs, count, 0xc0010200));
	CHECK(vpmu_kvm_choose(NULL) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_msrs(msrs, 1, &count) == VPMU_STATUS_ROOM && count > 10);
	return 0;
}
