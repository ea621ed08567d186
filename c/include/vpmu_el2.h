/*
 * vpmu: what every hypervisor at EL2 of Arm needs around a PMU.
 *
 * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.
 */

#ifndef VPMU_EL2_H
#define VPMU_EL2_H

#include "vpmu_arm.h"

/** The registers of a vCPU that has left its guest. */
struct vpmu_el2_vcpu {
  /** X0 to X30. */
  uint64_t *x;
  /** Where the guest goes on: ELR_EL2. */
  uint64_t *pc;
  /** The state in which it goes on: SPSR_EL2. */
  uint64_t *pstate;
};

#ifdef __cplusplus
extern "C" {
#endif

/** Fills `registers` with functions that access the registers of the CPU that executes them. */
enum vpmu_status vpmu_el2_registers(struct vpmu_registers *registers);

/**
 * Fills `config` with what this CPU has: `host_counters` of its counters are to be the host's, nothing of its isolation is
 * proven, and all events are allowed. `cpus` are the affinities (MPIDR_EL1) of the `count` CPUs of the machine.
 * `VPMU_STATUS_CONFIG`: there is no PMUv3.
 */
enum vpmu_status vpmu_el2_config(struct vpmu_partition_config *config,
                                 uint8_t host_counters,
                                 const uint64_t *cpus,
                                 size_t count);

/**
 * Attacks the PMU of this CPU from EL1, EL0 and AArch32, and sets `config->isolation` to what it keeps. Before a guest runs
 * here, on each CPU: it also stops all counters. MDCR_EL2, HDFGRTR_EL2 and HDFGWTR_EL2 are to be written afterwards, the
 * hypervisor's own bits included.
 */
enum vpmu_status vpmu_el2_probe(struct vpmu_partition_config *config);

/** Fills `told` with the emulated PMU that is this CPU's own, for `vpmu_backed_init`: the fewest accesses of such a PMU trap. */
enum vpmu_status vpmu_el2_backed_config(struct vpmu_arm_config *told,
                                        const struct vpmu_partition_config *cpu);

/** Writes MDCR_EL2 and, where they exist, HDFGRTR_EL2 and HDFGWTR_EL2: what the PMU wants, and the hypervisor's own bits. */
enum vpmu_status vpmu_el2_set_traps(const struct vpmu_traps *pmu,
                                    const struct vpmu_traps *own);

/** Gives the guest a synchronous exception with this ESR_EL1, as the processor would. */
enum vpmu_status vpmu_el2_inject(uint64_t esr, const struct vpmu_el2_vcpu *vcpu);

/**
 * Serves a trapped access of the partitioned PMU with this ESR_EL2 in full, in AArch64 or AArch32: the guest goes on behind
 * it, or with an exception. `false`: it is no access of a PMU register, and nothing has changed.
 */
bool vpmu_el2_partition_exit(struct vpmu_partition *pmu,
                             uint64_t esr,
                             const struct vpmu_el2_vcpu *vcpu);

/**
 * Serves a trapped access of the PMU that is emulated on the counters of the CPU, as `vpmu_el2_partition_exit` does. The
 * level of the interrupt may have changed.
 */
bool vpmu_el2_backed_exit(struct vpmu_backed *pmu,
                          uint64_t esr,
                          const struct vpmu_el2_vcpu *vcpu);

#ifdef __cplusplus
}
#endif

#endif /* VPMU_EL2_H */
