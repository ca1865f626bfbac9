// SPDX-License-Identifier: Apache-2.0
//! Which files may be guest RAM, and what can be guaranteed about them.
//!
//! A peer passes its RAM as a descriptor of any kind. The kind of file decides what the peer can do
//! to us later:
//!
//! | file | memory can be removed while we use it | accepted |
//! |---|---|---|
//! | memfd that accepts seals | no: it is sealed against shrinking | always |
//! | memfd that accepts none | by truncation | always, marked *unsealed* |
//! | file on tmpfs | by truncation, or a full file system | if the operator allows it |
//! | hugetlbfs file or memfd | by truncation, or no free huge page | if the operator allows it |
//! | anything else | its file system may also block us (FUSE, NFS) | never |
//!
//! The first query must not wait for the peer either: `fstat` and `fstatfs` of a FUSE file query
//! its server. `F_GET_SEALS` does not: the kernel answers it from the inode, and only for shmem and
//! hugetlbfs files. A file that fails it is not queried further.

use pagetide_addr::FileKey;
use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
};
use std::os::fd::BorrowedFd;

/// File system types, as reported by `fstatfs`.
const TMPFS_MAGIC: i128 = 0x0102_1994;
const HUGETLBFS_MAGIC: i128 = 0x9584_58f6;

/// Why a file cannot be guest RAM.
#[derive(Debug, thiserror::Error)]
pub enum RamFileError {
    /// It is not in memory, or not a regular file.
    #[error(
        "the file is not a memfd, nor on tmpfs or hugetlbfs: guest RAM must be a memfd (QEMU: memory-backend-memfd,share=on)"
    )]
    NotInMemory,
    /// The kernel refused.
    #[error("{operation} of the RAM file failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// The kind of file that holds guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RamFileKind {
    /// A memfd of ordinary pages.
    Memfd,
    /// A file on a mounted tmpfs.
    Tmpfs,
    /// A memfd of huge pages, or a file on hugetlbfs.
    Hugetlbfs,
}

/// Whether the file can shrink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// It cannot, permanently.
    Yes,
    /// Any process that has it open for writing can shrink it.
    No,
}

/// A file that may be guest RAM.
#[derive(Debug, Clone, Copy)]
pub struct RamFile {
    /// Its identity.
    pub key: FileKey,
    /// Its length; it cannot decrease if the file is sealed.
    pub bytes: u64,
    /// Its kind.
    pub kind: RamFileKind,
    /// Whether the length can be relied on.
    pub sealed: Sealed,
    /// Page size of its mappings.
    pub page_bytes: u64,
}

impl RamFile {
    /// Examines `file`, and seals it against shrinking if it accepts a seal. Does not block.
    ///
    /// # Errors
    /// [`RamFileError`].
    pub fn of(file: BorrowedFd<'_>) -> Result<Self, RamFileError> {
        let seals = match rustix::fs::fcntl_get_seals(file) {
            Ok(seals) => seals,
            // EBADF: opened with O_PATH.
            Err(Errno::INVAL | Errno::BADF) => return Err(RamFileError::NotInMemory),
            Err(error) => return Err(kernel("F_GET_SEALS")(error)),
        };
        let sealed = seal(file, seals)?;
        let file_system = rustix::fs::fstatfs(file).map_err(kernel("fstatfs"))?;
        // Sealed before its length is read, so the length stays valid.
        let stat = rustix::fs::fstat(file).map_err(kernel("fstat"))?;
        let kind = match i128::from(file_system.f_type) {
            HUGETLBFS_MAGIC => RamFileKind::Hugetlbfs,
            TMPFS_MAGIC if stat.st_dev == memfd_device()? => RamFileKind::Memfd,
            TMPFS_MAGIC => RamFileKind::Tmpfs,
            _ => return Err(RamFileError::NotInMemory),
        };
        let page_bytes = match kind {
            RamFileKind::Hugetlbfs => u64::try_from(file_system.f_bsize).unwrap_or(0),
            RamFileKind::Memfd | RamFileKind::Tmpfs => pagetide_addr::PAGE_BYTES,
        };
        Ok(Self {
            key: FileKey {
                dev: stat.st_dev,
                ino: stat.st_ino,
            },
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            kind,
            sealed,
            page_bytes,
        })
    }
}

