// SPDX-License-Identifier: Apache-2.0
//! Which sectors of a disk hold what: rooms for extents, in segments of VMs.
//!
//! # Idea
//! ```text
//!   disk      │ header │ segment 1 │ segment 2 │ segment 3 │ …      16 MiB each
//!                        VM A        free        VM B
//!   segment   │▓▓▓▓▓▓▓▓│    │▓▓ ▓▓│          │▓▓▓▓▓▓│             extents; sectors of 512 bytes
//! ```
//! A segment belongs to one VM at a time, so the end of a VM frees whole segments. Within a segment a map
//! has one bit for each sector. A batch goes to one free run if there is one in the VM's segments; if not,
//! to several that are long enough to be worth an extent; if not, into a new segment. Sectors are freed page
//! by page, and freed sectors are used again.
//!
//! # Costs
//! Each segment of a VM is listed under the length of its longest free run, which is exact. So a batch finds
//! its segment by one look-up, and the run by one scan of a map of 512 words; after it one more scan finds
//! the run that is now the longest. To free a page looks at the words around it. Memory: a map of 4 KiB for
//! each segment in use (256 MiB for 1 TiB of stored pages, 1/4,096) and 24 bytes for each segment of the disk.
//!
//! # Recovery
//! Nothing of this is on the disk. A pool has the VM's extents ([`crate::table`]), and its words name the
//! pages. [`Sectors::hold`] gives a VM the segments of its extents, as a whole: so nothing is written over
//! while the VM still waits to be recovered. Then [`Sectors::recover`] frees the sectors that no word names.
//! All VMs must be held before the first room is taken.

mod refusal;

pub use refusal::{NoRoom, SectorError};

use crate::batch::{EXTENT_PAGES_MAX, EXTENT_SECTORS_MAX};
use crate::bitmap::{BlockSize, Run, SEGMENT_SECTORS, SectorMap};
use crate::table::ExtentEntry;
use crate::{Room, SectorNo, TierKind, VmId};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// Bytes of a segment.
pub const SEGMENT_BYTES: u64 = SEGMENT_SECTORS as u64 * crate::batch::SECTOR_BYTES as u64;
/// A batch is rather split into runs at least this long than put into a new segment.
const SPLIT_SECTORS: u32 = 512;
/// The least that is worth an extent once the disk has no free segment.
const RUN_SECTORS_MIN: u32 = 64;
/// Empty segments that a VM keeps, so that it does not give one back and take it again in turns.
const EMPTY_KEPT: usize = 1;
/// Segments by the length of their longest free run.
type ByLongest = BTreeSet<(u32, SegmentNo)>;

/// A segment of a disk. Number 0 has the header, and is given to nobody.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentNo(pub u32);

impl SegmentNo {
    /// Its first sector.
    #[must_use]
    pub const fn start(self) -> SectorNo {
        SectorNo(self.0 as u64 * SEGMENT_SECTORS as u64)
    }
}

struct Owned {
    vm: VmId,
    map: SectorMap,
    used: u32,
    longest: u32,
}

enum Segment {
    Free,
    /// Its space is being allocated, or returned to the file system.
    InTransit,
    Owned(Box<Owned>),
    /// Nobody is known to have it, and somebody may.
    Kept,
}

/// What becomes of segments that nobody is known to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unknown {
    AreFree,
    AreKept,
}

/// The sectors of a disk.
pub struct Sectors {
    block: BlockSize,
    segments: Vec<Segment>,
    /// Where the disk ends. Segments from this one on are only held: no page can be there.
    end: SegmentNo,
    /// Segments from this one on are only held, and not given out: the operator has lowered the limit.
    limit: SegmentNo,
    free: BTreeSet<SegmentNo>,
    vms: HashMap<VmId, ByLongest>,
    used_sectors: u64,
    unknown: Unknown,
}

impl Sectors {
    /// A disk of so many segments, header included, that nobody uses. Those from `limit` on are not given
    /// out.
    #[must_use]
    pub fn new(segments: u32, limit: SegmentNo, block: BlockSize) -> Self {
        Self {
            block,
            segments: (0..segments).map(|_| Segment::Free).collect(),
            end: SegmentNo(segments),
            limit,
            free: (1..segments.min(limit.0)).map(SegmentNo).collect(),
            vms: HashMap::new(),
            used_sectors: 0,
            unknown: Unknown::AreFree,
        }
    }

    /// There are VMs whose extents are not known: no segment that nobody is known to have is given out or given back.
    pub fn keep_all(&mut self) {
        self.unknown = Unknown::AreKept;
        self.free.clear();
        for slot in self.segments.iter_mut().skip(1) {
            if matches!(slot, Segment::Free) {
                *slot = Segment::Kept;
            }
        }
    }

