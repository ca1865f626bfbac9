// SPDX-License-Identifier: Apache-2.0
//! Guest memory as a device sees it: which file, and where in it, a guest-physical address is.
//!
//! # Terms
//! A front end describes its RAM as *regions*: so many bytes at a [`Gpa`], found
//! at an offset of a file whose descriptor comes along, and mapped in the front
//! end at a [`FrontendVa`] (rings are named by that one). [`RegionTable`] is the
//! control thread's list of them. From it each engine gets a [`DeviceMemory`] of
//! its own: *slots* sorted by address, over one [`EnginePort`] for each part of a
//! file that is mapped.
//!
//! ```text
//!   Gpa ──slot──► port (a RamWindow) + offset in the file = Span ──► lease, then volatile slice or iovec
//! ```
//!
//! # Ordering
//! Nothing here takes a lease. A [`Span`] may be touched only while a
//! [`LeaseSet`] covers it, or, for rings, while its pages are wired. The
//! `GuestMemory` implementation is for ring accesses alone, so it looks at
//! bounds and at nothing else.
//!
//! # What may go wrong
//! A descriptor may point anywhere: an address outside all regions is
//! [`OutsideMemory`]. A front end may give us a file of any kind: what is taken
//! is said in [`RamPolicy`], and looked at before it is mapped. A file that cannot
//! be sealed may lose its memory while we use it; then [`DeviceMemory::is_lost`],
//! and the device stops.

use pagetide_addr::{Access, FileKey, FrontendVa, Gpa, PAGE_BYTES, PageRange};
use pagetide_sys::guest_ram::{RamFile, RamFileError, RamFileKind, Sealed};
use pagetide_vpri::{DomainError, DomainTable, EnginePort, Lease, LookUp, RamWindow};
use std::{cell::Cell, os::fd::BorrowedFd, sync::Arc};
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions, VolatileSlice,
    guest_memory::GuestMemorySliceIterator,
};

/// Most regions a device takes: what vhost-user back ends in the kernel and in DPDK take, too.
pub const REGIONS_MAX: usize = 509;

/// Why a front end's description of its memory is refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Too many regions.
    #[error("the front end has more than {REGIONS_MAX} memory regions")]
    TooMany,
    /// Addresses or the offset are not at page borders, or the region is empty.
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
    /// Its file is no memory at all.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Memory of this kind is taken only by the operator's word.
    #[error(
        "RAM file {key} is on {kind}, where it can run out of memory or be cut short under the device: \
         give the VM a memfd, or allow it by `dpu blk --allow-ram {kind}`"
    )]
    NotAllowed {
        /// The file.
        key: FileKey,
        /// What it is on.
        kind: &'static str,
    },
    /// The file could be made shorter, and the device takes none such.
    #[error(
        "RAM file {0} takes no seal against shrinking, and the device was made with --require-sealed: \
         give the VM a memfd with sealing (QEMU: memory-backend-memfd,seal=on)"
    )]
    NotSealed(FileKey),
    /// More than one front end may have mapped.
    #[error(
        "the front end's regions have {bytes} bytes in all; a device takes {max_bytes} at most: raise --ram-max"
    )]
    OverQuota {
        /// What it wants.
        bytes: u64,
        /// What it may have.
        max_bytes: u64,
    },
}

/// Most guest RAM of one device unless told otherwise. Address space is 128 TiB for all devices, of
/// which there are 128 at most: half of it.
pub const RAM_BYTES_MAX: u64 = 512 << 30;

/// What a device takes as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamPolicy {
    /// Whether files that can be made shorter are taken.
    pub sealing: Sealing,
    /// Whether files on a tmpfs are taken.
    pub tmpfs: RamAllowed,
    /// Whether huge pages of hugetlbfs are taken.
    pub hugetlbfs: RamAllowed,
    /// Most bytes of all regions together.
    pub bytes_max: u64,
}

impl Default for RamPolicy {
    fn default() -> Self {
        Self {
            sealing: Sealing::default(),
            tmpfs: RamAllowed::default(),
            hugetlbfs: RamAllowed::default(),
            bytes_max: RAM_BYTES_MAX,
        }
    }
}

