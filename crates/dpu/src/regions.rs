// SPDX-License-Identifier: Apache-2.0
//! The RAM regions that a front end has described, as the control thread keeps them.
//!
//! Each is checked before any of it is mapped. Each engine gets its [`DeviceMemory`] from the
//! table.

use crate::{
    memory::{DeviceMemory, Slot},
    ram::RamPolicy,
};
use pagetide_addr::{FileKey, FrontendVa, Gpa, PAGE_BYTES};
use pagetide_sys::guest_ram::{RamFile, RamFileError, Sealed};
use pagetide_vhost_backend::RegionShape;
use pagetide_vpri::{DomainError, DomainTable, EnginePort, LookUp, RamWindow};
use std::{os::fd::BorrowedFd, sync::Arc};

/// Most regions of a device: the same limit as vhost-user back ends in the kernel and in DPDK have.
pub const REGIONS_MAX: usize = 509;

/// Why a front end's description of its memory is refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Too many regions.
    #[error("the front end has more than {REGIONS_MAX} memory regions")]
    TooMany,
    /// Addresses or the offset are not page-aligned, or the region is empty.
    #[error(
        "memory region of {bytes} bytes at guest {gpa}, front end {frontend}, file offset {file_offset:#x} does not start at page borders or is empty"
    )]
    Misaligned {
        /// Guest-physical address.
        gpa: Gpa,
        /// Length.
        bytes: u64,
        /// Address in the front end.
        frontend: FrontendVa,
        /// Offset in the file.
        file_offset: u64,
    },
    /// The region runs past the end of an address space.
    #[error("memory region of {bytes} bytes at guest {gpa} runs past the end of the address space")]
    Wraps {
        /// Guest-physical address.
        gpa: Gpa,
        /// Length.
        bytes: u64,
    },
    /// The file is shorter than the region says.
    #[error("memory region ends at byte {end} of a file that has {file_bytes}")]
    BeyondFile {
        /// End of the region in the file.
        end: u64,
        /// Length of the file as it was first mapped.
        file_bytes: u64,
    },
    /// Two regions share an address.
    #[error("memory region of {bytes} bytes at guest {gpa} overlaps another")]
    Overlap {
        /// Guest-physical address.
        gpa: Gpa,
        /// Length.
        bytes: u64,
    },
    /// A region to be removed is not there.
    #[error("there is no memory region of {bytes} bytes at guest {gpa}")]
    NoSuchRegion {
        /// Guest-physical address.
        gpa: Gpa,
        /// Length.
        bytes: u64,
    },
    /// Its file cannot be a DMA domain.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// Its file is not memory.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Memory of this kind is accepted only if the operator allows it.
    #[error(
        "RAM file {key} is on {kind}, where it can run out of memory or be cut short under the device: \
         give the VM a memfd, or allow it by `dpu blk --allow-ram {kind}`"
    )]
    NotAllowed {
        /// The file.
        key: FileKey,
        /// The kind of file system.
        kind: &'static str,
    },
    /// The file could shrink, and the device does not accept such files.
    #[error(
        "RAM file {0} takes no seal against shrinking, and the device was made with --require-sealed: \
         give the VM a memfd with sealing (QEMU: memory-backend-memfd,seal=on)"
    )]
    NotSealed(FileKey),
    /// The file is longer than the limit for one front end.
    #[error(
        "RAM file {key} has {bytes} bytes; a device takes files of {max_bytes} at most: raise --ram-max"
    )]
    FileOverQuota {
        /// The file.
        key: FileKey,
        /// Its length.
        bytes: u64,
        /// Its limit.
        max_bytes: u64,
    },
    /// More than the limit for one front end.
    #[error(
        "the front end's regions have {bytes} bytes in all; a device takes {max_bytes} at most: raise --ram-max"
    )]
    OverQuota {
        /// Total bytes of the regions.
        bytes: u64,
        /// Their limit.
        max_bytes: u64,
    },
}

/// One region of guest RAM.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub shape: RegionShape,
    pub window: Arc<RamWindow>,
    pub sealed: Sealed,
}

/// Checks that a region is valid, and within a file of `file_bytes`.
fn check(shape: RegionShape, file_bytes: u64) -> Result<(), MemoryError> {
    let RegionShape {
        gpa,
        bytes,
        frontend,
        file_offset,
    } = shape;
    let aligned = gpa.is_page_aligned()
        && frontend.is_page_aligned()
        && file_offset.is_multiple_of(PAGE_BYTES);
    if !aligned || bytes == 0 {
        return Err(MemoryError::Misaligned {
            gpa,
            bytes,
            frontend,
            file_offset,
        });
    }
    let wraps = gpa.checked_add(bytes).is_none() || frontend.checked_add(bytes).is_none();
    let end = file_offset.checked_add(bytes);
    let (Some(end), false) = (end, wraps) else {
        return Err(MemoryError::Wraps { gpa, bytes });
    };
    if end > file_bytes {
        return Err(MemoryError::BeyondFile { end, file_bytes });
    }
    Ok(())
}

