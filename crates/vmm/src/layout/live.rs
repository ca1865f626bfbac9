// SPDX-License-Identifier: Apache-2.0
//! RAM that is added or removed while the VMM runs: new files, removed files, and the layout
//! currently in use.
//!
//! A VMM gets more RAM by mapping another file (QEMU: `object-add` of a memory backend, then
//! `device_add` of a DIMM), and loses it by unmapping that file (`device_del`, then `object-del`).
//! Both show in its mappings:
//!
//! | mappings of a file | what it is |
//! |---|---|
//! | none known, and it would be RAM at an attach | new RAM ([`NewRam`]) |
//! | all gone | RAM unplugged |
//! | as before, but not watched | RAM unplugged, and plugged in again since |
//! | one more, one less, one changed | neither: see [`MapsChange`] |
//! | all gone, of all files | another program (exec): no RAM was unplugged |
//!
//! A removed file loses its content, so its removal is checked twice: the kernel does not list
//! mappings atomically, and one that is being split or moved may be missing.
//!
//! Memory that virtio-mem plugs and unplugs is in a file that is mapped as a whole from the start:
//! the layout does not change.

use super::found::{Known, SMALLEST_RAM_BYTES, find_ram, is_shared_writable, key_of, len_of};
use super::mapping::RecordedMapping;
use super::new_ram::NewRam;
use super::ram::RamLayout;
use super::recorded::{MapsChange, list, maps_of, unasked};
use super::watched::{self, Ask, Watched, how_watched};
use crate::Refusal;
use crate::process::{VmmProcess, in_proc};
use arc_swap::{ArcSwap, Guard};
use pagetide_addr::{FileKey, Hva, PAGE_BYTES};
use pagetide_sys::uffd::{UffdError, Userfaultfd};
use procfs::process::MemoryMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The current layout, for users that run while it may change.
#[derive(Debug)]
pub struct LiveLayout(ArcSwap<RamLayout>);

impl LiveLayout {
    /// Starts with `layout`.
    #[must_use]
    pub fn new(layout: RamLayout) -> Self {
        Self(ArcSwap::from_pointee(layout))
    }

    /// The current layout, for as long as the guard is held; costs only some nanoseconds.
    #[must_use]
    pub fn look(&self) -> Guard<Arc<RamLayout>> {
        self.0.load()
    }

    /// The current layout, to be kept.
    #[must_use]
    pub fn now(&self) -> Arc<RamLayout> {
        self.0.load_full()
    }

    /// From now on `layout` is the current one. Earlier readers may still use the previous one; its
    /// files stay open as long.
    pub fn set(&self, layout: RamLayout) {
        self.0.store(Arc::new(layout));
    }
}

/// How a VMM's RAM differs from a layout by whole files.
#[derive(Debug)]
pub struct RamNews {
    /// Files of the layout that are no longer mapped, or no longer by the mappings that were
    /// watched.
    pub gone: Vec<FileKey>,
    /// A mapping of one of its other files that is not the one that was watched.
    pub unwatched: Option<MapsChange>,
    /// Files that the layout does not have, or has lost; or the [`Refusal`], as at an attach, if not all of
    /// them can be taken over.
    pub new: Result<Vec<NewRam>, Refusal>,
}

/// Large files mapped by a VMM that were examined and are not RAM: video memory on a disk, device
/// memory. They are not examined again.
#[derive(Debug, Default)]
pub struct Strangers(BTreeSet<FileKey>);

impl Strangers {
    /// Adds `key` although it may be RAM: a caller that does not take it over need not examine it
    /// each time, which costs a walk over all of the VMM's page tables.
    pub fn pass_over(&mut self, key: FileKey) {
        self.0.insert(key);
    }

    /// Makes the next scan examine `key` again.
    pub fn look_again(&mut self, key: FileKey) {
        self.0.remove(&key);
    }

    /// True while `key` is mapped and skipped.
    #[must_use]
    pub fn has(&self, key: FileKey) -> bool {
        self.0.contains(&key)
    }
}

/// Changes to the known files of a layout.
#[derive(Default)]
struct Lost {
    gone: Vec<FileKey>,
    unwatched: Option<MapsChange>,
}

