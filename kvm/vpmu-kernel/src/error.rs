//! Why a file is no kernel that can be booted here.

use super::{LARGEST_BZIMAGE, LARGEST_FILE, LARGEST_UNPACKED, MOST_HEADERS, MOST_PAIRS};

const MIB: u64 = 1 << 20;

/// Why a file is no kernel that can be booted here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Read(String, #[source] std::io::Error),
    /// Neither a bzImage nor an ELF file.
    #[error("this is neither a bzImage (vmlinuz) nor a 64-bit ELF file (vmlinux)")]
    Unknown,
    /// The file is longer than [`LARGEST_FILE`].
    #[error("the file is larger than {} MiB, which no kernel is", LARGEST_FILE / MIB)]
    File,
    /// The bzImage is longer than [`LARGEST_BZIMAGE`].
    #[error(
        "the bzImage is larger than {} MiB; give the vmlinux in it instead",
        LARGEST_BZIMAGE / MIB
    )]
    BzImage,
    /// The bzImage announces more than [`LARGEST_UNPACKED`].
    #[error(
        "the bzImage announces a kernel of {0} bytes; more than {most} MiB are not unpacked, give an \
         uncompressed vmlinux instead",
        most = LARGEST_UNPACKED / MIB
    )]
    Unpacked(u64),
    /// The file ends before its header says.
    #[error("the kernel image is truncated: {0}")]
    Truncated(&'static str),
    /// The boot protocol is older than 2.08 (Linux 2.6.26), or the header makes no sense.
    #[error("the bzImage's header makes no sense, or is older than boot protocol 2.08")]
    Header,
    /// The payload has a magic number of no known method.
    #[error(
        "the kernel is compressed with a method not known here (it begins with {0:02x?}); known \
         are gzip, xz, zstd and lz4, or give an uncompressed vmlinux"
    )]
    Compression([u8; 4]),
    /// The compressed data is damaged, or needs more memory than is given.
    #[error("the kernel's {0} data cannot be decompressed: {1}")]
    Damaged(&'static str, String),
    /// The ELF file is damaged.
    #[error("the kernel's ELF headers are damaged: {0}")]
    Elf(String),
    /// The ELF file has more than [`MOST_HEADERS`] of a kind.
    #[error("the kernel has {0} ELF {1} headers; no linker makes more than {MOST_HEADERS}")]
    Headers(u64, &'static str),
    /// Two parts of the file, or of memory, that must be apart are not.
    #[error("the kernel's {0} overlap, which no linker does: the file is damaged or hostile")]
    Overlap(&'static str),
    /// Not for this processor, or not for its 64-bit mode.
    #[error("the kernel is not for x86-64; 32-bit kernels are not served")]
    Machine,
    /// Without sections nobody can tell code from data.
    #[error(
        "the kernel has no section headers, so its RDPMC instructions cannot be found safely; give \
         the distribution's bzImage or an unstripped vmlinux, or boot it with --no-pmu"
    )]
    NoSections,
    /// Two bytes that may be an RDPMC or the inside of another instruction.
    #[error(
        "at {0:#x} the kernel has two bytes that may be an RDPMC or a part of another instruction, \
         so it cannot be rewritten safely; boot it with --no-pmu"
    )]
    Ambiguous(u64),
    /// More than [`MOST_PAIRS`] pairs of bytes that may be an RDPMC.
    #[error(
        "more than {MOST_PAIRS} places in the kernel's code look like an RDPMC, where a Linux has \
         some twenty; boot it with --no-pmu"
    )]
    Pairs,
    /// The file to pack a kernel into is a kernel that is unpacked already.
    #[error("this is no bzImage to pack the kernel into again; write an ELF file")]
    NoBzImage,
    /// The bzImage to pack a kernel into was another's.
    #[error("the bzImage is not the one that this kernel was taken from")]
    Another,
    /// Only zstd and LZ4 are packed again.
    #[error(
        "the bzImage is compressed with gzip or xz, and only zstd and lz4 are packed again; \
         write an ELF file, or have RDPMC served at run time"
    )]
    Repack,
    /// The compressor failed.
    #[error("the kernel cannot be compressed: {0}")]
    Pack(#[source] std::io::Error),
    /// The kernel, compressed again, is longer than it was by this many bytes.
    #[error(
        "compressed again, the kernel is {0} bytes longer than its room in the bzImage; \
         write an ELF file, or have RDPMC served at run time"
    )]
    Longer(usize),
}
