use super::*;

/// An ELF file: what a test wants of its headers, and the bytes that they speak of.
#[derive(Clone, Default)]
pub(crate) struct Elf {
    pub(crate) bytes: Vec<u8>,
    /// Address, place in `bytes`, bytes of the file, bytes of memory.
    pub(crate) segments: Vec<(u64, u64, u64, u64)>,
    /// Address, place in `bytes`, bytes: sections of code.
    pub(crate) code: Vec<(u64, u64, u64)>,
    /// Names and addresses.
    pub(crate) symbols: Vec<(&'static str, u64)>,
}

pub(crate) const BASE: u64 = 0xffff_ffff_8100_0000;

impl Elf {
    /// Where `bytes` is in the file.
    pub(crate) fn bytes_at(&self) -> u64 {
        64 + 56 * self.segments.len() as u64
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let at = self.bytes_at();
        let mut strings = vec![0];
        let mut symbols = vec![0; 24];
        for (name, value) in &self.symbols {
            symbols.extend((strings.len() as u32).to_le_bytes());
            symbols.extend([0x12, 0, 1, 0]); // global function, section 1
            symbols.extend([value.to_le_bytes(), [0; 8]].concat());
            strings.extend([name.as_bytes(), b"\0"].concat());
        }
        let symbols_at = at + self.bytes.len() as u64;
        let strings_at = symbols_at + symbols.len() as u64;
        let sections_at = strings_at + strings.len() as u64;

        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // ET_EXEC, EM_X86_64
        for word in [0x100_0000, 64, sections_at] {
            file.extend(word.to_le_bytes());
        }
        file.extend(0_u32.to_le_bytes());
        let sections = 3 + self.code.len();
        let (segments, strings_index) = (self.segments.len() as u16, sections as u16 - 1);
        for half in [64, 56, segments, 64, sections as u16, strings_index] {
            file.extend(half.to_le_bytes());
        }
        for &(address, place, in_file, in_memory) in &self.segments {
            file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
            for word in [
                at.wrapping_add(place),
                address,
                address,
                in_file,
                in_memory,
                4096,
            ] {
                file.extend(word.to_le_bytes());
            }
        }
        file.extend(&self.bytes);
        file.extend(&symbols);
        file.extend(&strings);
        let mut section = |kind: u32, flags: u64, address, place, size: usize, link: u32, each| {
            file.extend([0, kind].map(u32::to_le_bytes).concat());
            for word in [flags, address, place, size as u64] {
                file.extend(u64::to_le_bytes(word));
            }
            file.extend([link, 1].map(u32::to_le_bytes).concat());
            file.extend([1, each].map(u64::to_le_bytes).concat());
        };
        section(0, 0, 0, 0, 0, 0, 0);
        for &(address, place, size) in &self.code {
            section(1, 6, address, at.wrapping_add(place), size as usize, 0, 0);
        }
        section(2, 0, 0, symbols_at, symbols.len(), strings_index.into(), 24);
        section(3, 0, 0, strings_at, strings.len(), 0, 0);
        file
    }
}

/// An ELF file with one section of code.
pub(crate) fn elf_with(code: &[u8]) -> Vec<u8> {
    Elf {
        bytes: code.to_vec(),
        code: vec![(BASE, 0, code.len() as u64)],
        ..Elf::default()
    }
    .build()
}

/// A bzImage with `data` as its payload, and the unpacked size behind it where the method wants it.
pub(crate) fn bzimage(data: &[u8], size: Option<usize>) -> Vec<u8> {
    let size = size.map(|size| (size as u32).to_le_bytes());
    let size = size.as_ref().map_or(&[][..], |size| size);
    let mut image = vec![0; 1024];
    image[0x1f1] = 1; // setup_sects
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    let length = (data.len() + size.len()) as u32;
    image[0x24c..0x250].copy_from_slice(&length.to_le_bytes()); // payload_length
    [&image[..], data, size].concat()
}

#[test]
fn rubbish_is_no_kernel() {
    for image in [&b""[..], b"MZ", b"\x7fELF", &[0; 4096]] {
        assert!(Kernel::from_bytes(image.to_vec()).is_err());
    }
}

#[test]
fn every_truncation_of_an_elf_file_is_an_error_or_another_file() {
    let whole = elf_with(&[0x90, 0x0f, 0x33, 0xc3]);
    for length in 0..whole.len() {
        if let Ok(mut kernel) = Kernel::from_bytes(whole[..length].to_vec()) {
            assert!(kernel.rewrite_rdpmc().is_err(), "{length}");
        }
    }
    assert!(Kernel::from_bytes(whole).unwrap().rewrite_rdpmc().is_ok());
}

#[test]
fn a_device_without_an_end_is_refused() {
    assert!(matches!(
        Kernel::open("/dev/zero".as_ref()),
        Err(Error::File)
    ));
}

#[test]
fn a_site_has_a_name_where_there_are_symbols() {
    let mut code = vec![0x90; 0x40];
    code.extend([0x0f, 0x33, 0xc3]);
    let elf = Elf {
        code: vec![(BASE, 0, code.len() as u64)],
        bytes: code,
        symbols: vec![
            ("after", BASE + 0x41),
            ("native_read_\x1b[2Jpmc", BASE + 0x3c),
            ("before", BASE),
        ],
        ..Elf::default()
    };
    let mut kernel = Kernel::from_bytes(elf.build()).unwrap();
    let sites = kernel.rewrite_rdpmc().unwrap().sites;
    let name = "native_read_?[2Jpmc".to_owned();
    assert_eq!(kernel.symbols(&sites).unwrap(), [Some((name, 4))]);
    let mut stripped = Kernel::from_bytes(elf_with(&elf.bytes)).unwrap();
    let sites = stripped.rewrite_rdpmc().unwrap().sites;
    assert_eq!(stripped.symbols(&sites).unwrap(), [None]);
}
