/* What careless callers do, each refused with a text. Runs a vCPU of no code where there is a /dev/kvm. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "check.h"
#include "vpmu.h"

#define SKIPPED 77

#define REFUSED(call, status, text) CHECK((call) == (status) && strstr(vpmu_kvm_error(), (text)))

static bool has(const uint32_t *msrs, size_t count, uint32_t msr)
{
	for (size_t i = 0; i < count; i++)
		if (msrs[i] == msr)
			return true;
	return false;
}

static unsigned char memory[0x10000] __attribute__((aligned(4096)));

static void *map(void *context, uint64_t address, size_t length)
{
	(void)context;
	if (address > sizeof(memory) || length > sizeof(memory) - address)
		return NULL;
	return memory + address;
}

static const struct vpmu_kvm_memory ram = {.map = map};

static int options(void)
{
	static const struct vpmu_kvm_options wrong[] = {
		{.model = 6},  {.perfmon = 1},	{.perfmon = 6},
		{.backing = 3}, {.policy = 3},	{.pebs = 4},
		{.pebs = 1 /* without Intel's model */},
		{.model = VPMU_KVM_MODEL_AMD, .perfmon = 2},
	};
	static const unsigned char bytes[] = "no guest";
	struct vpmu_kvm_options options;
	struct vpmu_kvm_vm *vm = NULL;
	char askew[sizeof(vm) + 8] __attribute__((aligned(8)));

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		options = wrong[i];
		REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_MISUSE, "size");
		options.size = sizeof(options);
		REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_MISUSE, "that there is not");
	}
	options = (struct vpmu_kvm_options){.size = sizeof(options), .signal = SIGUSR1};
	REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_HOST, "real-time signal");
	options.signal = 0;
	options.saved = bytes;
	options.saved_length = sizeof(bytes);
	REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_STATE, "no saved PMU");
	options.saved_length = SIZE_MAX;
	REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_STATE, "no saved PMU");
	options.saved = NULL;
	REFUSED(vpmu_kvm_open(NULL, NULL, &vm), VPMU_STATUS_MISUSE, "options");
	REFUSED(vpmu_kvm_open(&options, NULL, NULL), VPMU_STATUS_MISUSE, "options");
	REFUSED(vpmu_kvm_open(&options, NULL, (struct vpmu_kvm_vm **)(void *)(askew + 1)),
		VPMU_STATUS_MISUSE, "multiples of 8");
	options.model = VPMU_KVM_MODEL_NONE;
	options.deadline = true;
	REFUSED(vpmu_kvm_open(&options, NULL, &vm), VPMU_STATUS_MISUSE, "guest's memory");
	CHECK(vm == NULL && vpmu_kvm_close(NULL) == VPMU_STATUS_OK);
	return 0;
}

static void *error_at_the_end;

static void at_the_end(void *text)
{
	(void)text;
	/* A destructor of the thread's may be refused, and may ask why. */
	if (vpmu_kvm_before_run(NULL) == VPMU_STATUS_MISUSE && vpmu_kvm_error() &&
	    !vpmu_kvm_error_is_fatal())
		error_at_the_end = &error_at_the_end;
}

static void *ends(void *key)
{
	pthread_setspecific(*(pthread_key_t *)key, key);
	return NULL;
}

