use super::*;
use crate::Exit;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

/// Returns the statistics that a file of these words has.
fn parsed(words: &[u64]) -> Option<Process> {
    let words: Vec<[u8; 8]> = words.iter().map(|word| word.to_le_bytes()).collect();
    parse(7, &words)
}

/// Returns the words of a file with one vCPU.
fn file(kinds: u64, figures: u64) -> Vec<u64> {
    let (offset, stride) = (HEADER as u64, 4 + kinds + figures);
    let mut words = vec![MAGIC, VERSION, 7, offset, stride, 1, kinds, figures];
    words.extend([VALID, 9, 2, 1]);
    words.extend(100..100 + kinds + figures);
    words
}

#[test]
fn a_reader_takes_what_it_knows_of_other_versions_of_the_library() {
    let all = (KINDS as u64, FIGURES as u64);
    for (kinds, figures) in [all, (all.0 + 3, all.1 + 5), (3, 2)] {
        let process = parsed(&file(kinds, figures)).unwrap();
        let [vcpu] = &process.vcpus[..] else {
            panic!("{process:?}");
        };
        assert_eq!((vcpu.thread, vcpu.pmu), (Some(9), "intel"));
        assert_eq!(vcpu.backing, Some(Backing::Clock));
        let exits = vcpu.statistics.exits.kinds();
        assert_eq!(exits[..3], [100, 101, 102]);
        assert_eq!(exits[3], if kinds == 3 { 0 } else { 103 });
        assert_eq!(vcpu.statistics.pmis, 100 + kinds);
        assert_eq!(vcpu.statistics.masked_pmis, 101 + kinds);
        let creates = if figures == 2 { 0 } else { 103 + kinds };
        assert_eq!(vcpu.statistics.host.creates, creates);
    }
}

#[test]
fn whatever_a_file_holds_is_read_or_refused() {
    let good = file(KINDS as u64, FIGURES as u64);
    assert!(parsed(&[]).is_none());
    for at in 0..good.len() {
        for wrong in [0, 1, 5, 1 << 20, u64::MAX] {
            let mut words = good.clone();
            words[at] = wrong;
            // Another magic or version is no file of this library's; anything else reads, or is left out.
            let process = parsed(&words);
            assert!(at >= 2 || words[at] == good[at] || process.is_none());
        }
        let _ = parsed(&good[..at]);
    }
}

#[test]
fn a_file_appears_whole_and_no_link_is_followed() {
    let folder = env::temp_dir().join(format!("vpmu-publish-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (aim, name) = (folder.join("aim"), std::process::id().to_string());
    std::fs::write(&aim, "kept").unwrap();
    for link in [name.clone(), format!(".{name}")] {
        symlink(&aim, folder.join(link)).unwrap();
    }
    // A process that was killed.
    std::fs::write(folder.join("1"), "").unwrap();
    let (published, mapped) = make(&folder).unwrap();
    assert_eq!(std::fs::read(&aim).unwrap(), b"kept");
    let about = std::fs::symlink_metadata(&published.path).unwrap();
    assert!(about.is_file());
    assert_eq!(about.permissions().mode() & 0o777 & !0o640, 0);
    assert_eq!(mapped.words.len(), WORDS);
    // In a full file system a store to a page without memory would end the process.
    assert!(about.blocks() * 512 >= 8 * (HEADER + 8 * STRIDE) as u64);
    let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().collect();
    left.retain(|entry| entry.file_name() != "aim");
    assert_eq!(left.len(), 1, "{left:?}");

    // A process that reads what is published still publishes afterwards.
    let inode = about.ino();
    FILE.set(mapped).unwrap();
    let slots: Vec<_> = (0..9).map(|_| Slot::take(0, 1)).collect();
    let (mut processes, mut refused) = (Vec::new(), Vec::new());
    read_folder(&folder, &mut processes, &mut refused);
    assert_eq!(processes[0].id, std::process::id());
    assert!(processes[0].vcpus.len() >= slots.len() && refused.is_empty());
    let about = std::fs::metadata(&published.path).unwrap();
    assert!(about.blocks() * 512 >= 8 * (HEADER + 16 * STRIDE) as u64);
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    assert!(locks.contains(&format!(":{inode} ")), "{locks}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn counts_of_two_libraries_have_the_same_order() {
    let mut statistics = Statistics::new();
    statistics.set_words(std::array::from_fn(|n| n as u64));
    let figures: Vec<_> = statistics.figures().collect();
    // The order is the file's: these may be appended to, and nothing else.
    assert_eq!(figures[0], ("pmis", 0));
    assert_eq!(figures[9], ("host.lost", 9));
    assert_eq!(figures[32], ("arming.longest_ns", 32));
    assert_eq!(Exit::KINDS[7], "follow");
}
