// SPDX-License-Identifier: Apache-2.0
//! Where page requests come from: a queue of an engine in this process, the page
//! fault queue of a VPRI function, the page request queue of an IOMMU (VPRI 6).
//!
//! The I/O page fault service knows nothing else of them, so whatever can hand out
//! requests and take responses is served alike.

use pagetide_addr::{PageRequest, PageResponse};

/// A queue of page requests, as the service sees it.
///
/// One thread takes requests; responses come from any thread, and in any order.
pub trait FaultSource: Send + Sync {
    /// The next request, if one is there.
    fn next(&self) -> Option<PageRequest>;

    /// Says that the taker is about to sleep until its doorbell rings; true if a request is there
    /// already, and it must not.
    fn arm(&self) -> bool;

    /// Says that the taker is awake again.
    fn disarm(&self) {}

    /// Answers a request that was taken, exactly once. A response to a device that is gone, or has
    /// given the request up, is dropped.
    fn respond(&self, response: PageResponse);

    /// What the device has written into so many bounce buffers from a slot on (the content of an
    /// [`Overwrite`](pagetide_addr::RequestKind::Overwrite)), appended to the bytes given; false if the source
    /// has no such slots.
    fn read_bounced(&self, _slot: u32, _count: u64, _into: &mut Vec<u8>) -> bool {
        false
    }

    /// False once the device has given up the request whose content arrived in a bounce buffer in `slot`, before any page
    /// is evicted that was used since: what was read of the slot must not be installed any more. Asked
    /// under locks, so it must not wait.
    ///
    /// True for a device that gives none up before it has the answer, such as an engine of this process.
    fn still_wants(&self, _slot: u32) -> bool {
        true
    }
}
