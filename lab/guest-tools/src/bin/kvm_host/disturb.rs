//! What happens to a guest while it measures: it is moved to another process, taken back to an earlier state, or reset.

use alloc::format;
use alloc::string::String;

use serde_json::{Value, json};
use vpmu_guest_tools::sys::{self, Fd};
use vpmu_measure::{Disturb, MARK};

use super::monitor::Monitor;

/// Milliseconds of the work that a guest which is taken back does again.
const AGAIN_MS: u32 = 30;

/// The guest's state on its way to another process, and the disk of snapshots.
const MOVED: &str = "file:/run/moved";
const DISK: &str = "/run/snapshots";

/// The line of this program's other process: the next process of QEMU takes the guest.
pub(crate) const MOVES: &str = "moves";
/// QEMU's options with which it takes the guest.
pub(crate) const INCOMING: [&str; 2] = ["-incoming", MOVED];

/// Disturbs the guest that has begun to measure, from another process, which tells `dialogue` of moves. A guest that is
/// reset begins again, `begun` times by now.
pub(crate) fn start(mut monitor: Monitor, disturb: Disturb, begun: u32, dialogue: Fd) -> Monitor {
    let due = match disturb {
        Disturb::Reset(times) => begun <= times,
        Disturb::Migrate(_) | Disturb::Loadvm(_) => begun == 1,
    };
    if due && matches!(sys::fork(), Ok(None)) {
        let outcome = match perform(&mut monitor, disturb, begun, dialogue) {
            Ok(times) => format!("kvm-host: {disturb:?}: done {times} times"),
            Err(reason) => format!("kvm-host: {disturb:?}: {reason}"),
        };
        Fd::STDOUT.say(format_args!("{outcome}"));
        sys::exit(0);
    }
    monitor
}

/// Returns the milliseconds of the guest's work before a disturbance: each comes at another moment of the guest's tick.
fn work_ms(time: u32) -> u32 {
    40 + 7 * (time % 8)
}

fn perform(
    monitor: &mut Monitor,
    disturb: Disturb,
    begun: u32,
    dialogue: Fd,
) -> Result<u32, String> {
    match disturb {
        Disturb::Migrate(times) => {
            for time in 0..times {
                sys::sleep_ms(work_ms(time));
                // A guest that runs meanwhile shares the host's processor with the copy, and is over before the second.
                monitor.ask("stop", &json!({}))?;
                monitor.ask("migrate", &json!({"uri": MOVED}))?;
                let completed = |it: &Value| it["status"] == "completed";
                monitor.until("query-migrate", &json!({}), completed)?;
                dialogue.say(format_args!("{}{MOVES}", char::from(MARK)));
                monitor.quit()?;
                let is_there = |it: &Value| it["status"] == "paused";
                monitor.until("query-status", &json!({}), is_there)?;
                monitor.ask("cont", &json!({}))?;
            }
            Ok(times)
        }
        Disturb::Loadvm(times) => {
            make_disk(monitor)?;
            for time in 0..times {
                sys::sleep_ms(work_ms(time));
                // Of a guest that runs, QEMU saves a clock that goes on while it saves (kvmclock_pre_save).
                monitor.ask("stop", &json!({}))?;
                monitor.say("savevm before")?;
                monitor.ask("cont", &json!({}))?;
                sys::sleep_ms(AGAIN_MS);
                monitor.say("loadvm before")?;
            }
            Ok(times)
        }
        Disturb::Reset(_) => {
            sys::sleep_ms(work_ms(begun));
            monitor.ask("set-action", &json!({"reboot": "reset"}))?;
            monitor.ask("system_reset", &json!({}))?;
            Ok(begun)
        }
    }
}

/// Gives QEMU a disk that no guest has, for snapshots.
fn make_disk(monitor: &mut Monitor) -> Result<(), String> {
    let file = json!({"driver": "file", "filename": DISK, "size": 0});
    create(monitor, "file", &file)?;
    let file = json!({"driver": "file", "node-name": "file", "filename": DISK});
    monitor.ask("blockdev-add", &file)?;
    let disk = json!({"driver": "qcow2", "file": "file", "size": 1 << 20});
    create(monitor, "disk", &disk)?;
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": "file"});
    monitor.ask("blockdev-add", &disk).map(drop)
}

/// Creates an image by a job of this name, to its end.
fn create(monitor: &mut Monitor, job: &str, options: &Value) -> Result<(), String> {
    let create = json!({"job-id": job, "options": options});
    monitor.ask("blockdev-create", &create)?;
    let has_ended = |jobs: &Value| {
        let mut jobs = jobs.as_array().into_iter().flatten();
        jobs.all(|job| job["status"] == "concluded")
    };
    monitor.until("query-jobs", &json!({}), has_ended)
}
