// SPDX-License-Identifier: Apache-2.0
//! The in-flight region as a file that is passed back and forth (GET_INFLIGHT_FD, SET_INFLIGHT_FD).
//!
//! We create it, the front end keeps it and passes it back to us or to a successor. It is sealed
//! against shrinking when it is created, and must be sealed when it comes back: otherwise its owner
//! could make us touch memory that is gone.

use crate::{
    device::offer::{QUEUE_SIZE_MAX, QUEUES_MAX},
    inflight::{InflightQueue, area_bytes},
};
use pagetide_addr::PAGE_BYTES;
use pagetide_sys::{
    guest_ram::{RamFile, RamFileError, Sealed},
    mapping::{FilePart, MappingError, SharedMapping},
};
use rustix::fs::{MemfdFlags, SealFlags};
use std::{fs::File, os::fd::BorrowedFd, sync::Arc};

/// Why an in-flight region cannot be created or accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InflightError {
    /// It exceeds what the device supports.
    #[error(
        "an in-flight region for {queues} queues of {size} was asked for; at most {QUEUES_MAX} of {QUEUE_SIZE_MAX} are served"
    )]
    Shape { queues: u16, size: u16 },
    /// The file is not the one that was handed out.
    #[error(
        "the in-flight region has {bytes} bytes at {offset} of a file of {file_bytes}; {needed} are needed, at a multiple of 8"
    )]
    Bounds {
        offset: u64,
        bytes: u64,
        file_bytes: u64,
        needed: u64,
    },
    /// It could shrink while we use it.
    #[error("the in-flight region is not a memfd sealed against shrinking")]
    NotSealed,
    /// The kernel refused.
    #[error("{operation} of the in-flight region failed: {source}")]
    Kernel {
        operation: &'static str,
        source: rustix::io::Errno,
    },
    /// It is not memory.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// It cannot be mapped.
    #[error(transparent)]
    Map(#[from] MappingError),
}

fn failed(operation: &'static str) -> impl Fn(rustix::io::Errno) -> InflightError {
    move |source| InflightError::Kernel { operation, source }
}

/// A region as a front end describes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub offset: u64,
    pub bytes: u64,
    pub queues: u16,
    pub size: u16,
}

/// Bytes for `queues` queues of `size`.
fn needed(queues: u16, size: u16) -> Result<u64, InflightError> {
    if queues == 0 || queues > QUEUES_MAX || size == 0 || size > QUEUE_SIZE_MAX {
        return Err(InflightError::Shape { queues, size });
    }
    Ok(u64::from(queues) * area_bytes(size))
}

/// Creates a region; returns its file and length.
pub(crate) fn create(queues: u16, size: u16) -> Result<(File, u64), InflightError> {
    let bytes = needed(queues, size)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("pagetide-inflight", flags).map_err(failed("creation"))?;
    rustix::fs::ftruncate(&file, bytes).map_err(failed("sizing"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(failed("sealing"))?;
    Ok((File::from(file), bytes))
}

/// A region that was passed back.
#[derive(Debug)]
pub(crate) struct InflightRegion {
    mapping: Arc<SharedMapping>,
    shape: Shape,
    /// Its offset in the mapping.
    inner: u64,
}

impl InflightRegion {
    /// Maps it, after all checks.
    pub fn open(file: BorrowedFd<'_>, shape: Shape) -> Result<Self, InflightError> {
        let needed = needed(shape.queues, shape.size)?;
        let ram = RamFile::of(file)?;
        if ram.sealed == Sealed::No {
            return Err(InflightError::NotSealed);
        }
        let file_bytes = ram.bytes;
        let end = shape.offset.checked_add(needed);
        let fits = shape.bytes >= needed
            && shape.offset.is_multiple_of(8)
            && end.is_some_and(|end| end <= file_bytes);
        let (Some(end), true) = (end, fits) else {
            return Err(InflightError::Bounds {
                offset: shape.offset,
                bytes: shape.bytes,
                file_bytes,
                needed,
            });
        };
        // However long the file is, only the needed part takes address space.
        let first_byte = shape.offset - shape.offset % ram.page_bytes.max(PAGE_BYTES);
        let part = FilePart {
            offset: first_byte,
            bytes: end - first_byte,
            page_bytes: ram.page_bytes,
        };
        let mapping = Arc::new(SharedMapping::guarded(file, part)?);
        let inner = shape.offset - first_byte;
        Ok(Self {
            mapping,
            shape,
            inner,
        })
    }

    /// The area of one queue; `None` if the region has none for a queue of `size`.
    pub fn queue(&self, queue: u16, size: u16) -> Option<InflightQueue> {
        if queue >= self.shape.queues || size > self.shape.size {
            return None;
        }
        let mapping = self.mapping.clone();
        InflightQueue::new(mapping, self.inner, queue, self.shape.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn shape(bytes: u64) -> Shape {
        Shape {
            offset: 0,
            bytes,
            queues: 2,
            size: 128,
        }
    }

    #[test]
    fn region_that_was_made_here_is_taken_back() {
        let (file, bytes) = create(2, 128).unwrap();
        let region = InflightRegion::open(file.as_fd(), shape(bytes)).unwrap();
        assert!(region.queue(1, 128).is_some());
        assert!(region.queue(2, 128).is_none());
        assert!(region.queue(0, 256).is_none());
    }

    #[test]
    fn region_far_into_a_file_maps_no_more_than_itself() {
        let flags = MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("far", flags).unwrap();
        let far = 100_u64 << 40;
        rustix::fs::ftruncate(&file, far + (1 << 20)).unwrap();
        let shape = Shape {
            offset: far + 4096 + 8,
            ..shape(1 << 16)
        };
        let regions: Vec<_> = (0..4)
            .map(|_| InflightRegion::open(file.as_fd(), shape).unwrap())
            .collect();
        for region in &regions {
            assert!(region.mapping.len_bytes() <= 1 << 16);
            assert!(region.queue(1, 128).is_some());
        }
    }

    #[test]
    fn region_that_could_shrink_or_is_too_small_is_refused() {
        let (file, bytes) = create(1, 128).unwrap();
        assert!(matches!(
            InflightRegion::open(file.as_fd(), shape(bytes * 2)),
            Err(InflightError::Bounds { .. })
        ));
        assert!(matches!(
            InflightRegion::open(tempfile::tempfile().unwrap().as_fd(), shape(1 << 20)),
            Err(InflightError::File(_))
        ));
        assert!(matches!(create(0, 128), Err(InflightError::Shape { .. })));
        assert!(matches!(create(1, 2048), Err(InflightError::Shape { .. })));
    }
}
