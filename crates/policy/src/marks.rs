// SPDX-License-Identifier: Apache-2.0
//! When memory is reclaimed: the watermarks under a VM's limit (Taiji 4.2.2) and the times of its
//! reclaim thread.
//!
//! ```text
//!   limit ────────── a fill first has memory evicted
//!     │   ╲ 1.5 %
//!   low watermark ── reclaim begins
//!     │   ╲ 3 %
//!   high watermark ─ reclaim ends
//! ```
//! Watermarks are named for what is *free* under the limit. The daemon's reclaim thread and its replay in
//! virtual time both use these.

use std::time::Duration;

/// Free pages below which reclaim begins, in thousandths of the limit.
pub const LOW_PERMILLE: i64 = 15;
/// Free pages above which reclaim ends, in thousandths of the limit.
pub const HIGH_PERMILLE: i64 = 30;
/// Sections drift among the sets this often when there is no pressure.
pub const SCAN_ROUND: Duration = Duration::from_secs(5);
/// Scans of one reclaim before it gives up for now: each costs a small fault per mapped page.
pub const PRESSED_SCANS_MAX: u32 = 4;
