// SPDX-License-Identifier: Apache-2.0
//! [`GuestPageCache`]: turns requests to a guest's disks into DMA, through a model of its page cache.
//!
//! A block trace has the requested blocks of a disk; DMA goes to pages of the guest's memory. The page
//! cache between them determines where a block is placed:
//! ```text
//!   read   block in the cache   no DMA; the CPU copies it out
//!          not                  a page is taken for it; the disk writes into it
//!   write  any                  a page is taken or found, the CPU fills it; it is dirty. (Of a page that
//!                               is not in the cache and not wholly written, the disk brings the rest.)
//!   later  dirty for 30 s       looked for every 5 s: the disk reads it (as Linux has it by default,
//!                               dirty_expire_centisecs and dirty_writeback_centisecs)
//! ```
//! Pages are allocated in order while the memory is fresh, so that neighbours on the disk become neighbours
//! in memory; when it is used up, the least recently used page is recycled. A dirty page is written first.
//! There is no readahead: a trace already contains it.
//!
//! Two properties of real guests are less simple, and can be set:
//! - Most traces were recorded *below* a guest's cache. A block read there was not in that cache, so a
//!   block that the model still has is read again, into another page: [`CachedReads::ReadAgain`].
//! - The memory of a guest that has been up for long is not allocated in order, but in scattered runs:
//!   [`PageCacheParams::run_bytes`].

use super::{Actor, ReplayAccess, ReplayError, Service};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, SectionNo};
use pagetide_random::SplitMix64;
use rustc_hash::FxHashMap;
use std::{collections::VecDeque, time::Duration};

/// The longest valid request, in bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// No frame.
const NONE: u32 = u32::MAX;
/// Most pages of a cache: 8 TiB.
const PAGES_MAX: u64 = 1 << 31;

/// The effect of a read of a block that the modelled cache has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachedReads {
    /// The CPU copies it out; the trace has the requests of programs.
    #[default]
    Served,
    /// The guest must have dropped it, so the disk reads it again; the trace has the requests to disks.
    ReadAgain,
}

/// Size and place of a guest's page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageCacheParams {
    /// Where its pages begin in the guest's memory, in bytes; a multiple of 4 KiB.
    pub base_bytes: u64,
    /// Its size, in bytes.
    pub cache_bytes: u64,
    /// Bytes of a section.
    pub section_bytes: u64,
    /// A page that has been dirty for this long is written.
    pub dirty_expire: Duration,
    /// How often such pages are looked for.
    pub writeback_every: Duration,
    /// The effect of reads of cached blocks.
    pub reads: CachedReads,
    /// Memory is allocated in shuffled runs of this many bytes; by default in order.
    pub run_bytes: Option<u64>,
}

impl PageCacheParams {
    /// A cache of `cache_bytes` at the end of `memory_bytes`, in sections of `section_bytes`.
    #[must_use]
    pub fn at_the_end_of(memory_bytes: u64, cache_bytes: u64, section_bytes: u64) -> Self {
        let base = memory_bytes.saturating_sub(cache_bytes);
        Self {
            base_bytes: base.next_multiple_of(PAGE_BYTES),
            cache_bytes: memory_bytes.min(cache_bytes),
            section_bytes,
            dirty_expire: Duration::from_secs(30),
            writeback_every: Duration::from_secs(5),
            reads: CachedReads::Served,
            run_bytes: None,
        }
    }
}

/// One request to a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskRequest {
    /// Number of its record in the trace, for messages.
    pub number: u64,
    /// The disk, as a device of the VM.
    pub disk: DeviceId,
    /// Offset on the disk, in bytes.
    pub offset_bytes: u64,
    /// Length, in bytes.
    pub len_bytes: u64,
    /// Its effect on the disk.
    pub access: Access,
}

impl DiskRequest {
    /// Pages of the disk from the first to the last, and how they are covered.
    ///
    /// # Errors
    /// [`ReplayError::Request`]: too long, or past the end of any disk.
    pub(super) fn blocks(&self) -> Result<std::ops::Range<u64>, ReplayError> {
        let end = self.offset_bytes.checked_add(self.len_bytes);
        let Some(end) = end.filter(|_| self.len_bytes <= REQUEST_BYTES_MAX) else {
            return Err(ReplayError::Request {
                file: None,
                record: self.number,
                disk: self.disk.0,
                offset_bytes: self.offset_bytes,
                len_bytes: self.len_bytes,
                max_bytes: REQUEST_BYTES_MAX,
            });
        };
        Ok(self.offset_bytes / PAGE_BYTES..end.div_ceil(PAGE_BYTES))
    }

