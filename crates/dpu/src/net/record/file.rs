// SPDX-License-Identifier: Apache-2.0
//! The file of a record, in the state directory, mapped.
//!
//! Its name comes from the device's socket and the number of the queue, which is what stays the same
//! from one process to its successor. It is locked by its one user. The lock falls with the process:
//! engines of a dead one are waited for by their own locks ([`crate::lock`]) before a successor
//! serves anything.

use super::{Words, record_words};
use pagetide_sys::{
    mapping::{FilePart, MappingError, SharedMapping},
    memory_file::{FileError, GuestFile, LockWait, Locked},
};
use rustix::fs::{FileType, Mode, OFlags};
use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

/// Why a record's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordFileError {
    /// The kernel refused.
    #[error("{operation} of record file {path}: {source}")]
    Kernel {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// It cannot be used.
    #[error("record file {path}: {source}")]
    File { path: PathBuf, source: FileError },
    /// It cannot be mapped.
    #[error("record file {path}: {source}")]
    Map { path: PathBuf, source: MappingError },
    /// Something else has its name.
    #[error("{0} is not a file of this user's, so it is no record of receive buffers: remove it")]
    NotOurs(PathBuf),
    /// Another process has it.
    #[error("record file {0} is in use by another process")]
    InUse(PathBuf),
}

/// The file's words.
#[derive(Debug)]
pub(crate) struct RecordFile {
    mapping: SharedMapping,
    count: usize,
    path: PathBuf,
    /// Holds the lock.
    _file: GuestFile,
}

/// The record file of a queue.
fn path_of(state_dir: &Path, socket: &Path, queue: u16) -> PathBuf {
    // FNV-1a, 64 bits: short and the same in every version.
    let hash = (socket.as_os_str().as_bytes().iter()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    state_dir.join(format!("rx-{hash:016x}-{queue}.held"))
}

impl RecordFile {
    /// Opens the record file of a queue of the device at `socket`, or makes it, with room for a ring
    /// of `size`.
    pub fn open(
        state_dir: &Path,
        socket: &Path,
        queue: u16,
        size: u16,
    ) -> Result<Self, RecordFileError> {
        let path = path_of(state_dir, socket, queue);
        let failed = |operation| {
            let path = path.clone();
            move |source: rustix::io::Errno| RecordFileError::Kernel {
                operation,
                path,
                source: source.into(),
            }
        };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // Not to wait for the other side of a FIFO.
        let flags = flags | OFlags::NONBLOCK;
        let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed("open"))?;
        let there = rustix::fs::fstat(&fd).map_err(failed("stat"))?;
        let is_file = FileType::from_raw_mode(there.st_mode) == FileType::RegularFile;
        if !is_file || there.st_uid != rustix::process::geteuid().as_raw() {
            return Err(RecordFileError::NotOurs(path));
        }
        let file = GuestFile::from(fd);
        let unusable = |source| RecordFileError::File {
            path: path.clone(),
            source,
        };
        match file.lock_exclusive(LockWait::Try).map_err(unusable)? {
            Locked::Ours => {}
            Locked::HeldByAnother => return Err(RecordFileError::InUse(path)),
        }
        let count = record_words(size);
        let bytes = 8 * count as u64;
        // Memory for all of it, so that no store finds a full file system. It never gets shorter.
        file.allocate(0, bytes).map_err(unusable)?;
        let part = FilePart {
            offset: 0,
            bytes,
            page_bytes: pagetide_addr::PAGE_BYTES,
        };
        let mapping = SharedMapping::guarded(file.as_fd(), part);
        let mapping = mapping.map_err(|source| RecordFileError::Map {
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            mapping,
            count,
            path,
            _file: file,
        })
    }

    /// Removes the record files of a device with so many queues, except those that say of a ring that
    /// something of it is held.
    pub fn remove_all(state_dir: &Path, socket: &Path, queue_count: u16) {
        for queue in 0..queue_count {
            let path = path_of(state_dir, socket, queue);
            match remove_empty(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a record file is left behind");
                }
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True once the file has lost its memory.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

fn remove_empty(path: &Path) -> io::Result<()> {
    let mut first = [0; 8];
    File::open(path)?.read_exact(&mut first)?;
    match u64::from_le_bytes(first) {
        0 => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

impl Words for RecordFile {
    fn count(&self) -> usize {
        self.count
    }

    fn load(&self, at: usize) -> u64 {
        let words = self.mapping.atomic_u64s(0, self.count);
        let word = words.and_then(|words| words.get(at));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, at: usize, word: u64) {
        let words = self.mapping.atomic_u64s(0, self.count);
        match words.and_then(|words| words.get(at)) {
            Some(place) => place.store(word, Ordering::Release),
            None => debug_assert!(false, "the mapping has all words of the record"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::HeldRecord, super::Tie, *};

    const TIE: Tie = Tie {
        dev: 1,
        ino: 2,
        descriptors: 0,
        avail: 0,
        used: 0,
        queue: 4,
        size: 8,
    };

    #[test]
    fn record_outlives_its_user_and_has_one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let open = |size| RecordFile::open(dir.path(), Path::new("/run/net0"), 4, size);
        let mut record = HeldRecord::begin(open(8).unwrap(), &TIE, 5).unwrap();
        record.hold(3, 5, &[1; 16]);
        assert!(matches!(open(8), Err(RecordFileError::InUse(_))));
        let before: Vec<u64> = (0..record_words(8))
            .map(|at| record.words().load(at))
            .collect();
        drop(record);
        let words = open(8).unwrap();
        let after: Vec<u64> = (0..record_words(8)).map(|at| words.load(at)).collect();
        assert_eq!(before, after);
        assert!(before.iter().any(|word| *word != 0));
        // A larger ring has room in it.
        drop(words);
        assert_eq!(open(1024).unwrap().count(), record_words(1024));
    }

    #[test]
    fn other_devices_and_queues_have_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["/run/net0", "/run/net1", "/run/net"];
        let mut opened: Vec<RecordFile> = (names.iter())
            .flat_map(|name| (0..4).map(move |queue| (name, queue)))
            .map(|(name, queue)| RecordFile::open(dir.path(), Path::new(name), queue, 256).unwrap())
            .collect();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 12);
        let held = HeldRecord::begin(opened.remove(4), &TIE, 0).unwrap();
        drop(opened);
        let remove_all = || {
            for name in names {
                RecordFile::remove_all(dir.path(), Path::new(name), 6);
            }
            std::fs::read_dir(dir.path()).unwrap().count()
        };
        assert_eq!(remove_all(), 1, "what is held is not forgotten");
        held.end();
        assert_eq!(remove_all(), 0);
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(dir.path(), Path::new("/run/net0"), 0);
        let open = || RecordFile::open(dir.path(), Path::new("/run/net0"), 0, 8);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(matches!(open(), Err(RecordFileError::Kernel { .. })));
        std::fs::remove_file(&path).unwrap();
        let (dir_fd, mode) = (rustix::fs::CWD, Mode::RUSR | Mode::WUSR);
        rustix::fs::mknodat(dir_fd, &path, FileType::Fifo, mode, 0).unwrap();
        assert!(matches!(open(), Err(RecordFileError::NotOurs(_))));
    }

    #[test]
    fn file_that_is_cut_short_is_noticed_and_reads_as_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let words = RecordFile::open(dir.path(), Path::new("/run/net0"), 4, 8).unwrap();
        let record = HeldRecord::begin(words, &TIE, 5).unwrap();
        let path = path_of(dir.path(), Path::new("/run/net0"), 4);
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(record.words().load(0), 0);
        assert!(record.words().is_lost());
    }
}
