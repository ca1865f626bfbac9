// SPDX-License-Identifier: Apache-2.0
//! A recorded layout, and the comparison of the VMM's later mappings with it.
//!
//! Page numbers are valid only with the layout that assigned them. So a successor that resumes a VM
//! does not search for RAM again, since the VMM may have mapped more meanwhile (a backend plugged
//! in): it uses exactly the recorded mappings, each file with its first page. A file without any
//! mapping left was unplugged while no daemon ran; one that has lost a part is refused. The same
//! file plugged in again since is new, even at the same address: its mapping is not the one that is
//! watched (see `watched`).
//!
//! While a VM is served, the same comparison finds dangerous mappings: a second mapping of a RAM
//! file is not watched and reads zeros in place of evicted pages, and a removed one can no longer
//! be filled.
//!
//! The kernel may list one mapping in parts (each `madvise` of a part does
//! that), so what counts is that each recorded byte is mapped where it was.

use super::error::LayoutError;
use super::found::{huge_page_warning, is_shared_writable, key_of, open_ram_file, unreadable};
use super::mapping::{Listed, RamMapping, RecordedMapping};
use super::new_ram::NewRam;
use super::ram::{RamFile, RamLayout};
use super::watched::{self, Watched, how_watched};
use crate::Refusal;
use crate::process::{VmmProcess, in_proc};
use pagetide_addr::{FileKey, Hva, PAGE_SHIFT, PageNo};
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::uffd::{UffdError, Userfaultfd};
use procfs::process::MemoryMap;
use std::io;

/// A recorded layout.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RecordedLayout {
    /// All mappings.
    pub mappings: Vec<RecordedMapping>,
    /// First page of each file. A file without an entry follows the one before it without a gap, as
    /// in older records.
    pub first_pages: Vec<(FileKey, PageNo)>,
}

impl RecordedLayout {
    fn first_page(&self, key: FileKey) -> Option<PageNo> {
        let of = self.first_pages.iter().find(|(file, _)| *file == key);
        of.map(|(_, first)| *first)
    }

    /// The files, in the order of their first mappings.
    fn files(&self) -> Vec<FileKey> {
        let mut keys = Vec::new();
        for mapping in &self.mappings {
            if !keys.contains(&mapping.key) {
                keys.push(mapping.key);
            }
        }
        keys
    }

    /// Recorded length of a file, in bytes: it may have grown since, by RAM that is not ours.
    fn len_bytes(&self, key: FileKey) -> u64 {
        let of_file = self.mappings.iter().filter(|mapping| mapping.key == key);
        let ends = of_file.map(|mapping| mapping.file_offset.saturating_add(mapping.len_bytes));
        ends.max().unwrap_or(0)
    }
}

/// How a VMM's mappings of its RAM files differ from the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapsChange {
    /// A mapping of the layout is missing, not whole, or not shared and writable.
    #[error("the mapping of {0} is gone (RAM unplugged, or the program replaced by exec)")]
    Gone(RecordedMapping),
    /// A mapping that the layout does not have.
    #[error("there is a further mapping, of {0}, that is not watched")]
    Further(RecordedMapping),
    /// A mapping of the layout was replaced, so that its faults are not served.
    #[error("the mapping of {0} is not the one that was watched, but a new one in its place")]
    Unwatched(RecordedMapping),
}

/// The first difference, the graver kind first.
fn difference(recorded: &[RecordedMapping], listed: &[Listed]) -> Option<MapsChange> {
    if let Some(gone) = recorded.iter().find(|one| !one.is_among(listed)) {
        return Some(MapsChange::Gone(*gone));
    }
    let further = listed.iter().map(|part| part.mapping).find(|part| {
        recorded.iter().any(|one| one.key == part.key) && !recorded.iter().any(|one| one.has(part))
    });
    further.map(MapsChange::Further)
}

pub(super) fn list(maps: &[MemoryMap]) -> Vec<Listed> {
    let of_files = maps.iter().filter(|map| map.inode != 0);
    of_files
        .map(|map| Listed {
            mapping: RecordedMapping {
                hva: Hva(map.address.0),
                len_bytes: map.address.1 - map.address.0,
                key: key_of(map),
                file_offset: map.offset,
            },
            shared_writable: is_shared_writable(map),
        })
        .collect()
}

pub(super) fn maps_of(vmm: &VmmProcess) -> Result<Vec<MemoryMap>, Refusal> {
    let maps = in_proc(vmm.pid()).and_then(|p| p.maps());
    let maps = maps.map_err(|e| Refusal::parsing(vmm.pid(), "read the mappings", e))?;
    vmm.still_runs()?;
    Ok(maps.0)
}

