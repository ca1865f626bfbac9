// SPDX-License-Identifier: Apache-2.0
//! Reading a descriptor chain that a guest has written (virtio 1.2, 2.7).
//!
//! virtio-queue keeps the addresses of the rings. The chain is walked here, for two reasons. Its iterator turns
//! every failure into 'end of chain', so an absent page inside an indirect table would look like a
//! short request. And it starts only from the avail ring, while a chain that was parked, or that a
//! predecessor left in the in-flight region, is known by its head alone.
//!
//! The direct table is part of the ring and wired. An indirect table is ordinary guest memory: its
//! pages are leased during the walk, and [`WalkError::TableAbsent`] says which are absent.
//!
//! A buffer outside guest memory does not end the walk: memory may have been unplugged under a
//! request, which must then be answered with an error. That requires the address for the answer, so
//! the chain's last writable buffer must be in memory if the answer is written there, as must rings
//! and tables.
//!
//! A chain that is longer than is served ([`Layout::bytes_max`]) does not end the walk either: the
//! specification allows 2^32 bytes, and QEMU answers requests it refuses with an I/O error. Of such
//! a chain the last writable byte is kept, for the answer.

use crate::memory::{DeviceMemory, LeaseSet, OutsideMemory, Span};
use pagetide_addr::{Access, Gpa};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, VolatileMemory};

/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u32 = 16;
/// Most descriptors in an indirect table, and buffers in a chain: the limit of QEMU and Linux
/// (`VIRTQUEUE_MAX_SIZE`). A chain through a larger ring may be as long as the ring. The descriptor
/// that refers to an indirect table is not a buffer.
pub const INDIRECT_MAX: u32 = 1024;

/// What the chains of a queue consist of besides data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes at the beginning that the device reads.
    pub header_bytes: u32,
    /// Where the device writes its answer.
    pub answer: AnswerPlace,
    /// Most bytes of data. Longer chains are answered with an error, before anything is leased.
    pub data_bytes_max: u64,
}

/// Where the answer to a chain is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerPlace {
    /// The last byte that the device may write.
    LastByte,
    /// Nowhere: the entry in the used ring says all.
    Nowhere,
}

impl Layout {
    /// Most bytes of a chain that is served, all buffers together: header, data and answer. A chain
    /// leases all its pages at once, so this is also how far one request can carry a VM past its
    /// limit.
    pub const fn bytes_max(self) -> u64 {
        let answer = match self.answer {
            AnswerPlace::LastByte => 1,
            AnswerPlace::Nowhere => 0,
        };
        self.data_bytes_max + self.header_bytes as u64 + answer
    }
}

/// Why a chain is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// A head or `next` that is not in the table.
    #[error("descriptor {index} is not in a table of {size}")]
    IndexOutOfRange {
        /// The index.
        index: u16,
        /// Descriptors in the table.
        size: u32,
    },
    /// More buffers than possible: the chain loops.
    #[error("the chain has more than {0} buffers, so it loops")]
    Loops(u32),
    /// An indirect table in an indirect table.
    #[error("an indirect descriptor table refers to another")]
    NestedTable,
    /// Both INDIRECT and NEXT, which a driver must not set together.
    #[error("an indirect descriptor has a successor")]
    IndirectNotLast,
    /// The indirect table's length is not a number of descriptors, or too large.
    #[error("an indirect descriptor table has {0} bytes")]
    TableLength(u32),
    /// An indirect descriptor, although the feature was not negotiated.
    #[error("an indirect descriptor was used without VIRTIO_F_INDIRECT_DESC")]
    IndirectNotNegotiated,
    /// A buffer or table outside guest memory.
    #[error(transparent)]
    Outside(#[from] OutsideMemory),
    /// A device-readable buffer after a device-writable one (virtio 1.2, 2.7.4.2).
    #[error("a device-readable buffer follows a device-writable one")]
    ReadableAfterWritable,
}

