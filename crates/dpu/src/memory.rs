// SPDX-License-Identifier: Apache-2.0
//! Guest memory as a device sees it: which file, and where in it, a guest-physical address is.
//!
//! # Terms
//! A front end describes its RAM as *regions*: so many bytes at a [`Gpa`], found
//! at an offset of a file whose descriptor comes along, and mapped in the front
//! end at a [`FrontendVa`] (rings are named by that one). [`RegionTable`] is the
//! control thread's list of them. From it each engine gets a [`DeviceMemory`] of
//! its own: *windows* sorted by address, over one [`EnginePort`] a file.
//!
//! ```text
//!   Gpa ──window──► port (a DmaDomain) + offset = Span ──► lease, then volatile slice or iovec
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
//! [`OutsideMemory`]. A front end that shrinks a file it has given us kills the
//! process by SIGBUS; a memfd sealed against shrinking (QEMU's default) cannot.

use pagetide_addr::{Access, FileKey, FrontendVa, Gpa, PAGE_BYTES, PageRange};
use pagetide_vpri::{DmaDomain, DomainError, EnginePort, Lease, LookUp};
use std::{cell::Cell, sync::Arc};
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
}

/// One region of guest RAM.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub gpa: Gpa,
    pub bytes: u64,
    pub frontend: FrontendVa,
    pub file_offset: u64,
    pub domain: Arc<DmaDomain>,
}

impl Region {
    fn check(&self) -> Result<(), MemoryError> {
        let (gpa, bytes) = (self.gpa, self.bytes);
        let aligned = gpa.is_page_aligned()
            && self.frontend.is_page_aligned()
            && self.file_offset.is_multiple_of(PAGE_BYTES);
        if !aligned || bytes == 0 {
            return Err(MemoryError::Misaligned {
                gpa,
                bytes,
                frontend: self.frontend,
                file_offset: self.file_offset,
            });
        }
        let wraps = gpa.checked_add(bytes).is_none() || self.frontend.checked_add(bytes).is_none();
        let end = self.file_offset.checked_add(bytes);
        let (Some(end), false) = (end, wraps) else {
            return Err(MemoryError::Wraps { gpa, bytes });
        };
        let file_bytes = self.domain.len_bytes();
        if end > file_bytes {
            return Err(MemoryError::BeyondFile { end, file_bytes });
        }
        Ok(())
    }
}

/// The regions of one device, by guest-physical address.
#[derive(Debug, Default, Clone)]
pub(crate) struct RegionTable(Vec<Region>);

