// SPDX-License-Identifier: Apache-2.0
//! Whether the mappings of a RAM file are still those that our userfaultfd watches.
//!
//! A list of mappings tells where a file is mapped, not who serves its faults. A
//! backend with a path that is taken out and put in again between two looks is
//! listed as it was, at the same address even, but it is another mapping: nobody
//! watches it, and its evicted pages read zeros. So each part that is listed is
//! asked for by one ioctl, of a microsecond or two, that changes nothing (see
//! [`Userfaultfd::is_watched`]). A part never differs within itself: the kernel lists
//! apart what is watched and what is not.
//!
//! | listed parts of a file | what it is |
//! |---|---|
//! | some watched, none of the known ones unwatched | as it was |
//! | some watched, a known one not | part of it was mapped anew ([`MapsChange::Unwatched`](super::MapsChange)) |
//! | none, or none that is watched | gone; what is listed is new |

use super::recorded::{Listed, RecordedMapping};
use pagetide_addr::{FileKey, Hva};
use pagetide_sys::uffd::{UffdError, Userfaultfd};

/// Tells whether the mapping at an address is watched.
pub(super) type Ask<'a> = &'a dyn Fn(Hva) -> Result<bool, UffdError>;

/// How the mappings of a file are watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watched {
    /// As they were.
    AsKnown,
    /// All but this one, or more.
    NotAll(RecordedMapping),
    /// None is.
    Nowhere,
}

/// How the mappings of `key` are watched, of which `known` were once.
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

/// Asks `userfaultfd`.
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
