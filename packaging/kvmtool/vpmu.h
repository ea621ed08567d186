/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef KVM__VPMU_H
#define KVM__VPMU_H

#include <linux/types.h>

struct kvm;
struct kvm_cpu;
struct kvm_cpuid2;

#ifdef CONFIG_HAS_VPMU
/* How many entries of CPUID vpmu__setup_cpuid() may add */
#define VPMU_CPUID_ENTRIES	6

/* Each of these does nothing where the guest has not been asked to have a PMU. */
void vpmu__open(struct kvm *kvm);
void vpmu__intercept(struct kvm *kvm);
void vpmu__attach(struct kvm_cpu *vcpu);
void vpmu__detach(struct kvm_cpu *vcpu);
void vpmu__setup_cpuid(struct kvm_cpu *vcpu, struct kvm_cpuid2 *cpuid, u32 room);
u64 vpmu__misc_enable(struct kvm_cpu *vcpu, u64 value);
#else
#define VPMU_CPUID_ENTRIES	0

static inline void vpmu__open(struct kvm *kvm) { }
static inline void vpmu__intercept(struct kvm *kvm) { }
static inline void vpmu__attach(struct kvm_cpu *vcpu) { }
static inline void vpmu__detach(struct kvm_cpu *vcpu) { }
static inline void vpmu__setup_cpuid(struct kvm_cpu *vcpu, struct kvm_cpuid2 *cpuid, u32 room) { }
static inline u64 vpmu__misc_enable(struct kvm_cpu *vcpu, u64 value) { return value; }
#endif

#endif /* KVM__VPMU_H */
