//! SHA-256 of files and of values, in lower-case hexadecimal.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// Returns the digest of a file's contents.
pub(crate) fn of_file(path: &Path) -> Result<String> {
    let contents = fs::read(path).map_err(Error::file("read", path))?;
    Ok(of_bytes(&contents))
}

/// Returns the digest of some bytes.
pub(crate) fn of_bytes(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        fs::write(&path, "abc").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of_file(&path).unwrap(), abc);
        assert_eq!(of_bytes(b"abc"), abc);
    }
}
