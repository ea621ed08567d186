//! Before the program's `main`, and after it.

use std::env;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use vpmu_kvm::{Backing, Offer};
use vpmu_measure::{About, Measurement};

use crate::inside::{Inside, say};
use crate::next;
use crate::settings::{Settings, VARIABLE};

/// The dynamic linker's variable, and this library in it.
const PRELOAD: &str = "LD_PRELOAD";
const OWN_NAME: &[u8] = b"libvpmu_preload.so";

/// What all VMs of the process share.
pub(crate) struct Choices {
    pub(crate) settings: Settings,
    pub(crate) offer: Offer,
    pub(crate) measurement: Measurement,
    /// Where the statistics go.
    statistics: Option<File>,
    /// What counts; known with the first vCPU.
    pub(crate) backing: OnceLock<Backing>,
}

static CHOICES: OnceLock<Choices> = OnceLock::new();

/// The process that `vpmu exec` became, and a page that its children share: whether any of them has made a VM.
static USE: OnceLock<Option<(u32, &'static AtomicBool)>> = OnceLock::new();

/// Makes a flag that the process's children share, as QEMU's child does with -daemonize. `None` without memory.
fn shared_flag() -> Option<&'static AtomicBool> {
    // SAFETY: a new mapping, of which nothing else knows.
    let page = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let size = size_of::<AtomicBool>();
        libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0)
    };
    // SAFETY: the page is never unmapped, and all zeroes is `false`.
    (page != libc::MAP_FAILED).then(|| unsafe { &*page.cast::<AtomicBool>() })
}

/// Notes that the program has made a VM.
pub(crate) fn note_vm() {
    if let Some(Some((_, made))) = USE.get() {
        made.store(true, Ordering::Relaxed);
    }
}

/// Reports, where the program ends or becomes another one, that it has made no VM. What was meant to have a PMU then ran
/// without KVM, or in another program.
pub(crate) fn report_no_vm() {
    match USE.get() {
        Some(&Some((process, made)))
            // Once: a program that becomes another may end all the same.
            if process == process::id() && !made.swap(true, Ordering::Relaxed) =>
        {
            say(
                "the program has made no virtual machine of KVM, so no guest has had this PMU: add -accel kvm to QEMU; a \
                 program that starts another as its guest's VMM is not followed: give vpmu exec that one",
            );
        }
        _ => {}
    }
}

/// Returns the options of `vpmu exec`. `None`: somebody else has loaded this library, which then does nothing.
pub(crate) fn choices() -> Option<&'static Choices> {
    CHOICES.get()
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    next::prepare();
    let _inside = Inside::enter();
    let Some(text) = env::var_os(VARIABLE) else {
        return;
    };
    leave_environment();
    let program = next::program();
    let choices = Settings::parse(&text.to_string_lossy(), &program).and_then(|settings| {
        // Before `main`, because the program may filter its system calls, or give up its rights.
        let offer = vpmu_kvm::detect(settings.model, &settings.options);
        Ok(Choices {
            offer: offer.map_err(|error| error.to_string())?,
            statistics: settings.measure.as_deref().map(open).transpose()?,
            settings,
            measurement: Measurement::default(),
            backing: OnceLock::new(),
        })
    });
    match choices {
        Ok(choices) => {
            drop(CHOICES.set(choices));
            let _ = USE.set(shared_flag().map(|made| (process::id(), made)));
        }
        Err(error) => {
            say(error);
            next::give_up();
        }
    }
}

/// Opens the file of the statistics. `-` is standard output, which the program may close before its end.
fn open(path: &Path) -> Result<File, String> {
    let file = match path.as_os_str().as_bytes() {
        b"-" => io::stdout().as_fd().try_clone_to_owned().map(File::from),
        _ => OpenOptions::new().create(true).append(true).open(path),
    };
    file.map_err(|error| format!("failed to open {}: {error}", path.display()))
}

/// Keeps the program's children from this library.
fn leave_environment() {
    let others = env::var_os(PRELOAD).map(|list| others(list.as_bytes()));
    // SAFETY: `main` has not begun, so no other thread reads the environment.
    unsafe {
        env::remove_var(VARIABLE);
        match others {
            Some(others) if !others.is_empty() => env::set_var(PRELOAD, others),
            _ => env::remove_var(PRELOAD),
        }
    }
}

/// Returns the libraries of the list that are not this one.
fn others(list: &[u8]) -> OsString {
    let libraries = list.split(|&byte| byte == b':' || byte == b' ');
    let others: Vec<&[u8]> = libraries
        .filter(|library| !library.ends_with(OWN_NAME) && !library.is_empty())
        .collect();
    OsString::from_vec(others.join(&b':'))
}

extern "C" fn end() {
    let _inside = Inside::enter();
    let Some(choices) = choices() else {
        return;
    };
    report_no_vm();
    let Some(mut file) = choices.statistics.as_ref() else {
        return;
    };
    let line = choices.measurement.line(&About {
        policy: Some(choices.settings.options.policy),
        offer: &choices.offer,
        backing: choices.backing.get().copied(),
        freeze: choices.settings.options.freeze,
    });
    if let Err(error) = file.write_all(line.as_bytes()) {
        say(format_args!("failed to write the statistics: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_libraries_stay() {
        for (list, rest) in [
            ("/usr/lib/vpmu/libvpmu_preload.so", ""),
            (
                "/a/libvpmu_preload.so:/b/libother.so c.so",
                "/b/libother.so:c.so",
            ),
        ] {
            assert_eq!(others(list.as_bytes()), rest, "{list}");
        }
    }
}
