//! What the HTML page says of each bench, beside its figures.

use crate::report::page::About;
use crate::report::page::story::{Chart, Highlight, Kind, Story};

use super::BENCHES;

/// Returns what is known of the bench called `name`.
pub fn about(name: &str) -> Option<About> {
    let bench = BENCHES.iter().find(|bench| bench.name == name)?;
    let story = STORIES.iter().find(|(bench, _)| *bench == name);
    Some(About {
        page: &bench.page,
        story: story.map(|(_, story)| story),
    })
}

const STORIES: &[(&str, Story)] = &[
    ("partition", PARTITION),
    ("deadline", DEADLINE),
    ("exits", EXITS),
    ("paravirt", PARAVIRT),
    ("paused", PAUSED),
    ("lbr", LBR),
    ("callstacks", CALLSTACKS),
    ("pebs", PEBS),
    ("peers", PEERS),
    ("reprogram", REPROGRAM),
    ("rings", RINGS),
    ("sampling", SAMPLING),
    ("host-profile", HOST_PROFILE),
    ("switch", SWITCH),
];

const fn bars(figure: &'static str, label: &'static str) -> Chart<'static> {
    let kind = Kind::Bars;
    Chart {
        figure,
        label,
        kind,
    }
}

const fn stack(figure: &'static str, label: &'static str) -> Chart<'static> {
    let kind = Kind::Stack;
    Chart {
        figure,
        label,
        kind,
    }
}

const PARTITION: Story = Story {
    title: "Arm: counters that are the guest's own",
    published: "2025 for KVM with ten counters",
    sentences: &[
        "A guest with counters of its own takes {exits_per_pmi@partitioned} for each PMI, under stock KVM \
         {exits_per_pmi@kvm}; where PMIs reach the guest directly, {exits_per_pmi@direct}.",
        "Sampling fifteen events then takes {perf_run_s@partitioned} in place of KVM's {perf_run_s@kvm}; \
         without a virtual machine it takes {perf_run_s@native}.",
    ],
    highlight: Highlight {
        label: "Time of perf record, 15 events",
        figure: "perf_run_s",
        from: Some("kvm"),
        to: "partitioned",
    },
    charts: &[
        bars("exits_per_pmi", "Exits for each PMI"),
        bars("perf_run_s", "Time of perf record, 15 events"),
        bars("host_share", "The hypervisor's share of the time"),
        bars("perf_run_sys_s", "Kernel time of perf record"),
        bars("samples", "Samples that perf took"),
    ],
};

const HOST_PROFILE: Story = Story {
    title: "Arm: the host profiles a guest that profiles itself",
    published: "2025 as a possibility, without a figure",
    sentences: &[
        "The hypervisor samples a guest by counters that the guest does not have, while the guest takes its own profile: a \
         function's share differs by at most {largest_share_difference_points@partitioned}.",
        "The guest then takes {guest_time_ratio@partitioned} of the time that it takes without, and a sample takes \
         {el2_instructions_per_sample@partitioned} of the hypervisor's.",
    ],
    highlight: Highlight {
        label: "Profile, host against guest",
        figure: "largest_share_difference_points",
        from: None,
        to: "partitioned",
    },
    charts: &[
        bars(
            "largest_share_difference_points",
            "Largest difference of a function's share",
        ),
        bars("guest_time_ratio", "The guest's time, against without"),
        bars(
            "guest_samples_ratio",
            "The guest's own samples, against without",
        ),
        bars("host_samples", "The host's samples"),
        bars(
            "el2_instructions_per_sample",
            "Instructions at EL2 for a sample",
        ),
    ],
};