static int handles(void)
{
	struct vpmu_kvm *nobodys = (struct vpmu_kvm *)0x1234;
	struct vpmu_kvm_statistics statistics = {.size = 8};
	uint64_t value;
	uint32_t what;
	pthread_key_t key;
	pthread_t thread;

	REFUSED(vpmu_kvm_before_run(NULL), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_before_run(nobodys), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_after_run(nobodys, &what), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_after_run(nobodys, NULL), VPMU_STATUS_MISUSE, "place");
	REFUSED(vpmu_kvm_detach(nobodys), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_reset(nobodys), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_wake_deadline(nobodys), VPMU_STATUS_MISUSE, "handle");
	REFUSED(vpmu_kvm_kick_by_eventfd(nobodys, -1), VPMU_STATUS_MISUSE, "negative");
	REFUSED(vpmu_kvm_kick_by_eventfd(nobodys, 9999), VPMU_STATUS_MISUSE, "closed");
	REFUSED(vpmu_kvm_kick_by_signal(nobodys, 65), VPMU_STATUS_MISUSE, "1 to 64");
	REFUSED(vpmu_kvm_statistics(nobodys, &statistics), VPMU_STATUS_MISUSE, "size");
	REFUSED(vpmu_kvm_intercept(NULL, 0), VPMU_STATUS_MISUSE, "handle");
	CHECK(vpmu_kvm_get_msr(nobodys, 0x38f, &value) == VPMU_OUTCOME_MISUSE);
	CHECK(vpmu_kvm_set_msr(nobodys, 0x38f, 0) == VPMU_OUTCOME_MISUSE);
	CHECK(vpmu_kvm_counter_state(nobodys, 0) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_kvm_backing(nobodys) == VPMU_STATUS_MISUSE);
	CHECK(pthread_key_create(&key, at_the_end) == 0);
	CHECK(pthread_create(&thread, NULL, ends, &key) == 0 && pthread_join(thread, NULL) == 0);
	CHECK(error_at_the_end);
	return 0;
}

static void *serve(void *pmu)
{
	while (vpmu_kvm_serve_deadline(pmu) == VPMU_STATUS_OK)
		;
	return NULL;
}

static int with_kvm(struct vpmu_kvm_vm *offer)
{
	static const uint8_t denied[1];
	struct vpmu_kvm_filter_range own[17] = {{.flags = 3, .nmsrs = 1, .base = 0x35, .bitmap = denied}};
	unsigned char saved[VPMU_STATE_SIZE];
	struct vpmu_kvm_statistics statistics = {.size = sizeof(statistics)};
	struct vpmu_kvm *pmu = NULL, *stale;
	pthread_t server;
	uint64_t value = 0;
	size_t length;
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm, vcpu;

	vm = kvm < 0 ? -1 : ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm < 0) {
		fprintf(stderr, "skipped: /dev/kvm\n");
		return SKIPPED;
	}
	REFUSED(vpmu_kvm_intercept(offer, -1), VPMU_STATUS_HOST, "no VM's");
	REFUSED(vpmu_kvm_intercept(offer, kvm), VPMU_STATUS_HOST, "no VM's");
	REFUSED(vpmu_kvm_intercept(offer, STDERR_FILENO), VPMU_STATUS_HOST, "no VM's");
	REFUSED(vpmu_kvm_intercept_beside(offer, vm, 0, own, SIZE_MAX), VPMU_STATUS_MISUSE, "16");
	REFUSED(vpmu_kvm_intercept_beside(offer, vm, 0, NULL, 1), VPMU_STATUS_MISUSE, "16");
	own[0].nmsrs = UINT32_MAX;
	REFUSED(vpmu_kvm_intercept_beside(offer, vm, 0, own, 1), VPMU_STATUS_MISUSE, "bitmap");
	own[0].nmsrs = 1;
	if (vpmu_kvm_intercept_beside(offer, vm, 0, own, 1) != VPMU_STATUS_OK) {
		fprintf(stderr, "skipped: %s\n", vpmu_kvm_error());
		return SKIPPED;
	}
	CHECK(ioctl(vm, KVM_CREATE_IRQCHIP, 0) == 0);
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	CHECK(vcpu >= 0);
	REFUSED(vpmu_kvm_attach(offer, vm, vm, &pmu), VPMU_STATUS_HOST, "vCPU's descriptor");
	REFUSED(vpmu_kvm_attach(offer, vcpu, vcpu, &pmu), VPMU_STATUS_HOST, "no VM's");
	REFUSED(vpmu_kvm_attach(offer, vm, vcpu, NULL), VPMU_STATUS_MISUSE, "place");
	CHECK(vpmu_kvm_attach(offer, vm, vcpu, &pmu) == VPMU_STATUS_OK);

	/* A register of the VMM's choice, a state, and back. */
	CHECK(vpmu_kvm_set_msr(pmu, 0xc1, 0x123456789abc) == VPMU_OUTCOME_DONE);
	CHECK(vpmu_kvm_get_msr(pmu, 0xc1, &value) == VPMU_OUTCOME_VALUE && value == 0x123456789abc);
	CHECK(vpmu_kvm_get_msr(pmu, 0x10, &value) == VPMU_OUTCOME_NOT_HANDLED);
	CHECK(vpmu_kvm_set_msr(pmu, 0x38e, 1ull << 50) == VPMU_OUTCOME_GENERAL_PROTECTION);
	REFUSED(vpmu_kvm_save(pmu, NULL, SIZE_MAX, &length), VPMU_STATUS_MISUSE, "buffer");
	CHECK(vpmu_kvm_save(pmu, saved, 3, &length) == VPMU_STATUS_ROOM);
	CHECK(vpmu_kvm_save(pmu, saved, sizeof(saved), &length) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_reset(pmu) == VPMU_STATUS_OK);
	REFUSED(vpmu_kvm_restore(pmu, saved, length - 1), VPMU_STATUS_STATE, "no saved PMU");
	REFUSED(vpmu_kvm_restore(pmu, saved, SIZE_MAX), VPMU_STATUS_STATE, "no saved PMU");
	CHECK(vpmu_kvm_restore(pmu, saved, length) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_get_msr(pmu, 0x4c1, &value) == VPMU_OUTCOME_VALUE && value == 0x123456789abc);
	CHECK(vpmu_kvm_statistics(pmu, &statistics) == VPMU_STATUS_OK && statistics.msr_exits == 0);
	CHECK(vpmu_kvm_wake_deadline(pmu) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_serve_deadline(pmu) == VPMU_STATUS_OK);

	/* A handler that was replaced, as a VMM's own signal may. */
	signal(SIGRTMIN + 1, SIG_DFL);
	REFUSED(vpmu_kvm_before_run(pmu), VPMU_STATUS_HOST, "another real-time signal");

	/* A thread that waits for the deadline does not outlive its PMU. */
	stale = pmu;
	CHECK(pthread_create(&server, NULL, serve, pmu) == 0);
	usleep(20000);
	CHECK(vpmu_kvm_detach(pmu) == VPMU_STATUS_OK);
	CHECK(pthread_join(server, NULL) == 0);
	REFUSED(vpmu_kvm_before_run(stale), VPMU_STATUS_MISUSE, "given back");
	REFUSED(vpmu_kvm_detach(stale), VPMU_STATUS_MISUSE, "given back");
	close(vcpu);
	close(vm);
	close(kvm);
	return 0;
}

