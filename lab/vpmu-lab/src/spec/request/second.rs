//! What is said of a second guest: its check, and what follows from it.

use std::path::PathBuf;

use super::{LEAST_MEMORY, Request};
use crate::spec::SecondPayload;
use crate::spec::arch::Arch;
use crate::spec::command::Command;
use crate::spec::design::{Design, Pmu};
use crate::{Result, usage};

/// The room for a second guest's command line in the monitor's head, less the lab's own words.
const MOST_WORDS: usize = 1400;
/// The least memory of a second guest that is the lab's Linux, MiB.
const LEAST_LINUX: u32 = 256;

impl Request {
    pub(super) fn check_second(&self, designs: &[Design]) -> Result<()> {
        let Some(second) = &self.second else {
            return Ok(());
        };
        let may_have = |design: &Design| matches!(design.pmu, Pmu::Partitioned | Pmu::Emulated);
        if self.machine.arch != Arch::Aarch64 || !designs.iter().all(may_have) {
            return usage("--second is about --arch aarch64 --pmu partitioned and emulated");
        }
        if second.append.len() > MOST_WORDS {
            return usage(format!("--second-append takes {MOST_WORDS} bytes"));
        }
        if second.payload != SecondPayload::Linux && second.command.is_some() {
            return usage("--second-command is about --second linux");
        }
        if second.payload == SecondPayload::Linux {
            if second.command.is_none() && self.command.is_none() {
                return usage("--second linux runs a command: give one by --second-command");
            }
            if second.memory.is_some_and(|memory| memory < LEAST_LINUX) {
                return usage(format!(
                    "--second-memory is too small for Linux: give at least {LEAST_LINUX}M"
                ));
            }
        }
        let first = self.command.as_ref().map_or(0, |_| LEAST_MEMORY);
        let least = second.memory().unwrap_or(0).saturating_add(first);
        if self.machine.memory < least {
            return usage(format!(
                "--memory is too small for two guests: give at least {least}M"
            ));
        }
        Ok(())
    }

    /// Returns the command that a second guest runs, if there is one and it runs one.
    pub fn second_command(&self) -> Option<&Command> {
        let second = self.second.as_ref()?;
        let is_linux = second.payload == SecondPayload::Linux;
        let command = second.command.as_ref().or(self.command.as_ref());
        command.filter(|_| is_linux)
    }

    /// Returns the files of the second guest that the user names.
    pub(super) fn second_files(&self) -> impl Iterator<Item = &PathBuf> {
        let payload = self.second.as_ref().map(|second| &second.payload);
        let (image, initrd) = match payload {
            Some(SecondPayload::Image { image, initrd }) => (Some(image), initrd.as_ref()),
            Some(SecondPayload::Linux) | None => (None, None),
        };
        image.into_iter().chain(initrd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{SecondRequest, Spec};

    fn check(change: impl FnOnce(&mut Request, &mut SecondRequest)) -> Result<Spec> {
        let command = |line: &str| Command::from_words(&[line.to_owned()]);
        let mut request = Request::new(Arch::Aarch64);
        request.command = command("first");
        let mut second = SecondRequest {
            payload: SecondPayload::Linux,
            command: command("second"),
            append: String::new(),
            memory: None,
            slice: None,
            eager: false,
        };
        change(&mut request, &mut second);
        request.second = Some(second);
        request.check(&[Pmu::Partitioned.into()])
    }

    fn line(spec: &Spec) -> Option<String> {
        Some(spec.request.second_command()?.as_line().to_owned())
    }

    #[test]
    fn a_second_linux_has_its_own_command_or_the_first_guests() {
        assert_eq!(line(&check(|_, _| {}).unwrap()).unwrap(), "second");
        let same = check(|_, second| second.command = None).unwrap();
        assert_eq!(line(&same).unwrap(), "first");
        let nothing = check(|request, second| {
            request.command = None;
            request.kernel = Some("/dev/null".into());
            second.command = None;
        });
        assert!(
            nothing
                .unwrap_err()
                .to_string()
                .contains("--second-command")
        );
        let beside_a_kernel = check(|request, _| {
            request.command = None;
            request.kernel = Some("/dev/null".into());
        })
        .unwrap();
        assert!(beside_a_kernel.request.command.is_none());
        assert!(beside_a_kernel.needs_images());
    }

    #[test]
    fn both_guests_have_memory() {
        let of = |memory, second_memory| {
            check(|request, second| {
                request.machine.memory = memory;
                second.memory = second_memory;
            })
        };
        assert!(of(768, None).is_ok());
        assert!(of(767, None).is_err());
        assert!(of(640, Some(256)).is_ok());
        assert!(of(1024, Some(255)).is_err());
        assert!(of(1024, Some(u32::MAX)).is_err());
    }

    #[test]
    fn an_image_has_files_and_no_work() {
        let image = |initrd: Option<&str>| {
            check(|_, second| {
                second.command = None;
                second.payload = SecondPayload::Image {
                    image: "/dev/null".into(),
                    initrd: initrd.map(PathBuf::from),
                };
            })
        };
        let with_command = check(|_, second| {
            second.payload = SecondPayload::Image {
                image: "/dev/null".into(),
                initrd: None,
            };
        });
        assert!(with_command.is_err());
        assert_eq!(line(&image(Some("/dev/null")).unwrap()), None);
        assert!(image(Some("/nowhere")).is_err());
    }
}
