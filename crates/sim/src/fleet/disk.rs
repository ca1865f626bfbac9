// SPDX-License-Identifier: Apache-2.0
//! The guest's disk, seen from its page cache, where the DMA goes.
//!
//! ```text
//!   reads of popular files ─ hit ──► CPU touches the page          no DMA
//!                          └ miss ─► a page is taken, read into    DMA
//!   scans of what is read once ────► the same, and soon reclaimed
//!   rewrites ──────────────────────► page dirty, written back 30 s later  DMA
//!   temporary files ───────────────► written, read, deleted: their pages are free again
//!   journal ───────────────────────► the same few pages all the time      DMA
//!   reclaim: second chance over pages in the order of their filling; what it frees is
//!            filled again in short runs, here and there ([`Free`])
//! ```
//! Pages are allocated and reclaimed in *chunks* of 256 KiB, eight a section, as readahead and write-back
//! treat neighbouring pages anyway. The cache is full at the start (`Guest::warm_up`), so the footprint
//! grows as the guest recycles its memory (O2).

use super::{
    activity::Pace,
    random::{LoadRandom, number, whole},
    sink::{Sink, Who},
};
use pagetide_addr::Access;
use std::collections::VecDeque;

/// Chunks of a section.
const CHUNKS: usize = 8;
const CHUNKS_PER_SECTION: u64 = CHUNKS as u64;
const CHUNK_BYTES: u64 = pagetide_addr::SECTION_BYTES / CHUNKS_PER_SECTION;
const NOWHERE: u32 = u32::MAX;
/// A dirty page is written back this long after it became so (Linux' default).
const DIRTY_S: u64 = 30;
/// Interval of write-back, and of the journal's commits.
const FLUSH_S: u64 = 5;
/// Length of a pass over the journal, and over the files that are appended to.
const JOURNAL_TURN_S: u64 = 75;
/// Reclaim begins below this share of free chunks and ends above twice that.
const FREE_LOW: f64 = 0.01;
/// Chunks that are rewritten together.
const REWRITE_RUN: u64 = 4;

/// Probability that a fill goes into the chunk after the previous one, if that is free; else it goes to any
/// free one.
///
/// In a stock guest whose page cache was kept busy by `fio`, 41 to 84 of 100 successive page fills stayed
/// in their section, bursts of one section had 100 to 240 pages (two to four chunks), and hardly any
/// continued in the next section: free memory is in short, scattered runs.
const RUN_GOES_ON: f64 = 0.7;

/// Free chunks of memory.
#[derive(Debug)]
struct Free {
    slots: Vec<u32>,
    /// Position of each slot in `slots`; [`NOWHERE`] for those in use.
    at: Vec<u32>,
    last: u32,
}

impl Free {
    fn all(slots: u64) -> Self {
        let slots: Vec<u32> = (0..u32::try_from(slots).unwrap_or(0)).collect();
        Self {
            at: slots.clone(),
            slots,
            last: NOWHERE,
        }
    }

    fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    fn put(&mut self, slot: u32) {
        self.at[slot as usize] = u32::try_from(self.slots.len()).unwrap_or(NOWHERE);
        self.slots.push(slot);
    }

    fn take(&mut self, random: &mut LoadRandom) -> Option<u32> {
        let next = self.last.wrapping_add(1) as usize;
        let beside = self.at.get(next).copied().filter(|at| *at != NOWHERE);
        let at = match beside {
            Some(at) if random.unit() < RUN_GOES_ON => at as usize,
            _ => usize::try_from(random.below(self.len())).unwrap_or(0),
        };
        if at >= self.slots.len() {
            return None;
        }
        let slot = self.slots.swap_remove(at);
        if let Some(moved) = self.slots.get(at) {
            self.at[*moved as usize] = u32::try_from(at).unwrap_or(NOWHERE);
        }
        self.at[slot as usize] = NOWHERE;
        self.last = slot;
        Some(slot)
    }
}

/// The guest's use of its disk. Rates are per hour and per chunk of the cache.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct DiskLoad {
    /// Chunks of files read, popular ones more often.
    pub(super) read: f64,
    /// Chunks read once, in order.
    pub(super) scanned: f64,
    /// Chunks rewritten.
    pub(super) rewritten: f64,
    /// Chunks of temporary files.
    pub(super) temporary: f64,
    /// Chunks of popular files, as a multiple of the cache's.
    pub(super) dataset: f64,
    /// How uneven popularity is: files are drawn with a rank of `n^(u^skew)`.
    pub(super) skew: f64,
    /// Chunks that are rewritten, as a share of the cache's.
    pub(super) rewrite_set: f64,
    /// How uneven rewriting is, as `skew` for reading.
    pub(super) rewrite_skew: f64,
    /// Sections of the journal, as a share of the cache's.
    pub(super) journal: f64,
    /// Share of the activity that continues when the guest is quiet.
    pub(super) quiet: f64,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    chunk: u32,
    referenced: bool,
    dirty: bool,
    queued: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Disk {
    random: LoadRandom,
    load: DiskLoad,
    /// Sections of the cache, in the order of memory; the journal's come after them.
    sections: Vec<u64>,
    journal: Vec<u64>,
    slots: Vec<Slot>,
    /// Slot of each chunk of the disk.
    place: Vec<u32>,
    /// Filled slots, first filled first.
    filled: VecDeque<u32>,
    free: Free,
    /// Slots to write back, and when.
    dirty: VecDeque<(u64, u32)>,
    /// Temporary files: when each is deleted, its first chunk and its length.
    temporary: VecDeque<(u64, u32, u32)>,
    popular_chunks: u64,
    temporary_from: u64,
    temporary_next: u64,
    scan_next: u64,
    journal_next: u64,
}

