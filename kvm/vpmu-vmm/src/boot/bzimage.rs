//! A bzImage as it is: its own code unpacks the kernel, and moves it (KASLR).

use std::io::Cursor;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{Config, Error, HIGH};

/// The 64-bit entry, from the begin of the loaded part (Documentation/arch/x86/boot.rst, "64-bit boot protocol").
const ENTRY: u64 = 0x200;
/// `xloadflags`: there is a 64-bit entry.
const XLF_KERNEL_64: u16 = 1 << 0;

/// Loads the image, and returns its first address, the end of the memory that it needs, and its header.
pub(super) fn load(
    memory: &GuestMemoryMmap,
    config: &Config,
    image: Vec<u8>,
) -> Result<(u64, u64, setup_header), Error> {
    let refused = |error: String| Error::Config(format!("{}: {error}", config.kernel.display()));
    if image.len() as u64 > config.memory {
        return Err(Error::Memory("the kernel"));
    }
    let at = GuestAddress(HIGH);
    let loaded = BzImage::load(memory, Some(at), &mut Cursor::new(image), None)
        .map_err(|error| refused(error.to_string()))?;
    let header = loaded.setup_header.unwrap_or_default();
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        let error = "it is a 32-bit kernel, or older than Linux 3.8: no 64-bit entry";
        return Err(refused(error.to_owned()));
    }
    if header.relocatable_kernel == 0 {
        let error = "the kernel cannot be moved: build it with CONFIG_RELOCATABLE";
        return Err(refused(error.to_owned()));
    }
    // The image moves itself up to `pref_address`, and unpacks there with room to work, before it searches for the initramfs.
    let work = header
        .pref_address
        .max(HIGH)
        .saturating_add(header.init_size.into());
    let end = work.max(loaded.kernel_end);
    match end <= config.memory {
        true => Ok((HIGH + ENTRY, end, header)),
        false => Err(Error::Load(HIGH, end)),
    }
}