impl RamLayout {
    /// Which RAM files were added and removed since this layout was made.
    ///
    /// Reads the list of mappings, and queries `userfaultfd` for each known one; does more only if
    /// there is an unknown file that is large enough.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn news(
        &self,
        vmm: &VmmProcess,
        userfaultfd: &Userfaultfd,
        strangers: &mut Strangers,
    ) -> Result<RamNews, Refusal> {
        let ask = watched::by(userfaultfd);
        let lost = |maps: &[MemoryMap]| self.lost(maps, &ask).map_err(|e| unasked(vmm, &e));
        let mut maps = maps_of(vmm)?;
        let Lost {
            mut gone,
            mut unwatched,
        } = lost(&maps)?;
        let left;
        let known = if gone.is_empty() {
            self
        } else {
            maps = maps_of(vmm)?;
            let again = lost(&maps)?;
            gone.retain(|key| again.gone.contains(key));
            unwatched = again.unwatched;
            left = gone
                .iter()
                .fold(self.clone(), |layout, key| layout.without(*key));
            &left
        };
        Ok(RamNews {
            gone,
            unwatched,
            new: known.new_files(vmm, &maps, strangers),
        })
    }

    /// The part of the mapping around `page` in process `pid` that is not RAM of the layout, and may
    /// be unregistered. Just that page if there is no mapping, or it cannot be determined.
    pub(crate) fn stray_part(&self, pid: u32, page: Hva) -> (Hva, u64) {
        let maps = match in_proc(pid).and_then(|process| process.maps()) {
            Ok(maps) => maps.0,
            Err(error) => {
                tracing::debug!(pid, %error, "mappings cannot be read");
                Vec::new()
            }
        };
        let around = maps
            .iter()
            .map(|map| map.address)
            .find(|(start, end)| (*start..*end).contains(&page.0));
        let (mut start, mut end) = around.unwrap_or((page.0, page.0 + PAGE_BYTES));
        for ram in self.mappings() {
            let ram_end = ram.hva.0.saturating_add(ram.len_bytes);
            if ram_end <= page.0 {
                start = start.max(ram_end);
            } else if ram.hva.0 > page.0 {
                end = end.min(ram.hva.0);
            }
        }
        (Hva(start), end - start)
    }

    /// Finds changes to the known files of the layout.
    fn lost(&self, maps: &[MemoryMap], ask: Ask<'_>) -> Result<Lost, UffdError> {
        let (listed, known) = (list(maps), self.recorded().mappings);
        let mut lost = Lost::default();
        for file in &self.files {
            match how_watched(file.key(), &known, &listed, ask)? {
                Watched::AsKnown => {}
                Watched::NotAll(part) => {
                    lost.unwatched.get_or_insert(MapsChange::Unwatched(part));
                }
                Watched::Nowhere => lost.gone.push(file.key()),
            }
        }
        if lost.gone.len() == self.files.len() {
            // Another program, or an unforeseen case: no RAM was unplugged.
            let there =
                |one: &&RecordedMapping| listed.iter().any(|part| part.mapping.overlaps(one));
            lost.gone.clear();
            lost.unwatched = known.iter().find(there).copied().map(MapsChange::Unwatched);
        }
        Ok(lost)
    }

    fn new_files(
        &self,
        vmm: &VmmProcess,
        maps: &[MemoryMap],
        strangers: &mut Strangers,
    ) -> Result<Vec<NewRam>, Refusal> {
        let large = large_shared_files(maps);
        strangers.0.retain(|key| large.contains(key));
        let passed_over = |key: FileKey| self.file(key).is_some() || strangers.0.contains(&key);
        if large.iter().all(|key| passed_over(*key)) {
            return Ok(Vec::new());
        }
        let pid = vmm.pid();
        let with_flags = in_proc(pid)
            .and_then(|p| p.smaps())
            .map_err(|e| Refusal::parsing(pid, "read the mappings", e))?;
        let found = find_ram(vmm, &with_flags.0, Known::Files(&passed_over))?;
        vmm.still_runs()?;
        let new = found.into_new(vmm)?;
        for key in large {
            if self.file(key).is_none() && !new.iter().any(|ram| ram.key() == key) {
                strangers.0.insert(key);
            }
        }
        Ok(new)
    }
}

