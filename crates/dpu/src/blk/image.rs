// SPDX-License-Identifier: Apache-2.0
//! The image behind a block device: a file or a block device of the host.
//!
//! It is opened twice. Through the first descriptor goes direct I/O, where the
//! file system has it; through the second go requests that direct I/O cannot
//! take (a guest may use single sectors and unaligned buffers; a file system
//! may want 4 KiB blocks). The kernel keeps both views of one file coherent: a
//! direct write drops the pages it covers from the cache, a direct read writes
//! them back first.

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags},
    io::Errno,
};
use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

/// What direct I/O wants where the kernel does not say (before Linux 6.1): a 4 KiB block suits
/// every disk there is.
const ALIGN_UNKNOWN: u32 = 4096;

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be opened, or does not say what it is.
    #[error("image {path}: {operation} failed: {source}")]
    Kernel {
        /// The image.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Neither a file nor a block device.
    #[error("image {0} is neither a regular file nor a block device")]
    NotAnImage(PathBuf),
    /// Direct I/O was asked for and is not to be had.
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
}

/// Whether the guest may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// It may.
    Taken,
    /// The device is read-only.
    Refused,
}

/// Whether I/O goes past the host's page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectIo {
    /// Where the file system can.
    #[default]
    Auto,
    /// Always; an error where it cannot.
    On,
    /// Never.
    Off,
}

/// An opened image.
#[derive(Debug)]
pub struct Image {
    /// For aligned requests; `None` if all I/O goes through the page cache.
    pub(crate) direct: Option<OwnedFd>,
    pub(crate) buffered: OwnedFd,
    /// Whether writes are taken.
    pub(crate) writes: Writes,
    /// Size in sectors of 512 bytes; a rest is not served.
    pub(crate) sectors: u64,
    /// Alignment of memory for direct I/O.
    pub(crate) memory_align: usize,
    /// Alignment of offsets and lengths for direct I/O.
    pub(crate) block_bytes: u32,
}

impl Image {
    /// Opens the image at `path`.
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
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Err(ImageError::NotAnImage(path.to_owned()));
        }
        let bytes = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(failed("lseek"))?;
        if bytes < 512 {
            let path = path.to_owned();
            return Err(ImageError::Empty { path, bytes });
        }
        let direct = match direct_io {
            DirectIo::Off => None,
            DirectIo::On | DirectIo::Auto => {
                match rustix::fs::open(path, access | OFlags::DIRECT, Mode::empty()) {
                    Ok(direct) => Some(direct),
                    Err(Errno::INVAL) if direct_io == DirectIo::Auto => None,
                    Err(Errno::INVAL) => return Err(ImageError::NoDirectIo(path.to_owned())),
                    Err(error) => return Err(failed("open with O_DIRECT")(error)),
                }
            }
        };
        let (memory_align, block_bytes) = alignment(&buffered, kind).map_err(failed("statx"))?;
        Ok(Self {
            // A file system may open with O_DIRECT and say that it cannot (alignment 0).
            direct: direct.filter(|_| block_bytes > 0),
            buffered,
            writes,
            sectors: bytes / 512,
            memory_align: usize::try_from(memory_align.max(1)).unwrap_or(usize::MAX),
            block_bytes: block_bytes.max(512),
        })
    }
}

/// Alignment that direct I/O wants of memory, and of offsets and lengths.
fn alignment(file: &OwnedFd, kind: FileType) -> Result<(u32, u32), Errno> {
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
    if kind == FileType::BlockDevice {
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
}