impl Disk {
    pub(super) fn new(random: LoadRandom, mut sections: Vec<u64>, load: DiskLoad) -> Self {
        let kept = whole(number(sections.len() as u64) * (1.0 - load.journal));
        let journal = sections.split_off(usize::try_from(kept).unwrap_or(0));
        let slots = sections.len() as u64 * CHUNKS_PER_SECTION;
        let popular_chunks = whole(number(slots) * load.dataset).max(64);
        // Scanned and temporary files lie beyond the popular ones.
        let temporary_from = popular_chunks + slots * 4;
        let end = temporary_from + slots;
        let empty = Slot {
            chunk: NOWHERE,
            referenced: false,
            dirty: false,
            queued: false,
        };
        Self {
            random,
            load,
            sections,
            journal,
            slots: vec![empty; usize::try_from(slots).unwrap_or(0)],
            place: vec![NOWHERE; usize::try_from(end).unwrap_or(0)],
            filled: VecDeque::new(),
            free: Free::all(slots),
            dirty: VecDeque::new(),
            temporary: VecDeque::new(),
            popular_chunks,
            temporary_from,
            temporary_next: 0,
            scan_next: 0,
            journal_next: 0,
        }
    }

    /// One second of the guest's work.
    pub(super) fn second(&mut self, pace: Pace, sink: &mut Sink) {
        if self.slots.is_empty() {
            return;
        }
        let level = match pace {
            Pace::Busy => 1.0,
            Pace::Quiet => self.load.quiet,
        };
        let chunks = number(self.slots.len() as u64) / 3_600.0 * level;
        self.read_files(self.load.read * chunks, sink);
        self.scan(self.load.scanned * chunks, sink);
        self.rewrite(self.load.rewritten * chunks, sink);
        self.use_temporary_files(self.load.temporary * chunks, sink);
        if sink.second.is_multiple_of(FLUSH_S) {
            self.write_back(sink);
            if pace == Pace::Busy {
                self.commit(sink);
            }
        }
        self.reclaim();
    }

    /// Runs of chunks; rank by rank files are less popular.
    fn read_files(&mut self, chunks: f64, sink: &mut Sink) {
        const RUN: u64 = 8;
        for _ in 0..self.random.count(chunks / number(RUN)) {
            let extents = (self.popular_chunks / RUN).max(1);
            let rank = self.popular(extents, self.load.skew);
            for chunk in rank * RUN..(rank + 1) * RUN {
                self.read(chunk, sink);
            }
        }
    }

    fn popular(&mut self, of: u64, skew: f64) -> u64 {
        let unit = self.random.unit().powf(skew);
        whole(number(of).powf(unit) - 1.0).min(of - 1)
    }

    fn scan(&mut self, chunks: f64, sink: &mut Sink) {
        let span = self.temporary_from - self.popular_chunks;
        for _ in 0..self.random.count(chunks) {
            let chunk = self.popular_chunks + self.scan_next % span;
            self.scan_next += 1;
            self.read(chunk, sink);
        }
    }

    fn rewrite(&mut self, chunks: f64, sink: &mut Sink) {
        let set = whole(number(self.slots.len() as u64) * self.load.rewrite_set);
        let runs = (set.min(self.popular_chunks) / REWRITE_RUN).max(1);
        // Spread over the popular files, so that rewritten chunks lie apart.
        let step = (self.popular_chunks / runs).max(REWRITE_RUN);
        for _ in 0..self.random.count(chunks / number(REWRITE_RUN)) {
            let rank = self.popular(runs, self.load.rewrite_skew);
            let first = rank * step % self.popular_chunks;
            for chunk in first..(first + REWRITE_RUN).min(self.popular_chunks) {
                self.write(chunk, sink);
            }
        }
    }

