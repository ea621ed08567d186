//! `vpmu metrics`: the guests' statistics for Prometheus.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use httparse::Status;
use itertools::Itertools;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::files::write_whole;
use vpmu_lab::{Error, Result};

use super::{Row, Time, rows};
use crate::print::print;

pub(crate) const AFTER: &str = "\
Examples:
  vpmu metrics                                   once, on standard output
  vpmu metrics --listen 127.0.0.1:9779           for Prometheus: http://127.0.0.1:9779/metrics
  vpmu metrics --textfile /var/lib/prometheus/node-exporter/vpmu.prom

Each metric of a vCPU has the labels pid, guest (QEMU's -name, else the VMM's program) and vcpu. Names and meanings, and a \
dashboard, are in docs/use/fleet.md. Without a guest the metrics of guests are absent, and vpmu_guests is 0.

There is no password and no encryption: listen on other addresses than the loopback's only behind something that has both.

Exit status: 0; with --listen it runs until a signal (130 after Ctrl-C); 125 when the address or the file cannot be used.";

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Time between two looks for a signal.
const PATIENCE: Duration = Duration::from_millis(200);
/// The time that a client has for its request, and the bytes of its head.
const LONGEST: Duration = Duration::from_secs(2);
const HEAD: usize = 8 << 10;

#[derive(Debug, Args)]
pub(crate) struct Metrics {
    /// Serve http://ADDR/metrics, for example on 127.0.0.1:9779; without an address before the port on the loopback
    #[arg(long, value_name = "ADDR", value_parser = address, num_args = 0..=1, default_missing_value = "9779")]
    listen: Option<SocketAddr>,
    /// Write the metrics into a file for node_exporter's textfile collector; it is replaced whole
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    textfile: Option<PathBuf>,
}

fn address(text: &str) -> std::result::Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    let whole = match port.parse::<u16>() {
        Ok(port) => Ok(SocketAddr::from(([127, 0, 0, 1], port))),
        Err(_) => text.parse(),
    };
    whole.map_err(|_| "an address and a port, such as 127.0.0.1:9779 or [::1]:9779".to_owned())
}

pub(crate) fn metrics(options: &Metrics, cancel: &Cancel) -> Result<()> {
    match (&options.listen, &options.textfile) {
        (Some(address), _) => serve(*address, cancel),
        (None, Some(file)) => write_whole(file, classic(&text(&rows()?)).as_bytes()),
        (None, None) => print(&text(&rows()?)),
    }
}

fn serve(address: SocketAddr, cancel: &Cancel) -> Result<()> {
    let failed = |source| Error::file("listen on", address.to_string())(source);
    let listener = TcpListener::bind(address).map_err(failed)?;
    // The port may be one that the kernel has chosen.
    let address = listener.local_addr().map_err(failed)?;
    print(&format!("http://{address}/metrics\n"))?;
    thread::spawn(move || {
        for client in listener.incoming() {
            match client {
                // A thread for each: who says nothing keeps nobody waiting. A client that has gone needs no answer.
                Ok(client) => drop(thread::Builder::new().spawn(move || answer(client))),
                // No descriptor is left, for a moment.
                Err(_) => thread::sleep(PATIENCE),
            }
        }
    });
    loop {
        cancel.check()?;
        thread::sleep(PATIENCE);
    }
}

/// Answers a client's request, and closes.
fn answer(mut client: TcpStream) -> io::Result<()> {
    client.set_read_timeout(Some(LONGEST))?;
    client.set_write_timeout(Some(LONGEST))?;
    let begun = Instant::now();
    let (mut head, mut length) = ([0; HEAD], 0);
    // A request without an end is answered, too, after its time or its length. No body is read.
    let request = loop {
        match client.read(&mut head[length..]) {
            Ok(count @ 1..) => length += count,
            _ => break None,
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&head[..length]) {
            Ok(Status::Complete(_)) => break Asked::of(&request),
            Ok(Status::Partial) if length < HEAD && begun.elapsed() < LONGEST => {}
            _ => break None,
        }
    };
    let (status, kind, body) = match &request {
        None => ("404 Not Found", "text/plain", "GET /metrics\n".to_owned()),
        Some(asked) => {
            let rows = rows().unwrap_or_else(|error| {
                eprintln!("vpmu: {error}");
                Vec::new()
            });
            let body = text(&rows);
            match asked.open_metrics {
                true => ("200 OK", OPEN_METRICS, body),
                false => ("200 OK", CLASSIC, classic(&body)),
            }
        }
    };
    let length = body.len();
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    if !request.is_some_and(|asked| asked.head_only) {
        client.write_all(body.as_bytes())?;
    }
    client.shutdown(Shutdown::Write)
}