/* The places of RDPMC go with each vCPU, to a VM that is opened for them and to no other. */
static int with_rdpmc(struct vpmu_kvm_vm *with)
{
	struct vpmu_kvm_options options = {.size = sizeof(options), .model = VPMU_KVM_MODEL_INTEL, .perfmon = 2};
	unsigned char saved[VPMU_STATE_SIZE];
	struct vpmu_kvm_vm *without = NULL;
	struct vpmu_kvm *pmus[2];
	size_t length, plain, i;
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vms[2], vcpus[2];

	CHECK(vpmu_kvm_open(&options, &ram, &without) == VPMU_STATUS_OK);
	for (i = 0; i < 2; i++) {
		vms[i] = ioctl(kvm, KVM_CREATE_VM, 0);
		CHECK(vms[i] >= 0 && ioctl(vms[i], KVM_CREATE_IRQCHIP, 0) == 0);
		vcpus[i] = ioctl(vms[i], KVM_CREATE_VCPU, 0);
		CHECK(vpmu_kvm_attach(i ? without : with, vms[i], vcpus[i], &pmus[i]) == VPMU_STATUS_OK);
	}
	CHECK(vpmu_kvm_save(pmus[1], saved, sizeof(saved), &plain) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_restore(pmus[0], saved, plain) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_save(pmus[0], saved, sizeof(saved), &length) == VPMU_STATUS_OK && length > plain);
	CHECK(vpmu_kvm_restore(pmus[0], saved, length) == VPMU_STATUS_OK);
	REFUSED(vpmu_kvm_restore(pmus[1], saved, length), VPMU_STATUS_STATE, "opened with rdpmc");
	/* A stream that somebody has changed: refused, or another PMU's, and never more than that. */
	for (i = 0; i < 8 * length; i++) {
		saved[i / 8] ^= 1 << i % 8;
		CHECK(vpmu_kvm_restore(pmus[0], saved, length) != VPMU_STATUS_MISUSE);
		saved[i / 8] ^= 1 << i % 8;
	}
	CHECK(vpmu_kvm_restore(pmus[0], saved, length) == VPMU_STATUS_OK);
	for (i = 0; i < 2; i++) {
		CHECK(vpmu_kvm_detach(pmus[i]) == VPMU_STATUS_OK);
		close(vcpus[i]);
		close(vms[i]);
	}
	close(kvm);
	return vpmu_kvm_close(without) == VPMU_STATUS_OK ? 0 : 1;
}

