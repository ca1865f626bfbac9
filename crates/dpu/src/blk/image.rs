// SPDX-License-Identifier: Apache-2.0
//! The image behind a block device: a file or a block device of the host.
//!
//! It is opened twice. Direct I/O uses the first descriptor, if the file system supports it; the
//! second serves requests that direct I/O cannot take (a guest may use single sectors and unaligned
//! buffers; a file system may need 4 KiB blocks). The kernel keeps both views of one file coherent:
//! a direct write drops the pages it covers from the cache, a direct read writes them back first.
//!
//! # Size
//! The capacity is the size of the image when it is opened. If the image grows later, the capacity
//! stays. An image that is cut short is worse: the kernel would let the next write beyond its end
//! extend it, with zeros in between, and the data loss would go unnoticed. So the size is checked
//! before writes ([`Image::bytes_now`], once a batch), and a request beyond the end is an I/O
//! error; so is a read, which the kernel cuts short itself. The check cannot catch an image cut
//! between it and the moment when a write reaches the file system: that image grows as before.

use super::{
    claim::{Claim, Sharing},
    format::{self, Content},
};
use pagetide_sys::byte_lock::ByteLockError;
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags},
    io::Errno,
};
use std::{
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock, RwLockReadGuard},
};

/// Alignment for direct I/O where the kernel does not report it (before Linux 6.1): a 4 KiB block
/// suits every disk.
const ALIGN_UNKNOWN: u32 = 4096;

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be opened or examined.
    #[error("image {path}: {operation} failed: {source}")]
    Kernel {
        /// The image.
        path: PathBuf,
        /// The operation that failed.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Neither a file nor a block device.
    #[error("image {0} is neither a regular file nor a block device")]
    NotAnImage(PathBuf),
    /// Direct I/O was requested but is not supported.
    #[error("image {0}: its file system has no direct I/O; serve it with direct I/O off or auto")]
    NoDirectIo(PathBuf),
    /// Shorter than a sector.
    #[error("image {path} has {bytes} bytes, less than one sector of 512")]
    Empty {
        /// The image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// Another program has locked it.
    #[error(
        "image {path} is in use by another program or device: {because}; stop that one, or, if both are meant to use it at once, serve it with --shared"
    )]
    InUse {
        /// The image.
        path: PathBuf,
        /// What the other program does or forbids.
        because: String,
    },
    /// A device of ours serves it.
    #[error(
        "image {path} is served by the device at {socket} already; remove that one, or, if both are meant to use it at once, serve both with --shared"
    )]
    Served {
        /// The image.
        path: PathBuf,
        /// Socket of the other device.
        socket: PathBuf,
    },
    /// The kernel uses the block device.
    #[error(
        "image {0} is in use by the kernel (mounted, swap, or part of a volume) or was opened by another program for itself alone; release it there, or serve it with --shared if you know what else writes it"
    )]
    Busy(PathBuf),
    /// It cannot be locked.
    #[error(
        "image {path} cannot be locked against other writers: {source}; if nothing else writes it, serve it with --shared, which needs no locks"
    )]
    NoLocks {
        /// The image.
        path: PathBuf,
        /// Why.
        source: ByteLockError,
    },
    /// Its content is in another format.
    #[error(
        "image {path} looks like {format}, and only raw images are served; convert it (qemu-img convert -O raw), or, if its bytes as they are shall be the disk, serve it with --raw"
    )]
    Format {
        /// The image.
        path: PathBuf,
        /// The format it looks like.
        format: &'static str,
    },
}

/// Identity of an image, independent of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageKey {
    /// A file, by file system and inode number.
    File(u64, u64),
    /// A block device, by its number: it may have several nodes.
    Device(u64),
}

/// The kind of file an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// How an image is to be used, as given by the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageUse {
    /// Whether others may write it at the same time.
    pub sharing: Sharing,
    /// Whether its content may look like a format.
    pub content: Content,
}

/// Whether the guest may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// It may.
    Taken,
    /// The device is read-only.
    Refused,
}

/// Whether I/O bypasses the host's page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectIo {
    /// Where the file system supports it.
    #[default]
    Auto,
    /// Always; an error where it is not supported.
    On,
    /// Never.
    Off,
}

/// The descriptors of an image.
#[derive(Debug)]
pub(crate) struct Files {
    /// For aligned requests; `None` if all I/O goes through the page cache.
    pub(crate) direct: Option<OwnedFd>,
    /// The image locks are held on this one: see [`super::claim`].
    pub(crate) buffered: OwnedFd,
}

