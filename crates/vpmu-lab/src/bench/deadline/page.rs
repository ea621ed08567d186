//! The words of `docs/results/deadline.md`.

use crate::report::markdown::{Page, Part};

pub(in crate::bench) const PAGE: Page = Page {
    title: "The lazy TSC deadline: results",
    intro: "\
`vpmu bench deadline --json FILE`: a stock Debian 13 host (KVM) under QEMU, in it `vpmu-vmm --no-pmu
--lazy-deadline` with two vCPUs, in that a stock Debian 12 kernel (6.1) with the module `guest/lazy_deadline`. In
mode `plain` the module writes what the stock driver writes, and measures. The clock counts instructions, so all
times are the guest's, and the same on every machine; another build of `vpmu-vmm` moves moments, and with them
counts by a percent or so. Why the rig is as it is: [lazy-deadline.md](../lazy-deadline.md).

- Exits, MSR writes and wake-ups by cause (`exits`, `msr_writes`, `woken`) are KVM's own tracepoints on the host, from
  the workload's begin to its end.
- `guest` and the latencies are the module's counters: from a deadline to its handler, for each timer interrupt that
  was due. Percentiles are buckets' lower bounds, 3 % wide.
- `halted_wakeups`: timer interrupts that found their CPU idle and no deadline due (`guest:idle_extra`). `woken` counts
  wake-ups of a halted vCPU by what KVM injects next; `nothing` has other causes than the timer, too.
- `_gone` and `_ratio` are against `plain`.
- `boots`: how many are summed. `crashed_boots`: boots that QEMU's repeated interrupt ended, and that were made anew.

The published figures are of \"KVM: x86: introduce pv feature lazy tscdeadline\" (RFC, July 2023): netperf's TCP_RR on
hardware, with exits that end an interrupt avoided by the processor (`apic-eoi`).",
    parts: &[
        Part {
            suffix: "",
            heading: "TCP request/response between two vCPUs, 1500 times in each boot",
        },
        Part {
            suffix: ":pipe",
            heading: "`perf bench sched pipe`, 800 times",
        },
        Part {
            suffix: ":idle",
            heading: "An idle guest, 10 seconds",
        },
        Part {
            suffix: ":sleep",
            heading: "Sleeps of a millisecond on one vCPU, 1000 times",
        },
    ],
};
