// SPDX-License-Identifier: Apache-2.0
//! [`Pagemap`]: which pages a process currently has in its page table.
//!
//! *Present* here means mapped by that process; a page may be in its file and in no page table.
//! Write-protect markers of userfaultfd also set the *swapped* bit (62), so it says nothing about
//! swap.
//!
//! # Two ways to query
//! `/proc/PID/pagemap` is read, eight bytes a page. Since Linux 6.7 the `PAGEMAP_SCAN` ioctl on the
//! same file returns runs, and distinguishes 2 MiB translations. [`PagemapWay::of_this_kernel`]
//! determines once which of them this kernel has. Microseconds for a section of 512 pages (Linux
//! 6.18):
//!
//! | | nothing mapped | all mapped | every second page |
//! |---|---|---|---|
//! | `PAGEMAP_SCAN` | 0.5 | 5 | 4 |
//! | pagemap, all 512 entries at once | 2 | 13 | 9 |
//! | pagemap, entry by entry for 16 of them | 8 | 9 | 10 |
//! | `PAGEMAP_SCAN` for each of 16 | 8 | 9 | 10 |
//!
//! So a scan of the whole section is also the cheapest way to query some of its pages.
#![expect(unsafe_code, reason = "PAGEMAP_SCAN has no safe wrapper")]

use crate::page_flags::{FrameNo, PageFlags};
use pagetide_addr::{Hva, PAGE_BYTES, PAGE_SHIFT};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// Entries per read: the kernel itself walks 2 MiB at a time.
const CHUNK_ENTRIES: usize = 512;
const ENTRY_BYTES: usize = 8;
/// Most pages that one translation can map.
const HUGE_PAGES: u64 = 512;
/// Bits of a present page's entry that hold its page frame.
const FRAME_BITS: u64 = (1 << 55) - 1;
/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// Most runs that one scan returns: a section cannot have more.
const SCAN_RUNS: usize = 256;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanRun {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<ScanArgument>() == 96 && size_of::<ScanRun>() == 24);

/// Why a pagemap could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PagemapError {
    /// It could not be opened.
    #[error("cannot open {path}: {source} (root, or CAP_SYS_PTRACE, is needed)")]
    Open {
        /// Its path.
        path: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It could not be read.
    #[error("reading the pagemap entries of {pages} pages at {address} failed: {source}")]
    Read {
        /// Address of the first page.
        address: Hva,
        /// Number of pages.
        pages: u64,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The process is gone.
    #[error("the process is gone")]
    Gone,
}

/// How a page table is read. See the module documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PagemapWay {
    /// With the ioctl, in runs.
    Scan,
    /// Entry by entry.
    Read,
}

impl PagemapWay {
    /// The best way that this kernel supports. Determined once.
    #[must_use]
    pub fn of_this_kernel() -> Self {
        static WAY: OnceLock<PagemapWay> = OnceLock::new();
        *WAY.get_or_init(|| {
            // On a page of our own: the one that holds this static.
            let here = Hva(std::ptr::from_ref(&WAY).addr() as u64 & !(PAGE_BYTES - 1));
            let tried = Pagemap::of_self().map(|map| map.scan(here, 1, |_| ()));
            match tried {
                Ok(Ok(())) => Self::Scan,
                Ok(Err(_)) | Err(_) => Self::Read,
            }
        })
    }

    /// Its name, for the log.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scan => "PAGEMAP_SCAN",
            Self::Read => "/proc/PID/pagemap",
        }
    }
}

/// Size of the translations of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Translation {
    /// 4 KiB each.
    Page,
    /// One of 2 MiB; or 512 that map such a page, which the pagemap cannot distinguish.
    Huge,
}

/// A run of mapped pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRun {
    /// Position of the first page.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
    /// Their translations.
    pub by: Translation,
}

/// The page table of one process, opened once.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    /// Tells whether a frame is part of a huge page; `None` without the privilege.
    flags: Option<PageFlags>,
}

/// The page table's information about one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagemapEntry(u64);