/// Why a walk stopped early.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WalkError {
    /// These parts of an indirect table are not all present: request their pages.
    TableAbsent(Vec<Span>),
    /// The chain is invalid.
    Broken(ChainError),
}

impl<E: Into<ChainError>> From<E> for WalkError {
    fn from(error: E) -> Self {
        Self::Broken(error.into())
    }
}

/// The buffers of a chain.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// Buffers that the device may read, in order.
    pub readable: Vec<Span>,
    /// Buffers that the device may write, in order.
    pub writable: Vec<Span>,
    /// The first buffer outside guest memory; it is in neither list.
    pub outside: Option<OutsideMemory>,
    /// Whether the chain is longer than is served; if so, the lists are incomplete.
    pub length: Length,
    /// Descriptors that were read, also of a walk that failed. The lists may have more parts, or none.
    pub descriptors: u32,
}

/// Whether a chain is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Length {
    #[default]
    Served,
    /// More than [`Layout::bytes_max`] bytes.
    TooLong,
}

impl Buffers {
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.outside = None;
        self.length = Length::Served;
        self.descriptors = 0;
    }

    /// Parts that were looked at: what a walk takes grows with them.
    pub fn parts(&self) -> u64 {
        let kept = self.readable.len() + self.writable.len();
        (kept as u64).max(self.descriptors.into())
    }
}

/// Whether the driver may use indirect tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Indirect {
    Negotiated,
    Absent,
}

/// The descriptor table of a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    pub at: Gpa,
    pub size: u16,
    pub indirect: Indirect,
    /// What its chains consist of.
    pub layout: Layout,
}

/// Walks the chain that starts at `head` and appends its buffers to `into`.
pub(crate) fn walk(
    memory: &DeviceMemory,
    table: Table,
    head: u16,
    into: &mut Buffers,
) -> Result<(), WalkError> {
    into.clear();
    let mut walk = Walk {
        memory,
        into,
        bytes: 0,
        bytes_max: table.layout.bytes_max(),
        steps_left: INDIRECT_MAX.max(u32::from(table.size)),
        end: Ok(()),
    };
    match walk.table(table.at, u32::from(table.size), head)? {
        None => {}
        Some(_) if table.indirect == Indirect::Absent => {
            return Err(ChainError::IndirectNotNegotiated.into());
        }
        Some(descriptor) => walk.indirect(&descriptor)?,
    }
    match table.layout.answer {
        AnswerPlace::LastByte => walk.end.map_err(WalkError::from),
        AnswerPlace::Nowhere => Ok(()),
    }
}

struct Walk<'a> {
    memory: &'a DeviceMemory,
    into: &'a mut Buffers,
    bytes: u64,
    bytes_max: u64,
    steps_left: u32,
    /// Whether the last buffer, which must hold the answer, is in memory.
    end: Result<(), OutsideMemory>,
}