/// What a request for the metrics asks for.
struct Asked {
    open_metrics: bool,
    head_only: bool,
}

impl Asked {
    fn of(request: &httparse::Request<'_, '_>) -> Option<Self> {
        let head_only = match (request.method?, request.path?) {
            ("GET", "/metrics") => false,
            ("HEAD", "/metrics") => true,
            _ => return None,
        };
        let accepts = |header: &httparse::Header<'_>| {
            header.name.eq_ignore_ascii_case("Accept")
                && String::from_utf8_lossy(header.value).contains("application/openmetrics-text")
        };
        let open_metrics = request.headers.iter().any(accepts);
        Some(Self {
            open_metrics,
            head_only,
        })
    }
}

type Labels = Vec<(&'static str, String)>;

/// The metrics of some guests.
struct Exposition<'a> {
    registry: Registry,
    rows: &'a [Row],
}

impl Exposition<'_> {
    /// Adds a metric of each vCPU.
    fn each<M>(&mut self, name: &str, help: &str, set: impl Fn(&Family<Labels, M>, &Row, Labels))
    where
        M: Default + 'static,
        Family<Labels, M>: Metric + Default + Clone,
    {
        let family = Family::<Labels, M>::default();
        self.registry.register(name, help, family.clone());
        for row in self.rows {
            set(&family, row, labels(row));
        }
    }

    /// Adds a counter of each vCPU.
    fn counter(&mut self, name: &str, help: &str, of: impl Fn(&Row) -> u64) {
        self.each::<Counter>(name, help, |family, row, labels| {
            family.get_or_create(&labels).inc_by(of(row));
        });
    }

    /// Adds a counter of each vCPU and each value of one more label.
    fn kinds<I>(&mut self, name: &str, help: &str, label: &'static str, of: impl Fn(&Row) -> I)
    where
        I: IntoIterator<Item = (&'static str, u64)>,
    {
        self.each::<Counter>(name, help, |family, row, labels| {
            for (kind, count) in of(row) {
                let mut labels = labels.clone();
                labels.push((label, kind.to_owned()));
                family.get_or_create(&labels).inc_by(count);
            }
        });
    }

    /// Adds the seconds of each vCPU's thread.
    fn seconds(&mut self, name: &str, help: &str, of: impl Fn(Time) -> f64) {
        let family = Family::<Labels, Counter<f64, std::sync::atomic::AtomicU64>>::default();
        self.registry
            .register_with_unit(name, help, Unit::Seconds, family.clone());
        for row in self.rows {
            if let Some(time) = row.time {
                family.get_or_create(&labels(row)).inc_by(of(time));
            }
        }
    }
}

fn labels(row: &Row) -> Labels {
    vec![
        ("pid", row.pid.to_string()),
        ("guest", row.guest.clone()),
        ("vcpu", row.vcpu.number.to_string()),
    ]
}

/// Returns the metrics in OpenMetrics' text format.
fn text(rows: &[Row]) -> String {
    let mut all = Exposition {
        registry: Registry::with_prefix("vpmu"),
        rows,
    };
    let guests = rows.iter().map(|row| row.pid).unique().count();
    let count: Gauge = Gauge::default();
    count.set(i64::try_from(guests).unwrap_or(i64::MAX));
    all.registry
        .register("guests", "VMMs that publish their guests' PMU", count);
    all.each::<Gauge>(
        "vcpu_info",
        "A vCPU with its PMU, always 1",
        |family, row, mut labels| {
            labels.push(("pmu", row.vcpu.pmu.to_owned()));
            labels.push(("backing", row.backing().to_owned()));
            family.get_or_create(&labels).set(1);
        },
    );
    all.counter("pmis", "PMIs delivered to the guest", |row| {
        row.vcpu.statistics.pmis
    });
    all.counter("masked_pmis", "PMIs that found LVTPC masked", |row| {
        row.vcpu.statistics.masked_pmis
    });
    all.kinds("exits", "Exits to the VMM", "kind", Row::exits);
    let lost = "Counters that should have counted, and records that should have been written, and were not";
    all.kinds("counters_lost", lost, "reason", Row::lost);
    all.counter(
        "rdpmc_refused",
        "Guest kernels that got no PMU because their #GP handler has no known form",
        |row| row.vcpu.statistics.arming.refused,
    );
    all.counter("pebs_records", "PEBS records written", |row| {
        row.vcpu.statistics.pebs.records
    });
    all.counter("lbr_branches", "Branches recorded", |row| {
        row.vcpu.statistics.lbr.recorded
    });
    all.kinds(
        "host_operations",
        "Calls of the host's perf events",
        "operation",
        |row| {
            row.vcpu
                .statistics
                .figures()
                .filter_map(|(name, count)| match name.split_once('.') {
                    Some((
                        "host",
                        name @ ("creates" | "set_periods" | "resumes" | "pauses" | "reads"
                        | "releases"),
                    )) => Some((name, count)),
                    _ => None,
                })
        },
    );
    all.seconds(
        "cpu",
        "CPU time of the vCPU's thread, the guest's included",
        |time| time.total,
    );
    all.seconds("guest_cpu", "CPU time of the guest on this vCPU", |time| {
        time.guest
    });
    let mut text = String::new();
    encode(&mut text, &all.registry).expect("a string takes everything");
    text
}

/// Returns the older text format, which node_exporter's textfile collector and promtool read: the name of a counter's family
/// has its `_total`, and there are no units.
fn classic(text: &str) -> String {
    let counters: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut classic = String::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let line = match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("EOF" | "UNIT"), ..) => continue,
            (Some("#"), Some(word), Some(name), Some(rest)) if counters.contains(&name) => {
                format!("# {word} {name}_total {rest}")
            }
            _ => line.to_owned(),
        };
        classic.push_str(&line);
        classic.push('\n');
    }
    classic
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::row;

    #[test]
    fn names_and_values_are_those_of_the_page() {
        let text = text(&[row(7, 3), row(8, 4)]);
        for line in [
            "vpmu_guests 2",
            r#"vpmu_vcpu_info{pid="7",guest="web\"7",vcpu="0",pmu="intel",backing="clock"} 1"#,
            r#"vpmu_pmis_total{pid="7",guest="web\"7",vcpu="0"} 3"#,
            r#"vpmu_exits_total{pid="8",guest="web\"8",vcpu="0",kind="rdpmc"} 4"#,
            r#"vpmu_counters_lost_total{pid="8",guest="web\"8",vcpu="0",reason="host_refused"} 4"#,
            r#"vpmu_guest_cpu_seconds_total{pid="8",guest="web\"8",vcpu="0"} 1.0"#,
            "# EOF",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        let page = include_str!("../../../../docs/use/fleet.md");
        let dashboard = include_str!("../../../../packaging/grafana/vpmu.json");
        let classic = classic(&text);
        for line in classic
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
        {
            let name = line.split(' ').next().unwrap();
            assert!(
                page.contains(&format!("`{name}`")),
                "{name} is not in docs/use/fleet.md"
            );
        }
        for name in dashboard.split(|it: char| !it.is_ascii_alphanumeric() && it != '_') {
            let is_metric = name.starts_with("vpmu_");
            assert!(
                !is_metric || classic.contains(&format!("# TYPE {name} ")),
                "no metric {name}"
            );
        }
    }

    #[test]
    fn requests_are_answered_whatever_they_say() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let said = |request: &[u8]| {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(request).unwrap();
            let (server, _) = listener.accept().unwrap();
            answer(server).unwrap();
            let mut said = String::new();
            client.read_to_string(&mut said).unwrap();
            said
        };
        // A body that never comes, and that no memory holds.
        let body = b"GET /metrics HTTP/1.1\r\nContent-Length: 400000000000000\r\n\r\n";
        assert!(said(body).contains("vpmu_guests "));
        let open = b"GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;q=1\r\n\r\n";
        assert!(said(open).contains(OPEN_METRICS) && said(open).ends_with("# EOF\n"));
        let head = said(b"HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"));
        for other in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"\0\r\n\r\n",
            b"POST /metrics HTTP/1.1\r\n\r\n",
        ] {
            assert!(said(other).starts_with("HTTP/1.1 404 "));
        }
    }

    #[test]
    fn nobody_to_show_is_no_error() {
        assert!(text(&[]).contains("vpmu_guests 0\n"));
    }

    #[test]
    fn addresses_are_the_loopbacks_unless_another_is_named() {
        let loopback: SocketAddr = "127.0.0.1:9779".parse().unwrap();
        for text in ["9779", ":9779", "127.0.0.1:9779"] {
            assert_eq!(address(text), Ok(loopback));
        }
        assert_eq!(address("[::1]:1").unwrap().port(), 1);
        assert!(address("localhost").is_err());
    }
}
