// SPDX-License-Identifier: Apache-2.0
//! Which pages of a part of a RAM file are in memory, at a cost that depends only on that part
//! ([`GuestFile::present_runs`]).
//!
//! # Idea
//! `lseek(SEEK_DATA)` says whether a page is present, and from a hole, where the next present page
//! is. It does not say where a run of present pages ends. `SEEK_HOLE` searches up to the next hole,
//! and in dense RAM that is the end of the file: a millisecond for each 100 MiB. One such call per
//! section costs the square of the RAM.
//!
//! `mincore` covers a range and no more, if its mapping has never been touched: it then looks up
//! each page in the page cache. But it reports a page that the kernel has swapped out as *absent*,
//! and a caller that trusted this would lose content. So *present* is trusted, and *absent* is
//! verified by `SEEK_DATA`:
//!
//! ```text
//!   mincore      ■■■■■■■■····■■■■■■■■■■■··········
//!   SEEK_DATA            └──►         └─────────► next page: behind the part
//! ```
//! This takes two system calls for a section without gaps, one more for each gap, and one for a section
//! that is a hole: a seek comes before `mincore`, which would look up each page of it.
//!
//! `mincore` is accurate only for the owner of the file and for those who may write it; to others
//! it reports all pages as present. In that case each page is queried by `SEEK_DATA`.
//!
//! # Huge pages
//! hugetlbfs answers neither: to `SEEK_DATA` all of a file is data, and `mincore` reports what the caller has
//! mapped. But `UFFDIO_CONTINUE` maps a page that is in the file and fails where there is none, and a punch
//! unmaps it again. So a mapping of ours is watched for that alone, and each huge page is asked about by one
//! call of a microsecond. Nothing ever touches the mapping, so nothing waits for its faults.
//!
//! # The states of a page
//! | page | `mincore` | `SEEK_DATA` | here |
//! |---|---|---|---|
//! | never touched, punched, read by `pread` | absent | hole | absent |
//! | given memory by `fallocate`, never written | absent | hole | absent |
//! | written, read through a mapping, filled by userfaultfd | present | data | present |
//! | write-protected, unmapped from all page tables | present | data | present |
//! | marker of a write protection or poison on a hole | absent | hole | absent |
//! | swapped out by the kernel | absent | data | present |
#![expect(
    unsafe_code,
    reason = "mmap, munmap and mincore take addresses; nothing of the mapping is ever touched"
)]

use crate::memory_file::{FileError, GuestFile};
use crate::to_usize;
use crate::uffd::{Features, MapOutcome, UffdError, Userfaultfd, Watch};
use pagetide_addr::{Hva, PAGE_BYTES};
use rustix::fs::{Access, AtFlags, CWD};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// Pages per call of `mincore`.
const PAGES_PER_CALL: usize = 512;

/// The means to query one file.
#[derive(Debug)]
pub(crate) struct Presence {
    untouched: Option<Untouched>,
    /// For a file in huge pages.
    huge: Option<Huge>,
}

/// The means to query a file in huge pages.
#[derive(Debug)]
struct Huge {
    // Closed before the mapping goes.
    userfaultfd: Userfaultfd,
    mapping: Untouched,
    page_bytes: u64,
}

/// Times that a query is repeated while our address space is changing.
const TRIES_MAX: u32 = 10_000;

impl Huge {
    fn of(file: &GuestFile, bytes: u64, page_bytes: u64) -> Result<Self, FileError> {
        let failed = |operation, source| FileError::Kernel {
            operation,
            offset: 0,
            len_bytes: bytes,
            source,
        };
        let no_room = || failed("mmap", std::io::ErrorKind::OutOfMemory.into());
        let mapping = Untouched::of(file, bytes).ok_or_else(no_room)?;
        let watch = || {
            let userfaultfd = Userfaultfd::create_here()?;
            userfaultfd.api(Features::WANTED)?;
            let start = Hva(mapping.base.as_ptr().addr() as u64);
            userfaultfd.register(start, bytes, Watch::MissingAndMinor)?;
            Ok(userfaultfd)
        };
        let userfaultfd = watch().map_err(|error: UffdError| {
            failed(
                "watching a mapping",
                std::io::Error::other(error.to_string()),
            )
        })?;
        Ok(Self {
            userfaultfd,
            mapping,
            page_bytes,
        })
    }