impl Walk<'_> {
    /// Follows one table to its end; returns the indirect descriptor it ended with, if any.
    fn table(&mut self, at: Gpa, size: u32, head: u16) -> Result<Option<Descriptor>, ChainError> {
        let mut index = head;
        loop {
            if u32::from(index) >= size {
                return Err(ChainError::IndexOutOfRange { index, size });
            }
            let address = at.0 + u64::from(index) * u64::from(DESCRIPTOR_BYTES);
            self.into.descriptors += 1;
            let descriptor = self.descriptor(address)?;
            if descriptor.refers_to_indirect_table() {
                if descriptor.has_next() {
                    return Err(ChainError::IndirectNotLast);
                }
                return Ok(Some(descriptor));
            }
            self.steps_left = match self.steps_left.checked_sub(1) {
                Some(left) => left,
                None => return Err(ChainError::Loops(INDIRECT_MAX.max(size))),
            };
            self.buffer(&descriptor)?;
            if !descriptor.has_next() {
                return Ok(None);
            }
            index = descriptor.next();
        }
    }

    fn descriptor(&self, address: u64) -> Result<Descriptor, ChainError> {
        if let Some(slice) = self.memory.contiguous(address, DESCRIPTOR_BYTES)
            && let Ok(descriptor) = slice.get_ref::<Descriptor>(0)
        {
            return Ok(descriptor.load());
        }
        // An indirect table need not be aligned, so the end of a region may cut it anywhere.
        let read = self.memory.read_obj(GuestAddress(address));
        read.map_err(|_| outside(address, DESCRIPTOR_BYTES).into())
    }

    fn indirect(&mut self, descriptor: &Descriptor) -> Result<(), WalkError> {
        let bytes = descriptor.len();
        let count = bytes / DESCRIPTOR_BYTES;
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_BYTES) || count > INDIRECT_MAX {
            return Err(ChainError::TableLength(bytes).into());
        }
        let at = Gpa(descriptor.addr().0);
        let mut spans = Vec::new();
        self.memory.spans(at, bytes, &mut spans)?;
        let mut leases = LeaseSet::default();
        let all_there = spans
            .iter()
            .all(|span| leases.take(self.memory, *span, Access::Read));
        let walked = if all_there {
            self.table(at, count, 0).map_err(WalkError::from)
        } else {
            Err(WalkError::TableAbsent(spans))
        };
        leases.release(self.memory);
        match walked? {
            None => Ok(()),
            Some(_) => Err(ChainError::NestedTable.into()),
        }
    }

    fn buffer(&mut self, descriptor: &Descriptor) -> Result<(), ChainError> {
        let len = descriptor.len();
        self.bytes += u64::from(len);
        if self.bytes > self.bytes_max {
            self.into.length = Length::TooLong;
        }
        let list = if descriptor.is_write_only() {
            &mut self.into.writable
        } else if self.into.writable.is_empty() {
            &mut self.into.readable
        } else {
            return Err(ChainError::ReadableAfterWritable);
        };
        let before = list.len();
        self.end = self.memory.spans(Gpa(descriptor.addr().0), len, list);
        if let Err(outside) = self.end {
            list.truncate(before);
            self.into.outside.get_or_insert(outside);
        }
        if self.into.length == Length::TooLong {
            self.keep_last_byte();
        }
        Ok(())
    }

    /// Of a chain that is not served, only the address for the answer matters.
    fn keep_last_byte(&mut self) {
        let writable = &mut self.into.writable;
        let last = split_last_byte(writable);
        writable.clear();
        writable.extend(last);
    }
}

fn outside(address: u64, bytes: u32) -> OutsideMemory {
    OutsideMemory {
        gpa: Gpa(address),
        bytes: u64::from(bytes),
    }
}

/// Cuts the first `bytes` off `spans`; returns `None` (and cuts nothing) if there are fewer.
pub(crate) fn split_front(spans: &mut Vec<Span>, bytes: u32) -> Option<Vec<Span>> {
    let (mut left, mut whole) = (bytes, 0);
    for span in spans.iter() {
        if left < span.len {
            break;
        }
        left -= span.len;
        whole += 1;
    }
    if left > 0 && whole == spans.len() {
        return None;
    }
    let mut front: Vec<Span> = spans.drain(..whole).collect();
    if left > 0 {
        let cut = &mut spans[0];
        front.push(Span { len: left, ..*cut });
        cut.offset += u64::from(left);
        cut.len -= left;
    }
    Some(front)
}

