//! A private apt: another release, another architecture, no root.
//!
//! apt-get checks the archive's signature with the machine's own Debian keyring and every package
//! against the signed index. The lab redirects all of the machine's package state that apt would
//! read or write into a folder of its own. Only the proxy settings are the machine's.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::sources::{self, APT_GET, MIRROR_VARIABLE};
use crate::host::cancel::Cancel;
use crate::{Error, Result};

/// The keys of Debian's archive, from the package of the same name.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The command that installs the keys.
pub const KEYRING_FIX: &str = "apt-get install debian-archive-keyring";

/// One package as the signed index describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Package {
    /// The package's name, for example `libc6`.
    pub(crate) name: String,
    /// The file's name, which holds the version.
    pub(crate) file: String,
    /// The file's size in bytes.
    pub(crate) size: u64,
    /// The file's SHA-256, lower-case hexadecimal.
    pub(crate) sha256: String,
}

/// A private apt root.
#[derive(Debug)]
pub(crate) struct Apt {
    config: PathBuf,
}

impl Apt {
    /// Sets up a root in `folder`, for `release` and `architecture` of Debian.
    pub(crate) fn new(folder: &Path, release: &str, architecture: &str) -> Result<Self> {
        let mirror = sources::mirror().ok_or_else(|| {
            Error::Other(format!(
                "no Debian mirror among this machine's apt sources; set {MIRROR_VARIABLE} to the address of one (the part \
                 before /dists)"
            ))
        })?;
        if !Path::new(KEYRING).exists() {
            let keyring = format!("{KEYRING} of debian-archive-keyring");
            return Err(Error::missing(keyring, KEYRING_FIX));
        }
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(Error::file("create", &path))?;
        }
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(Error::file("write", &path))?;
            Ok(path)
        };
        write("status", String::new())?;
        // Backports need the release that they extend.
        let base = release.strip_suffix("-backports");
        let suites = base.into_iter().chain([release]);
        let sources =
            suites.map(|suite| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"));
        write("sources.list", sources.collect())?;
        let preferred = base.map_or("", |_| release);
        let config = write("apt.conf", configuration(folder, architecture, preferred))?;
        Ok(Self { config })
    }

    /// Downloads the index.
    pub(crate) fn update(&self, cancel: &Cancel) -> Result<()> {
        self.run(&["update"], None, cancel, &|| ()).map(drop)
    }

    /// Returns the packages to download for `names`, dependencies included.
    pub(crate) fn plan(&self, names: &[String], cancel: &Cancel) -> Result<Vec<Package>> {
        let names = names.iter().map(String::as_str);
        let arguments: Vec<&str> = ["--print-uris", "-y", "install"]
            .into_iter()
            .chain(names)
            .collect();
        let text = self.run(&arguments, None, cancel, &|| ())?;
        text.lines()
            .filter(|line| line.starts_with('\''))
            .map(|line| {
                parse_uri_line(line).ok_or_else(|| Error::Program {
                    program: APT_GET.program.to_owned(),
                    status: "output not understood".to_owned(),
                    output: line.to_owned(),
                    hint: "please report this with the version of apt",
                })
            })
            .collect()
    }

    /// Downloads the files of `packages` into `folder`, and calls `tick` meanwhile.
    pub(crate) fn download(
        &self,
        packages: &[Package],
        folder: &Path,
        cancel: &Cancel,
        tick: &dyn Fn(),
    ) -> Result<()> {
        let names = packages.iter().map(|package| package.name.as_str());
        let arguments: Vec<&str> = ["download"].into_iter().chain(names).collect();
        self.run(&arguments, Some(folder), cancel, tick).map(drop)
    }

    fn run(
        &self,
        arguments: &[&str],
        folder: Option<&Path>,
        cancel: &Cancel,
        tick: &dyn Fn(),
    ) -> Result<String> {
        let mut command = APT_GET.command()?;
        command.arg("-c").arg(&self.config).args(arguments);
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
        APT_GET.run(command, cancel, tick)
    }
}

fn configuration(folder: &Path, architecture: &str, preferred: &str) -> String {
    let folder = folder.display();
    format!(
        r#"// Written by vpmu. The machine's own hooks are not ours to run.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear APT::Architectures;
Dir::State "{folder}";
Dir::State::Lists "{folder}/lists";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Default-Release "{preferred}";
APT::Sandbox::User "root";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::ForceHash "SHA256";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::Retries "3";
"#
    )
}

/// Parses a line `'URI' FILE SIZE SHA256:HASH`.
fn parse_uri_line(line: &str) -> Option<Package> {
    let mut words = line.split_whitespace();
    let _uri = words.next()?;
    let file = words.next()?;
    let size = words.next()?.parse().ok()?;
    let sha256 = words.next()?.strip_prefix("SHA256:")?;
    let plain = file.ends_with(".deb") && !file.contains('/');
    (plain && sha256.len() == 64).then(|| Package {
        name: file.split('_').next().unwrap_or(file).to_owned(),
        file: file.to_owned(),
        size,
        sha256: sha256.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_lines() {
        let hash = "0".repeat(64);
        let line = format!(
            "'http://m.example/pool/a_1%2b2_arm64.deb' a_1%3a1+2_arm64.deb 135152 SHA256:{hash}"
        );
        let package = parse_uri_line(&line).unwrap();
        assert_eq!(package.name, "a");
        assert_eq!(package.file, "a_1%3a1+2_arm64.deb");
        assert_eq!(package.size, 135_152);
        for bad in [
            "'u' a.deb 1",
            "'u' a.deb x SHA256:00",
            "'u' a.deb 1 MD5Sum:00",
            &format!("'u' ../a.deb 1 SHA256:{hash}"),
        ] {
            assert_eq!(parse_uri_line(bad), None, "{bad}");
        }
    }
}
