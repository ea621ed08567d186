/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The PMU of x86 guests: vpmu (libvpmu) counts by perf events, and KVM's own PMU is off. */
#include "kvm/vpmu.h"

#include "kvm/kvm.h"
#include "kvm/kvm-cpu.h"
#include "kvm/util.h"

#include <linux/kvm.h>

#include <signal.h>
#include <sys/ioctl.h>

#include <vpmu.h>

/* SIGRTMIN + 0 to 2 are kvmtool's (kvm/kvm.h), and SIGRTMIN + 1 is vpmu's default. */
#define SIGKVMPMU	(SIGRTMIN + 3)

/* Where the guest's RAM is, see kvm__init_ram() */
static void *vpmu__map(void *context, uint64_t address, size_t length)
{
	struct kvm *kvm = context;
	u64 end = address + length;
	u64 low_end = min(kvm->ram_size, (u64)KVM_32BIT_GAP_START);

	if (end < address)
		return NULL;
	if (end <= low_end || (address >= KVM_32BIT_MAX_MEM_SIZE && end <= kvm->ram_size))
		return kvm->ram_start + address;
	return NULL;
}

void vpmu__open(struct kvm *kvm)
{
	struct vpmu_kvm_options options = {
		.size	= sizeof(options),
		.signal	= SIGKVMPMU,
		.rdpmc	= true,
	};
	struct vpmu_kvm_memory memory = {
		.context	= kvm,
		.map		= vpmu__map,
	};

	if (!kvm->cfg.arch.pmu)
		return;
	if (vpmu_kvm_open(&options, &memory, &kvm->arch.vpmu) != VPMU_STATUS_OK)
		die("--pmu: %s", vpmu_kvm_error());
}

void vpmu__intercept(struct kvm *kvm)
{
	if (kvm->arch.vpmu && vpmu_kvm_intercept(kvm->arch.vpmu, kvm->vm_fd) != VPMU_STATUS_OK)
		die("--pmu: %s", vpmu_kvm_error());
}

void vpmu__attach(struct kvm_cpu *vcpu)
{
	struct kvm *kvm = vcpu->kvm;

	if (kvm->arch.vpmu &&
	    vpmu_kvm_attach(kvm->arch.vpmu, kvm->vm_fd, vcpu->vcpu_fd, &vcpu->vpmu) != VPMU_STATUS_OK)
		die("--pmu: vCPU %lu: %s", vcpu->cpu_id, vpmu_kvm_error());
}

void vpmu__detach(struct kvm_cpu *vcpu)
{
	vpmu_kvm_detach(vcpu->vpmu);
	vcpu->vpmu = NULL;
}

void vpmu__setup_cpuid(struct kvm_cpu *vcpu, struct kvm_cpuid2 *cpuid, u32 room)
{
	size_t count = cpuid->nent;
	int tsc_khz;

	if (!vcpu->kvm->arch.vpmu)
		return;

	_Static_assert(sizeof(struct vpmu_kvm_cpuid_entry) == sizeof(struct kvm_cpuid_entry2),
		       "CPUID entries are laid out as KVM's");
	tsc_khz = ioctl(vcpu->vcpu_fd, KVM_GET_TSC_KHZ, 0);
	if (tsc_khz < 0)
		die_perror("KVM_GET_TSC_KHZ failed");
	if (vpmu_kvm_cpuid(vcpu->kvm->arch.vpmu, (struct vpmu_kvm_cpuid_entry *)cpuid->entries,
			   &count, room, tsc_khz) != VPMU_STATUS_OK)
		die("--pmu: %s", vpmu_kvm_error());
	cpuid->nent = count;
}

u64 vpmu__misc_enable(struct kvm_cpu *vcpu, u64 value)
{
	uint64_t changed = value;

	if (vcpu->kvm->arch.vpmu &&
	    vpmu_kvm_misc_enable(vcpu->kvm->arch.vpmu, &changed) != VPMU_STATUS_OK)
		die("--pmu: %s", vpmu_kvm_error());
	return changed;
}

void kvm_cpu__arch_before_run(struct kvm_cpu *vcpu)
{
	if (vcpu->vpmu && vpmu_kvm_before_run(vcpu->vpmu) != VPMU_STATUS_OK)
		die("--pmu: vCPU %lu: %s", vcpu->cpu_id, vpmu_kvm_error());
}

bool kvm_cpu__arch_after_run(struct kvm_cpu *vcpu)
{
	uint32_t what = VPMU_KVM_YOURS;

	if (vcpu->vpmu && vpmu_kvm_after_run(vcpu->vpmu, &what) != VPMU_STATUS_OK)
		die("--pmu: vCPU %lu: %s", vcpu->cpu_id, vpmu_kvm_error());
	return what == VPMU_KVM_YOURS;
}

static int vpmu__close(struct kvm *kvm)
{
	vpmu_kvm_close(kvm->arch.vpmu);
	kvm->arch.vpmu = NULL;
	return 0;
}
dev_base_exit(vpmu__close);
