//! The options of `vpmu exec`, in its environment variable.

use std::path::PathBuf;

use vpmu_kvm::{Backing, Freeze, Model, Options, Perfmon, Policy, Vendor, amd};

/// The variable: words with spaces between them, the file of the statistics last.
pub(crate) const VARIABLE: &str = "VPMU_EXEC";

/// The user's choices.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) model: Model,
    pub(crate) options: Options,
    /// Whether the guest may measure, and where the statistics go at the end. `-` is standard output.
    pub(crate) measure: Option<PathBuf>,
    /// Whether the program reads `immediate_exit` when it wants a vCPU back, so that it need not see an overflow's EINTR.
    pub(crate) hides_kicks: bool,
}

impl Settings {
    /// Reads the words. Other words are those of another version of `vpmu`.
    pub(crate) fn parse(text: &str, program: &str) -> Result<Self, String> {
        let mut settings = Self {
            hides_kicks: program.starts_with("qemu-system-"),
            ..Self::default()
        };
        let (mut pmu, mut perfmon) = ("auto", None);
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            if let Some(file) = rest.strip_prefix("measure=") {
                settings.measure = Some(file.into());
                break;
            }
            let (word, more) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = more.trim_start();
            match word.split_once('=').unwrap_or((word, "")) {
                ("pmu", name) => pmu = name,
                ("perfmon", number) => perfmon = Some(number),
                ("backing", "auto") => settings.options.backing = None,
                ("backing", name) => {
                    settings.options.backing = Some(named(&Backing::ALL, Backing::name, name)?);
                }
                ("approximate", "") => settings.options.approximate_instructions = true,
                ("policy", name) => {
                    settings.options.policy = named(&Policy::ALL, Policy::name, name)?;
                }
                ("freeze", "vm") => settings.options.freeze = Freeze::Vm,
                ("freeze", "guest") => settings.options.freeze = Freeze::Guest,
                _ => return Err(unknown(word)),
            }
        }
        settings.model = model(pmu, perfmon)?;
        Ok(settings)
    }
}

fn model(name: &str, perfmon: Option<&str>) -> Result<Model, String> {
    let version = match perfmon {
        None => Perfmon::V5,
        Some(word) => {
            let known = word.parse().ok().filter(|number| (2..=5).contains(number));
            let version = known.and_then(Perfmon::from_number);
            version.ok_or_else(|| unknown(word))?
        }
    };
    let intel = Model::Intel {
        version,
        pebs: false,
    };
    Ok(match name {
        // A version is Intel's.
        "auto" if perfmon.is_none() && Vendor::of_host() == Vendor::Amd => Model::Auto,
        "auto" | "intel" => intel,
        "amd" => Model::Amd(amd::Interface::Core),
        "amd-v2" => Model::Amd(amd::Interface::V2),
        other => return Err(unknown(other)),
    })
}

/// Returns the one of `all` that has this name.
fn named<T: Copy>(all: &[T], of: fn(T) -> &'static str, name: &str) -> Result<T, String> {
    let mut all = all.iter().copied();
    all.find(|&it| of(it) == name).ok_or_else(|| unknown(name))
}

fn unknown(word: &str) -> String {
    format!(
        "{VARIABLE} has a word that this library does not know, {word}: use the vpmu that it came with"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_choices() {
        let text =
            "pmu=intel perfmon=2 backing=clock approximate policy=reuse freeze=guest measure=/a b";
        let settings = Settings::parse(text, "qemu-system-x86_64").unwrap();
        let version = Perfmon::V2;
        assert_eq!(
            settings.model,
            Model::Intel {
                version,
                pebs: false
            }
        );
        assert_eq!(settings.options.backing, Some(Backing::Clock));
        assert!(settings.options.approximate_instructions);
        assert_eq!(settings.options.policy, Policy::Reuse);
        assert_eq!(settings.options.freeze, Freeze::Guest);
        assert_eq!(settings.measure, Some("/a b".into()));
        assert!(settings.hides_kicks);
        assert!(!Settings::parse("", "lkvm").unwrap().hides_kicks);
        for wrong in [
            "pmu=none",
            "perfmon=9",
            "backing=no",
            "other",
            "approximate=1",
            "freeze=no",
        ] {
            assert!(Settings::parse(wrong, "").is_err(), "{wrong}");
        }
    }
}
