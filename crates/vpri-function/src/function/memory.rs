// SPDX-License-Identifier: Apache-2.0
//! The function's own memory: its driver provides it for rings, messages and bounce buffers.
//!
//! It is memory of the driver's process and may change at any time. All access is by
//! copies, and every value is read only once. A file that could be shrunk, which
//! would kill this process, is refused. So is RAM of a VM that is paged: the function looks none of its own pages up
//! ([`OwnUse`]).

use pagetide_addr::{FrontendVa, Gpa, PAGE_BYTES};
use pagetide_sys::{
    guest_ram::{RamFile, RamFileError, RamFileKind, Sealed},
    mapping::SharedMapping,
};
use pagetide_vhost_backend::RegionShape;
use pagetide_vpri::{
    bounce::{BOUNCE_BUFFERS_MAX, BounceArea, BounceError},
    domain::{DomainError, DomainTable, own::OwnUse},
};
use rustix::fs::fstat;
use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// Why the driver's memory is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    /// It could be shrunk while in use.
    #[error(
        "memory of the function must be a memfd of ordinary pages that can be sealed against shrinking"
    )]
    NotSealed,
    /// It is not memory.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Pages of it may be away.
    #[error(transparent)]
    Paged(#[from] DomainError),
    /// It does not lie in its file, or cannot be mapped.
    #[error("{bytes} bytes at offset {offset} of its file cannot be mapped: {source}")]
    Map {
        bytes: u64,
        offset: u64,
        source: vm_memory::mmap::MmapRegionError,
    },
    /// Its addresses wrap, or overlap others.
    #[error("{bytes} bytes at address {address:#x} wrap around or overlap other memory")]
    Address { bytes: u64, address: u64 },
    /// A bounce area that does not lie in one region.
    #[error("no memory has all of the {slots} bounce buffers at address {address:#x}")]
    Bounce { address: u64, slots: u64 },
    /// Its descriptor cannot be duplicated.
    #[error("the descriptor of the function's memory cannot be duplicated: {0}")]
    Descriptor(#[from] io::Error),
    /// The bounce area is invalid.
    #[error(transparent)]
    Area(#[from] BounceError),
    /// Its file cannot be mapped for bounce buffers.
    #[error(transparent)]
    Mapping(#[from] pagetide_sys::mapping::MappingError),
}

/// Where a driver has its bounce buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct BounceRange {
    /// The address of the first, as in descriptors.
    pub address: u64,
    /// How many there are.
    pub slots: u64,
}

#[derive(Debug)]
struct Region {
    shape: RegionShape,
    file: Arc<File>,
    _use: OwnUse,
}

/// All memory of one driver.
#[derive(Debug, Default)]
pub(super) struct FunctionMemory {
    regions: Vec<Region>,
    mapped: GuestMemoryMmap,
}

impl FunctionMemory {
    /// Maps `regions`, none of which may be RAM of a VM that is attached in `domains`.
    pub fn new(
        regions: &[(RegionShape, BorrowedFd<'_>)],
        domains: &DomainTable,
    ) -> Result<Self, MemoryError> {
        let mut memory = Self::default();
        for (shape, file) in regions.iter().copied() {
            let ram = RamFile::of(file)?;
            if ram.kind != RamFileKind::Memfd || ram.sealed == Sealed::No {
                return Err(MemoryError::NotSealed);
            }
            let own = domains.use_as_own(ram.key, ram.bytes)?;
            let RegionShape {
                gpa: Gpa(address),
                bytes,
                frontend,
                file_offset: offset,
            } = shape;
            let wraps = || MemoryError::Address { bytes, address };
            let len = usize::try_from(bytes).map_err(|_| wraps())?;
            let file = Arc::new(File::from(file.try_clone_to_owned()?));
            let place = FileOffset::from_arc(Arc::clone(&file), offset);
            let region = MmapRegion::from_file(place, len).map_err(|source| MemoryError::Map {
                bytes,
                offset,
                source,
            })?;
            let region = GuestRegionMmap::new(region, GuestAddress(address)).ok_or_else(wraps)?;
            frontend.checked_add(bytes).ok_or_else(wraps)?;
            let more = memory.mapped.insert_region(Arc::new(region));
            memory.mapped = more.map_err(|_| wraps())?;
            memory.regions.push(Region {
                shape,
                file,
                _use: own,
            });
        }
        Ok(memory)
    }

    /// The memory as the rings use it.
    pub fn mapped(&self) -> &GuestMemoryMmap {
        &self.mapped
    }

    /// The address in descriptors of `bytes` bytes that the front end has at `frontend`.
    pub fn translate(&self, frontend: FrontendVa, bytes: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|Region { shape, .. }| {
            let into = frontend.offset_from(shape.frontend)?;
            let fits = into.checked_add(bytes)? <= shape.bytes;
            fits.then_some(GuestAddress(shape.gpa.0 + into))
        })
    }

    /// Bounce areas for `engines`, side by side in `slots` slots at `address`; the first slot has
    /// number `first`.
    pub fn bounce(
        &self,
        area: BounceRange,
        first: u32,
        engines: u32,
    ) -> Result<Vec<Arc<BounceArea>>, MemoryError> {
        let BounceRange { address, slots } = area;
        let nowhere = || MemoryError::Bounce { address, slots };
        let bytes = slots.checked_mul(PAGE_BYTES).ok_or_else(nowhere)?;
        let count = u32::try_from(slots)
            .ok()
            .filter(|slots| *slots <= BOUNCE_BUFFERS_MAX);
        let each = count.ok_or_else(nowhere)? / engines.max(1);
        let offset = |Region { shape, .. }: &Region| {
            let into = address.checked_sub(shape.gpa.0)?;
            let fits = into.checked_add(bytes)? <= shape.bytes;
            fits.then_some(shape.file_offset + into)
        };
        let mut found = self.regions.iter();
        let region = found.find_map(|region| Some((region, offset(region)?)));
        let (region, offset) = region.ok_or_else(nowhere)?;
        // The current length of the file: sealed, it cannot shrink.
        let len = fstat(&region.file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        let mapping = Arc::new(SharedMapping::new(region.file.as_fd(), len)?);
        (0..engines)
            .map(|engine| {
                let at = offset + u64::from(engine) * u64::from(each) * PAGE_BYTES;
                let first = first.saturating_add(engine * each);
                let mapping = Arc::clone(&mapping);
                Ok(Arc::new(BounceArea::over(mapping, at, first, each)?))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};

    #[test]
    fn memory_of_a_vm_that_is_paged_is_refused_with_a_sentence() {
        const BYTES: u64 = 4 * PAGE_BYTES;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("rings", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let shape = RegionShape {
            gpa: Gpa(0),
            frontend: FrontendVa(0),
            bytes: BYTES,
            file_offset: 0,
        };
        let domains = DomainTable::new(1);
        let memory = || FunctionMemory::new(&[(shape, file.as_fd())], &domains);
        let in_use = memory().unwrap();
        let key = RamFile::of(file.as_fd()).unwrap().key;
        let domain = domains.declare(key, BYTES).unwrap();
        assert!(domain.attach().is_err(), "the function uses it");
        drop(in_use);
        domain.attach().unwrap();
        let refused = memory().unwrap_err();
        assert!(refused.to_string().contains("detach the VM"), "{refused}");
    }
}