    fn runs(&self, offset: u64, len_bytes: u64, runs: &mut Runs) -> Result<(), FileError> {
        let end = offset.saturating_add(len_bytes);
        let mut at = offset - offset % self.page_bytes;
        while at < end {
            if self.has(at)? {
                let (from, to) = (at.max(offset), (at + self.page_bytes).min(end));
                runs.add_bytes(from, to - from);
            }
            at += self.page_bytes;
        }
        Ok(())
    }

    /// True if the huge page at `offset` is in the file.
    fn has(&self, offset: u64) -> Result<bool, FileError> {
        let failed = |source| FileError::Kernel {
            operation: "UFFDIO_CONTINUE",
            offset,
            len_bytes: self.page_bytes,
            source,
        };
        if offset + self.page_bytes > self.mapping.bytes {
            return Ok(false);
        }
        let at = Hva(self.mapping.base.as_ptr().addr() as u64 + offset);
        for _ in 0..TRIES_MAX {
            let asked = self.userfaultfd.map_present(at, self.page_bytes);
            match asked.map_err(|error| failed(std::io::Error::other(error.to_string())))? {
                MapOutcome::Mapped => return Ok(true),
                MapOutcome::Absent => return Ok(false),
                MapOutcome::Retry => std::thread::yield_now(),
            }
        }
        Err(failed(std::io::ErrorKind::TimedOut.into()))
    }
}

/// A mapping of a file that is never touched.
#[derive(Debug)]
struct Untouched {
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping is never read or written, only passed to the kernel; it is unmapped with its
// owner.
unsafe impl Send for Untouched {}
// SAFETY: as for `Send`.
unsafe impl Sync for Untouched {}

impl Untouched {
    /// `None` if the file has no bytes, or cannot be mapped.
    fn of(file: &GuestFile, bytes: u64) -> Option<Self> {
        let fd = file.as_fd();
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose free address space.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                to_usize(bytes),
                ProtFlags::empty(),
                // No huge pages are reserved, either.
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        };
        match mapped {
            Ok(base) => NonNull::new(base.cast::<u8>()).map(|base| Self { base, bytes }),
            // No room in the address space: the file is then queried page by page.
            Err(_) => None,
        }
    }

    /// Writes for each of the pages at `offset` whether it is in the page cache: bit 0 of one byte
    /// each. False if the kernel does not answer.
    fn ask(&self, offset: u64, pages: &mut [u8]) -> bool {
        let bytes = pages.len() as u64 * PAGE_BYTES;
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > self.bytes.next_multiple_of(PAGE_BYTES))
        {
            return false;
        }
        // SAFETY: the range lies within the mapping, as was just checked.
        let start = unsafe { self.base.as_ptr().add(to_usize(offset)) };
        // SAFETY: the vector has a byte for each page of the range, and the kernel reads no memory of
        // the range.
        let said = unsafe { libc::mincore(start.cast(), to_usize(bytes), pages.as_mut_ptr()) };
        said == 0
    }
}

impl Drop for Untouched {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, created here, without references to it.
        let unmapped =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), to_usize(self.bytes)) };
        debug_assert!(
            unmapped.is_ok(),
            "munmap of a mapping of ours: {unmapped:?}"
        );
    }
}