impl RegionTable {
    /// Takes one more region.
    pub fn add(&mut self, region: Region) -> Result<(), MemoryError> {
        region.check()?;
        if self.0.len() == REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let at = self.0.partition_point(|r| r.gpa < region.gpa);
        let after_previous = at == 0 || {
            let previous = &self.0[at - 1];
            previous.gpa.0 + previous.bytes <= region.gpa.0
        };
        let before_next = self
            .0
            .get(at)
            .is_none_or(|next| region.gpa.0 + region.bytes <= next.gpa.0);
        if !after_previous || !before_next {
            return Err(MemoryError::Overlap {
                gpa: region.gpa,
                bytes: region.bytes,
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
            .position(|r| r.gpa == gpa && r.bytes == bytes && r.frontend == at)
            .ok_or(MemoryError::NoSuchRegion { gpa, bytes })?;
        self.0.remove(found);
        Ok(())
    }

    /// Where the guest sees what the front end has at `address`, if all `bytes` lie in one region.
    pub fn translate(&self, address: FrontendVa, bytes: u64) -> Option<Gpa> {
        self.0.iter().find_map(|region| {
            let offset = address.offset_from(region.frontend)?;
            (offset.checked_add(bytes)? <= region.bytes).then_some(())?;
            region.gpa.checked_add(offset)
        })
    }

    /// Identities of the files behind it, each once.
    pub fn files(&self) -> Vec<FileKey> {
        let mut files: Vec<FileKey> = Vec::new();
        for region in &self.0 {
            let key = region.domain.key();
            if !files.contains(&key) {
                files.push(key);
            }
        }
        files
    }

    /// The same memory for engine `engine`.
    pub fn for_engine(&self, engine: usize, look_up: LookUp) -> Result<DeviceMemory, MemoryError> {
        let mut ports: Vec<EnginePort> = Vec::new();
        let mut windows = Vec::with_capacity(self.0.len());
        for region in &self.0 {
            let known = ports
                .iter()
                .position(|port| Arc::ptr_eq(port.domain(), &region.domain));
            let port = match known {
                Some(port) => port,
                None => {
                    ports.push(EnginePort::new(region.domain.clone(), engine, look_up)?);
                    ports.len() - 1
                }
            };
            windows.push(Window {
                start: region.gpa.0,
                end: region.gpa.0 + region.bytes,
                file_offset: region.file_offset,
                port,
            });
        }
        Ok(DeviceMemory {
            windows: windows.into(),
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
struct Window {
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
    windows: Box<[Window]>,
    ports: Box<[EnginePort]>,
    /// Window of the last address: the next one is mostly in it, too.
    last: Cell<usize>,
}

impl DeviceMemory {
    /// The port of a span.
    pub fn port(&self, span: Span) -> &EnginePort {
        &self.ports[span.port]
    }

    fn window(&self, address: u64) -> Option<&Window> {
        let last = self.windows.get(self.last.get())?;
        if last.start <= address && address < last.end {
            return Some(last);
        }
        let at = self.windows.partition_point(|w| w.end <= address);
        let found = self.windows.get(at).filter(|w| w.start <= address)?;
        self.last.set(at);
        Some(found)
    }

    /// The first part of `bytes` at `address` that lies together: all of it, but at a region's end.
    fn first_span(&self, address: u64, bytes: u32) -> Option<Span> {
        let window = self.window(address)?;
        let room = window.end - address;
        Some(Span {
            port: window.port,
            offset: window.file_offset + (address - window.start),
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
        let mapping = self.ports[span.port].mapping();
        mapping
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
    use pagetide_vpri::DomainTable;
    use std::os::fd::AsFd;
    use vm_memory::Bytes;

    pub(crate) fn domain(pages: u64) -> (GuestFile, Arc<DmaDomain>) {
        let bytes = pages * PAGE_BYTES;
        let file = GuestFile::new_memfd("dpu-test", bytes).unwrap();
        let domain = DomainTable::new(1)
            .open(file.as_fd(), file.key().unwrap(), bytes)
            .unwrap();
        (file, domain)
    }

    pub(crate) fn region(domain: &Arc<DmaDomain>, gpa: u64, pages: u64, file_page: u64) -> Region {
        Region {
            gpa: Gpa(gpa),
            bytes: pages * PAGE_BYTES,
            frontend: FrontendVa(gpa.wrapping_add(1 << 40)),
            file_offset: file_page * PAGE_BYTES,
            domain: domain.clone(),
        }
    }

    #[test]
    fn regions_that_overlap_or_leave_their_file_are_refused() {
        let (_file, domain) = domain(8);
        let mut table = RegionTable::default();
        table.add(region(&domain, 0x4000, 2, 0)).unwrap();
        for gpa in [0x3000, 0x5000] {
            assert!(matches!(
                table.add(region(&domain, gpa, 2, 0)),
                Err(MemoryError::Overlap { .. })
            ));
        }
        assert!(matches!(
            table.add(region(&domain, 0x10000, 2, 7)),
            Err(MemoryError::BeyondFile { .. })
        ));
        assert!(matches!(
            table.add(region(&domain, !0xfff - (1 << 40), 2, 0)),
            Err(MemoryError::Wraps { .. })
        ));
        assert!(matches!(
            table.add(region(&domain, 0x10001, 1, 0)),
            Err(MemoryError::Misaligned { .. })
        ));
        table.add(region(&domain, 0x6000, 2, 0)).unwrap();
        let at = FrontendVa(0x6000 + (1 << 40));
        table.remove(Gpa(0x6000), 2 * PAGE_BYTES, at).unwrap();
        assert!(table.remove(Gpa(0x6000), 2 * PAGE_BYTES, at).is_err());
    }

    #[test]
    fn front_end_address_translates_only_within_one_region() {
        let (_file, domain) = domain(8);
        let mut table = RegionTable::default();
        table.add(region(&domain, 0x4000, 2, 0)).unwrap();
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
        let (_file, domain) = domain(8);
        let mut table = RegionTable::default();
        table.add(region(&domain, 0x4000, 1, 5)).unwrap();
        table.add(region(&domain, 0x5000, 1, 2)).unwrap();
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
