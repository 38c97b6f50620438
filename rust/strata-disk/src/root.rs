//! The root folder: private, marked as Strata's, and owned by one process at a time. The lock is the kernel's, so it
//! dies with its owner, however it dies. (A child that was forked without exec shares it.)

use crate::error::at;
use crate::format::FORMAT_VERSION;
use crate::DiskError;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use strata_types::Fingerprint;

/// The file that makes a folder a root.
pub const MARKER_FILE: &str = "strata-disk-root";
/// The file that its one writer locks.
pub const LOCK_FILE: &str = "lock";
/// The marker while it is being written: renamed when whole.
pub(crate) const MARKER_DRAFT: &str = "strata-disk-root.new";

/// A root that this process owns until the value is dropped.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    lock_file: File,
}

impl Root {
    /// Creates the root if needed and locks it. With `made_on`, it is created on that file system only.
    pub fn claim(path: &Path, made_on: Option<u64>) -> Result<Root, DiskError> {
        if made_on.is_some_and(|device| is_elsewhere(path, device)) {
            return Err(DiskError::Unmounted { root: path.to_owned() });
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at("create disk root", path))?;
        let marked = check_marker(path)?;
        make_private(path)?;
        if !marked {
            write_marker(path)?;
        }
        let lock = lock(path)?;
        Ok(Root { path: path.to_owned(), lock_file: lock })
    }

    /// The folder of one fingerprint, created if needed.
    pub fn folder(&self, fingerprint: &Fingerprint) -> Result<PathBuf, DiskError> {
        let folder = self.path.join(fingerprint.to_hex());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(at("create folder", &folder))?;
        make_private(&folder)?;
        Ok(folder)
    }

    /// Whether the folder that is found under the root's name is no longer the one that was claimed: deleted, replaced,
    /// or of another file system. Whatever would be written there is not protected by the lock.
    pub fn is_displaced(&self) -> bool {
        match (self.lock_file.metadata(), fs::metadata(self.path.join(LOCK_FILE))) {
            (Ok(held), Ok(named)) => (held.dev(), held.ino()) != (named.dev(), named.ino()),
            (_, Err(error)) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
            (Err(_), _) => false,
        }
    }

    /// Marks the root again if somebody deleted the marker: without it the next start would refuse the folder.
    pub fn keep_marked(&self) -> Result<(), DiskError> {
        match fs::symlink_metadata(self.marker()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => write_marker(&self.path),
            _ => Ok(()),
        }
    }

    /// The file system on which it lies.
    pub fn device(&self) -> Option<u64> {
        self.lock_file.metadata().ok().map(|lock| lock.dev())
    }

    /// The marker: a file that is sure to be there.
    pub fn marker(&self) -> PathBuf {
        self.path.join(MARKER_FILE)
    }
}

/// Whether there is no root at `path`, and one that is made there would lie on another file system than `device`.
fn is_elsewhere(path: &Path, device: u64) -> bool {
    let is_there = path.join(MARKER_FILE).exists();
    let nearest = path.ancestors().find_map(|folder| fs::metadata(folder).ok());
    !is_there && nearest.is_none_or(|folder| folder.dev() != device)
}

fn marker_text() -> String {
    format!("strata disk root, format {FORMAT_VERSION}\n")
}

/// Whether the folder is marked; refuses folders that are neither marked nor empty.
fn check_marker(root: &Path) -> Result<bool, DiskError> {
    let expected = marker_text();
    match fs::read(root.join(MARKER_FILE)) {
        Ok(found) if found == expected.as_bytes() => return Ok(true),
        Ok(found) => {
            let shown = String::from_utf8_lossy(&found[..found.len().min(80)]).trim_end().to_owned();
            let expected = expected.trim_end().to_owned();
            return Err(DiskError::Format { root: root.to_owned(), found: shown, expected });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at("read marker of disk root", root)(error)),
    }
    for entry in fs::read_dir(root).map_err(at("list disk root", root))? {
        let name = entry.map_err(at("list disk root", root))?.file_name();
        // A process that died between creating the folder and marking it, or that is marking it now.
        if name != MARKER_DRAFT && name != LOCK_FILE && name != MARKER_FILE {
            let found = name.to_string_lossy().into_owned();
            return Err(DiskError::NotARoot { root: root.to_owned(), found, marker: MARKER_FILE });
        }
    }
    Ok(false)
}

