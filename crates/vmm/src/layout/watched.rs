// SPDX-License-Identifier: Apache-2.0
//! Whether the mappings of a RAM file are still those that our userfaultfd watches.
//!
//! The list of mappings shows where a file is mapped, not which userfaultfd serves its faults. A
//! backend with a path that is unplugged and plugged in again between two scans is listed as
//! before, even at the same address, but it is another mapping: it is not watched, and its evicted
//! pages read zeros. So each listed part is queried by one ioctl of a microsecond or two that
//! changes nothing (see [`Userfaultfd::is_watched`]). A part is watched as a whole or not at all:
//! the kernel lists watched and unwatched parts separately.
//!
//! | listed parts of a file | what it is |
//! |---|---|
//! | some watched, none of the known ones unwatched | as it was |
//! | some watched, a known one not | part of it was mapped anew ([`MapsChange::Unwatched`](super::MapsChange)) |
//! | none, or none that is watched | gone; what is listed is new |

use super::mapping::{Listed, RecordedMapping};
use pagetide_addr::{FileKey, Hva};
use pagetide_sys::uffd::{UffdError, Userfaultfd};

/// Queries whether the mapping at an address is watched.
pub(super) type Ask<'a> = &'a dyn Fn(Hva) -> Result<bool, UffdError>;

/// How the mappings of a file are watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watched {
    /// As before.
    AsKnown,
    /// This one is not, and perhaps others.
    NotAll(RecordedMapping),
    /// None is.
    Nowhere,
}

/// How the mappings of `key` are watched; the `known` ones once were.
pub(super) fn how_watched(
    key: FileKey,
    known: &[RecordedMapping],
    listed: &[Listed],
    ask: Ask<'_>,
) -> Result<Watched, UffdError> {
    let (mut any, mut lost) = (false, None);
    for part in listed.iter().filter(|part| part.mapping.key == key) {
        if part.shared_writable && ask(part.mapping.hva)? {
            any = true;
        } else if known.iter().any(|one| one.overlaps(&part.mapping)) {
            lost.get_or_insert(part.mapping);
        }
    }
    Ok(match (any, lost) {
        (false, _) => Watched::Nowhere,
        (true, Some(part)) => Watched::NotAll(part),
        (true, None) => Watched::AsKnown,
    })
}

/// Queries `userfaultfd`.
pub(super) fn by(userfaultfd: &Userfaultfd) -> impl Fn(Hva) -> Result<bool, UffdError> + '_ {
    |at| userfaultfd.is_watched(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PAGE_BYTES;

    const KEY: FileKey = FileKey { dev: 1, ino: 7 };

    fn part(page: u64, pages: u64) -> Listed {
        Listed {
            mapping: RecordedMapping {
                hva: Hva((100 + page) * PAGE_BYTES),
                len_bytes: pages * PAGE_BYTES,
                key: KEY,
                file_offset: page * PAGE_BYTES,
            },
            shared_writable: true,
        }
    }

    #[test]
    fn a_file_is_gone_when_no_part_of_it_is_watched_and_changed_when_a_known_part_is_not() {
        let known = [part(0, 10).mapping];
        let parts = [part(0, 3), part(3, 4), part(7, 3)];
        let answer = |watched: &[u64], listed: &[Listed]| {
            let ask = |at: Hva| Ok(watched.contains(&(at.0 / PAGE_BYTES - 100)));
            how_watched(KEY, &known, listed, &ask).unwrap()
        };
        assert_eq!(answer(&[0, 3, 7], &parts), Watched::AsKnown);
        assert_eq!(answer(&[0, 7], &parts), Watched::NotAll(parts[1].mapping));
        assert_eq!(answer(&[], &parts), Watched::Nowhere);
        assert_eq!(answer(&[], &[]), Watched::Nowhere);
        // A further mapping, somewhere else, is another matter.
        let mut further = part(0, 1);
        further.mapping.hva = Hva(PAGE_BYTES);
        let with_further = [part(0, 10), further];
        let ask = |at: Hva| Ok(at == part(0, 10).mapping.hva);
        let how = how_watched(KEY, &known, &with_further, &ask);
        assert_eq!(how.unwrap(), Watched::AsKnown);
    }
}
