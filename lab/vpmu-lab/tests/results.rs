//! The pages in `docs/results` are what their JSON says.
//!
//! After `vpmu bench NAME --json docs/results/NAME.json`, or `vpmu bench NAME --model amd --json
//! docs/results/NAME-amd.json`:
//!
//! ```sh
//! UPDATE_RESULTS=1 cargo test --manifest-path lab/Cargo.toml -p vpmu-lab --test results
//! ```

use std::fs;
use std::path::Path;

use vpmu_lab::bench::BENCHES;
use vpmu_lab::report::figures::Report;
use vpmu_lab::report::markdown::markdown;

#[test]
fn each_page_is_made_of_its_json() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let update = std::env::var_os("UPDATE_RESULTS").is_some();
    let mut pages = 0;
    for bench in BENCHES {
        let file = |ending| folder.join(format!("{}{ending}", bench.name));
        let read = |ending| -> Option<Report> {
            let json = fs::read(file(ending)).ok()?;
            Some(serde_json::from_slice(&json).unwrap())
        };
        let Some(report) = read(".json") else {
            continue;
        };
        let text = markdown(&bench.page(), &report, read("-amd.json").as_ref());
        if update {
            fs::write(file(".md"), &text).unwrap();
        }
        let page = fs::read_to_string(file(".md")).unwrap_or_default();
        assert!(
            page == text,
            "docs/results/{}.md is not what its JSON says: \
             UPDATE_RESULTS=1 cargo test --manifest-path lab/Cargo.toml -p vpmu-lab --test results",
            bench.name
        );
        pages += 1;
    }
    assert!(pages > 0, "no results in {}", folder.display());
}

#[test]
fn each_result_is_a_bench_s_or_a_comparison() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let stem = stem.strip_suffix("-amd").unwrap_or(stem);
        assert!(
            stem.starts_with("compare-") || BENCHES.iter().any(|bench| stem == bench.name),
            "{}",
            path.display()
        );
    }
}
