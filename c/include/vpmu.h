/*
 * vpmu: performance counters for virtual machines, for hypervisors written in C.
 *
 * Give the engine a host (functions that make, start, stop and read counters), hand it each
 * trapped access of the guest, act on the outcome, and deliver the interrupt. The engine
 * allocates nothing and keeps no state of its own: each PMU is a struct of the caller's, one for each
 * vCPU. The functions vpmu_kvm_* are for VMMs on Linux KVM: they count by perf events and allocate.
 * Calls for the same PMU must not overlap, but those of vpmu_kvm_*, which wait for one another. The
 * caller promises: a pointer is null or points to what its type says, of the length that is stated with
 * it, and nobody else uses that memory during the call. A null or misaligned pointer, or a PMU that was not
 * initialized, is answered with VPMU_STATUS_MISUSE (or false), and nothing happens. Memory that is handed to an
 * init function is zeroed, or holds a PMU, whose host counters are released first.
 *
 * Made from the Rust sources by cbindgen. Do not edit.
 */

#ifndef VPMU_H
#define VPMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The ISS of an MRS of this register (Arm ARM DDI 0487, exception class 0x18) but for the direction, bit 0.
 */
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

/**
 * As `VPMU_REPORT_DUE`, but the vCPU has left the CPU on which the host counter counts.
 */
#define VPMU_REPORT_MOVED 1

/**
 * The report may be early, late, or meant for an earlier period: the counter is read to find out.
 */
#define VPMU_REPORT_UNSURE 2

/**
 * Nothing is counted: the counter is disabled, filtered away, or its vCPU does not run.
 */
#define VPMU_COUNTER_PAUSED 0

/**
 * Events are counted.
 */
#define VPMU_COUNTER_COUNTING 1

/**
 * The counter should count and does not, or not all the time: its value is wrong.
 */
#define VPMU_COUNTER_LOST 2

/**
 * `struct vpmu_event.kind`: an x86 event by event select (bits 7:0 of `number`) and unit mask
 * (bits 15:8).
 */
#define VPMU_EVENT_X86 0

/**
 * `struct vpmu_event.kind`: the event of the x86 fixed counter `number`.
 */
#define VPMU_EVENT_X86_FIXED 1

/**
 * `struct vpmu_event.kind`: the PMUv3 event `number`.
 */
#define VPMU_EVENT_ARM 2

/**
 * `struct vpmu_event.kind`: processor cycles, for the Arm cycle counter.
 */
#define VPMU_EVENT_ARM_CYCLES 3

/**
 * `struct vpmu_event.kind`: an event of AMD's, by event select (bits 11:0 of `number`) and unit mask
 * (bits 23:16).
 */
#define VPMU_EVENT_X86_AMD 4

/**
 * `create` answers: the counter is backed.
 */
#define VPMU_BACKED 0

/**
 * `create` answers: the host has no such event, or cannot restrict it as asked.
 */
#define VPMU_LOST_UNSUPPORTED 1

/**
 * `create` answers: every host counter that could count it is taken.
 */
#define VPMU_LOST_BUSY 2

/**
 * `create` answers: the host would count it only part of the time.
 */
#define VPMU_LOST_MULTIPLEXED 3

/**
 * `create` answers: the host failed for a reason of its own. Any other number says the same.
 */
#define VPMU_LOST_FAILED 4

/**
 * Run the vCPU again: the exit was completed.
 */
#define VPMU_KVM_COMPLETED 0

/**
 * Run the vCPU again: there was no exit, but an overflow, and `immediate_exit` is not 1. A signal of the VMM's own may
 * have come at the same time.
 */
#define VPMU_KVM_KICKED 1

/**
 * The exit, or the interruption by a signal, is the VMM's, and is as KVM has made it.
 */
#define VPMU_KVM_YOURS 2

/**
 * AMD's PMU where the host's processor is AMD's, else Intel's.
 */
#define VPMU_KVM_MODEL_AUTO 0

/**
 * Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's.
 */
#define VPMU_KVM_MODEL_INTEL 1

/**
 * AMD's core extension: six counters, without global registers. On hosts of AMD's.
 */
#define VPMU_KVM_MODEL_AMD 2

/**
 * AMD's PerfMonV2. On hosts of AMD's.
 */
#define VPMU_KVM_MODEL_AMD_V2 3

/**
 * The paravirtual PMU, for guests with its driver. The VMM offers its guest no other. Needs the guest's memory.
 */
#define VPMU_KVM_MODEL_PARAVIRTUAL 4

/**
 * No PMU. Nothing is asked of perf.
 */
#define VPMU_KVM_MODEL_NONE 5

/**
 * The processor's counters where they are available, else a clock.
 */
#define VPMU_KVM_BACKING_AUTO 0

/**
 * The processor's counters.
 */
