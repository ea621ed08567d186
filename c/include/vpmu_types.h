/*
 * vpmu: what all parts have in common.
 *
 * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.
 */

#ifndef VPMU_TYPES_H
#define VPMU_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** The ISS of an MRS of this register (Arm ARM DDI 0487, exception class 0x18) but for the direction, bit 0. */
#define VPMU_REGISTER(op0, op1, crn, crm, op2) \
	((uint32_t)((op0) << 20 | (op2) << 17 | (op1) << 14 | (crn) << 10 | (crm) << 1))

/**
 * A host counter belongs to the guest's counter as long as the guest uses it, and a counter that is
 * paused and read is left alone until the guest resumes it: the fewest calls of the host's functions.
 */
#define VPMU_POLICY_REUSE_PAUSED 0

/**
 * As `VPMU_POLICY_REUSE_PAUSED`, but each rewrite by the guest pauses the counter, reads it and sets its
 * period again.
 */
#define VPMU_POLICY_REUSE 1

/**
 * Each rewrite by the guest and each overflow releases the host counter and creates another. For
 * comparison.
 */
#define VPMU_POLICY_RECREATE 2

/**
 * What the host knows when it reports an overflow: all the events asked for have been counted, and
 * the host counter goes on counting on the CPU where this is reported.
 */
#define VPMU_REPORT_DUE 0

/** As `VPMU_REPORT_DUE`, but the vCPU has left the CPU on which the host counter counts. */
#define VPMU_REPORT_MOVED 1

/** The report may be early, late, or meant for an earlier period: the counter is read to find out. */
#define VPMU_REPORT_UNSURE 2

/** Nothing is counted: the counter is disabled, filtered away, or its vCPU does not run. */
#define VPMU_COUNTER_PAUSED 0

/** Events are counted. */
#define VPMU_COUNTER_COUNTING 1

/** The counter should count and does not, or not all the time: its value is wrong. */
#define VPMU_COUNTER_LOST 2

/**
 * `struct vpmu_event.kind`: an x86 event by event select (bits 7:0 of `number`) and unit mask
 * (bits 15:8).
 */
#define VPMU_EVENT_X86 0

/** `struct vpmu_event.kind`: the event of the x86 fixed counter `number`. */
#define VPMU_EVENT_X86_FIXED 1

/** `struct vpmu_event.kind`: the PMUv3 event `number`. */
#define VPMU_EVENT_ARM 2

/** `struct vpmu_event.kind`: processor cycles, for the Arm cycle counter. */
#define VPMU_EVENT_ARM_CYCLES 3

/**
 * `struct vpmu_event.kind`: an event of AMD's, by event select (bits 11:0 of `number`) and unit mask
 * (bits 23:16).
 */
#define VPMU_EVENT_X86_AMD 4

/** `create` answers: the counter is backed. */
#define VPMU_BACKED 0

/** `create` answers: the host has no such event, or cannot restrict it as asked. */
#define VPMU_LOST_UNSUPPORTED 1

/** `create` answers: every host counter that could count it is taken. */
#define VPMU_LOST_BUSY 2

/** `create` answers: the host would count it only part of the time. */
#define VPMU_LOST_MULTIPLEXED 3

/** `create` answers: the host failed for a reason of its own. Any other number says the same. */
#define VPMU_LOST_FAILED 4

/** No saved state is longer, in bytes. */
#define VPMU_STATE_SIZE 4096

/** How a call ended that is not an access of the guest. */
enum vpmu_status {
  /** It is done. */
  VPMU_STATUS_OK = 0,
  /**
   * A null pointer, a number out of its range, or a PMU that was not initialized. A fault of the
   * caller's.
   */
  VPMU_STATUS_MISUSE = -1,
  /** There can be no PMU of this configuration. */
  VPMU_STATUS_CONFIG = -2,
  /** The saved state is damaged, or this PMU cannot go on from it. The PMU is unchanged. */
  VPMU_STATUS_STATE = -3,
  /** The buffer is too small: `VPMU_STATE_SIZE` bytes always suffice. */
  VPMU_STATUS_ROOM = -4,
  /** KVM or perf refuses: `vpmu_kvm_error` says why. */
  VPMU_STATUS_HOST = -5,
};

/** How a guest's access ended, and so what the caller does next. The library injects nothing. */
enum vpmu_outcome {
  /** As `VPMU_STATUS_MISUSE`. */
  VPMU_OUTCOME_MISUSE = -1,
  /** No register of this PMU: go on as for any register that the caller does not know. */
  VPMU_OUTCOME_NOT_HANDLED = 0,
  /**
   * A read is complete: the value is where the caller wanted it. Give it to the guest and step
   * over the instruction.
   */
  VPMU_OUTCOME_VALUE = 1,
  /** A write is complete: step over the instruction. */
  VPMU_OUTCOME_DONE = 2,
  /** x86: inject #GP(0). */
  VPMU_OUTCOME_GENERAL_PROTECTION = 3,
  /** Arm: inject an Undefined Instruction exception (EC 0x00) into EL1. */
  VPMU_OUTCOME_UNDEFINED = 4,
  /** Arm: inject the trapped access (EC 0x18, with the same ISS) into EL1. */
  VPMU_OUTCOME_TRAP_TO_EL1 = 5,
};

/** What a host counter is to count, while the guest runs. */
struct vpmu_event {
  /** One of `VPMU_EVENT_*`. */
  uint32_t kind;
  /** The event, as `kind` says. */
  uint32_t number;
  /** Count in user space: CPL 1 to 3, or EL0. */
  bool user;
  /** Count in the guest's kernel: CPL 0, or EL1. */
  bool kernel;
  /** x86: count rising edges of the condition. */
  bool edge;
  /** x86: with `threshold`, count cycles with fewer events. */
  bool invert;
  /** x86: 0, or count cycles in which at least so many events happen. */
  uint8_t threshold;
};

/**
 * The caller's counters. All functions are called from within a call of this library, on the same
 * thread, with `context` first. Counters are named by the guest's numbers: on x86 general counter
 * *n* is *n* and fixed counter *n* is 16 + *n*; on Arm the cycle counter is 31.
 *
 * The engine calls `create` first, then any of the others, then `release`.
 */
struct vpmu_host {
  /** Handed to each function. */
  void *context;
  /**
   * Backs `counter` with a stopped host counter for `event`, its total zero. Answers
   * `VPMU_BACKED` or one of `VPMU_LOST_*`.
   */
  int32_t (*create)(void *context, uint8_t counter, const struct vpmu_event *event);
  /** Asks for one report (`vpmu_*_overflow`) when `events` more have been counted; 0: no report. */
  void (*set_period)(void *context, uint8_t counter, uint64_t events);
  /** Starts the counters whose bits are set. */
  void (*resume)(void *context, uint32_t counters);
  /** Stops the counters whose bits are set. Their totals stay readable. */
  void (*pause)(void *context, uint32_t counters);
  /** The number of events counted since `create`, modulo 2^64. */
  uint64_t (*read)(void *context, uint8_t counter);
  /** Takes the host counter away. */
  void (*release)(void *context, uint8_t counter);
  /**
   * Whether each due report reaches the PMU before the guest's next access does. Status
   * registers can then be read without reading counters. When in doubt: false.
   */
  bool reports_promptly;
};

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Returns the version of the library that the program runs with: major, minor and patch, 8 bits each, the major in bits
 * 23:16. Programs that were compiled against a library of the same major version go on to work. Before 1.0, of the same
 * minor version.
 */
uint32_t vpmu_version(void);

#ifdef __cplusplus
}
#endif

#endif /* VPMU_TYPES_H */
