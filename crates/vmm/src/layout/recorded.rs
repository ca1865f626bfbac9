// SPDX-License-Identifier: Apache-2.0
//! A layout written down, and the VMM's mappings held against it later.
//!
//! Page numbers mean something only with the layout they were made by. So who
//! takes a VM up again does not look for RAM anew, for the VMM may have mapped
//! more since (a backend plugged in) or less: it takes the very mappings that
//! were recorded, and refuses if one of them is gone.
//!
//! While a VM is served the same comparison tells of mappings that would be
//! dangerous: a second one of a RAM file is watched by nobody and reads zeros
//! in place of evicted pages, and one that is gone cannot be filled any more.
//!
//! The kernel may list one mapping in parts (each `madvise` of a part does
//! that), so what counts is that each recorded byte is mapped where it was.

use super::{LayoutError, RamLayout, RamMapping, huge_page_warning, is_shared_writable, key_of};
use crate::Refusal;
use crate::process::{VmmProcess, in_proc};
use pagetide_addr::{FileKey, Hva};
use pagetide_sys::memory_file::GuestFile;
use procfs::process::MemoryMap;

/// A mapping of a RAM file in the VMM, with all that tells it from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedMapping {
    /// Where.
    pub hva: Hva,
    /// How long, in bytes.
    pub len_bytes: u64,
    /// Of which file.
    pub key: FileKey,
    /// From which byte of the file on.
    pub file_offset: u64,
}

impl std::fmt::Display for RecordedMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:#x} bytes at {:#x}, from byte {:#x} of file {} on",
            self.len_bytes, self.hva.0, self.file_offset, self.key
        )
    }
}

/// How a VMM's mappings of its RAM files differ from the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapsChange {
    /// One that the layout has is not there, not as a whole, or not shared and writable.
    #[error("the mapping of {0} is gone (RAM unplugged, or the program replaced by exec)")]
    Gone(RecordedMapping),
    /// One that the layout does not have.
    #[error("there is a further mapping, of {0}, that nobody watches")]
    Further(RecordedMapping),
}

/// Part of an address space, as `/proc/PID/maps` lists it.
#[derive(Clone, Copy, Debug)]
struct Listed {
    mapping: RecordedMapping,
    shared_writable: bool,
}

impl RecordedMapping {
    /// The byte of the file that is mapped at `address`, which lies in the mapping.
    const fn offset_at(&self, address: u64) -> Option<u64> {
        let Some(within) = address.checked_sub(self.hva.0) else {
            return None;
        };
        if within < self.len_bytes {
            self.file_offset.checked_add(within)
        } else {
            None
        }
    }

    const fn end(&self) -> Option<u64> {
        self.hva.0.checked_add(self.len_bytes)
    }

    /// True if every byte of it is listed as it was.
    fn is_among(&self, listed: &[Listed]) -> bool {
        let Some(end) = self.end() else {
            return false;
        };
        let mut at = self.hva.0;
        while at < end {
            let same = listed.iter().find(|part| {
                part.shared_writable
                    && part.mapping.key == self.key
                    && part.mapping.offset_at(at).is_some()
                    && part.mapping.offset_at(at) == self.offset_at(at)
            });
            match same.and_then(|part| part.mapping.end()) {
                Some(next) => at = next,
                None => return false,
            }
        }
        true
    }