#define VPMU_KVM_BACKING_HARDWARE 1

/**
 * The thread's time on the CPU.
 */
#define VPMU_KVM_BACKING_CLOCK 2

/**
 * Where a clock counts, the guest's time and the host's while it completes the guest's exits.
 */
#define VPMU_KVM_FREEZE_VM 0

/**
 * Where a clock counts, the guest's time alone.
 */
#define VPMU_KVM_FREEZE_GUEST 1

/**
 * The guest has no PEBS.
 */
#define VPMU_KVM_PEBS_OFF 0

/**
 * The guest has PEBS. The host's kernel samples the guest where perf can do that, else each record takes an exit.
 */
#define VPMU_KVM_PEBS_AUTO 1

/**
 * The guest has PEBS. Each record takes an exit.
 */
#define VPMU_KVM_PEBS_EXIT 2

/**
 * The guest has PEBS. The host's kernel samples the guest into its ring buffer.
 */
#define VPMU_KVM_PEBS_BUFFER 3

/**
 * No saved state is longer, in bytes.
 */
#define VPMU_STATE_SIZE 4096

/**
 * Four counters at C001_0000H to C001_0007H.
 */
#define VPMU_AMD_LEGACY 0

/**
 * Six counters at C001_0200H to C001_020BH: PerfCtrExtCore. The fewest exits for a sample.
 */
#define VPMU_AMD_CORE 1

/**
 * The same, and global registers at C000_0300H to C000_0303H: PerfMonV2.
 */
#define VPMU_AMD_V2 2

/**
 * How a call ended that is not an access of the guest.
 */
enum vpmu_status {
  /**
   * It is done.
   */
  VPMU_STATUS_OK = 0,
  /**
   * A null pointer, a number out of its range, or a PMU that was not initialized. A fault of the
   * caller's.
   */
  VPMU_STATUS_MISUSE = -1,
  /**
   * There can be no PMU of this configuration.
   */
  VPMU_STATUS_CONFIG = -2,
  /**
   * The saved state is damaged, or this PMU cannot go on from it. The PMU is unchanged.
   */
  VPMU_STATUS_STATE = -3,
  /**
   * The buffer is too small: `VPMU_STATE_SIZE` bytes always suffice.
   */
  VPMU_STATUS_ROOM = -4,
  /**
   * KVM or perf refuses: `vpmu_kvm_error` says why.
   */
  VPMU_STATUS_HOST = -5,
};

/**
 * How a guest's access ended, and so what the caller does next. The library injects nothing.
 */
enum vpmu_outcome {
  /**
   * As `VPMU_STATUS_MISUSE`.
   */
  VPMU_OUTCOME_MISUSE = -1,
  /**
   * No register of this PMU: go on as for any register that the caller does not know.
   */
  VPMU_OUTCOME_NOT_HANDLED = 0,
  /**
   * A read is complete: the value is where the caller wanted it. Give it to the guest and step
   * over the instruction.
   */
  VPMU_OUTCOME_VALUE = 1,
  /**
   * A write is complete: step over the instruction.
   */
  VPMU_OUTCOME_DONE = 2,
  /**
   * x86: inject #GP(0).
   */
  VPMU_OUTCOME_GENERAL_PROTECTION = 3,
  /**
   * Arm: inject an Undefined Instruction exception (EC 0x00) into EL1.
   */
  VPMU_OUTCOME_UNDEFINED = 4,
  /**
   * Arm: inject the trapped access (EC 0x18, with the same ISS) into EL1.
   */
  VPMU_OUTCOME_TRAP_TO_EL1 = 5,
};

/**
 * One vCPU's PMU, counted by perf events of the vCPU's thread, and its lazy deadline.
 */
struct vpmu_kvm;

/**
 * What a VM's guest is offered, and how the host counts for it.
 */
struct vpmu_kvm_vm;

/**
 * Room for one vCPU's emulated Arm PMU.
 */
struct vpmu_arm {
  uint64_t opaque[512];
};

/**
 * What a guest is told about its PMUv3 (Arm ARM DDI 0487, chapter D13).
 */
struct vpmu_arm_config {
  /**
   * The guest's ID_AA64DFR0_EL1, of which PMUVer is used.
   */
  uint64_t id_aa64dfr0;
  /**
   * Event counters, 0 to 31. The cycle counter comes on top.
   */
  uint8_t counters;
  /**
   * Whether the guest's ID_AA64PFR0_EL1 says that EL3 exists.
   */
  bool el3;
  /**
   * PMCR_EL0.IMP.
   */
  uint8_t implementer;
  /**
   * PMCR_EL0.IDCODE.
   */
  uint8_t idcode;
  /**
   * PMCEID0_EL0 and PMCEID1_EL0: the common events that the host can count.
   */
  uint64_t pmceid[2];
  /**
   * PMMIR_EL1, seen from PMUv3p4 on.
   */
  uint64_t pmmir;
  /**
   * One of `VPMU_POLICY_*`.
   */
  uint32_t policy;
};

