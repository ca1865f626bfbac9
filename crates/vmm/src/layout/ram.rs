// SPDX-License-Identifier: Apache-2.0
//! [`RamLayout`]: files, mappings and page numbers; see [`super`].

use super::error::LayoutError;
use super::found::{Known, find_ram, huge_page_warning};
use super::mapping::RamMapping;
use super::new_ram::NewRam;
use crate::Refusal;
use crate::process::{VmmProcess, in_proc};
use pagetide_addr::{FileKey, Hva, PAGE_BYTES, PAGE_SHIFT, PageNo, PageRange, SECTION_PAGES};
use pagetide_sys::memory_file::{FileError, GuestFile};
use std::sync::Arc;

/// Times that memory that looks like holes is counted before the result is trusted.
const LOOKS_FOR_UNSEEN: u32 = 4;

/// A file behind guest RAM.
#[derive(Clone, Debug)]
pub struct RamFile {
    file: Arc<GuestFile>,
    key: FileKey,
    pages: PageRange,
    page_bytes: u64,
}

impl RamFile {
    /// The open file.
    #[must_use]
    pub fn file(&self) -> &GuestFile {
        &self.file
    }

    /// Its identity.
    #[must_use]
    pub const fn key(&self) -> FileKey {
        self.key
    }

    /// True if it consists of huge pages: they are present or absent as a whole.
    #[must_use]
    pub const fn is_huge(&self) -> bool {
        self.page_bytes > PAGE_BYTES
    }

    /// The pages of the VM's RAM that it holds.
    #[must_use]
    pub const fn pages(&self) -> PageRange {
        self.pages
    }
}

/// Part of a range of pages that lies in one file and one mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The pages.
    pub pages: PageRange,
    /// Position of their file among the layout's files.
    pub file: usize,
    /// Their first byte in the file.
    pub file_offset: u64,
    /// Their first byte in the VMM.
    pub hva: Hva,
}

/// A VMM's RAM: files and mappings.
#[derive(Clone, Debug, Default)]
pub struct RamLayout {
    /// Ordered by their pages.
    pub(super) files: Vec<RamFile>,
    /// Ordered by file and offset, so by page; with the first page of each.
    mappings: Vec<(PageNo, RamMapping)>,
    pub(super) warnings: Vec<String>,
}

impl RamLayout {
    /// The RAM of a running VMM, without a check for other users of it (see [`crate::hazards`]).
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn of_process(vmm: &VmmProcess) -> Result<Self, Refusal> {
        let pid = vmm.pid();
        let maps = in_proc(pid)
            .and_then(|p| p.smaps())
            .map_err(|e| Refusal::parsing(pid, "read the mappings", e))?
            .0;
        if !vmm.is_emulator()? {
            return Err(Refusal::NotAVmm {
                pid,
                name: vmm.name().to_owned(),
            });
        }
        let found = find_ram(vmm, &maps, Known::Nothing)?;
        let name = || vmm.name().to_owned();
        match (found.files.is_empty(), &found.on_disk) {
            (true, Some(path)) => {
                let (name, path) = (name(), path.clone());
                return Err(Refusal::FileNotInMemory { pid, name, path });
            }
            (true, None) => return Err(Refusal::PrivateRam { pid, name: name() }),
            (false, _) => {}
        }
        let warning = huge_page_warning(&found.flags);
        let mut layout = Self::default();
        for new in found.into_new(vmm)? {
            let first = layout.room_for(new.page_count());
            layout = layout.with(&new, first).map_err(|source| Refusal::Layout {
                pid,
                name: name(),
                source,
            })?;
        }
        layout.warnings.extend(warning);
        vmm.still_runs()?;
        Ok(layout)
    }

    /// The layout of given files and where they are mapped (by position among `files`).
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn from_mappings(
        files: Vec<GuestFile>,
        mappings: &[RamMapping],
    ) -> Result<Self, LayoutError> {
        let mut layout = Self::default();
        for (number, file) in files.into_iter().enumerate() {
            let len_bytes = file.len_bytes()?;
            let own = mappings.iter().filter(|m| m.file == number).copied();
            let new = NewRam::new(file, len_bytes, own.collect())?;
            let first = layout.room_for(new.page_count());
            layout = layout.with(&new, first)?;
        }
        Ok(layout)
    }