    /// True if all of `part` lies in it, at the same bytes of the file.
    fn has(&self, part: &Self) -> bool {
        let fits = part.end().zip(self.end()).is_some_and(|(a, b)| a <= b);
        fits && part.key == self.key && self.offset_at(part.hva.0) == Some(part.file_offset)
    }
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

fn list(maps: &[MemoryMap]) -> Vec<Listed> {
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

fn maps_of(vmm: &VmmProcess) -> Result<Vec<MemoryMap>, Refusal> {
    let maps = in_proc(vmm.pid()).and_then(|p| p.maps());
    let maps = maps.map_err(|e| Refusal::parsing(vmm.pid(), "read the mappings", e))?;
    vmm.still_runs()?;
    Ok(maps.0)
}

impl RamLayout {
    /// Its mappings, to be written down for [`RamLayout::of_recorded`]; in the order of their
    /// pages.
    #[must_use]
    pub fn recorded(&self) -> Vec<RecordedMapping> {
        let record = |mapping: &RamMapping| RecordedMapping {
            hva: mapping.hva,
            len_bytes: mapping.len_bytes,
            key: self.files[mapping.file].key(),
            file_offset: mapping.file_offset,
        };
        self.mappings().map(record).collect()
    }

    /// The layout that was recorded, with the same page numbers, of a VMM that still has these
    /// mappings. What else it has mapped by now is of no interest here (see
    /// [`RamLayout::maps_change`]).
    ///
    /// # Errors
    /// [`Refusal::RamGone`] if it has one of them no longer; [`Refusal`].
    pub fn of_recorded(vmm: &VmmProcess, recorded: &[RecordedMapping]) -> Result<Self, Refusal> {
        let (pid, name) = (vmm.pid(), vmm.name().to_owned());
        let gone = |mapping: &RecordedMapping| Refusal::RamGone {
            pid,
            name: name.clone(),
            mapping: *mapping,
        };
        let maps = maps_of(vmm)?;
        let listed = list(&maps);
        let mut files: Vec<(GuestFile, u64)> = Vec::new();
        let mut keys: Vec<FileKey> = Vec::new();
        let mut mappings = Vec::new();
        for mapping in recorded {
            if !mapping.is_among(&listed) {
                return Err(gone(mapping));
            }
            let of_file = keys.iter().position(|key| *key == mapping.key);
            let file = of_file.unwrap_or(keys.len());
            if of_file.is_none() {
                let opened = open_recorded(vmm, mapping, &maps)?;
                let len_bytes = recorded_len(recorded, mapping.key);
                files.push((opened.ok_or_else(|| gone(mapping))?, len_bytes));
                keys.push(mapping.key);
            }
            mappings.push(RamMapping {
                hva: mapping.hva,
                len_bytes: mapping.len_bytes,
                file,
                file_offset: mapping.file_offset,
            });
        }
        let built = if recorded.is_empty() {
            Err(LayoutError::Nothing)
        } else {
            Self::build(files, &mappings)
        };
        let mut layout = built.map_err(|source| Refusal::Layout { pid, name, source })?;
        layout.warnings.extend(huge_page_warning(&[]));
        // Files were opened by pid.
        vmm.still_runs()?;
        Ok(layout)
    }

    /// How the VMM's mappings of the layout's files differ from the layout by now; `None` if they
    /// are as they were. Of several differences the first is told.
    ///
    /// # Errors
    /// [`Refusal`] if they cannot be read.
    pub fn maps_change(&self, vmm: &VmmProcess) -> Result<Option<MapsChange>, Refusal> {
        let listed = list(&maps_of(vmm)?);
        Ok(difference(&self.recorded(), &listed))
    }
}

/// Opens the file of a mapping that is there; `None` if it is another file after all.
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
    let Some(file) = super::open_ram_file(vmm, map)? else {
        return Ok(None);
    };
    let key = file.key().map_err(|e| super::unreadable(vmm.pid(), &e))?;
    Ok((key == mapping.key).then_some(file))
}

/// How much of a file was recorded: it may have grown since, by RAM that is not ours.
fn recorded_len(recorded: &[RecordedMapping], key: FileKey) -> u64 {
    let ends = recorded
        .iter()
        .filter(|mapping| mapping.key == key)
        .map(|mapping| mapping.file_offset.saturating_add(mapping.len_bytes));
    ends.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PAGE_BYTES;
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
            assert_eq!(after.page_count(), PAGES + PAGES / 2);
            let keys = |layout: &RamLayout| -> Vec<_> {
                let files = layout.files().iter();
                files.map(|f| (f.key(), f.pages())).collect()
            };
            assert_eq!(keys(&after), keys(&before));
        }
    }

    #[test]
    fn a_recorded_mapping_that_is_gone_or_moved_is_refused_by_its_address() {
        let (file, mapping) = mapped(PAGES);
        let layout = RamLayout::from_mappings(vec![file], &[of_file(0, &mapping)]).unwrap();
        let recorded = layout.recorded();
        let refused = |recorded: &[RecordedMapping]| {
            let refused = RamLayout::of_recorded(&own(), recorded).unwrap_err();
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
            RamLayout::of_recorded(&own(), &[]),
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
        assert_eq!(gone, Some(MapsChange::Gone(layout.recorded()[0])));
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
