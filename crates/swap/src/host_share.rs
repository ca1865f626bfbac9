// SPDX-License-Identifier: Apache-2.0
//! [`HostShare`]: a VM's place under a budget for all VMs of the host, as its [`Limit`](crate::Limit) sees it.
//!
//! The limit bounds the VM; the budget bounds the sum. Between two decisions about the budget, fills and
//! stored content use it up, so each fill asks here, and every change of what is present is told. All calls
//! come from the path of faults and of eviction, some with a section's lock held: but for
//! [`HostShare::wait_for_room`] an implementation neither waits nor evicts.

use pagetide_addr::SectionNo;
use std::time::Duration;

/// See the module.
pub trait HostShare: Send + Sync {
    /// Pages that the VM should evict before `pages` are filled, while `resident_pages` of it are present;
    /// 0 if the fill may go ahead.
    fn pages_first(&self, pages: u64, resident_pages: u64) -> u64;

    /// Whether the budget has no room at all for the filling of `pages`, so that it should wait.
    fn is_spent(&self, pages: u64, resident_pages: u64) -> bool;

    /// Waits until the budget is not spent for such a fill any more, for `time` at most. Returns whether it
    /// has room now. No lock may be held.
    fn wait_for_room(&self, pages: u64, resident_pages: u64, time: Duration) -> bool;

    /// So many pages more are present, or will be.
    fn took(&self, pages: u64);

    /// Pages that were taken are not filled, or are no longer the VM's.
    fn gave_back(&self, pages: u64);

    /// Pages of a section were evicted.
    fn evicted(&self, section: SectionNo, pages: u64);

    /// Pages of a section, evicted before, were filled with their stored content.
    fn refilled(&self, section: SectionNo, pages: u64);
}
