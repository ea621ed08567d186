//! Reads `/proc/interrupts`: the number of interrupts that the machine took,
//! and the number of those that came from the PMU.
//!
//! The file has a heading with one word per online CPU, then one line per
//! source: `LABEL: COUNT.. DESCRIPTION`. The kernel's Arm PMU driver requests
//! its interrupt under the name `arm-pmu` (`drivers/perf/arm_pmu.c`). On x86 the
//! PMU has no source of its own, whatever delivers its interrupts; the kernel
//! counts those it handled under the label `PMI`.

/// Interrupts counted since boot, over all CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Interrupts {
    /// Every source, inter-processor interrupts included.
    pub all: u64,
    /// The PMU's interrupts; `None` when no PMU driver holds an interrupt.
    pub pmu: Option<u64>,
}

impl Interrupts {
    /// Sums `text`, the contents of `/proc/interrupts`. Lines of another shape
    /// count nothing.
    pub fn parse(text: &[u8]) -> Self {
        let mut lines = text.split(|&byte| byte == b'\n');
        let cpus = words(lines.next().unwrap_or_default()).count();
        let mut sum = Self::default();
        for line in lines {
            let mut fields = words(line).peekable();
            let Some(label) = fields.next().and_then(|label| label.strip_suffix(b":")) else {
                continue;
            };
            let mut count = 0_u64;
            for _ in 0..cpus {
                let Some(number) = fields.peek().and_then(|word| number(word)) else {
                    break;
                };
                count = count.wrapping_add(number);
                fields.next();
            }
            // The NMIs already include the PMIs.
            let pmi = label == b"PMI";
            if !pmi {
                sum.all = sum.all.wrapping_add(count);
            }
            if pmi || fields.any(|word| word == b"arm-pmu") {
                sum.pmu = Some(sum.pmu.unwrap_or(0).wrapping_add(count));
            }
        }
        sum
    }

    /// Returns the interrupts after `earlier`. The PMU's share is known when
    /// its driver holds the interrupt now; a driver that came meanwhile began
    /// at 0.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            all: self.all.wrapping_sub(earlier.all),
            pmu: self
                .pmu
                .map(|count| count.wrapping_sub(earlier.pmu.unwrap_or(0))),
        }
    }
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty())
}

fn number(word: &[u8]) -> Option<u64> {
    str::from_utf8(word).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_CPUS: &[u8] = b"\
           CPU0       CPU1       \n \
 11:        100         20    GICv3  27 Level     arch_timer\n \
 14:          3          4    GICv3  23 Level     arm-pmu\n \
 16:         10          0    GICv3  33 Level     uart-pl011\n\
IPI0:         5          6       Rescheduling interrupts\n\
Err:          0\n";

    #[test]
    fn sums_over_cpus() {
        let counted = Interrupts::parse(TWO_CPUS);
        assert_eq!(counted.all, 148);
        assert_eq!(counted.pmu, Some(7));
    }

    #[test]
    fn a_number_in_the_description_is_not_a_count() {
        let counted = Interrupts::parse(b" CPU0\n 14: 3 GICv3 23 Level arm-pmu\n");
        assert_eq!((counted.all, counted.pmu), (3, Some(3)));
        let counted = Interrupts::parse(b" CPU0\n 14: 3 23 arm-pmu\n");
        assert_eq!(counted.pmu, Some(3));
    }

    #[test]
    fn x86_has_a_line_of_its_own() {
        let text =
            b" CPU0\n NMI: 9 Non-maskable interrupts\n PMI: 7 Performance monitoring interrupts\n";
        let counted = Interrupts::parse(text);
        assert_eq!((counted.all, counted.pmu), (9, Some(7)));
    }

    #[test]
    fn pmu_is_unknown_without_a_driver() {
        let counted = Interrupts::parse(b"   CPU0\n 11: 9 GICv3 27 Level arch_timer\n");
        assert_eq!((counted.all, counted.pmu), (9, None));
        assert_eq!(Interrupts::parse(b""), Interrupts::default());
        assert_eq!(Interrupts::parse(b"\n:\nx: y\n\xff").all, 0);
    }

    #[test]
    fn growth() {
        let earlier = Interrupts {
            all: 10,
            pmu: Some(2),
        };
        let later = Interrupts {
            all: 25,
            pmu: Some(9),
        };
        assert_eq!(later.since(earlier).pmu, Some(7));
        assert_eq!(later.since(earlier).all, 15);
        assert_eq!(later.since(Interrupts::default()).pmu, Some(9));
        assert_eq!(Interrupts::default().since(earlier).pmu, None);
    }
}
