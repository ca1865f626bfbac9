// SPDX-License-Identifier: Apache-2.0
//! [`HugePages`]: memory that the kernel keeps in pages of more than 4 KiB: whole while it is watched,
//! split before eviction, and collapsed again when it is back.
//!
//! # What the kernel does (tested on Linux 6.18)
//! | | a huge page in a mapping under a userfaultfd |
//! |---|---|
//! | registering (MISSING and WP) | leaves it mapped by one translation |
//! | `MADV_PAGEOUT` of all of it | drops the translation; the page stays whole; the next touch maps all of it |
//! | `MADV_PAGEOUT` of a part | splits it to pages of 4 KiB, if there is no other reference |
//! | write protection of any part | drops the translation for good: from now on 4 KiB at a time |
//! | punching a part | splits it; **if there is another reference, the part is zeroed and stays** |
//! | punching all of it | frees it |
//! | `MADV_COLLAPSE` of 512 small ones | makes one huge page and returns `EINVAL`, as it cannot be mapped as one |
//! | `MADV_DONTNEED` of all of it, in the VMM | drops the empty page table too, so that the next touch maps it as one (Linux 6.14) |
//! | khugepaged | does not touch it |
//!
//! # What follows
//! ```text
//!              sampled: unmapped as a whole                  to go: split, and seen to be split
//!           ┌──────┐                                      ┌────────────────────────────┐
//!           ▼      │                                      │                            ▼
//!         whole ───┘ ◄── made whole when all of it is back and in use ─── small pages ──► absent
//! ```
//! *Small* and *absent* are the states of a section that the rest of the code knows. A section to be
//! evicted is first unmapped as a whole, and split only if it was not used for a moment: most
//! candidates stay. A section that is in use then, or cannot be split because of another reference,
//! is not evicted: [`HugePages::is_held`].
//!
//! Folios of sizes other than 2 MiB are not kept whole, but split before eviction like the others.
//! On hosts without shared memory in large folios, all of this is skipped ([`may_be`]).
//!
//! [`may_be`]: HugePages::may_be

use super::TrackerError;
use crate::layout::{Piece, RamLayout};
use crate::process::VmmProcess;
use pagetide_addr::{
    Hva, PAGE_BYTES, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, to_usize,
};
use pagetide_sys::page_flags::{FrameNo, PageFlags};
use pagetide_sys::pagemap::{Pagemap, PagemapEntry};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a huge page, the same as of a section.
pub(super) const HUGE_BYTES: u64 = SECTION_PAGES * PAGE_BYTES;
/// Attempts to collapse a section, before it is left alone until it is seen whole.
const TRIES: u8 = 3;
/// How long a result of [`HugePages::may_be`] is valid.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// How a section is backed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kept {
    /// In small pages; or it is not mapped, and this is unknown.
    Small,
    /// As a huge page that is mapped as one.
    Whole,
    /// As a huge page that is mapped 4 KiB at a time.
    MappedInPieces,
}

/// See the module. One per VM.
pub(super) struct HugePages {
    /// None if we lack the permission.
    flags: Option<PageFlags>,
    memory: File,
    pid: u32,
    may_be: Mutex<(bool, Option<Instant>)>,
    /// Sections that were huge, and the number of attempts to collapse them since.
    known: Mutex<BTreeMap<SectionNo, u8>>,
    held: Mutex<BTreeSet<SectionNo>>,
}

impl HugePages {
    /// For the VM of `vmm`.
    ///
    /// # Errors
    /// The error of opening its memory.
    pub fn new(vmm: &VmmProcess) -> io::Result<Self> {
        let flags = PageFlags::open();
        if let Err(error) = &flags {
            tracing::warn!(
                %error,
                "/proc/kpageflags cannot be opened: memory that may be in huge pages is not evicted"
            );
        }
        Ok(Self {
            flags: flags.ok(),
            memory: File::open(format!("/proc/{}/mem", vmm.pid()))?,
            pid: vmm.pid(),
            may_be: Mutex::new((false, None)),
            known: Mutex::default(),
            held: Mutex::default(),
        })
    }