pub(super) fn unasked(vmm: &VmmProcess, error: &UffdError) -> Refusal {
    Refusal::Unreadable {
        pid: vmm.pid(),
        what: "query the watched mappings",
        source: io::Error::other(error.to_string()),
    }
}

impl RamLayout {
    /// Its mappings and first pages, to be recorded for [`RamLayout::of_recorded`].
    #[must_use]
    pub fn recorded(&self) -> RecordedLayout {
        let record = |mapping: &RamMapping| RecordedMapping {
            hva: mapping.hva,
            len_bytes: mapping.len_bytes,
            key: self.files[mapping.file].key(),
            file_offset: mapping.file_offset,
        };
        let first = |file: &RamFile| (file.key(), file.pages().start);
        RecordedLayout {
            mappings: self.mappings().map(record).collect(),
            first_pages: self.files.iter().map(first).collect(),
        }
    }

    /// The recorded layout, with the same page numbers, of a VMM that still has these mappings;
    /// without files that it no longer maps at all (at least one file must be left). Other mappings
    /// made since do not matter here (see [`RamLayout::news`]).
    ///
    /// # Errors
    /// [`Refusal::RamGone`] if it no longer has a mapping of one of the other files; [`Refusal`].
    pub fn of_recorded(vmm: &VmmProcess, recorded: &RecordedLayout) -> Result<Self, Refusal> {
        let maps = maps_of(vmm)?;
        let listed = list(&maps);
        let is_there = |key: FileKey| listed.iter().any(|part| part.mapping.key == key);
        Self::of_those_left(vmm, recorded, &maps, &is_there)
    }

    /// [`RamLayout::of_recorded`] of a VMM whose RAM `userfaultfd` watches: also without files that
    /// it does not watch, which were unplugged and plugged in again since. (If it watches none at
    /// all, this is the same as [`RamLayout::of_recorded`].)
    ///
    /// # Errors
    /// As there.
    pub fn of_watched(
        vmm: &VmmProcess,
        recorded: &RecordedLayout,
        userfaultfd: &Userfaultfd,
    ) -> Result<Self, Refusal> {
        let maps = maps_of(vmm)?;
        let listed = list(&maps);
        let ask = watched::by(userfaultfd);
        let mut there = Vec::new();
        for key in recorded.files() {
            let how = how_watched(key, &recorded.mappings, &listed, &ask);
            if how.map_err(|e| unasked(vmm, &e))? != Watched::Nowhere {
                there.push(key);
            }
        }
        if there.is_empty() {
            return Self::of_recorded(vmm, recorded);
        }
        Self::of_those_left(vmm, recorded, &maps, &|key| there.contains(&key))
    }

    fn of_those_left(
        vmm: &VmmProcess,
        recorded: &RecordedLayout,
        maps: &[MemoryMap],
        is_there: &dyn Fn(FileKey) -> bool,
    ) -> Result<Self, Refusal> {
        let (pid, name) = (vmm.pid(), vmm.name().to_owned());
        let refused = |source| Refusal::Layout {
            pid,
            name: name.clone(),
            source,
        };
        let gone = |mapping: &RecordedMapping| Refusal::RamGone {
            pid,
            name: name.clone(),
            mapping: *mapping,
        };
        let listed = list(maps);
        let any_is_left = recorded.files().into_iter().any(is_there);
        let mut layout = Self::default();
        // Files without a first page begin here, as if no file had been removed.
        let mut next = PageNo(0);
        for key in recorded.files() {
            let of_file = || recorded.mappings.iter().filter(move |m| m.key == key);
            let first = recorded.first_page(key).unwrap_or(next);
            let len_bytes = recorded.len_bytes(key);
            next = first.saturating_plus(len_bytes >> PAGE_SHIFT);
            if !is_there(key) && any_is_left {
                continue;
            }
            if let Some(mapping) = of_file().find(|mapping| !mapping.is_among(&listed)) {
                return Err(gone(mapping));
            }
            let Some(mapping) = of_file().next() else {
                continue;
            };
            let file = open_recorded(vmm, mapping, maps)?.ok_or_else(|| gone(mapping))?;
            let mappings = of_file().map(|mapping| RamMapping {
                hva: mapping.hva,
                len_bytes: mapping.len_bytes,
                file: 0,
                file_offset: mapping.file_offset,
            });
            let ram = NewRam::new(file, len_bytes, mappings.collect()).map_err(refused)?;
            layout = layout.with(&ram, first).map_err(refused)?;
        }
        if layout.files.is_empty() {
            return Err(refused(LayoutError::Nothing));
        }
        layout.warnings.extend(huge_page_warning(&[]));
        // Files were opened by pid.
        vmm.still_runs()?;
        Ok(layout)
    }

