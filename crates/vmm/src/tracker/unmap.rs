// SPDX-License-Identifier: Apache-2.0
//! [`UnmapAndLook`]: unmaps pages, and checks later which of them were mapped again.
//!
//! Works on any kernel since 5.10, for memory that cannot go to swap. The idea: a page that is in
//! its file but in no page table costs its next user a small fault that the kernel resolves alone,
//! and that leaves a trace: the present bit. So
//!
//! ```text
//!   look:   1. the devices' marks          → what DMA touched since the last look
//!           2. and they drop their own translations (pages mapped by two processes would be skipped)
//!           3. the VMM's present bits      → what CPUs touched since the last look
//!           4. MADV_PAGEOUT on the VMM's   out of every page table, kept in the file
//! ```
//!
//! Step 4 skips files on a tmpfs mounted with `noswap`, whose pages are unevictable, and huge pages of
//! hugetlbfs, which the kernel never pages out. For those a
//! remote system call in a thread of the VMM (see [`pagetide_sys::ptrace`]) drops the VMM's
//! translations, which takes 0.2 ms of that thread's time per run of [`RUN_BYTES_MAX`], and some
//! more per page.
//!
//! `MADV_DONTNEED` on anything but a shared file would lose content. So the mappings are compared
//! with the layout right before each run, with the thread stopped, and a run is short. What
//! remains: the VMM's other threads continue, and one of them might, between that check and the end
//! of the run (about a millisecond), unmap RAM, map private memory in its place, and write there;
//! that write would be lost. A VMM that unplugs RAM does so on one thread, after notifying its
//! guest; and its next mapping is placed there only if the kernel chooses exactly these addresses.
//! No other call drops translations and spares private memory. `MADV_PAGEOUT` never loses anything:
//! to avoid the window, keep RAM on a file system that is not `noswap`.
//!
//! Between two looks nothing of a file is kept except the way in which it is unmapped, so unplugged
//! RAM returns to the host whether or not there is another look.
//!
//! An access between steps 1 and 4 is lost to the tracker: such a page looks colder than it is,
//! once.
//!
//! Some dozen pages per CPU stay mapped because they are in the kernel's batches. A sample lets them: they look
//! warmer. Sections to be evicted would keep them for as long as their CPU is idle, so what of those is mapped
//! right after step 4 is unmapped once more, with all batches drained ([`drain_batches`]).
//!
//! Memory in huge pages is unmapped as a whole, and looks touched as a whole; see [`super::huge`].

use super::huge::{HUGE_BYTES, HugePages, Kept};
use super::ranges::{Ranges, RangesByWay, Way, Ways};
use super::{DmaLook, TrackerError};
use crate::layout::{LiveLayout, Piece, RamFile, RamLayout};
use crate::process::VmmProcess;
use crate::swap;
use pagetide_addr::{FilePage, Hva, Marks, PAGE_SHIFT, PageNo, PageSet, SectionNo};
use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::{self, AccessTracker},
};
use pagetide_sys::batches::{Drained, drain_batches};
use pagetide_sys::cpu;
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::pagemap::{Pagemap, PagemapError, Translation};
use pagetide_sys::process::{Merge, ProcessFd};
use pagetide_sys::ptrace::run_inside;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes whose translations a thread of the VMM drops after one check of its mappings: some
/// hundred nanoseconds per mapped page, so a millisecond or two.
const RUN_BYTES_MAX: u64 = 32 << 20;
/// Most calls for one run.
const RUN_CALLS_MAX: usize = 32;
/// Most bytes that are unmapped in one call from outside: the VMM's address space is locked meanwhile,
/// for some microseconds a page.
const CALL_BYTES_MAX: u64 = 1 << 20;
/// Most ranges in such a call.
const CALL_RANGES_MAX: usize = 256;
/// The same for huge pages, each of which takes a few microseconds.
const CALL_HUGE_BYTES_MAX: u64 = 8 * HUGE_BYTES;
const _: () = assert!(CALL_BYTES_MAX <= RUN_BYTES_MAX && CALL_HUGE_BYTES_MAX <= RUN_BYTES_MAX);
/// Batches are drained no more often: pages that were used at once look the same as those in a batch.
const DRAIN_EVERY: Duration = Duration::from_secs(1);
/// A huge page to be evicted must have been unused for this long before it is split.
const SPLIT_AFTER: Duration = Duration::from_millis(50);

