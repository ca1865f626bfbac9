// SPDX-License-Identifier: Apache-2.0
//! A pin-down cache: pages that stay pinned after their use, as far as a bound allows ('Page Fault
//! Support for Network Controllers', 2.2, *coarse-grained pinning*).
//!
//! ```text
//!   begin_use ─► not pinned: if the bound is reached, unpin the page used least recently ─► pin
//!             ─► pinned: nothing to do
//!   end_use   ─► it stays pinned, as the one used most recently
//! ```
//! A page that is in use is never unpinned. If all are, a further page is not pinned: its access may
//! fault. With a small bound that is pinning from post to use, with a large one it is pinning of all
//! pages that were ever used.
//!
//! It decides only: pinning itself is the caller's.

use std::collections::BTreeMap;

/// See the module. `K` names a page, `P` is what unpins it.
#[derive(Debug)]
pub(crate) struct PinDownCache<K, P> {
    pages_max: u64,
    pages: BTreeMap<K, Pinned<P>>,
    /// Pages that are not in use, by the number of their last use.
    idle: BTreeMap<u64, K>,
    next_use: u64,
}

#[derive(Debug)]
struct Pinned<P> {
    pin: P,
    users: u32,
    /// Number of its last use, once nobody uses it.
    last_use: u64,
}

/// What the beginning of a use came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// The page is pinned, and its use must be ended.
    Pinned,
    /// It is not: the bound is reached, or it could not be.
    Unpinned,
}

impl<K: Ord + Copy, P> PinDownCache<K, P> {
    /// An empty cache of at most so many pages.
    pub fn new(pages_max: u64) -> Self {
        Self {
            pages_max,
            pages: BTreeMap::new(),
            idle: BTreeMap::new(),
            next_use: 0,
        }
    }

    /// Begins to use a page. `pin` pins it, if it can; `unpin` is called for a page that makes room.
    pub fn begin_use(
        &mut self,
        page: K,
        pin: impl FnOnce() -> Option<P>,
        mut unpin: impl FnMut(P),
    ) -> Use {
        if let Some(pinned) = self.pages.get_mut(&page) {
            if pinned.users == 0 {
                self.idle.remove(&pinned.last_use);
            }
            pinned.users += 1;
            return Use::Pinned;
        }
        while self.pages.len() as u64 >= self.pages_max {
            let Some((_, oldest)) = self.idle.pop_first() else {
                return Use::Unpinned;
            };
            if let Some(pinned) = self.pages.remove(&oldest) {
                unpin(pinned.pin);
            }
        }
        let Some(pin) = pin() else {
            return Use::Unpinned;
        };
        let pinned = Pinned {
            pin,
            users: 1,
            last_use: 0,
        };
        self.pages.insert(page, pinned);
        Use::Pinned
    }

    /// Ends a use that has begun as [`Use::Pinned`].
    pub fn end_use(&mut self, page: K) {
        let Some(pinned) = self.pages.get_mut(&page) else {
            debug_assert!(false, "a page is unpinned while it is in use");
            return;
        };
        pinned.users -= 1;
        if pinned.users == 0 {
            pinned.last_use = self.next_use;
            self.idle.insert(self.next_use, page);
            self.next_use += 1;
        }
    }

    /// Empties it; returns what was in it, for [`Self::clear`]. Whoever still uses a page must not end that use any more.
    pub fn take_all(&mut self) -> Self {
        let empty = Self::new(self.pages_max);
        std::mem::replace(self, empty)
    }

    /// Empties it. Whoever still uses a page must not end that use any more.
    pub fn clear(&mut self, unpin: impl FnMut(P)) {
        self.idle.clear();
        let pages = std::mem::take(&mut self.pages);
        pages.into_values().map(|page| page.pin).for_each(unpin);
    }

    /// Pages that are pinned.
    pub fn len(&self) -> u64 {
        self.pages.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// A naive cache: pinned pages with their users, the one used most recently last.
    #[derive(Default)]
    struct Naive {
        pages: Vec<(u64, u32)>,
        unpinned: Vec<u64>,
    }

    impl Naive {
        fn begin_use(&mut self, page: u64, bound: usize, wired: Option<u64>) -> Use {
            if let Some(found) = self.pages.iter_mut().find(|(p, _)| *p == page) {
                found.1 += 1;
                return Use::Pinned;
            }
            while self.pages.len() >= bound {
                let Some(at) = self.pages.iter().position(|(_, users)| *users == 0) else {
                    return Use::Unpinned;
                };
                self.unpinned.push(self.pages.remove(at).0);
            }
            if wired.is_none() {
                return Use::Unpinned;
            }
            self.pages.push((page, 1));
            Use::Pinned
        }

        fn end_use(&mut self, page: u64) {
            let at = self.pages.iter().position(|(p, _)| *p == page).unwrap();
            let (page, users) = self.pages.remove(at);
            match users {
                1 => self.pages.push((page, 0)),
                _ => self.pages.insert(at, (page, users - 1)),
            }
        }
    }

    #[test]
    fn cache_unpins_what_a_list_ordered_by_use_unpins_and_never_what_is_in_use() {
        for seed in 0..300 {
            let mut random = SplitMix64::new(seed);
            let bound = 1 + random.below(12);
            let mut cache = PinDownCache::new(bound);
            let mut naive = Naive::default();
            let mut in_use: Vec<u64> = Vec::new();
            for _ in 0..400 {
                if random.below(2) == 0 {
                    let page = random.below(24);
                    let wired = (random.below(8) > 0).then_some(page);
                    let mut unpinned = Vec::new();
                    let used = cache.begin_use(page, || wired, |page| unpinned.push(page));
                    naive.unpinned.clear();
                    let wanted = naive.begin_use(page, usize::try_from(bound).unwrap(), wired);
                    assert_eq!((used, &unpinned), (wanted, &naive.unpinned), "seed {seed}");
                    assert!(unpinned.iter().all(|page| !in_use.contains(page)));
                    if used == Use::Pinned {
                        in_use.push(page);
                    }
                } else if !in_use.is_empty() {
                    let at = usize::try_from(random.below(in_use.len() as u64)).unwrap();
                    let page = in_use.swap_remove(at);
                    cache.end_use(page);
                    naive.end_use(page);
                }
                assert_eq!(cache.len(), naive.pages.len() as u64);
                assert!(cache.len() <= bound);
            }
            let mut left = Vec::new();
            cache.clear(|page| left.push(page));
            let mut wanted: Vec<u64> = naive.pages.iter().map(|(page, _)| *page).collect();
            wanted.sort_unstable();
            assert_eq!(left, wanted);
            assert_eq!(cache.len(), 0);
        }
    }
}