impl PagemapEntry {
    /// The process has the page mapped.
    #[must_use]
    pub const fn is_present(self) -> bool {
        self.0 >> 63 != 0
    }

    /// The page is write-protected by a userfaultfd, mapped or not.
    #[must_use]
    pub const fn is_write_protected(self) -> bool {
        self.0 >> 57 & 1 != 0
    }

    /// The page's frame, if the page is present and we have the privilege (`CAP_SYS_ADMIN`).
    #[must_use]
    pub const fn frame(self) -> Option<FrameNo> {
        let frame = self.0 & FRAME_BITS;
        if self.is_present() && frame != 0 {
            Some(FrameNo(frame))
        } else {
            None
        }
    }
}

impl Pagemap {
    /// Of process `pid`.
    ///
    /// # Errors
    /// [`PagemapError::Open`].
    pub fn of_process(pid: u32) -> Result<Self, PagemapError> {
        Self::open(format!("/proc/{pid}/pagemap"))
    }

    /// Of this process.
    ///
    /// # Errors
    /// [`PagemapError::Open`].
    pub fn of_self() -> Result<Self, PagemapError> {
        Self::open("/proc/self/pagemap".to_owned())
    }

    fn open(path: String) -> Result<Self, PagemapError> {
        match File::open(&path) {
            Ok(file) => Ok(Self {
                file,
                flags: PageFlags::open().ok(),
            }),
            Err(source) => Err(PagemapError::Open { path, source }),
        }
    }

    /// Calls `see` for each run of mapped pages among the `pages` pages from `start` on, ascending.
    /// Adjacent runs may be reported separately.
    ///
    /// # Errors
    /// [`PagemapError::Gone`] or [`PagemapError::Read`]; some runs may have been reported.
    pub fn mapped_runs(
        &self,
        start: Hva,
        pages: u64,
        see: impl FnMut(MappedRun),
    ) -> Result<(), PagemapError> {
        match PagemapWay::of_this_kernel() {
            PagemapWay::Scan => self.scan(start, pages, see),
            PagemapWay::Read => self.read_runs(start, pages, see),
        }
    }

    fn scan(
        &self,
        start: Hva,
        pages: u64,
        mut see: impl FnMut(MappedRun),
    ) -> Result<(), PagemapError> {
        let end = start.0 + pages * PAGE_BYTES;
        let mut from = start.0;
        let mut found = 0;
        while from < end {
            let mut runs = [ScanRun::default(); SCAN_RUNS];
            let (count, walked) = match self.scan_once(from..end, &mut runs) {
                Ok(scanned) => scanned,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Err(PagemapError::Gone),
                Err(source) => {
                    return Err(PagemapError::Read {
                        address: Hva(from),
                        pages: (end - from) / PAGE_BYTES,
                        source,
                    });
                }
            };
            for run in &runs[..count] {
                found += 1;
                see(MappedRun {
                    first: (run.start - start.0) >> PAGE_SHIFT,
                    pages: (run.end - run.start) >> PAGE_SHIFT,
                    by: if run.categories & PAGE_IS_HUGE == 0 {
                        Translation::Page
                    } else {
                        Translation::Huge
                    },
                });
            }
            from = walked.max(from + PAGE_BYTES);
        }
        // A process that has ended maps nothing; only a read reports that it has ended.
        if found == 0 && pages > 0 {
            self.visit(start, 1, |_, _| ())?;
        }
        Ok(())
    }

