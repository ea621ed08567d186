//! The clock of a machine that QEMU emulates, read over QEMU's machine protocol (QMP).
//!
//! A guest's kernel that spins for ever on a lock executes PAUSE, which makes QEMU leave its loop: virtual time then
//! passes a hundred times more slowly, and no limit of the machine's own time is ever reached. QEMU is busy
//! meanwhile, so it does not seem stopped either.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// QEMU's processor time between two reads.
const EVERY: Duration = Duration::from_secs(5);
/// QEMU's processor time within which the clock's second must change. Slow machines that are right: Linux calibrates a
/// timer in an RDTSC loop, and vCPUs that share a processor wait for each other in PAUSE loops. A second of such a
/// loop has taken 85 seconds.
const STILL: Duration = Duration::from_secs(240);
/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest path of a socket, with its NUL (unix(7)).
const LONGEST_PATH: usize = 108;

/// A machine's real-time clock, whose smallest step is a second. `-rtc clock=vm` makes it show virtual time.
#[derive(Debug)]
pub(crate) struct Clock {
    socket: String,
    connection: Option<BufReader<UnixStream>>,
    /// The clock's last value, and QEMU's processor time when it was new.
    last: (Value, Duration),
    read: Duration,
}

impl Clock {
    /// Returns the clock of a QEMU that is started with [`arguments`](Self::arguments); `None` where a socket's path
    /// would be too long, or is no text.
    pub(crate) fn in_folder(folder: &Path) -> Option<Self> {
        let socket = folder.join("qmp").into_os_string().into_string().ok()?;
        (socket.len() < LONGEST_PATH).then(|| Self {
            socket,
            connection: None,
            last: (Value::Null, Duration::ZERO),
            read: Duration::ZERO,
        })
    }

    /// Returns QEMU's options.
    pub(crate) fn arguments(&self) -> [OsString; 2] {
        // A comma separates options unless there are two.
        let socket = self.socket.replace(',', ",,");
        let socket = format!("unix:{socket},server=on,wait=off");
        ["-qmp".into(), socket.into()]
    }

    /// Tells whether the clock stands still, after `used` of QEMU's processor time. A QEMU that does not answer is not
    /// judged.
    pub(crate) fn stands_still(&mut self, used: Duration) -> bool {
        if used.saturating_sub(self.read) < EVERY {
            return false;
        }
        self.read = used;
        match self.read() {
            Ok(now) if now == self.last.0 => used.saturating_sub(self.last.1) >= STILL,
            Ok(now) => {
                self.last = (now, used);
                false
            }
            Err(_) => {
                self.connection = None;
                self.last = (Value::Null, used);
                false
            }
        }
    }

    fn read(&mut self) -> io::Result<Value> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => {
                let mut new = BufReader::new(UnixStream::connect(&self.socket)?);
                new.get_ref().set_read_timeout(Some(PATIENCE))?;
                new.read_line(&mut String::new())?;
                ask(&mut new, r#"{"execute":"qmp_capabilities"}"#)?;
                self.connection.insert(new)
            }
        };
        let rtc = r#"{"execute":"qom-get","arguments":{"path":"/machine","property":"rtc-time"}}"#;
        ask(connection, rtc)
    }
}

/// Sends a command and returns its answer. Lines in between are events.
fn ask(connection: &mut BufReader<UnixStream>, command: &str) -> io::Result<Value> {
    connection.get_mut().write_all(command.as_bytes())?;
    loop {
        let mut line = String::new();
        if connection.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line: Value = serde_json::from_str(&line)?;
        if let Some(answer) = line.get("return") {
            return Ok(answer.clone());
        }
        if line.get("error").is_some() {
            return Err(io::Error::other("QEMU refuses the command"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// Answers as QEMU does: the clock shows each of `seconds` once, then QEMU ends.
    fn serve(folder: &Path, seconds: Vec<u32>) -> thread::JoinHandle<()> {
        let listener = UnixListener::bind(folder.join("qmp")).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\":{}}\r\n").unwrap();
            let answers = seconds.iter().map(|second| {
                format!("{{\"event\":\"X\"}}\r\n{{\"return\":{{\"tm_sec\":{second}}}}}\r\n")
            });
            for answer in ["{\"return\":{}}\r\n".to_owned()]
                .into_iter()
                .chain(answers)
            {
                let mut command = [0; 200];
                assert_ne!(io::Read::read(&mut stream, &mut command).unwrap(), 0);
                stream.write_all(answer.as_bytes()).unwrap();
            }
        })
    }

    #[test]
    fn a_clock_that_goes_on_and_one_that_stands_still() {
        let folder = tempfile::tempdir().unwrap();
        let mut seconds = vec![1, 2, 2, 3];
        seconds.extend([4; 49]);
        let server = serve(folder.path(), seconds);
        let mut clock = Clock::in_folder(folder.path()).unwrap();
        let mut at = |seconds| clock.stands_still(Duration::from_secs(seconds));
        // Before five seconds nobody asks.
        assert!(!at(4));
        let still: Vec<bool> = (1..=53).map(|n| at(5 * n)).collect();
        assert_eq!(still.iter().position(|&still| still), Some(52));
        server.join().unwrap();
        assert!(!at(270), "a QEMU that has gone is not judged");
        assert!(!at(1000));
    }

    #[test]
    fn paths_that_qemu_or_the_kernel_would_misread() {
        let comma = Clock::in_folder(Path::new("/a,b")).unwrap();
        assert_eq!(comma.arguments()[1], "unix:/a,,b/qmp,server=on,wait=off");
        assert!(Clock::in_folder(Path::new(OsStr::from_bytes(b"/\xff"))).is_none());
        assert!(Clock::in_folder(Path::new(&"x".repeat(103))).is_some());
        assert!(Clock::in_folder(Path::new(&"x".repeat(104))).is_none());
    }
}
