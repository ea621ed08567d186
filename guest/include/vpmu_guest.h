/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What vpmu's guest modules share: how a host says what it offers, and what
 * kernels of different age call the same thing.
 */
#ifndef VPMU_GUEST_H
#define VPMU_GUEST_H

#include <linux/bits.h>
#include <linux/kprobes.h>
#include <linux/string.h>
#include <linux/types.h>

#include <asm/cpufeature.h>
#include <asm/msr.h>
#include <asm/processor.h>

/* Linux 6.15 moved CPUID's accessors here, and 7.3 does not include it from processor.h. */
#if __has_include(<asm/cpuid/api.h>)
#include <asm/cpuid/api.h>
#endif

/* Linux 6.16 renamed the 64-bit accessors, 7.1 has only the new names. */
#ifndef HAVE_rdmsrq
#define rdmsrq		rdmsrl
#define wrmsrq		wrmsrl
#define wrmsrq_safe	wrmsrl_safe
#endif

/* The leaf that names the host, and the one with a bit for each offer. */
#define VPMU_CPUID_SIGNATURE	0x40000100
#define VPMU_CPUID_FEATURES	0x40000101
#define VPMU_FEATURE_DEADLINE	BIT(0)
#define VPMU_FEATURE_PMU	BIT(1)

/* What a vpmu host offers, as VPMU_FEATURE_* bits; 0 on any other machine. */
static inline u32 vpmu_host_features(void)
{
	u32 eax, signature[3];

	if (!boot_cpu_has(X86_FEATURE_HYPERVISOR))
		return 0;
	cpuid(VPMU_CPUID_SIGNATURE, &eax, &signature[0], &signature[1],
	      &signature[2]);
	if (memcmp(signature, "vpmuvpmuvpmu", sizeof(signature)) ||
	    eax < VPMU_CPUID_FEATURES)
		return 0;
	return cpuid_eax(VPMU_CPUID_FEATURES);
}

/*
 * The address of a function that is not exported: a kprobe without a handler,
 * gone again at once, has looked it up. NULL where there is no such function or
 * kprobes are not permitted. To be called through a static call: kernels with
 * indirect branch tracking take the ENDBR away from functions that nobody calls
 * through a pointer.
 */
static inline void *vpmu_find_function(const char *name)
{
	struct kprobe probe = { .symbol_name = name };

	if (register_kprobe(&probe))
		return NULL;
	unregister_kprobe(&probe);
	return probe.addr;
}

#endif