    /// True if nobody has anything here, nor may have.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.used_sectors == 0 && self.unknown == Unknown::AreFree
    }

    /// The disk has at least so many segments: those that are new are not given out.
    pub fn stretch(&mut self, segments: u32) {
        self.end = self.end.max(SegmentNo(segments));
        self.lengthen(segments);
    }

    fn lengthen(&mut self, segments: u32) {
        let segments = self.segments.len().max(segments as usize);
        let unknown = self.unknown;
        self.segments.resize_with(segments, || match unknown {
            Unknown::AreFree => Segment::Free,
            Unknown::AreKept => Segment::Kept,
        });
    }

    /// The same pages on a disk that has become known: so many segments, of which those from `limit` on are not
    /// given out. What VMs have beyond its end they keep, and nothing is put there: tables of extents may be
    /// damaged, and one of them must not cost the pages of all others.
    ///
    /// # Errors
    /// [`SectorError::Outside`]: VMs have segments, and all of them are beyond its end.
    pub fn moved_to(
        &self,
        segments: u32,
        limit: SegmentNo,
        block: BlockSize,
    ) -> Result<Self, SectorError> {
        let mut moved = Self::new(segments, limit.min(SegmentNo(segments)), block);
        let mut fits = false;
        let mut beyond = None;
        for (number, slot) in (0..).map(SegmentNo).zip(&self.segments) {
            if !matches!(slot, Segment::Free | Segment::Kept) {
                moved.lengthen(number.0 + 1);
            }
            match slot {
                Segment::Free | Segment::Kept => {}
                Segment::InTransit => {
                    moved.free.remove(&number);
                    moved.segments[number.0 as usize] = Segment::InTransit;
                }
                Segment::Owned(owned) => {
                    match number < moved.end {
                        true => fits = true,
                        false => beyond = beyond.or(Some(number)),
                    }
                    moved.free.remove(&number);
                    moved.give(owned.vm, number);
                    moved.change(number, |to| {
                        to.map = owned.map.in_blocks(block);
                        to.used = owned.used;
                        to.longest = to.map.longest_free();
                    });
                    moved.used_sectors += u64::from(owned.used);
                }
            }
        }
        if self.unknown == Unknown::AreKept {
            moved.keep_all();
        }
        match beyond {
            Some(number) if !fits => {
                let (start, sectors) = (number.start(), 0);
                Err(SectorError::Outside { start, sectors })
            }
            _ => Ok(moved),
        }
    }

    /// Segments that VMs have beyond the end of the disk.
    #[must_use]
    pub fn beyond_end(&self) -> usize {
        let beyond = self.segments.iter().skip(self.end.0 as usize);
        let is_owned = |slot: &&Segment| matches!(slot, Segment::Owned(_));
        beyond.filter(is_owned).count()
    }

    /// Room for pages of so many sectors each, in order.
    ///
    /// # Errors
    /// [`NoRoom`]; nothing is taken then.
    pub fn take(&mut self, vm: VmId, pages: &[u16]) -> Result<Vec<Room>, NoRoom> {
        let impossible = |sectors: &u16| *sectors == 0 || *sectors > EXTENT_SECTORS_MAX;
        if pages.is_empty() || pages.iter().any(impossible) {
            return Err(NoRoom::Impossible);
        }
        let mut rooms = Vec::new();
        let mut rest = pages;
        while !rest.is_empty() {
            match self.take_one(vm, rest) {
                Ok(room) => {
                    rest = &rest[usize::from(room.pages)..];
                    rooms.push(room);
                }
                Err(no_room) => {
                    for room in rooms {
                        self.put_back(room);
                    }
                    return Err(no_room);
                }
            }
        }
        Ok(rooms)
    }

    /// Room for as many of the first pages as one extent can have.
    fn take_one(&mut self, vm: VmId, pages: &[u16]) -> Result<Room, NoRoom> {
        let whole = fitting(pages, u32::from(EXTENT_SECTORS_MAX));
        let wanted = self.whole_blocks(whole.sectors);
        let list = self.vms.entry(vm).or_default();
        // The segment whose longest run is the shortest that will do.
        if let Some((_, segment)) = list.range((wanted, SegmentNo(0))..).next() {
            let segment = *segment;
            return Ok(self.place(segment, whole));
        }
        let least = match self.free.is_empty() {
            true => RUN_SECTORS_MIN,
            false => SPLIT_SECTORS,
        };
        match list.last() {
            Some((longest, segment)) if *longest >= least => {
                let (longest, segment) = (*longest, *segment);
                Ok(self.place(segment, fitting(pages, longest)))
            }
            _ if self.free.is_empty() => Err(NoRoom::Full),
            _ => Err(NoRoom::Segment),
        }
    }

    fn whole_blocks(&self, sectors: u32) -> u32 {
        sectors.next_multiple_of(self.block.sectors())
    }

    fn place(&mut self, segment: SegmentNo, fitting: Fitting) -> Room {
        let wanted = self.whole_blocks(fitting.sectors);
        let start = self.change(segment, |owned| {
            let found = owned.map.first_free(wanted);
            let run = Run {
                start: found.map_or(0, |run| run.start),
                sectors: fitting.sectors,
            };
            debug_assert!(found.is_some(), "the longest run is known");
            owned.map.set(run);
            owned.used += run.sectors;
            owned.longest = owned.map.longest_free();
            run.start
        });
        self.used_sectors += u64::from(fitting.sectors);
        Room {
            kind: TierKind::Disk,
            start: segment.start().plus(u64::from(start.unwrap_or(0))),
            sectors: u16::try_from(fitting.sectors).unwrap_or(EXTENT_SECTORS_MAX),
            pages: fitting.pages,
        }
    }

    /// Takes back a room that was just given out.
    fn put_back(&mut self, room: Room) {
        let (segment, start) = split(room.start);
        let sectors = u32::from(room.sectors);
        self.change(segment, |owned| {
            let run = Run { start, sectors };
            owned.map.clear(run);
            owned.used -= sectors;
            owned.longest = owned.longest.max(owned.map.longest_touching(run));
        });
        self.used_sectors -= u64::from(sectors);
    }

    /// Changes an owned segment, and its place in its VM's list.
    fn change<T>(&mut self, segment: SegmentNo, act: impl FnOnce(&mut Owned) -> T) -> Option<T> {
        let Some(Segment::Owned(owned)) = self.segments.get_mut(segment.0 as usize) else {
            return None;
        };
        let before = owned.longest;
        let result = act(owned);
        if segment >= self.end {
            // Nothing is put there.
            owned.longest = 0;
        }
        if owned.longest != before {
            let list = self.vms.entry(owned.vm).or_default();
            list.remove(&(before, segment));
            list.insert((owned.longest, segment));
        }
        Some(result)
    }

    /// Frees sectors that a page of `vm` had. Returns a segment that the VM does not need any more: it is in
    /// transit, until its space was returned to the file system and [`Self::end_transit`] was called.
    ///
    /// # Errors
    /// [`SectorError`]; nothing is freed then.
    pub fn free(
        &mut self,
        vm: VmId,
        start: SectorNo,
        sectors: u16,
    ) -> Result<Option<SegmentNo>, SectorError> {
        let (segment, run) = self.run_of(vm, start, sectors)?;
        let freed = self.change(segment, |owned| {
            if owned.map.used_in(run) < run.sectors {
                return false;
            }
            owned.map.clear(run);
            owned.used -= run.sectors;
            owned.longest = owned.longest.max(owned.map.longest_touching(run));
            true
        });
        if freed != Some(true) {
            return Err(SectorError::NotUsed { start, sectors });
        }
        self.used_sectors -= u64::from(sectors);
        Ok(self.let_go_if_empty(vm, segment))
    }

    fn let_go_if_empty(&mut self, vm: VmId, segment: SegmentNo) -> Option<SegmentNo> {
        let list = self.vms.get_mut(&vm)?;
        let empty = (SEGMENT_SECTORS, SegmentNo(0));
        if list.range(empty..).count() <= EMPTY_KEPT || !list.remove(&(SEGMENT_SECTORS, segment)) {
            return None;
        }
        self.segments[segment.0 as usize] = Segment::InTransit;
        Some(segment)
    }

    fn run_of(
        &self,
        vm: VmId,
        start: SectorNo,
        sectors: u16,
    ) -> Result<(SegmentNo, Run), SectorError> {
        let (segment, run) = self.run_within(start, sectors)?;
        match &self.segments[segment.0 as usize] {
            Segment::Owned(owned) if owned.vm == vm => Ok((segment, run)),
            _ => Err(SectorError::NotOurs(start)),
        }
    }

    /// The same sectors, whoever has them.
    fn run_within(&self, start: SectorNo, sectors: u16) -> Result<(SegmentNo, Run), SectorError> {
        let (segment, first) = split(start);
        let run = Run {
            start: first,
            sectors: u32::from(sectors),
        };
        let inside = run.start + run.sectors <= SEGMENT_SECTORS && sectors > 0;
        let far = start.0 / u64::from(SEGMENT_SECTORS) >= self.segments.len() as u64;
        if !inside || far || sectors > EXTENT_SECTORS_MAX {
            return Err(SectorError::Outside { start, sectors });
        }
        Ok((segment, run))
    }

    /// A free segment for a VM that needs one. It is in transit until its space has been allocated.
    pub fn begin_segment(&mut self) -> Option<SegmentNo> {
        let segment = self.free.pop_first()?;
        self.segments[segment.0 as usize] = Segment::InTransit;
        Some(segment)
    }

    /// The space of a segment in transit has been allocated for `vm`.
    pub fn add_segment(&mut self, vm: VmId, segment: SegmentNo) {
        debug_assert!(matches!(
            self.segments[segment.0 as usize],
            Segment::InTransit
        ));
        self.give(vm, segment);
    }

    fn give(&mut self, vm: VmId, segment: SegmentNo) -> u32 {
        // Nothing is put beyond the end.
        let longest = match segment < self.end {
            true => SEGMENT_SECTORS,
            false => 0,
        };
        self.segments[segment.0 as usize] = Segment::Owned(Box::new(Owned {
            vm,
            map: SectorMap::new(self.block),
            used: 0,
            longest,
        }));
        self.vms.entry(vm).or_default().insert((longest, segment));
        longest
    }

    /// A segment in transit is free: its space could not be allocated, or was returned. A number that no segment
    /// has is none.
    pub fn end_transit(&mut self, segment: SegmentNo) {
        let Some(slot) = self.segments.get_mut(segment.0 as usize) else {
            return;
        };
        debug_assert!(matches!(slot, Segment::InTransit));
        *slot = Segment::Free;
        if segment < self.limit {
            self.free.insert(segment);
        }
    }

    /// A VM has ended. Its segments are in transit; their space may be returned.
    pub fn end_vm(&mut self, vm: VmId) -> Vec<SegmentNo> {
        let list = self.vms.remove(&vm).unwrap_or_default();
        let segments: Vec<SegmentNo> = list.into_iter().map(|(_, segment)| segment).collect();
        for segment in &segments {
            let slot = &mut self.segments[segment.0 as usize];
            if let Segment::Owned(owned) = std::mem::replace(slot, Segment::InTransit) {
                self.used_sectors -= u64::from(owned.used);
            }
        }
        segments
    }

    /// Gives a VM that a dead daemon left the segments of its extents, all of whose sectors count as used
    /// until [`Self::recover`].
    ///
    /// # Errors
    /// [`SectorError`] of the first entry that cannot be; what came before it is held.
    pub fn hold(
        &mut self,
        vm: VmId,
        entries: impl IntoIterator<Item = ExtentEntry>,
    ) -> Result<(), SectorError> {
        for ExtentEntry { start, sectors, .. } in entries {
            let (segment, _) = split(start);
            let slot = self.segments.get(segment.0 as usize);
            if segment > SegmentNo(0) && matches!(slot, Some(Segment::Free | Segment::Kept)) {
                self.free.remove(&segment);
                self.give(vm, segment);
            }
            let (segment, run) = self.run_of(vm, start, sectors)?;
            let more = self.change(segment, |owned| {
                let more = run.sectors - owned.map.used_in(run);
                owned.map.set(run);
                owned.used += more;
                owned.longest = owned.map.longest_free();
                more
            });
            self.used_sectors += u64::from(more.unwrap_or(0));
        }
        Ok(())
    }

    /// The pages of a held VM, as its words name them: first sector and sectors of each. All other sectors of
    /// its segments are free then. Returns segments without any page, which are in transit.
    ///
    /// # Errors
    /// [`SectorError`] of the first page that cannot be. The VM is to be held again, or ended.
    pub fn recover(
        &mut self,
        vm: VmId,
        pages: impl IntoIterator<Item = (SectorNo, u16)>,
    ) -> Result<Vec<SegmentNo>, SectorError> {
        let mut list = self.vms.get(&vm).cloned().unwrap_or_default();
        let block = self.block;
        for (_, segment) in &list {
            let before = self.change(*segment, |owned| {
                owned.map = SectorMap::new(block);
                owned.longest = SEGMENT_SECTORS;
                std::mem::take(&mut owned.used)
            });
            self.used_sectors -= u64::from(before.unwrap_or(0));
        }
        for (start, sectors) in pages {
            // Nothing is given away for a page that cannot be.
            let (segment, _) = self.run_within(start, sectors)?;
            if matches!(self.segments[segment.0 as usize], Segment::Kept) {
                list.insert((self.give(vm, segment), segment));
            }
            let (segment, run) = self.run_of(vm, start, sectors)?;
            let fresh = self.change(segment, |owned| {
                let fresh = owned.map.used_in(run) == 0;
                if fresh {
                    owned.map.set(run);
                    owned.used += run.sectors;
                }
                fresh
            });
            if fresh != Some(true) {
                return Err(SectorError::UsedTwice { start, sectors });
            }
            self.used_sectors += u64::from(sectors);
        }
        let mut empty = Vec::new();
        for (_, segment) in list {
            self.change(segment, |owned| owned.longest = owned.map.longest_free());
            empty.extend(self.let_go_if_empty(vm, segment));
        }
        Ok(empty)
    }

    /// Runs of segments of the disk that nobody has.
    pub fn free_runs(&self) -> Vec<Range<SegmentNo>> {
        let mut runs: Vec<Range<SegmentNo>> = Vec::new();
        let there = self.segments.iter().take(self.end.0 as usize);
        for (segment, slot) in (0..).map(SegmentNo).zip(there).skip(1) {
            let next = SegmentNo(segment.0 + 1);
            match (slot, runs.last_mut()) {
                (Segment::Free, Some(run)) if run.end == segment => run.end = next,
                (Segment::Free, _) => runs.push(segment..next),
                _ => {}
            }
        }
        runs
    }

    /// Bytes of used sectors.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_sectors * crate::batch::SECTOR_BYTES as u64
    }

    /// Segments that a VM has, those that it does not fill included.
    #[must_use]
    pub fn segments_of(&self, vm: VmId) -> usize {
        self.vms.get(&vm).map_or(0, BTreeSet::len)
    }

    /// True if a new segment could be given out.
    #[must_use]
    pub fn has_free_segment(&self) -> bool {
        !self.free.is_empty()
    }
}

