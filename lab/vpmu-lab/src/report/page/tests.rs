//! Tests of the page.

use super::*;

const RUN: &str = r#"{"arch":"aarch64","pmu":"PMU","vcpus":1,"guest_counters":6,"host_counters":null,
    "command":"echo '<b>' & true","runs":1,"status":0,"real_s":REAL,"user_s":1.0,"sys_s":0.5,"samples":10,
    "lost_samples":0,"throttled":0,"max_sample_rate":100000,"pmis":10,"exits":EXITS,"exits_per_pmi":null,
    "pmu_exits_per_pmi":null,"host_share":null,"exit_share":null,"deterministic":true,"later":1}"#;
const BENCH: &str = r#"{"schema":1,"bench":"partition","qemu":"10.0.2 (Debian)","rows":[
    {"figure":"perf_run_s","mode":"kvm","measured":5.0,"published":4.143,"unit":"s"},
    {"figure":"perf_run_s","mode":"partitioned","measured":2.5,"published":null,"unit":"s"}]}"#;

fn run(pmu: &str, real: &str, exits: &str) -> String {
    let run = RUN.replace("PMU", pmu).replace("REAL", real);
    run.replace("EXITS", exits)
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

#[test]
fn results_become_tables_and_plots() {
    let runs = [
        run("native", "2.0", "null"),
        run("partitioned", "4.0", r#"{"irq:pmu":10}"#),
    ];
    let results = format!(r#"{{"schema":1,"runs":[{}]}}"#, runs.join(","));
    let folder = folder(&[
        ("b.json", BENCH),
        ("a.json", &results),
        ("records.json", "[]"),
        ("later.json", r#"{"schema":2,"runs":[]}"#),
        ("notes.txt", "x"),
    ]);
    let page = of_folder(folder.path(), |_| None).unwrap();
    assert_eq!(page.files, 2);
    assert_eq!(page.skipped, ["later.json", "records.json"]);
    let html = &page.html;
    let row = "<th scope=\"row\">partitioned</th><td>6+1</td><td>4.000</td><td>2.000</td>";
    assert!(html.contains(row), "{html}");
    assert!(html.contains("2.000 (partitioned) times as long"), "{html}");
    assert!(html.contains("irq:pmu 10"), "{html}");
    assert!(
        html.contains("bench partition, measured on QEMU 10.0.2 (Debian)<"),
        "{html}"
    );
    // One bar of each drawing is half as long as the longest: the command's time, and the bench's figure.
    for width in [")*50/100)", ")*100/100)"] {
        assert!(html.matches(width).count() >= 2, "{width}: {html}");
    }
    // This figure is known for one design only, and no drawing is made up.
    assert!(!html.contains("exits per pmi"), "{html}");
    assert!(
        html.contains("4.143 s<span class=\"hidden\"> published"),
        "{html}"
    );
}

#[test]
fn a_failed_command_is_no_short_bar() {
    let failed = run("emulated", "0.5", "null").replace(r#""status":0"#, r#""status":127"#);
    let runs = [
        run("native", "2.0", "null"),
        run("kvm", "3.0", "null"),
        failed,
    ];
    let results = format!(r#"{{"schema":1,"runs":[{}]}}"#, runs.join(","));
    let folder = folder(&[("a.json", &results)]);
    let html = of_folder(folder.path(), |_| None).unwrap().html;
    assert!(
        html.contains("emulated: the command ended with status 127"),
        "{html}"
    );
    assert!(
        html.contains("1.500 x") && !html.contains("0.250 x"),
        "{html}"
    );
}

#[test]
fn profiles_stand_beside_each_other() {
    let profiles = [r#""host_profile":"#, r#","guest_profile":"#]
        .map(|name| format!(r#"{name}{{"folded":{{"main;foo":3,"main":1}}}}"#));
    let run = run("partitioned", "2.0", "null").replace(r#""later":1"#, &profiles.concat());
    let results = format!(r#"{{"schema":1,"runs":[{run}]}}"#);
    let folder = folder(&[("a.json", &results)]);
    let html = of_folder(folder.path(), |_| None).unwrap().html;
    for heading in [
        "partitioned: the hypervisor&#39;s profile</th>",
        "partitioned: the guest&#39;s own profile</th>",
    ] {
        assert!(html.contains(heading), "{heading}: {html}");
    }
    let row = "<th scope=\"row\">foo</th><td>75 %</td>";
    assert_eq!(html.matches(row).count(), 2, "{html}");
}

/// The results that are saved in the tree.
fn results() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results")
}

#[test]
fn each_sentence_has_its_figures() {
    for entry in fs::read_dir(results()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|kind| kind != "json") {
            continue;
        }
        let Ok(Saved::Bench(bench)) = serde_json::from_slice(&fs::read(&path).unwrap()) else {
            continue;
        };
        let page = crate::bench::page(&bench.bench).expect("a bench of this vpmu");
        let mut sentences = page.sentences(&bench);
        assert!(sentences.all(|text| text.is_some()), "{}", path.display());
    }
}

#[test]
fn all_results_are_one_small_page() {
    let page = of_folder(&results(), crate::bench::page).unwrap();
    assert!(page.skipped.is_empty(), "{:?}", page.skipped);
    assert!(page.html.len() < 1_000_000, "{} bytes", page.html.len());
}

#[test]
fn the_page_is_whole_and_safe() {
    let results = format!(
        r#"{{"schema":1,"runs":[{}]}}"#,
        run("native", "2.0", "null")
    );
    let folder = folder(&[("a.json", &results)]);
    let html = of_folder(folder.path(), |_| None).unwrap().html;
    assert!(!html.contains("echo '<b>'"), "{html}");
    for outside in ["src=", "href=\"http", "url(", "@import", "<script"] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn a_folder_without_results_says_how_to_make_some() {
    let empty = folder(&[("records.json", "{")]);
    let error = of_folder(empty.path(), |_| None).unwrap_err().to_string();
    assert!(error.contains("--json"), "{error}");
    assert!(of_folder(&empty.path().join("none"), |_| None).is_err());
}
