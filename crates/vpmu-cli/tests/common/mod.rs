//! What the tests of real guests share.

/// Says that a test did not run, and why. Where `VPMU_TEST_ALL` is set, as `script/test` does after
/// the set-up, nothing may be missing, and this fails.
pub(crate) fn skipped(reason: &str) {
    assert!(
        std::env::var_os("VPMU_TEST_ALL").is_none(),
        "VPMU_TEST_ALL is set, and this test cannot run: {reason}"
    );
    eprintln!("skipped: {reason}");
}
