//! Events of one ring (`cycles:u`, `cycles:k`) in stock guests, where a clock counts; an unprivileged user's perf, which
//! knows no others.

use std::process::Command;

use crate::support::{Compared, NO_SYMBOLS, compared, nested_vpmu, turn};

/// Some 70 percent user space, by instructions that are known, and then the kernel. Each line that the test reads begins
/// with a word of its own.
const SCRIPT: &str = r#"
counts() { awk -F, -v what=$1 '/^[0-9<]/ && NF { printf "%s %s %s\n", what, $3, $1 }' stat; }
samples() { perf report -i p --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }'; }
echo 'workload --scale 840; dd if=/dev/zero of=/dev/null bs=1M count=33 2> /dev/null' > mixed
perf stat -x, -o stat -e cycles sh mixed; counts alone
perf stat -x, -o stat -e cycles,cycles:u,cycles:k sh mixed; counts mixed
for ring in u k; do
    perf record --no-bpf-event -q -c 500000 -e cycles:$ring -o p sh mixed
    perf script -i p -F ip 2> /dev/null | awk -v ring=$ring '
        { n++; k += ($1 ~ /^ffff/) }
        END { print "sampled cycles:" ring, n; print "kernel cycles:" ring, k + 0 }'
done
echo 2 > /proc/sys/kernel/perf_event_paranoid
mkdir -m 777 /tmp/nobody
cat > /tmp/nobody/do << 'END'
cd /tmp/nobody
echo "user id $(id -u)"
perf stat -x, -o stat -e cycles,instructions ls > /dev/null
awk -F, '/^[0-9<]/ && NF { print "ls", $3, $1 }' stat
perf record --no-bpf-event -q -e cycles -F 4000 -o p workload --scale 300 > /dev/null 2>&1
perf script -i p -F ip,sym 2> /dev/null | awk '
    { n++; foo += ($2 == "foo"); k += ($1 ~ /^ffff/) }
    END { print "nobodys samples", n + 0; print "nobodys foo", foo + 0; print "nobodys kernel", k + 0 }'
END
start-stop-daemon -S -c 65534:65534 -x /bin/sh -- /tmp/nobody/do
true"#;

fn check(model: &str) {
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(", maybe with a PMU of the host's, and in real time") else {
        return;
    };
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", model]);
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let Compared {
        console: all, run, ..
    } = compared(&mut vpmu, options, &script);
    let said = |words: &str| {
        let rest = all.lines().find_map(|line| line.trim().strip_prefix(words));
        rest.unwrap_or_else(|| panic!("no {words}")).trim()
    };
    let number = |words: &str| -> f64 { said(words).parse().unwrap() };

    let [whole, user, kernel] =
        ["cycles", "cycles:u", "cycles:k"].map(|event| number(&format!("mixed {event} ")));
    // A value that was given never falls: the ring that is left last may keep a block of samples, 2 ms of some 128, too much.
    let sum = (user + kernel) / whole;
    assert!((sum - 1.0).abs() < 0.02, "{sum}");
    // An instruction is a cycle here. What three programs take to start is a little more.
    let known = 84e6 / number("alone cycles ");
    let share = user / whole;
    assert!((0.6..0.75).contains(&known), "{known}");
    assert!((share - known).abs() < 0.03, "{share} of {known}");

    for ring in ["u", "k"] {
        // Taking samples takes time, which is counted, too.
        let counted = number(&format!("mixed cycles:{ring} "));
        let samples = number(&format!("sampled cycles:{ring} "));
        assert!(
            (0.85..1.4).contains(&(samples * 500e3 / counted)),
            "{ring}: {samples} of {counted}"
        );
        let in_kernel = number(&format!("kernel cycles:{ring} "));
        assert_eq!(
            in_kernel,
            if ring == "u" { 0.0 } else { samples },
            "cycles:{ring}"
        );
    }

    assert_eq!(said("user id "), "65534");
    // Some 0.7 ms in all, at most half of which is user space's.
    let cycles = number("ls cycles:u ");
    assert!((50e3..600e3).contains(&cycles), "{cycles}");
    if model == "intel" {
        assert_eq!(said("ls instructions:u "), "<not supported>");
    }
    let samples = number("nobodys samples ");
    assert!(samples > 50.0);
    assert_eq!(number("nobodys kernel "), 0.0);
    let half = number("nobodys foo ") / samples;
    assert!((half - 0.5).abs() < 0.12, "{half}");

    if model == "intel" {
        assert_eq!(run["vmm"]["measured"]["lost"], 0, "{run}");
    }
}

#[test]
fn each_ring_is_counted_and_sampled_by_itself() {
    check("intel");
}

#[test]
#[ignore = "long: script/test --long"]
fn each_ring_of_amds_is_counted_and_sampled_by_itself() {
    check("amd");
}