    /// Number of runs, and the end of the walk.
    fn scan_once(
        &self,
        range: std::ops::Range<u64>,
        runs: &mut [ScanRun; SCAN_RUNS],
    ) -> io::Result<(usize, u64)> {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start: range.start,
            end: range.end,
            vector: runs.as_mut_ptr().expose_provenance() as u64,
            vector_len: SCAN_RUNS as u64,
            category_mask: PAGE_IS_PRESENT,
            return_mask: PAGE_IS_PRESENT | PAGE_IS_HUGE,
            ..ScanArgument::default()
        };
        // SAFETY: the request matches this structure, which lives through the call and has the
        // kernel's layout; the kernel writes at most `vector_len` runs into `runs`, which has the
        // kernel's layout too, and nothing else. No flag is set, so nothing changes in the examined
        // process.
        let count = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                PAGEMAP_SCAN,
                std::ptr::from_mut(&mut argument),
            )
        };
        match usize::try_from(count) {
            Ok(count) => Ok((count.min(SCAN_RUNS), argument.walk_end)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }

    fn read_runs(
        &self,
        start: Hva,
        pages: u64,
        mut see: impl FnMut(MappedRun),
    ) -> Result<(), PagemapError> {
        let mut last: Option<MappedRun> = None;
        let mut add = |run: MappedRun| match &mut last {
            Some(last) if last.first + last.pages == run.first && last.by == run.by => {
                last.pages += run.pages;
            }
            _ => {
                if let Some(done) = last.replace(run) {
                    see(done);
                }
            }
        };
        // The range of a possible 2 MiB translation is examined as a whole.
        let mut done = 0;
        let mut entries = Vec::with_capacity(CHUNK_ENTRIES);
        while done < pages {
            let at = (start.0 >> PAGE_SHIFT) + done;
            let count = (HUGE_PAGES - at % HUGE_PAGES).min(pages - done);
            entries.clear();
            self.visit(Hva(at << PAGE_SHIFT), count, |_, entry| entries.push(entry))?;
            let by = self.translation(&entries);
            for (position, _) in (done..).zip(&entries).filter(|(_, e)| e.is_present()) {
                add(MappedRun {
                    first: position,
                    pages: 1,
                    by,
                });
            }
            done += count;
        }
        if let Some(done) = last {
            see(done);
        }
        Ok(())
    }

    /// Huge, if these are the entries of a whole huge page.
    fn translation(&self, entries: &[PagemapEntry]) -> Translation {
        let frame = |entry: &PagemapEntry| entry.frame();
        let (Some(flags), Some(first)) = (&self.flags, entries.first().and_then(frame)) else {
            return Translation::Page;
        };
        let follow_one_another = entries.len() as u64 == HUGE_PAGES
            && (first.0..)
                .zip(entries)
                .all(|(at, entry)| frame(entry) == Some(FrameNo(at)));
        if follow_one_another && flags.is_huge(first).unwrap_or(false) {
            Translation::Huge
        } else {
            Translation::Page
        }
    }

    /// Calls `see(position, entry)` for each of `pages` pages from `start` on.
    ///
    /// # Errors
    /// [`PagemapError::Gone`] or [`PagemapError::Read`]; some pages may have been reported.
    pub fn visit(
        &self,
        start: Hva,
        pages: u64,
        mut see: impl FnMut(u64, PagemapEntry),
    ) -> Result<(), PagemapError> {
        let mut buffer = [0_u8; CHUNK_ENTRIES * ENTRY_BYTES];
        let mut done = 0;
        while done < pages {
            let count = crate::to_usize((pages - done).min(CHUNK_ENTRIES as u64));
            let wanted = &mut buffer[..count * ENTRY_BYTES];
            let at = (start.0 >> PAGE_SHIFT) + done;
            let got = match self.file.read_at(wanted, at * ENTRY_BYTES as u64) {
                // After the process has lost its memory, this file is empty.
                Ok(0) => return Err(PagemapError::Gone),
                Ok(got) => got,
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Err(PagemapError::Gone),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    return Err(PagemapError::Read {
                        address: Hva(start.0 + done * PAGE_BYTES),
                        pages: pages - done,
                        source,
                    });
                }
            };
            for entry in wanted[..got].as_chunks::<ENTRY_BYTES>().0 {
                see(done, PagemapEntry(u64::from_ne_bytes(*entry)));
                done += 1;
            }
        }
        Ok(())
    }

    /// Number of mapped pages among the `pages` pages from `start` on.
    ///
    /// # Errors
    /// As [`Pagemap::mapped_runs`].
    pub fn count_present(&self, start: Hva, pages: u64) -> Result<u64, PagemapError> {
        let mut count = 0;
        self.mapped_runs(start, pages, |run| count += run.pages)?;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memory_file::GuestFile;
    use std::os::fd::AsFd;

    #[test]
    fn pages_touched_through_a_mapping_are_present_until_their_translations_are_dropped() {
        const PAGES: u64 = 1200;
        let file = GuestFile::new_memfd("pagemap", PAGES * PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), PAGES * PAGE_BYTES).unwrap();
        let map = Pagemap::of_self().unwrap();
        let base = Hva(mapping.address() as u64);
        assert_eq!(map.count_present(base, PAGES).unwrap(), 0);
        for page in [0, 511, 512, 1199] {
            mapping.copy_to(page * PAGE_BYTES, &[1]).unwrap();
        }
        let mut seen = Vec::new();
        map.visit(base, PAGES, |i, entry| {
            if entry.is_present() {
                seen.push(i);
            }
        })
        .unwrap();
        // Huge pages may have mapped adjacent pages; the touched ones must be there.
        for page in [0, 511, 512, 1199] {
            assert!(seen.contains(&page), "{page} in {seen:?}");
        }
        mapping.drop_translations(0, PAGES * PAGE_BYTES).unwrap();
        assert_eq!(map.count_present(base, PAGES).unwrap(), 0);
    }

    fn both(map: &Pagemap, start: Hva, pages: u64) -> [Vec<MappedRun>; 2] {
        let (mut scanned, mut read) = (Vec::new(), Vec::new());
        map.scan(start, pages, |run| scanned.push(run)).unwrap();
        map.read_runs(start, pages, |run| read.push(run)).unwrap();
        [scanned, read]
    }

    fn has_scan() -> bool {
        let has = PagemapWay::of_this_kernel() == PagemapWay::Scan;
        if !has {
            eprintln!("SKIPPED: this kernel has no PAGEMAP_SCAN (Linux 6.7)");
        }
        has
    }

    #[test]
    fn scan_and_read_tell_the_same_of_pages_in_each_state() {
        const PAGES: u64 = 1024;
        if !has_scan() {
            return;
        }
        let file = GuestFile::new_memfd("states", PAGES * PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), PAGES * PAGE_BYTES).unwrap();
        let base = Hva(mapping.address() as u64);
        let map = Pagemap::of_self().unwrap();
        let [scanned, read] = both(&map, base, PAGES);
        assert!(scanned.is_empty() && read.is_empty(), "absent");
        // Pages in a row, alone, and at both ends; more runs than one call returns.
        let mapped = |page: u64| {
            page < 3 || page == 1023 || (100..900).contains(&page) && page.is_multiple_of(2)
        };
        for page in (0..PAGES).filter(|page| mapped(*page)) {
            mapping.copy_to(page * PAGE_BYTES, &[1]).unwrap();
        }
        let pages_of = |runs: &[MappedRun]| -> Vec<u64> {
            runs.iter()
                .flat_map(|run| run.first..run.first + run.pages)
                .collect()
        };
        let wanted: Vec<u64> = (0..PAGES).filter(|page| mapped(*page)).collect();
        let [scanned, read] = both(&map, base, PAGES);
        assert_eq!(pages_of(&scanned), wanted);
        assert_eq!(pages_of(&read), wanted);
        assert!(
            scanned
                .iter()
                .chain(&read)
                .all(|run| run.by == Translation::Page)
        );
        // From the middle of a run to the middle of another.
        let [scanned, read] = both(&map, Hva(base.0 + PAGE_BYTES), 200);
        assert_eq!(pages_of(&scanned), pages_of(&read));
        assert_eq!(pages_of(&read)[..2], [0, 1]);
        // In the file, but in no page table.
        mapping.drop_translations(0, 3 * PAGE_BYTES).unwrap();
        assert!(file.is_data(0).unwrap());
        let [scanned, read] = both(&map, base, 512);
        assert_eq!(pages_of(&scanned), pages_of(&read));
        assert_eq!(pages_of(&read).first(), Some(&100));
        // Punched.
        file.punch(0, 512 * PAGE_BYTES).unwrap();
        let [scanned, read] = both(&map, base, 512);
        assert!(
            scanned.is_empty() && read.is_empty(),
            "{scanned:?} {read:?}"
        );
    }

    #[test]
    fn scan_and_read_tell_the_same_of_pages_under_write_protection() {
        use crate::uffd::{Features, ProtectOutcome, Userfaultfd, Watch, WriteProtection};
        const PAGES: u64 = 512;
        if !has_scan() {
            return;
        }
        let uffd = match Userfaultfd::create_here() {
            Ok(uffd) => uffd,
            Err(error) => {
                eprintln!("SKIPPED: no userfaultfd: {error}");
                return;
            }
        };
        uffd.api(Features::WANTED).unwrap();
        let file = GuestFile::new_memfd("protected", PAGES * PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), PAGES * PAGE_BYTES).unwrap();
        for page in 0..64 {
            mapping.copy_to(page * PAGE_BYTES, &[1]).unwrap();
        }
        let base = Hva(mapping.address() as u64);
        uffd.register(base, PAGES * PAGE_BYTES, Watch::MissingAndWriteProtected)
            .unwrap();
        // Mapped ones, unmapped ones, and holes, where only markers are left.
        mapping.drop_translations(0, 16 * PAGE_BYTES).unwrap();
        let protected = uffd.write_protect(base, 128 * PAGE_BYTES, WriteProtection::On);
        assert_eq!(protected.unwrap(), ProtectOutcome::Done);
        let map = Pagemap::of_self().unwrap();
        let [scanned, read] = both(&map, base, PAGES);
        assert_eq!(scanned, read);
        let kept = MappedRun {
            first: 16,
            pages: 48,
            by: Translation::Page,
        };
        assert_eq!(read, [kept]);
    }

    /// A tmpfs with huge pages, whatever the host's setting; unmounted on drop.
    struct HugeMount(tempfile::TempDir);

    impl HugeMount {
        fn new() -> Option<Self> {
            let dir = tempfile::tempdir().unwrap();
            let mut mount = std::process::Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", "huge=always,size=64m", "huge"]);
            match mount.arg(dir.path()).output() {
                Ok(said) if said.status.success() => Some(Self(dir)),
                said => {
                    eprintln!("SKIPPED: no tmpfs in huge pages can be mounted: {said:?}");
                    None
                }
            }
        }

        fn file(&self, bytes: u64) -> File {
            let path = self.0.path().join("ram");
            let mut options = File::options();
            let file = options
                .read(true)
                .write(true)
                .create_new(true)
                .open(path)
                .unwrap();
            file.set_len(bytes).unwrap();
            file
        }
    }

    impl Drop for HugeMount {
        fn drop(&mut self) {
            let umount = std::process::Command::new("umount")
                .arg("-l")
                .arg(self.0.path())
                .status();
            if !umount.is_ok_and(|status| status.success()) {
                eprintln!("{} stays mounted", self.0.path().display());
            }
        }
    }

    #[test]
    fn huge_page_is_told_as_such_until_one_page_of_it_is_punched() {
        const BYTES: u64 = 4 << 20;
        let Some(mount) = HugeMount::new() else {
            return;
        };
        let file = mount.file(BYTES);
        let mapping = SharedMapping::new(file.as_fd(), BYTES).unwrap();
        mapping.copy_to(0, &[1]).unwrap();
        let base = Hva(mapping.address() as u64);
        let map = Pagemap::of_self().unwrap();
        let whole = MappedRun {
            first: 0,
            pages: 512,
            by: Translation::Huge,
        };
        let mut read = Vec::new();
        map.read_runs(base, 1024, |run| read.push(run)).unwrap();
        if read.first().is_none_or(|run| run.by == Translation::Page) {
            eprintln!("SKIPPED: no huge page was free: {read:?}");
            return;
        }
        assert_eq!(read, [whole]);
        let mut frame = None;
        map.visit(Hva(base.0 + 300 * PAGE_BYTES), 1, |_, entry| {
            frame = entry.frame()
        })
        .unwrap();
        let (flags, frame) = (PageFlags::open().unwrap(), frame.unwrap());
        assert!(flags.is_huge(frame).unwrap());
        assert_eq!(flags.large_among(&[frame]).unwrap(), [frame]);
        assert_eq!(flags.head(frame).unwrap().0 % 512, 0);
        if has_scan() {
            assert_eq!(both(&map, base, 1024), [vec![whole], vec![whole]]);
            // Half of the translation.
            let [scanned, read] = both(&map, base, 256);
            assert_eq!((scanned[0].pages, read[0].pages), (256, 256));
        }
        let file = GuestFile::from(std::os::fd::OwnedFd::from(file));
        file.punch(9 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert!(!file.is_data(9 * PAGE_BYTES).unwrap());
        mapping.copy_to(300 * PAGE_BYTES, &[1]).unwrap();
        let mut read = Vec::new();
        map.read_runs(base, 512, |run| read.push(run)).unwrap();
        assert!(!read.is_empty());
        assert!(
            read.iter().all(|run| run.by == Translation::Page),
            "{read:?}"
        );
    }

    #[test]
    fn part_of_a_huge_page_that_is_held_is_zeroed_by_a_punch_and_stays() {
        use rustix::pipe::{SpliceFlags, splice};
        const BYTES: u64 = 2 << 20;
        let Some(mount) = HugeMount::new() else {
            return;
        };
        let file = mount.file(BYTES);
        let descriptor = file.try_clone().unwrap();
        let guest = GuestFile::from(std::os::fd::OwnedFd::from(descriptor));
        guest.write_at(0, &vec![7; crate::to_usize(BYTES)]).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), BYTES).unwrap();
        mapping.copy_to(0, &[7]).unwrap();
        let mut frame = None;
        let map = Pagemap::of_self().unwrap();
        let base = Hva(mapping.address() as u64);
        map.visit(base, 1, |_, entry| frame = entry.frame())
            .unwrap();
        if !PageFlags::open().unwrap().is_huge(frame.unwrap()).unwrap() {
            eprintln!("SKIPPED: no huge page was free");
            return;
        }
        // A pipe holds the first of its pages.
        let (_from, to) = std::io::pipe().unwrap();
        let mut first = 0;
        let held = splice(
            &file,
            Some(&mut first),
            &to,
            None,
            4096,
            SpliceFlags::empty(),
        );
        assert_eq!(held.unwrap(), 4096);
        let at = 100 * PAGE_BYTES;
        guest.punch(at, PAGE_BYTES).unwrap();
        // Code that relies on a punched page being gone reads this:
        assert!(
            guest.is_data(at).unwrap(),
            "this kernel takes parts of held pages away"
        );
        assert_eq!(
            guest.present_runs(at, PAGE_BYTES).unwrap(),
            [(at, PAGE_BYTES)]
        );
        let mut byte = [1];
        guest.read_at(at, &mut byte).unwrap();
        assert_eq!(byte, [0]);
        // As a whole it goes, whether it is held or not.
        guest.punch(0, BYTES).unwrap();
        assert_eq!(guest.present_runs(0, BYTES).unwrap(), []);
    }

    #[test]
    fn process_that_has_ended_is_gone_in_both_ways() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let map = Pagemap::of_process(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let nowhere = Hva(1 << 21);
        assert!(matches!(
            map.read_runs(nowhere, 1, |_| ()),
            Err(PagemapError::Gone)
        ));
        if has_scan() {
            assert!(matches!(
                map.scan(nowhere, 1, |_| ()),
                Err(PagemapError::Gone)
            ));
        }
    }

    #[test]
    fn pagemap_of_a_process_that_does_not_exist_cannot_be_opened() {
        assert!(matches!(
            Pagemap::of_process(0x7fff_ffff),
            Err(PagemapError::Open { .. })
        ));
    }
}