    /// True if shared memory may be in large folios. Once true, it stays true as long as the VM is
    /// watched: existing folios stay when the setting changes.
    pub fn may_be(&self, layout: &RamLayout) -> bool {
        let mut known = lock(&self.may_be);
        let (may_be, asked) = &mut *known;
        if !*may_be && asked.is_none_or(|asked| asked.elapsed() > LOOK_AGAIN) {
            *asked = Some(Instant::now());
            *may_be = are_there_any() || are_on(Path::new(SETTINGS)) || self.are_on_mounts(layout);
        }
        *may_be
    }

    fn are_on_mounts(&self, layout: &RamLayout) -> bool {
        ["self".to_owned(), self.pid.to_string()].iter().any(|pid| {
            // If the mounts cannot be read, assume that there are some.
            let Ok(mounts) = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")) else {
                return true;
            };
            let devices: BTreeSet<u64> = mounts.lines().filter_map(huge_mount).collect();
            let mut files = layout.files().iter();
            files.any(|file| devices.contains(&file.key().dev))
        })
    }

    /// How `section` is backed, of which `piece` is a part and `mapped` are the mapped pages.
    pub fn kept(
        &self,
        section: SectionNo,
        piece: &Piece,
        map: &Pagemap,
        mapped: &PageSet,
    ) -> Result<Kept, TrackerError> {
        let Some(first) = mapped.pages(section).next() else {
            return Ok(Kept::Small);
        };
        if !can_be_huge(piece) {
            return Ok(Kept::Small);
        }
        let at = Hva(piece.hva.0 + (first.since(piece.pages.start) * PAGE_BYTES));
        let mut frame = None;
        map.visit(at, 1, |_, entry| frame = entry.frame())?;
        // The frame may have been freed and reused meanwhile: the next look corrects a wrong
        // result.
        let is_huge = match (&self.flags, frame) {
            (Some(flags), Some(frame)) => flags.is_huge(frame).map_err(unknown)?,
            (None, _) | (_, None) => false,
        };
        if !is_huge {
            return Ok(Kept::Small);
        }
        self.is_whole(section);
        Ok(Kept::MappedInPieces)
    }

    /// `section` was seen as a huge page.
    pub fn is_whole(&self, section: SectionNo) {
        lock(&self.known).entry(section).or_insert(0);
    }

    /// `section` was seen mapped by one translation.
    pub fn is_well(&self, section: SectionNo) {
        lock(&self.known).insert(section, 0);
    }

    /// True if `section` was huge and another attempt to collapse it is allowed; counts the
    /// attempt.
    pub fn may_try(&self, section: SectionNo) -> bool {
        let mut known = lock(&self.known);
        let Some(tries) = known.get_mut(&section).filter(|tries| **tries < TRIES) else {
            return false;
        };
        *tries += 1;
        true
    }

    /// True if `section` was huge once, is not now, and has all its pages.
    pub fn can_merge(
        &self,
        section: SectionNo,
        piece: &Piece,
        layout: &RamLayout,
    ) -> Result<bool, TrackerError> {
        let was_huge = lock(&self.known)
            .get(&section)
            .is_some_and(|tries| *tries < TRIES);
        Ok(was_huge && can_be_huge(piece) && {
            let present = present(piece, layout)?;
            present == [(piece.file_offset, HUGE_BYTES)]
        })
    }

    /// Forgets sections that no longer exist.
    pub fn keep(&self, pages: u64) {
        let is_there = |section: &SectionNo| section.0 < SectionNo::count_for(pages);
        lock(&self.known).retain(|section, _| is_there(section));
        lock(&self.held).retain(|section| is_there(section));
    }

    /// True if `section` could not be split at its last selection for eviction.
    pub fn is_held(&self, section: SectionNo) -> bool {
        lock(&self.held).contains(&section)
    }

    /// `section` is in use as a huge page, and must not be evicted.
    pub fn hold(&self, section: SectionNo) {
        lock(&self.held).insert(section);
    }

    /// Makes sure that `section`, whose parts are `pieces`, is in small pages, or notes that it is
    /// not. It is mapped afterwards.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn split(
        &self,
        section: SectionNo,
        pieces: &[Piece],
        layout: &RamLayout,
        map: &Pagemap,
        vmm: &VmmProcess,
    ) -> Result<(), TrackerError> {
        let mut is_small = true;
        for piece in pieces {
            is_small &= self.split_piece(piece, layout, map, vmm)?;
        }
        let mut held = lock(&self.held);
        if is_small {
            held.remove(&section);
        } else if held.insert(section) {
            tracing::debug!(
                section = section.0,
                "a large page is in use by the kernel and cannot be split: it stays"
            );
        }
        Ok(())
    }

    /// True if it is in small pages now.
    fn split_piece(
        &self,
        piece: &Piece,
        layout: &RamLayout,
        map: &Pagemap,
        vmm: &VmmProcess,
    ) -> Result<bool, TrackerError> {
        let frames = self.frames(piece, layout, map)?;
        let (Some(frames), Some(flags)) = (frames, &self.flags) else {
            return Ok(false);
        };
        let mut all: Vec<FrameNo> = frames.iter().map(|(_, frame)| *frame).collect();
        all.sort_unstable();
        let large = flags.large_among(&all).map_err(unknown)?;
        if large.is_empty() {
            return Ok(true);
        }
        let mut heads = BTreeSet::new();
        let mut parts = Vec::new();
        for (at, frame) in &frames {
            if large.binary_search(frame).is_ok()
                && heads.insert(flags.head(*frame).map_err(unknown)?)
            {
                parts.push((*at, PAGE_BYTES));
            }
        }
        vmm.fd().page_out(&parts)?;
        Ok(flags.large_among(&large).map_err(unknown)?.is_empty())
    }

    /// The frame of each present page of `piece`; none if they cannot be determined.
    fn frames(
        &self,
        piece: &Piece,
        layout: &RamLayout,
        map: &Pagemap,
    ) -> Result<Option<Vec<(Hva, FrameNo)>>, TrackerError> {
        let present = present(piece, layout)?;
        let first = piece.file_offset;
        let offsets: Vec<u64> = present
            .iter()
            .filter_map(|(start, bytes)| PageRange::covering(start - first, *bytes))
            .flat_map(PageRange::iter)
            .map(PageNo::byte_offset)
            .collect();
        // The page table shows only mapped pages. One read of a huge page maps all of it.
        for most in [1, offsets.len()] {
            let unmapped = self.unmapped(piece, &offsets, map)?;
            for offset in unmapped.iter().take(most) {
                let at = piece.hva.0 + offset;
                // The kernel returns an error for unmapped addresses, and for poison.
                if self.memory.read_exact_at(&mut [0], at).is_err() {
                    return Ok(None);
                }
            }
            if unmapped.len() <= most {
                break;
            }
        }
        let entries = entries(piece, map)?;
        let frame = |offset: &u64| {
            let entry: PagemapEntry = entries[PageNo::containing(*offset).index()];
            Some((Hva(piece.hva.0 + offset), entry.frame()?))
        };
        // The frame of a page that the kernel unmapped meanwhile cannot be determined.
        Ok(offsets.iter().map(frame).collect())
    }

    fn unmapped(
        &self,
        piece: &Piece,
        offsets: &[u64],
        map: &Pagemap,
    ) -> Result<Vec<u64>, TrackerError> {
        let entries = entries(piece, map)?;
        let is_unmapped =
            |offset: &&u64| !entries[PageNo::containing(**offset).index()].is_present();
        Ok(offsets.iter().filter(is_unmapped).copied().collect())
    }
}

