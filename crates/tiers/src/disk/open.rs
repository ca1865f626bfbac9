// SPDX-License-Identifier: Apache-2.0
//! Opening a disk tier, and the reasons to refuse it.
//!
//! ```text
//!   │ header, 4 KiB │ probes, 4 KiB │ …                │ segment 1 │ segment 2 │ …
//!   └──────────── segment 0, given to nobody ──────────┘
//! ```
//! The tier writes over whatever it finds, so it takes only what is its own: a file that it creates, one that
//! begins with its header, or a device whose first [`HEAD_BYTES`] are zeros. Beyond that the header has an id,
//! so that a VM whose pages are on another disk is not recovered with this one. It guards against mistakes
//! only: what was sealed tells itself.
//!
//! A daemon that begins gives back what none of its own VMs has. So the header names its owner: the state
//! directory with its pools, and the boot of the host, which pools do not outlive. Another daemon is refused
//! while pools there have pages on the disk. While its owner runs, it has the lock of the open file; the header
//! guards the disk while it does not run: between a death and the restart, and while one program hands over to
//! the next. A daemon that ends with no page there gives the disk up.
//!
//! The path is looked at without following it and then opened by what was found there, so nobody can put
//! something else in its place between the look and the opening.

use super::identity::is_swapped_to;
use super::io::{Discard, Ground};
use crate::DiskId;
use crate::bitmap::BlockSize;
use crate::extent::{SEGMENT_BYTES, SegmentNo};
use pagetide_sys::file_ring::Buffer;
use pagetide_sys::memory_file::{GuestFile, Locked};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a device must have at its start if it has no header: the places where partition tables and file
/// systems have theirs.
const HEAD_BYTES: usize = 128 << 10;
const HEADER_BYTES: usize = 4096;
const MAGIC: &[u8; 24] = b"Pagetide disk tier, v1\n\0";
/// Behind it: the id of this disk, by which a VM's pool knows it again.
const ID: Range<usize> = MAGIC.len()..MAGIC.len() + 16;
/// During which boot of the host its owner has used it; 0: it has no owner.
const BOOT: Range<usize> = ID.end..ID.end + 16;
/// The owner's state directory: its length, and its path.
const HOME_LEN: Range<usize> = BOOT.end..BOOT.end + 2;
const HOME_AT: usize = HOME_LEN.end;
/// The least that makes a tier: segment 0 and one more.
const SEGMENTS_MIN: u64 = 2;
/// Space of a file system that is left to others ...
const LEFT_FREE_BYTES_MAX: u64 = 1 << 30;
/// ... or, if that is less, one part in so many.
const LEFT_FREE_PART: u64 = 20;
/// How often it is looked whether a device is free.
const POLL: Duration = Duration::from_millis(2);
const TMPFS_MAGIC: i128 = 0x0102_1994;
const RAMFS_MAGIC: i128 = 0x8584_58f6;

/// Why a disk cannot be a tier.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The kernel refused something.
    #[error("disk tier {path}: {operation} failed: {source}")]
    Kernel {
        /// The tier.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It is not a file or block device.
    #[error(
        "disk tier {0}: it is neither a file nor a block device; name the file itself, not a link to it"
    )]
    NotADisk(PathBuf),
    /// Others can change it.
    #[error(
        "disk tier {0}: it belongs to another user, or others may write to it (chown, chmod 600)"
    )]
    OthersCanWrite(PathBuf),
    /// It is memory.
    #[error("disk tier {0}: it is in memory itself ({1}), where stored pages would gain nothing")]
    InMemory(PathBuf, &'static str),
    /// The kernel swaps to it.
    #[error("disk tier {0}: the kernel swaps to it (/proc/swaps)")]
    IsSwap(PathBuf),
    /// There is something else in it.
    #[error(
        "disk tier {0}: there is something else in it, which would be lost; wipe it first (wipefs, blkdiscard), or name another"
    )]
    NotOurs(PathBuf),
    /// Direct I/O does not work.
    #[error("disk tier {0}: its file system has no direct I/O in blocks of up to 4,096 bytes")]
    NoDirectIo(PathBuf),
    /// No space.
    #[error(
        "disk tier {path}: its file system has {free_bytes} bytes free, of which {left_bytes} are left to others"
    )]
    FileSystemFull {
        /// The tier.
        path: PathBuf,
        /// Free bytes.
        free_bytes: u64,
        /// How many of them a tier never takes.
        left_bytes: u64,
    },
    /// Too small.
    #[error("disk tier {path}: {bytes} bytes are too few; a tier has at least 32 MiB")]
    TooSmall {
        /// The tier.
        path: PathBuf,
        /// What it would have.
        bytes: u64,
    },
    /// VMs of another daemon have pages there, or may have.
    #[error(
        "disk tier {path}: VMs of the daemon with the state directory {} have pages there, or it cannot be seen whether \
         they have; give each daemon a disk of its own, or, if those VMs are gone, wipe this one first",
        state_dir.display()
    )]
    OfAnotherDaemon {
        /// The tier.
        path: PathBuf,
        /// Where the other daemon's pools are.
        state_dir: PathBuf,
    },
    /// The pages that it should have are on another one.
    #[error("disk tier {0}: it is another disk than the one on which VMs have pages")]
    AnotherDisk(PathBuf),
    /// It has a name, and the pool that may name it cannot be read.
    #[error(
        "disk tier {0}: a VM's pool cannot be opened, and it may have its pages there; start again once it can"
    )]
    OfSomebody(PathBuf),
    /// It does not lie there any more.
    #[error("disk tier {0}: what lies there now is not the file or device that is in use")]
    Replaced(PathBuf),
    /// It has become shorter.
    #[error("disk tier {0}: it is shorter than it was, and VMs have pages beyond its end")]
    Shorter(PathBuf),
    /// Somebody else has it.
    #[error(
        "disk tier {0}: it is in use by another program, or the I/O of a killed daemon is still under way"
    )]
    Held(PathBuf),
}