/**
 * What a host counter is to count, while the guest runs.
 */
struct vpmu_event {
  /**
   * One of `VPMU_EVENT_*`.
   */
  uint32_t kind;
  /**
   * The event, as `kind` says.
   */
  uint32_t number;
  /**
   * Count in user space: CPL 1 to 3, or EL0.
   */
  bool user;
  /**
   * Count in the guest's kernel: CPL 0, or EL1.
   */
  bool kernel;
  /**
   * x86: count rising edges of the condition.
   */
  bool edge;
  /**
   * x86: with `threshold`, count cycles with fewer events.
   */
  bool invert;
  /**
   * x86: 0, or count cycles in which at least so many events happen.
   */
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
  /**
   * Handed to each function.
   */
  void *context;
  /**
   * Backs `counter` with a stopped host counter for `event`, its total zero. Answers
   * `VPMU_BACKED` or one of `VPMU_LOST_*`.
   */
  int32_t (*create)(void *context, uint8_t counter, const struct vpmu_event *event);
  /**
   * Asks for one report (`vpmu_*_overflow`) when `events` more have been counted; 0: no report.
   */
  void (*set_period)(void *context, uint8_t counter, uint64_t events);
  /**
   * Starts the counters whose bits are set.
   */
  void (*resume)(void *context, uint32_t counters);
  /**
   * Stops the counters whose bits are set. Their totals stay readable.
   */
  void (*pause)(void *context, uint32_t counters);
  /**
   * The number of events counted since `create`, modulo 2^64.
   */
  uint64_t (*read)(void *context, uint8_t counter);
  /**
   * Takes the host counter away.
   */
  void (*release)(void *context, uint8_t counter);
  /**
   * Whether each due report reaches the PMU before the guest's next access does. Status
   * registers can then be read without reading counters. When in doubt: false.
   */
  bool reports_promptly;
};

/**
 * The cost of one vCPU, for `vpmu_kvm_statistics`.
 */
struct vpmu_kvm_statistics {
  /**
   * `sizeof(struct vpmu_kvm_statistics)`, before the call.
   */
  size_t size;
  /**
   * PMIs delivered to the guest.
   */
  uint64_t pmis;
  /**
   * PMIs that found LVTPC masked.
   */
  uint64_t masked_pmis;
  /**
   * Exits for the parts' MSRs.
   */
  uint64_t msr_exits;
  /**
   * Exits for RDPMC.
   */
  uint64_t rdpmc_exits;
  /**
   * Runs that ended without an exit.
   */
  uint64_t kicks;
  /**
   * Perf events that were made.
   */
  uint64_t creates;
  /**
   * Counters that the host could not back, how often.
   */
  uint64_t lost;
  /**
   * PEBS records written.
   */
  uint64_t pebs_records;
  /**
   * PEBS records for which there was no room or no memory.
   */
  uint64_t pebs_lost;
  /**
   * The longest time, ns, for which a counter of cycles stood still between its reads although its perf event ran.
   */
  uint64_t longest_stuck_ns;
};

/**
 * A range of a VMM's own MSR filter, laid out as Linux's `struct kvm_msr_filter_range`.
 */
struct vpmu_kvm_filter_range {
  /**
   * KVM_MSR_FILTER_READ and _WRITE.
   */
  uint32_t flags;
  /**
   * The number of MSRs.
   */
  uint32_t nmsrs;
  /**
   * The first.
   */
  uint32_t base;
  /**
   * A bit for each MSR, which KVM performs where it is set, and hands over where it is clear.
   */
  const uint8_t *bitmap;
};

/**
 * What a VM's guest is offered, for `vpmu_kvm_open`. Zero is each field's default, but for `size`.
 */
