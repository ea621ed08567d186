/*
 * vpmu: VMMs on Linux KVM. They count by perf events and allocate. Calls for one PMU wait for one another.
 *
 * Made from the Rust sources by cbindgen. Do not edit. vpmu.h says what holds for all calls.
 */

#ifndef VPMU_KVM_H
#define VPMU_KVM_H

#include "vpmu_types.h"

/** Run the vCPU again: the exit was completed. */
#define VPMU_KVM_COMPLETED 0

/**
 * Run the vCPU again: there was no exit, but an overflow, and `immediate_exit` is not 1. A signal of the VMM's own may
 * have come at the same time.
 */
#define VPMU_KVM_KICKED 1

/** The exit, or the interruption by a signal, is the VMM's, and is as KVM has made it. */
#define VPMU_KVM_YOURS 2

/** AMD's PMU where the host's processor is AMD's, else Intel's. */
#define VPMU_KVM_MODEL_AUTO 0

/** Intel's architectural PMU. On a host of AMD's the guest's processor becomes Intel's. */
#define VPMU_KVM_MODEL_INTEL 1

/** AMD's core extension: six counters, without global registers. On hosts of AMD's. */
#define VPMU_KVM_MODEL_AMD 2

/** AMD's PerfMonV2. On hosts of AMD's. */
#define VPMU_KVM_MODEL_AMD_V2 3

/** The paravirtual PMU, for guests with its driver. The VMM offers its guest no other. Needs the guest's memory. */
#define VPMU_KVM_MODEL_PARAVIRTUAL 4

/** No PMU. Nothing is asked of perf. */
#define VPMU_KVM_MODEL_NONE 5

/** The processor's counters where they are available, else a clock. */
#define VPMU_KVM_BACKING_AUTO 0

/** The processor's counters. */
#define VPMU_KVM_BACKING_HARDWARE 1

/** The thread's time on the CPU. */
#define VPMU_KVM_BACKING_CLOCK 2

/** Where a clock counts, the guest's time and the host's while it completes the guest's exits. */
#define VPMU_KVM_FREEZE_VM 0

/** Where a clock counts, the guest's time alone. */
#define VPMU_KVM_FREEZE_GUEST 1

/** The guest has no PEBS. */
#define VPMU_KVM_PEBS_OFF 0

/** The guest has PEBS. The host's kernel samples the guest where perf can do that, else each record takes an exit. */
#define VPMU_KVM_PEBS_AUTO 1

/** The guest has PEBS. Each record takes an exit. */
#define VPMU_KVM_PEBS_EXIT 2

/** The guest has PEBS. The host's kernel samples the guest into its ring buffer. */
#define VPMU_KVM_PEBS_BUFFER 3

/** One vCPU's PMU, counted by perf events of the vCPU's thread, and its lazy deadline. */
struct vpmu_kvm;

/** What a VM's guest is offered, and how the host counts for it. */
struct vpmu_kvm_vm;

/** The cost of one vCPU, for `vpmu_kvm_statistics`. */
struct vpmu_kvm_statistics {
  /** `sizeof(struct vpmu_kvm_statistics)`, before the call. */
  size_t size;
  /** PMIs delivered to the guest. */
  uint64_t pmis;
  /** PMIs that found LVTPC masked. */
  uint64_t masked_pmis;
  /** Exits for the parts' MSRs. */
  uint64_t msr_exits;
  /** Exits for RDPMC. */
  uint64_t rdpmc_exits;
  /** Runs that ended without an exit. */
  uint64_t kicks;
  /** Perf events that were made. */
  uint64_t creates;
  /** Counters that the host could not back, or only part of the time, how often. */
  uint64_t lost;
  /** PEBS records written. */
  uint64_t pebs_records;
  /** PEBS records for which there was no room or no memory. */
  uint64_t pebs_lost;
  /** The longest time, ns, for which a counter of cycles stood still between its reads although its perf event ran. */
  uint64_t longest_stuck_ns;
};