    fn covers(&self, block: u64) -> bool {
        let start = block * PAGE_BYTES;
        self.offset_bytes <= start && start + PAGE_BYTES <= self.offset_bytes + self.len_bytes
    }
}

/// The counters of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
pub struct PageCacheCounts {
    /// Pages read that were present.
    pub read_hits: u64,
    /// Pages read that the disk had to supply.
    pub read_misses: u64,
    /// Pages written.
    pub written: u64,
    /// Pages written back to the disk.
    pub written_back: u64,
    /// Pages that were taken from one block for another.
    pub recycled: u64,
}

/// A block of a disk.
type Block = (DeviceId, u64);

/// The block of a frame that was dropped. No disk is that large.
const NO_BLOCK: Block = (DeviceId(u32::MAX), u64::MAX);

/// A page of the cache.
#[derive(Clone, Copy, Debug)]
struct Frame {
    block: Block,
    /// Neighbours by time of use.
    newer: u32,
    older: u32,
    /// Sequence number of the time it became dirty, among all frames; none while it is clean.
    dirtied: Option<u64>,
}

/// A frame that became dirty.
#[derive(Clone, Copy, Debug)]
struct Dirtied {
    at: Duration,
    frame: u32,
    number: u64,
}

/// Up to this many cleaned entries are kept, at no cost.
const CLEANED_KEPT: usize = 1024;

/// See the module. Its pages are those of one guest, whatever the number of its disks.
#[derive(Debug)]
pub struct GuestPageCache {
    params: PageCacheParams,
    pages_max: u32,
    frames: Vec<Frame>,
    of_block: FxHashMap<Block, u32>,
    newest: u32,
    oldest: u32,
    /// Frames in the order in which they became dirty. Those cleaned since are skipped, and dropped when
    /// they outnumber the others.
    dirty: VecDeque<Dirtied>,
    dirtied: u64,
    looked_at: Duration,
    counts: PageCacheCounts,
    runs: Runs,
}

/// The order of allocation.
#[derive(Debug, Default)]
struct Runs {
    pages: u32,
    /// Where each run lies, in runs.
    places: Vec<u32>,
}

impl Runs {
    fn new(run_bytes: Option<u64>, pages_max: u32) -> Self {
        let Some(pages) = run_bytes.map(|bytes| (bytes / PAGE_BYTES).max(1)) else {
            return Self::default();
        };
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        let mut places: Vec<u32> = (0..pages_max / pages).collect();
        // Fisher and Yates from a fixed seed: one answer on any machine, and for ever.
        let mut random = SplitMix64::new(0);
        for last in (1..places.len()).rev() {
            let other = random.remainder(last as u64 + 1);
            places.swap(last, usize::try_from(other).unwrap_or(last));
        }
        Self { pages, places }
    }

    /// Page of the cache's memory that is frame `frame`. The rest after the last whole run stays in place.
    fn place(&self, frame: u32) -> u64 {
        let place = frame
            .checked_div(self.pages)
            .and_then(|run| self.places.get(run as usize));
        match place {
            Some(place) => {
                u64::from(*place) * u64::from(self.pages) + u64::from(frame % self.pages)
            }
            None => frame.into(),
        }
    }
}