struct vpmu_kvm_options {
  /**
   * `sizeof(struct vpmu_kvm_options)`: a later library has more fields, and finds those that the program lacks zero.
   */
  size_t size;
  /**
   * One of `VPMU_KVM_MODEL_*`.
   */
  uint32_t model;
  /**
   * The version of Intel's architectural performance monitoring, 2 to 5. 0: 5. With Intel's model only.
   */
  uint32_t perfmon;
  /**
   * One of `VPMU_KVM_PEBS_*`. With Intel's model only. Needs the guest's memory.
   */
  uint32_t pebs;
  /**
   * One of `VPMU_KVM_BACKING_*`.
   */
  uint32_t backing;
  /**
   * One of `VPMU_POLICY_*`.
   */
  uint32_t policy;
  /**
   * The real-time signal by which perf reports overflows to the vCPU's thread. 0: SIGRTMIN+1.
   */
  int signal;
  /**
   * Where only a clock counts: offer instructions and branches too, one for each cycle.
   */
  bool approximate_instructions;
  /**
   * Whether the guest has the lazy TSC deadline. Needs the guest's memory.
   */
  bool deadline;
  /**
   * Whether the guest's RDPMC comes to the VMM at run time, by way of the guest's own handler of #GP: any 64-bit Linux, user
   * space included. Needs the guest's memory. Without this, the guest's kernel is one that `vpmu rewrite-kernel` has
   * rewritten.
   */
  bool rdpmc;
  /**
   * Whether PEBS records may be some instructions late, as those of the processor's counters are: the guest is not told.
   * Without this, such a host offers no PEBS.
   */
  bool pebs_skid;
  /**
   * The bytes of a saved vCPU, whose guest is then offered what it had: `model`, `perfmon` and `deadline` are not
   * read. Null: a new guest.
   */
  const uint8_t *saved;
  /**
   * How many bytes these are.
   */
  size_t saved_length;
  /**
   * One of `VPMU_KVM_FREEZE_*`.
   */
  uint32_t freeze;
};

/**
 * The guest's RAM by its physical addresses, which the guest chooses: neither devices, nor memory that the guest may not
 * write. The functions are called from any thread until the VM's last PMU has been detached and the VM is closed.
 */
struct vpmu_kvm_memory {
  /**
   * Handed to both functions.
   */
  void *context;
  /**
   * Returns where `length` bytes of the guest's RAM from `address` on are mapped, or NULL where not all of them are
   * RAM in one piece. They stay mapped until the VM's last vCPU has stopped.
   */
  void *(*map)(void *context, uint64_t address, size_t length);
  /**
   * Is told of bytes that were written, for a log of pages; NULL: nobody is.
   */
  void (*written)(void *context, uint64_t address, size_t length);
};

/**
 * One entry of a vCPU's CPUID, laid out as Linux's `struct kvm_cpuid_entry2`.
 */
struct vpmu_kvm_cpuid_entry {
  /**
   * The leaf.
   */
  uint32_t function;
  /**
   * The subleaf.
   */
  uint32_t index;
  /**
   * Bit 0: the subleaf matters.
   */
  uint32_t flags;
  /**
   * EAX.
   */
  uint32_t eax;
  /**
   * EBX.
   */
  uint32_t ebx;
  /**
   * ECX.
   */
  uint32_t ecx;
  /**
   * EDX.
   */
  uint32_t edx;
  /**
   * Zero.
   */
  uint32_t padding[3];
};

/**
 * Room for one vCPU's partitioned PMU.
 */
struct vpmu_partition {
  uint64_t opaque[256];
};

/**
 * What the plan is made from, one for each physical CPU.
 */
struct vpmu_partition_config {
  /**
   * ID_AA64DFR0_EL1 of the CPU.
   */
  uint64_t id_aa64dfr0;
  /**
   * ID_AA64MMFR0_EL1 of the CPU.
   */
  uint64_t id_aa64mmfr0;
  /**
   * PMCEID0_EL0 and PMCEID1_EL0 of the CPU.
   */
  uint64_t pmceid[2];
  /**
   * How many event counters the CPU has: PMCR_EL0.N as EL2 reads it.
   */
  uint8_t implemented;
  /**
   * How many of them the host keeps, counted from the top.
   */
  uint8_t host_counters;
  /**
   * Whether the CPU keeps host counters from EL1, and HPMD and HCCD keep the guest's from EL2, as
   * the architecture says and a probe has found. `false` is always safe, and traps more.
   */
  bool isolates;
  /**
   * Whether another CPU has the affinity of this one (MPIDR_EL1) from level 1 up, so that the two
   * are threads of a core. `true` is always safe, and traps more.
   */
  bool shares_core;
};

/**
 * The registers of the CPU that executes this, at EL2. `write` has an ISB behind it.
 *
 * Registers are named by the ISS of their own access: op0, op2, op1, CRn and CRm at their places,
 * Rt and the direction zero (`VPMU_REGISTER` makes such a number).
 */
struct vpmu_registers {
  /**
   * Handed to both functions.
   */
  void *context;
  /**
   * Executes an MRS.
   */
  uint64_t (*read)(void *context, uint32_t iss);
  /**
   * Executes an MSR and an ISB.
   */
  void (*write)(void *context, uint32_t iss, uint64_t value);
};

/**
 * What the trap registers must hold while the guest runs. See `vpmu_partition_traps`.
 */
struct vpmu_traps {
  /**
   * The PMU's fields of MDCR_EL2: HPMN, TPM, TPMCR, HPMD, HCCD, HPME and HLP.
   */
  uint64_t mdcr_el2;
  /**
   * The PMU's bits of HDFGRTR_EL2. Not to be written where FEAT_FGT is missing.
   */
  uint64_t hdfgrtr_el2;
  /**
   * The PMU's bits of HDFGWTR_EL2. Not to be written where FEAT_FGT is missing.
   */
  uint64_t hdfgwtr_el2;
};