/// An opened image.
#[derive(Debug)]
pub struct Image {
    /// `None` once the image was given up: references that remain exclude no other program then.
    pub(super) files: RwLock<Option<Files>>,
    pub(crate) kind: ImageKind,
    pub(crate) key: ImageKey,
    /// Whether writes are accepted.
    pub(crate) writes: Writes,
    /// Size in sectors of 512 bytes; a remainder is not served.
    pub(crate) sectors: u64,
    /// Alignment of memory for direct I/O.
    pub(crate) memory_align: usize,
    /// Alignment of offsets and lengths for direct I/O.
    pub(crate) block_bytes: u32,
}

impl Image {
    /// Opens the image at `path`. It is not claimed yet: see [`Self::claim`].
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(path: &Path, writes: Writes, direct_io: DirectIo) -> Result<Self, ImageError> {
        let failed = |operation| {
            move |source: Errno| ImageError::Kernel {
                path: path.to_owned(),
                operation,
                source: source.into(),
            }
        };
        let access = OFlags::CLOEXEC
            | match writes {
                Writes::Taken => OFlags::RDWR,
                Writes::Refused => OFlags::RDONLY,
            };
        let buffered = rustix::fs::open(path, access, Mode::empty()).map_err(failed("open"))?;
        let stat = rustix::fs::fstat(&buffered).map_err(failed("fstat"))?;
        let (kind, key) = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => (ImageKind::File, ImageKey::File(stat.st_dev, stat.st_ino)),
            FileType::BlockDevice => (ImageKind::BlockDevice, ImageKey::Device(stat.st_rdev)),
            _ => return Err(ImageError::NotAnImage(path.to_owned())),
        };
        let bytes = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(failed("lseek"))?;
        if bytes < 512 {
            let path = path.to_owned();
            return Err(ImageError::Empty { path, bytes });
        }
        let direct = match direct_io {
            DirectIo::Off => None,
            DirectIo::On | DirectIo::Auto => {
                // The same file again, wherever the path points by now.
                let name = format!("/proc/self/fd/{}", buffered.as_raw_fd());
                match rustix::fs::open(name, access | OFlags::DIRECT, Mode::empty()) {
                    Ok(direct) => Some(direct),
                    Err(Errno::INVAL) if direct_io == DirectIo::Auto => None,
                    Err(Errno::INVAL) => return Err(ImageError::NoDirectIo(path.to_owned())),
                    Err(error) => return Err(failed("open with O_DIRECT")(error)),
                }
            }
        };
        let (memory_align, block_bytes) = alignment(&buffered, kind).map_err(failed("statx"))?;
        Ok(Self {
            files: RwLock::new(Some(Files {
                // A file system may open with O_DIRECT and report that it does not support it
                // (alignment 0).
                direct: direct.filter(|_| block_bytes > 0),
                buffered,
            })),
            kind,
            key,
            writes,
            sectors: bytes / 512,
            memory_align: usize::try_from(memory_align.max(1)).unwrap_or(usize::MAX),
            block_bytes: block_bytes.max(512),
        })
    }

    /// Checks that the content is allowed.
    ///
    /// # Errors
    /// [`ImageError::Format`], [`ImageError::Kernel`].
    pub fn check_content(&self, path: &Path, content: Content) -> Result<(), ImageError> {
        if content == Content::Raw {
            return Ok(());
        }
        let kernel = |operation| {
            move |source: std::io::Error| ImageError::Kernel {
                path: path.to_owned(),
                operation,
                source,
            }
        };
        let files = self.files();
        let Some(Files { buffered, .. }) = files.as_ref() else {
            return Err(kernel("read")(Errno::BADF.into()));
        };
        let end = rustix::fs::seek(buffered, SeekFrom::End(0));
        let bytes = end.map_err(|error| kernel("lseek")(error.into()))?;
        match format::probe(buffered, bytes).map_err(kernel("read"))? {
            None => Ok(()),
            Some(format) => Err(ImageError::Format {
                path: path.to_owned(),
                format,
            }),
        }
    }

    /// True if this use is compatible with another use of the same image.
    pub(crate) fn agrees_with(&self, sharing: Sharing, other: &Self, its: Sharing) -> bool {
        self.key != other.key
            || Claim::new(self.writes, sharing).agrees_with(Claim::new(other.writes, its))
    }

    /// Bytes served.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.sectors * 512
    }

    /// Size of the file now, as far as this host knows without asking a server. For a block device,
    /// which no write extends, and where the kernel does not report it, the served size.
    pub(crate) fn bytes_now(&self) -> u64 {
        if self.kind == ImageKind::BlockDevice {
            return self.capacity_bytes();
        }
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let files = self.files();
        let size = files.as_ref().map(|files| {
            rustix::fs::statx(&files.buffered, c"", flags, StatxFlags::SIZE)
                .map_or(self.capacity_bytes(), |stat| stat.stx_size)
        });
        size.unwrap_or(self.capacity_bytes())
    }

    /// Its descriptors, unless the image was given up.
    pub(crate) fn files(&self) -> RwLockReadGuard<'_, Option<Files>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Alignment for direct I/O: of memory, and of offsets and lengths.