    /// The first section boundary from which `page_count` page numbers are free.
    #[must_use]
    pub fn room_for(&self, page_count: u64) -> PageNo {
        let mut first = 0_u64;
        for file in &self.files {
            if first.saturating_add(page_count) <= file.pages.start.0 {
                break;
            }
            first = file.pages.end.0.next_multiple_of(SECTION_PAGES);
        }
        PageNo(first)
    }

    /// This layout and one more file, whose first page is `first`.
    ///
    /// # Errors
    /// [`LayoutError::Taken`].
    pub fn with(&self, new: &NewRam, first: PageNo) -> Result<Self, LayoutError> {
        // No pages for RAM that would lie beyond the last page number.
        let fits = first.0.checked_add(new.page_count()).is_some();
        let pages = first.run(if fits { new.page_count() } else { 0 });
        let taken = |file: &RamFile| file.key == new.key() || overlap(file.pages, pages);
        if pages.is_empty() || self.files.iter().any(taken) {
            return Err(LayoutError::Taken {
                key: new.key(),
                pages,
            });
        }
        let mut layout = self.clone();
        let at = self.files.partition_point(|file| file.pages.start < first);
        layout.files.insert(
            at,
            RamFile {
                file: Arc::clone(new.file()),
                key: new.key(),
                pages,
                page_bytes: new.page_bytes(),
            },
        );
        for (_, mapping) in &mut layout.mappings {
            mapping.file += usize::from(mapping.file >= at);
        }
        let more = new.mappings().iter().map(|mapping| {
            let page = first.plus(mapping.file_offset >> PAGE_SHIFT);
            let file = at;
            (page, RamMapping { file, ..*mapping })
        });
        layout.mappings.extend(more);
        layout.mappings.sort_unstable_by_key(|(start, _)| *start);
        Ok(layout)
    }

    /// This layout without the file `key`.
    #[must_use]
    pub fn without(&self, key: FileKey) -> Self {
        let Some(gone) = self.files.iter().position(|file| file.key == key) else {
            return self.clone();
        };
        let mut layout = self.clone();
        layout.files.remove(gone);
        layout.mappings.retain(|(_, mapping)| mapping.file != gone);
        for (_, mapping) in &mut layout.mappings {
            mapping.file -= usize::from(mapping.file > gone);
        }
        layout
    }

    /// The file `key`.
    #[must_use]
    pub fn file(&self, key: FileKey) -> Option<&RamFile> {
        self.files.iter().find(|file| file.key == key)
    }

    /// The files, in the order of their pages.
    #[must_use]
    pub fn files(&self) -> &[RamFile] {
        &self.files
    }

