//! The report page in a real browser: every figure of the saved results is there to be read, nothing is wider than
//! the window, and the browser finds no error.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use vpmu_lab::bench;
use vpmu_lab::report::page;

/// Opens what is closed, and writes what a reader can see into the page around. The page itself has no script.
const INSPECT: &str = r#"<script>
for (const details of document.querySelectorAll("details")) details.open = true;
const wide = [];
const right = document.documentElement.clientWidth;
for (const element of document.querySelectorAll("body *"))
    if (!element.closest(".scroll, .hidden") && element.getBoundingClientRect().right > right + 0.5)
        wide.push(element.tagName + " " + element.textContent.slice(0, 40));
for (const bar of document.querySelectorAll(".bar span"))
    if (bar.getBoundingClientRect().right > bar.closest(".card").getBoundingClientRect().right)
        wide.push("bar " + bar.textContent);
const seen = {
    width: innerWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    wide: wide.slice(0, 5),
    text: document.body.innerText,
};
const element = parent.document.createElement("pre");
element.textContent = "SEEN" + encodeURIComponent(JSON.stringify(seen)) + "END";
parent.document.body.append(element);
</script>"#;

/// A comparison with exits and profiles, as `--json` writes it.
const COMPARISON: &str = r#"{"schema":1,"runs":[
    {"arch":"aarch64","pmu":"kvm","vcpus":1,"guest_counters":6,"host_counters":null,"command":"perf record gzip",
     "runs":1,"status":0,"real_s":5.287,"user_s":5.2,"sys_s":0.061,"samples":70656,"lost_samples":0,"throttled":0,
     "max_sample_rate":100000,"pmis":41503,"exits":{"hvc":600000,"other":104084},"exits_per_pmi":16.96,
     "pmu_exits_per_pmi":null,"host_share":0.5645,"exit_share":null,"deterministic":true},
    {"arch":"aarch64","pmu":"partitioned","vcpus":1,"guest_counters":6,"host_counters":1,"command":"perf record gzip",
     "runs":1,"status":0,"real_s":1.048,"user_s":1.0,"sys_s":0.035,"samples":12390,"lost_samples":0,"throttled":0,
     "max_sample_rate":100000,"pmis":11694,"exits":{"irq:pmu":11694,"hvc":202},"exits_per_pmi":1.02,
     "pmu_exits_per_pmi":1.0,"host_share":0.0037,"exit_share":null,"deterministic":true,
     "host_profile":{"folded":{"gzip;deflate;longest_match":731,"gzip;deflate":119,"idle":37}},
     "guest_profile":{"folded":{"gzip;deflate;longest_match":829,"gzip;deflate":113}}}]}"#;

struct Seen {
    /// What the browser wrote to its console.
    console: Vec<String>,
    page: Value,
}

/// Opens `html` in a window of `width` pixels, in the dark or not. `None` where there is no browser.
fn open(html: &str, width: u32, dark: bool) -> Option<Seen> {
    let program = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|program| {
            let version = Command::new(program)
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            version.is_ok_and(|status| status.success())
        })?;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("page.html");
    let inner = html
        .replace("</body>", &format!("{INSPECT}</body>"))
        .replace('&', "&amp;")
        .replace('"', "&quot;");
    // No window is as narrow as a telephone's, so the page is in a frame.
    let outer = format!(
        r#"<meta name="color-scheme" content="light dark"><body>
        <iframe width="{width}" height="900" style="border:0" srcdoc="{inner}"></iframe></body>"#
    );
    fs::write(&path, outer).unwrap();
    // Blink's setting: 0 is dark.
    let scheme = u32::from(!dark);
    let output = Command::new("timeout")
        .args([
            "120",
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
        ])
        .args(["--enable-logging=stderr", "--dump-dom", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", folder.path().display()))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg("--window-size=1400,1000")
        .arg(format!("file://{}", path.display()))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let dom = String::from_utf8_lossy(&output.stdout);
    let seen = dom
        .split_once("<pre>SEEN")
        .and_then(|(_, rest)| rest.split_once("END</pre>"))
        .unwrap_or_else(|| panic!("{program} has shown nothing: {errors}"))
        .0;
    let console = errors.lines().filter(|line| line.contains(":CONSOLE"));
    Some(Seen {
        console: console.map(str::to_owned).collect(),
        page: serde_json::from_slice(&decode(seen)).unwrap(),
    })
}

/// Undoes encodeURIComponent.
fn decode(text: &str) -> Vec<u8> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(code, 16).unwrap());
        bytes.extend(rest.as_bytes());
    }
    bytes
}

