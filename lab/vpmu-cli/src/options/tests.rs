use super::*;

#[test]
fn definition() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}

#[test]
fn rows_of_a_table() {
    let names = |arch, pmus: &[Pmu], policies: &[Policy]| {
        let designs = designs(arch, pmus, policies, false);
        designs.iter().map(Design::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        names(Arch::X86_64, &[], &[]),
        ["native", "kvm", "emulated-paused"]
    );
    assert_eq!(
        names(Arch::Aarch64, &[], &[]),
        ["native", "kvm", "emulated", "partitioned", "direct"]
    );
    assert_eq!(
        names(
            Arch::X86_64,
            &[Pmu::Emulated, Pmu::Kvm, Pmu::Kvm],
            &[Policy::Recreate, Policy::Reuse, Policy::Paused]
        ),
        [
            "emulated-recreate",
            "emulated-reuse",
            "emulated-paused",
            "kvm"
        ]
    );
}

#[test]
fn a_package_has_a_name_of_debians() {
    for good in ["util-linux", "g++", "libc6", "0ad"] {
        assert_eq!(package(good).as_deref(), Ok(good));
    }
    for bad in ["", "-y", "a b", "a=1", "a/sid", "Perl", "../x"] {
        assert!(package(bad).is_err(), "{bad}");
    }
}

#[test]
fn sizes_and_limits() {
    assert_eq!(memory("512M"), Ok(512));
    assert_eq!(memory("2G"), Ok(2048));
    for bad in ["", "G", "1", "1K", "-1M", "99999999G", "0M"] {
        assert!(memory(bad).is_err(), "{bad}");
    }
    assert!(seconds("0").is_err());
    assert_eq!(seconds("3"), Ok(Duration::from_secs(3)));
}
