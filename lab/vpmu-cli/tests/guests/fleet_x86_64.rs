//! `vpmu top` and `vpmu metrics` beside two guests: the bare-metal test program, on vpmu-vmm and this machine's own KVM.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::spec::arch::Arch;

use crate::payload::program;
use crate::support::{images, nested_vpmu, number, text, turn};
use crate::their_vmm::beside;

/// A process that ends with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Ends {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }

    fn label(&self) -> String {
        format!("pid=\"{}\"", self.0.id())
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

fn vpmu(words: &[&str]) -> Command {
    let mut vpmu = Command::new(env!("CARGO_BIN_EXE_vpmu"));
    vpmu.args(words);
    vpmu
}

/// Returns the vCPUs of these processes.
fn top(of: &[&Ends]) -> Vec<Value> {
    let output = vpmu(&["top", "--once", "--json"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(all["schema"], 1);
    let vcpus = all["vcpus"].as_array().unwrap().iter().cloned();
    vcpus
        .filter(|vcpu| of.iter().any(|it| vcpu["pid"] == it.0.id()))
        .collect()
}

/// Returns the answer of a server on the loopback.
fn get(port: &str, path: &str, accept: &str) -> String {
    let mut answer = String::new();
    // A server that has just been started may not listen yet.
    if let Ok(mut stream) = TcpStream::connect(format!("127.0.0.1:{port}")) {
        write!(
            stream,
            "GET {path} HTTP/1.0\r\nHost: here\r\nAccept: {accept}\r\n\r\n"
        )
        .unwrap();
        // One that ends meanwhile gives half an answer.
        let _ = stream.read_to_string(&mut answer);
    }
    answer
}

/// Checks that promtool finds no fault.
fn check_by_promtool(metrics: &str) {
    let promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = promtool else {
        eprintln!("skipped: no promtool (apt-get install prometheus)");
        return;
    };
    let mut input = promtool.stdin.take().unwrap();
    input.write_all(metrics.as_bytes()).unwrap();
    drop(input);
    let output = promtool.wait_with_output().unwrap();
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{output:?}\n{metrics}"
    );
}

/// Checks that a real Prometheus takes the metrics of these guests from this port.
fn check_by_prometheus(port: &str, guests: &[&Ends], folder: &Path) {
    // A free port: the listener ends with the statement.
    let own = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let own = own.unwrap().port().to_string();
    let scrape = format!(
        "scrape_configs: [{{job_name: vpmu, scrape_interval: 1s, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    );
    let file = folder.join("prometheus.yml");
    fs::write(&file, scrape).unwrap();
    let prometheus = Command::new("prometheus")
        .arg(format!("--config.file={}", file.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.join("data").display()
        ))
        .arg(format!("--web.listen-address=127.0.0.1:{own}"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(prometheus) = prometheus else {
        eprintln!("skipped: no Prometheus (apt-get install prometheus)");
        return;
    };
    let mut prometheus = Ends(prometheus);
    let query = "/api/v1/query?query=vpmu_exits_total";
    loop {
        let answer = get(&own, query, "*/*");
        let has = |guest: &&Ends| answer.contains(&format!("\"pid\":\"{}\"", guest.0.id()));
        if guests.iter().all(has) {
            return;
        }
        assert!(prometheus.0.try_wait().unwrap().is_none(), "it has ended");
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn two_guests_are_seen_while_they_run_and_not_after() {
    let _turn = turn(1);
    if OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        eprintln!("skipped: no /dev/kvm that this user may use");
        return;
    }
    let (Some(vmm), Some(payload)) = (beside("vpmu-vmm"), program("x86_64/payload.elf")) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let start = |vcpus: &str| {
        let mut command = Command::new(&vmm);
        command
            .arg("--kernel")
            .arg(&payload)
            .args(["--model", "intel", "--memory", "64M", "--vcpus", vcpus])
            .stdout(Stdio::null());
        Ends::start(&mut command)
    };
    let (mut one, mut two) = (start("1"), start("2"));
    loop {
        let vcpus = top(&[&one, &two]);
        let counts = |vcpu: &Value| vcpu["figures"]["pmis"].as_u64() > Some(0);
        if vcpus.len() == 3 && vcpus.iter().filter(|vcpu| counts(vcpu)).count() >= 2 {
            break;
        }
        assert!(
            one.0.try_wait().unwrap().is_none(),
            "it ended before it had a PMI"
        );
        thread::sleep(Duration::from_millis(50));
    }
    // From here on they live, and each reader finds the same.
    one.send(Signal::STOP);
    two.send(Signal::STOP);
    let vcpus = top(&[&one, &two]);
    for vcpu in &vcpus {
        assert_eq!(vcpu["pmu"], "intel", "{vcpu}");
        assert!(vcpu["backing"].is_string(), "{vcpu}");
    }

    let mut server = vpmu(&["metrics", "--listen", "127.0.0.1:0"]);
    let mut server = Ends::start(server.stdout(Stdio::piped()));
    let mut line = String::new();
    let mut said = BufReader::new(server.0.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    let port = line.trim_end().trim_end_matches("/metrics");
    let port = port.rsplit(':').next().unwrap();
    let classic = get(port, "/metrics", "*/*");
    let open = get(
        port,
        "/metrics",
        "application/openmetrics-text;version=1.0.0",
    );
    assert!(
        open.ends_with("# EOF\n") && open.contains("openmetrics-text"),
        "{open}"
    );
    let (_, body) = classic.split_once("\r\n\r\n").unwrap();
    for guest in [&one, &two] {
        assert!(
            open.contains(&guest.label()) && body.contains(&guest.label()),
            "{open}"
        );
    }
    for vcpu in &vcpus {
        let (pid, number, pmis) = (&vcpu["pid"], &vcpu["vcpu"], &vcpu["figures"]["pmis"]);
        let start = format!("vpmu_pmis_total{{pid=\"{pid}\"");
        let end = format!("vcpu=\"{number}\"}} {pmis}");
        let mut lines = open.lines();
        let is_there = lines.any(|line| line.starts_with(&start) && line.ends_with(&end));
        assert!(is_there, "{start} {end}: {open}");
    }
    check_by_promtool(body);
    let textfile = folder.path().join("vpmu.prom");
    let wrote = vpmu(&["metrics", "--textfile"])
        .arg(&textfile)
        .status()
        .unwrap();
    assert!(wrote.success());
    check_by_promtool(&fs::read_to_string(&textfile).unwrap());
    assert!(get(port, "/other", "*/*").starts_with("HTTP/1.1 404"));
    check_by_prometheus(port, &[&one, &two], folder.path());

    // One ends by itself and takes its file along, the other is killed.
    let second = two.label();
    two.send(Signal::TERM);
    two.send(Signal::CONT);
    two.0.wait().unwrap();
    one.0.kill().unwrap();
    one.0.wait().unwrap();
    assert!(top(&[&one]).is_empty());
    let after = get(port, "/metrics", "*/*");
    assert!(
        after.contains("\nvpmu_guests ") && !after.contains(&second),
        "{after}"
    );
    assert!(!after.contains(&one.label()), "{after}");
}

/// Runs in a KVM host: a guest counts the same work alone and beside both readers. Its initrd is the host's own file tree.
const HOST: &str = r#"
ip link set lo up
mkdir -p /run/vpmu
cat > /guest-init <<'END'
#!/usr/bin/busybox sh
/usr/bin/busybox mkdir -p /applets /proc /sys /dev
/usr/bin/busybox --install -s /applets
export PATH=/usr/bin:/applets
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev
echo -1 > /proc/sys/kernel/perf_event_paranoid; echo 0 > /proc/sys/kernel/watchdog
mount -o bind /dev/null /proc/kallsyms
count() {
    perf stat -x, -o stat -e cycles,cycles:u -- workload --scale 600
    awk -F, -v kind=$1 '$3 ~ /^cycles/ { print kind "-" $3, $1 }' stat
    perf record --no-bpf-event -q -e cycles -c 200001 -o data -- workload --scale 600 2> /dev/null
    echo $1-samples $(perf report -i data --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }')
}
count first; count alone; echo now; read go; count beside; poweroff -f
END
chmod +x /guest-init vpmu vpmu-vmm
(cd / && find guest-init bin lib lib64 sbin usr | cpio -o -H newc > /tmp/initrd) 2> /dev/null
mkfifo in out
./vpmu-vmm --kernel *.elf --initrd /tmp/initrd --memory 512M --no-kernel-cache --statistics statistics \
    --append 'console=ttyS0 nokaslr quiet cryptomgr.notests no_timer_check rdinit=/guest-init' < in > out &
exec 3> in
while read -r line; do
    echo "$line"
    case $line in now*)
        ./vpmu metrics --listen 127.0.0.1:9779 > /dev/null &
        (while sleep 1; do wget -q -O scraped http://127.0.0.1:9779/metrics; done) &
        (while ./vpmu top --once --json > next; do mv next topped; done) &
        sleep 3
        cp topped scraped /tmp
        echo go >&3 ;;
    esac
done < out
echo topped $(grep -c '"backing":"' /tmp/topped)
grep vpmu_vcpu_info /tmp/scraped | tail -n 1
true"#;

/// Counts, and samples at a fixed period, with `vpmu top` and `vpmu metrics` beside the guest: a reading a second each.
/// Time is instructions, and the counters the machine's own where QEMU has them.
#[test]
#[ignore = "long: script/test --long"]
fn a_guest_counts_the_same_with_both_beside_it() {
    let _turn = turn(1);
    let (Some(mut lab), Some(vmm)) = (nested_vpmu(", in real time"), beside("vpmu-vmm")) else {
        return;
    };
    let version = Qemu::chosen(None).version(&Arch::X86_64.qemu()).unwrap();
    let cpu = match version.is_mended() {
        true => "max,perfctr-core=on,perfmon-v2=on",
        false => "max",
    };
    let kernel = images(Arch::X86_64).boot_kernel(Arch::X86_64).unwrap();
    let output = lab
        .args(["run", "--arch", "x86_64", "--pmu", "native", "--cpu", cpu])
        .args([
            "--memory",
            "2G",
            "--module",
            "kvm_amd",
            "--add",
            env!("CARGO_BIN_EXE_vpmu"),
            "--add",
        ])
        .arg(&vmm)
        .arg("--add")
        .arg(kernel)
        .args(["--", HOST])
        .output()
        .unwrap();
    let said = text(&output);
    println!("{said}");
    assert!(output.status.success());
    let console = said.replace('\r', "");
    assert_eq!(number::<u64>(&console, "topped"), 1);
    let backing = format!(
        "backing=\"{}\"",
        if version.is_mended() {
            "hardware"
        } else {
            "clock"
        }
    );
    assert!(console.contains(&backing));
    for figure in ["cycles", "cycles:u", "samples"] {
        let of = |kind| number::<f64>(&console, &format!("{kind}-{figure}"));
        let (alone, beside) = (of("alone"), of("beside"));
        assert!(
            alone > 250.0 && (beside / alone - 1.0).abs() < 0.001,
            "{figure}: {alone} {beside}"
        );
    }
}
