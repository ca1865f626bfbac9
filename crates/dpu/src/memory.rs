// SPDX-License-Identifier: Apache-2.0
//! Guest memory as a device sees it: maps a guest-physical address to a file and an offset in it.
//!
//! # Terms
//! A front end describes its RAM as *regions*: a number of bytes at a [`Gpa`], stored at an offset
//! of a file whose descriptor is passed along, and mapped in the front end at a [`FrontendVa`](pagetide_addr::FrontendVa)
//! (which names rings). [`RegionTable`](crate::regions::RegionTable) is the control thread's list
//! of them. From it each engine gets its own [`DeviceMemory`]: *slots* sorted by address, over one
//! [`EnginePort`] for each mapped part of a file.
//!
//! ```text
//!   Gpa ──slot──► port (a RamWindow) + offset in the file = Span ──► lease, then volatile slice or iovec
//! ```
//!
//! # Ordering
//! Nothing here takes a lease. A [`Span`] may be touched only while a [`LeaseSet`] covers it, or,
//! for rings, while its pages are wired. The `GuestMemory` implementation is for ring accesses
//! only, so it checks bounds and nothing else.
//!
//! # What may go wrong
//! A descriptor may point anywhere: an address outside all regions is [`OutsideMemory`]. A front
//! end may pass a file of any kind: [`RamPolicy`](crate::RamPolicy) says which are accepted, and is
//! checked before the file is mapped. A file that cannot be sealed may lose its memory while we use
//! it; then [`DeviceMemory::is_lost`] is true and the device stops.

use pagetide_addr::{Access, FileRange, Gpa};
use pagetide_vpri::{DmaDomain, EnginePort, Lease};
use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, Permissions,
    VolatileMemory, VolatileSlice, guest_memory::GuestMemorySliceIterator,
};

/// An address that no region holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at guest {gpa} are not all in guest memory")]
pub struct OutsideMemory {
    /// First byte requested.
    pub gpa: Gpa,
    /// Number of bytes requested.
    pub bytes: u64,
}

/// Guest-physical addresses of one region, and the location of its bytes.
#[derive(Debug)]
pub(crate) struct Slot {
    pub start: u64,
    pub end: u64,
    pub file_offset: u64,
    pub port: usize,
}

/// Contiguous bytes in one file of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub port: usize,
    pub offset: u64,
    pub len: u32,
}

impl Span {
    /// The pages it touches. (Bounds were checked when the span was created, so nothing overflows.)
    pub fn pages(self) -> FileRange {
        FileRange::covering(self.offset, u64::from(self.len)).unwrap_or_default()
    }

    /// Both, if `next` begins where this one ends.
    #[inline]
    pub fn joined(self, next: Self) -> Option<Self> {
        let follows = next.port == self.port && next.offset == self.offset + u64::from(self.len);
        let len = self.len.checked_add(next.len)?;
        follows.then_some(Self { len, ..self })
    }
}

/// Tells a device's memory from that which it has had before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryId(u64);

impl MemoryId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A device's guest memory on one engine.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    id: MemoryId,
    slots: Box<[Slot]>,
    ports: Box<[EnginePort]>,
    /// Slot of the last address: the next one is usually in it, too.
    last: Cell<usize>,
}

impl DeviceMemory {
    /// Memory of `slots`, sorted by address, whose ports are indices of `ports`.
    pub fn new(slots: Vec<Slot>, ports: Vec<EnginePort>) -> Self {
        Self {
            id: MemoryId::next(),
            slots: slots.into(),
            ports: ports.into(),
            last: Cell::new(0),
        }
    }

    /// No other memory has it, and this has no other. Spans mean something in the memory that they are of only.
    pub fn id(&self) -> MemoryId {
        self.id
    }