/** A range of a VMM's own MSR filter, laid out as Linux's `struct kvm_msr_filter_range`. */
struct vpmu_kvm_filter_range {
  /** KVM_MSR_FILTER_READ and _WRITE. */
  uint32_t flags;
  /** The number of MSRs. */
  uint32_t nmsrs;
  /** The first. */
  uint32_t base;
  /** A bit for each MSR, which KVM performs where it is set, and hands over where it is clear. */
  const uint8_t *bitmap;
};

/** What a VM's guest is offered, for `vpmu_kvm_open`. Zero is each field's default, but for `size`. */
struct vpmu_kvm_options {
  /** `sizeof(struct vpmu_kvm_options)`: a later library has more fields, and finds those that the program lacks zero. */
  size_t size;
  /** One of `VPMU_KVM_MODEL_*`. */
  uint32_t model;
  /** The version of Intel's architectural performance monitoring, 2 to 5. 0: 5. With Intel's model only. */
  uint32_t perfmon;
  /** One of `VPMU_KVM_PEBS_*`. With Intel's model only. Needs the guest's memory. */
  uint32_t pebs;
  /** One of `VPMU_KVM_BACKING_*`. */
  uint32_t backing;
  /** One of `VPMU_POLICY_*`. */
  uint32_t policy;
  /** The real-time signal by which perf reports overflows to the vCPU's thread. 0: SIGRTMIN+1. */
  int signal;
  /** Where only a clock counts: offer instructions and branches too, one for each cycle. */
  bool approximate_instructions;
  /** Whether the guest has the lazy TSC deadline. Needs the guest's memory. */
  bool deadline;
  /**
   * Whether the guest's RDPMC comes to the VMM at run time, by way of the guest's own handler of #GP: any 64-bit Linux, user
   * space included. Needs the guest's memory. Without this, the guest's kernel is one that `vpmu rewrite-kernel` has
   * rewritten.
   */
  bool rdpmc;
  /**
   * Whether PEBS records may be some instructions late, as those of the processor's counters are: the guest cannot see that.
   * Without this, such a host offers no PEBS.
   */
  bool pebs_skid;
  /**
   * The bytes of a saved vCPU, whose guest is then offered what it had: `model`, `perfmon` and `deadline` are not
   * read. Null: a new guest.
   */
  const uint8_t *saved;
  /** How many bytes these are. */
  size_t saved_length;
  /** One of `VPMU_KVM_FREEZE_*`. */
  uint32_t freeze;
  /** 0. */
  uint32_t reserved;
};

/**
 * The guest's RAM by its physical addresses, which the guest chooses: neither devices, nor memory that the guest may not
 * write. The functions are called from any thread until the VM's last PMU has been detached and the VM is closed.
 */
struct vpmu_kvm_memory {
  /** Handed to both functions. */
  void *context;
  /**
   * Returns where `length` bytes of the guest's RAM from `address` on are mapped, or NULL where not all of them are
   * RAM in one piece. They stay mapped until the VM's last vCPU has stopped.
   */
  void *(*map)(void *context, uint64_t address, size_t length);
  /** Called with bytes that were written, for a log of pages; may be NULL. */
  void (*written)(void *context, uint64_t address, size_t length);
};

/** One entry of a vCPU's CPUID, laid out as Linux's `struct kvm_cpuid_entry2`. */
struct vpmu_kvm_cpuid_entry {
  /** The leaf. */
  uint32_t function;
  /** The subleaf. */
  uint32_t index;
  /** Bit 0: the subleaf matters. */
  uint32_t flags;
  /** EAX. */
  uint32_t eax;
  /** EBX. */
  uint32_t ebx;
  /** ECX. */
  uint32_t ecx;
  /** EDX. */
  uint32_t edx;
  /** Zero. */
  uint32_t padding[3];
};

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Publishes the statistics of the vCPUs that are attached from now on in a file that `vpmu top` and `vpmu metrics` read:
 * `/run/vpmu/PID` where this process may write there, else `$XDG_RUNTIME_DIR/vpmu/PID`, else nowhere, which is no error.
 * After the process has become a daemon, and before its seccomp filter. Where the file cannot be made, guests run
 * unpublished. The file goes with the process.
 */
enum vpmu_status vpmu_kvm_publish(void);

