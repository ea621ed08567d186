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

use crate::payload::program;
use crate::support::turn;
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
    assert!(get(port, "/other", "*/*").starts_with("HTTP/1.0 404"));
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