/// Files with a shared and writable mapping, and with at least as many bytes mapped as RAM must
/// have.
fn large_shared_files(maps: &[MemoryMap]) -> Vec<FileKey> {
    let mut bytes: BTreeMap<FileKey, (u64, bool)> = BTreeMap::new();
    for map in maps.iter().filter(|map| map.inode != 0) {
        let (sum, shared) = bytes.entry(key_of(map)).or_default();
        *sum += len_of(map);
        *shared |= is_shared_writable(map);
    }
    let large = bytes
        .into_iter()
        .filter(|(_, (sum, shared))| *sum >= SMALLEST_RAM_BYTES && *shared);
    large.map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{error::LayoutError, mapping::RamMapping};
    use super::*;
    use pagetide_addr::{PageNo, PageRange, SECTION_PAGES};
    use pagetide_sys::mapping::SharedMapping;
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;

    fn ram(pages: u64, hva: u64) -> NewRam {
        let bytes = pages * PAGE_BYTES;
        let mapping = RamMapping {
            hva: Hva(hva),
            len_bytes: bytes,
            file: 0,
            file_offset: 0,
        };
        let file = GuestFile::new_memfd("live", bytes).unwrap();
        NewRam::new(file, bytes, vec![mapping]).unwrap()
    }

    fn firsts(layout: &RamLayout) -> Vec<u64> {
        let first = |file: &super::super::RamFile| file.pages().start.0;
        layout.files().iter().map(first).collect()
    }

    #[test]
    fn files_that_stay_keep_their_pages_whatever_comes_and_goes() {
        let (one, two, three) = (ram(700, 1 << 30), ram(10, 1 << 20), ram(600, 1 << 40));
        let mut layout = RamLayout::default().with(&one, PageNo(0)).unwrap();
        assert_eq!(layout.room_for(1), PageNo(1024));
        layout = layout.with(&two, PageNo(4096)).unwrap();
        layout = layout.with(&three, PageNo(4096 + SECTION_PAGES)).unwrap();
        assert_eq!(firsts(&layout), [0, 4096, 4096 + SECTION_PAGES]);
        assert_eq!(layout.len_bytes(), 1310 * PAGE_BYTES);
        let without = layout.without(two.key());
        assert_eq!(firsts(&without), [0, 4096 + SECTION_PAGES]);
        assert_eq!(without.page_in_file(two.key(), 0), None);
        assert_eq!(without.page_at(Hva(1 << 20)), None);
        let page = PageNo(4096 + SECTION_PAGES + 5);
        for layout in [&layout, &without] {
            assert_eq!(layout.page_at(Hva((1 << 40) + 5 * PAGE_BYTES)), Some(page));
            let piece = layout.pieces(page.single()).next().unwrap();
            assert_eq!(layout.files()[piece.file].key(), three.key());
        }
        let again = without.with(&two, PageNo(1024)).unwrap();
        assert_eq!(firsts(&again), [0, 1024, 4096 + SECTION_PAGES]);
    }

    #[test]
    fn room_is_the_first_gap_that_is_large_enough() {
        let (one, two) = (ram(600, 1 << 30), ram(10, 1 << 40));
        let layout = RamLayout::default()
            .with(&one, PageNo(512))
            .and_then(|layout| layout.with(&two, PageNo(4096)))
            .unwrap();
        for (pages, first) in [(512, 0), (513, 1536), (2560, 1536), (2561, 4608)] {
            assert_eq!(layout.room_for(pages), PageNo(first), "{pages}");
        }
    }

    #[test]
    fn gaps_between_files_have_no_pieces() {
        let (one, two) = (ram(10, 1 << 30), ram(10, 1 << 40));
        let layout = RamLayout::default()
            .with(&one, PageNo(512))
            .and_then(|layout| layout.with(&two, PageNo(2048)))
            .unwrap();
        let of = |start, end| {
            let range = PageRange::new(PageNo(start), PageNo(end));
            let pieces = layout.pieces(range);
            pieces
                .map(|p| (p.pages.start.0, p.pages.end.0))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(0, 512), []);
        assert_eq!(of(600, 2000), []);
        assert_eq!(of(0, 4096), [(512, 522), (2048, 2058)]);
        assert_eq!(of(520, 2049), [(520, 522), (2048, 2049)]);
    }

    #[test]
    fn pages_and_files_that_are_there_are_not_given_twice() {
        let (one, two) = (ram(600, 1 << 30), ram(600, 1 << 40));
        let layout = RamLayout::default().with(&one, PageNo(1024)).unwrap();
        for first in [512, 1024, 1536] {
            let refused = layout.with(&two, PageNo(first));
            assert!(matches!(refused, Err(LayoutError::Taken { .. })), "{first}");
        }
        let again = layout.with(&one, PageNo(4096));
        assert!(matches!(again, Err(LayoutError::Taken { .. })));
        assert!(layout.with(&two, PageNo(u64::MAX - 5)).is_err());
        assert!(layout.with(&two, PageNo(2048)).is_ok());
    }

    /// A mapping of this process as a VMM's RAM.
    fn mapped(bytes: u64) -> (NewRam, SharedMapping) {
        let file = GuestFile::new_memfd("live", bytes).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
        let of = RamMapping {
            hva: Hva(mapping.address() as u64),
            len_bytes: bytes,
            file: 0,
            file_offset: 0,
        };
        (NewRam::new(file, bytes, vec![of]).unwrap(), mapping)
    }

    #[test]
    fn file_mapped_nowhere_is_gone_unless_all_are() {
        let own = VmmProcess::open(std::process::id()).unwrap();
        let (one, at_one) = mapped(PAGE_BYTES);
        let (two, at_two) = mapped(PAGE_BYTES);
        let layout = RamLayout::default()
            .with(&one, PageNo(0))
            .and_then(|layout| layout.with(&two, PageNo(512)))
            .unwrap();
        // Other tests of this process map files of their own: only removed files are checked here.
        let gone = || {
            let lost = layout.lost(&maps_of(&own).unwrap(), &|_| Ok(true));
            lost.unwrap().gone
        };
        assert_eq!(gone(), []);
        drop(at_one);
        assert_eq!(gone(), [one.key()]);
        drop(at_two);
        assert_eq!(gone(), [], "another program, not RAM unplugged");
    }

    #[test]
    fn file_mapped_as_it_was_but_watched_by_nobody_is_gone_unless_all_are() {
        let own = VmmProcess::open(std::process::id()).unwrap();
        let (one, at_one) = mapped(PAGE_BYTES);
        let (two, at_two) = mapped(PAGE_BYTES);
        let layout = RamLayout::default()
            .with(&one, PageNo(0))
            .and_then(|layout| layout.with(&two, PageNo(512)))
            .unwrap();
        let maps = maps_of(&own).unwrap();
        let at_two = at_two.address() as u64;
        let lost = layout.lost(&maps, &|at| Ok(at.0 == at_two)).unwrap();
        assert_eq!(lost.gone, [one.key()]);
        assert_eq!(lost.unwatched, None);
        let lost = layout.lost(&maps, &|_| Ok(false)).unwrap();
        assert_eq!(lost.gone, []);
        let Some(MapsChange::Unwatched(mapping)) = lost.unwatched else {
            panic!("{:?}", lost.unwatched);
        };
        assert_eq!(mapping.hva, Hva(at_one.address() as u64));
    }

    #[test]
    fn small_or_private_files_are_not_worth_a_closer_look() {
        let own = VmmProcess::open(std::process::id()).unwrap();
        let large = || large_shared_files(&maps_of(&own).unwrap());
        let (small, _at_small) = mapped(SMALLEST_RAM_BYTES - PAGE_BYTES);
        let (ram, at_ram) = mapped(SMALLEST_RAM_BYTES);
        assert!(large().contains(&ram.key()));
        assert!(!large().contains(&small.key()));
        drop(at_ram);
        assert!(!large().contains(&ram.key()));
    }
}
