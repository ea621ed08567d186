/*
 * vpmu: the PMUs of Arm. The order of calls at EL2 is in docs/embed/embedding-el2.md.
 *
 * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.
 */

#ifndef VPMU_ARM_H
#define VPMU_ARM_H

#include "vpmu_types.h"

/** How many rules a `struct vpmu_arm_filter` has. */
#define VPMU_ARM_RULES 16

/**
 * `isolation`: MDCR_EL2.HPMN divides the counters. Nothing below EL2 sees or changes those of the host. Matters only where
 * the host keeps counters: without this bit each access of the guest traps then.
 */
#define VPMU_ISOLATES_PARTITION 1

/**
 * `isolation`: MDCR_EL2.HPMD keeps event counters from counting at EL2. Without this bit, and before PMUv3p1,
 * `vpmu_partition_exited` reads a register for each counter.
 */
#define VPMU_ISOLATES_HPMD 2

/**
 * `isolation`: MDCR_EL2.HCCD keeps the cycle counter from counting at EL2. Without this bit, and before PMUv3p5,
 * `vpmu_partition_exited` reads a register.
 */
#define VPMU_ISOLATES_HCCD 4

/** Room for one vCPU's emulated Arm PMU. */
struct vpmu_arm {
  uint64_t opaque[512];
};

/** A verdict on the events from `first` to `last`. */
struct vpmu_arm_rule {
  /** The first of the events. */
  uint16_t first;
  /** The last of them. */
  uint16_t last;
  /** Whether the guest may count them. */
  bool allow;
};

/**
 * Which events a guest may count: of the rules that name an event the last one decides. A denied event counts nothing,
 * and PMCEID0/1_EL0 do not list it. Event 0x11 stands for the cycle counter, too. All zero: a guest may count all.
 */
struct vpmu_arm_filter {
  /** An event that no rule names is denied. */
  bool deny;
  /** How many rules there are. */
  uint8_t count;
  /** The rules. */
  struct vpmu_arm_rule rules[VPMU_ARM_RULES];
};

/** What a guest finds of its PMUv3 (Arm ARM DDI 0487, chapter D13). */
struct vpmu_arm_config {
  /** The guest's ID_AA64DFR0_EL1, of which PMUVer is used. */
  uint64_t id_aa64dfr0;
  /** Event counters, 0 to 31. The cycle counter comes on top. */
  uint8_t counters;
  /** Whether the guest's ID_AA64PFR0_EL1 says that EL3 exists. */
  bool el3;
  /** Whether the guest's ID_AA64PFR0_EL1 says that EL0 may use AArch32. Without it PMCR_EL0.LC is RES1. */
  bool aarch32;
  /** PMCR_EL0.IMP. */
  uint8_t implementer;
  /** PMCR_EL0.IDCODE. */
  uint8_t idcode;
  /** PMCEID0_EL0 and PMCEID1_EL0: the common events that the host can count. */
  uint64_t pmceid[2];
  /** PMMIR_EL1, seen from PMUv3p4 on. */
  uint64_t pmmir;
  /** One of `VPMU_POLICY_*`. */
  uint32_t policy;
  /** Which events the guest may count. */
  struct vpmu_arm_filter filter;
};

/** Room for one vCPU's partitioned PMU. */
struct vpmu_partition {
  uint64_t mark;
  /** Whether `vpmu_partition_exited` has something to do at the next exit. To be read only. */
  uint64_t acts_at_exit;
  uint64_t opaque[254];
};

/** What the plan is made from, one for each physical CPU. */
struct vpmu_partition_config {
  /** ID_AA64DFR0_EL1 of the CPU. */
  uint64_t id_aa64dfr0;
  /** ID_AA64MMFR0_EL1 of the CPU. */
  uint64_t id_aa64mmfr0;
  /** PMCEID0_EL0 and PMCEID1_EL0 of the CPU. */
  uint64_t pmceid[2];
  /** How many event counters the CPU has: PMCR_EL0.N as EL2 reads it. */
  uint8_t implemented;
  /** How many of them the host keeps, counted from the top. */
  uint8_t host_counters;
  /** Bits `VPMU_ISOLATES_*`: what a probe has found this CPU to keep. 0 is always safe, and costs more. */
  uint32_t isolation;
  /**
   * Whether another CPU has the affinity of this one (MPIDR_EL1) from level 1 up, so that the two
   * are threads of a core. `true` is always safe, and traps more.
   */
  bool shares_core;
  /** Which events the guest may count. */
  struct vpmu_arm_filter filter;
};

/**
 * The registers of the CPU that executes this, at EL2. `write` has an ISB behind it.
 *
 * Registers are named by the ISS of their own access: op0, op2, op1, CRn and CRm at their places,
 * Rt and the direction zero (`VPMU_REGISTER` makes such a number).
 */