/// A daemon, as others on this host are to know it.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Its state directory, where the pools are whose pages are on the disk.
    pub state_dir: PathBuf,
    /// Which boot of this host it is: no pool outlives it.
    pub boot: u128,
    /// True if pools in another daemon's state directory have pages on this disk, or may have.
    pub has_pages: fn(&Path, DiskId) -> bool,
}

/// Where a tier is, and how much of it may be used.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file or device. A file that does not exist is created.
    pub path: PathBuf,
    /// Most that is given out; `None` for what there is.
    pub limit_bytes: Option<u64>,
    /// Whose it is.
    pub owner: Owner,
}

/// Which disk it is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// Whichever it is.
    Any,
    /// This one, on which VMs have pages.
    Known(DiskId),
    /// Whichever it is, from now on under this name: nobody has pages there.
    Named(DiskId),
    /// The same, but it must be there and have no name yet: it is not known who has pages where.
    Unnamed(DiskId),
}

/// A file or device that may be a tier.
#[derive(Debug)]
pub(super) struct OpenDisk {
    pub file: OwnedFd,
    pub block: BlockSize,
    /// Segments that it has, of a predecessor with a higher limit too.
    pub segments: u32,
    /// The first one that is not given out.
    pub limit: SegmentNo,
    pub discard: Discard,
    pub id: DiskId,
}

/// Reports what failed at a path.
#[derive(Clone, Copy)]
struct At<'a>(&'a Path);

impl At<'_> {
    fn failed<E: Into<io::Error>>(self, operation: &'static str) -> impl FnOnce(E) -> DiskError {
        let path = self.0.to_owned();
        move |source| DiskError::Kernel {
            path,
            operation,
            source: source.into(),
        }
    }
}

/// Looks at a tier that another program has open, as [`open`] would: what it is, whose, and its header.
///
/// # Errors
/// It would not be opened, however long its lock is waited for.
pub(super) fn examine(source: &Source, id: Option<DiskId>) -> Result<(), DiskError> {
    let path = &*source.path;
    let at = At(path);
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, flags, Mode::empty()).map_err(at.failed("open"))?;
    let stat = rustix::fs::fstat(&found).map_err(at.failed("fstat"))?;
    let discard = look_at(path, &stat)?;
    let link = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    match discard {
        Discard::Punch => refuse_memory(path, &link)?,
        Discard::Keep => refuse_memory_device(path, &stat)?,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(&link, flags, Mode::empty());
    let file = file.map_err(|error| unopened(path, error))?;
    segments(path, &file, discard, source.limit_bytes)?;
    let wanted = id.map_or(Wanted::Any, Wanted::Known);
    look_into(source, wanted, &file, discard).map(drop)
}

