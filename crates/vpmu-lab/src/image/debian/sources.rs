//! Finding a Debian mirror in what the machine's own apt is set up with.
//!
//! Whoever administers the machine chose its mirror, proxy and network policy;
//! guests come the same way. Both formats of sources.list(5) are read: one
//! line a source, and deb822 stanzas.

use std::fs;
use std::path::Path;

/// The address that overrides what the machine's sources say.
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

/// One source: where packages of some suites come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The part of the address before `/dists`.
    pub uri: String,
    /// For example `bookworm-updates`.
    pub suite: String,
    /// For example `main`.
    pub components: Vec<String>,
}

/// The mirror of this machine: `$VPMU_DEBIAN_MIRROR`, else the first fitting
/// source of `/etc/apt`. `None` when there is neither.
pub fn mirror() -> Option<String> {
    std::env::var(MIRROR_VARIABLE)
        .ok()
        .filter(|value| !value.is_empty())
        .or_else(|| mirror_among(&read_folder(Path::new("/etc/apt"))))
}

/// All binary-package sources in a folder laid out like `/etc/apt`.
pub fn read_folder(etc_apt: &Path) -> Vec<Source> {
    let mut files: Vec<_> = fs::read_dir(etc_apt.join("sources.list.d"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files.insert(0, etc_apt.join("sources.list"));
    files
        .iter()
        .filter_map(|path| {
            let text = fs::read_to_string(path).ok()?;
            match path.extension()?.to_str()? {
                "list" => Some(parse_lines(&text)),
                "sources" => Some(parse_stanzas(&text)),
                _ => None,
            }
        })
        .flatten()
        .collect()
}

/// The first source that is Debian's main archive.
///
/// The security archive does not qualify: it holds few packages. Neither does
/// any other vendor's, whose suites are not named like Debian's releases.
pub fn mirror_among(sources: &[Source]) -> Option<String> {
    sources
        .iter()
        .find(|source| {
            let (release, pocket) = source.suite.split_once('-').unwrap_or((&source.suite, ""));
            RELEASES.contains(&release)
                && matches!(pocket, "" | "updates" | "backports")
                && source.components.iter().any(|name| name == "main")
                && !source.uri.contains("security")
        })
        .map(|source| source.uri.trim_end_matches('/').to_owned())
}

fn parse_lines(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_line).flatten().collect()
}

fn parse_line(line: &str) -> Option<Vec<Source>> {
    let line = line.split('#').next()?.trim();
    let mut rest = line.strip_prefix("deb")?;
    if !rest.starts_with(char::is_whitespace) {
        return None; // deb-src
    }
    rest = rest.trim_start();
    if rest.starts_with('[') {
        rest = rest.split_once(']')?.1;
    }
    let mut words = rest.split_whitespace();
    let uri = words.next()?.to_owned();
    let suite = words.next()?.to_owned();
    let components = words.map(str::to_owned).collect();
    Some(vec![Source {
        uri,
        suite,
        components,
    }])
}

fn parse_stanzas(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut stanza = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if !line.trim().is_empty() {
            stanza.push(line);
            continue;
        }
        sources.extend(parse_stanza(&stanza));
        stanza.clear();
    }
    sources
}

fn parse_stanza(lines: &[&str]) -> Vec<Source> {
    let field = |name: &str| -> Vec<String> {
        let mut words = Vec::new();
        let mut inside = false;
        for line in lines {
            let value = if line.starts_with([' ', '\t']) {
                line
            } else {
                let (key, value) = line.split_once(':').unwrap_or((line, ""));
                inside = key.trim().eq_ignore_ascii_case(name);
                value
            };
            if inside {
                words.extend(value.split_whitespace().map(str::to_owned));
            }
        }
        words
    };
    let disabled = field("Enabled")
        .first()
        .is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if disabled || !field("Types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    let (uris, components) = (field("URIs"), field("Components"));
    field("Suites")
        .iter()
        .flat_map(|suite| {
            uris.iter().map(|uri| Source {
                uri: uri.clone(),
                suite: suite.clone(),
                components: components.clone(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "\
# comment
Types: deb deb-src
URIs: http://vendor.example/apt
Suites: nodistro
Components: main

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: trixie
Components: main

Types: deb
URIs: http://a.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs:
 http://b.example/debian/
Suites: bookworm
# inside
 bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
";

    #[test]
    fn stanzas() {
        let sources = parse_stanzas(STANZAS);
        assert_eq!(sources.len(), 4);
        assert_eq!(sources[3].suite, "bookworm-updates");
        assert_eq!(sources[3].components, ["main", "contrib"]);
        assert_eq!(
            mirror_among(&sources).as_deref(),
            Some("http://b.example/debian")
        );
    }

    #[test]
    fn lines() {
        let sources = parse_lines(
            "# deb http://no.example/debian trixie main\n\
             deb-src http://src.example/debian trixie main\n\
             deb https://vendor.example/apt sdk-bookworm main\n\
             deb http://ubuntu.example/ubuntu noble main\n\
             deb [arch=amd64 signed-by=/k.gpg] http://good.example/debian trixie-backports main # c\n",
        );
        assert_eq!(sources.len(), 3);
        assert_eq!(
            mirror_among(&sources).as_deref(),
            Some("http://good.example/debian")
        );
    }

    #[test]
    fn nothing_fits() {
        assert_eq!(mirror_among(&[]), None);
        assert_eq!(
            mirror_among(&parse_lines(
                "deb http://a.example/debian-security trixie main\ndeb\ndeb [x\n"
            )),
            None
        );
    }

    #[test]
    fn folder() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read_folder(folder.path()).is_empty());
        let parts = folder.path().join("sources.list.d");
        fs::create_dir(&parts).unwrap();
        fs::write(parts.join("b.sources"), STANZAS).unwrap();
        fs::write(
            parts.join("a.list"),
            "deb http://first.example/debian sid main",
        )
        .unwrap();
        fs::write(
            parts.join("c.save"),
            "deb http://ignored.example/debian sid main",
        )
        .unwrap();
        assert_eq!(
            mirror_among(&read_folder(folder.path())).as_deref(),
            Some("http://first.example/debian")
        );
    }
}