/// Cuts the last byte off `spans`.
pub(crate) fn split_last_byte(spans: &mut Vec<Span>) -> Option<Span> {
    let last = spans.last_mut()?;
    let byte = Span {
        port: last.port,
        offset: last.offset + u64::from(last.len) - 1,
        len: 1,
    };
    last.len -= 1;
    if last.len == 0 {
        spans.pop();
    }
    Some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA_BYTES_MAX: u64 = 64 << 20;
    use crate::{memory::tests::Ram, regions::RegionTable};
    use pagetide_addr::FilePage;
    use pagetide_vpri::LookUp;
    use proptest::prelude::*;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const BASE: u64 = 0x10_0000;

    struct Fixture {
        memory: DeviceMemory,
        _ram: Ram,
    }

    fn fixture() -> Fixture {
        let ram = Ram::new(64);
        let mut table = RegionTable::default();
        table.add(ram.region(BASE, 64, 0)).unwrap();
        let memory = table.for_engine(0, LookUp::On).unwrap();
        Fixture { memory, _ram: ram }
    }

    fn put(
        memory: &DeviceMemory,
        at: u64,
        index: u64,
        (addr, len, flags, next): (u64, u32, u16, u16),
    ) {
        let bytes: Vec<u8> = [
            &addr.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ]
        .concat();
        memory
            .write_slice(&bytes, GuestAddress(at + 16 * index))
            .unwrap();
    }

    fn table() -> Table {
        Table {
            at: Gpa(BASE),
            size: 8,
            indirect: Indirect::Negotiated,
            layout: Layout {
                header_bytes: 16,
                answer: AnswerPlace::LastByte,
                data_bytes_max: DATA_BYTES_MAX,
            },
        }
    }

    fn broken(fixture: &Fixture, table: Table, head: u16) -> ChainError {
        match walk(&fixture.memory, table, head, &mut Buffers::default()) {
            Err(WalkError::Broken(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chain_of_three_gives_its_buffers_in_order() {
        let f = fixture();
        put(&f.memory, BASE, 3, (BASE + 0x1000, 16, NEXT, 1));
        put(&f.memory, BASE, 1, (BASE + 0x2000, 512, NEXT | WRITE, 0));
        put(&f.memory, BASE, 0, (BASE + 0x3000, 1, WRITE, 7));
        let mut buffers = Buffers::default();
        walk(&f.memory, table(), 3, &mut buffers).unwrap();
        assert_eq!(buffers.readable.len(), 1);
        assert_eq!(
            buffers.writable.iter().map(|s| s.len).collect::<Vec<_>>(),
            [512, 1]
        );
    }

    #[test]
    fn buffer_outside_memory_is_told_and_ends_no_walk_unless_it_is_the_last() {
        let f = fixture();
        put(&f.memory, BASE, 0, (BASE + 0x1000, 16, NEXT, 1));
        put(&f.memory, BASE, 1, (BASE - 0x1000, 512, NEXT | WRITE, 2));
        put(&f.memory, BASE, 2, (BASE + 0x3000, 1, WRITE, 0));
        let mut buffers = Buffers::default();
        assert_eq!(walk(&f.memory, table(), 0, &mut buffers), Ok(()));
        assert_eq!(buffers.outside, Some(outside(BASE - 0x1000, 512)));
        let offsets = |spans: &[Span]| spans.iter().map(|s| s.offset).collect::<Vec<_>>();
        assert_eq!(offsets(&buffers.readable), [0x1000]);
        assert_eq!(offsets(&buffers.writable), [0x3000]);
        // A buffer that is only half in memory does not count as part of it.
        put(
            &f.memory,
            BASE,
            1,
            (BASE + 63 * 4096, 8192, NEXT | WRITE, 2),
        );
        assert_eq!(walk(&f.memory, table(), 0, &mut buffers), Ok(()));
        assert_eq!(offsets(&buffers.writable), [0x3000]);
        put(&f.memory, BASE, 2, (BASE - 1, 1, WRITE, 0));
        let error = outside(BASE - 1, 1);
        assert_eq!(broken(&f, table(), 0), ChainError::Outside(error));
    }

    #[test]
    fn indirect_table_of_as_many_buffers_as_there_may_be_is_walked_to_its_end() {
        let f = fixture();
        let at = BASE + 0x8000;
        let fill = |count: u32| {
            put(&f.memory, BASE, 0, (at, count * 16, INDIRECT, 0));
            for index in 0..count {
                let next = if index + 1 < count { NEXT } else { 0 };
                let flags = if index == 0 { next } else { next | WRITE };
                let next = u16::try_from(index + 1).unwrap();
                put(&f.memory, at, u64::from(index), (BASE, 16, flags, next));
            }
        };
        let mut buffers = Buffers::default();
        fill(INDIRECT_MAX);
        assert_eq!(walk(&f.memory, table(), 0, &mut buffers), Ok(()));
        assert_eq!(buffers.readable.len(), 1);
        assert_eq!(buffers.writable.len(), 1023);
        fill(INDIRECT_MAX + 1);
        let error = ChainError::TableLength(16 * (INDIRECT_MAX + 1));
        assert_eq!(broken(&f, table(), 0), error);
        // One more descriptor in the table before it.
        fill(INDIRECT_MAX);
        put(&f.memory, BASE, 1, (BASE, 16, NEXT, 0));
        let error = ChainError::Loops(INDIRECT_MAX);
        assert_eq!(broken(&f, table(), 1), error);
    }

    #[test]
    fn chain_with_all_the_data_there_may_be_is_whole_and_of_a_longer_one_the_end_is_kept() {
        const PART: u32 = 64 * 4096;
        let f = fixture();
        let at = BASE + 0x8000;
        let parts = u32::try_from(DATA_BYTES_MAX / u64::from(PART)).unwrap();
        let fill = |last_part: u32| {
            let count = parts + 2;
            put(&f.memory, BASE, 0, (at, count * 16, INDIRECT, 0));
            put(&f.memory, at, 0, (BASE, 16, NEXT, 1));
            for index in 1..=parts {
                let len = if index == parts { last_part } else { PART };
                let next = u16::try_from(index + 1).unwrap();
                let part = (BASE, len, NEXT | WRITE, next);
                put(&f.memory, at, u64::from(index), part);
            }
            let status = (BASE + 77, 1, WRITE, 0);
            put(&f.memory, at, u64::from(parts + 1), status);
        };
        // All parts are in the same memory, and hold the tables: it is read, not written here.
        let mut buffers = Buffers::default();
        fill(PART);
        assert_eq!(walk(&f.memory, table(), 0, &mut buffers), Ok(()));
        assert_eq!(buffers.length, Length::Served);
        let written: u64 = buffers.writable.iter().map(|s| u64::from(s.len)).sum();
        assert_eq!(written, DATA_BYTES_MAX + 1);
        fill(PART + 1);
        // It also reaches one byte past the memory, which is reported as well.
        assert_eq!(walk(&f.memory, table(), 0, &mut buffers), Ok(()));
        assert_eq!(buffers.length, Length::TooLong);
        let status = Span {
            port: 0,
            offset: 77,
            len: 1,
        };
        assert_eq!(buffers.writable, [status]);
    }

    #[test]
    fn broken_chains_are_told_apart() {
        let f = fixture();
        assert!(matches!(
            broken(&f, table(), 8),
            ChainError::IndexOutOfRange { index: 8, size: 8 }
        ));
        put(&f.memory, BASE, 0, (BASE, 0, NEXT, 0));
        assert!(matches!(broken(&f, table(), 0), ChainError::Loops(_)));
        put(&f.memory, BASE, 0, (BASE, 16, NEXT, 9));
        assert!(matches!(
            broken(&f, table(), 0),
            ChainError::IndexOutOfRange { index: 9, .. }
        ));
        put(&f.memory, BASE, 0, (7, 16, 0, 0));
        assert!(matches!(broken(&f, table(), 0), ChainError::Outside(_)));
        put(&f.memory, BASE, 0, (BASE, 16, WRITE | NEXT, 1));
        put(&f.memory, BASE, 1, (BASE, 16, 0, 0));
        assert_eq!(broken(&f, table(), 0), ChainError::ReadableAfterWritable);
        put(&f.memory, BASE, 0, (BASE + 0x1000, 24, INDIRECT, 0));
        assert_eq!(broken(&f, table(), 0), ChainError::TableLength(24));
        put(&f.memory, BASE, 0, (BASE + 0x1000, 16, INDIRECT | NEXT, 1));
        assert_eq!(broken(&f, table(), 0), ChainError::IndirectNotLast);
        put(&f.memory, BASE, 0, (BASE + 0x1000, 16, INDIRECT, 0));
        put(&f.memory, BASE + 0x1000, 0, (BASE, 16, INDIRECT, 0));
        assert_eq!(broken(&f, table(), 0), ChainError::NestedTable);
        let direct_only = Table {
            indirect: Indirect::Absent,
            ..table()
        };
        assert_eq!(
            broken(&f, direct_only, 0),
            ChainError::IndirectNotNegotiated
        );
    }

    #[test]
    fn absent_indirect_table_is_named_and_leaves_no_lease() {
        let f = fixture();
        put(&f.memory, BASE, 0, (BASE + 0x1000, 32, INDIRECT, 0));
        put(&f.memory, BASE + 0x1000, 0, (BASE, 16, NEXT, 1));
        put(&f.memory, BASE + 0x1000, 1, (BASE, 1, WRITE, 0));
        let mut buffers = Buffers::default();
        walk(&f.memory, table(), 0, &mut buffers).unwrap();
        assert_eq!(buffers.writable.len(), 1);
        let span = Span {
            port: 0,
            offset: 0x1000,
            len: 32,
        };
        let attributes = f.memory.port(span).domain().attributes();
        let section = FilePage(1).section();
        let page = pagetide_addr::FilePageSet::of_range(section, FilePage(1).single());
        assert!(attributes.unmap(section, &page));
        assert_eq!(
            walk(&f.memory, table(), 0, &mut buffers),
            Err(WalkError::TableAbsent(vec![span]))
        );
        assert!(!attributes.is_any_leased());
    }

    #[test]
    fn spans_are_cut_at_any_byte() {
        let span = |offset, len| Span {
            port: 0,
            offset,
            len,
        };
        let mut spans = vec![span(0, 10), span(100, 10)];
        assert_eq!(split_front(&mut spans, 21), None);
        assert_eq!(
            split_front(&mut spans, 16),
            Some(vec![span(0, 10), span(100, 6)])
        );
        assert_eq!(spans, [span(106, 4)]);
        assert_eq!(split_last_byte(&mut spans), Some(span(109, 1)));
        assert_eq!(split_front(&mut spans, 3), Some(vec![span(106, 3)]));
        assert!(spans.is_empty());
        assert_eq!(split_last_byte(&mut spans), None);
    }

    proptest! {
        #[test]
        fn any_bytes_in_the_tables_give_buffers_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 16 * 8),
            inner in proptest::collection::vec(any::<u8>(), 16 * 8),
            tame in any::<bool>(),
            head in 0_u16..12,
        ) {
            let f = fixture();
            let mut bytes = bytes;
            if tame {
                // Addresses within memory, so that walks get past the first descriptor.
                for descriptor in bytes.chunks_mut(16) {
                    descriptor[..8].copy_from_slice(&(BASE + 0x1000).to_le_bytes());
                    descriptor[10] = 0;
                    descriptor[11] = 0;
                    descriptor[14] &= 7;
                    descriptor[15] = 0;
                }
            }
            f.memory.write_slice(&bytes, GuestAddress(BASE)).unwrap();
            f.memory.write_slice(&inner, GuestAddress(BASE + 0x1000)).unwrap();
            let mut buffers = Buffers::default();
            if walk(&f.memory, table(), head, &mut buffers).is_ok() {
                let all: u64 = buffers.readable.iter().chain(&buffers.writable)
                    .map(|s| u64::from(s.len)).sum();
                prop_assert!(u32::try_from(all).is_ok());
            }
            let span = Span { port: 0, offset: 0, len: 1 };
            prop_assert!(!f.memory.port(span).domain().attributes().is_any_leased());
        }
    }
}
