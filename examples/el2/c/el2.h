/* What the files of the hypervisor have of one another. */

#include "vpmu_el2.h"

#define READ(name)                                                        \
	({                                                                \
		uint64_t value_;                                          \
		__asm__ volatile("mrs %0, " #name : "=r"(value_));        \
		value_;                                                   \
	})
#define WRITE(name, value)                                                                          \
	do {                                                                                        \
		__asm__ volatile("msr " #name ", %0; isb" : : "r"((uint64_t)(value)) : "memory");   \
	} while (0)

/* The PMU's interrupt. */
#define PPI 23
#ifdef EMULATED
#define IS_WIRED false
#else
#define IS_WIRED true
#endif

void pmu_init(void);
void pmu_exited(void);
bool pmu_access(uint64_t esr, const struct vpmu_el2_vcpu *vcpu);
bool pmu_interrupt(void);
void pmu_statistics(uint64_t *exits, uint64_t *pmis);

void gic_init(void);
void gic_interrupts(void);
void gic_set_level(bool level);