    /// How the VMM's mappings of the layout's files differ from the layout now; `None` if they do
    /// not. Of several differences the first is returned.
    ///
    /// # Errors
    /// [`Refusal`] if they cannot be read.
    pub fn maps_change(&self, vmm: &VmmProcess) -> Result<Option<MapsChange>, Refusal> {
        let listed = list(&maps_of(vmm)?);
        Ok(difference(&self.recorded().mappings, &listed))
    }
}

/// Opens the file of an existing mapping; `None` if it is another file after all.
fn open_recorded(
    vmm: &VmmProcess,
    mapping: &RecordedMapping,
    maps: &[MemoryMap],
) -> Result<Option<GuestFile>, Refusal> {
    let listed_at = |map: &&MemoryMap| {
        key_of(map) == mapping.key && (map.address.0..map.address.1).contains(&mapping.hva.0)
    };
    let Some(map) = maps.iter().find(listed_at) else {
        return Ok(None);
    };
    let Some(file) = open_ram_file(vmm, map)? else {
        return Ok(None);
    };
    let key = file.key().map_err(|e| unreadable(vmm.pid(), &e))?;
    Ok((key == mapping.key).then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{PAGE_BYTES, PageRange};
    use pagetide_sys::mapping::SharedMapping;
    use std::os::fd::AsFd;

    const PAGES: u64 = 16;

    fn mapped(pages: u64) -> (GuestFile, SharedMapping) {
        let bytes = pages * PAGE_BYTES;
        let file = GuestFile::new_memfd("recorded", bytes).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
        (file, mapping)
    }

    fn own() -> VmmProcess {
        VmmProcess::open(std::process::id()).unwrap()
    }

    fn of_file(file: usize, mapping: &SharedMapping) -> RamMapping {
        RamMapping {
            hva: Hva(mapping.address() as u64),
            len_bytes: mapping.len_bytes(),
            file,
            file_offset: 0,
        }
    }

    #[test]
    fn a_successor_finds_the_recorded_pages_whatever_else_is_mapped_by_then() {
        let ((one, at_one), (two, at_two)) = (mapped(PAGES), mapped(PAGES / 2));
        let (again_one, again_two) = (
            one.as_fd().try_clone_to_owned().unwrap(),
            two.as_fd().try_clone_to_owned().unwrap(),
        );
        // In the other order than their addresses, in one of the two arrangements.
        for (files, maps) in [
            (vec![one, two], [of_file(0, &at_one), of_file(1, &at_two)]),
            (
                vec![again_two.into(), again_one.into()],
                [of_file(0, &at_two), of_file(1, &at_one)],
            ),
        ] {
            let before = RamLayout::from_mappings(files, &maps).unwrap();
            let recorded = before.recorded();
            let more = mapped(PAGES);
            let twice = SharedMapping::new(before.files()[0].file().as_fd(), PAGE_BYTES).unwrap();
            let after = RamLayout::of_recorded(&own(), &recorded).unwrap();
            drop((more, twice));
            assert_eq!(after.recorded(), recorded);
            assert_eq!(after.len_bytes(), before.len_bytes());
            let keys = |layout: &RamLayout| -> Vec<_> {
                let files = layout.files().iter();
                files.map(|f| (f.key(), f.pages())).collect()
            };
            assert_eq!(keys(&after), keys(&before));
        }
    }

    #[test]
    fn a_recorded_file_that_is_mapped_nowhere_is_left_out_and_the_others_keep_their_pages() {
        let ((one, at_one), (two, at_two)) = (mapped(PAGES), mapped(PAGES));
        let maps = [of_file(0, &at_one), of_file(1, &at_two)];
        let before = RamLayout::from_mappings(vec![one, two], &maps).unwrap();
        let [first, second] = [0, 1].map(|file: usize| before.files()[file].key());
        drop(at_one);
        let after = RamLayout::of_recorded(&own(), &before.recorded()).unwrap();
        assert!(after.file(first).is_none());
        let pages = |layout: &RamLayout| layout.file(second).unwrap().pages();
        assert_eq!(pages(&after), pages(&before));
        // As recorded before there were first pages: end to end, not at a section boundary. Its
        // words are there, so it stays there.
        let end_to_end = RecordedLayout {
            first_pages: Vec::new(),
            ..before.recorded()
        };
        let after = RamLayout::of_recorded(&own(), &end_to_end).unwrap();
        assert!(after.file(first).is_none());
        assert_eq!(
            pages(&after),
            PageRange::new(PageNo(PAGES), PageNo(2 * PAGES))
        );
        drop(at_two);
        assert!(matches!(
            RamLayout::of_recorded(&own(), &before.recorded()),
            Err(Refusal::RamGone { .. })
        ));
    }

    #[test]
    fn a_recorded_mapping_that_is_gone_or_moved_is_refused_by_its_address() {
        let (file, mapping) = mapped(PAGES);
        let layout = RamLayout::from_mappings(vec![file], &[of_file(0, &mapping)]).unwrap();
        let recorded = layout.recorded().mappings;
        let refused = |mappings: &[RecordedMapping]| {
            let recorded = RecordedLayout {
                mappings: mappings.to_vec(),
                first_pages: Vec::new(),
            };
            let refused = RamLayout::of_recorded(&own(), &recorded).unwrap_err();
            let Refusal::RamGone { mapping, .. } = refused else {
                panic!("{refused}");
            };
            mapping
        };
        for wrong in [
            RecordedMapping {
                file_offset: PAGE_BYTES,
                ..recorded[0]
            },
            RecordedMapping {
                len_bytes: u64::MAX,
                ..recorded[0]
            },
            RecordedMapping {
                len_bytes: recorded[0].len_bytes + PAGE_BYTES,
                ..recorded[0]
            },
            RecordedMapping {
                key: FileKey {
                    ino: recorded[0].key.ino + 1,
                    ..recorded[0].key
                },
                ..recorded[0]
            },
        ] {
            assert_eq!(refused(&[wrong]), wrong);
        }
        drop(mapping);
        assert_eq!(refused(&recorded), recorded[0]);
        assert!(matches!(
            RamLayout::of_recorded(&own(), &RecordedLayout::default()),
            Err(Refusal::Layout {
                source: LayoutError::Nothing,
                ..
            })
        ));
    }

    #[test]
    fn a_file_that_has_grown_keeps_its_recorded_pages_and_one_cut_short_is_refused() {
        let (file, mapping) = mapped(PAGES);
        let layout = RamLayout::from_mappings(vec![file], &[of_file(0, &mapping)]).unwrap();
        let recorded = layout.recorded();
        let file = layout.files()[0].file();
        file.allocate(PAGES * PAGE_BYTES, PAGE_BYTES).unwrap();
        let after = RamLayout::of_recorded(&own(), &recorded).unwrap();
        assert_eq!(after.page_count(), PAGES);
        rustix::fs::ftruncate(file, (PAGES - 1) * PAGE_BYTES).unwrap();
        let cut = RamLayout::of_recorded(&own(), &recorded).unwrap_err();
        assert!(
            matches!(
                cut,
                Refusal::Layout {
                    source: LayoutError::Short { .. },
                    ..
                }
            ),
            "{cut}"
        );
    }

    #[test]
    fn a_further_mapping_and_one_that_is_gone_are_told_and_other_files_are_not() {
        let (file, mapping) = mapped(PAGES);
        let layout = RamLayout::from_mappings(vec![file], &[of_file(0, &mapping)]).unwrap();
        let other = mapped(PAGES);
        assert_eq!(layout.maps_change(&own()).unwrap(), None);
        let file = layout.files()[0].file();
        let twice = SharedMapping::new(file.as_fd(), PAGE_BYTES).unwrap();
        let change = layout.maps_change(&own()).unwrap();
        let Some(MapsChange::Further(further)) = change else {
            panic!("{change:?}");
        };
        assert_eq!(further.hva, Hva(twice.address() as u64));
        assert_eq!(further.len_bytes, PAGE_BYTES);
        drop((twice, other));
        assert_eq!(layout.maps_change(&own()).unwrap(), None);
        drop(mapping);
        let gone = layout.maps_change(&own()).unwrap();
        assert_eq!(gone, Some(MapsChange::Gone(layout.recorded().mappings[0])));
    }

    #[test]
    fn a_mapping_listed_in_parts_is_there_and_one_with_a_private_part_is_gone() {
        let key = FileKey { dev: 1, ino: 7 };
        let part = |page: u64, pages: u64| Listed {
            mapping: RecordedMapping {
                hva: Hva((100 + page) * PAGE_BYTES),
                len_bytes: pages * PAGE_BYTES,
                key,
                file_offset: page * PAGE_BYTES,
            },
            shared_writable: true,
        };
        let recorded = [part(0, 10).mapping];
        let mut parts = [part(0, 3), part(3, 4), part(7, 3)];
        assert_eq!(difference(&recorded, &parts), None);
        parts[1].shared_writable = false;
        let gone = Some(MapsChange::Gone(recorded[0]));
        assert_eq!(difference(&recorded, &parts), gone);
        assert_eq!(difference(&recorded, &[part(0, 3), part(7, 3)]), gone);
        let longer = [part(0, 10), part(10, 1)];
        assert_eq!(
            difference(&recorded, &longer),
            Some(MapsChange::Further(longer[1].mapping))
        );
    }
}
