// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: which pages were touched lately, without help from guest or VMM.
//!
//! It is asked in two ways. A *sample* looks at a few pages of each section and costs the guest next to
//! nothing; it tells how hot a section is. A look at *whole* sections takes all their pages out of the
//! page tables, which costs a small fault for each that is in use, and is for those that are to be
//! evicted.
//!
//! [`UnmapAndLook`] works on any kernel since 5.10, for memory that cannot go to
//! swap. The idea: a page that is in its file but in nobody's page table costs
//! its next user a small fault that the kernel resolves alone, and leaves a
//! trace: the present bit. So
//!
//! ```text
//!   look:   1. the devices' marks          → what DMA touched since the last look
//!           2. and they drop their own translations (pages mapped by two processes would be skipped)
//!           3. the VMM's present bits      → what CPUs touched since the last look
//!           4. MADV_PAGEOUT on the VMM's   out of every page table, kept in the file
//! ```
//!
//! Step 4 passes over files on a tmpfs mounted with `noswap`, whose pages are
//! unevictable. For those a thread of the VMM is borrowed (see
//! [`pagetide_sys::ptrace`]) to drop its own translations, which is 0.2 ms of that
//! thread's time a run of [`RUN_BYTES_MAX`] and some more for pages.
//!
//! `MADV_DONTNEED` on anything but a shared file would lose content. So the
//! mappings are compared with the layout right before each run, with the thread
//! stopped, and a run is short. What remains: the VMM's other threads go on, and
//! one of them might, between that look and the end of its run (about a
//! millisecond), unmap RAM, map private memory in its place, and write there; that
//! write would be lost. A VMM that unplugs RAM does so on one thread, after its
//! guest was told; and what it maps next comes there only if the kernel chooses
//! the very addresses. No other call takes translations away and spares private
//! memory. `MADV_PAGEOUT` loses nothing in any case: who wants no such window keeps
//! RAM on a file system that is not `noswap`.
//!
//! Nothing of a file is held between two looks but how it is unmapped, so that RAM
//! that was unplugged goes back to the host whether or not anybody looks again.
//!
//! An access between steps 1 and 4 is lost to the tracker: such a page looks
//! colder than it is, once. Some ten pages per CPU stay mapped because they are
//! in the kernel's batches: they look warmer, once.

use crate::Refusal;
use crate::layout::{LiveLayout, MapsChange, Piece, RamLayout};
use crate::process::VmmProcess;
use crate::swap;
use pagetide_addr::{FileKey, Hva, Marks, PAGE_SHIFT, PageNo, PageRange, PageSet, SectionNo};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::pagemap::{Pagemap, PagemapError};
use pagetide_sys::process::{ProcessError, ProcessFd};
use pagetide_sys::ptrace::{PtraceError, run_inside};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes whose translations a thread of the VMM drops after one look at its mappings: some
/// hundred nanoseconds a page that is mapped, so a millisecond or two.
const RUN_BYTES_MAX: u64 = 32 << 20;
/// Most calls for that.
const RUN_CALLS_MAX: usize = 32;
/// Most bytes that are unmapped in one call from outside: the VMM's address space is locked meanwhile,
/// for some microseconds a page.
const CALL_BYTES_MAX: u64 = 1 << 20;
/// Most ranges in such a call.
const CALL_RANGES_MAX: usize = 256;