fn entries(piece: &Piece, map: &Pagemap) -> Result<Vec<PagemapEntry>, TrackerError> {
    let mut entries = Vec::with_capacity(to_usize(piece.pages.len()));
    map.visit(piece.hva, piece.pages.len(), |_, entry| entries.push(entry))?;
    Ok(entries)
}

fn present(piece: &Piece, layout: &RamLayout) -> Result<Vec<(u64, u64)>, TrackerError> {
    let file = layout.files()[piece.file].file();
    file.present_runs(piece.file_offset, piece.pages.bytes())
        .map_err(|error| TrackerError::Large(io::Error::other(error.to_string())))
}

const fn unknown(source: io::Error) -> TrackerError {
    TrackerError::Large(source)
}

/// A huge page is a whole section, with the same alignment in memory as in its file.
const fn can_be_huge(piece: &Piece) -> bool {
    piece.pages.len() == SECTION_PAGES
        && piece.file_offset.is_multiple_of(HUGE_BYTES)
        && piece.hva.0.is_multiple_of(HUGE_BYTES)
}

fn are_there_any() -> bool {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else {
        return true;
    };
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("ShmemHugePages:"));
    // Missing in kernels without them.
    line.is_some_and(|line| line.split_whitespace().next() != Some("0"))
}

/// True if a setting below `folder` allows shared memory in large folios.
fn are_on(folder: &Path) -> bool {
    let is_on = |path: &Path| {
        let Ok(setting) = std::fs::read_to_string(path.join("shmem_enabled")) else {
            return false;
        };
        ["[always]", "[within_size]", "[advise]", "[force]"]
            .iter()
            .any(|word| setting.contains(word))
    };
    let Ok(sizes) = std::fs::read_dir(folder) else {
        return false;
    };
    is_on(folder) || sizes.flatten().any(|size| is_on(&size.path()))
}

