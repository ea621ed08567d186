/*
 * A VMM in C whose guest, in real mode, samples its cycles: a PMI every million, taken as an NMI. The guest knows
 * Intel's registers only, so that it is given Intel's PMU on any host.
 * Exits with 77 where this machine cannot run it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "vpmu.h"

#define SKIPPED 77
#define WANTED 3
#define SIZE 0x10000

/* The guest is loaded at 0x1000. Its NMI vector is at 8, that of #GP at 52. */
__asm__(".pushsection .rodata\n"
	".code16\n"
	"guest:\n"
	"	xorw %ax, %ax\n"
	"	movw %ax, %ds\n"
	"	movw %ax, %ss\n"
	"	movw $0x1000, %sp\n"
	"	movw $(handler - guest + 0x1000), 8\n"
	"	movw %ax, 10\n"
	"	movw $(fault - guest + 0x1000), 52\n"
	"	movw %ax, 54\n"
	"	movl $0x1b, %ecx\n" /* IA32_APIC_BASE: x2APIC */
	"	rdmsr\n"
	"	orl $0xc00, %eax\n"
	"	wrmsr\n"
	"	xorl %edx, %edx\n"
	"	movl $0x80f, %ecx\n" /* the APIC on */
	"	movl $0x1ff, %eax\n"
	"	wrmsr\n"
	"	movl $0x834, %ecx\n" /* LVTPC: an NMI */
	"	movl $0x400, %eax\n"
	"	wrmsr\n"
	"	movl $0x38f, %ecx\n" /* IA32_PERF_GLOBAL_CTRL: nothing yet */
	"	xorl %eax, %eax\n"
	"	wrmsr\n"
	"	movl $0x186, %ecx\n" /* IA32_PERFEVTSEL0: EN, INT, OS, USR, core cycles */
	"	movl $0x53003c, %eax\n"
	"	wrmsr\n"
	"	call reload\n"
	"	movl $0x38f, %ecx\n"
	"	movl $1, %eax\n"
	"	wrmsr\n"
	"spin:	jmp spin\n"
	"reload:\n"
	"	movl $0xc1, %ecx\n" /* IA32_PMC0: sign-extended from bit 31 */
	"	movl $-1000000, %eax\n"
	"	xorl %edx, %edx\n"
	"	wrmsr\n"
	"	ret\n"
	"handler:\n"
	"	movl $0x38e, %ecx\n" /* IA32_PERF_GLOBAL_STATUS */
	"	rdmsr\n"
	"	outl %eax, $0x10\n"
	"	movl $0x390, %ecx\n" /* IA32_PERF_GLOBAL_OVF_CTRL */
	"	xorl %edx, %edx\n"
	"	wrmsr\n"
	"	call reload\n"
	"	iretw\n"
	"fault:	outl %eax, $0x11\n"
	"guest_end:\n"
	".code64\n"
	".popsection\n");
extern const char guest[], guest_end[];

static int failed(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	return 1;
}

static int refused(const char *what)
{
	fprintf(stderr, "skipped: %s: %s\n", what, vpmu_kvm_error());
	return SKIPPED;
}

static int tell(const struct vpmu_kvm_vm *offer, int kvm, int vcpu)
{
	struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[256];
	} cpuid = {.head = {.nent = 240}};
	size_t count;
	int khz = ioctl(vcpu, KVM_GET_TSC_KHZ, 0);

	if (khz < 0)
		return failed("KVM_GET_TSC_KHZ");
	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) < 0)
		return failed("KVM_GET_SUPPORTED_CPUID");
	count = cpuid.head.nent;
	_Static_assert(sizeof(struct vpmu_kvm_cpuid_entry) == sizeof(struct kvm_cpuid_entry2), "");
	if (vpmu_kvm_cpuid(offer, (struct vpmu_kvm_cpuid_entry *)cpuid.entries, &count, 256,
			   khz) != VPMU_STATUS_OK)
		return refused("vpmu_kvm_cpuid");
	cpuid.head.nent = count;
	return ioctl(vcpu, KVM_SET_CPUID2, &cpuid) < 0 ? failed("KVM_SET_CPUID2") : 0;
}