const SWITCH: Story = Story {
    title: "Arm: two guests on one CPU, and their PMUs",
    published: "2025 as 7 to 35 registers, by the number of counters, not measured",
    sentences: &[
        "A guest that never used its PMU costs a switch {registers_per_switch:lazy@unused} and \
         {traps_per_switch:lazy@unused}; one that has stopped it {registers_per_switch:lazy@stopped}.",
        "While its counters count, all registers change hands: {registers_per_switch:lazy@all}, read or written, in \
         {instructions_per_switch:lazy@all}. An eager switch costs that whatever the guest does \
         ({registers_per_switch:eager@unused}).",
    ],
    highlight: Highlight {
        label: "PMU registers of a switch, all counting against stopped",
        figure: "registers_per_switch:lazy",
        from: Some("all"),
        to: "stopped",
    },
    charts: &[
        bars(
            "registers_per_switch",
            "PMU registers read or written at a switch",
        ),
        bars(
            "instructions_per_switch",
            "Instructions for the PMU at a switch",
        ),
        bars(
            "traps_per_switch",
            "The guests' trapped accesses for each switch",
        ),
    ],
};

const DEADLINE: Story = Story {
    title: "x86: timer deadlines that move without an exit",
    published: "2023 for KVM on Intel",
    sentences: &[
        "A guest that moves its deadline later need not tell the hypervisor: {tsc_deadline_exits_gone@paravirtual} of \
         the exits for the deadline are gone (published: {tsc_deadline_exits_gone@paravirtual!}).",
        "That makes {transactions_per_s@paravirtual/plain} times as many transactions, and one timer \
         interrupt in a hundred is later than {latency_p99_ns@paravirtual} (before: {latency_p99_ns@plain}).",
    ],
    highlight: Highlight {
        label: "Exits for a guest's timer deadline",
        figure: "tsc_deadline_exits",
        from: Some("plain"),
        to: "paravirtual",
    },
    charts: &[
        bars("tsc_deadline_exits", "Exits for the deadline"),
        bars("exits", "All exits"),
        bars("transactions_per_s", "Transactions"),
        stack("exits", "Exits by kind"),
        bars(
            "latency_median_ns",
            "From a deadline to its interrupt's handler, the median",
        ),
        bars(
            "latency_p99_ns",
            "From a deadline to its interrupt's handler, 99 of 100",
        ),
    ],
};

const EXITS: Story = Story {
    title: "x86: what a profiling session exits for",
    published: "2021 for KVM on Intel",
    sentences: &[
        "With four events sampled, each PMI takes {pmu_exits_per_pmi@paused} that serve the PMU (published: \
         {pmu_exits_per_pmi@paused!}): the handler stops and starts the counters, reads the status, and gives each \
         event its next period.",
        "One event with a fixed period takes {pmu_exits_per_pmi:one_event@paused}.",
    ],
    highlight: Highlight {
        label: "The PMU's exits for a PMI, 4 events",
        figure: "pmu_exits_per_pmi",
        from: None,
        to: "paused",
    },
    charts: &[
        stack(
            "four_events_per_pmi:exits",
            "Exits for each PMI of four events, by kind",
        ),
        stack("msr", "Registers that were accessed, in all"),
        stack("per_pmi", "Exits for each PMI of one event, by kind"),
    ],
};

const PARAVIRT: Story = Story {
    title: "x86: a PMU in shared memory",
    published: "2021 as an idea; the figure is of trapped registers",
    sentences: &[
        "A guest whose driver shares a page with the VMM takes {exits_per_pmi@paravirt} for each PMI in place of \
         {exits_per_pmi@trapped} (published for trapped registers: {exits_per_pmi@trapped!}).",
        "Its NMI handler takes {nmi_handler_ns@paravirt} in place of {nmi_handler_ns@trapped}, and a sample \
         {guest_us_per_sample@paravirt} of the guest's time in place of {guest_us_per_sample@trapped}.",
    ],
    highlight: Highlight {
        label: "Exits for each PMI, shared memory",
        figure: "exits_per_pmi",
        from: Some("trapped"),
        to: "paravirt",
    },
    charts: &[
        bars("exits_per_pmi", "Exits for each PMI"),
        bars("nmi_handler_ns", "The guest's NMI handler"),
        bars("guest_us_per_sample", "The guest's time for a sample"),
        bars(
            "exits_per_switch:1",
            "Exits for each context switch, 1 event",
        ),
        bars(
            "exits_per_switch:4",
            "Exits for each context switch, 4 events",
        ),
        bars(
            "sched_pipe_us",
            "perf bench sched pipe under perf stat, an operation",
        ),
    ],
};

