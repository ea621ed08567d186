/*
 * vpmu: performance counters for virtual machines, for hypervisors written in C.
 *
 * Give the engine a host (functions that make, start, stop and read counters) or the registers of the CPU, hand it each
 * trapped access of the guest, act on the outcome, and deliver the interrupt. The engine allocates nothing and keeps no
 * state of its own: each PMU is a struct of the caller's, one for each vCPU. The functions vpmu_kvm_* are for VMMs on
 * Linux KVM: they count by perf events and allocate.
 *
 * Calls for the same PMU must not overlap, but those of vpmu_kvm_*, which wait for one another. The caller promises: a
 * pointer is null or points to what its type says, of the length that is stated with it, and nobody else uses that memory
 * during the call. A null or misaligned pointer, or a PMU that was not initialized, is answered with VPMU_STATUS_MISUSE (or
 * false), and nothing happens. Memory that is handed to an init function is zeroed, or holds a PMU, whose host counters are
 * released first.
 *
 * This header has all parts. Each can be included by itself.
 */

#ifndef VPMU_H
#define VPMU_H

#include "vpmu_arm.h"
#include "vpmu_kvm.h"
#include "vpmu_x86.h"

#endif /* VPMU_H */