/// Opens and locks a tier; waits so long for another to let go of it.
pub(super) fn open(
    source: &Source,
    wanted: Wanted,
    lock_wait: Duration,
) -> Result<OpenDisk, DiskError> {
    let path = &*source.path;
    let at = At(path);
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let found = match rustix::fs::open(
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(found) => found,
        Err(Errno::NOENT) if matches!(wanted, Wanted::Any | Wanted::Named(_)) => {
            let create = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            refuse_memory(path, path.parent().unwrap_or(Path::new(".")))?;
            let made = rustix::fs::open(path, create, Mode::RUSR | Mode::WUSR);
            drop(made.map_err(|error| unopened(path, error))?);
            rustix::fs::open(
                path,
                OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .map_err(at.failed("open"))?
        }
        Err(error) => return Err(at.failed("open")(error)),
    };
    let stat = rustix::fs::fstat(&found).map_err(at.failed("fstat"))?;
    let discard = look_at(path, &stat)?;
    let link = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    let flags = match discard {
        Discard::Punch => {
            refuse_memory(path, &link)?;
            flags
        }
        // For a block device: nobody has it mounted or open in the same way.
        Discard::Keep => {
            refuse_memory_device(path, &stat)?;
            flags | OFlags::EXCL
        }
    };
    let end = Instant::now() + lock_wait;
    let file = loop {
        match rustix::fs::open(&link, flags, Mode::empty()) {
            Ok(file) => break file,
            // A device whose killed user still has I/O under way.
            Err(Errno::BUSY) if Instant::now() < end => std::thread::sleep(POLL),
            Err(error) => return Err(unopened(path, error)),
        }
    };
    drop(found);
    lock(path, &file, lock_wait)?;
    let (segments, limit) = segments(path, &file, discard, source.limit_bytes)?;
    let mut disk = OpenDisk {
        block: BlockSize::Bytes4096,
        segments,
        limit,
        file,
        discard,
        id: DiskId(0),
    };
    disk.id = take_possession(source, wanted, &disk)?;
    disk.block = block_size(path, &disk.file)?;
    Ok(disk)
}

fn unopened(path: &Path, error: Errno) -> DiskError {
    match error {
        Errno::INVAL => DiskError::NoDirectIo(path.to_owned()),
        Errno::BUSY => DiskError::Held(path.to_owned()),
        error => At(path).failed("open")(error),
    }
}

fn look_at(path: &Path, stat: &Stat) -> Result<Discard, DiskError> {
    let (discard, foreign_write) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (Discard::Punch, Mode::WGRP | Mode::WOTH),
        // The group of a device is the system's own.
        FileType::BlockDevice => (Discard::Keep, Mode::WOTH),
        _ => return Err(DiskError::NotADisk(path.to_owned())),
    };
    let owner = rustix::fs::Uid::from_raw(stat.st_uid);
    let is_ours = owner == rustix::process::geteuid() || owner.is_root();
    if !is_ours || Mode::from_raw_mode(stat.st_mode).intersects(foreign_write) {
        return Err(DiskError::OthersCanWrite(path.to_owned()));
    }
    if is_swapped_to(stat) {
        return Err(DiskError::IsSwap(path.to_owned()));
    }
    Ok(discard)
}

fn refuse_memory(path: &Path, on: &Path) -> Result<(), DiskError> {
    let on = if on.as_os_str().is_empty() {
        Path::new(".")
    } else {
        on
    };
    let stat = rustix::fs::statfs(on).map_err(At(path).failed("statfs"))?;
    match i128::from(stat.f_type) {
        TMPFS_MAGIC => Err(DiskError::InMemory(path.to_owned(), "tmpfs")),
        RAMFS_MAGIC => Err(DiskError::InMemory(path.to_owned(), "ramfs")),
        _ => Ok(()),
    }
}

/// RAM disks and zram are memory as well.
fn refuse_memory_device(path: &Path, stat: &Stat) -> Result<(), DiskError> {
    let (major, minor) = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    let link = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}"));
    let name = match &link {
        Ok(link) => link.file_name().unwrap_or_default().to_string_lossy(),
        Err(_) => return Ok(()),
    };
    match () {
        () if name.starts_with("zram") => Err(DiskError::InMemory(path.to_owned(), "zram")),
        () if name.starts_with("ram") => Err(DiskError::InMemory(path.to_owned(), "a RAM disk")),
        () => Ok(()),
    }
}

/// Locks the open file. The ring keeps it open, and so locked, until its last I/O is done.
fn lock(path: &Path, file: &OwnedFd, wait: Duration) -> Result<(), DiskError> {
    let copy = file.try_clone().map_err(At(path).failed("dup"))?;
    match GuestFile::from(copy).lock_exclusive_within(wait) {
        Ok(Locked::Ours) => Ok(()),
        Ok(Locked::HeldByAnother) => Err(DiskError::Held(path.to_owned())),
        Err(error) => Err(At(path).failed("flock")(io::Error::other(error))),
    }
}

