//! The statistics, in the form that the lab reads.

use std::collections::BTreeMap;

use serde_json::Value;
use vpmu_kvm::Statistics;

/// Returns exits and host operations by name, without those that have not
/// happened.
pub(crate) fn to_json(statistics: &Statistics) -> Value {
    let exits: BTreeMap<String, u64> = statistics
        .exits
        .iter()
        .filter(|&(_, count)| count != 0)
        .map(|(exit, count)| (exit.to_string(), count))
        .collect();
    let calls = &statistics.host;
    let host = [
        ("create", calls.creates),
        ("set_period", calls.set_periods),
        ("resume", calls.resumes),
        ("pause", calls.pauses),
        ("read", calls.reads),
        ("release", calls.releases),
    ];
    let host: BTreeMap<&str, u64> = host.into_iter().filter(|(_, n)| *n != 0).collect();
    let mut json = serde_json::json!({
        "exits": exits,
        "host_operations": host,
        "lost": calls.lost + calls.unsupported,
        "part_time": calls.part_time,
        "reports": calls.reports,
        "spurious_reports": calls.spurious_reports,
        "deadline": statistics.deadline,
    });
    for (name, count) in statistics.figures() {
        match name.split_once('.') {
            None => json[name] = count.into(),
            // Above, with other names.
            Some(("host", _)) => {}
            Some((group, name)) => json[group][name] = count.into(),
        }
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu_kvm::Exit;

    #[test]
    fn what_has_not_happened_is_left_out() {
        let mut statistics = Statistics::new();
        statistics.count(Exit::MsrRead(0x38e));
        (statistics.pmis, statistics.longest_stuck_ns) = (3, 7);
        statistics.host.reads = 2;
        (statistics.host.lost, statistics.host.unsupported) = (1, 4);
        let json = to_json(&statistics);
        assert_eq!(json["exits"], serde_json::json!({"msr:read:0x38e": 1}));
        assert_eq!(json["pmis"], 3);
        assert_eq!(json["longest_stuck_ns"], 7);
        assert_eq!(json["host_operations"], serde_json::json!({"read": 2}));
        assert_eq!(json["lost"], 5, "whoever knew");
        assert_eq!(json["pebs"]["records"], 0);
        assert_eq!(json["arming"]["longest_ns"], 0);
    }
}
