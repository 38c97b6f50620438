//! Inspect counts what is there, also beside a running store; purge deletes what is Strata's and nothing else.
#![allow(clippy::unwrap_used, clippy::panic)]
mod common;

use common::{chain, config, Rig};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use strata_disk::{disk_usage, inspect, purge, DiskError, MARKER_FILE};
use strata_types::Fingerprint;

fn hex(fingerprint: u8) -> String {
    Fingerprint([fingerprint; 32]).to_hex()
}

/// Two fingerprints, of five and three records.
fn filled(root: &Path) {
    for (fingerprint, count) in [(1, 5), (2, 3)] {
        let mut config = config(root, 1 << 20, 16, 4096);
        config.fingerprint = Fingerprint([fingerprint; 32]);
        let mut rig = Rig::open(config);
        let places: Vec<u32> = (0..count).collect();
        assert_eq!(rig.spill(&places, &chain(1, count, 16)).error, None);
    }
}

#[test]
fn inspect_counts_records_and_verifies_payloads() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    fs::write(root.path().join("notes.txt"), "x").unwrap();
    let found = inspect(root.path(), true).unwrap();
    assert_eq!((found.in_use, found.owner), (false, None));
    assert_eq!(found.bytes, disk_usage(root.path()).unwrap());
    assert_eq!(found.foreign, [root.path().join("notes.txt")]);
    let counts: Vec<_> = found.folders.iter().map(|f| (f.fingerprint.clone(), f.whole, f.verified)).collect();
    assert_eq!(counts, [(hex(1), 5, 5), (hex(2), 3, 3)]);
    let first = &found.folders[0];
    assert_eq!((first.page_size, first.page_bytes, first.segments), (16, 4096, 1));
    assert_eq!((first.damaged, first.corrupt, first.damaged_segments, first.newest_sequence), (0, 0, 0, 5));
    assert!(first.blank > 0 && first.bytes > 5 * 4096);

    let geometry = Rig::open(config(root.path(), 1 << 20, 16, 4096)).store.geometry();
    let file = |extension: &str| {
        let path = root.path().join(hex(1)).join(format!("segment-000000.{extension}"));
        OpenOptions::new().write(true).open(path).unwrap()
    };
    file("kv").write_all_at(b"!", geometry.payload_offset(2) + 9).unwrap();
    file("kh").write_all_at(b"!", geometry.header_offset(3) + 190).unwrap();
    let first = &inspect(root.path(), true).unwrap().folders[0];
    assert_eq!((first.whole, first.verified, first.corrupt, first.damaged), (4, 3, 1, 1));
    let quick = &inspect(root.path(), false).unwrap().folders[0];
    assert_eq!((quick.whole, quick.verified, quick.corrupt), (4, 0, 0), "without verify no payload is read");
    file("kh").write_all_at(b"!", 20).unwrap();
    let first = &inspect(root.path(), false).unwrap().folders[0];
    assert_eq!((first.segments, first.damaged_segments, first.whole), (0, 1, 0));
}

#[test]
fn inspect_works_beside_a_store_and_changes_nothing() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    let mut rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    let found = inspect(root.path(), true).unwrap();
    assert_eq!((found.in_use, found.owner), (true, Some(std::process::id())));
    assert_eq!((found.folders[0].whole, found.folders[0].verified), (5, 5));
    assert_eq!(rig.prefetch(&[0, 1, 2, 3, 4], &chain(1, 5, 16)).error, None);
    let refused = purge(root.path(), None).unwrap_err();
    assert!(matches!(refused, DiskError::Locked { .. }), "{refused}");
    drop(rig);
    assert_eq!(Rig::open(config(root.path(), 1 << 20, 16, 4096)).recovered.records.len(), 5);
}

#[test]
fn folders_that_are_no_roots_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    fs::create_dir(folder.path().join(hex(1))).unwrap();
    let file = folder.path().join(hex(1)).join("segment-000000.kv");
    fs::write(&file, "x").unwrap();
    for root in [folder.path(), &missing] {
        assert!(inspect(root, false).is_err());
        assert!(purge(root, None).is_err());
    }
    let refused = purge(folder.path(), None).unwrap_err();
    assert!(matches!(refused, DiskError::NotMarked { .. }), "{refused}");
    assert!(file.exists() && !missing.exists());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn purge_deletes_a_root_whole() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("kv");
    filled(&root);
    let bytes = disk_usage(&root).unwrap();
    let purged = purge(&root, None).unwrap();
    assert_eq!((purged.bytes, purged.files, purged.left.len()), (bytes, 6, 0));
    assert_eq!(purged.fingerprints, [hex(1), hex(2)]);
    assert!(!root.exists());
}

#[test]
fn purge_leaves_what_is_not_strata_s_and_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("kv");
    filled(&root);
    let notes = [root.join("notes.txt"), root.join(hex(1)).join("notes.txt"), root.join("photos")];
    fs::write(&notes[0], "mine").unwrap();
    fs::write(&notes[1], "mine").unwrap();
    fs::create_dir(&notes[2]).unwrap();
    fs::write(notes[2].join("segment-000000.kv"), "mine").unwrap();
    // A link out of the root is not followed, and stays.
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("segment-000000.kv"), "mine").unwrap();
    let link = root.join(hex(3));
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    let mut left = purge(&root, None).unwrap().left;
    left.sort();
    let mut wanted = vec![notes[0].clone(), notes[1].clone(), notes[2].clone(), link.clone()];
    wanted.sort();
    assert_eq!(left, wanted);
    for file in
        [&notes[0], &notes[1], &notes[2].join("segment-000000.kv"), &elsewhere.join("segment-000000.kv")]
    {
        assert_eq!(fs::read_to_string(file).unwrap(), "mine");
    }
    assert!(!root.join(hex(2)).exists() && !root.join(MARKER_FILE).exists());
    assert_eq!(fs::read_dir(root.join(hex(1))).unwrap().count(), 1);
}

#[test]
fn purge_of_one_fingerprint_leaves_the_others() {
    let root = tempfile::tempdir().unwrap();
    filled(root.path());
    for named in ["", "ff", "0"] {
        let refused = purge(root.path(), Some(named)).unwrap_err();
        assert!(matches!(refused, DiskError::UnknownFingerprint { .. }), "{refused}");
    }
    let purged = purge(root.path(), Some(&hex(2)[..6])).unwrap();
    assert_eq!((purged.fingerprints, purged.left.len()), (vec![hex(2)], 0));
    assert!(purged.bytes > 3 * 4096);
    assert_eq!(Rig::open(config(root.path(), 1 << 20, 16, 4096)).recovered.records.len(), 5);
}