fn seal(file: BorrowedFd<'_>, seals: SealFlags) -> Result<Sealed, RamFileError> {
    if seals.contains(SealFlags::SHRINK) {
        return Ok(Sealed::Yes);
    }
    match rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK) {
        Ok(()) => Ok(Sealed::Yes),
        // Created without MFD_ALLOW_SEALING, sealed against seals, or not open for writing.
        Err(Errno::PERM) => Ok(Sealed::No),
        Err(error) => Err(kernel("F_ADD_SEALS")(error)),
    }
}

/// The device number of all memfds: they are on a kernel-internal mount, which has no size limit.
fn memfd_device() -> Result<u64, RamFileError> {
    static DEVICE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(*device);
    }
    let ours = rustix::fs::memfd_create("pagetide-probe", MemfdFlags::CLOEXEC)
        .map_err(kernel("memfd_create"))?;
    let stat = rustix::fs::fstat(&ours).map_err(kernel("fstat"))?;
    Ok(*DEVICE.get_or_init(|| stat.st_dev))
}

fn kernel(operation: &'static str) -> impl Fn(Errno) -> RamFileError {
    move |source| RamFileError::Kernel {
        operation,
        source: source.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, OwnedFd};

    fn memfd(flags: MemfdFlags) -> OwnedFd {
        let file = rustix::fs::memfd_create("ram", flags).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        file
    }

    #[test]
    fn memfd_that_takes_seals_cannot_be_shrunk_afterwards() {
        let file = memfd(MemfdFlags::ALLOW_SEALING);
        let ram = RamFile::of(file.as_fd()).unwrap();
        assert_eq!((ram.kind, ram.sealed), (RamFileKind::Memfd, Sealed::Yes));
        assert_eq!(ram.bytes, 8192);
        assert_eq!(rustix::fs::ftruncate(&file, 4096), Err(Errno::PERM));
        rustix::fs::ftruncate(&file, 16384).unwrap();
        assert_eq!(RamFile::of(file.as_fd()).unwrap().bytes, 16384);
    }

    #[test]
    fn memfd_that_takes_no_seal_is_told() {
        let file = memfd(MemfdFlags::empty());
        let ram = RamFile::of(file.as_fd()).unwrap();
        assert_eq!((ram.kind, ram.sealed), (RamFileKind::Memfd, Sealed::No));
        let file = memfd(MemfdFlags::ALLOW_SEALING);
        rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL).unwrap();
        assert_eq!(RamFile::of(file.as_fd()).unwrap().sealed, Sealed::No);
    }

    #[test]
    fn file_on_a_mounted_tmpfs_is_no_memfd() {
        let Ok(file) = tempfile::tempfile_in("/dev/shm") else {
            println!("SKIPPED: no /dev/shm");
            return;
        };
        file.set_len(4096).unwrap();
        assert_eq!(RamFile::of(file.as_fd()).unwrap().kind, RamFileKind::Tmpfs);
    }

    #[test]
    fn huge_pages_are_told_whether_or_not_there_are_any() {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        match rustix::fs::memfd_create("huge", flags) {
            Ok(file) => {
                let ram = RamFile::of(file.as_fd()).unwrap();
                assert_eq!(ram.kind, RamFileKind::Hugetlbfs);
                assert_eq!(ram.page_bytes, 2 << 20);
            }
            Err(error) => println!("SKIPPED: no memfd of huge pages: {error}"),
        }
    }

    #[test]
    fn everything_else_is_refused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let here = std::fs::File::open("/proc/self/exe").unwrap();
        let path = rustix::fs::open(
            "/dev/shm",
            rustix::fs::OFlags::PATH,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        for file in [reader.as_fd(), zero.as_fd(), here.as_fd(), path.as_fd()] {
            let refused = RamFile::of(file);
            assert!(
                matches!(refused, Err(RamFileError::NotInMemory)),
                "{refused:?}"
            );
        }
    }
}
