// SPDX-License-Identifier: Apache-2.0
//! Which files may be guest RAM, and what can be guaranteed of them.
//!
//! A peer names its RAM by a descriptor of any kind. What is mapped decides
//! what the peer can do to us later:
//!
//! | file | memory can be taken from under us | taken |
//! |---|---|---|
//! | memfd that takes seals | no: it is sealed against shrinking | always |
//! | memfd that takes none | by truncation | always, marked *unsealed* |
//! | file on tmpfs | by truncation, or a full file system | by the operator's word |
//! | hugetlbfs file or memfd | by truncation, or no free huge page | by the operator's word |
//! | anything else | its file system may also make us wait (FUSE, NFS) | never |
//!
//! The first question must not wait for the peer either: `fstat` and `fstatfs`
//! of a FUSE file ask its server. `F_GET_SEALS` does not: the kernel answers it
//! from the inode, and only for shmem and hugetlbfs files. Whatever fails it is
//! not asked anything else.

use pagetide_addr::FileKey;
use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
};
use std::os::fd::BorrowedFd;

/// File system types, as `fstatfs` gives them.
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
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// What kind of file holds guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RamFileKind {
    /// A memfd of ordinary pages.
    Memfd,
    /// A file on a tmpfs that somebody has mounted.
    Tmpfs,
    /// A memfd of huge pages, or a file on hugetlbfs.
    Hugetlbfs,
}

/// Whether the file can be made shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sealed {
    /// It cannot, for good.
    Yes,
    /// Whoever has it open for writing can.
    No,
}

/// A file that may be guest RAM.
#[derive(Debug, Clone, Copy)]
pub struct RamFile {
    /// Its identity.
    pub key: FileKey,
    /// Its length; it does not get less if it is sealed.
    pub bytes: u64,
    /// What it is.
    pub kind: RamFileKind,
    /// Whether that can be relied on.
    pub sealed: Sealed,
    /// Size of the pages it is mapped by.
    pub page_bytes: u64,
}

impl RamFile {
    /// Looks at `file`, and seals it against shrinking if it takes a seal. Waits for nobody.
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
        // Sealed before its length is read: what is read then holds.
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
        // Made without MFD_ALLOW_SEALING, sealed against seals, or not open for writing.
        Err(Errno::PERM) => Ok(Sealed::No),
        Err(error) => Err(kernel("F_ADD_SEALS")(error)),
    }
}

/// The device number of all memfds: they live on a mount of the kernel's own, which has no size.
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