/// Whether a RAM file must be sealed against shrinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sealing {
    /// It is sealed if it takes seals.
    #[default]
    Preferred,
    /// It is refused if it takes none.
    Required,
}

/// Whether a kind of file is taken as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RamAllowed {
    /// The operator vouches for it.
    Yes,
    /// It is refused.
    #[default]
    No,
}

impl RamPolicy {
    /// Refuses what is not to be taken.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`], [`MemoryError::NotSealed`].
    pub(crate) fn check(&self, file: &RamFile) -> Result<(), MemoryError> {
        let (allowed, kind) = match file.kind {
            RamFileKind::Memfd => (RamAllowed::Yes, "memfd"),
            RamFileKind::Tmpfs => (self.tmpfs, "tmpfs"),
            RamFileKind::Hugetlbfs => (self.hugetlbfs, "hugetlbfs"),
        };
        if allowed == RamAllowed::No {
            let key = file.key;
            return Err(MemoryError::NotAllowed { key, kind });
        }
        if self.sealing == Sealing::Required && file.sealed == Sealed::No {
            return Err(MemoryError::NotSealed(file.key));
        }
        Ok(())
    }

    /// Refuses more memory than a front end may have mapped.
    ///
    /// # Errors
    /// [`MemoryError::OverQuota`].
    pub(crate) fn check_bytes(
        &self,
        regions: impl Iterator<Item = u64>,
    ) -> Result<(), MemoryError> {
        let bytes = regions.fold(0, u64::saturating_add);
        let max_bytes = self.bytes_max;
        if bytes > max_bytes {
            return Err(MemoryError::OverQuota { bytes, max_bytes });
        }
        Ok(())
    }
}

/// A region as a front end names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RegionShape {
    pub gpa: Gpa,
    pub bytes: u64,
    pub frontend: FrontendVa,
    pub file_offset: u64,
}

impl RegionShape {
    /// Looks that it is in order, and within a file of `file_bytes`.
    fn check(&self, file_bytes: u64) -> Result<(), MemoryError> {
        let Self {
            gpa,
            bytes,
            frontend,
            file_offset,
        } = *self;
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
}

/// One region of guest RAM.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub shape: RegionShape,
    pub window: Arc<RamWindow>,
    pub sealed: Sealed,
}

impl Region {
    /// Maps the region of `file`, after every check.
    pub fn map(
        shape: RegionShape,
        file: BorrowedFd<'_>,
        policy: &RamPolicy,
        domains: &DomainTable,
    ) -> Result<Self, MemoryError> {
        let ram = RamFile::of(file)?;
        policy.check(&ram)?;
        let domain = domains.open(ram.key, ram.bytes)?;
        shape.check(domain.len_bytes())?;
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
    /// Takes one more region.
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

    /// Drops the region with these addresses.
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

    /// Where the guest sees what the front end has at `address`, if all `bytes` lie in one region.
    pub fn translate(&self, address: FrontendVa, bytes: u64) -> Option<Gpa> {
        self.0.iter().find_map(|region| {
            let offset = address.offset_from(region.shape.frontend)?;
            (offset.checked_add(bytes)? <= region.bytes()).then_some(())?;
            region.gpa().checked_add(offset)
        })
    }

    /// Identities of the files behind it, each once.
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

    /// Whether all of it is sealed against shrinking; `None` if there is none.
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
        Ok(DeviceMemory {
            slots: slots.into(),
            ports: ports.into(),
            last: Cell::new(0),
        })
    }
}

/// An address that no region holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at guest {gpa} are not all in guest memory")]
pub struct OutsideMemory {
    /// First byte asked for.
    pub gpa: Gpa,
    /// Number of bytes asked for.
    pub bytes: u64,
}

#[derive(Debug)]
struct Slot {
    start: u64,
    end: u64,
    file_offset: u64,
    port: usize,
}

/// Bytes that lie together in one file of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub port: usize,
    pub offset: u64,
    pub len: u32,
}