/// Why accesses could not be told.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// A page table could not be read.
    #[error(transparent)]
    Pagemap(#[from] PagemapError),
    /// The VMM's pages could not be unmapped.
    #[error("unmapping the VMM's pages (are they locked?): {0}")]
    Unmap(#[from] ProcessError),
    /// A thread of the VMM could not unmap them.
    #[error("having the VMM unmap its pages: {0}")]
    Inside(#[from] PtraceError),
    /// Where its RAM is mapped could not be told.
    #[error(transparent)]
    Look(#[from] Refusal),
    /// Its RAM is mapped otherwise than it was.
    #[error("the VMM's RAM has changed: {0}")]
    Changed(MapsChange),
    /// What is mounted could not be told.
    #[error("looking for file systems that never swap: {0}")]
    Mounts(#[from] io::Error),
    /// The devices could not be asked.
    #[error("asking the devices what they touched: {0}")]
    Devices(String),
}

/// Pages of one section that were touched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Touched {
    /// By vCPUs, or anything else in the VMM.
    pub cpu: PageSet,
    /// By devices of ours.
    pub dma: PageSet,
}

impl Touched {
    /// By anybody.
    #[must_use]
    pub fn by_anybody(&self) -> PageSet {
        let mut all = self.cpu;
        all.unite(&self.dma);
        all
    }
}

/// What is to be looked at in one section.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The section.
    pub section: SectionNo,
    /// Pages that are asked about.
    pub asked: PageSet,
    /// Pages that are to be asked about the next time: they are taken out of the page tables.
    pub next: PageSet,
}

/// What a sample brought.
#[derive(Clone, Default, Debug)]
pub struct Sampled {
    /// For each section: by CPUs, which of the pages that were asked about; by devices, which of all
    /// pages.
    pub touched: Vec<Touched>,
    /// Pages that were taken out of the page tables.
    pub unmapped_pages: u64,
    /// How long the VMM's address space was locked for that.
    pub unmapping: Duration,
}

/// Tells which pages were touched.
pub trait AccessTracker: Send + Sync {
    /// How it works, for the log.
    fn name(&self) -> &'static str;

    /// What was touched of the pages asked about, since they were chosen; and begins anew with others.
    ///
    /// # Errors
    /// [`TrackerError`]; some pages may have been taken out of the page tables.
    fn sample(&self, samples: &[Sample]) -> Result<Sampled, TrackerError>;

    /// For each of `sections`: what was touched since it was last asked about, and starts again.
    ///
    /// # Errors
    /// [`TrackerError`]; some sections may have started again.
    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// [`AccessTracker::look_many`] for one section.
    ///
    /// # Errors
    /// As there.
    fn look(&self, section: SectionNo) -> Result<Touched, TrackerError> {
        let touched = self.look_many(&[section])?;
        Ok(touched.into_iter().next().unwrap_or_default())
    }

    /// Pages that may have been touched since the last look, which goes on.
    ///
    /// # Errors
    /// [`TrackerError`].
    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;
}

/// What the devices know of the pages that their DMA touches.
pub trait DmaLook: Send + Sync {
    /// Calls `visit` for each page of `pages` (counted in `file`) that DMA has touched since the
    /// marks were forgotten.
    ///
    /// # Errors
    /// A sentence.
    fn touched(
        &self,
        file: FileKey,
        pages: PageRange,
        marks: Marks,
        visit: &mut dyn FnMut(PageNo),
    ) -> Result<(), String>;
}

/// For a VM without devices.
#[derive(Clone, Copy, Debug)]
pub struct NoDma;

impl DmaLook for NoDma {
    fn touched(
        &self,
        _file: FileKey,
        _pages: PageRange,
        _marks: Marks,
        _visit: &mut dyn FnMut(PageNo),
    ) -> Result<(), String> {
        Ok(())
    }
}

/// Unmaps pages and looks which come back; see the module.
pub struct UnmapAndLook {
    layout: Arc<LiveLayout>,
    vmm: VmmProcess,
    vmm_map: Pagemap,
    devices: Arc<dyn DmaLook>,
    ways: Mutex<BTreeMap<FileKey, Way>>,
}

/// The files of a layout, in their order, for one look.
struct Files {
    layout: Arc<RamLayout>,
    ways: Vec<Way>,
}

/// How pages of a file are taken out of the VMM's page table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// By `MADV_PAGEOUT` from here.
    PageOut,
    /// By `MADV_DONTNEED` in the VMM.
    Inside,
}

/// What the VMM needs to have a page mapped again that is in its file: the least of several tries, in
/// this process, with memory like a guest's.
///
/// # Errors
/// What the kernel says.
pub fn refault_cost() -> Result<Duration, TrackerError> {
    const PAGES: u32 = 256;
    const TRIES: u32 = 5;
    let failed = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
    let bytes = PageNo(PAGES.into()).byte_offset();
    let file = GuestFile::new_memfd("refault", bytes).map_err(|error| failed(&error))?;
    let mapping = SharedMapping::new(file.as_fd(), bytes).map_err(|error| failed(&error))?;
    let own = ProcessFd::open(std::process::id())?;
    let mut least = Duration::MAX;
    for _ in 0..=TRIES {
        let begun = Instant::now();
        for page in 0..PAGES {
            let at = PageNo(page.into()).byte_offset();
            mapping.copy_to(at, &[1]).map_err(|error| failed(&error))?;
        }
        // The first time makes the pages.
        if least == Duration::MAX {
            least = Duration::from_secs(1);
        } else {
            least = least.min(begun.elapsed());
        }
        own.page_out(&[(Hva(mapping.address() as u64), bytes)])?;
    }
    Ok(least / PAGES)
}

/// Ranges of the VMM, one after another.
#[derive(Default)]
struct Ranges(Vec<(Hva, u64)>);

/// Ranges of the VMM, by the way in which they are unmapped.
#[derive(Default)]
struct RangesByWay {
    page_out: Ranges,
    inside: Ranges,
}

impl RangesByWay {
    fn of(&mut self, way: Way) -> &mut Ranges {
        match way {
            Way::PageOut => &mut self.page_out,
            Way::Inside => &mut self.inside,
        }
    }
}

impl Ranges {
    fn add(&mut self, start: Hva, len_bytes: u64) {
        match self.0.last_mut() {
            Some((first, len)) if first.0 + *len == start.0 => *len += len_bytes,
            _ => self.0.push((start, len_bytes)),
        }
    }

    /// The same in parts of at most so many bytes and ranges.
    fn parts(&self, bytes_max: u64, ranges_max: usize) -> Vec<Vec<(Hva, u64)>> {
        let mut runs: Vec<Vec<(Hva, u64)>> = Vec::new();
        let mut room = 0;
        for (start, len_bytes) in &self.0 {
            let mut done = 0;
            while done < *len_bytes {
                let full = runs.last().is_none_or(|run| run.len() == ranges_max);
                if room == 0 || full {
                    runs.push(Vec::new());
                    room = bytes_max;
                }
                let part = room.min(len_bytes - done);
                if let Some(run) = runs.last_mut() {
                    run.push((Hva(start.0 + done), part));
                }
                done += part;
                room -= part;
            }
        }
        runs
    }
}

impl UnmapAndLook {
    /// For the RAM of `vmm`. `devices` tell what their DMA touched.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn new(
        vmm: &VmmProcess,
        layout: Arc<LiveLayout>,
        devices: Arc<dyn DmaLook>,
    ) -> Result<Self, TrackerError> {
        let vmm_map = Pagemap::of_process(vmm.pid())?;
        // Opened by pid: it is the VMM's if that had not ended even afterwards.
        if vmm.fd().has_ended()? {
            return Err(PagemapError::Gone.into());
        }
        let tracker = Self {
            vmm: vmm.try_clone()?,
            vmm_map,
            layout,
            devices,
            ways: Mutex::default(),
        };
        // Told now rather than at the first look.
        tracker.files()?;
        Ok(tracker)
    }

    /// The files as they are now.
    fn files(&self) -> Result<Files, TrackerError> {
        let layout = self.layout.now();
        let keys = || layout.files().iter().map(|file| file.key());
        let mut known = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() != keys().count() || keys().any(|key| !known.contains_key(&key)) {
            *known = ways(self.vmm.pid(), keys())?;
        }
        let way = |key| known.get(&key).copied().unwrap_or(Way::PageOut);
        Ok(Files {
            ways: keys().map(way).collect(),
            layout,
        })
    }

    /// Has the VMM drop its translations of `ranges`, as long as its RAM is where `layout` has it.
    fn unmap_inside(&self, layout: &RamLayout, ranges: &Ranges) -> Result<(), TrackerError> {
        for run in ranges.parts(RUN_BYTES_MAX, RUN_CALLS_MAX) {
            run_inside(self.vmm.fd(), |thread| {
                if let Some(change) = layout.maps_change(&self.vmm)? {
                    return Err(TrackerError::Changed(change));
                }
                for (start, len_bytes) in &run {
                    thread.drop_translations(*start, *len_bytes)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Takes ranges out of the VMM's page table, in calls that are short.
    fn unmap(&self, files: &Files, ranges: &RangesByWay) -> Result<(), TrackerError> {
        for part in ranges.page_out.parts(CALL_BYTES_MAX, CALL_RANGES_MAX) {
            self.vmm.fd().page_out(&part)?;
        }
        if !ranges.inside.0.is_empty() {
            self.unmap_inside(&files.layout, &ranges.inside)?;
        }
        Ok(())
    }

    fn mapped(&self, files: &Files, piece: &Piece, marks: Marks) -> Result<Touched, TrackerError> {
        let mut touched = Touched::default();
        let file = files.layout.files()[piece.file].key();
        let first = PageNo::containing(piece.file_offset);
        let pages = PageRange::new(first, PageNo(first.0 + piece.pages.len()));
        let mut visit = |page: PageNo| {
            let position = page.0 - first.0;
            touched.dma.insert(PageNo(piece.pages.start.0 + position));
        };
        let asked = self.devices.touched(file, pages, marks, &mut visit);
        asked.map_err(TrackerError::Devices)?;
        collect(&self.vmm_map, piece.hva, piece, &mut touched.cpu)?;
        Ok(touched)
    }
}

impl Files {
    fn pieces(&self, section: SectionNo) -> impl Iterator<Item = Piece> + '_ {
        self.layout.pieces(section.pages(self.layout.page_count()))
    }
}

fn ways(
    pid: u32,
    keys: impl Iterator<Item = FileKey>,
) -> Result<BTreeMap<FileKey, Way>, TrackerError> {
    let never_swapped = swap::file_systems_without_swap(pid)?;
    let way = |key: FileKey| {
        if never_swapped.contains(&key.dev) {
            Way::Inside
        } else {
            Way::PageOut
        }
    };
    Ok(keys.map(|key| (key, way(key))).collect())
}

fn collect(
    map: &Pagemap,
    start: Hva,
    piece: &Piece,
    into: &mut PageSet,
) -> Result<(), TrackerError> {
    map.visit(start, piece.pages.len(), |position, entry| {
        if entry.is_present() {
            into.insert(PageNo(piece.pages.start.0 + position));
        }
    })?;
    Ok(())
}

impl AccessTracker for UnmapAndLook {
    fn name(&self) -> &'static str {
        "unmap-and-look"
    }

    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let files = self.files()?;
        let mut all = Vec::with_capacity(sections.len());
        let mut ranges = RangesByWay::default();
        for section in sections {
            let mut of_section = Touched::default();
            for piece in files.pieces(*section) {
                let touched = self.mapped(&files, &piece, Marks::Forget)?;
                of_section.cpu.unite(&touched.cpu);
                of_section.dma.unite(&touched.dma);
                let bytes = piece.pages.len() << PAGE_SHIFT;
                if touched.cpu.is_empty() {
                    continue;
                }
                ranges.of(files.ways[piece.file]).add(piece.hva, bytes);
            }
            all.push(of_section);
        }
        self.unmap(&files, &ranges)?;
        Ok(all)
    }

    fn sample(&self, samples: &[Sample]) -> Result<Sampled, TrackerError> {
        let files = self.files()?;
        let mut sampled = Sampled::default();
        let mut ranges = RangesByWay::default();
        for sample in samples {
            let mut of_section = Touched::default();
            for piece in files.pieces(sample.section) {
                let touched = self.mapped(&files, &piece, Marks::Forget)?;
                of_section.dma.unite(&touched.dma);
                of_section
                    .cpu
                    .unite(&touched.cpu.intersection(&sample.asked));
                // What is not mapped is out already.
                let out = touched.cpu.intersection(&sample.next);
                sampled.unmapped_pages += out.len();
                for run in out.runs(sample.section) {
                    let within = run.start.0 - piece.pages.start.0;
                    let start = Hva(piece.hva.0 + PageNo(within).byte_offset());
                    ranges.of(files.ways[piece.file]).add(start, run.bytes());
                }
            }
            sampled.touched.push(of_section);
        }
        let begun = Instant::now();
        self.unmap(&files, &ranges)?;
        sampled.unmapping = begun.elapsed();
        Ok(sampled)
    }

    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        let files = self.files()?;
        let mut mapped = PageSet::EMPTY;
        for piece in files.pieces(section) {
            let touched = self.mapped(&files, &piece, Marks::Keep)?;
            mapped.unite(&touched.by_anybody());
        }
        Ok(mapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_dropped_in_runs_that_are_short_and_miss_nothing() {
        let mut ranges = Ranges::default();
        ranges.add(Hva(1 << 40), RUN_BYTES_MAX / 2);
        ranges.add(Hva((1 << 40) + RUN_BYTES_MAX / 2), 3 * RUN_BYTES_MAX);
        for small in 0..100_u64 {
            ranges.add(Hva((2 << 40) + (small << 22)), 4096);
        }
        let runs = ranges.parts(RUN_BYTES_MAX, RUN_CALLS_MAX);
        for run in &runs {
            let bytes: u64 = run.iter().map(|(_, bytes)| bytes).sum();
            assert!(bytes <= RUN_BYTES_MAX && run.len() <= RUN_CALLS_MAX);
            assert!(bytes > 0);
        }
        let mut joined = Ranges::default();
        for (start, bytes) in runs.into_iter().flatten() {
            joined.add(start, bytes);
        }
        assert_eq!(joined.0, ranges.0);
        assert!(Ranges::default().parts(RUN_BYTES_MAX, 1).is_empty());
    }
}
