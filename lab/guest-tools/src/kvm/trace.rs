//! KVM's tracepoints: the kernel's histograms, and the order of events.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// Reads one line of an event's histogram: the values of its keys, separated by
/// commas, and their number of occurrences. Returns `None` for the lines around
/// the table.
///
/// The kernel prints `{ write:          1, ecx:       1760 } hitcount:        514`.
pub fn histogram_line(line: &str) -> Option<(String, u64)> {
    let (keys, count) = line.strip_prefix('{')?.split_once('}')?;
    let count = count.trim_start().strip_prefix("hitcount:")?;
    let count = count.split_whitespace().next()?.parse().ok()?;
    let values: Vec<&str> = keys
        .split(',')
        .map(|key| key.split_once(':').map_or(key, |(_, value)| value).trim())
        .collect();
    Some((values.join(","), count))
}

/// Finds the interrupt for which each halted vCPU was woken: the first that is
/// injected into the vCPU afterwards. Only two lines of the trace together show
/// that, by the thread to which both belong.
#[derive(Debug, Default)]
pub struct WakeUps {
    /// Threads that have had no interrupt injected since they woke.
    waiting: BTreeSet<String>,
    count: BTreeMap<String, u64>,
    lost: u64,
}

impl WakeUps {
    /// Takes the trace's next line.
    pub fn line(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let thread = words.next().unwrap_or_default();
        if line.contains("LOST ") && line.contains(" EVENTS") {
            self.lost += 1;
        } else if line.contains(" kvm_vcpu_wakeup:") {
            if !self.waiting.insert(thread.to_string()) {
                self.add("nothing");
            }
        } else if line.contains(" kvm_inj_virq:") && self.waiting.remove(thread) {
            self.add(words.last().unwrap_or_default());
        }
    }

    /// Returns how often each interrupt (`0xec`) or `nothing` followed. The
    /// entry `lost` counts the gaps of the trace.
    pub fn finish(mut self) -> BTreeMap<String, u64> {
        self.count.insert("lost".to_string(), self.lost);
        self.count
    }

    fn add(&mut self, cause: &str) {
        *self.count.entry(cause.to_string()).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms() {
        let table = "# event histogram\n#\n# trigger info: hist:keys=write,ecx:vals=hitcount [paused]\n#\n\n\
            { write:          1, ecx:       1760 } hitcount:        514\n\
            { write:          0, ecx:        910 } hitcount:          2\n\n\
            Totals:\n    Hits: 516\n    Entries: 2\n    Dropped: 0\n";
        let read: Vec<_> = table.lines().filter_map(histogram_line).collect();
        assert_eq!(
            read,
            [("1,1760".to_string(), 514), ("0,910".to_string(), 2)]
        );
        assert_eq!(
            histogram_line("{ exit_reason:         48 } hitcount:        123"),
            Some(("48".to_string(), 123))
        );
        assert_eq!(histogram_line("{ vector: 1 } count: 2"), None);
    }

    #[test]
    fn wake_ups() {
        let mut wake_ups = WakeUps::default();
        let trace = "# tracer: nop\n\
            vcpu1-70 [000] ..... 10.1: kvm_inj_virq: IRQ 0x30\n\
            vcpu0-69 [000] ..... 10.2: kvm_vcpu_wakeup: wait time 12 ns, polling invalid\n\
            vcpu1-70 [000] ..... 10.3: kvm_vcpu_wakeup: wait time 15 ns, polling invalid\n\
            vcpu0-69 [000] ..... 10.4: kvm_inj_virq: IRQ 0xec\n\
            vcpu0-69 [000] ..... 10.5: kvm_inj_virq: IRQ 0x31\n\
            CPU:0 [LOST 3 EVENTS]\n\
            vcpu1-70 [000] ..... 10.6: kvm_vcpu_wakeup: wait time 15 ns, polling invalid\n\
            vcpu1-70 [000] ..... 10.7: kvm_inj_virq: IRQ 0xfd\n";
        trace.lines().for_each(|line| wake_ups.line(line));
        let expected = [("0xec", 1), ("0xfd", 1), ("lost", 1), ("nothing", 1)];
        let expected = expected.map(|(name, count)| (name.to_string(), count));
        assert_eq!(wake_ups.finish(), BTreeMap::from(expected));
    }
}
