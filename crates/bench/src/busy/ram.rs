// SPDX-License-Identifier: Apache-2.0
//! The stand-in's RAM: writes its content, and verifies it.
//!
//! Beside the RAM, the version of each page is in private memory of the process, which is never evicted.
//! The version is also the page's sequence lock: odd while a thread writes.
//!
//! ```text
//!   writer:  version v → v + 1       reader:  v, even
//!            stamps of v + 2                  stamps
//!            version v + 1 → v + 2            still v? then they must be those of v
//! ```
//! So vCPUs need no common lock, and a page that is evicted, filled or copied by the daemon in the middle
//! of a write only delays the check.

use super::content::{Mix, STAMP_STRIDE, Stamps, WORDS, words};
use pagetide_addr::{PAGE_BYTES, PageNo, SECTION_BYTES, SECTION_PAGES, to_usize};
use pagetide_sys::{
    mapping::{MappingError, SharedMapping},
    memory_file::{FileError, GuestFile},
};
use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
            fence,
        },
    },
};

/// Most reads of a page that a thread is writing, before that counts as an error: a write takes less than a
/// microsecond, if it is not interrupted.
const RETRIES_MAX: u32 = 1 << 24;

/// Whether the kernel is asked for huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum HugePages {
    /// By `MADV_HUGEPAGE`; `shmem_enabled` determines whether the kernel provides them.
    Advised,
    /// The kernel's own decision.
    NotAdvised,
    /// A file on hugetlbfs; needs free huge pages.
    Hugetlb,
}

/// Why there is no RAM.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// Its file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its mapping.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

/// A page has wrong content.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{page} is wrong in word {word}: {found:#x} instead of {wanted:#x} (version {version})")]
pub struct WrongPage {
    /// Its number.
    pub page: PageNo,
    /// The first word that is wrong.
    pub word: usize,
    /// The word found.
    pub found: u64,
    /// The expected word.
    pub wanted: u64,
    /// The version by the process's own record.
    pub version: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Ram {
    file: GuestFile,
    mapping: Arc<SharedMapping>,
    versions: Vec<AtomicU32>,
    mix: Mix,
}

impl Ram {
    /// `pages` pages without content: [`Self::fill`] them.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new(pages: u64, huge: HugePages, mix: Mix) -> Result<Self, RamError> {
        Self::with_tail(pages, 0, huge, mix)
    }

