//! QEMU's monitor (QMP), over a pair of named pipes.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};

use serde_json::{Value, json};
use vpmu_guest_tools::files::{self, Lines};
use vpmu_guest_tools::start::Process;
use vpmu_guest_tools::sys::{self, Errno, Fd, flags};

use super::host::busybox;

/// The pipes' name, without the endings.
const PIPE: &str = "/run/qmp";
/// QEMU's options.
pub(crate) const OPTIONS: [&str; 4] = [
    "-chardev",
    "pipe,id=qmp,path=/run/qmp",
    "-mon",
    "chardev=qmp,mode=control",
];

/// Milliseconds between two tries, and their number.
const AGAIN_MS: u32 = 20;
const TRIES: u32 = 3000;

/// The monitor of a QEMU with [`OPTIONS`], or of several, one after the other.
pub(crate) struct Monitor {
    to: Fd,
    from: Lines,
    greeted: bool,
}

impl Monitor {
    /// Makes the pipes.
    pub(crate) fn new(process: Process) -> Result<Self, Errno> {
        busybox(process, &format!("mkfifo {PIPE}.in {PIPE}.out"));
        // Both directions, so that QEMU is never the only one to have a pipe open.
        let open = |ending| files::open(&format!("{PIPE}.{ending}"), flags::READ_WRITE);
        Ok(Self {
            to: open("in")?,
            from: Lines::of(open("out")?),
            greeted: false,
        })
    }

    /// Performs a command, and returns its result or QEMU's reason for none.
    pub(crate) fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        if !self.greeted {
            self.greeted = true;
            // Another process of this program may have asked before.
            let _ = self.ask("qmp_capabilities", &json!({}));
        }
        let line = json!({"execute": command, "arguments": arguments});
        (self.to.write_all(format!("{line}\n").as_bytes())).map_err(|errno| errno.to_string())?;
        // The greeting and events come between.
        for line in &mut self.from {
            let mut answer: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(reason) = answer.get("error") {
                return Err(format!("{command}: {reason}"));
            }
        }
        Err(format!("{command}: the monitor is closed"))
    }

    /// Performs a command of the monitor for people.
    pub(crate) fn say(&mut self, line: &str) -> Result<(), String> {
        let answer = self.ask("human-monitor-command", &json!({"command-line": line}))?;
        match answer.as_str() {
            Some("") | None => Ok(()),
            Some(reason) => Err(format!("{line}: {reason}")),
        }
    }

    /// Performs a command again and again until its result is as `wanted`.
    pub(crate) fn until(
        &mut self,
        command: &str,
        arguments: &Value,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<(), String> {
        let mut last = Ok(Value::Null);
        for _ in 0..TRIES {
            last = self.ask(command, arguments);
            if last.as_ref().is_ok_and(&wanted) {
                return Ok(());
            }
            sys::sleep_ms(AGAIN_MS);
        }
        Err(match last {
            Ok(result) => format!("{command}: {result}"),
            Err(reason) => reason,
        })
    }

    /// Ends this QEMU, and waits for the next.
    pub(crate) fn quit(&mut self) -> Result<(), String> {
        self.ask("quit", &json!({}))?;
        self.greeted = false;
        // One that ends would still take a command, and not answer.
        let greets = |line: String| line.contains("\"QMP\"");
        match self.from.any(greets) {
            true => Ok(()),
            false => Err("the monitor is closed".to_string()),
        }
    }

    /// Returns what the PMUs of all vCPUs have cost.
    pub(crate) fn pmu(&mut self) -> Result<BTreeMap<String, u64>, String> {
        let mut sum = BTreeMap::new();
        let vcpus = self.ask("query-cpus-fast", &json!({}))?;
        for vcpu in vcpus.as_array().into_iter().flatten() {
            let property = json!({"path": vcpu["qom-path"], "property": "vpmu-statistics"});
            let values = self.ask("qom-get", &property)?;
            for (name, count) in values.as_object().into_iter().flatten() {
                *sum.entry(name.clone()).or_default() += count.as_u64().unwrap_or(0);
            }
        }
        Ok(sum)
    }
}