/**
 * What a guest is told about Intel's PMU (Intel SDM vol. 3B, section 20.2).
 */
struct vpmu_x86_config {
  /**
   * The version of architectural performance monitoring: 2 to 5.
   */
  uint8_t version;
  /**
   * General counters: 1 to 8.
   */
  uint8_t general;
  /**
   * Their width in bits: 32 to 63.
   */
  uint8_t general_width;
  /**
   * The width of fixed counters in bits: 32 to 63.
   */
  uint8_t fixed_width;
  /**
   * Fixed counters, bit *n* for counter *n*.
   */
  uint32_t fixed;
  /**
   * The architectural events that can be counted, in the order of CPUID.0AH:EBX, but 1: it can.
   */
  uint32_t events;
  /**
   * Whether IA32_PERF_CAPABILITIES exists.
   */
  bool pdcm;
  /**
   * Whether general counters can be written in full width. Needs `pdcm`.
   */
  bool full_width_writes;
  /**
   * One of `VPMU_POLICY_*`.
   */
  uint32_t policy;
  /**
   * Bits of IA32_DEBUGCTL that the hypervisor implements, for instance BTF (bit 1): the PMU keeps them as written.
   * Others than its own and these are #GP.
   */
  uint64_t other_debugctl;
};

/**
 * Room for one vCPU's x86 PMU, of either vendor.
 */
struct vpmu_x86 {
  uint64_t opaque[1024];
};

/**
 * One CPUID leaf. For leaves 1, 7 and 8000_0001H only the bits that concern the PMU: set those, and clear the
 * PMU's others (PDCM, DS, DTES64; PerfCtrExtCore, PerfCtrExtNB, PerfCtrExtLLC, IBS).
 */
struct vpmu_cpuid {
  /**
   * EAX.
   */
  uint32_t eax;
  /**
   * EBX.
   */
  uint32_t ebx;
  /**
   * ECX.
   */
  uint32_t ecx;
  /**
   * EDX.
   */
  uint32_t edx;
};

/**
 * What a guest is told about AMD's PMU (AMD64 Architecture Programmer's Manual vol. 2, 13.2).
 */