impl Presence {
    /// Prepares queries of `file`, for its current length.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn of(file: &GuestFile) -> Result<Self, FileError> {
        let bytes = file.len_bytes()?;
        let page_bytes = file.page_bytes()?;
        if page_bytes > PAGE_BYTES && bytes > 0 {
            return Ok(Self {
                untouched: None,
                huge: Some(Huge::of(file, bytes, page_bytes)?),
            });
        }
        let untouched = match is_told_the_truth(file) && bytes > 0 {
            true => Untouched::of(file, bytes),
            false => None,
        };
        let huge = None;
        Ok(Self { untouched, huge })
    }

    /// Maximal runs `(offset, bytes)` of pages of `file` that are present within
    /// `offset .. offset + len_bytes`, ascending; both are multiples of a page.
    ///
    /// # Errors
    /// The error of `lseek`.
    pub fn runs(
        &self,
        file: &GuestFile,
        offset: u64,
        len_bytes: u64,
    ) -> Result<Vec<(u64, u64)>, FileError> {
        let mut runs = Runs::default();
        if let Some(huge) = &self.huge {
            huge.runs(offset, len_bytes, &mut runs)?;
            return Ok(runs.0);
        }
        let end = offset.saturating_add(len_bytes);
        let mut asked = [0; PAGES_PER_CALL];
        let mut at = offset;
        while at < end {
            let left = (end - at).div_ceil(PAGE_BYTES);
            let count = left.min(PAGES_PER_CALL as u64);
            // One seek skips a hole, however long it is, while `mincore` looks each page of it up.
            let Some(first) = file.next_data(at)?.filter(|first| *first < end) else {
                break;
            };
            if first >= at + count * PAGE_BYTES {
                at += (first - at) / PAGE_BYTES / count * count * PAGE_BYTES;
                continue;
            }
            let pages = &mut asked[..to_usize(count)];
            let known = self
                .untouched
                .as_ref()
                .is_some_and(|mapping| mapping.ask(at, pages));
            if !known {
                pages.fill(0);
            }
            look(file, at, pages, &mut runs)?;
            at += count * PAGE_BYTES;
        }
        Ok(runs.0)
    }
}

/// Takes the pages at `offset` that are certainly present, and queries the others.
fn look(file: &GuestFile, offset: u64, pages: &[u8], runs: &mut Runs) -> Result<(), FileError> {
    let is_there = |page: usize| pages[page] & 1 != 0;
    let at = |page: usize| offset + page as u64 * PAGE_BYTES;
    let mut page = 0;
    while page < pages.len() {
        if is_there(page) {
            runs.add(at(page));
            page += 1;
            continue;
        }
        let next = file.next_data(at(page))?;
        let Some(next) = next.filter(|next| *next < at(pages.len())) else {
            // Nothing is present up to the next page that `mincore` reported. If that page has gone
            // meanwhile, it went before the caller examines it.
            match (page..pages.len()).find(|page| is_there(*page)) {
                Some(seen) => page = seen,
                None => break,
            }
            continue;
        };
        let found = to_usize((next - offset) / PAGE_BYTES);
        // A page in between that `mincore` reported, and that has gone since, does not count.
        if !is_there(found) {
            runs.add(at(found));
            page = found + 1;
        } else {
            page = found;
        }
    }
    Ok(())
}

/// Runs of pages, in the order in which they are found.
#[derive(Debug, Default)]
struct Runs(Vec<(u64, u64)>);

impl Runs {
    fn add(&mut self, page_at: u64) {
        self.add_bytes(page_at, PAGE_BYTES);
    }

    fn add_bytes(&mut self, at: u64, more: u64) {
        match self.0.last_mut() {
            Some((start, bytes)) if *start + *bytes == at => *bytes += more,
            _ => self.0.push((at, more)),
        }
    }
}

