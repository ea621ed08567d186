/*
 * What this host's KVM and perf take for a PMU in user space: ns of one call each.
 *
 *   cc -O2 -static -o kvm-cost kvm-cost.c && ./kvm-cost
 *
 * Needs /dev/kvm, and perf_event_paranoid of -1 or CAP_PERFMON. On a machine whose instructions are counted, a ns is an
 * instruction (docs/figures/kvm-cost.md).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/perf_event.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TIMES 200
#define MSR 0x4b564dff /* Nobody's. */

static int vm, vcpu, event;
static struct kvm_run *run;
static uint8_t *memory;

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int call(int fd, unsigned long request, unsigned long argument)
{
	int result = ioctl(fd, request, argument);

	if (result < 0) {
		perror("kvm-cost: ioctl");
		exit(1);
	}
	return result;
}

static void guest(const uint8_t *code, size_t size)
{
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2, .rcx = MSR };

	memcpy(memory, code, size);
	call(vcpu, KVM_SET_REGS, (unsigned long)&regs);
}

static void enter(void)
{
	if (ioctl(vcpu, KVM_RUN, 0) < 0 || (run->exit_reason != KVM_EXIT_X86_RDMSR && run->exit_reason != KVM_EXIT_IO)) {
		fprintf(stderr, "kvm-cost: KVM_RUN ended with %u\n", run->exit_reason);
		exit(1);
	}
	run->msr.error = 0;
}

static void lapic(void)
{
	static struct kvm_lapic_state state;

	call(vcpu, KVM_GET_LAPIC, (unsigned long)&state);
}

/* LVTPC of a guest with an x2APIC. */
static void lvtpc(void)
{
	struct {
		struct kvm_msrs head;
		struct kvm_msr_entry entry;
	} msrs = { .head.nmsrs = 1, .entry.index = 0x834 };

	call(vcpu, KVM_GET_MSRS, (unsigned long)&msrs);
}

/* Kept until the guest's handler ends, so that one of many is delivered. */
static void nmi(void)
{
	call(vcpu, KVM_NMI, 0);
}

static void nmi_message(void)
{
	struct kvm_msi message = { .address_lo = 0xfee00000, .data = 0x400 };

	call(vm, KVM_SIGNAL_MSI, (unsigned long)&message);
}

static void set_period(void)
{
	uint64_t period = 1ull << 40;

	call(event, PERF_EVENT_IOC_PERIOD, (unsigned long)&period);
}

static void read_event(void)
{
	uint64_t words[3];

	if (read(event, words, sizeof(words)) != sizeof(words))
		exit(1);
}

static void pause_and_go_on(void)
{
	call(event, PERF_EVENT_IOC_DISABLE, 0);
	call(event, PERF_EVENT_IOC_ENABLE, 0);
}

static void on_signal(int signal)
{
	(void)signal;
}

static void signalled(void)
{
	syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1);
}

static void nothing(void)
{
	syscall(SYS_getppid);
}

static uint64_t time_of(const char *name, void (*body)(void), unsigned int each)
{
	uint64_t begun;
	int i;

	/* What is done once for all is over. */
	for (i = 0; i < 8; i++)
		body();
	begun = now();
	for (i = 0; i < TIMES; i++)
		body();
	begun = (now() - begun) / TIMES / each;
	if (name)
		printf("%-52s %6llu\n", name, (unsigned long long)begun);
	return begun;
}

int main(void)
{
	/* rdmsr; jmp: with ECX a register of nobody's. */
	static const uint8_t of_msr[] = { 0x0f, 0x32, 0xeb, 0xfc };
	/* Ten times cpuid, then a port. */
	static const uint8_t of_cpuid[] = {
		0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2,
		0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2, 0x0f, 0xa2,
		0xe6, 0x80, 0xeb, 0xe8,
	};
	static const uint8_t of_port[] = { 0xe6, 0x80, 0xeb, 0xfc };
	struct perf_event_attr attr = {
		.type = PERF_TYPE_HARDWARE, .size = sizeof(attr), .config = PERF_COUNT_HW_CPU_CYCLES,
		.sample_period = 1ull << 40, .exclude_host = 1, .exclude_hv = 1, .disabled = 1,
		.read_format = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING,
	};
	struct kvm_enable_cap cap = { .cap = KVM_CAP_X86_USER_SPACE_MSR, .args = { KVM_MSR_EXIT_REASON_UNKNOWN } };
	struct kvm_userspace_memory_region region = { .guest_phys_addr = 0x1000, .memory_size = 0x1000 };
	struct kvm_sregs sregs;
	const char *backing = "hardware";
	uint64_t port, with_cpuid;
	int kvm = open("/dev/kvm", O_RDWR);

	if (kvm < 0) {
		perror("kvm-cost: /dev/kvm");
		return 1;
	}
	vm = call(kvm, KVM_CREATE_VM, 0);
	call(vm, KVM_ENABLE_CAP, (unsigned long)&cap);
	call(vm, KVM_CREATE_IRQCHIP, 0);
	memory = mmap(NULL, 0x1000, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	region.userspace_addr = (uintptr_t)memory;
	call(vm, KVM_SET_USER_MEMORY_REGION, (unsigned long)&region);
	vcpu = call(vm, KVM_CREATE_VCPU, 0);
	run = mmap(NULL, call(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	call(vcpu, KVM_GET_SREGS, (unsigned long)&sregs);
	sregs.cs.base = sregs.cs.selector = 0;
	call(vcpu, KVM_SET_SREGS, (unsigned long)&sregs);
	signal(SIGUSR1, on_signal);

	time_of("a system call that does nothing", nothing, 1);
	time_of("a signal to this thread, its handler, and its end", signalled, 1);
	guest(of_port, sizeof(of_port));
	port = time_of("an exit for a port, and back", enter, 1);
	guest(of_cpuid, sizeof(of_cpuid));
	with_cpuid = time_of(NULL, enter, 1);
	printf("%-52s %6llu\n", "an exit that KVM handles (CPUID)", (unsigned long long)(with_cpuid - port) / 10);
	guest(of_msr, sizeof(of_msr));
	time_of("an exit for RDMSR, and back", enter, 1);
	run->kvm_valid_regs = KVM_SYNC_X86_REGS;
	time_of("the same with the general registers", enter, 1);
	time_of("KVM_GET_LAPIC", lapic, 1);
	time_of("KVM_GET_MSRS of LVTPC", lvtpc, 1);

	event = syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
	if (event < 0) {
		attr.type = PERF_TYPE_SOFTWARE;
		attr.config = PERF_COUNT_SW_TASK_CLOCK;
		attr.exclude_host = 0;
		backing = "clock";
		event = syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
	}
	if (event < 0) {
		perror("kvm-cost: perf_event_open");
		return 1;
	}
	call(event, PERF_EVENT_IOC_ENABLE, 0);
	printf("while a host event counts the guest (%s):\n", backing);
	time_of("an exit for RDMSR with the registers, and back", enter, 1);
	time_of("read of the event", read_event, 1);
	time_of("PERF_EVENT_IOC_PERIOD", set_period, 1);
	time_of("PERF_EVENT_IOC_DISABLE and ENABLE", pause_and_go_on, 1);
	/* Last: the guest has no handler. */
	time_of("KVM_NMI", nmi, 1);
	time_of("KVM_SIGNAL_MSI of an NMI", nmi_message, 1);
	return 0;
}
