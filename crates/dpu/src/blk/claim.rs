// SPDX-License-Identifier: Apache-2.0
//! Image locks, as QEMU uses them: which other programs may have the image open.
//!
//! # Idea
//! Two programs that write one image without knowing of each other destroy it. QEMU guards its
//! images by locks on single bytes (`block/file-posix.c`), and we take part: QEMU refuses an image
//! that we serve, and we refuse one that QEMU has open. Two of our devices exclude each other in
//! the same way. The locks belong to the inode, so path, hard link and symbolic link make no
//! difference.
//!
//! There is one bit for each operation on an image:
//!
//! | bit | operation | byte *done* | byte *forbidden to others* |
//! |---|---|---|---|
//! | 0 | consistent read | 100 | 200 |
//! | 1 | write | 101 | 201 |
//! | 2 | write of unchanged data | 102 | 202 |
//! | 3 | resize | 103 | 203 |
//!
//! All locks are *shared* ones; they announce something and exclude nothing. A program first locks
//! the bytes of its own operations and of those it forbids to others, then checks whether another
//! program has locked the other byte of the same bit. So of two that come at the same time at least
//! one sees the other; if both do, both give way.
//!
//! | device | operations | forbidden to others |
//! |---|---|---|
//! | usual | read, write | write, resize |
//! | read-only | read | write, resize |
//! | shared | read, write | resize |
//! | read-only, shared | read | resize |
//!
//! # Which descriptor
//! A lock lasts as long as its open file does. It is taken on the buffered descriptor, which is in
//! the file table of every engine's ring. So after a SIGKILL it stands until the last request of
//! the last ring is done, for every other program (see [`crate::lock`] for our successor).
//!
//! # Block devices
//! QEMU's locks are those of the device *node*; another node of the same disk has others. And what
//! the kernel itself uses (a mounted file system, swap, a volume manager) locks no byte. So a block
//! device is also opened with `O_EXCL`, which refuses both; if others may read at the same time,
//! only as a check. The exclusion lasts until the last descriptor of the open file is closed. So an
//! image that is given up is closed even if it is still referenced, for example by a connection
//! thread that a front end blocks forever.

use super::image::{Image, ImageError, ImageKind, Writes};
use pagetide_sys::byte_lock::{
    ByteLockError, ByteLocked, is_locked_by_another, lock_shared, unlock_all,
};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::PoisonError,
};

/// `RAW_LOCK_PERM_BASE` of QEMU: first byte of the operations done.
const DONE_BASE: u32 = 100;
/// `RAW_LOCK_SHARED_BASE` of QEMU: first byte of the operations forbidden to others.
const BARRED_BASE: u32 = 200;

/// `BLK_PERM_CONSISTENT_READ`
const READ: u8 = 1 << 0;
/// `BLK_PERM_WRITE`
const WRITE: u8 = 1 << 1;
/// `BLK_PERM_WRITE_UNCHANGED`
const WRITE_UNCHANGED: u8 = 1 << 2;
/// `BLK_PERM_RESIZE`
const RESIZE: u8 = 1 << 3;
/// `BLK_PERM_ALL`, with the name of each in errors.
const PERMISSIONS: [(u8, &str); 4] = [
    (READ, "read"),
    (WRITE, "write"),
    (WRITE_UNCHANGED, "write"),
    (RESIZE, "resize"),
];

/// Whether others may write the image at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// No other program may.
    #[default]
    Alone,
    /// They may, and the operator knows of them: for example, a cluster file system.
    Shared,
}

/// What a device does to its image, and what it forbids to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    done: u8,
    barred: u8,
}

impl Claim {
    pub fn new(writes: Writes, sharing: Sharing) -> Self {
        Self {
            done: match writes {
                Writes::Taken => READ | WRITE,
                Writes::Refused => READ,
            },
            barred: match sharing {
                Sharing::Alone => WRITE | RESIZE,
                Sharing::Shared => RESIZE,
            },
        }
    }

    /// True if two such claims on one image are compatible.
    pub fn agrees_with(self, other: Self) -> bool {
        self.done & other.barred == 0 && other.done & self.barred == 0
    }

    /// The bytes that announce the claim.
    fn locked(self) -> impl Iterator<Item = u32> {
        bytes(DONE_BASE, self.done).chain(bytes(BARRED_BASE, self.barred))
    }