/**
 * Makes the offered parts of a vCPU, out of reset, and puts them into `*pmu`. Give them back by `vpmu_kvm_detach`. The
 * descriptors stay the caller's. Before the seccomp filter, on any thread. With a PMU, installs a handler of the
 * overflows' signal, and of SIGIO unless there is one.
 */
enum vpmu_status vpmu_kvm_attach(const struct vpmu_kvm_vm *vm, int vm_fd, int vcpu_fd, struct vpmu_kvm **pmu);

/**
 * Ends a PMU, on any thread while its vCPU does not run. Each later call with it is refused, and so is a wait in
 * `vpmu_kvm_serve_deadline`, which ends. The guest's memory is not used any more when this returns. NULL is left alone.
 */
enum vpmu_status vpmu_kvm_detach(struct vpmu_kvm *pmu);

/**
 * Has each overflow add 1 to this eventfd, in place of writing to `kvm_run.immediate_exit`. Before the vCPU first runs.
 * The descriptor stays the caller's.
 */
enum vpmu_status vpmu_kvm_kick_by_eventfd(struct vpmu_kvm *pmu, int eventfd);

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

/** The vCPU is reset, and does not run. */
enum vpmu_status vpmu_kvm_reset(struct vpmu_kvm *pmu);

/**
 * Reads one of the parts' MSRs into `*value`, as KVM_GET_MSRS would. `VPMU_OUTCOME_NOT_HANDLED`: the parts have no such
 * register, or it cannot be read.
 */
enum vpmu_outcome vpmu_kvm_get_msr(struct vpmu_kvm *pmu, uint32_t index, uint64_t *value);

/**
 * Sets one of the parts' MSRs, as KVM_SET_MSRS would: a counter is written whole, and a status that a guest can only read
 * is written, too. `VPMU_OUTCOME_GENERAL_PROTECTION`: the register has no such value.
 */
enum vpmu_outcome vpmu_kvm_set_msr(struct vpmu_kvm *pmu,
                                   uint32_t index,
                                   uint64_t value);

/**
 * Waits until the deadline expires, and delivers its interrupt. On a thread of the VMM's, again and again. Also returns
 * after `vpmu_kvm_wake_deadline`, and is refused after `vpmu_kvm_detach`.
 */
enum vpmu_status vpmu_kvm_serve_deadline(struct vpmu_kvm *pmu);

/** Ends another thread's wait in `vpmu_kvm_serve_deadline`. The deadline stays. */
enum vpmu_status vpmu_kvm_wake_deadline(struct vpmu_kvm *pmu);

/**
 * Writes what the vCPU has cost until now to `*statistics`, whose `size` says how large the struct is. Any thread may
 * call this.
 */
enum vpmu_status vpmu_kvm_statistics(struct vpmu_kvm *pmu, struct vpmu_kvm_statistics *statistics);

/** Returns one of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist. */
int32_t vpmu_kvm_counter_state(struct vpmu_kvm *pmu, uint8_t counter);

/** Returns what counts: `VPMU_KVM_BACKING_HARDWARE` or `_CLOCK`, or `VPMU_STATUS_MISUSE` where nothing does. */
int32_t vpmu_kvm_backing(struct vpmu_kvm *pmu);

/**
 * As `vpmu_kvm_intercept`, with a filter of the VMM's own behind it: its flags (KVM_MSR_FILTER_DEFAULT_*) and its ranges.
 * KVM has 16 ranges, of which the MSRs of AMD's PMU take 3 and of Intel's up to 9, and the deadline and RDPMC 3 more. A
 * filter that the VMM sets by itself replaces both.
 *
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

/** Gives a VM back. PMUs that are attached stay. NULL is left alone. */
enum vpmu_status vpmu_kvm_close(struct vpmu_kvm_vm *vm);

/** Returns what the VM's guest cannot find out, for the VMM's log, a string that stays; NULL: nothing. */
const char *vpmu_kvm_warning(const struct vpmu_kvm_vm *vm);

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

/** Returns the system calls of a vCPU's thread for its PMU, as seccompiler's JSON. The text stays for ever. */
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

#ifdef __cplusplus
}
#endif

#endif /* VPMU_KVM_H */
