//! The search for a command, by the rules of `execvp`.

use core::ffi::CStr;

/// The directories to search when the environment has no PATH.
pub const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Longest path the kernel takes, its NUL included.
pub const PATH_MAX: usize = 4096;

/// Returns the directories to try for `command`, in order. A command with a
/// slash is a path itself: one try, in no directory.
pub fn directories<'a>(command: &[u8], path: &'a [u8]) -> impl Iterator<Item = Option<&'a [u8]>> {
    let is_path = command.contains(&b'/');
    let searched = path
        .split(|&byte| byte == b':')
        // An empty entry means the working directory.
        .map(|directory| {
            Some(if directory.is_empty() {
                b"."
            } else {
                directory
            })
        });
    is_path
        .then_some(None)
        .into_iter()
        .chain(searched.take(if is_path { 0 } else { usize::MAX }))
}

/// Writes `directory/command` into `buffer`. Returns `None` when it is too
/// long.
pub fn join<'a>(
    buffer: &'a mut [u8; PATH_MAX],
    directory: Option<&[u8]>,
    command: &[u8],
) -> Option<&'a CStr> {
    let (directory, slash): (&[u8], &[u8]) = match directory {
        Some(directory) => (directory, b"/"),
        None => (b"", b""),
    };
    let mut length = 0;
    for part in [directory, slash, command, b"\0"] {
        buffer
            .get_mut(length..length + part.len())?
            .copy_from_slice(part);
        length += part.len();
    }
    CStr::from_bytes_with_nul(&buffer[..length]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(command: &str, path: &str) -> Vec<String> {
        let mut buffer = [0; PATH_MAX];
        directories(command.as_bytes(), path.as_bytes())
            .map(|directory| {
                let joined = join(&mut buffer, directory, command.as_bytes());
                joined.unwrap().to_str().unwrap().to_owned()
            })
            .collect()
    }

    #[test]
    fn order() {
        assert_eq!(tries("perf", "/a:/b"), ["/a/perf", "/b/perf"]);
        assert_eq!(tries("perf", ":/b"), ["./perf", "/b/perf"]);
        assert_eq!(tries("./perf", "/a:/b"), ["./perf"]);
        assert_eq!(tries("/bin/perf", ""), ["/bin/perf"]);
    }

    #[test]
    fn too_long() {
        let mut buffer = [0; PATH_MAX];
        let long = [b'a'; PATH_MAX];
        assert!(join(&mut buffer, None, &long).is_none());
        assert!(join(&mut buffer, None, &long[1..]).is_some());
        assert!(join(&mut buffer, Some(b"/bin"), &long[1..]).is_none());
    }
}