    fn use_temporary_files(&mut self, chunks: f64, sink: &mut Sink) {
        const FILE: u64 = 32;
        let span = (self.slots.len() as u64 / FILE).max(1);
        for _ in 0..self.random.count(chunks / number(FILE)) {
            let first = self.temporary_from + self.temporary_next % span * FILE;
            self.temporary_next += 1;
            if first + FILE > self.place.len() as u64 {
                continue;
            }
            for chunk in first..first + FILE {
                self.write(chunk, sink);
            }
            let lives_s = whole(20.0 + 400.0 * self.random.exponential());
            let first = u32::try_from(first).unwrap_or(0);
            let file = u32::try_from(FILE).unwrap_or(0);
            self.temporary
                .push_back((sink.second + lives_s, first, file));
        }
        for _ in 0..self.temporary.len() {
            let Some((due, first, count)) = self.temporary.pop_front() else {
                return;
            };
            if due > sink.second {
                self.temporary.push_back((due, first, count));
                continue;
            }
            for chunk in first..first + count {
                self.delete(chunk);
            }
        }
    }

    fn read(&mut self, chunk: u64, sink: &mut Sink) {
        if let Some(slot) = self.cached(chunk) {
            self.slots[slot].referenced = true;
            sink.touch(Who::Cpu, self.section(slot), Access::Read, CHUNK_BYTES);
        } else if let Some(slot) = self.take(chunk) {
            sink.touch(Who::Disk, self.section(slot), Access::Write, CHUNK_BYTES);
            sink.touch(Who::Cpu, self.section(slot), Access::Read, CHUNK_BYTES);
        }
    }

    fn write(&mut self, chunk: u64, sink: &mut Sink) {
        let Some(slot) = self.cached(chunk).or_else(|| self.take(chunk)) else {
            return;
        };
        sink.touch(Who::Cpu, self.section(slot), Access::Write, CHUNK_BYTES);
        let page = &mut self.slots[slot];
        if !page.dirty {
            page.dirty = true;
            let slot = u32::try_from(slot).unwrap_or(NOWHERE);
            self.dirty.push_back((sink.second + DIRTY_S, slot));
        }
    }

    fn write_back(&mut self, sink: &mut Sink) {
        while let Some((due, slot)) = self.dirty.front().copied() {
            if due > sink.second {
                return;
            }
            self.dirty.pop_front();
            let at = slot as usize;
            if self.slots[at].dirty {
                self.slots[at].dirty = false;
                sink.touch(Who::Disk, self.section(at), Access::Read, CHUNK_BYTES);
            }
        }
    }

    fn commit(&mut self, sink: &mut Sink) {
        let turn = self.journal.len() as u64;
        for _ in 0..(turn * FLUSH_S).div_ceil(JOURNAL_TURN_S) {
            let at = usize::try_from(self.journal_next % turn).unwrap_or(0);
            self.journal_next += 1;
            sink.touch(Who::Disk, self.journal[at], Access::Write, CHUNK_BYTES);
            sink.touch(Who::Cpu, self.journal[at], Access::Read, CHUNK_BYTES);
        }
    }

    fn cached(&self, chunk: u64) -> Option<usize> {
        let place = self.place.get(index_of(chunk)).copied();
        place
            .filter(|place| *place != NOWHERE)
            .map(|place| place as usize)
    }

    fn section(&self, slot: usize) -> u64 {
        self.sections[slot / CHUNKS]
    }

    /// A free slot for `chunk`.
    fn take(&mut self, chunk: u64) -> Option<usize> {
        let place = self.place.get_mut(index_of(chunk))?;
        let slot = self.free.take(&mut self.random)?;
        *place = slot;
        // There are fewer chunks than places can be numbered.
        let chunk = u32::try_from(chunk).unwrap_or(NOWHERE);
        let queued = self.slots[slot as usize].queued;
        self.slots[slot as usize] = Slot {
            chunk,
            referenced: false,
            dirty: false,
            queued: true,
        };
        if !queued {
            self.filled.push_back(slot);
        }
        Some(slot as usize)
    }

    fn delete(&mut self, chunk: u32) {
        let Some(slot) = self.cached(u64::from(chunk)) else {
            return;
        };
        self.place[chunk as usize] = NOWHERE;
        self.slots[slot].chunk = NOWHERE;
        self.slots[slot].dirty = false;
        self.free.put(u32::try_from(slot).unwrap_or(NOWHERE));
    }

    fn reclaim(&mut self) {
        let low = whole(number(self.slots.len() as u64) * FREE_LOW) + 64;
        if self.free.len() >= low {
            return;
        }
        let mut looks = self.filled.len();
        while (self.free.len()) < 2 * low && looks > 0 {
            looks -= 1;
            let Some(slot) = self.filled.pop_front() else {
                return;
            };
            let at = slot as usize;
            let page = &mut self.slots[at];
            if page.chunk == NOWHERE {
                page.queued = false;
            } else if page.referenced || page.dirty {
                page.referenced = false;
                self.filled.push_back(slot);
            } else {
                page.queued = false;
                self.place[page.chunk as usize] = NOWHERE;
                page.chunk = NOWHERE;
                self.free.put(slot);
            }
        }
    }
}
/// The index for a number; one too large for this machine becomes a number past every index, where there is
/// nothing.
fn index_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