/// How many segments there are, and the first that is not given out.
fn segments(
    path: &Path,
    file: &OwnedFd,
    discard: Discard,
    limit_bytes: Option<u64>,
) -> Result<(u32, SegmentNo), DiskError> {
    let size = rustix::fs::seek(file, SeekFrom::End(0)).map_err(At(path).failed("lseek"))?;
    let (bytes, given_bytes) = match (discard, limit_bytes) {
        (Discard::Keep, limit_bytes) => (size, limit_bytes.unwrap_or(u64::MAX).min(size)),
        (Discard::Punch, Some(limit_bytes)) => (limit_bytes.max(size), limit_bytes),
        // As much as its file system has.
        (Discard::Punch, None) => {
            let stat = rustix::fs::fstatvfs(file).map_err(At(path).failed("fstatfs"))?;
            let all = stat.f_blocks.saturating_mul(stat.f_frsize);
            (all.max(size), all)
        }
    };
    if given_bytes / SEGMENT_BYTES < SEGMENTS_MIN {
        return Err(DiskError::TooSmall {
            path: path.to_owned(),
            bytes: given_bytes,
        });
    }
    let whole = |bytes: u64| u32::try_from(bytes / SEGMENT_BYTES).unwrap_or(u32::MAX);
    Ok((whole(bytes), SegmentNo(whole(given_bytes))))
}

/// What stands at the beginning of a disk that may be a tier.
struct Head {
    is_ours: bool,
    id: Option<DiskId>,
}

/// Sees that nothing else is there.
fn look_into(
    source: &Source,
    wanted: Wanted,
    file: &OwnedFd,
    discard: Discard,
) -> Result<Head, DiskError> {
    let path = &*source.path;
    let mut head = Buffer::zeroed(HEAD_BYTES);
    let read = read_head(file, &mut head).map_err(|error| match error {
        Errno::INVAL => DiskError::NoDirectIo(path.to_owned()),
        error => At(path).failed("read")(error),
    })?;
    let is_ours = head.starts_with(MAGIC);
    let is_blank = head.iter().all(|byte| *byte == 0);
    // An empty file is blank. One of zeros might be an image of somebody's.
    if !is_ours && !(is_blank && (read == 0 || discard == Discard::Keep)) {
        return Err(DiskError::NotOurs(path.to_owned()));
    }
    let found = found_id(&head).filter(|_| is_ours);
    let refusal: Option<fn(PathBuf) -> DiskError> = match wanted {
        Wanted::Known(id) if found != Some(id) => Some(DiskError::AnotherDisk),
        Wanted::Unnamed(id) if found.is_some_and(|it| it != id) => Some(DiskError::OfSomebody),
        Wanted::Any | Wanted::Known(_) | Wanted::Named(_) | Wanted::Unnamed(_) => None,
    };
    refusal.map_or(Ok(()), |refusal| Err(refusal(path.to_owned())))?;
    if let (Some(id), Some(state_dir)) = (found, other_home(&head, &source.owner))
        && (source.owner.has_pages)(&state_dir, id)
    {
        let path = path.to_owned();
        return Err(DiskError::OfAnotherDaemon { path, state_dir });
    }
    Ok(Head { is_ours, id: found })
}

/// Sees that nothing else is there, and writes the header.
fn take_possession(source: &Source, wanted: Wanted, disk: &OpenDisk) -> Result<DiskId, DiskError> {
    let path = &*source.path;
    let Head { is_ours, id: found } = look_into(source, wanted, &disk.file, disk.discard)?;
    if disk.discard == Discard::Punch {
        // One that has pages is needed however full the disk is.
        let (free_bytes, left_bytes) = space(&disk.file).map_err(At(path).failed("fstatfs"))?;
        if !is_ours && free_bytes < left_bytes.saturating_add(SEGMENT_BYTES) {
            return Err(DiskError::FileSystemFull {
                path: path.to_owned(),
                free_bytes,
                left_bytes,
            });
        }
        rustix::fs::fallocate(&disk.file, FallocateFlags::empty(), 0, HEAD_BYTES as u64)
            .map_err(At(path).failed("fallocate"))?;
    }
    let id = match (wanted, found) {
        (Wanted::Known(id) | Wanted::Named(id) | Wanted::Unnamed(id), _)
        | (Wanted::Any, Some(id)) => id,
        (Wanted::Any, None) => {
            DiskId::draw().map_err(|why| At(path).failed("getrandom")(io::Error::other(why)))?
        }
    };
    match rustix::io::pwrite(&disk.file, &header_of(id, &source.owner), 0) {
        Ok(HEADER_BYTES) => Ok(id),
        Ok(_) => Err(At(path).failed("write")(Errno::IO)),
        Err(Errno::INVAL) => Err(DiskError::NoDirectIo(path.to_owned())),
        Err(error) => Err(At(path).failed("write")(error)),
    }
}