/// The device number of a tmpfs with huge pages.
fn huge_mount(line: &str) -> Option<u64> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    if kind.next() != Some("tmpfs") {
        return None;
    }
    let mut options = kind.nth(1)?.split(',');
    let huge = options.find_map(|option| option.strip_prefix("huge="))?;
    let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
    match (major.parse(), minor.parse()) {
        (Ok(major), Ok(minor)) if huge != "never" => Some(rustix::fs::makedev(major, minor)),
        _ => None,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_with_huge_pages_is_told_by_its_option() {
        let mount = |options: &str| {
            let line = format!("40 20 0:51 / /ram rw,relatime shared:9 - tmpfs ram rw,{options}");
            huge_mount(&line)
        };
        let device = Some(rustix::fs::makedev(0, 51));
        assert_eq!(mount("size=64m,huge=always"), device);
        assert_eq!(mount("huge=advise,noswap"), device);
        assert_eq!(mount("size=64m"), None);
        assert_eq!(mount("huge=never"), None);
        assert_eq!(
            huge_mount("40 20 0:51 / /d rw - ext4 /dev/vda rw,huge=always"),
            None
        );
    }

    #[test]
    fn large_folios_are_on_if_any_size_is() {
        let folder = tempfile::tempdir().unwrap();
        let set = |name: &str, to: &str| {
            let folder = folder.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("shmem_enabled"), to).unwrap();
        };
        set(".", "always within_size advise [never] deny force\n");
        set(
            "hugepages-64kB",
            "always inherit within_size advise [never]\n",
        );
        set(
            "hugepages-2048kB",
            "always [inherit] within_size advise never\n",
        );
        assert!(!are_on(folder.path()));
        set(
            "hugepages-64kB",
            "always inherit within_size [advise] never\n",
        );
        assert!(are_on(folder.path()));
        set(
            "hugepages-64kB",
            "always inherit within_size advise [never]\n",
        );
        set(".", "always within_size [advise] never deny force\n");
        assert!(are_on(folder.path()));
        assert!(!are_on(&folder.path().join("nowhere")));
    }
}