struct vpmu_registers {
  /** Handed to both functions. */
  void *context;
  /** Executes an MRS. */
  uint64_t (*read)(void *context, uint32_t iss);
  /** Executes an MSR and an ISB. */
  void (*write)(void *context, uint32_t iss, uint64_t value);
};

/** What the trap registers must hold while the guest runs. */
struct vpmu_traps {
  /** The PMU's fields of MDCR_EL2: HPMN, TPM, TPMCR, HPMD, HCCD, HPME and HLP. */
  uint64_t mdcr_el2;
  /** The PMU's bits of HDFGRTR_EL2. Not to be written where FEAT_FGT is missing. */
  uint64_t hdfgrtr_el2;
  /** The PMU's bits of HDFGWTR_EL2. Not to be written where FEAT_FGT is missing. */
  uint64_t hdfgwtr_el2;
};

/** Room for one vCPU's PMU that is emulated on the counters of the CPU. */
struct vpmu_backed {
  uint64_t opaque[640];
};

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Makes a PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: the ID register
 * says that there is no PMUv3, there are too many counters or rules, or no such policy.
 *
 * The functions of `host` may be called with its context until the PMU is
 * used no more.
 */
enum vpmu_status vpmu_arm_init(struct vpmu_arm *pmu,
                               const struct vpmu_arm_config *config,
                               const struct vpmu_host *host);

/**
 * Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
 * takes `*value`, a read puts its result there.
 */
enum vpmu_outcome vpmu_arm_access(struct vpmu_arm *pmu, uint32_t iss, bool el0, uint64_t *value);

/** The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge. */
bool vpmu_arm_line(struct vpmu_arm *pmu);

/** The vCPU starts to run: what the guest has enabled counts again. */
enum vpmu_status vpmu_arm_load(struct vpmu_arm *pmu);

/** The vCPU stops running: nothing counts, and all that was counted is in the registers. */
enum vpmu_status vpmu_arm_put(struct vpmu_arm *pmu);

/** The vCPU is reset. No host counter is left. */
enum vpmu_status vpmu_arm_reset(struct vpmu_arm *pmu);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. Nothing stops: the PMU can go on.
 */
enum vpmu_status vpmu_arm_save(struct vpmu_arm *pmu, uint8_t *buffer, size_t room, size_t *length);

/** Goes on from the `length` bytes at `buffer`, which a save has written. */
enum vpmu_status vpmu_arm_restore(struct vpmu_arm *pmu, const uint8_t *buffer, size_t length);

/** Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level. */
bool vpmu_arm_line_changed(struct vpmu_arm *pmu, bool *level);

/** Changes which events the guest may count, from now on. `VPMU_STATUS_CONFIG`: there are too many rules. */
enum vpmu_status vpmu_arm_set_filter(struct vpmu_arm *pmu, const struct vpmu_arm_filter *filter);

/**
 * The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
 * `vpmu_arm_line` next.
 */
enum vpmu_status vpmu_arm_overflow(struct vpmu_arm *pmu, uint8_t counter, uint32_t what);

/** One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist. */
int32_t vpmu_arm_counter_state(struct vpmu_arm *pmu, uint8_t counter);

/**
 * Makes a PMU out of reset in `pmu`, not loaded. `VPMU_STATUS_CONFIG`: the CPU cannot be divided
 * so, has no PMUv3, or there are too many rules.
 *
 * The functions of `registers` may be called with its context until the PMU
 * is used no more.
 */
enum vpmu_status vpmu_partition_init(struct vpmu_partition *pmu,
                                     const struct vpmu_partition_config *config,
                                     const struct vpmu_registers *registers);

/**
 * Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
 * takes `*value`, a read puts its result there. AArch32 accesses of EL0 (exception classes 0x03 and
 * 0x04) are the caller's to translate to the AArch64 register's ISS.
 */
enum vpmu_outcome vpmu_partition_access(struct vpmu_partition *pmu, uint32_t iss, bool el0, uint64_t *value);

/** The level of the guest's PMU interrupt, wherever its registers are. */
bool vpmu_partition_line(struct vpmu_partition *pmu);

/**
 * The guest is about to run on this CPU, whose MDCR_EL2.HPMN is that of `vpmu_partition_traps`. Load and put on the same
 * CPU, with an ISB between a write of MDCR_EL2 and either.
 */
enum vpmu_status vpmu_partition_load(struct vpmu_partition *pmu);

/** The guest no longer runs on this CPU. Its counters stop and are in memory. */
enum vpmu_status vpmu_partition_put(struct vpmu_partition *pmu);

/** The vCPU is reset. A loaded PMU is put first. */
enum vpmu_status vpmu_partition_reset(struct vpmu_partition *pmu);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. A loaded PMU is put first.
 */