fn found_id(head: &[u8]) -> Option<DiskId> {
    let id = head.get(ID).and_then(|id| id.first_chunk());
    let id = id.map(|id| DiskId(u128::from_le_bytes(*id)));
    id.filter(|id| id.0 != 0)
}

/// The state directory of another daemon, of this boot, whose the disk is. Pools of another boot do not exist.
fn other_home(head: &[u8], owner: &Owner) -> Option<PathBuf> {
    let boot = head.get(BOOT).and_then(|boot| boot.first_chunk());
    let boot = boot.map(|boot| u128::from_le_bytes(*boot));
    if boot.is_none_or(|boot| boot == 0 || boot != owner.boot) {
        return None;
    }
    let len = head.get(HOME_LEN).and_then(|len| len.first_chunk());
    let len = len.map_or(0, |len| usize::from(u16::from_le_bytes(*len)));
    let home = head
        .get(HOME_AT..HEADER_BYTES)
        .and_then(|at| at.get(..len))?;
    let home = PathBuf::from(OsString::from_vec(home.to_vec()));
    (home != owner.state_dir).then_some(home)
}

fn header_of(id: DiskId, owner: &Owner) -> Buffer {
    let mut header = Buffer::zeroed(HEADER_BYTES);
    header[..MAGIC.len()].copy_from_slice(MAGIC);
    header[ID].copy_from_slice(&id.0.to_le_bytes());
    let home = owner.state_dir.as_os_str().as_bytes();
    // One that is longer cannot have a socket in it, nor be a state directory.
    if let (Some(at), Ok(len)) = (
        header[HOME_AT..].get_mut(..home.len()),
        u16::try_from(home.len()),
    ) {
        at.copy_from_slice(home);
        header[HOME_LEN].copy_from_slice(&len.to_le_bytes());
        header[BOOT].copy_from_slice(&owner.boot.to_le_bytes());
    }
    header
}

/// The disk has no owner any more: no VM has pages there.
pub(super) fn disown(file: &OwnedFd) -> io::Result<()> {
    let mut header = Buffer::zeroed(HEADER_BYTES);
    let read = rustix::io::pread(file, &mut header[..], 0)?;
    if read < HEADER_BYTES || !header.starts_with(MAGIC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    header[BOOT].fill(0);
    match rustix::io::pwrite(file, &header, 0)? {
        HEADER_BYTES => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn read_head(file: &OwnedFd, head: &mut [u8]) -> Result<usize, Errno> {
    let mut done = 0;
    while done < head.len() {
        match rustix::io::pread(file, &mut head[done..], done as u64) {
            Ok(0) => break,
            // Direct I/O goes on at a block only; a file may end anywhere.
            Ok(more) if more % HEADER_BYTES != 0 => return Ok(done + more),
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// The blocks of direct I/O, as the kernel names them; 4,096 bytes if it does not.
fn block_size(path: &Path, file: &OwnedFd) -> Result<BlockSize, DiskError> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .map_err(At(path).failed("statx"))?;
    let is_known = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    match stat.stx_dio_offset_align {
        _ if !is_known => Ok(BlockSize::Bytes4096),
        1..=512 => Ok(BlockSize::Bytes512),
        513..=4096 => Ok(BlockSize::Bytes4096),
        _ => Err(DiskError::NoDirectIo(path.to_owned())),
    }
}

/// Free bytes of the file system, and how many of them are left to others.
fn space(file: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstatvfs(file)?;
    let size = stat.f_blocks.saturating_mul(stat.f_frsize);
    let free_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    Ok((free_bytes, LEFT_FREE_BYTES_MAX.min(size / LEFT_FREE_PART)))
}

impl OpenDisk {
    /// Gives bytes that nobody needs back to the file system, if there is one and it has holes.
    pub fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if self.discard == Discard::Keep {
            return Ok(());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, how, offset, bytes) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => Ok(result?),
        }
    }
}

impl Ground for OpenDisk {
    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if self.discard == Discard::Keep {
            return Ok(());
        }
        Ok(rustix::fs::fallocate(
            &self.file,
            FallocateFlags::empty(),
            offset,
            bytes,
        )?)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        if self.discard == Discard::Keep {
            return Ok(None);
        }
        let (free_bytes, left_bytes) = space(&self.file)?;
        Ok(Some(free_bytes.saturating_sub(left_bytes)))
    }
}