const PAUSED: Story = Story {
    title: "x86: an event that is paused is left alone",
    published: "2021 for KVM on Intel",
    sentences: &[
        "A hypervisor that remembers that a host event is paused asks for {host_ops_per_pmi@paused} for each PMI \
         in place of {host_ops_per_pmi@reuse}.",
        "The guest's NMI handler then takes {nmi_handler_ns@paused} in place of {nmi_handler_ns@reuse}, a factor \
         of {nmi_handler_ns@reuse/paused} (published: {nmi_handler_ns@reuse/paused!}).",
    ],
    highlight: Highlight {
        label: "The guest's NMI handler, 12 events",
        figure: "nmi_handler_ns",
        from: Some("reuse"),
        to: "paused",
    },
    charts: &[
        bars("nmi_handler_ns", "The guest's NMI handler"),
        bars("host_ops_per_pmi", "Operations on host events for each PMI"),
        stack(
            "host_ops_per_pmi",
            "Operations on host events for each PMI, by kind",
        ),
    ],
};

const PEERS: Story = Story {
    title: "x86: beside native and KVM's own PMUs",
    published: "nowhere",
    sentences: &[
        "A sample takes {guest_us_per_sample@native} without a virtual machine, {guest_us_per_sample@mediated} under KVM's \
         mediated PMU and {guest_us_per_sample@kvm} under its emulated one. Ours takes {guest_us_per_sample@paravirt} with a \
         driver in the guest and {guest_us_per_sample@pebs-ring} as a PEBS record; by trapped interrupts \
         {guest_us_per_sample@emulated}.",
        "Tasks that take turns under perf stat of four events take {sched_pipe_us:4@native} an operation, \
         {sched_pipe_us:4@kvm} under KVM's emulated PMU, {sched_pipe_us:4@emulated} under our trapped one, and \
         {sched_pipe_us:4@paravirt} with the driver.",
    ],
    highlight: Highlight {
        label: "The guest's time for a sample",
        figure: "guest_us_per_sample",
        from: Some("kvm"),
        to: "paravirt",
    },
    charts: &[
        bars("guest_us_per_sample", "The guest's time for a sample"),
        bars(
            "sched_pipe_us",
            "perf bench sched pipe under perf stat, an operation",
        ),
        bars("sched_pipe_us:4", "The same, with four events"),
        bars(
            "multiplexed_error_percent",
            "Largest error of twelve multiplexed counts",
        ),
    ],
};

const PEBS: Story = Story {
    title: "x86: samples written into the guest's memory",
    published: "2019 as work to come, without a figure",
    sentences: &[
        "By interrupts a sample takes {exits_per_sample@none} and {guest_us_per_sample@none} of the guest's time; \
         as a PEBS record {exits_per_sample@exit} and {guest_us_per_sample@exit}; from the kernel's ring buffer \
         {exits_per_sample@ring} and {guest_us_per_sample@ring}.",
        "Where perf adapts the period, as it does by default, each sample takes exits all the same: \
         {exits_per_sample:frequency@ring}.",
    ],
    highlight: Highlight {
        label: "Exits for each sample of a fixed period",
        figure: "exits_per_sample",
        from: Some("none"),
        to: "ring",
    },
    charts: &[
        bars("exits_per_sample", "Exits for each sample, fixed period"),
        bars(
            "guest_us_per_sample",
            "The guest's time for a sample, fixed period",
        ),
        bars("nmis_per_sample", "NMIs for each sample, fixed period"),
        bars(
            "exits_per_sample:frequency",
            "Exits for each sample, plain perf record",
        ),
        bars(
            "guest_us_per_sample:frequency",
            "The guest's time for a sample, plain perf record",
        ),
        bars(
            "largest_share_difference_points",
            "Largest error of a function's share",
        ),
    ],
};

