/*
 * vpmu: the PMUs of x86.
 *
 * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.
 */

#ifndef VPMU_X86_H
#define VPMU_X86_H

#include "vpmu_types.h"

/** Four counters at C001_0000H to C001_0007H. */
#define VPMU_AMD_LEGACY 0

/** Six counters at C001_0200H to C001_020BH: PerfCtrExtCore. The fewest exits for a sample. */
#define VPMU_AMD_CORE 1

/** The same, and global registers at C000_0300H to C000_0303H: PerfMonV2. */
#define VPMU_AMD_V2 2

/** What a guest finds of Intel's PMU (Intel SDM vol. 3B, section 20.2). */
struct vpmu_x86_config {
  /** The version of architectural performance monitoring: 2 to 5. */
  uint8_t version;
  /** General counters: 1 to 8. */
  uint8_t general;
  /** Their width in bits: 32 to 63. */
  uint8_t general_width;
  /** The width of fixed counters in bits: 32 to 63. */
  uint8_t fixed_width;
  /** Fixed counters, bit *n* for counter *n*. */
  uint32_t fixed;
  /** The architectural events that can be counted, in the order of CPUID.0AH:EBX, but 1: it can. */
  uint32_t events;
  /** Whether IA32_PERF_CAPABILITIES exists. */
  bool pdcm;
  /** Whether general counters can be written in full width. Needs `pdcm`. */
  bool full_width_writes;
  /** One of `VPMU_POLICY_*`. */
  uint32_t policy;
  /**
   * Bits of IA32_DEBUGCTL that the hypervisor implements, for instance BTF (bit 1): the PMU keeps them as written.
   * Others than its own and these are #GP.
   */
  uint64_t other_debugctl;
};

/** Room for one vCPU's x86 PMU, of either vendor. */
struct vpmu_x86 {
  uint64_t opaque[1024];
};

/**
 * One CPUID leaf. For leaves 1, 7 and 8000_0001H only the bits that concern the PMU: set those, and clear the
 * PMU's others (PDCM, DS, DTES64; PerfCtrExtCore, PerfCtrExtNB, PerfCtrExtLLC, IBS).
 */
struct vpmu_cpuid {
  /** EAX. */
  uint32_t eax;
  /** EBX. */
  uint32_t ebx;
  /** ECX. */
  uint32_t ecx;
  /** EDX. */
  uint32_t edx;
};

/** What a guest finds of AMD's PMU (AMD64 Architecture Programmer's Manual vol. 2, 13.2). */
struct vpmu_x86_amd_config {
  /** One of `VPMU_AMD_*`. */
  uint32_t interface;
  /**
   * Which of the events that mean the same everywhere can be counted, as in `struct vpmu_x86_config`, but 1: it
   * can. No register says so to the guest: a counter of another event is lost, and reads as zero.
   */
  uint32_t events;
  /** One of `VPMU_POLICY_*`. */
  uint32_t policy;
};

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Fills `config` with what most processors of this version have. `VPMU_STATUS_CONFIG`: the version
 * is not 2 to 5.
 */
enum vpmu_status vpmu_x86_config(uint8_t version, struct vpmu_x86_config *config);

/**
 * Makes Intel's PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: there is no such PMU, or
 * no such policy.
 *
 * The functions of `host` may be called with its context until the PMU is
 * used no more.
 */
enum vpmu_status vpmu_x86_init(struct vpmu_x86 *pmu,
                               const struct vpmu_x86_config *config,
                               const struct vpmu_host *host);

/**
 * What CPUID says of the PMU: Intel's in leaves 01H, 07H (subleaf 1), 0AH and 23H, AMD's in 8000_0001H and
 * 8000_0022H. Any other leaf is zero.
 */
enum vpmu_status vpmu_x86_cpuid(struct vpmu_x86 *pmu, uint32_t leaf, uint32_t subleaf, struct vpmu_cpuid *answer);

/**
 * The MSRs to intercept: their number to `count`, and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there
 * are more.
 */
enum vpmu_status vpmu_x86_msrs(struct vpmu_x86 *pmu,
                               uint32_t *msrs,
                               size_t room,
                               size_t *count);

/** Performs a guest's RDMSR. */
enum vpmu_outcome vpmu_x86_rdmsr(struct vpmu_x86 *pmu, uint32_t msr, uint64_t *value);

/** Performs a guest's WRMSR. */
enum vpmu_outcome vpmu_x86_wrmsr(struct vpmu_x86 *pmu, uint32_t msr, uint64_t value);

/**
 * Performs a guest's RDPMC with `index` in ECX. `user`: its CPL is not 0; `pce`: its CR4.PCE is
 * set.
 */
enum vpmu_outcome vpmu_x86_rdpmc(struct vpmu_x86 *pmu, uint32_t index, bool user, bool pce, uint64_t *value);

/**
 * The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
 * `vpmu_x86_take_pmi` next.
 */
enum vpmu_status vpmu_x86_overflow(struct vpmu_x86 *pmu, uint8_t counter, uint32_t what);

/**
 * Whether a PMI is due; it is not any more. Deliver what LVTPC says, and with Intel's PMU set its mask bit. Ask
 * after each other call, and before the vCPU runs.
 */
bool vpmu_x86_take_pmi(struct vpmu_x86 *pmu);

/** The vCPU starts to run: what the guest has enabled counts again. */
enum vpmu_status vpmu_x86_load(struct vpmu_x86 *pmu);

/** The vCPU stops running: nothing counts, and all that was counted is in the registers. */
enum vpmu_status vpmu_x86_put(struct vpmu_x86 *pmu);

/** The vCPU is reset. No host counter is left. */
enum vpmu_status vpmu_x86_reset(struct vpmu_x86 *pmu);

/**
 * A scheduling slice is over: host counters that the guest did not use in it are released. At any regular moment, for
 * instance each 100 ms.
 */
enum vpmu_status vpmu_x86_end_slice(struct vpmu_x86 *pmu);

/** One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist. */
int32_t vpmu_x86_counter_state(struct vpmu_x86 *pmu, uint8_t counter);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. Nothing stops: the PMU can go on.
 */
enum vpmu_status vpmu_x86_save(struct vpmu_x86 *pmu, uint8_t *buffer, size_t room, size_t *length);

/** Goes on from the `length` bytes at `buffer`, which a save has written. */
enum vpmu_status vpmu_x86_restore(struct vpmu_x86 *pmu, const uint8_t *buffer, size_t length);

/**
 * Makes AMD's PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: there is no such interface, or
 * no such policy.
 *
 * The functions of `host` may be called with its context until the PMU is
 * used no more.
 */
enum vpmu_status vpmu_x86_init_amd(struct vpmu_x86 *pmu,
                                   const struct vpmu_x86_amd_config *config,
                                   const struct vpmu_host *host);

#ifdef __cplusplus
}
#endif

#endif /* VPMU_X86_H */