int main(void)
{
	struct vpmu_kvm_options intel = {
		.size = sizeof(intel), .model = VPMU_KVM_MODEL_INTEL, .perfmon = 2, .deadline = true,
	};
	struct vpmu_kvm_cpuid_entry entries[8] = {{.function = 0}, {.function = 1}};
	struct vpmu_kvm_vm *vm = NULL;
	uint32_t msrs[64];
	uint64_t misc = 1;
	size_t count = 2;
	int status;

	CHECK(vpmu_version() >= 0x000100);
	CHECK(strstr(vpmu_kvm_seccomp_rules(), "perf_event_open"));
	CHECK(strstr(vpmu_kvm_seccomp_setup_rules(), "timerfd_create"));
	vpmu_kvm_overrun();
	status = options();
	if (status == 0)
		status = handles();
	if (status != 0)
		return status;
	status = vpmu_kvm_open(&intel, &ram, &vm);
	if (status == VPMU_STATUS_HOST) {
		fprintf(stderr, "skipped: %s\n", vpmu_kvm_error());
		return SKIPPED;
	}
	CHECK(status == VPMU_STATUS_OK);
	REFUSED(vpmu_kvm_cpuid(vm, entries, &count, SIZE_MAX, 1000000), VPMU_STATUS_MISUSE, "entries");
	REFUSED(vpmu_kvm_cpuid(vm, entries, &count, 1, 1000000), VPMU_STATUS_MISUSE, "room");
	CHECK(vpmu_kvm_cpuid(vm, entries, &count, 3, 1000000) == VPMU_STATUS_ROOM && count == 2);
	CHECK(vpmu_kvm_cpuid(vm, entries, &count, 8, 1000000) == VPMU_STATUS_OK && count > 3);
	CHECK(vpmu_kvm_misc_enable(vm, &misc) == VPMU_STATUS_OK && misc == 0x1801);
	CHECK(vpmu_kvm_msrs(vm, msrs, 64, NULL) == VPMU_STATUS_MISUSE);
	CHECK(vpmu_kvm_msrs(vm, msrs, 1, &count) == VPMU_STATUS_ROOM && count > 10);
	CHECK(vpmu_kvm_msrs(vm, msrs, 64, &count) == VPMU_STATUS_OK);
	CHECK(has(msrs, count, 0x38f) && has(msrs, count, 0x4b564d57) && !has(msrs, count, 0xc0010200));
	status = with_kvm(vm);
	CHECK(vpmu_kvm_close(vm) == VPMU_STATUS_OK && vpmu_kvm_close(vm) == VPMU_STATUS_MISUSE);
	intel.rdpmc = true;
	intel.deadline = false;
	REFUSED(vpmu_kvm_open(&intel, NULL, &vm), VPMU_STATUS_MISUSE, "RDPMC at run time");
	CHECK(vpmu_kvm_open(&intel, &ram, &vm) == VPMU_STATUS_OK);
	CHECK(vpmu_kvm_msrs(vm, msrs, 64, &count) == VPMU_STATUS_OK && has(msrs, count, 0x40000000));
	if (status == 0)
		status = with_rdpmc(vm);
	CHECK(vpmu_kvm_close(vm) == VPMU_STATUS_OK);
	return status;
}
