//! Finds a Debian mirror among the sources of the machine's own apt.
//!
//! Whoever administers the machine chose its mirror, proxy and network policy. Guests come the same
//! way. apt says where it would search for packages (`apt-get update --print-uris`). That needs
//! neither the network, nor root, nor a package index of an earlier day; `apt-get indextargets`
//! needs such an index.

use crate::host::cancel::Cancel;
use crate::host::tool::Tool;

/// The machine's apt-get.
pub const APT_GET: Tool = Tool {
    program: "apt-get",
    fix: "guests are made from Debian packages: use a Debian machine, or install apt",
    hint: "guests are downloaded once: check the network and the proxy, or name another mirror with VPMU_DEBIAN_MIRROR",
};

/// The variable with an address that overrides the machine's sources.
pub const MIRROR_VARIABLE: &str = "VPMU_DEBIAN_MIRROR";

/// Names under which Debian's mirrors publish a release, newest last.
const RELEASES: [&str; 12] = [
    "oldoldstable",
    "oldstable",
    "stable",
    "testing",
    "unstable",
    "sid",
    "buster",
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
];

/// Returns this machine's mirror: `$VPMU_DEBIAN_MIRROR`, else the first of apt's
/// sources that is Debian's main archive. `None` when there is neither.
pub fn mirror() -> Option<String> {
    std::env::var(MIRROR_VARIABLE)
        .ok()
        .filter(|value| !value.is_empty())
        .or_else(|| mirror_among(&uris(&[])?))
}

/// Returns the files that apt, called with `options`, would download to know its packages, a line
/// each. Returns `None` when apt is missing or does not understand its own sources.
fn uris(options: &[String]) -> Option<String> {
    let mut command = APT_GET.command().ok()?;
    command.args(options).args(["update", "--print-uris"]);
    APT_GET.run(command, &Cancel::default(), &|| ()).ok()
}

/// Returns the address in the first of `lines` that belongs to Debian's main archive:
/// `'ADDRESS/dists/SUITE/...' FILE SIZE`.
///
/// The security archive does not qualify: it holds few packages. Nor does any other vendor's
/// archive, whose suites are not named like Debian's releases.
fn mirror_among(lines: &str) -> Option<String> {
    lines.lines().find_map(|line| {
        let uri = line.strip_prefix('\'')?.split('\'').next()?;
        let (address, rest) = uri.split_once("/dists/")?;
        let suite = rest.split('/').next()?;
        let (release, pocket) = suite.split_once('-').unwrap_or((suite, ""));
        let is_debian = RELEASES.contains(&release)
            && matches!(pocket, "" | "updates" | "backports")
            && !address.contains("security")
            // apt would ask the user for the disc.
            && !address.starts_with("cdrom:");
        is_debian.then(|| address.trim_end_matches('/').to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(address: &str, suite: &str) -> String {
        format!("'{address}/dists/{suite}/InRelease' file 0 \n")
    }

    #[test]
    fn other_archives_do_not_qualify() {
        let others = [
            line("http://vendor.example/apt", "nodistro"),
            line("http://vendor.example/apt", "sdk-bookworm"),
            line("http://ubuntu.example/ubuntu", "noble"),
            line("http://a.example/debian-security", "bookworm-security"),
            line("http://a.example/debian-security", "trixie"),
            line("cdrom:[Debian 13]", "trixie"),
            "Hit:1 something else\n'\n''\n".to_owned(),
        ]
        .concat();
        assert_eq!(mirror_among(&others), None);
        let good = others + &line("http://b.example/debian/", "trixie-backports");
        let last = good + &line("http://c.example/debian", "trixie");
        let found = mirror_among(&last);
        assert_eq!(found.as_deref(), Some("http://b.example/debian"));
    }

    /// Checks both formats of sources.list(5), read by apt, without an index.
    #[test]
    fn apt_reads_its_sources() {
        if !APT_GET.is_installed() {
            eprintln!("skipped: no apt-get");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let parts = root.join("etc/sources.list.d");
        fs::create_dir_all(&parts).unwrap();
        fs::create_dir_all(root.join("lists/partial")).unwrap();
        let options: Vec<String> = [("Dir::Etc", "etc"), ("Dir::State::Lists", "lists")]
            .iter()
            .flat_map(|(name, place)| {
                let place = root.join(place);
                ["-o".to_owned(), format!("{name}={}", place.display())]
            })
            .collect();
        let mirror = || mirror_among(&uris(&options).unwrap());
        assert_eq!(mirror(), None);
        fs::write(
            root.join("etc/sources.list"),
            "# deb http://no.example/debian trixie main\n\
             deb [arch=amd64] https://lines.example/debian sid main # c\n",
        )
        .unwrap();
        assert_eq!(mirror().as_deref(), Some("https://lines.example/debian"));
        fs::remove_file(root.join("etc/sources.list")).unwrap();
        fs::write(
            parts.join("b.sources"),
            "Enabled: no\nTypes: deb\nURIs: http://disabled.example/debian\nSuites: trixie\nComponents: main\n\n\
             Types: deb\nURIs:\n http://stanzas.example/debian/\nSuites: bookworm\n bookworm-updates\nComponents: main\n",
        )
        .unwrap();
        assert_eq!(mirror().as_deref(), Some("http://stanzas.example/debian"));
    }
}