const LBR: Story = Story {
    title: "x86: last branch records on a host that has none",
    published: "2019 for processors that have them, without a figure",
    sentences: &[
        "A guest that asks for its last branches is followed at each sample, until it has taken as many as it records: \
         {exits_per_sample@predict}, and {guest_us_per_sample@predict} of its time.",
        "Of {checked_branches@predict} that were checked {wrong_branches@predict} were wrong, and \
         {full_stacks_percent@predict} of the samples had all of theirs.",
    ],
    highlight: Highlight {
        label: "The guest's time for a sample with its branches",
        figure: "guest_us_per_sample",
        from: Some("step"),
        to: "predict",
    },
    charts: &[
        bars("exits_per_sample", "Exits for each sample, to follow"),
        bars("guest_us_per_sample", "The guest's time for a sample"),
        bars("full_stacks_percent", "Samples with all of their branches"),
    ],
};

const CALLSTACKS: Story = Story {
    title: "x86: call stacks on a host that records no branches",
    published: "2019 for processors that record them, as two pictures",
    sentences: &[
        "The shares of a guest's perf record --call-graph lbr differ by at most {largest_share_difference_points@guest} from \
         those of a native --call-graph dwarf; {complete_percent@guest} of its stacks are complete.",
    ],
    highlight: Highlight {
        label: "The guest's time for a sample with its calls",
        figure: "guest_us_per_sample",
        from: Some("plain"),
        to: "guest",
    },
    charts: &[bars("guest_us_per_sample", "The guest's time for a sample")],
};

const RINGS: Story = Story {
    title: "x86: privilege rings on a host where only a clock counts",
    published: "nowhere: a processor's counters tell the rings apart",
    sentences: &[
        "A guest's counters of user space and of its kernel add up to the counter of both within \
         {ring_sum_error_percent@counting}, and user space's share is {ring_share_error_points@counting} from what the \
         guest is known to execute.",
        "By samples of each ring the two are {ring_sum_error_percent@sampling} and {ring_share_error_points@sampling}.",
    ],
    highlight: Highlight {
        label: "User space's share, counted against known",
        figure: "ring_share_error_points",
        from: None,
        to: "counting",
    },
    charts: &[
        bars(
            "ring_sum_error_percent",
            "Both rings' counters against one of both",
        ),
        bars(
            "ring_share_error_points",
            "User space's share against the known one",
        ),
    ],
};

const REPROGRAM: Story = Story {
    title: "x86: one overflow, and the host event behind it",
    published: "2018",
    sentences: &[
        "A host event that is left alone at an overflow costs {handle_overflow_ns@reuse}; one that is closed and made \
         anew {handle_overflow_ns@recreate} (published: {handle_overflow_ns@reuse!} and \
         {handle_overflow_ns@recreate!}).",
        "A guest's write to a counter then takes {rewrite_counter_ns@paused} in place of {rewrite_counter_ns@recreate}.",
    ],
    highlight: Highlight {
        label: "Handling one overflow",
        figure: "handle_overflow_ns",
        from: Some("recreate"),
        to: "reuse",
    },
    charts: &[
        bars("handle_overflow_ns", "Handling an overflow"),
        bars("rewrite_counter_ns", "A guest's write to a counter"),
        bars("host_ops_per_pmi", "Operations on host events for each PMI"),
    ],
};

const SAMPLING: Story = Story {
    title: "x86: the profile in a guest beside the host's",
    published: "2019, of a workload with other shares",
    sentences: &[
        "The workload spends 5, 50, 30 and 15 of a hundred in its four functions; profiled in a guest, a function's \
         share is at most {largest_share_difference_points@paused} from the host's profile (published: \
         {largest_share_difference_points@reuse!}).",
        "A sample takes {guest_us_per_sample@paused} of the guest's time.",
    ],
    highlight: Highlight {
        label: "Profile, guest against host",
        figure: "largest_share_difference_points",
        from: None,
        to: "reuse",
    },
    charts: &[
        Chart {
            figure: "share_points",
            label: "Samples by function, percent",
            kind: Kind::Shares,
        },
        bars(
            "largest_share_difference_points",
            "Largest difference of a share from the host's",
        ),
        bars("share_points:main", "main's share"),
        bars("share_points:foo", "foo's share"),
        bars("share_points:bar", "bar's share"),
        bars("share_points:qux", "qux's share"),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_story_is_of_a_bench() {
        for (name, _) in STORIES {
            assert!(
                about(name).is_some_and(|about| about.story.is_some()),
                "{name}"
            );
        }
        assert!(about("nothing").is_none());
    }
}
