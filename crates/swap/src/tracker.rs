// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: how accesses are detected.

use pagetide_addr::{PageSet, SectionNo};
use pagetide_policy::sampling::Look;

pub use pagetide_policy::sampling::{Sampled, Touched};

/// Failure of a tracker; the reasons are its own.
pub type TrackerError = Box<dyn std::error::Error + Send + Sync>;

/// How accesses are detected; the kernel decides which ways there are.
pub trait AccessTracker: Send + Sync {
    /// Returns which of a few pages of each section were accessed; then starts over with other
    /// pages.
    ///
    /// # Errors
    /// Its own.
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError>;

    /// Returns what was accessed since the last look, for each of `sections` as a whole; then starts
    /// over. The sections are to be evicted: their pages may be punched one by one afterwards, unless
    /// [`AccessTracker::mapped`] reports them.
    ///
    /// # Errors
    /// Its own.
    fn look(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// The pages of `section` accessed since the last look, without starting over.
    ///
    /// # Errors
    /// Its own.
    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;
}
