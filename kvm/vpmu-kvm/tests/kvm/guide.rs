//! Tests of the embedding guide's statements about itself. Its code is compiled as a documentation
//! test.

use std::fs;
use std::path::Path;

#[test]
fn the_integration_is_as_short_and_safe_as_it_says() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/embed/embedding-example.md");
    let Ok(guide) = fs::read_to_string(&guide) else {
        eprintln!(
            "skipped: no {}: this is not the repository",
            guide.display()
        );
        return;
    };
    let (_, code) = guide.split_once("```rust\n").expect("it has code");
    let (code, _) = code.split_once("```").expect("which ends");
    assert!(!code.contains("unsafe"));
    let lines = code
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count();
    assert!(lines <= 60, "{lines}");
    let said = format!("{lines} lines without unsafe code");
    assert!(guide.contains(&said), "the guide is to say: {said}");
}
