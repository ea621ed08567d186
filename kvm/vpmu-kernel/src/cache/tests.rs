use super::*;
use crate::tests::{bzimage, elf_with};

fn bzimage_with(elf: &[u8]) -> Vec<u8> {
    let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
    let block = lz4_flex::block::compress(elf);
    lz4.extend((block.len() as u32).to_le_bytes());
    lz4.extend(block);
    bzimage(&lz4, Some(elf.len()))
}

struct Setup {
    folder: tempfile::TempDir,
    cache: Cache,
    image: PathBuf,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("bzImage");
        fs::write(&image, bzimage_with(&elf_with(&[0x90, 0x0f, 0x33, 0xc3]))).unwrap();
        Self {
            cache: Cache::at(folder.path().join("a/kernels")),
            image,
            folder,
        }
    }

    fn without(&self, rewrite: bool) -> Vec<u8> {
        let mut kernel = Kernel::open(&self.image).unwrap();
        if rewrite {
            assert_eq!(kernel.rewrite_rdpmc().unwrap().sites.len(), 1);
        }
        kernel.elf().to_vec()
    }

    fn files(&self) -> Vec<PathBuf> {
        let folder = fs::read_dir(&self.cache.folder).into_iter().flatten();
        folder.map(|entry| entry.unwrap().path()).collect()
    }

    fn open(&self, rewrite: bool) -> Kernel {
        self.cache.open(&self.image, rewrite).unwrap()
    }
}

#[test]
fn the_same_bytes_are_loaded_with_it_and_without() {
    let setup = Setup::new();
    for rewrite in [true, false, true, false] {
        let kernel = setup.open(rewrite);
        assert_eq!(kernel.elf(), setup.without(rewrite));
        let plain = Kernel::from_bytes(setup.without(rewrite)).unwrap();
        assert_eq!(kernel.segments(), plain.segments());
    }
    assert_eq!(setup.files().len(), 2, "one for each treatment");
}

#[test]
fn what_is_kept_is_used() {
    let setup = Setup::new();
    setup.open(true);
    let file = setup.files().remove(0);
    // A kernel that nobody could have made of the image, with a digest that fits it.
    let other = elf_with(b"other");
    let kept = [FORMAT, Sha256::digest(&other).as_slice(), &other].concat();
    fs::write(&file, kept).unwrap();
    assert_eq!(setup.open(true).elf(), other);
}

#[test]
fn what_has_decayed_is_made_again() {
    let setup = Setup::new();
    setup.open(true);
    let file = setup.files().remove(0);
    let whole = fs::read(&file).unwrap();
    let mut cases: Vec<Vec<u8>> = (0..whole.len())
        .step_by(7)
        .map(|at| {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            damaged
        })
        .collect();
    cases.extend(
        (0..whole.len())
            .step_by(11)
            .map(|length| whole[..length].to_vec()),
    );
    cases.push([&whole[..], b"x"].concat());
    for damaged in cases {
        fs::write(&file, &damaged).unwrap();
        assert_eq!(setup.open(true).elf(), setup.without(true));
        assert_eq!(fs::read(&file).unwrap(), whole, "and is kept again");
    }
}

#[test]
fn the_folder_stays_within_its_bounds() {
    let setup = Setup::new();
    for n in 0..MOST_FILES as u8 + 3 {
        let elf = elf_with(&[0x90, n]);
        fs::write(&setup.image, bzimage_with(&elf)).unwrap();
        assert_eq!(setup.open(true).elf(), elf);
    }
    assert_eq!(setup.files().len(), MOST_FILES);
    // Sparse files: as large as may be, and used long ago.
    for n in 0..3 {
        let file = File::create(setup.cache.folder.join(format!("{n}"))).unwrap();
        file.set_len(MOST_BYTES / 2).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    }
    fs::write(&setup.image, bzimage_with(&elf_with(b"last"))).unwrap();
    setup.open(true);
    let bytes: u64 = setup
        .files()
        .iter()
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert!(bytes <= MOST_BYTES, "{bytes}");
    assert_eq!(setup.open(true).elf(), elf_with(b"last"));
}

#[test]
fn a_folder_that_others_may_write_to_is_not_used() {
    let setup = Setup::new();
    setup.open(true);
    let file = setup.files().remove(0);
    let other = elf_with(b"other");
    fs::write(
        file,
        [FORMAT, Sha256::digest(&other).as_slice(), &other].concat(),
    )
    .unwrap();
    fs::set_permissions(&setup.cache.folder, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(setup.open(true).elf(), setup.without(true));
}

#[test]
fn an_elf_file_is_not_kept_and_a_folder_that_cannot_be_made_is_no_error() {
    let setup = Setup::new();
    let elf = elf_with(&[0x90, 0x0f, 0x33, 0xc3]);
    let path = setup.folder.path().join("vmlinux");
    fs::write(&path, &elf).unwrap();
    setup.cache.open(&path, true).unwrap();
    assert!(setup.files().is_empty());
    let nowhere = Cache::at("/dev/null/kernels");
    assert_eq!(nowhere.open(&setup.image, false).unwrap().elf(), elf);
}