/// The results in the tree, a comparison among them.
fn results() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let saved = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    for entry in fs::read_dir(saved).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "json") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::write(folder.path().join("comparison.json"), COMPARISON).unwrap();
    folder
}

/// Writes a figure by the rule for readers: three decimals at most, commas between thousands, shares in percent.
fn written(value: f64, unit: &str) -> String {
    let value = if unit == "share" {
        value * 100.0
    } else {
        value
    };
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, decimals) = text.find('.').map_or((text, ""), |at| text.split_at(at));
    let digits: Vec<char> = whole.chars().collect();
    let groups: Vec<String> = digits
        .rchunks(3)
        .rev()
        .map(|group| group.iter().collect())
        .collect();
    format!("{}{decimals}", groups.join(","))
}

/// Returns each figure of the benches in `folder`, as a reader should find it.
fn figures(folder: &Path) -> Vec<String> {
    let mut figures = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let text = fs::read(entry.unwrap().path()).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        for row in json["rows"].as_array().into_iter().flatten() {
            let unit = row["unit"].as_str().unwrap();
            let both = [&row["measured"], &row["published"]];
            let known = both.into_iter().filter_map(Value::as_f64);
            figures.extend(known.map(|value| written(value, unit)));
        }
    }
    figures
}

/// What a page of all results may have at most, so that it can be sent to somebody.
const MOST_BYTES: usize = 1_000_000;

#[test]
fn the_page_shows_every_figure() {
    let folder = results();
    let page = page::of_folder(folder.path(), bench::page).unwrap();
    assert!(page.html.len() < MOST_BYTES, "{} bytes", page.html.len());
    let figures = figures(folder.path());
    assert!(figures.len() > 500, "{}", figures.len());
    let mut papers = HashSet::new();
    for (width, dark) in [(1280, false), (420, true)] {
        let Some(seen) = open(&page.html, width, dark) else {
            eprintln!("skipped: no browser (apt-get install chromium)");
            return;
        };
        assert!(seen.console.is_empty(), "{:?}", seen.console);
        assert_eq!(seen.page["width"], width);
        assert_eq!(
            seen.page["wide"],
            Value::Array(Vec::new()),
            "at {width} pixels"
        );
        papers.insert(seen.page["paper"].to_string());
        let text = seen.page["text"].as_str().unwrap();
        let words: HashSet<&str> = text.split_whitespace().collect();
        for figure in &figures {
            assert!(
                words.contains(figure.as_str()),
                "{figure} at {width} pixels"
            );
        }
        // A comparison's are rounded as in the terminal.
        for words in [
            "5.287 s",
            "16.96 exits",
            "56.45 %",
            "70,656 samples",
            "0.198",
            "704,084 exits",
            "longest_match",
            "82.4 %",
            "88 %",
        ] {
            assert!(text.contains(words), "{words} at {width} pixels: {text}");
        }
    }
    assert_eq!(papers.len(), 2, "light and dark are the same: {papers:?}");
}

#[test]
fn the_browser_tells_what_is_wrong() {
    let bad = r#"<body><script>throw new Error("control")</script><div style="width:2000px">x</div></body>"#;
    let Some(seen) = open(bad, 420, false) else {
        eprintln!("skipped: no browser (apt-get install chromium)");
        return;
    };
    assert!(
        seen.console.concat().contains("control"),
        "{:?}",
        seen.console
    );
    assert_eq!(seen.page["wide"][0], "DIV x");
}