/// See the module.
pub struct UnmapAndLook {
    layout: Arc<LiveLayout>,
    vmm: VmmProcess,
    vmm_map: Pagemap,
    devices: Arc<dyn DmaLook>,
    ways: Mutex<Ways>,
    huge: HugePages,
    /// When batches were last drained.
    drained_at: Mutex<Option<Instant>>,
}

/// The files of a layout, in order, for one look.
pub(super) struct Files {
    layout: Arc<RamLayout>,
    ways: Vec<Way>,
    /// Some memory may be in large folios.
    may_be_large: bool,
}

/// The mapped pages of a piece.
struct Mapped {
    touched: Touched,
    by: Translation,
}

/// The actions that follow from a sample.
#[derive(Default)]
struct Round {
    sampled: Sampled,
    ranges: RangesByWay,
    /// Huge pages mapped 4 KiB at a time.
    in_pieces: Ranges,
    /// A section that was a huge page, and can be one again.
    merge: Option<Hva>,
}

/// The time the VMM needs to map a page again that is in its file: the minimum of several tries, in
/// this process, with memory like a guest's.
///
/// # Errors
/// The error of a system call.
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

impl UnmapAndLook {
    /// For the RAM of `vmm`. `devices` report what their DMA touched.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn new(
        vmm: &VmmProcess,
        layout: Arc<LiveLayout>,
        devices: Arc<dyn DmaLook>,
    ) -> Result<Self, TrackerError> {
        let vmm_map = Pagemap::of_process(vmm.pid())?;
        let huge = HugePages::new(vmm).map_err(TrackerError::Large)?;
        // Opened by pid: it belongs to the VMM if the VMM still runs afterwards.
        if vmm.fd().has_ended()? {
            return Err(PagemapError::Gone.into());
        }
        let tracker = Self {
            vmm: vmm.try_clone()?,
            vmm_map,
            layout,
            devices,
            ways: Mutex::default(),
            huge,
            drained_at: Mutex::default(),
        };
        // Errors show now rather than at the first look.
        tracker.files()?;
        Ok(tracker)
    }

    /// The way, in words.
    pub const NAME: &str = "unmap-and-look";

    /// For each of `sections`: returns what was touched since its last look, and starts over.
    ///
    /// # Errors
    /// [`TrackerError`]; some sections may have started over.
    pub fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        self.look_at(&self.files()?, sections)
    }

    /// The VMM's page table.
    pub(super) const fn page_table(&self) -> &Pagemap {
        &self.vmm_map
    }

    /// The current files.
    pub(super) fn files(&self) -> Result<Files, TrackerError> {
        let layout = self.layout.now();
        let keys = || layout.files().iter().map(|file| file.key());
        let mut known = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() != keys().count() || keys().any(|key| !known.contains_key(&key)) {
            *known = ways(self.vmm.pid(), &layout)?;
            self.huge.keep(layout.page_count());
        }
        let way = |key| known.get(&key).copied().unwrap_or(Way::PageOut);
        Ok(Files {
            ways: keys().map(way).collect(),
            may_be_large: self.huge.may_be(&layout),
            layout,
        })
    }

    /// Makes the VMM drop its translations of `ranges`, as long as its RAM is mapped as in
    /// `layout`.
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

    /// Unmaps ranges in the VMM, in short calls.
    fn unmap(&self, files: &Files, ranges: &RangesByWay) -> Result<(), TrackerError> {
        self.unmap_from_outside(ranges)?;
        self.unmap_inside(&files.layout, &ranges.inside)
    }

    fn unmap_from_outside(&self, ranges: &RangesByWay) -> Result<(), TrackerError> {
        for part in ranges.page_out.parts(CALL_BYTES_MAX, CALL_RANGES_MAX) {
            self.vmm.fd().page_out(&part)?;
        }
        self.unmap_huge(&ranges.page_out_huge)
    }

    fn unmap_huge(&self, ranges: &Ranges) -> Result<(), TrackerError> {
        for part in ranges.parts(CALL_HUGE_BYTES_MAX, CALL_RANGES_MAX) {
            self.vmm.fd().page_out(&part)?;
        }
        Ok(())
    }

    /// Unmaps huge pages that are mapped 4 KiB at a time, so that the next access maps each as one.
    fn unmap_in_pieces(&self, files: &Files, ranges: &Ranges) -> Result<(), TrackerError> {
        if ranges.is_empty() {
            return Ok(());
        }
        match self.unmap_inside(&files.layout, ranges) {
            Ok(()) => Ok(()),
            // No remote system call is possible now. They are unmapped either way.
            Err(TrackerError::Inside(error)) => {
                tracing::debug!(%error, "huge pages stay mapped 4 KiB at a time");
                self.unmap_huge(ranges)
            }
            Err(error) => Err(error),
        }
    }

    /// Collapses a section that was a huge page.
    fn merge(&self, files: &Files, start: Hva) -> Result<(), TrackerError> {
        let mut range = Ranges::default();
        range.add(start, HUGE_BYTES);
        match self.vmm.fd().merge(start, HUGE_BYTES)? {
            Merge::Done => Ok(()),
            Merge::NotMapped => self.unmap_in_pieces(files, &range),
            Merge::NotNow => Ok(()),
        }
    }

    /// The pages of `piece` that devices touched.
    pub(super) fn dma(
        &self,
        files: &Files,
        piece: &Piece,
        marks: Marks,
    ) -> Result<PageSet, TrackerError> {
        let mut dma = PageSet::EMPTY;
        let file = files.layout.files()[piece.file].key();
        let first = FilePage::containing(piece.file_offset);
        let pages = first.run(piece.pages.len());
        let mut visit = |page: FilePage| dma.insert(piece.pages.start.plus(page.since(first)));
        let asked = self.devices.touched(file, pages, marks, &mut visit);
        asked.map_err(TrackerError::Devices)?;
        Ok(dma)
    }

    fn mapped(&self, files: &Files, piece: &Piece, marks: Marks) -> Result<Mapped, TrackerError> {
        let mut touched = Touched {
            cpu: PageSet::EMPTY,
            dma: self.dma(files, piece, marks)?,
        };
        let mut by = Translation::Page;
        let start = piece.pages.start;
        let section = start.section();
        self.vmm_map
            .mapped_runs(piece.hva, piece.pages.len(), |run| {
                let first = start.plus(run.first);
                let run_pages = first.run(run.pages);
                touched.cpu.unite(&PageSet::of_range(section, run_pages));
                if run.by == Translation::Huge {
                    by = Translation::Huge;
                }
            })?;
        Ok(Mapped { touched, by })
    }

    fn kept(
        &self,
        files: &Files,
        section: SectionNo,
        piece: &Piece,
        mapped: &Mapped,
    ) -> Result<Kept, TrackerError> {
        if files.layout.files()[piece.file].is_huge() && !mapped.touched.cpu.is_empty() {
            return Ok(Kept::Whole);
        }
        if mapped.by == Translation::Huge {
            self.huge.is_well(section);
            return Ok(Kept::Whole);
        }
        if !files.may_be_large {
            return Ok(Kept::Small);
        }
        let cpu = &mapped.touched.cpu;
        self.huge.kept(section, piece, &self.vmm_map, cpu)
    }

    fn sample_piece(
        &self,
        files: &Files,
        sample: &Look,
        piece: &Piece,
        round: &mut Round,
    ) -> Result<Touched, TrackerError> {
        let mapped = self.mapped(files, piece, Marks::Forget)?;
        let mut touched = mapped.touched;
        let way = files.ways[piece.file];
        let kept = self.kept(files, sample.section, piece, &mapped)?;
        if kept == Kept::Small {
            // Other pages are unmapped already.
            let out = touched.cpu.intersection(&sample.next);
            touched.cpu = touched.cpu.intersection(&sample.asked);
            round.sampled.unmapped_pages += out.len();
            for run in out.runs(sample.section) {
                let within = run.start.since(piece.pages.start);
                let start = Hva(piece.hva.0 + PageNo(within).byte_offset());
                round.ranges.of(way).add(start, run.bytes());
            }
            let is_free = files.may_be_large && round.merge.is_none() && !touched.cpu.is_empty();
            let layout = &files.layout;
            if is_free
                && self.huge.can_merge(sample.section, piece, layout)?
                && self.huge.may_try(sample.section)
            {
                round.merge = Some(piece.hva);
            }
            return Ok(touched);
        }
        // Unmapped as a whole, touched as a whole: it counts as the chosen pages.
        touched.cpu = sample.asked;
        round.sampled.unmapped_pages += sample.next.len();
        let bytes = piece.pages.bytes();
        if kept == Kept::MappedInPieces && self.huge.may_try(sample.section) {
            round.in_pieces.add(piece.hva, bytes);
        } else {
            round.ranges.of_huge(way).add(piece.hva, bytes);
        }
        Ok(touched)
    }

    /// Unmaps whole sections; huge pages stay whole.
    fn look_at(&self, files: &Files, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let mut all = Vec::with_capacity(sections.len());
        let mut ranges = RangesByWay::default();
        for section in sections {
            let mut of_section = Touched::default();
            for piece in files.pieces(*section) {
                let mapped = self.mapped(files, &piece, Marks::Forget)?;
                of_section.cpu.unite(&mapped.touched.cpu);
                of_section.dma.unite(&mapped.touched.dma);
                if mapped.touched.cpu.is_empty() {
                    continue;
                }
                let way = files.ways[piece.file];
                let of_kept = match self.kept(files, *section, &piece, &mapped)? {
                    Kept::Small => ranges.of(way),
                    Kept::Whole | Kept::MappedInPieces => ranges.of_huge(way),
                };
                of_kept.add(piece.hva, piece.pages.len() << PAGE_SHIFT);
            }
            all.push(of_section);
        }
        self.unmap(files, &ranges)?;
        Ok(all)
    }

    /// Unmaps pages of `sections`, which were unmapped a moment ago, that were passed over because they are in a
    /// batch of another CPU.
    fn unmap_batched(&self, files: &Files, sections: &[SectionNo]) -> Result<(), TrackerError> {
        let mut left = RangesByWay::default();
        for section in sections.iter().filter(|it| !self.huge.is_held(**it)) {
            let paged_out = |piece: &Piece| files.ways[piece.file] == Way::PageOut;
            for piece in files.pieces(*section).filter(paged_out) {
                self.vmm_map
                    .mapped_runs(piece.hva, piece.pages.len(), |run| {
                        // Part of a huge page would be split off it.
                        if run.by == Translation::Page {
                            let start = Hva(piece.hva.0 + PageNo(run.first).byte_offset());
                            left.page_out.add(start, PageNo(run.pages).byte_offset());
                        }
                    })?;
            }
        }
        if left.page_out.is_empty() || !self.may_drain() {
            return Ok(());
        }
        match drain_batches() {
            Ok(Drained::All) => self.unmap_from_outside(&left),
            Ok(Drained::NotHere) => Ok(()),
            Err(error) => {
                tracing::debug!(%error, "pages in batches of other CPUs stay mapped");
                Ok(())
            }
        }
    }

    /// True if batches were not drained lately; they are going to be.
    fn may_drain(&self) -> bool {
        let mut at = (self.drained_at.lock()).unwrap_or_else(PoisonError::into_inner);
        let is_due = at.is_none_or(|at| at.elapsed() >= DRAIN_EVERY);
        if is_due {
            *at = Some(Instant::now());
        }
        is_due
    }

    /// Splits the large folios of sections that were unmapped a moment ago. A huge page that was
    /// used since is not split, and its section is not evicted.
    fn split(&self, files: &Files, sections: &[SectionNo]) -> Result<(), TrackerError> {
        let mut ranges = RangesByWay::default();
        for section in sections {
            let pieces: Vec<Piece> = files.pieces(*section).collect();
            let never_splits = |piece: &Piece| files.layout.files()[piece.file].is_huge();
            if pieces.iter().any(never_splits) {
                continue;
            }
            let mut is_used = false;
            for piece in &pieces {
                let mapped = self.mapped(files, piece, Marks::Keep)?;
                is_used |= self.kept(files, *section, piece, &mapped)? != Kept::Small;
            }
            if is_used {
                self.huge.hold(*section);
                continue;
            }
            let (layout, map) = (&*files.layout, &self.vmm_map);
            self.huge.split(*section, &pieces, layout, map, &self.vmm)?;
            for piece in &pieces {
                let bytes = piece.pages.len() << PAGE_SHIFT;
                ranges.of(files.ways[piece.file]).add(piece.hva, bytes);
            }
        }
        self.unmap(files, &ranges)
    }
}

