//! The search for a command, by the rules of `execvp`.

use alloc::borrow::ToOwned;
use alloc::ffi::CString;
use alloc::vec::Vec;
use core::ffi::CStr;

/// The directories to search when the environment has no PATH.
pub const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Longest path the kernel takes, its NUL included.
const PATH_MAX: usize = 4096;

/// Returns the paths to try for `command`, in order, without those that are too long. A command with a slash is a path
/// itself.
pub fn candidates(command: &CStr, path: &[u8]) -> Vec<CString> {
    let name = command.to_bytes();
    let all = match name.contains(&b'/') {
        true => Vec::from([command.to_owned()]),
        false => path
            .split(|&byte| byte == b':')
            // An empty entry means the working directory.
            .map(|directory| {
                if directory.is_empty() {
                    b"."
                } else {
                    directory
                }
            })
            .filter_map(|directory| CString::new([directory, b"/", name].concat()).ok())
            .collect(),
    };
    let fits = |path: &CString| path.count_bytes() < PATH_MAX;
    all.into_iter().filter(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(command: &CStr, path: &str) -> Vec<String> {
        let candidates = candidates(command, path.as_bytes()).into_iter();
        candidates.map(|path| path.into_string().unwrap()).collect()
    }

    #[test]
    fn order() {
        assert_eq!(tries(c"perf", "/a:/b"), ["/a/perf", "/b/perf"]);
        assert_eq!(tries(c"perf", ":/b"), ["./perf", "/b/perf"]);
        assert_eq!(tries(c"./perf", "/a:/b"), ["./perf"]);
        assert_eq!(tries(c"/bin/perf", ""), ["/bin/perf"]);
    }

    #[test]
    fn too_long() {
        let of = |length| CString::new(vec![b'/'; length]).unwrap();
        assert!(tries(&of(PATH_MAX), "").is_empty());
        assert_eq!(tries(&of(PATH_MAX - 1), "").len(), 1);
        let name = CString::new(vec![b'a'; PATH_MAX - 3]).unwrap();
        assert_eq!(tries(&name, "/bin:").len(), 1);
    }
}