/// The first pages that fit in so many sectors and in one extent.
#[derive(Clone, Copy)]
struct Fitting {
    pages: u16,
    sectors: u32,
}

fn fitting(pages: &[u16], room_sectors: u32) -> Fitting {
    let mut fitting = Fitting {
        pages: 0,
        sectors: 0,
    };
    for sectors in pages.iter().take(EXTENT_PAGES_MAX) {
        let with = fitting.sectors + u32::from(*sectors);
        if with > room_sectors.min(u32::from(EXTENT_SECTORS_MAX)) {
            break;
        }
        fitting = Fitting {
            pages: fitting.pages + 1,
            sectors: with,
        };
    }
    fitting
}

fn split(sector: SectorNo) -> (SegmentNo, u32) {
    let size = u64::from(SEGMENT_SECTORS);
    let segment = u32::try_from(sector.0 / size).unwrap_or(u32::MAX);
    let within = u32::try_from(sector.0 % size).unwrap_or(0);
    (SegmentNo(segment), within)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "random numbers are cut")]

    use super::*;
    use crate::Version;
    use pagetide_random::SplitMix64;

    const SEGMENTS: u32 = 7;
    const VMS: u64 = 3;

    #[derive(Clone)]
    struct Extent {
        entry: ExtentEntry,
        pages: Vec<(SectorNo, u16)>,
    }

    /// What is stored, naively, beside the real thing.
    struct Model {
        block: BlockSize,
        sectors: Sectors,
        extents: Vec<(VmId, Extent)>,
        /// For each sector of the disk, whose it is.
        used: Vec<Option<VmId>>,
        random: SplitMix64,
    }

    impl Model {
        fn new(block: BlockSize, seed: u64) -> Self {
            Self {
                block,
                sectors: Sectors::new(SEGMENTS, SegmentNo(SEGMENTS), block),
                extents: Vec::new(),
                used: vec![None; (SEGMENTS * SEGMENT_SECTORS) as usize],
                random: SplitMix64::new(seed),
            }
        }

        fn mark(&mut self, start: SectorNo, sectors: u16, from: Option<VmId>, to: Option<VmId>) {
            let first = start.0 as usize;
            for sector in &mut self.used[first..first + usize::from(sectors)] {
                assert_eq!(*sector, from);
                *sector = to;
            }
        }

        fn vm(&mut self) -> VmId {
            VmId(u128::from(self.random.below(VMS)))
        }

        /// The longest run of free blocks in segments where `vm` is alone.
        fn longest(&self, vm: VmId) -> usize {
            let block = self.block.sectors() as usize;
            let mut longest = 0;
            for segment in self.used.chunks(SEGMENT_SECTORS as usize).skip(1) {
                if !segment.iter().flatten().any(|owner| *owner == vm) {
                    continue;
                }
                let mut run = 0;
                for chunk in segment.chunks(block) {
                    run = if chunk.iter().all(Option::is_none) {
                        run + block
                    } else {
                        0
                    };
                    longest = longest.max(run);
                }
            }
            longest
        }

        fn take(&mut self) {
            let vm = self.vm();
            let count = 1 + self.random.index(512);
            let pages: Vec<u16> = (0..count)
                .map(|_| 1 + self.random.below(9) as u16)
                .collect();
            let rooms = loop {
                match self.sectors.take(vm, &pages) {
                    Ok(rooms) => break rooms,
                    Err(NoRoom::Segment) => {
                        let segment = self.sectors.begin_segment().expect("there is one");
                        if self.random.below(10) == 0 {
                            return self.sectors.end_transit(segment);
                        }
                        self.sectors.add_segment(vm, segment);
                    }
                    Err(NoRoom::Full) => {
                        let wanted: usize = pages.iter().map(|sectors| usize::from(*sectors)).sum();
                        assert!(!self.sectors.has_free_segment());
                        assert!(self.longest(vm) < wanted.next_multiple_of(8), "{wanted}");
                        return;
                    }
                    Err(NoRoom::Impossible) => panic!("these are pages"),
                }
            };
            let mut rest = &pages[..];
            for room in rooms {
                let entry = ExtentEntry::new(Version(1), room);
                let (mine, others) = rest.split_at(usize::from(room.pages));
                rest = others;
                assert_eq!(mine.iter().sum::<u16>(), room.sectors);
                assert!(room.start.0.is_multiple_of(self.block.sectors().into()));
                let segments = [room.start.0, room.start.0 + u64::from(room.sectors) - 1]
                    .map(|sector| sector / u64::from(SEGMENT_SECTORS));
                assert_eq!(segments[0], segments[1]);
                self.mark(room.start, room.sectors, None, Some(vm));
                // Nothing else is in its last block.
                let end = room.start.0 + u64::from(room.sectors);
                for sector in end..end.next_multiple_of(self.block.sectors().into()) {
                    assert_eq!(self.used[sector as usize], None);
                }
                let mut at = room.start;
                let pages = mine
                    .iter()
                    .map(|sectors| {
                        let start = at;
                        at = at.plus(u64::from(*sectors));
                        (start, *sectors)
                    })
                    .collect();
                self.extents.push((vm, Extent { entry, pages }));
            }
            assert!(rest.is_empty());
        }

        fn free_some(&mut self) {
            for _ in 0..self.random.index(400) {
                if self.extents.is_empty() {
                    return;
                }
                let index = self.random.index(self.extents.len());
                let (vm, extent) = &mut self.extents[index];
                let vm = *vm;
                let page = self.random.index(extent.pages.len());
                let (start, sectors) = extent.pages.swap_remove(page);
                if extent.pages.is_empty() {
                    self.extents.swap_remove(index);
                }
                let emptied = self.sectors.free(vm, start, sectors).unwrap();
                self.mark(start, sectors, Some(vm), None);
                let again = self.sectors.free(vm, start, sectors);
                assert!(again.is_err(), "freed twice");
                if let Some(segment) = emptied {
                    self.assert_empty(segment);
                    self.sectors.end_transit(segment);
                }
            }
        }

        fn assert_empty(&self, segment: SegmentNo) {
            let first = segment.start().0 as usize;
            let part = &self.used[first..first + SEGMENT_SECTORS as usize];
            assert!(part.iter().all(Option::is_none));
        }

        fn end_vm(&mut self) {
            let vm = self.vm();
            for sector in &mut self.used {
                sector.take_if(|owner| *owner == vm);
            }
            self.extents.retain(|(owner, _)| *owner != vm);
            for segment in self.sectors.end_vm(vm) {
                self.assert_empty(segment);
                self.sectors.end_transit(segment);
            }
            assert_eq!(self.sectors.segments_of(vm), 0);
        }

        fn die_and_recover(&mut self) {
            self.sectors = Sectors::new(SEGMENTS, SegmentNo(SEGMENTS), self.block);
            let of = |extents: &[(VmId, Extent)], vm: VmId| -> Vec<Extent> {
                let mine = extents.iter().filter(|(owner, _)| *owner == vm);
                mine.map(|(_, extent)| extent.clone()).collect()
            };
            for vm in (0..VMS).map(|vm| VmId(vm.into())) {
                let entries = of(&self.extents, vm).into_iter().map(|extent| extent.entry);
                self.sectors.hold(vm, entries).unwrap();
            }
            for vm in (0..VMS).map(|vm| VmId(vm.into())) {
                let pages = of(&self.extents, vm)
                    .into_iter()
                    .flat_map(|extent| extent.pages);
                let empty = self.sectors.recover(vm, pages).unwrap();
                assert!(empty.is_empty(), "only extents with pages were held");
            }
        }
    }

    #[test]
    fn rooms_and_frees_follow_a_naive_model_through_deaths_and_full_disks() {
        for block in [BlockSize::Bytes512, BlockSize::Bytes4096] {
            let mut model = Model::new(block, 5);
            let mut full = 0;
            for _ in 0..1500 {
                match model.random.below(20) {
                    0 => model.die_and_recover(),
                    1 if model.random.below(8) == 0 => model.end_vm(),
                    2..=7 => model.free_some(),
                    _ => model.take(),
                }
                full += u32::from(!model.sectors.has_free_segment());
                let used = model.used.iter().flatten().count() as u64;
                assert_eq!(model.sectors.used_bytes(), used * 512);
            }
            assert!(full > 100, "the disk was full {full} times only");
        }
    }

    #[test]
    fn full_disk_is_filled_to_the_last_runs_worth_an_extent() {
        let mut sectors = Sectors::new(2, SegmentNo(2), BlockSize::Bytes512);
        let vm = VmId(1);
        assert_eq!(sectors.take(vm, &[8]), Err(NoRoom::Segment));
        let segment = sectors.begin_segment().unwrap();
        assert_eq!(sectors.take(vm, &[8]), Err(NoRoom::Full), "in transit");
        sectors.add_segment(vm, segment);
        let rooms: Vec<Room> = (0..8)
            .flat_map(|_| sectors.take(vm, &[8; 512]).unwrap())
            .collect();
        assert_eq!(sectors.take(vm, &[1]), Err(NoRoom::Full));
        assert_eq!(sectors.used_bytes(), SEGMENT_BYTES);
        // Every other page goes: runs of 8 sectors, of which none is worth an extent of many pages.
        for room in &rooms {
            for page in (0..512).step_by(2) {
                let start = room.start.plus(page * 8);
                assert_eq!(sectors.free(vm, start, 8), Ok(None));
            }
        }
        assert_eq!(sectors.take(vm, &[8; 2]), Err(NoRoom::Full));
        assert_eq!(sectors.take(vm, &[8]).unwrap().len(), 1, "it fits as it is");
        // Two runs of 64 sectors: a batch of 16 pages is split.
        for page in (1..8).chain(513..520) {
            let start = rooms[0].start.plus(page * 8);
            if page % 2 == 1 {
                assert_eq!(sectors.free(vm, start, 8), Ok(None));
            }
        }
        let split = sectors.take(vm, &[8; 14]).unwrap();
        assert_eq!(split.iter().map(|room| room.pages).sum::<u16>(), 14);
        assert_eq!(split.len(), 2);
    }

    #[test]
    fn empty_segments_go_but_for_one() {
        let mut sectors = Sectors::new(4, SegmentNo(4), BlockSize::Bytes512);
        let vm = VmId(1);
        let mut rooms = Vec::new();
        while rooms.len() < 24 {
            match sectors.take(vm, &[8; 512]) {
                Ok(more) => rooms.extend(more),
                Err(_) => {
                    let segment = sectors.begin_segment().unwrap();
                    sectors.add_segment(vm, segment);
                }
            }
        }
        assert_eq!(sectors.segments_of(vm), 3);
        let freed: Vec<SegmentNo> = rooms
            .iter()
            .filter_map(|room| sectors.free(vm, room.start, room.sectors).unwrap())
            .collect();
        assert_eq!((freed.len(), sectors.segments_of(vm)), (2, 1));
        assert_eq!(sectors.used_bytes(), 0);
        for segment in freed {
            sectors.end_transit(segment);
        }
        assert!(sectors.has_free_segment());
    }

    #[test]
    fn segments_of_vms_that_are_not_known_are_neither_given_out_nor_back() {
        let (known, unknown, new) = (VmId(1), VmId(2), VmId(3));
        let entry = |segment: u32| ExtentEntry {
            start: SegmentNo(segment).start(),
            sectors: 8,
            version: Version(1),
        };
        let mut sectors = Sectors::new(5, SegmentNo(5), BlockSize::Bytes512);
        sectors.hold(known, [entry(1)]).unwrap();
        assert!(!sectors.free_runs().is_empty());
        sectors.keep_all();
        // What is held afterwards was kept.
        sectors.hold(known, [entry(2)]).unwrap();
        let mut sectors = sectors
            .moved_to(6, SegmentNo(6), BlockSize::Bytes512)
            .unwrap();
        assert_eq!(sectors.free_runs(), []);
        assert_eq!(sectors.take(new, &[8]), Err(NoRoom::Full));
        assert_eq!(sectors.begin_segment(), None);
        let first = |segment: u32| (SegmentNo(segment).start(), 8_u16);
        assert_eq!(sectors.recover(known, [first(1), first(2)]), Ok(Vec::new()));
        assert_eq!(sectors.recover(unknown, [first(4)]), Ok(Vec::new()));
        let damaged = (SegmentNo(5).start(), 0_u16);
        let (start, sectors_of_it) = damaged;
        assert_eq!(
            sectors.recover(VmId(4), [damaged]),
            Err(SectorError::Outside {
                start,
                sectors: sectors_of_it
            })
        );
        assert_eq!(sectors.segments_of(VmId(4)), 0, "it may be somebody else's");
        let stolen = sectors.recover(VmId(4), [first(4)]);
        assert_eq!(stolen, Err(SectorError::NotOurs(first(4).0)));
        assert!(
            sectors.take(unknown, &[8]).is_ok(),
            "its own segment has room"
        );
        assert!(!sectors.is_unused());
    }

    #[test]
    fn segments_beyond_a_lowered_limit_are_held_and_not_given_out_again() {
        let mut sectors = Sectors::new(4, SegmentNo(2), BlockSize::Bytes512);
        let (vm, other) = (VmId(1), VmId(2));
        let start = SegmentNo(3).start();
        let entry = ExtentEntry {
            version: Version(1),
            start,
            sectors: 8,
        };
        sectors.hold(vm, [entry]).unwrap();
        assert_eq!(sectors.free_runs(), [SegmentNo(1)..SegmentNo(3)]);
        assert!(sectors.recover(vm, [(start, 8)]).unwrap().is_empty());
        assert_eq!(sectors.begin_segment(), Some(SegmentNo(1)));
        assert_eq!(sectors.begin_segment(), None);
        assert_eq!(sectors.take(other, &[8]), Err(NoRoom::Full));
        assert_eq!(sectors.end_vm(vm), [SegmentNo(3)]);
        sectors.end_transit(SegmentNo(3));
        assert_eq!(sectors.begin_segment(), None);
    }

    #[test]
    fn segments_beyond_the_end_of_a_disk_that_became_known_are_held_and_never_used() {
        let entry = |segment: SegmentNo| ExtentEntry {
            version: Version(1),
            start: segment.start(),
            sectors: 8,
        };
        let (vm, damaged, ended) = (VmId(1), VmId(2), VmId(3));
        let (near, far, further) = (SegmentNo(1), SegmentNo(9), SegmentNo(11));
        let mut awaited = Sectors::new(1, SegmentNo(0), BlockSize::Bytes512);
        awaited.stretch(12);
        awaited.hold(vm, [entry(near)]).unwrap();
        awaited
            .hold(damaged, [entry(near), entry(far)])
            .unwrap_err();
        awaited.hold(damaged, [entry(far)]).unwrap();
        awaited.hold(ended, [entry(further)]).unwrap();
        assert_eq!(awaited.end_vm(ended), [further]);
        let mut moved = (awaited.moved_to(4, SegmentNo(4), BlockSize::Bytes4096)).unwrap();
        assert_eq!((moved.beyond_end(), moved.used_bytes()), (1, 16 * 512));
        assert_eq!(moved.free_runs(), [SegmentNo(2)..SegmentNo(4)]);
        // What was in transit may end it, though it is not there; and what never was.
        moved.end_transit(further);
        moved.end_transit(SegmentNo(4000));
        // Its page is known there, and none is put beside it.
        let recovered = moved.recover(damaged, [(far.start(), 8)]);
        assert_eq!(recovered, Ok(Vec::new()));
        assert_eq!(moved.take(damaged, &[8]), Err(NoRoom::Segment));
        assert_eq!(moved.free(damaged, far.start(), 8), Ok(None));
        assert_eq!(moved.take(damaged, &[8]), Err(NoRoom::Segment));
        assert_eq!(moved.end_vm(damaged), [far]);
        moved.end_transit(far);
        assert_eq!(moved.used_bytes(), 8 * 512);
        let given: Vec<_> = std::iter::from_fn(|| moved.begin_segment()).collect();
        assert_eq!(given, [SegmentNo(2), SegmentNo(3)]);
        // A disk on which no VM has anything is another one.
        let other = awaited.moved_to(1, SegmentNo(1), BlockSize::Bytes512);
        assert!(matches!(other, Err(SectorError::Outside { .. })));
    }

    #[test]
    fn impossible_sectors_are_typed_errors_and_change_nothing() {
        let mut sectors = Sectors::new(3, SegmentNo(3), BlockSize::Bytes512);
        let (vm, other) = (VmId(1), VmId(2));
        let entry = |start, sectors| ExtentEntry {
            version: Version(1),
            start: SectorNo(start),
            sectors,
        };
        let first = SegmentNo(1).start();
        assert!(matches!(sectors.take(vm, &[]), Err(NoRoom::Impossible)));
        assert!(matches!(sectors.take(vm, &[0]), Err(NoRoom::Impossible)));
        assert!(matches!(sectors.take(vm, &[4097]), Err(NoRoom::Impossible)));
        sectors.hold(vm, [entry(first.0, 100)]).unwrap();
        for (start, len) in [
            (first.0, 0),
            (first.0, 5000),
            (first.0 + 32_760, 9),
            (1 << 47, 8),
        ] {
            let outside = SectorError::Outside {
                start: SectorNo(start),
                sectors: len,
            };
            assert_eq!(sectors.hold(vm, [entry(start, len)]), Err(outside));
            assert_eq!(sectors.free(vm, SectorNo(start), len), Err(outside));
        }
        assert!(matches!(
            sectors.hold(other, [entry(first.0, 8)]),
            Err(SectorError::NotOurs(_))
        ));
        assert!(matches!(
            sectors.hold(vm, [entry(0, 8)]),
            Err(SectorError::NotOurs(_)),
        ));
        assert!(matches!(
            sectors.free(other, first, 8),
            Err(SectorError::NotOurs(_))
        ));
        assert!(matches!(
            sectors.free(vm, first.plus(96), 8),
            Err(SectorError::NotUsed { .. })
        ));
        assert_eq!(sectors.used_bytes(), 100 * 512);
        assert!(matches!(
            sectors.recover(vm, [(first, 8), (first.plus(7), 2)]),
            Err(SectorError::UsedTwice { .. })
        ));
    }
}