    /// The identities of the files, in the order of their pages.
    pub fn keys(&self) -> impl Iterator<Item = FileKey> + '_ {
        self.files.iter().map(RamFile::key)
    }

    /// Those of files whose pages the kernel could swap out: it never does that to huge pages.
    pub fn swappable_keys(&self) -> impl Iterator<Item = FileKey> + '_ {
        let small = |file: &&RamFile| !file.is_huge();
        self.files.iter().filter(small).map(RamFile::key)
    }

    /// Bytes of RAM in huge pages.
    #[must_use]
    pub fn huge_bytes(&self) -> u64 {
        let huge = self.files.iter().filter(|file| file.is_huge());
        huge.map(|file| file.pages.bytes()).sum()
    }

    /// True if `page` is part of a huge page.
    #[must_use]
    pub fn is_huge(&self, page: PageNo) -> bool {
        let has = |file: &&RamFile| file.pages.contains(page);
        self.files.iter().find(has).is_some_and(RamFile::is_huge)
    }

    /// `pages`, with all of the huge pages that they are part of.
    #[must_use]
    pub fn widened(&self, pages: PageRange) -> PageRange {
        if pages.is_empty() || !self.files.iter().any(RamFile::is_huge) {
            return pages;
        }
        let last = PageNo(pages.end.0 - 1);
        let start = match self.is_huge(pages.start) {
            true => pages.start.section().first_page(),
            false => pages.start,
        };
        let end = match self.is_huge(last) {
            true => last.section().first_page().plus(SECTION_PAGES),
            false => pages.end,
        };
        PageRange::new(start, end)
    }

    /// The mappings, in the order of their pages.
    pub fn mappings(&self) -> impl Iterator<Item = &RamMapping> {
        self.mappings.iter().map(|(_, mapping)| mapping)
    }

    /// What an operator should know although it prevents nothing.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The page after the last one. There may be gaps before it that are not memory.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.files.last().map_or(0, |file| file.pages.end.0)
    }

    /// Bytes in all files.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.pages.bytes()).sum()
    }

    /// Bytes of memory the files take up now.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn allocated_bytes(&self) -> Result<u64, FileError> {
        self.files
            .iter()
            .map(|file| file.file.allocated_bytes())
            .sum()
    }

    /// Pages that have memory and yet look like holes: allocated by `fallocate` and not touched
    /// since. They cannot be distinguished from absent ones, and nothing can be installed there. 0
    /// unless `fallocate` was used.
    ///
    /// The guest runs during the count, so it is done several times: memory that comes and goes
    /// within one count does not affect the smallest result.
    ///
    /// # Errors
    /// The error of `fstat` or `lseek`.
    pub fn unseen_pages(&self) -> Result<u64, FileError> {
        let mut least = u64::MAX;
        for _ in 0..LOOKS_FOR_UNSEEN {
            let mut unseen = 0;
            for file in &self.files {
                unseen += unseen_bytes(&file.file)?;
            }
            least = least.min(unseen >> PAGE_SHIFT);
            if least == 0 {
                break;
            }
        }
        Ok(least)
    }

    /// `pages` cut at the boundaries of files and mappings, ascending; pages that are not RAM are
    /// left out.
    pub fn pieces(&self, pages: PageRange) -> impl Iterator<Item = Piece> + '_ {
        let first = self
            .mappings
            .partition_point(|(start, _)| *start <= pages.start)
            .saturating_sub(1);
        self.mappings[first.min(self.mappings.len())..]
            .iter()
            .take_while(move |(start, _)| *start < pages.end)
            .filter_map(move |(start, mapping)| {
                let all = PageRange::new(*start, start.plus(mapping.len_bytes >> PAGE_SHIFT));
                let part = all.intersect(pages);
                let within = (part.start.0.checked_sub(start.0)?) << PAGE_SHIFT;
                (!part.is_empty()).then_some(Piece {
                    pages: part,
                    file: mapping.file,
                    file_offset: mapping.file_offset + within,
                    hva: Hva(mapping.hva.0 + within),
                })
            })
    }

    /// The page at address `hva` of the VMM; `None` if that is not RAM.
    #[must_use]
    pub fn page_at(&self, hva: Hva) -> Option<PageNo> {
        self.mappings.iter().find_map(|(start, mapping)| {
            let within = hva.offset_from(mapping.hva)?;
            (within < mapping.len_bytes).then_some(start.plus(within >> PAGE_SHIFT))
        })
    }

    /// The page at byte `offset` of the file `key`; `None` if there is none.
    #[must_use]
    pub fn page_in_file(&self, key: FileKey, offset: u64) -> Option<PageNo> {
        let file = self.file(key)?;
        let page = file.pages.start.plus(offset >> PAGE_SHIFT);
        file.pages.contains(page).then_some(page)
    }
}

fn unseen_bytes(file: &GuestFile) -> Result<u64, FileError> {
    let before = file.allocated_bytes()?;
    let runs = file.data_runs(0, file.len_bytes()?)?;
    // Pages added meanwhile are not in the first number, pages removed meanwhile not in the second.
    let allocated = before.min(file.allocated_bytes()?);
    let seen: u64 = runs.iter().map(|(_, bytes)| bytes).sum();
    Ok(allocated.saturating_sub(seen))
}