fn alignment(file: &OwnedFd, kind: ImageKind) -> Result<(u32, u32), Errno> {
    let wanted = StatxFlags::DIOALIGN;
    match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted) {
        Ok(Statx {
            stx_mask,
            stx_dio_mem_align,
            stx_dio_offset_align,
            ..
        }) if stx_mask & wanted.bits() != 0 => {
            return Ok((stx_dio_mem_align, stx_dio_offset_align));
        }
        Ok(_) | Err(Errno::NOSYS) => {}
        Err(error) => return Err(error),
    }
    if kind == ImageKind::BlockDevice {
        let block = rustix::fs::ioctl_blksszget(file)?;
        return Ok((block, block));
    }
    Ok((ALIGN_UNKNOWN, ALIGN_UNKNOWN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_that_are_no_image_are_refused() {
        assert!(matches!(
            Image::open(Path::new("/nonexistent"), Writes::Taken, DirectIo::Auto),
            Err(ImageError::Kernel { .. })
        ));
        assert!(matches!(
            Image::open(Path::new("/dev/null"), Writes::Taken, DirectIo::Auto),
            Err(ImageError::NotAnImage(_))
        ));
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(
            Image::open(empty.path(), Writes::Taken, DirectIo::Auto),
            Err(ImageError::Empty { bytes: 0, .. })
        ));
    }

    #[test]
    fn image_with_a_rest_is_served_in_whole_sectors() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(5000).unwrap();
        let image = Image::open(file.path(), Writes::Refused, DirectIo::Auto).unwrap();
        assert_eq!(image.sectors, 9);
        assert!(image.block_bytes.is_power_of_two());
    }

    #[test]
    fn image_cut_short_is_seen_to_be_and_one_that_grew_too() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let image = Image::open(file.path(), Writes::Taken, DirectIo::Auto).unwrap();
        for bytes in [8192, 100, 1 << 20] {
            file.as_file().set_len(bytes).unwrap();
            assert_eq!(image.bytes_now(), bytes);
            assert_eq!(image.capacity_bytes(), 8192);
        }
    }

    #[test]
    fn content_in_a_format_is_refused_unless_it_is_meant() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(
            file.path(),
            [&b"QFI\xfb\0\0\0\x03"[..], &[0; 4096]].concat(),
        )
        .unwrap();
        let image = Image::open(file.path(), Writes::Taken, DirectIo::Auto).unwrap();
        let refused = image.check_content(file.path(), Content::Probed);
        assert!(matches!(
            refused,
            Err(ImageError::Format {
                format: "qcow2",
                ..
            })
        ));
        image.check_content(file.path(), Content::Raw).unwrap();
    }

    #[test]
    fn image_is_the_same_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let name = |name| dir.path().join(name);
        std::fs::write(name("image"), [0; 1024]).unwrap();
        std::fs::write(name("other"), [0; 1024]).unwrap();
        std::fs::hard_link(name("image"), name("hard")).unwrap();
        std::os::unix::fs::symlink(name("image"), name("soft")).unwrap();
        let open = |path: &Path| Image::open(path, Writes::Taken, DirectIo::Auto).unwrap();
        let image = open(&name("image"));
        for (other, agree) in [
            ("hard", false),
            ("soft", false),
            ("image", false),
            ("other", true),
        ] {
            let other = open(&name(other));
            let alone = Sharing::Alone;
            assert_eq!(image.agrees_with(alone, &other, alone), agree);
        }
    }
}