/// Whether `mincore` is accurate for us on a file, by the kernel's rule: owner, or may write it.
fn is_told_the_truth(file: &GuestFile) -> bool {
    let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::accessat(CWD, link, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use std::sync::atomic::Ordering;

    const PAGE: u64 = PAGE_BYTES;

    fn file(pages: u64) -> GuestFile {
        GuestFile::new_memfd("presence", pages * PAGE).unwrap()
    }

    fn pages_of(runs: &[(u64, u64)]) -> Vec<u64> {
        let pages = |(start, bytes): &(u64, u64)| start / PAGE..(start + bytes) / PAGE;
        runs.iter().flat_map(pages).collect()
    }

    /// The present pages, by `SEEK_DATA` for each page separately.
    fn by_seeking(file: &GuestFile, from: u64, count: u64) -> Vec<u64> {
        let is_data = |page: &u64| file.is_data(page * PAGE).unwrap();
        (from..from + count).filter(is_data).collect()
    }

    #[test]
    fn file_that_was_asked_of_is_mapped_until_it_is_given_up() {
        let file = GuestFile::new_memfd("presence-mapped", 4 * PAGE_BYTES).unwrap();
        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.contains("presence-mapped")
        };
        for _ in 0..2 {
            assert!(!is_mapped());
            assert_eq!(file.present_runs(0, 4 * PAGE_BYTES).unwrap(), []);
            assert!(is_mapped());
            file.unmap();
        }
        assert!(!is_mapped());
    }

    #[test]
    fn each_state_of_a_page_is_told_as_seek_data_tells_it() {
        let file = file(16);
        file.write_at(PAGE, &[1; 4096]).unwrap();
        file.read_at(2 * PAGE, &mut [0; 4096]).unwrap();
        file.allocate(3 * PAGE, PAGE).unwrap();
        file.write_at(4 * PAGE, &[1; 4096]).unwrap();
        file.punch(4 * PAGE, PAGE).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 16 * PAGE).unwrap();
        let read = mapping.atomic_u64s(5 * PAGE, 1).unwrap();
        assert_eq!(read[0].load(Ordering::Relaxed), 0);
        mapping.atomic_u64s(7 * PAGE, 1).unwrap()[0].store(1, Ordering::Relaxed);
        let presence = Presence::of(&file).unwrap();
        let runs = presence.runs(&file, 0, 16 * PAGE).unwrap();
        assert_eq!(pages_of(&runs), [1, 5, 7]);
        assert_eq!(pages_of(&runs), by_seeking(&file, 0, 16));
    }

    #[test]
    fn parts_of_any_shape_are_told_as_seek_data_tells_them() {
        let file = file(4096);
        // 31 bits of a linear congruential generator (Numerical Recipes).
        let mut seed = 1_u32;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from(seed >> 1) % below
        };
        let presence = Presence::of(&file).unwrap();
        let unsure = Presence {
            untouched: None,
            huge: None,
        };
        for _ in 0..200 {
            let (at, count) = (random(4096), 1 + random(64));
            let count = count.min(4096 - at);
            if random(3) == 0 {
                file.punch(at * PAGE, count * PAGE).unwrap();
            } else {
                let content = vec![1; to_usize(count * PAGE)];
                file.write_at(at * PAGE, &content).unwrap();
            }
            let (from, len) = (random(4096), 1 + random(1500));
            let len = len.min(4096 - from);
            let expected = by_seeking(&file, from, len);
            for asker in [&presence, &unsure] {
                let runs = asker.runs(&file, from * PAGE, len * PAGE).unwrap();
                assert_eq!(pages_of(&runs), expected, "{from} {len}");
            }
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_told_as_far_as_it_goes() {
        let file = file(8);
        file.write_at(0, &[1; 8 * 4096]).unwrap();
        let presence = Presence::of(&file).unwrap();
        rustix::fs::ftruncate(&file, 3 * PAGE).unwrap();
        let runs = presence.runs(&file, 0, 8 * PAGE).unwrap();
        assert_eq!(pages_of(&runs), [0, 1, 2]);
        let beyond = presence.runs(&file, 4 * PAGE, 64 * PAGE).unwrap();
        assert!(beyond.is_empty());
    }

    /// A query of a section must cost only what the section costs. The cost is the number of system
    /// calls and the range that each covers. Both show in CPU time, so a dense file 64 times as
    /// long must not make it much longer.
    #[test]
    fn a_look_at_a_section_costs_no_more_in_a_longer_file() {
        const SECTION: u64 = 2 << 20;
        let took = |sections: u64| {
            let file = file(sections * 512);
            let content = vec![1; to_usize(SECTION)];
            for section in 0..sections {
                file.write_at(section * SECTION, &content).unwrap();
            }
            let presence = Presence::of(&file).unwrap();
            let look = || {
                let begun = std::time::Instant::now();
                let runs = presence.runs(&file, 0, SECTION).unwrap();
                assert_eq!(runs, [(0, SECTION)]);
                begun.elapsed()
            };
            (0..20).map(|_| look()).min().unwrap()
        };
        let (short, long) = (took(2), took(128));
        assert!(long < 8 * short, "{short:?} of 4 MiB, {long:?} of 256 MiB");
    }

    /// Two more huge pages of 2 MiB, while nobody else of these tests has any; given back on drop.
    struct TwoHugePages {
        before: u64,
        _turn: std::fs::File,
    }

    const HUGE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

    impl TwoHugePages {
        fn borrow() -> std::io::Result<Self> {
            use std::io::Error;
            let turn = std::fs::File::open(HUGE)?;
            rustix::fs::flock(&turn, rustix::fs::FlockOperation::LockExclusive)?;
            let number = |name: &str| {
                let text = std::fs::read_to_string(format!("{HUGE}/{name}"))?;
                text.trim().parse::<u64>().map_err(Error::other)
            };
            let before = number("nr_hugepages")?;
            let borrowed = Self {
                before,
                _turn: turn,
            };
            let more = (before + 2).to_string();
            std::fs::write(format!("{HUGE}/nr_hugepages"), more)?;
            match number("free_hugepages")? {
                0 | 1 => Err(Error::other("too few are free")),
                _ => Ok(borrowed),
            }
        }
    }

    impl Drop for TwoHugePages {
        fn drop(&mut self) {
            let before = self.before.to_string();
            if let Err(error) = std::fs::write(format!("{HUGE}/nr_hugepages"), before) {
                println!("the number of huge pages stays changed: {error}");
            }
        }
    }

    #[test]
    fn huge_pages_of_a_file_are_told_apart_from_holes() {
        const BYTES: u64 = 2 << 20;
        if Userfaultfd::create_here().is_err() {
            println!("SKIPPED: no userfaultfd");
            return;
        }
        let _pages = match TwoHugePages::borrow() {
            Ok(pages) => pages,
            Err(error) => {
                println!("SKIPPED: no huge pages of 2 MiB: {error}");
                return;
            }
        };
        let file = GuestFile::new_huge_memfd("huge", 4 * BYTES).unwrap();
        assert_eq!(file.page_bytes().unwrap(), BYTES);
        let mapping = SharedMapping::new(file.as_fd(), 4 * BYTES).unwrap();
        assert_eq!(file.present_runs(0, 4 * BYTES).unwrap(), []);
        mapping.copy_to(BYTES + 77, &[1]).unwrap();
        mapping.copy_to(2 * BYTES, &[1]).unwrap();
        assert_eq!(
            file.present_runs(0, 4 * BYTES).unwrap(),
            [(BYTES, 2 * BYTES)]
        );
        // Parts of a huge page are as present as it is, and to be asked allocates nothing.
        let part = file.present_runs(2 * BYTES - PAGE, 2 * PAGE).unwrap();
        assert_eq!(part, [(2 * BYTES - PAGE, 2 * PAGE)]);
        assert!(!file.is_data(3 * BYTES).unwrap() && !file.is_data(PAGE).unwrap());
        assert!(file.is_data(BYTES + 5 * PAGE).unwrap());
        assert_eq!(file.allocated_bytes().unwrap(), 2 * BYTES);
        mapping.drop_translations(0, 4 * BYTES).unwrap();
        assert!(file.is_data(BYTES).unwrap());
        file.punch(BYTES, BYTES).unwrap();
        assert_eq!(file.data_runs(0, 4 * BYTES).unwrap(), [(2 * BYTES, BYTES)]);
        file.unmap();
        assert_eq!(
            file.present_runs(0, 4 * BYTES).unwrap(),
            [(2 * BYTES, BYTES)]
        );
        let mut byte = [7];
        file.read_at(BYTES + 77, &mut byte).unwrap();
        assert_eq!(byte, [0]);
        assert!(!file.is_data(BYTES).unwrap());
    }
}
