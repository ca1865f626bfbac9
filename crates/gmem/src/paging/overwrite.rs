// SPDX-License-Identifier: Apache-2.0
//! Overwriting: absent pages that a device has written whole get its bytes, not their old ones.
//!
//! # Idea
//! A transfer that covers a whole page makes the page's old content worthless, so loading that from
//! its tier is wasted work. But whether a transfer covers a page is known only when it is over, for
//! it may be short. So the device receives it in a buffer of its own, then requests an overwrite
//! for each page that was written whole:
//!
//! ```text
//!   Stored(old) ── claim ──► Filling(old) ── install the device's bytes ──► Present; old freed
//!   Present, a hole (given up by the guest) ──► Discarding ── likewise ──► Present
//!   Present         stays as it is ┐
//!   being filled    stays so       ┴ the device writes its bytes itself, under a lease
//!   Poisoned        refused: the kernel installs nothing in its place
//! ```
//! These are the steps and locks of a fill, with other bytes. So a reader sees either the old
//! content or the new, and a waiter that joins meanwhile sees the new. If the daemon dies, the page
//! is either stored, with its old content (the request is then repeated, for its device has not
//! completed it), or present, with the new. Stored content that is damaged is not even read, and
//! content that is not at hand is not loaded. A page whose load is under way already is being filled
//! like any other: the device joins that fill.
//!
//! # A device that gives up
//! A device may die while its overwrite waits here for room, a lock or a CPU. Its successor repeats
//! the request; then the guest may change the page, and the page may be evicted. The stored content
//! is then newer than the device's bytes, and the only copy. So before each claim, with the
//! section's lock held shared, the caller is queried whether the bytes are still wanted. If they
//! are at that moment, no page that was used since has been evicted. None is evicted before the
//! claim either, because an eviction needs the lock exclusively: a page that is used anew is
//! present, and stays so.
//!
//! *Invariant:* nothing is installed over content that was stored after the device gave up the
//! request.

use super::fault::Fault;
use pagetide_addr::{OVERWRITE_PAGES_MAX, PAGE_BYTES, PageRange, to_usize};

/// Pages that a device has written whole.
#[derive(Clone, Copy)]
pub struct Overwrite<'a> {
    /// The device, and the pages: at most [`OVERWRITE_PAGES_MAX`].
    pub fault: Fault,
    /// What the device has written, as long as the pages.
    pub content: &'a [u8],
    /// Called under a section's lock, so it must not wait. Once the device has given up the
    /// request, it must return false before any page that was used since is evicted; then no
    /// further page is installed, and the outcome is
    /// [`FaultOutcome::Gone`](super::FaultOutcome::Gone).
    pub still_wanted: &'a dyn Fn() -> bool,
}

impl<'a> Overwrite<'a> {
    /// True if the pages are not too many, and the bytes as many as the pages have.
    pub(super) fn is_sound(&self) -> bool {
        let pages = self.fault.pages;
        pages.len() <= OVERWRITE_PAGES_MAX && pages.bytes() == self.content.len() as u64
    }

    pub(super) fn is_given_up(&self) -> bool {
        !(self.still_wanted)()
    }

    /// What the device has written to `pages`, which are among its own.
    pub(super) fn bytes_of(&self, pages: PageRange) -> &'a [u8] {
        let first = self.fault.pages.start;
        let at = |page: pagetide_addr::PageNo| to_usize(page.since(first) * PAGE_BYTES);
        &self.content[at(pages.start)..at(pages.end)]
    }
}

impl std::fmt::Debug for Overwrite<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Overwrite({:?})", self.fault)
    }
}