enum vpmu_status vpmu_partition_save(struct vpmu_partition *pmu, uint8_t *buffer, size_t room, size_t *length);

/** Goes on from the `length` bytes at `buffer`, which a save has written. A loaded PMU is put first. */
enum vpmu_status vpmu_partition_restore(struct vpmu_partition *pmu, const uint8_t *buffer, size_t length);

/**
 * What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
 * after each other call: it may have changed.
 */
enum vpmu_status vpmu_partition_traps(struct vpmu_partition *pmu, struct vpmu_traps *traps);

/**
 * Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
 * be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
 */
enum vpmu_status vpmu_partition_migrate(struct vpmu_partition *pmu,
                                        const struct vpmu_partition_config *config);

/**
 * The guest has been left. To be called first at each exit where `acts_at_exit` is not 0: this is what keeps the guest's
 * counters from counting at EL2 where MDCR_EL2 does not.
 */
enum vpmu_status vpmu_partition_exited(struct vpmu_partition *pmu);

/**
 * Tells whose a physical PMU interrupt is: `guest` becomes whether the guest's line is high, `host`
 * the host's counters that overflowed, whose overflow bits are cleared.
 */
enum vpmu_status vpmu_partition_overflow(struct vpmu_partition *pmu, bool *guest, uint32_t *host);

/**
 * As `vpmu_partition_load`, right after `left`, the PMU of another guest, was put on this CPU. Writes only the registers that
 * `left` had otherwise. Nothing may have accessed PMU registers of guests since. `VPMU_STATUS_MISUSE`: also where `left` is
 * `pmu` itself.
 */
enum vpmu_status vpmu_partition_load_after(struct vpmu_partition *pmu,
                                           struct vpmu_partition *left);

/**
 * Makes a PMU out of reset in `pmu`, on a vCPU that runs on this CPU: `config` says what the guest finds, and `cpu`
 * what the CPU has. `VPMU_STATUS_CONFIG`: the guest would have more counters than there are physical ones for it, or as
 * for `vpmu_arm_init` and `vpmu_partition_init`.
 *
 * The functions of `registers` may be called with its context until the PMU
 * is used no more.
 */
enum vpmu_status vpmu_backed_init(struct vpmu_backed *pmu,
                                  const struct vpmu_arm_config *config,
                                  const struct vpmu_partition_config *cpu,
                                  const struct vpmu_registers *registers);

/**
 * Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
 * takes `*value`, a read puts its result there.
 */
enum vpmu_outcome vpmu_backed_access(struct vpmu_backed *pmu, uint32_t iss, bool el0, uint64_t *value);

/** The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge. */
bool vpmu_backed_line(struct vpmu_backed *pmu);

/** The vCPU starts to run on this CPU: what the guest has enabled counts again. */
enum vpmu_status vpmu_backed_load(struct vpmu_backed *pmu);

/** The vCPU stops running here: nothing of the guest's counts or interrupts, and all that was counted is in memory. */
enum vpmu_status vpmu_backed_put(struct vpmu_backed *pmu);

/** The vCPU is reset. No physical counter counts for it. */
enum vpmu_status vpmu_backed_reset(struct vpmu_backed *pmu);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. Nothing stops: the PMU can go on.
 */
enum vpmu_status vpmu_backed_save(struct vpmu_backed *pmu, uint8_t *buffer, size_t room, size_t *length);

/** Goes on from the `length` bytes at `buffer`, which a save has written. */
enum vpmu_status vpmu_backed_restore(struct vpmu_backed *pmu, const uint8_t *buffer, size_t length);

/**
 * What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
 * after each other call: it may have changed.
 */
enum vpmu_status vpmu_backed_traps(struct vpmu_backed *pmu, struct vpmu_traps *traps);

/**
 * Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
 * be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
 */
enum vpmu_status vpmu_backed_migrate(struct vpmu_backed *pmu,
                                     const struct vpmu_partition_config *config);

/**
 * The physical PMU interrupt has come. Lowers the part of it that is the guest's, whose level is `vpmu_backed_line` then. End
 * the physical interrupt afterwards.
 */
enum vpmu_status vpmu_backed_overflow(struct vpmu_backed *pmu);

/**
 * Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level.
 * To be asked after each other call: the virtual interrupt is to be changed only then.
 */
bool vpmu_backed_line_changed(struct vpmu_backed *pmu, bool *level);

/** Changes which events the guest may count, from now on. `VPMU_STATUS_CONFIG`: there are too many rules. */
enum vpmu_status vpmu_backed_set_filter(struct vpmu_backed *pmu, const struct vpmu_arm_filter *filter);

/** One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist. */
int32_t vpmu_backed_counter_state(struct vpmu_backed *pmu, uint8_t counter);

#ifdef __cplusplus
}
#endif

#endif /* VPMU_ARM_H */