impl Files {
    pub(super) fn pieces(&self, section: SectionNo) -> impl Iterator<Item = Piece> + '_ {
        self.layout.pieces(section.pages(self.layout.page_count()))
    }
}

fn ways(pid: u32, layout: &RamLayout) -> Result<Ways, TrackerError> {
    let never_swapped = swap::file_systems_without_swap(pid)?;
    // hugetlb pages are on none of the lists from which pages go out.
    let is_unevictable = |file: &RamFile| file.is_huge() || never_swapped.contains(&file.key().dev);
    let way = |file: &RamFile| match is_unevictable(file) {
        true => (file.key(), Way::Inside),
        false => (file.key(), Way::PageOut),
    };
    Ok(layout.files().iter().map(way).collect())
}

impl AccessTracker for UnmapAndLook {
    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, tracker::TrackerError> {
        let files = self.files()?;
        let touched = self.look_at(&files, sections)?;
        if files.may_be_large {
            // Most candidates turn out to be in use, and would lose their huge pages.
            std::thread::sleep(SPLIT_AFTER);
            self.split(&files, sections)?;
        }
        self.unmap_batched(&files, sections)?;
        Ok(touched)
    }

    fn sample(&self, samples: &[Look]) -> Result<Sampled, tracker::TrackerError> {
        let files = self.files()?;
        let mut round = Round::default();
        for sample in samples {
            let mut of_section = Touched::default();
            for piece in files.pieces(sample.section) {
                let touched = self.sample_piece(&files, sample, &piece, &mut round)?;
                of_section.dma.unite(&touched.dma);
                of_section.cpu.unite(&touched.cpu);
            }
            round.sampled.touched.push(of_section);
        }
        // From outside, others are interrupted by the flushes of their TLBs while we work: CPU time tells
        // that, and a wait for a CPU costs nobody anything. Inside, a thread of the VMM stands still.
        let begun = cpu::thread_time();
        self.unmap_from_outside(&round.ranges)?;
        let outside = cpu::thread_time().saturating_sub(begun);
        let begun = Instant::now();
        self.unmap_inside(&files.layout, &round.ranges.inside)?;
        self.unmap_in_pieces(&files, &round.in_pieces)?;
        if let Some(start) = round.merge {
            self.merge(&files, start)?;
        }
        round.sampled.unmapping = outside + begun.elapsed();
        Ok(round.sampled)
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, tracker::TrackerError> {
        let files = self.files()?;
        let mut mapped = PageSet::EMPTY;
        // A section that could not be split must not be evicted, so it counts as in use.
        if self.huge.is_held(section) {
            return Ok(PageSet::of_range(section, section.all_pages()));
        }
        for piece in files.pieces(section) {
            let found = self.mapped(&files, &piece, Marks::Keep)?;
            mapped.unite(&found.touched.by_anybody());
        }
        Ok(mapped)
    }

    fn is_held(&self, section: SectionNo) -> bool {
        self.huge.is_held(section)
    }
}