impl Span {
    /// The pages it touches. (Bounds were checked when the span was made, so nothing overflows.)
    pub fn pages(self) -> PageRange {
        PageRange::covering(self.offset, u64::from(self.len)).unwrap_or_default()
    }
}

/// A device's guest memory on one engine.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    slots: Box<[Slot]>,
    ports: Box<[EnginePort]>,
    /// Slot of the last address: the next one is mostly in it, too.
    last: Cell<usize>,
}

impl DeviceMemory {
    /// True once a file of it has let go of memory: what was read since may be zeros that the guest
    /// has not written, and nothing may be done on the strength of it.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.ports.iter().any(|port| port.window().is_lost())
    }

    /// The port of a span.
    pub fn port(&self, span: Span) -> &EnginePort {
        &self.ports[span.port]
    }

    fn slot(&self, address: u64) -> Option<&Slot> {
        let last = self.slots.get(self.last.get())?;
        if last.start <= address && address < last.end {
            return Some(last);
        }
        let at = self.slots.partition_point(|w| w.end <= address);
        let found = self.slots.get(at).filter(|w| w.start <= address)?;
        self.last.set(at);
        Some(found)
    }

    /// The first part of `bytes` at `address` that lies together: all of it, but at a region's end.
    fn first_span(&self, address: u64, bytes: u32) -> Option<Span> {
        let slot = self.slot(address)?;
        let room = slot.end - address;
        Some(Span {
            port: slot.port,
            offset: slot.file_offset + (address - slot.start),
            len: u32::try_from(room).map_or(bytes, |room| room.min(bytes)),
        })
    }

    /// Appends where `bytes` at `gpa` are.
    pub fn spans(&self, gpa: Gpa, bytes: u32, into: &mut Vec<Span>) -> Result<(), OutsideMemory> {
        let outside = OutsideMemory {
            gpa,
            bytes: u64::from(bytes),
        };
        let (mut address, mut left) = (gpa.0, bytes);
        while left > 0 {
            let span = self.first_span(address, left).ok_or(outside)?;
            into.push(span);
            left -= span.len;
            address = address.checked_add(u64::from(span.len)).ok_or(outside)?;
        }
        Ok(())
    }

    /// The bytes of a span. They must be leased or wired.
    pub fn slice(&self, span: Span) -> Result<VolatileSlice<'_>, OutsideMemory> {
        self.ports[span.port]
            .window()
            .volatile(span.offset, u64::from(span.len))
            .ok_or(OutsideMemory {
                gpa: Gpa(span.offset),
                bytes: u64::from(span.len),
            })
    }
}

/// Iterator over the slices of a range; see [`DeviceMemory`].
struct Slices<'a> {
    memory: &'a DeviceMemory,
    address: u64,
    left: usize,
}

impl<'a> Iterator for Slices<'a> {
    type Item = Result<VolatileSlice<'a>, GuestMemoryError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let want = u32::try_from(self.left).unwrap_or(u32::MAX);
        let slice = self
            .memory
            .first_span(self.address, want)
            .and_then(|span| self.memory.slice(span).ok());
        let Some(slice) = slice else {
            self.left = 0;
            let address = GuestAddress(self.address);
            return Some(Err(GuestMemoryError::InvalidGuestAddress(address)));
        };
        self.left -= slice.len();
        // A wrapped address is in no window, so it ends the iteration with an error.
        self.address = self.address.wrapping_add(slice.len() as u64);
        Some(Ok(slice))
    }
}

impl std::iter::FusedIterator for Slices<'_> {}
impl<'a> GuestMemorySliceIterator<'a, ()> for Slices<'a> {}

impl GuestMemory for DeviceMemory {
    type PhysicalMemory = GuestMemoryMmap<()>;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, _access: Permissions) -> bool {
        let mut slices = Slices {
            memory: self,
            address: addr.0,
            left: count,
        };
        slices.all(|slice| slice.is_ok())
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        _access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>, GuestMemoryError> {
        Ok(Slices {
            memory: self,
            address: addr.0,
            left: count,
        })
    }
}

/// The leases of one DMA: all of its pages, or none.
///
/// A duty: [`release`](Self::release) must be called before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct LeaseSet(Vec<(usize, Lease)>);