/// Refuses a folder that no Strata has marked.
pub(crate) fn check_marked(root: &Path) -> Result<(), DiskError> {
    fs::read_dir(root).map_err(at("open disk root", root))?;
    let is_marked = match check_marker(root) {
        Err(DiskError::NotARoot { .. }) => false,
        checked => checked?,
    };
    if !is_marked {
        return Err(DiskError::NotMarked { root: root.to_owned(), marker: MARKER_FILE });
    }
    Ok(())
}

/// Whether a process owns the root, and which, where the lock file says. For an instant the lock is shared: an owner
/// that starts at that instant is refused once.
pub(crate) fn owner_of(root: &Path) -> Result<(bool, Option<u32>), DiskError> {
    let path = root.join(LOCK_FILE);
    let mut file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((false, None)),
        opened => opened.map_err(at("open lock file", &path))?,
    };
    // SAFETY: flock takes a descriptor, which `file` keeps open, and no memory.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) } == 0 {
        return Ok((false, None));
    }
    let error = io::Error::last_os_error();
    if error.kind() != io::ErrorKind::WouldBlock {
        return Err(at("look at the lock", &path)(error));
    }
    Ok((true, process_in(&mut file)))
}

/// The process id that a lock file holds.
fn process_in(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok())
}

fn make_private(folder: &Path) -> Result<(), DiskError> {
    fs::set_permissions(folder, Permissions::from_mode(0o700)).map_err(at("make private (0700)", folder))
}

fn write_marker(root: &Path) -> Result<(), DiskError> {
    let draft = root.join(MARKER_DRAFT);
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        file.write_all(marker_text().as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, root.join(MARKER_FILE))?;
        File::open(root)?.sync_all()
    };
    write().map_err(at("mark disk root", root))
}

/// Takes the lock of a root, which dies with the file that is returned.
pub(crate) fn lock(root: &Path) -> Result<File, DiskError> {
    let path = root.join(LOCK_FILE);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut file = options.open(&path).map_err(at("open lock file", &path))?;
    // SAFETY: flock takes a descriptor, which `file` keeps open, and no memory.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(at("lock", &path)(error));
        }
        return Err(DiskError::Locked { root: root.to_owned(), pid: process_in(&mut file) });
    }
    // A purge that deletes the lock file between the two calls above leaves a lock on nothing.
    let held = file.metadata().map_err(at("look at the lock", &path))?;
    if !fs::metadata(&path).is_ok_and(|named| named.ino() == held.ino()) {
        return Err(DiskError::Locked { root: root.to_owned(), pid: None });
    }
    let mut sign = || -> io::Result<()> {
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
        // What was there is written over first: a full disk has no other block.
        let length = file.stream_position()?;
        file.set_len(length)
    };
    sign().map_err(at("write process id to", &path))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_marked_private_and_locked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/root");
        let root = Root::claim(&path, None).unwrap();
        let inner = root.folder(&Fingerprint([1; 32])).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&path), mode(&inner)), (0o700, 0o700));
        assert_eq!((mode(&path.join(MARKER_FILE)), mode(&path.join(LOCK_FILE))), (0o600, 0o600));
        let refused = Root::claim(&path, None).unwrap_err();
        assert!(matches!(refused, DiskError::Locked { pid: Some(pid), .. } if pid == std::process::id()));
        assert!(refused.to_string().contains(&format!("process {}", std::process::id())), "{refused}");
        drop(root);
        Root::claim(&path, None).unwrap();
    }

    #[test]
    fn folders_of_others_and_other_formats_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "x").unwrap();
        let refused = Root::claim(folder.path(), None).unwrap_err().to_string();
        assert!(refused.contains("thesis.tex") && refused.contains("--disk-path"), "{refused}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::write(folder.path().join(MARKER_FILE), "strata disk root, format 999\n").unwrap();
        assert!(matches!(Root::claim(folder.path(), None), Err(DiskError::Format { .. })));
    }

    #[test]
    fn a_process_that_died_while_marking_leaves_a_usable_root() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(MARKER_DRAFT), "strata").unwrap();
        Root::claim(folder.path(), None).unwrap();
        fs::write(folder.path().join("other"), "left alone").unwrap();
        Root::claim(folder.path(), None).unwrap();
    }
}