    /// The same with further bytes behind the pages, which are somebody else's ([`Self::shared`]).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn with_tail(
        pages: u64,
        tail_bytes: u64,
        huge: HugePages,
        mix: Mix,
    ) -> Result<Self, RamError> {
        let bytes = pages * PAGE_BYTES + tail_bytes;
        let file = match huge {
            HugePages::Hugetlb => {
                GuestFile::new_huge_memfd("guest-ram", bytes.next_multiple_of(SECTION_BYTES))?
            }
            HugePages::Advised | HugePages::NotAdvised => GuestFile::new_memfd("guest-ram", bytes)?,
        };
        let mapping = SharedMapping::new(file.as_fd(), file.len_bytes()?)?;
        if huge == HugePages::Advised {
            mapping.advise_huge_pages()?;
        }
        Ok(Self {
            file,
            mapping: Arc::new(mapping),
            versions: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            mix,
        })
    }

    /// Its file and its mapping, for who uses the bytes behind the pages.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn shared(&self) -> std::io::Result<(OwnedFd, Arc<SharedMapping>)> {
        let file = self.file.as_fd().try_clone_to_owned()?;
        Ok((file, Arc::clone(&self.mapping)))
    }

    /// Number of its pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.versions.len() as u64
    }

    #[inline]
    fn words_of(&self, page: PageNo) -> &[AtomicU64] {
        let words = self.mapping.atomic_u64s(page.byte_offset(), WORDS);
        words.unwrap_or_else(|| unreachable!("{page} is within the RAM"))
    }

    /// Writes the content of each page, by `threads` threads.
    pub fn fill(&self, threads: usize) {
        self.in_parallel(threads, |page| {
            let version = self.versions[page.index()].load(Relaxed);
            for (word, value) in self
                .words_of(page)
                .iter()
                .zip(words(self.mix, page, version))
            {
                word.store(value, Relaxed);
            }
            Ok(())
        })
        .unwrap_or_else(|wrong| unreachable!("nothing is compared: {wrong}"));
    }

    /// Raises the version of `page`, or leaves it if another thread is doing so.
    #[inline]
    pub fn write(&self, page: PageNo) {
        let lock = &self.versions[page.index()];
        let version = lock.load(Relaxed);
        let locked = version.wrapping_add(1);
        if version % 2 == 1
            || lock
                .compare_exchange(version, locked, Acquire, Relaxed)
                .is_err()
        {
            return;
        }
        // A thread that sees one of the stamps also sees, after its own fence, that the version is odd or
        // has changed.
        fence(Release);
        let next = locked.wrapping_add(1);
        let stamps = Stamps::of(self.mix, page, next);
        for (number, word) in self.words_of(page).iter().step_by(STAMP_STRIDE).enumerate() {
            word.store(stamps.word(number), Relaxed);
        }
        // Pairs with the reader's first load.
        lock.store(next, Release);
    }

    /// Reads and checks the stamps of `page`.
    ///
    /// # Errors
    /// The first one that is wrong.
    #[inline]
    pub fn check_stamps(&self, page: PageNo) -> Result<(), WrongPage> {
        self.checked(page, |version| {
            let stamps = Stamps::of(self.mix, page, version);
            let words = self.words_of(page).iter().step_by(STAMP_STRIDE);
            for (number, word) in words.enumerate() {
                let (found, wanted) = (word.load(Relaxed), stamps.word(number));
                if found != wanted {
                    return Err((number * STAMP_STRIDE, found, wanted));
                }
            }
            Ok(())
        })
    }

    /// Reads and checks all of `page`.
    ///
    /// # Errors
    /// The first word that is wrong.
    pub fn check(&self, page: PageNo) -> Result<(), WrongPage> {
        self.checked(page, |version| {
            let wanted = words(self.mix, page, version);
            for (at, (word, wanted)) in self.words_of(page).iter().zip(wanted).enumerate() {
                let found = word.load(Relaxed);
                if found != wanted {
                    return Err((at, found, wanted));
                }
            }
            Ok(())
        })
    }

    /// Compares under the page's sequence lock: a page written meanwhile is compared again.
    #[inline]
    fn checked(
        &self,
        page: PageNo,
        compare: impl Fn(u32) -> Result<(), (usize, u64, u64)>,
    ) -> Result<(), WrongPage> {
        let lock = &self.versions[page.index()];
        let mut version = lock.load(Acquire);
        for _ in 0..RETRIES_MAX {
            let outcome = if version.is_multiple_of(2) {
                compare(version)
            } else {
                std::thread::yield_now();
                Ok(())
            };
            fence(Acquire);
            let now = lock.load(Acquire);
            if version.is_multiple_of(2) && now == version {
                return outcome.map_err(|(word, found, wanted)| WrongPage {
                    page,
                    word,
                    found,
                    wanted,
                    version,
                });
            }
            version = now;
        }
        Err(WrongPage {
            page,
            word: 0,
            found: u64::from(version),
            wanted: u64::from(version),
            version,
        })
    }

    /// Checks each byte of each page, by `threads` threads.
    ///
    /// # Errors
    /// A page that is wrong.
    pub fn check_all(&self, threads: usize) -> Result<(), WrongPage> {
        self.in_parallel(threads, |page| self.check(page))
    }

    /// Applies `work` to each page, section by section, with a piece of the RAM for each thread.
    fn in_parallel(
        &self,
        threads: usize,
        work: impl Fn(PageNo) -> Result<(), WrongPage> + Sync,
    ) -> Result<(), WrongPage> {
        let pages = self.pages();
        let share = pages.div_ceil(threads.max(1) as u64);
        let share = share.next_multiple_of(SECTION_PAGES);
        let work = &work;
        std::thread::scope(|scope| {
            let starts = (0..pages).step_by(to_usize(share.max(1)));
            let running: Vec<_> = starts
                .map(|start| {
                    let end = (start + share).min(pages);
                    scope.spawn(move || (start..end).map(PageNo).try_for_each(work))
                })
                .collect();
            let mut outcome = Ok(());
            for thread in running {
                match thread.join() {
                    Ok(done) => outcome = outcome.and(done),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            outcome
        })
    }

    /// Pages that are in memory, as runs from the first to the last.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn present(&self) -> Result<Vec<std::ops::Range<u64>>, RamError> {
        let runs = self.file.data_runs(0, self.pages() * PAGE_BYTES)?;
        let pages =
            |(offset, bytes): (u64, u64)| offset / PAGE_BYTES..(offset + bytes) / PAGE_BYTES;
        Ok(runs.into_iter().map(pages).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn ram() -> Ram {
        let ram = Ram::new(2 * SECTION_PAGES + 7, HugePages::NotAdvised, Mix::Halves).unwrap();
        ram.fill(3);
        ram
    }

    #[test]
    fn filled_ram_is_right_and_all_there() {
        let ram = ram();
        ram.check_all(2).unwrap();
        assert_eq!(
            ram.present().unwrap(),
            std::slice::from_ref(&(0..ram.pages()))
        );
        ram.file.punch(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(ram.present().unwrap(), [0..3, 4..ram.pages()]);
    }

    #[test]
    fn ram_in_huge_pages_has_the_same_content() {
        let ram = Ram::new(2 * SECTION_PAGES, HugePages::Advised, Mix::Halves).unwrap();
        ram.fill(1);
        ram.write(PageNo(3));
        ram.check_all(1).unwrap();
    }

    #[test]
    fn wrong_word_anywhere_is_found() {
        let ram = ram();
        let last = PageNo(ram.pages() - 1);
        ram.words_of(last)[511].fetch_xor(1, Relaxed);
        let wrong = ram.check_all(4).unwrap_err();
        assert_eq!((wrong.page, wrong.word), (last, 511));
        ram.check_stamps(last).unwrap();
        ram.words_of(last)[64].fetch_xor(1, Relaxed);
        assert_eq!(ram.check_stamps(last).unwrap_err().word, 64);
    }

    #[test]
    fn content_of_an_earlier_version_or_of_another_page_is_wrong() {
        let ram = ram();
        let (page, other) = (PageNo(5), PageNo(6));
        let content = |page| -> Vec<u64> {
            let words = ram.words_of(page).iter();
            words.map(|word| word.load(Relaxed)).collect()
        };
        let put = |page, content: &[u64]| {
            for (word, value) in ram.words_of(page).iter().zip(content) {
                word.store(*value, Relaxed);
            }
        };
        let earlier = content(page);
        ram.write(page);
        ram.check(page).unwrap();
        let now = content(page);
        put(page, &earlier);
        assert_eq!(ram.check_stamps(page).unwrap_err().word, 0);
        let mut torn = now.clone();
        torn[256..].copy_from_slice(&earlier[256..]);
        put(page, &torn);
        assert_eq!(ram.check_stamps(page).unwrap_err().word, 256);
        put(page, &now);
        ram.check(page).unwrap();
        put(page, &content(other));
        assert!(ram.check_stamps(page).is_err());
    }

    #[test]
    fn readers_beside_writers_see_nothing_wrong() {
        let ram = ram();
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (ram, end) = (&ram, &end);
                scope.spawn(move || {
                    for round in 0..20_000 {
                        ram.write(PageNo((round * 7 + thread) % 16));
                    }
                    end.store(true, Relaxed);
                });
            }
            while !end.load(Relaxed) {
                for page in (0..16).map(PageNo) {
                    ram.check_stamps(page).unwrap();
                    ram.check(page).unwrap();
                }
            }
        });
        ram.check_all(1).unwrap();
        assert!(ram.versions[0].load(Relaxed) > 0);
    }
}