impl Region {
    /// Maps the region of `file`, after all checks.
    pub fn map(
        shape: RegionShape,
        file: BorrowedFd<'_>,
        policy: &RamPolicy,
        domains: &DomainTable,
    ) -> Result<Self, MemoryError> {
        let ram = RamFile::of(file)?;
        policy.check(&ram)?;
        let domain = domains.open(ram.key, ram.bytes)?;
        check(shape, domain.len_bytes())?;
        let window = domain.map(file, &ram, shape.file_offset, shape.bytes)?;
        Ok(Self {
            shape,
            window,
            sealed: ram.sealed,
        })
    }

    fn gpa(&self) -> Gpa {
        self.shape.gpa
    }

    fn bytes(&self) -> u64 {
        self.shape.bytes
    }

    fn end(&self) -> u64 {
        self.shape.gpa.0 + self.shape.bytes
    }
}

/// The regions of one device, by guest-physical address.
#[derive(Debug, Default, Clone)]
pub(crate) struct RegionTable(Vec<Region>);

impl RegionTable {
    /// Adds a region.
    pub fn add(&mut self, region: Region) -> Result<(), MemoryError> {
        if self.0.len() == REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let at = self.0.partition_point(|r| r.gpa() < region.gpa());
        let after_previous = at == 0 || self.0[at - 1].end() <= region.gpa().0;
        let next = self.0.get(at);
        let before_next = next.is_none_or(|next| region.end() <= next.gpa().0);
        if !after_previous || !before_next {
            return Err(MemoryError::Overlap {
                gpa: region.gpa(),
                bytes: region.bytes(),
            });
        }
        self.0.insert(at, region);
        Ok(())
    }

    /// Removes the region with these addresses.
    pub fn remove(&mut self, gpa: Gpa, bytes: u64, at: FrontendVa) -> Result<(), MemoryError> {
        let found = self
            .0
            .iter()
            .position(|r| r.gpa() == gpa && r.bytes() == bytes && r.shape.frontend == at)
            .ok_or(MemoryError::NoSuchRegion { gpa, bytes })?;
        self.0.remove(found);
        Ok(())
    }

    /// Lengths of the regions.
    pub fn lengths(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(Region::bytes)
    }

    /// Translates a front-end address to a guest-physical one, if all `bytes` lie in one region.
    pub fn translate(&self, address: FrontendVa, bytes: u64) -> Option<Gpa> {
        self.0.iter().find_map(|region| {
            let offset = address.offset_from(region.shape.frontend)?;
            (offset.checked_add(bytes)? <= region.bytes()).then_some(())?;
            region.gpa().checked_add(offset)
        })
    }

    /// The file that has the byte at that address.
    pub fn file_of(&self, gpa: Gpa) -> Option<FileKey> {
        let mut regions = self.0.iter();
        let region = regions.find(|region| (region.gpa().0..region.end()).contains(&gpa.0))?;
        Some(region.window.domain().key())
    }

    /// Identities of its files, each once.
    pub fn files(&self) -> Vec<FileKey> {
        let mut files: Vec<FileKey> = Vec::new();
        for region in &self.0 {
            let key = region.window.domain().key();
            if !files.contains(&key) {
                files.push(key);
            }
        }
        files
    }

    /// Whether all of it is sealed against shrinking; `None` if it is empty.
    pub fn sealed(&self) -> Option<Sealed> {
        let mut regions = self.0.iter();
        let first = regions.next()?.sealed;
        let unsealed = regions.find(|region| region.sealed == Sealed::No);
        Some(unsealed.map_or(first, |region| region.sealed))
    }

    /// The same memory for engine `engine`.
    pub fn for_engine(&self, engine: usize, look_up: LookUp) -> Result<DeviceMemory, MemoryError> {
        let mut ports: Vec<EnginePort> = Vec::new();
        let mut slots = Vec::with_capacity(self.0.len());
        for region in &self.0 {
            let known = ports
                .iter()
                .position(|port| Arc::ptr_eq(port.window(), &region.window));
            let port = match known {
                Some(port) => port,
                None => {
                    let window = Arc::clone(&region.window);
                    ports.push(EnginePort::new(window, engine, look_up)?);
                    ports.len() - 1
                }
            };
            slots.push(Slot {
                start: region.gpa().0,
                end: region.end(),
                file_offset: region.shape.file_offset,
                port,
            });
        }
        Ok(DeviceMemory::new(slots, ports))
    }
}