    /// Why another program's locks forbid the claim; `None` if they do not.
    fn forbidden(self, file: BorrowedFd<'_>) -> Result<Option<String>, ByteLockError> {
        for (at, (bit, what)) in (0..).zip(PERMISSIONS) {
            if self.done & bit != 0 && is_locked_by_another(file, BARRED_BASE + at)? {
                return Ok(Some(format!("it lets nobody else {what} it")));
            }
            if self.barred & bit != 0 && is_locked_by_another(file, DONE_BASE + at)? {
                return Ok(Some(format!("it may {what} it")));
            }
        }
        Ok(None)
    }

    /// Takes the claim's locks; returns the reason if others have locked against it.
    fn take(self, file: BorrowedFd<'_>) -> Result<Option<String>, ByteLockError> {
        for byte in self.locked() {
            if lock_shared(file, byte)? == ByteLocked::HeldByAnother {
                return Ok(Some(format!("it has locked byte {byte}")));
            }
        }
        self.forbidden(file)
    }
}

/// Bytes from `base` on of the bits in `set`.
fn bytes(base: u32, set: u8) -> impl Iterator<Item = u32> {
    (0..8)
        .filter(move |bit| set >> bit & 1 != 0)
        .map(move |bit| base + bit)
}

impl Image {
    /// Claims the image for us, as far as `sharing` says. After an error nothing stays locked.
    ///
    /// # Errors
    /// [`ImageError::InUse`], [`ImageError::NoLocks`], [`ImageError::Busy`].
    pub fn claim(&mut self, path: &Path, sharing: Sharing) -> Result<(), ImageError> {
        let claim = Claim::new(self.writes, sharing);
        let exclusive = match (self.kind, sharing) {
            (ImageKind::BlockDevice, Sharing::Alone) => Some(self.open_exclusively(path)?),
            _ => None,
        };
        let files = self.files.get_mut();
        let files = files.unwrap_or_else(PoisonError::into_inner).as_mut();
        let outcome = match files {
            Some(files) => {
                match (exclusive, self.writes) {
                    (Some(exclusive), Writes::Taken) => files.buffered = exclusive,
                    // Other readers are allowed: this only checked that the kernel does not write.
                    (exclusive, _) => drop(exclusive),
                }
                claim.take(files.buffered.as_fd())
            }
            None => Ok(Some("it was given up".to_owned())),
        };
        if !matches!(outcome, Ok(None)) {
            self.unlock(path);
        }
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some(because)) => Err(ImageError::InUse {
                path: path.to_owned(),
                because,
            }),
            Err(source) if sharing == Sharing::Shared => {
                tracing::warn!(
                    image = %path.display(), %source,
                    "a shared image is served without locks: other programs cannot see that it is in use"
                );
                Ok(())
            }
            Err(source) => Err(ImageError::NoLocks {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Releases the image for others, even if it is still referenced. Call this when no I/O of ours
    /// is under way.
    pub fn give_up_claim(&self, path: &Path) {
        // Rings may keep the open file, and with it the locks, for a moment longer.
        self.unlock(path);
        let files = self.files.write();
        let closed = files.unwrap_or_else(PoisonError::into_inner).take();
        drop(closed);
    }

    fn unlock(&self, path: &Path) {
        let files = self.files();
        let Some(files) = files.as_ref() else {
            return;
        };
        if let Err(error) = unlock_all(files.buffered.as_fd()) {
            tracing::debug!(image = %path.display(), %error, "locks stay until it is closed");
        }
    }

    fn open_exclusively(&self, path: &Path) -> Result<OwnedFd, ImageError> {
        let access = match self.writes {
            Writes::Taken => OFlags::RDWR,
            Writes::Refused => OFlags::RDONLY,
        };
        // Not by its path, which may point elsewhere by now.
        let files = self.files();
        let known = files
            .as_ref()
            .map_or(-1, |files| files.buffered.as_raw_fd());
        let name = format!("/proc/self/fd/{known}");
        let flags = access | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(name, flags, Mode::empty()).map_err(|error| match error {
            Errno::BUSY => ImageError::Busy(path.to_owned()),
            error => ImageError::Kernel {
                path: path.to_owned(),
                operation: "open with O_EXCL",
                source: error.into(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::image::DirectIo;

    fn claims() -> Vec<(Writes, Sharing)> {
        let mut all = Vec::new();
        for writes in [Writes::Taken, Writes::Refused] {
            for sharing in [Sharing::Alone, Sharing::Shared] {
                all.push((writes, sharing));
            }
        }
        all
    }

    #[test]
    fn locked_bytes_are_those_of_qemu() {
        let locked = |writes, sharing| Claim::new(writes, sharing).locked().collect::<Vec<_>>();
        assert_eq!(locked(Writes::Taken, Sharing::Alone), [100, 101, 201, 203]);
        assert_eq!(locked(Writes::Refused, Sharing::Alone), [100, 201, 203]);
        assert_eq!(locked(Writes::Taken, Sharing::Shared), [100, 101, 203]);
        assert_eq!(locked(Writes::Refused, Sharing::Shared), [100, 203]);
    }

    #[test]
    fn claims_that_do_not_agree_exclude_each_other_on_the_file_and_others_do_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let open = |writes| Image::open(file.path(), writes, DirectIo::Auto).unwrap();
        for one in claims() {
            let mut first = open(one.0);
            first.claim(file.path(), one.1).unwrap();
            for other in claims() {
                let agree = Claim::new(one.0, one.1).agrees_with(Claim::new(other.0, other.1));
                let mut second = open(other.0);
                let claimed = second.claim(file.path(), other.1);
                assert_eq!(
                    claimed.is_ok(),
                    agree,
                    "{one:?} beside {other:?}: {claimed:?}"
                );
                // After a refusal, no lock may be left that would exclude others.
                second.give_up_claim(file.path());
            }
        }
    }

    #[test]
    fn writers_and_readers_agree_as_they_should() {
        let claim = |(writes, sharing)| Claim::new(writes, sharing);
        let (writer, reader) = (
            (Writes::Taken, Sharing::Alone),
            (Writes::Refused, Sharing::Alone),
        );
        let shared = (Writes::Taken, Sharing::Shared);
        let spectator = (Writes::Refused, Sharing::Shared);
        for (one, other, agree) in [
            (writer, writer, false),
            (writer, reader, false),
            (reader, reader, true),
            (shared, shared, true),
            (shared, writer, false),
            (shared, reader, false),
            (spectator, writer, true),
            (spectator, shared, true),
        ] {
            assert_eq!(
                claim(one).agrees_with(claim(other)),
                agree,
                "{one:?} {other:?}"
            );
            assert_eq!(
                claim(other).agrees_with(claim(one)),
                agree,
                "{other:?} {one:?}"
            );
        }
    }

    #[test]
    fn claim_given_up_lets_the_next_have_the_image_before_it_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let open = || Image::open(file.path(), Writes::Taken, DirectIo::Auto).unwrap();
        let (mut first, mut second) = (open(), open());
        first.claim(file.path(), Sharing::Alone).unwrap();
        let refused = second.claim(file.path(), Sharing::Alone);
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("in use by another"), "{said}");
        first.give_up_claim(file.path());
        second.claim(file.path(), Sharing::Alone).unwrap();
    }

    #[test]
    fn image_given_up_is_closed_though_somebody_knows_it_still() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let descriptors = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap();
            let target = |fd: std::io::Result<std::fs::DirEntry>| {
                fd.and_then(|fd| std::fs::read_link(fd.path()))
            };
            open.map(target)
                .filter(|target| target.as_ref().is_ok_and(|target| target == file.path()))
                .count()
        };
        let before = descriptors();
        let mut image = Image::open(file.path(), Writes::Taken, DirectIo::Auto).unwrap();
        image.claim(file.path(), Sharing::Alone).unwrap();
        assert!(descriptors() > before);
        image.give_up_claim(file.path());
        assert_eq!(descriptors(), before);
        assert_eq!(image.bytes_now(), 4096);
        assert!(image.claim(file.path(), Sharing::Alone).is_err());
    }

    #[test]
    fn claim_stands_as_long_as_a_ring_has_the_image_in_its_table() {
        use crate::ring::{FileSlot, IoRing};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, [0; 4096]).unwrap();
        let open = || Image::open(&path, Writes::Taken, DirectIo::Auto).unwrap();
        let (mut first, mut second) = (open(), open());
        first.claim(&path, Sharing::Alone).unwrap();
        let lock = crate::lock::take(dir.path(), 0).unwrap();
        let mut ring: IoRing<()> = IoRing::new(8, lock).unwrap();
        if let Some(files) = first.files().as_ref() {
            ring.set_file(FileSlot(1), files.buffered.as_fd()).unwrap();
        }
        // Like a killed process: its descriptors are closed, the ring is still there.
        drop(first);
        assert!(second.claim(&path, Sharing::Alone).is_err());
        drop(ring);
        crate::lock::wait_for_dead_engines(dir.path(), None, |_| {}).unwrap();
        // The kernel closes the files of a table one after another.
        let began = std::time::Instant::now();
        while second.claim(&path, Sharing::Alone).is_err() {
            assert!(began.elapsed().as_secs() < 10, "the claim does not fall");
            std::thread::yield_now();
        }
    }
}
