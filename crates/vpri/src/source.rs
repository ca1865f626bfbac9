// SPDX-License-Identifier: Apache-2.0
//! Where page requests come from: a queue of an engine in this process, the page
//! fault queue of a VPRI function, the page request queue of an IOMMU (VPRI 6).
//!
//! The I/O page fault service knows nothing else of them: any source that hands
//! out requests and takes responses is served alike.

use pagetide_addr::{PageRequest, PageResponse};

/// A queue of page requests, as the service sees it.
///
/// One thread takes requests; responses come from any thread, and in any order.
pub trait FaultSource: Send + Sync {
    /// The next request, if one is there.
    fn next(&self) -> Option<PageRequest>;

    /// Declares that the taker is about to sleep until its doorbell rings; true if a request is
    /// already there, and it must not sleep.
    fn arm(&self) -> bool;

    /// Declares that the taker is awake again.
    fn disarm(&self) {}

    /// Answers a request that was taken, exactly once. A response is dropped if the device is gone
    /// or has given the request up.
    fn respond(&self, response: PageResponse);

    /// Appends to `into` what the device has written into `count` bounce buffers from `slot` on (the content
    /// of an [`Overwrite`](pagetide_addr::RequestKind::Overwrite)); false if the source has no such slots.
    fn read_bounced(&self, _slot: u32, _count: u64, _into: &mut Vec<u8>) -> bool {
        false
    }

    /// False once the device has given up the request whose content arrived in the bounce buffer `slot`, before
    /// any page is evicted that was used since: content already read from the slot must then not be installed.
    /// Called under locks, so it must not wait.
    ///
    /// True for a device that gives up no request before it has the answer, such as an engine of this
    /// process.
    fn still_wants(&self, _slot: u32) -> bool {
        true
    }
}