impl LeaseSet {
    /// Leases the pages of `span`; false if one is absent (what was leased before stays leased).
    #[inline]
    pub fn take(&mut self, memory: &DeviceMemory, span: Span, access: Access) -> bool {
        match memory.ports[span.port].lease(span.pages(), access) {
            Some(lease) => {
                self.0.push((span.port, lease));
                true
            }
            None => false,
        }
    }

    /// Gives every lease back.
    #[inline]
    pub fn release(&mut self, memory: &DeviceMemory) {
        for (port, lease) in self.0.drain(..) {
            memory.ports[port].release(lease);
        }
    }
}

impl Drop for LeaseSet {
    fn drop(&mut self) {
        debug_assert!(self.0.is_empty(), "leases were dropped, not released");
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;
    use vm_memory::Bytes;

    /// A memfd and the domains that know it.
    pub(crate) struct Ram {
        pub file: GuestFile,
        domains: DomainTable,
    }

    impl Ram {
        pub fn new(pages: u64) -> Self {
            Self {
                file: GuestFile::new_memfd("dpu-test", pages * PAGE_BYTES).unwrap(),
                domains: DomainTable::new(1),
            }
        }

        pub fn try_region(
            &self,
            gpa: u64,
            pages: u64,
            file_page: u64,
        ) -> Result<Region, MemoryError> {
            let shape = RegionShape {
                gpa: Gpa(gpa),
                bytes: pages * PAGE_BYTES,
                frontend: FrontendVa(gpa.wrapping_add(1 << 40)),
                file_offset: file_page * PAGE_BYTES,
            };
            let policy = RamPolicy::default();
            Region::map(shape, self.file.as_fd(), &policy, &self.domains)
        }

        pub fn region(&self, gpa: u64, pages: u64, file_page: u64) -> Region {
            self.try_region(gpa, pages, file_page).unwrap()
        }
    }

    #[test]
    fn regions_that_overlap_or_leave_their_file_are_refused() {
        let ram = Ram::new(8);
        let mut table = RegionTable::default();
        table.add(ram.region(0x4000, 2, 0)).unwrap();
        for gpa in [0x3000, 0x5000] {
            assert!(matches!(
                table.add(ram.region(gpa, 2, 0)),
                Err(MemoryError::Overlap { .. })
            ));
        }
        assert!(matches!(
            ram.try_region(0x10000, 2, 7),
            Err(MemoryError::BeyondFile { .. })
        ));
        assert!(matches!(
            ram.try_region(!0xfff - (1 << 40), 2, 0),
            Err(MemoryError::Wraps { .. })
        ));
        assert!(matches!(
            ram.try_region(0x10001, 1, 0),
            Err(MemoryError::Misaligned { .. })
        ));
        table.add(ram.region(0x6000, 2, 0)).unwrap();
        let at = FrontendVa(0x6000 + (1 << 40));
        table.remove(Gpa(0x6000), 2 * PAGE_BYTES, at).unwrap();
        assert!(table.remove(Gpa(0x6000), 2 * PAGE_BYTES, at).is_err());
    }

    #[test]
    fn policy_decides_by_what_can_be_guaranteed() {
        let file = |kind, sealed| RamFile {
            key: FileKey { dev: 1, ino: 2 },
            bytes: 4096,
            kind,
            sealed,
            page_bytes: 4096,
        };
        let usual = RamPolicy::default();
        let strict = RamPolicy {
            sealing: Sealing::Required,
            ..usual
        };
        let lenient = RamPolicy {
            tmpfs: RamAllowed::Yes,
            hugetlbfs: RamAllowed::Yes,
            ..usual
        };
        for sealed in [Sealed::Yes, Sealed::No] {
            assert!(usual.check(&file(RamFileKind::Memfd, sealed)).is_ok());
            let strictly = strict.check(&file(RamFileKind::Memfd, sealed));
            assert_eq!(strictly.is_ok(), sealed == Sealed::Yes);
            for kind in [RamFileKind::Tmpfs, RamFileKind::Hugetlbfs] {
                let refused = usual.check(&file(kind, sealed));
                assert!(matches!(refused, Err(MemoryError::NotAllowed { .. })));
                assert!(lenient.check(&file(kind, sealed)).is_ok());
            }
        }
        assert!(usual.check_bytes([RAM_BYTES_MAX].into_iter()).is_ok());
        assert!(usual.check_bytes([RAM_BYTES_MAX, 1].into_iter()).is_err());
        assert!(usual.check_bytes([u64::MAX, 1].into_iter()).is_err());
    }

    #[test]
    fn only_what_is_named_of_a_file_is_mapped_and_once_for_all() {
        let ram = Ram::new(8);
        let mut table = RegionTable::default();
        table.add(ram.region(0x4000, 4, 2)).unwrap();
        table.add(ram.region(0x10000, 2, 3)).unwrap();
        table.add(ram.region(0x20000, 2, 6)).unwrap();
        let memory = table.for_engine(0, LookUp::On).unwrap();
        assert_eq!(memory.ports.len(), 2);
        let mapped: u64 = (memory.ports.iter())
            .map(|port| port.window().len_bytes())
            .sum();
        assert_eq!(mapped, 6 * PAGE_BYTES);
        let domain = Arc::clone(memory.ports[0].domain());
        assert!(domain.is_mapped());
        drop((memory, table));
        assert!(!domain.is_mapped());
    }

    #[test]
    fn memory_whose_file_is_cut_short_is_lost() {
        let ram = Ram::new(4);
        let mut table = RegionTable::default();
        table.add(ram.region(0x4000, 4, 0)).unwrap();
        assert_eq!(table.sealed(), Some(Sealed::No));
        let memory = table.for_engine(0, LookUp::On).unwrap();
        memory.write_slice(&[7; 32], GuestAddress(0x4000)).unwrap();
        rustix::fs::ftruncate(ram.file.as_fd(), 0).unwrap();
        assert!(!memory.is_lost());
        let mut back = [1; 32];
        memory.read_slice(&mut back, GuestAddress(0x4000)).unwrap();
        assert_eq!(back, [0; 32]);
        assert!(memory.is_lost());
    }

    #[test]
    fn front_end_address_translates_only_within_one_region() {
        let ram = Ram::new(8);
        let mut table = RegionTable::default();
        table.add(ram.region(0x4000, 2, 0)).unwrap();
        let base = 1 << 40;
        assert_eq!(
            table.translate(FrontendVa(base + 0x4010), 16),
            Some(Gpa(0x4010))
        );
        assert_eq!(table.translate(FrontendVa(base + 0x5ff8), 16), None);
        assert_eq!(table.translate(FrontendVa(u64::MAX), 16), None);
        assert_eq!(table.translate(FrontendVa(0x4000), 16), None);
    }

    #[test]
    fn bytes_across_two_regions_are_two_spans_and_beyond_them_an_error() {
        let ram = Ram::new(8);
        let mut table = RegionTable::default();
        table.add(ram.region(0x4000, 1, 5)).unwrap();
        table.add(ram.region(0x5000, 1, 2)).unwrap();
        let memory = table.for_engine(0, LookUp::On).unwrap();
        let mut spans = Vec::new();
        memory.spans(Gpa(0x4ff0), 32, &mut spans).unwrap();
        assert_eq!(
            spans.iter().map(|s| (s.offset, s.len)).collect::<Vec<_>>(),
            [(0x5ff0, 16), (0x2000, 16)]
        );
        assert!(memory.spans(Gpa(0x5ff0), 17, &mut spans).is_err());
        assert!(memory.spans(Gpa(u64::MAX), 17, &mut spans).is_err());
        memory.write_slice(&[7; 32], GuestAddress(0x4ff0)).unwrap();
        let mut back = [0; 32];
        memory.read_slice(&mut back, GuestAddress(0x4ff0)).unwrap();
        assert_eq!(back, [7; 32]);
        assert!(!memory.check_range(GuestAddress(0x5ff0), 17, Permissions::Read));
        assert!(memory.check_range(GuestAddress(0x4000), 0x2000, Permissions::Read));
    }
}