    /// True once a file of it has lost memory. Data read since may be zeros that the guest has not
    /// written, and must not be acted on.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.ports.iter().any(|port| port.window().is_lost())
    }

    /// The port of a span.
    pub fn port(&self, span: Span) -> &EnginePort {
        &self.ports[span.port]
    }

    /// Its mapped parts of files.
    pub fn parts(&self) -> impl Iterator<Item = (&Arc<DmaDomain>, FileRange)> {
        self.ports.iter().map(|port| {
            let window = port.window();
            let pages = FileRange::covering(window.first_byte(), window.len_bytes());
            (port.domain(), pages.unwrap_or_default())
        })
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

    /// The first contiguous part of `bytes` at `address`: all of it, except at the end of a region.
    fn first_span(&self, address: u64, bytes: u32) -> Option<Span> {
        let slot = self.slot(address)?;
        let room = slot.end - address;
        Some(Span {
            port: slot.port,
            offset: slot.file_offset + (address - slot.start),
            len: u32::try_from(room).map_or(bytes, |room| room.min(bytes)),
        })
    }

    /// Appends the spans of `bytes` at `gpa`.
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

/// Fields of rings, whose pages are wired. `GuestMemory` below is for any range, and takes longer.
impl DeviceMemory {
    /// The bytes at `gpa`, if they are contiguous in one file. They must be leased or wired.
    #[inline]
    pub fn contiguous(&self, gpa: u64, bytes: u32) -> Option<VolatileSlice<'_>> {
        let span = self.first_span(gpa, bytes)?;
        match span.len == bytes {
            true => self.slice(span).ok(),
            false => None,
        }
    }

    /// Reads a little-endian field, which is aligned where its ring is (else it counts as outside).
    ///
    /// # Errors
    /// It is not in guest memory.
    #[inline]
    pub fn load_u16(&self, gpa: u64, order: Ordering) -> Result<u16, OutsideMemory> {
        let field = self.contiguous(gpa, 2);
        let loaded = field.and_then(|field| field.load::<u16>(0, order).ok());
        loaded.map(u16::from_le).ok_or_else(|| outside(gpa, 2))
    }

    /// Writes a little-endian field.
    ///
    /// # Errors
    /// As of [`Self::load_u16`].
    #[inline]
    pub fn store_u16(&self, gpa: u64, word: u16, order: Ordering) -> Result<(), OutsideMemory> {
        let field = self.contiguous(gpa, 2);
        let stored = field.and_then(|field| field.store(word.to_le(), 0, order).ok());
        stored.ok_or_else(|| outside(gpa, 2))
    }

    /// Writes a little-endian entry, in no order to anything else.
    ///
    /// # Errors
    /// It is not in guest memory.
    #[inline]
    pub fn store_u64(&self, gpa: u64, word: u64) -> Result<(), OutsideMemory> {
        let word = word.to_le();
        if let Some(entry) = self.contiguous(gpa, 8)
            && let Ok(entry) = entry.get_ref::<u64>(0)
        {
            entry.store(word);
            return Ok(());
        }
        // It is cut by the end of a region.
        let written = self.write_obj(word, GuestAddress(gpa));
        written.map_err(|_| outside(gpa, 8))
    }
}

fn outside(gpa: u64, bytes: u64) -> OutsideMemory {
    OutsideMemory {
        gpa: Gpa(gpa),
        bytes,
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
/// [`release`](Self::release) must be called before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct LeaseSet(Vec<(usize, Lease)>);

impl LeaseSet {
    /// Leases the pages of `span`; false if one is absent (earlier leases stay).
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

    /// Leases that it has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps room for so many leases at most; all have been released.
    pub fn shrink_to(&mut self, most: usize) {
        self.0.shrink_to(most);
    }

    /// Releases all leases.
    #[inline]
    pub fn release(&mut self, memory: &DeviceMemory) {
        self.release_from(memory, 0);
    }

    /// Releases those that were taken when it had `before` already.
    #[inline]
    pub fn release_from(&mut self, memory: &DeviceMemory, before: usize) {
        for (port, lease) in self.0.drain(before.min(self.0.len())..) {
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
    use crate::{
        MemoryError, RamPolicy,
        regions::{Region, RegionTable},
    };
    use pagetide_addr::{FrontendVa, PAGE_BYTES};
    use pagetide_sys::{guest_ram::Sealed, memory_file::GuestFile};
    use pagetide_vhost_backend::RegionShape;
    use pagetide_vpri::{DomainTable, LookUp};
    use std::os::fd::AsFd;

    /// A memfd and the domains that contain it.
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