struct vpmu_x86_amd_config {
  /**
   * One of `VPMU_AMD_*`.
   */
  uint32_t interface;
  /**
   * Which of the events that mean the same everywhere can be counted, as in `struct vpmu_x86_config`, but 1: it
   * can. The guest cannot be told: a counter of another one is lost, and reads as zero.
   */
  uint32_t events;
  /**
   * One of `VPMU_POLICY_*`.
   */
  uint32_t policy;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes a PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: the ID register
 * says that there is no PMUv3, there are too many counters, or no such policy.
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

/**
 * The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
 * `vpmu_arm_line` next.
 */
enum vpmu_status vpmu_arm_overflow(struct vpmu_arm *pmu, uint8_t counter, uint32_t what);

/**
 * The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
 */
bool vpmu_arm_line(struct vpmu_arm *pmu);

/**
 * The vCPU starts to run: what the guest has enabled counts again.
 */
enum vpmu_status vpmu_arm_load(struct vpmu_arm *pmu);

/**
 * The vCPU stops running: nothing counts, and all that was counted is in the registers.
 */
enum vpmu_status vpmu_arm_put(struct vpmu_arm *pmu);

/**
 * The vCPU is reset. No host counter is left.
 */
enum vpmu_status vpmu_arm_reset(struct vpmu_arm *pmu);

/**
 * One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
 */
int32_t vpmu_arm_counter_state(struct vpmu_arm *pmu, uint8_t counter);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. Nothing stops: the PMU can go on.
 */
enum vpmu_status vpmu_arm_save(struct vpmu_arm *pmu, uint8_t *buffer, size_t room, size_t *length);

/**
 * Goes on from the `length` bytes at `buffer`, which a save has written.
 */
enum vpmu_status vpmu_arm_restore(struct vpmu_arm *pmu, const uint8_t *buffer, size_t length);

/**
 * Makes the offered parts of a vCPU, out of reset, and puts them into `*pmu`. Give them back by `vpmu_kvm_detach`. The
 * descriptors stay the caller's. Before the seccomp filter, on any thread. With a PMU, installs a handler of the
 * overflows' signal, and of SIGIO unless there is one.
 */
enum vpmu_status vpmu_kvm_attach(const struct vpmu_kvm_vm *vm,
                                 int vm_fd,
                                 int vcpu_fd,
                                 struct vpmu_kvm **pmu);

/**
 * Ends a PMU, on any thread while its vCPU does not run. Each later call with it is refused. NULL is left alone.
 */
enum vpmu_status vpmu_kvm_detach(struct vpmu_kvm *pmu);

/**
 * Has each overflow add 1 to this eventfd, in place of writing to `kvm_run.immediate_exit`. Before the vCPU first runs.
 * The descriptor stays the caller's.
 */
enum vpmu_status vpmu_kvm_kick_by_eventfd(struct vpmu_kvm *pmu,
                                          int eventfd);

/**
 * Has each overflow send this signal to the vCPU's thread, in place of writing to `kvm_run.immediate_exit`: the signal by
 * which the VMM itself takes a vCPU out of the guest. Before the vCPU first runs.
 */
enum vpmu_status vpmu_kvm_kick_by_signal(struct vpmu_kvm *pmu,
                                         int signal);

/**
 * Takes what has overflowed, delivers the interrupt that is due, and sets the deadline. On the vCPU's thread, right before
 * each KVM_RUN.
 */
enum vpmu_status vpmu_kvm_before_run(struct vpmu_kvm *pmu);

/**
 * Completes the exit if it is one of the parts', and puts one of `VPMU_KVM_COMPLETED`, `_KICKED` and `_YOURS` into `*what`.
 * On the vCPU's thread, right after each KVM_RUN, however it ended.
 */
enum vpmu_status vpmu_kvm_after_run(struct vpmu_kvm *pmu,
                                    uint32_t *what);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`, while no vCPU of the VM runs. With `rdpmc` of the options, the places in the guest's memory are among
 * them. The PMU can go on. First complete the last exit: a KVM_RUN with `immediate_exit`, between `vpmu_kvm_before_run` and
 * `_after_run`. The vCPU's thread still lives, or has called
 * `vpmu_kvm_release_thread`.
 */
enum vpmu_status vpmu_kvm_save(struct vpmu_kvm *pmu,
                               uint8_t *buffer,
                               size_t room,
                               size_t *length);

/**
 * Goes on from the `length` bytes at `buffer`, which `vpmu_kvm_save` has written, after the guest's memory, TSC and local
 * APIC have been restored. Open its VM with these bytes (`saved` of `struct vpmu_kvm_options`).
 */
enum vpmu_status vpmu_kvm_restore(struct vpmu_kvm *pmu,
                                  const uint8_t *buffer,
                                  size_t length);

/**
 * Gives back the perf events of the thread that runs the vCPU, at that thread's end, where another thread saves the vCPU or
 * runs it on.
 */
enum vpmu_status vpmu_kvm_release_thread(struct vpmu_kvm *pmu);

/**
 * The vCPU is reset, and does not run.
 */
enum vpmu_status vpmu_kvm_reset(struct vpmu_kvm *pmu);

/**
 * Reads one of the parts' MSRs into `*value`, as KVM_GET_MSRS would. `VPMU_OUTCOME_NOT_HANDLED`: the parts have no such
 * register, or it cannot be read.
 */
enum vpmu_outcome vpmu_kvm_get_msr(struct vpmu_kvm *pmu,
                                   uint32_t index,
                                   uint64_t *value);

/**
 * Sets one of the parts' MSRs, as KVM_SET_MSRS would: a counter is written whole, and a status that a guest can only read
 * is written, too. `VPMU_OUTCOME_GENERAL_PROTECTION`: the register has no such value.
 */
enum vpmu_outcome vpmu_kvm_set_msr(struct vpmu_kvm *pmu,
                                   uint32_t index,
                                   uint64_t value);

/**
 * Waits until the deadline expires, and delivers its interrupt. On a thread of the VMM's, again and again. Also returns
 * after `vpmu_kvm_wake_deadline`.
 */
enum vpmu_status vpmu_kvm_serve_deadline(struct vpmu_kvm *pmu);

/**
 * Ends another thread's wait in `vpmu_kvm_serve_deadline`. The deadline stays.
 */
enum vpmu_status vpmu_kvm_wake_deadline(struct vpmu_kvm *pmu);

/**
 * Writes what the vCPU has cost until now to `*statistics`, whose `size` says how large the struct is. Any thread may
 * call this.
 */
enum vpmu_status vpmu_kvm_statistics(struct vpmu_kvm *pmu,
                                     struct vpmu_kvm_statistics *statistics);

/**
 * Returns one of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
 */
int32_t vpmu_kvm_counter_state(struct vpmu_kvm *pmu, uint8_t counter);

/**
 * Returns what counts: `VPMU_KVM_BACKING_HARDWARE` or `_CLOCK`, or `VPMU_STATUS_MISUSE` where nothing does.
 */
int32_t vpmu_kvm_backing(struct vpmu_kvm *pmu);

/**
 * As `vpmu_kvm_intercept`, with a filter of the VMM's own behind it: its flags (KVM_MSR_FILTER_DEFAULT_*) and its ranges.
 * KVM has 16 ranges, of which AMD's PMU takes 4 and Intel's 8. A filter that the VMM sets by itself replaces both.
 * Each bitmap has a bit for each of its MSRs.
 */
enum vpmu_status vpmu_kvm_intercept_beside(const struct vpmu_kvm_vm *vm,
                                           int vm_fd,
                                           uint32_t flags,
                                           const struct vpmu_kvm_filter_range *ranges,
                                           size_t count);

/**
 * Returns what was wrong with this thread's last refused call of `vpmu_kvm_*`, and what to do about it. The text is good
 * until the thread's next refused call.
 */
const char *vpmu_kvm_error(void);

/**
 * Returns whether the vCPU whose `vpmu_kvm_before_run` or `vpmu_kvm_after_run` was this thread's last refused call cannot
 * go on: KVM has refused a call in the middle of an exit or of an interrupt, and the VM is to end. After any other refusal
 * of these functions the vCPU is as it was: once the cause is gone, call `vpmu_kvm_before_run` again before the vCPU runs.
 */
bool vpmu_kvm_error_is_fatal(void);

/**
 * Finds what this host can offer a VM's guest, and puts it into `*vm`. May be called before there is a VM. `memory` is
 * copied; NULL: nothing that is offered needs it. Give the VM back by `vpmu_kvm_close`.
 *
 * The functions of `memory` may be called with its context until the VM is closed and its last PMU
 * is detached.
 */
enum vpmu_status vpmu_kvm_open(const struct vpmu_kvm_options *options,
                               const struct vpmu_kvm_memory *memory,
                               struct vpmu_kvm_vm **vm);

/**
 * Gives a VM back. PMUs that are attached stay. NULL is left alone.
 */
enum vpmu_status vpmu_kvm_close(struct vpmu_kvm_vm *vm);

/**
 * Writes the MSRs of the offered parts, for a VMM with a filter of its own in place of `vpmu_kvm_intercept`: their number to
 * `count`, and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there are more.
 */
enum vpmu_status vpmu_kvm_msrs(const struct vpmu_kvm_vm *vm,
                               uint32_t *msrs,
                               size_t room,
                               size_t *count);

/**
 * Has KVM hand the offered parts' MSRs over, and no others, and switches off KVM's own PMU. Before the first vCPU is made.
 * A VMM with other MSRs of its own uses `vpmu_kvm_intercept_beside`.
 */
enum vpmu_status vpmu_kvm_intercept(const struct vpmu_kvm_vm *vm,
                                    int vm_fd);

/**
 * Makes the CPUID in `*count` entries that of a processor with the offered parts, after the VMM's own changes. There is
 * room for `room` entries; the parts may need six more than there are.
 */
enum vpmu_status vpmu_kvm_cpuid(const struct vpmu_kvm_vm *vm,
                                struct vpmu_kvm_cpuid_entry *entries,
                                size_t *count,
                                size_t room,
                                uint32_t tsc_khz);

/**
 * Changes bits 11 and 12 of `*value`, the guest's IA32_MISC_ENABLE, to what the offered PMU has. The VMM gives the register
 * this value before the vCPU runs.
 */
enum vpmu_status vpmu_kvm_misc_enable(const struct vpmu_kvm_vm *vm,
                                      uint64_t *value);

/**
 * Returns the system calls of a vCPU's thread for its PMU, as seccompiler's JSON. The text stays for ever.
 */
const char *vpmu_kvm_seccomp_rules(void);

/**
 * Returns the system calls of a thread that makes VMs, in the same form: those of `vpmu_kvm_open`, `_intercept`, `_attach`,
 * `_restore` and `_detach`.
 */
const char *vpmu_kvm_seccomp_setup_rules(void);

/**
 * To be called by a VMM's own handler of SIGIO: the kernel sends it in place of the overflows' signal when its queue is
 * full. Without such a handler, the library's does.
 */
void vpmu_kvm_overrun(void);

/**
 * Makes a PMU out of reset in `pmu`, not loaded. `VPMU_STATUS_CONFIG`: the CPU cannot be divided
 * so, or has no PMUv3.
 *
 * The functions of `registers` may be called with its context until the PMU
 * is used no more.
 */
enum vpmu_status vpmu_partition_init(struct vpmu_partition *pmu,
                                     const struct vpmu_partition_config *config,
                                     const struct vpmu_registers *registers);

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
 * Performs a trapped MRS or MSR, as `vpmu_arm_access` does. AArch32 accesses of EL0 (exception classes 0x03 and 0x04)
 * are the caller's to translate to the AArch64 register's ISS.
 */
enum vpmu_outcome vpmu_partition_access(struct vpmu_partition *pmu,
                                        uint32_t iss,
                                        bool el0,
                                        uint64_t *value);

/**
 * The guest has been left. To be called first at each exit: before PMUv3p5, this is what keeps the
 * guest's counters from counting at EL2.
 */
enum vpmu_status vpmu_partition_exited(struct vpmu_partition *pmu);

/**
 * Tells whose a physical PMU interrupt is: `guest` becomes whether the guest's line is high, `host`
 * the host's counters that overflowed, whose overflow bits are cleared.
 */
enum vpmu_status vpmu_partition_overflow(struct vpmu_partition *pmu, bool *guest, uint32_t *host);

/**
 * The level of the guest's PMU interrupt, wherever its registers are.
 */
bool vpmu_partition_line(struct vpmu_partition *pmu);

/**
 * The guest is about to run on this CPU, whose MDCR_EL2.HPMN is that of `vpmu_partition_traps`. Load and put on the same
 * CPU, with an ISB between a write of MDCR_EL2 and either.
 */
enum vpmu_status vpmu_partition_load(struct vpmu_partition *pmu);

/**
 * As `vpmu_partition_load`, right after `left`, the PMU of another guest, was put on this CPU. Writes only the registers that
 * `left` had otherwise. Nothing may have accessed PMU registers of guests since. `VPMU_STATUS_MISUSE`: also where `left` is
 * `pmu` itself.
 */
enum vpmu_status vpmu_partition_load_after(struct vpmu_partition *pmu,
                                           struct vpmu_partition *left);

/**
 * The guest no longer runs on this CPU. Its counters stop and are in memory.
 */
enum vpmu_status vpmu_partition_put(struct vpmu_partition *pmu);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. A loaded PMU is put first.
 */
enum vpmu_status vpmu_partition_save(struct vpmu_partition *pmu,
                                     uint8_t *buffer,
                                     size_t room,
                                     size_t *length);

/**
 * Goes on from the `length` bytes at `buffer`, which a save has written. A loaded PMU is put first.
 */
enum vpmu_status vpmu_partition_restore(struct vpmu_partition *pmu,
                                        const uint8_t *buffer,
                                        size_t length);

/**
 * Returns the version of the library that the program runs with: major, minor and patch, 8 bits each, the major in bits
 * 23:16. Programs that were compiled against a library of the same major version go on to work. Before 1.0, of the same
 * minor version.
 */
uint32_t vpmu_version(void);

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
enum vpmu_status vpmu_x86_cpuid(struct vpmu_x86 *pmu,
                                uint32_t leaf,
                                uint32_t subleaf,
                                struct vpmu_cpuid *answer);

/**
 * The MSRs to intercept: their number to `count`, and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there
 * are more.
 */
enum vpmu_status vpmu_x86_msrs(struct vpmu_x86 *pmu,
                               uint32_t *msrs,
                               size_t room,
                               size_t *count);

/**
 * Performs a guest's RDMSR.
 */
enum vpmu_outcome vpmu_x86_rdmsr(struct vpmu_x86 *pmu, uint32_t msr, uint64_t *value);

/**
 * Performs a guest's WRMSR.
 */
enum vpmu_outcome vpmu_x86_wrmsr(struct vpmu_x86 *pmu, uint32_t msr, uint64_t value);

/**
 * Performs a guest's RDPMC with `index` in ECX. `user`: its CPL is not 0; `pce`: its CR4.PCE is
 * set.
 */
enum vpmu_outcome vpmu_x86_rdpmc(struct vpmu_x86 *pmu,
                                 uint32_t index,
                                 bool user,
                                 bool pce,
                                 uint64_t *value);

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

/**
 * The vCPU starts to run: what the guest has enabled counts again.
 */
enum vpmu_status vpmu_x86_load(struct vpmu_x86 *pmu);

/**
 * The vCPU stops running: nothing counts, and all that was counted is in the registers.
 */
enum vpmu_status vpmu_x86_put(struct vpmu_x86 *pmu);

/**
 * The vCPU is reset. No host counter is left.
 */
enum vpmu_status vpmu_x86_reset(struct vpmu_x86 *pmu);

/**
 * A scheduling slice is over: host counters that the guest did not use in it are released. At any regular moment, for
 * instance each 100 ms.
 */
enum vpmu_status vpmu_x86_end_slice(struct vpmu_x86 *pmu);

/**
 * One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
 */
int32_t vpmu_x86_counter_state(struct vpmu_x86 *pmu, uint8_t counter);

/**
 * Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
 * `length`. Nothing stops: the PMU can go on.
 */
enum vpmu_status vpmu_x86_save(struct vpmu_x86 *pmu, uint8_t *buffer, size_t room, size_t *length);

/**
 * Goes on from the `length` bytes at `buffer`, which a save has written.
 */
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
}  // extern "C"
#endif  // __cplusplus

#endif  /* VPMU_H */
