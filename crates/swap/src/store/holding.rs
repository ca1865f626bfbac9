// SPDX-License-Identifier: Apache-2.0
//! [`Holding`]: slots that are not given out again while somebody makes copies of what is in them.
//!
//! Who demotes reads content of pages that may be filled at any moment. Then the content is freed, its slot
//! may get new content of the *same page*, of the same length, and the page's word names what it named before:
//! a comparison of words alone would put the old copy in the place of the new content. So slots are held while
//! they are copied: a slot that is freed meanwhile is given out only after the copies were committed or dropped.
//!
//! ```text
//!   held ─► word read again: it names the slot ─► copied, stored ─► word changed, if it still does ─► released
//! ```
//! A word that names a held slot after it was held names what is in it, until the slot is released.

use super::PoolStore;
use crate::tier::{InPool, Located};
use pagetide_gmem::Content;

/// See the module. While it lives, nobody else holds slots of the store.
#[derive(Debug)]
pub struct Holding<'a> {
    store: &'a PoolStore,
}

impl PoolStore {
    /// Holds the slots of `contents`, of which some may have been freed by now. One thread of a VM demotes,
    /// and it holds one batch at a time.
    ///
    /// # Panics
    /// If slots are held already.
    #[must_use]
    pub fn hold(&self, contents: impl Iterator<Item = InPool>) -> Holding<'_> {
        let mut space = self.lock();
        assert!(space.held.is_empty(), "slots are held already");
        for content in contents {
            if space.slots.is_taken(content.slot, content.bytes) {
                space.held.hold(content);
            }
        }
        drop(space);
        Holding { store: self }
    }
}

impl Holding<'_> {
    /// True if the slot of `content` is held.
    #[must_use]
    pub fn holds(&self, content: Content) -> bool {
        match Located::of(content) {
            Ok(Located::Pool(in_pool)) => self.store.lock().held.holds(in_pool),
            _ => false,
        }
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let space = &mut *self.store.lock();
        space.held.release(&mut space.slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        pool::Pool,
        tier::{Located, Packer},
    };
    use pagetide_addr::PageNo;
    use pagetide_gmem::ContentStore as _;
    use std::sync::Arc;

    #[test]
    fn slot_that_is_held_is_not_given_out_again_until_it_is_released() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Pool::create(&dir.path().join("a.pool"), 64, 3, b"").unwrap();
        let store = PoolStore::new(Arc::new(pool));
        let mut packer = Packer::default();
        let mut put = |byte: u8| {
            let mut page = [byte; 4096];
            page[..64].fill(byte / 2);
            let packed = packer.pack(store.seed(), PageNo(1), &page).unwrap();
            store.put(packed).unwrap()
        };
        let in_pool = |content| Located::of(content).unwrap().in_pool().unwrap();
        let (first, other) = (put(100), put(102));
        {
            let holding = store.hold([first].into_iter().map(in_pool));
            assert!(holding.holds(first) && !holding.holds(other));
            store.free(first);
            assert_ne!(put(104), first, "it has the size, and is held");
            // What it holds is still there.
            let mut back = [0; 4096];
            store.load(PageNo(1), first, &mut back).unwrap();
            assert_eq!((back[0], back[4095]), (50, 100));
        }
        assert_eq!(put(106), first, "it is free now");
        // One that was freed before is not held.
        store.free(other);
        let holding = store.hold([other].into_iter().map(in_pool));
        assert!(!holding.holds(other));
        drop(holding);
        assert_eq!(put(108), other);
    }
}
