// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: which pages were touched lately.
//!
//! It is used in two ways. A *sample* checks a few pages of each section and costs the guest next to
//! nothing; it shows how hot a section is. *Taking out* whole sections unmaps all their pages, which costs a
//! small fault for each page in use, and is for sections that are to be evicted.

use crate::sampling::{Look, Sampled, Touched};
use pagetide_addr::{PageSet, SectionNo};

/// Failure of a tracker; the reasons are its own.
pub type TrackerError = Box<dyn std::error::Error + Send + Sync>;

/// How accesses are detected; the kernel decides which ways there are.
pub trait AccessTracker: Send + Sync {
    /// Returns which of the queried pages were touched since they were chosen; then starts over with the
    /// next ones.
    ///
    /// # Errors
    /// Its own; some pages may have been unmapped.
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError>;

    /// Returns what was touched since the last look, for each of `sections` as a whole; then starts over.
    /// The sections are to be evicted: their pages may be punched one by one afterwards, unless
    /// [`AccessTracker::mapped`] returns them.
    ///
    /// # Errors
    /// Its own; some sections may have started over.
    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// The pages of `section` that may have been touched since the last look, without starting over; and
    /// those that must not be evicted for another reason.
    ///
    /// # Errors
    /// Its own.
    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;

    /// True if [`AccessTracker::mapped`] returns all of `section` because it is in a huge page that is in use or
    /// cannot be split.
    fn is_held(&self, _section: SectionNo) -> bool {
        false
    }
}