fn overlap(one: PageRange, other: PageRange) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PAGE_BYTES;

    fn file(pages: u64) -> GuestFile {
        GuestFile::new_memfd("layout", pages * PAGE_BYTES).unwrap()
    }

    fn mapping(file: usize, first_page: u64, pages: u64, hva: u64) -> RamMapping {
        RamMapping {
            hva: Hva(hva),
            len_bytes: pages * PAGE_BYTES,
            file,
            file_offset: first_page * PAGE_BYTES,
        }
    }

    fn two_files() -> RamLayout {
        RamLayout::from_mappings(
            vec![file(100), file(50)],
            &[
                mapping(0, 60, 40, 0x10_0000),
                mapping(1, 0, 50, 0x100_0000),
                mapping(0, 0, 60, 0x200_0000),
            ],
        )
        .unwrap()
    }

    #[test]
    fn pages_run_along_the_files_and_map_to_addresses_and_back() {
        let layout = two_files();
        assert_eq!(layout.page_count(), 562);
        assert_eq!(layout.len_bytes(), 150 * PAGE_BYTES);
        for page in (0..100).chain(512..562).map(PageNo) {
            let piece = layout.pieces(page.single()).next().unwrap();
            assert_eq!(piece.pages, page.single());
            assert_eq!(layout.page_at(piece.hva), Some(page));
            let key = layout.files()[piece.file].key();
            assert_eq!(layout.page_in_file(key, piece.file_offset), Some(page));
        }
        assert_eq!(layout.page_at(Hva(0x10_0000 - 1)), None);
        assert_eq!(
            layout.page_in_file(layout.files()[1].key(), 50 * PAGE_BYTES),
            None
        );
    }

    #[test]
    fn a_range_is_cut_at_borders_of_mappings_and_files_and_ends_with_the_ram() {
        let layout = two_files();
        let pieces: Vec<_> = layout
            .pieces(PageRange::new(PageNo(50), PageNo(1000)))
            .map(|p| (p.pages.start.0, p.pages.len(), p.file, p.hva.0))
            .collect();
        assert_eq!(
            pieces,
            [
                (50, 10, 0, 0x200_0000 + 50 * PAGE_BYTES),
                (60, 40, 0, 0x10_0000),
                (512, 50, 1, 0x100_0000)
            ]
        );
        let beyond = PageRange::new(PageNo(562), PageNo(570));
        assert_eq!(layout.pieces(beyond).count(), 0);
        let empty = PageRange::new(PageNo(7), PageNo(7));
        assert_eq!(layout.pieces(empty).count(), 0);
    }

    #[test]
    fn pages_allocated_and_never_touched_are_counted_until_they_are() {
        let layout = two_files();
        assert_eq!(layout.unseen_pages().unwrap(), 0);
        let file = layout.files()[1].file();
        file.write_at(0, &[1; 3 * 4096]).unwrap();
        assert_eq!(layout.unseen_pages().unwrap(), 0);
        file.allocate(0, 10 * PAGE_BYTES).unwrap();
        assert_eq!(layout.unseen_pages().unwrap(), 7);
        file.write_at(3 * PAGE_BYTES, &[1; 2 * 4096]).unwrap();
        assert_eq!(layout.unseen_pages().unwrap(), 5);
        file.punch(5 * PAGE_BYTES, 5 * PAGE_BYTES).unwrap();
        assert_eq!(layout.unseen_pages().unwrap(), 0);
    }

    #[test]
    fn files_mapped_in_part_or_twice_are_refused() {
        let hole = RamLayout::from_mappings(vec![file(10)], &[mapping(0, 0, 9, 0x1000)]);
        assert!(matches!(
            hole,
            Err(LayoutError::Hole { offset: 0x9000, .. })
        ));
        let hole = RamLayout::from_mappings(vec![file(10)], &[mapping(0, 1, 9, 0x1000)]);
        assert!(matches!(hole, Err(LayoutError::Hole { offset: 0, .. })));
        let twice = RamLayout::from_mappings(
            vec![file(10)],
            &[mapping(0, 0, 10, 0x1000), mapping(0, 5, 1, 0x10_0000)],
        );
        assert!(matches!(
            twice,
            Err(LayoutError::Twice { offset: 0x5000, .. })
        ));
    }
}