impl GuestPageCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`ReplayError::Asked`] if it has no page, or too many.
    pub fn new(params: PageCacheParams) -> Result<Self, ReplayError> {
        let pages = params.cache_bytes / PAGE_BYTES;
        if pages == 0 || pages > PAGES_MAX || params.section_bytes < PAGE_BYTES {
            return Err(ReplayError::Asked(format!(
                "a page cache of {} bytes in sections of {} bytes cannot be modelled: it takes 4096 to {} \
                 bytes, and sections of at least 4096",
                params.cache_bytes,
                params.section_bytes,
                PAGES_MAX * PAGE_BYTES
            )));
        }
        let pages_max = u32::try_from(pages).unwrap_or(NONE - 1);
        Ok(Self {
            params,
            pages_max,
            runs: Runs::new(params.run_bytes, pages_max),
            frames: Vec::new(),
            of_block: FxHashMap::default(),
            newest: NONE,
            oldest: NONE,
            dirty: VecDeque::new(),
            dirtied: 0,
            looked_at: Duration::ZERO,
            counts: PageCacheCounts::default(),
        })
    }

    /// The counters so far.
    #[must_use]
    pub fn counts(&self) -> PageCacheCounts {
        self.counts
    }

    /// When to look for dirty pages next, if there may be any.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        let expired = self.dirty.front()?.at + self.params.dirty_expire;
        let every = self.params.writeback_every.as_nanos().max(1);
        let tick = expired.as_nanos().div_ceil(every) * every;
        let tick = Duration::from_nanos(u64::try_from(tick).unwrap_or(u64::MAX));
        Some(tick.max(self.looked_at))
    }

    /// Writes back the pages that have been dirty for long enough at `now`. The accesses go to `out`.
    pub fn passed(&mut self, now: Duration, out: &mut Vec<ReplayAccess>) {
        self.looked_at = now;
        let mut batch = Vec::new();
        while let Some(&Dirtied { at, frame, number }) = self.dirty.front() {
            if at + self.params.dirty_expire > now {
                break;
            }
            self.dirty.pop_front();
            let of_frame = &mut self.frames[frame as usize];
            // Cleaned since, and perhaps made dirty again: then it is further back, too.
            if of_frame.dirtied == Some(number) {
                of_frame.dirtied = None;
                batch.push((of_frame.block, frame));
            }
        }
        // As the kernel writes a file: in disk order.
        batch.sort_unstable();
        for ((disk, _), frame) in batch {
            self.counts.written_back += 1;
            self.touch_frame(now, dma(disk), Access::Read, frame, out);
        }
    }

    /// The memory accesses of a request at `now`, appended to `out`.
    ///
    /// # Errors
    /// [`ReplayError::Request`].
    pub fn request(
        &mut self,
        now: Duration,
        request: &DiskRequest,
        out: &mut Vec<ReplayAccess>,
    ) -> Result<(), ReplayError> {
        for block in request.blocks()? {
            match request.access {
                Access::Read => self.read(now, (request.disk, block), out),
                Access::Write => self.write(now, request, block, out),
            }
        }
        Ok(())
    }

    fn read(&mut self, now: Duration, block: Block, out: &mut Vec<ReplayAccess>) {
        match self.found(block) {
            Some(frame) if self.params.reads == CachedReads::Served => {
                self.counts.read_hits += 1;
                self.touch_frame(now, Actor::Cpu, Access::Read, frame, out);
            }
            found => {
                self.counts.read_misses += 1;
                if let Some(frame) = found {
                    self.drop_block(now, frame, out);
                }
                let frame = self.take(now, block, out);
                // A dropped frame is the first to be reused, but not for the same block.
                if let Some(dropped) = found.filter(|dropped| *dropped != frame) {
                    self.unlink(dropped);
                    self.link_oldest(dropped);
                }
                self.touch_frame(now, dma(block.0), Access::Write, frame, out);
            }
        }
    }

    /// Frees a frame; dirty content is written first.
    fn drop_block(&mut self, now: Duration, frame: u32, out: &mut Vec<ReplayAccess>) {
        let of_frame = &mut self.frames[frame as usize];
        let block = std::mem::replace(&mut of_frame.block, NO_BLOCK);
        let was_dirty = of_frame.dirtied.take().is_some();
        self.of_block.remove(&block);
        if was_dirty {
            self.counts.written_back += 1;
            self.touch_frame(now, dma(block.0), Access::Read, frame, out);
        }
    }

    fn write(
        &mut self,
        now: Duration,
        request: &DiskRequest,
        block: u64,
        out: &mut Vec<ReplayAccess>,
    ) {
        let key = (request.disk, block);
        let frame = self.found(key).unwrap_or_else(|| {
            let frame = self.take(now, key, out);
            if !request.covers(block) {
                self.touch_frame(now, dma(request.disk), Access::Write, frame, out);
            }
            frame
        });
        self.counts.written += 1;
        self.touch_frame(now, Actor::Cpu, Access::Write, frame, out);
        let of_frame = &mut self.frames[frame as usize];
        if of_frame.dirtied.is_none() {
            let number = self.dirtied;
            self.dirtied += 1;
            of_frame.dirtied = Some(number);
            let at = now;
            self.dirty.push_back(Dirtied { at, frame, number });
            self.drop_cleaned();
        }
    }

    /// Without this, a trace whose writes all come at once would fill memory with pages that were written
    /// and reused.
    fn drop_cleaned(&mut self) {
        if self.dirty.len() > 2 * self.frames.len() + CLEANED_KEPT {
            let frames = &self.frames;
            let is_dirty = |it: &Dirtied| frames[it.frame as usize].dirtied == Some(it.number);
            self.dirty.retain(is_dirty);
        }
    }

    /// The frame of a block, made the most recently used.
    fn found(&mut self, block: Block) -> Option<u32> {
        let frame = *self.of_block.get(&block)?;
        if frame != self.newest {
            self.unlink(frame);
            self.link_newest(frame);
        }
        Some(frame)
    }

    /// A frame for a block that has none: a fresh one, else the least recently used.
    fn take(&mut self, now: Duration, block: Block, out: &mut Vec<ReplayAccess>) -> u32 {
        let fresh = u32::try_from(self.frames.len()).unwrap_or(NONE);
        let frame = if fresh < self.pages_max {
            self.frames.push(Frame {
                block,
                newer: NONE,
                older: NONE,
                dirtied: None,
            });
            fresh
        } else {
            let frame = self.oldest;
            let of_frame = &mut self.frames[frame as usize];
            let before = std::mem::replace(&mut of_frame.block, block);
            let was_dirty = of_frame.dirtied.take().is_some();
            self.of_block.remove(&before);
            self.counts.recycled += 1;
            if was_dirty {
                self.counts.written_back += 1;
                self.touch_frame(now, dma(before.0), Access::Read, frame, out);
            }
            self.unlink(frame);
            frame
        };
        self.of_block.insert(block, frame);
        self.link_newest(frame);
        frame
    }

    fn unlink(&mut self, frame: u32) {
        let Frame { newer, older, .. } = self.frames[frame as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.frames[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.frames[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, frame: u32) {
        let second = std::mem::replace(&mut self.newest, frame);
        let of_frame = &mut self.frames[frame as usize];
        of_frame.newer = NONE;
        of_frame.older = second;
        match second {
            NONE => self.oldest = frame,
            second => self.frames[second as usize].newer = frame,
        }
    }

    fn link_oldest(&mut self, frame: u32) {
        let second = std::mem::replace(&mut self.oldest, frame);
        let of_frame = &mut self.frames[frame as usize];
        of_frame.older = NONE;
        of_frame.newer = second;
        match second {
            NONE => self.newest = frame,
            second => self.frames[second as usize].older = frame,
        }
    }

    fn touch_frame(
        &self,
        at: Duration,
        actor: Actor,
        access: Access,
        frame: u32,
        out: &mut Vec<ReplayAccess>,
    ) {
        let address = self.params.base_bytes + self.runs.place(frame) * PAGE_BYTES;
        let section = SectionNo(address / self.params.section_bytes);
        let touch = ReplayAccess {
            at,
            actor,
            section,
            access,
            bytes: PAGE_BYTES,
        };
        push_merged(out, touch);
    }
}

/// DMA of a disk.
pub(super) fn dma(disk: DeviceId) -> Actor {
    Actor::Device(disk, Service::Block)
}

/// Adds an access to `out`, or merges it into the last one if only the bytes differ.
pub(super) fn push_merged(out: &mut Vec<ReplayAccess>, touch: ReplayAccess) {
    match out.last_mut() {
        Some(last)
            if ReplayAccess {
                bytes: touch.bytes,
                ..*last
            } == touch =>
        {
            last.bytes += touch.bytes;
        }
        _ => out.push(touch),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_used_again_while_dirty_leave_nothing_behind() {
        let params = PageCacheParams::at_the_end_of(4 << 20, 16 << 10, 2 << 20);
        let mut cache = GuestPageCache::new(params).unwrap();
        let mut out = Vec::new();
        for number in 0..20_000 {
            let request = DiskRequest {
                number,
                disk: DeviceId(1),
                offset_bytes: number * PAGE_BYTES,
                len_bytes: PAGE_BYTES,
                access: Access::Write,
            };
            cache.request(Duration::ZERO, &request, &mut out).unwrap();
            assert!(cache.dirty.len() <= CLEANED_KEPT + 9);
        }
        out.clear();
        cache.passed(Duration::from_secs(40), &mut out);
        assert_eq!(cache.counts().written_back, 20_000, "each exactly once");
    }
}