static int start(int vcpu)
{
	struct kvm_sregs sregs;
	struct kvm_regs regs = {.rip = 0x1000, .rflags = 2};

	if (ioctl(vcpu, KVM_GET_SREGS, &sregs) < 0)
		return failed("KVM_GET_SREGS");
	sregs.cs.base = 0;
	sregs.cs.selector = 0;
	if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0 || ioctl(vcpu, KVM_SET_REGS, &regs) < 0)
		return failed("KVM_SET_REGS");
	return 0;
}

static int run(int vcpu, volatile struct kvm_run *shared, struct vpmu_kvm *pmu)
{
	int pmis = 0;

	while (pmis < WANTED) {
		uint32_t what = VPMU_KVM_YOURS;
		int ended;

		if (vpmu_kvm_before_run(pmu) != VPMU_STATUS_OK)
			return refused("vpmu_kvm_before_run");
		ended = ioctl(vcpu, KVM_RUN, 0);
		if (ended < 0 && errno != EINTR)
			return failed("KVM_RUN");
		if (vpmu_kvm_after_run(pmu, &what) != VPMU_STATUS_OK) {
			fprintf(stderr, "vpmu_kvm_after_run: %s\n", vpmu_kvm_error());
			return 1;
		}
		if (what != VPMU_KVM_YOURS)
			continue;
		if (ended < 0) {
			shared->immediate_exit = 0;
			continue;
		}
		if (shared->exit_reason == KVM_EXIT_IO && shared->io.port == 0x11) {
			fprintf(stderr, "the guest's access to an MSR has faulted\n");
			return 1;
		}
		if (shared->exit_reason != KVM_EXIT_IO || shared->io.port != 0x10) {
			fprintf(stderr, "exit %u\n", shared->exit_reason);
			return 1;
		}
		if (*((volatile uint32_t *)((volatile char *)shared + shared->io.data_offset)) != 1) {
			fprintf(stderr, "a PMI without the overflow of counter 0\n");
			return 1;
		}
		pmis++;
	}
	printf("%d PMIs\n", pmis);
	return 0;
}

int main(void)
{
	struct kvm_userspace_memory_region region = {.memory_size = SIZE};
	struct vpmu_kvm_options intel = {.size = sizeof(intel), .model = VPMU_KVM_MODEL_INTEL};
	unsigned char saved[VPMU_STATE_SIZE];
	struct vpmu_kvm_vm *offer = NULL;
	struct vpmu_kvm *pmu = NULL;
	size_t length = 0;
	int kvm, vm, vcpu, status;
	char *memory;
	void *shared;

	if (vpmu_kvm_open(&intel, NULL, &offer) != VPMU_STATUS_OK)
		return refused("vpmu_kvm_open");
	kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (kvm < 0) {
		fprintf(stderr, "skipped: /dev/kvm: %s\n", strerror(errno));
		return SKIPPED;
	}
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	if (vm < 0)
		return failed("KVM_CREATE_VM");
	if (vpmu_kvm_intercept(offer, vm) != VPMU_STATUS_OK)
		return refused("vpmu_kvm_intercept");
	if (ioctl(vm, KVM_CREATE_IRQCHIP, 0) < 0)
		return failed("KVM_CREATE_IRQCHIP");
	memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	region.userspace_addr = (uintptr_t)memory;
	if (memory == MAP_FAILED || ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) < 0)
		return failed("the guest's memory");
	memcpy(memory + 0x1000, guest, guest_end - guest);
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	if (vcpu < 0)
		return failed("KVM_CREATE_VCPU");
	shared = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED,
		      vcpu, 0);
	if (shared == MAP_FAILED)
		return failed("kvm_run");
	status = tell(offer, kvm, vcpu);
	if (status == 0)
		status = start(vcpu);
	if (status != 0)
		return status;
	if (vpmu_kvm_attach(offer, vm, vcpu, &pmu) != VPMU_STATUS_OK)
		return refused("vpmu_kvm_attach");
	status = run(vcpu, shared, pmu);
	if (status == 0 && (vpmu_kvm_save(pmu, saved, sizeof(saved), &length) != VPMU_STATUS_OK ||
			    vpmu_kvm_restore(pmu, saved, length - 1) != VPMU_STATUS_STATE ||
			    vpmu_kvm_restore(pmu, saved, length) != VPMU_STATUS_OK)) {
		fprintf(stderr, "save and restore: %s\n", vpmu_kvm_error());
		status = 1;
	}
	vpmu_kvm_detach(pmu);
	vpmu_kvm_close(offer);
	return status;
}
