// SPDX-License-Identifier: Apache-2.0
//! [`Aged`]: a guest that has been running for weeks when a replay of it starts.
//!
//! At the start of a replay all memory is present and was used at the same moment, so an evictor takes what a disk has
//! only not come to yet before what nobody uses. A host that has run for weeks knows better: what its devices use is
//! ordered by when that was, and what nobody uses is older. To replay weeks for that would take as long as they are
//! many. But how long ago a section was used is a random number whose distribution follows from how it is used: for
//! visits at intervals without memory that of the intervals themselves, for others what has passed of an interval at a
//! random moment. So it is drawn, for each section that a device uses ([`LastUse`]):
//! ```text
//!   order of the evictor     never used ─ … ─ used weeks ago ─ … ─ used a minute ago      the oldest first
//!   first second             each section touched by its device, in this order, by DMA alone
//! ```
//! The touches make the sections known to protectors, in their order, and leave no trace in the page tables of CPUs.

use super::sink::{GuestTouch, Who, Work};
use pagetide_addr::{Access, SECTION_BYTES, SectionNo};

/// When a device used a section last.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LastUse {
    pub(super) who: Who,
    pub(super) section: u64,
    /// Seconds before the replay.
    pub(super) age_s: f64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Aged {
    guest: Box<dyn Work>,
    /// Touches of the first second, those before it first.
    first: Vec<GuestTouch>,
    is_first: bool,
}

impl Aged {
    /// `guest`, whose devices used these sections.
    pub(super) fn new(guest: Box<dyn Work>, mut uses: Vec<LastUse>) -> Self {
        uses.sort_by(|one, other| other.age_s.total_cmp(&one.age_s));
        let touch = |last: LastUse| GuestTouch {
            who: last.who,
            section: SectionNo(last.section),
            access: Access::Write,
            bytes: SECTION_BYTES / 8,
        };
        Self {
            guest,
            first: uses.into_iter().map(touch).collect(),
            is_first: false,
        }
    }

    /// The sections that were used, the longest ago first.
    pub(super) fn oldest_first(&self) -> Vec<SectionNo> {
        self.first.iter().map(|touch| touch.section).collect()
    }
}

impl Work for Aged {
    fn second(&mut self, second: u64) {
        self.guest.second(second);
        self.is_first = second == 0;
        match self.is_first {
            true => self.first.extend_from_slice(self.guest.touches()),
            false => self.first = Vec::new(),
        }
    }

    fn touches(&self) -> &[GuestTouch] {
        match self.is_first {
            true => &self.first,
            false => self.guest.touches(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nothing;

    impl Work for Nothing {
        fn second(&mut self, _: u64) {}

        fn touches(&self) -> &[GuestTouch] {
            &[]
        }
    }

    #[test]
    fn what_was_used_longest_ago_is_first_and_all_is_touched_in_the_first_second_alone() {
        let uses = [(7, 10.0), (3, 2_000.0), (9, 0.5)];
        let uses = uses.map(|(section, age_s)| LastUse {
            who: Who::Disk,
            section,
            age_s,
        });
        let mut aged = Aged::new(Box::new(Nothing), uses.to_vec());
        let order = [3, 7, 9].map(SectionNo);
        assert_eq!(aged.oldest_first(), order);
        assert!(aged.touches().is_empty(), "nothing has begun");
        aged.second(0);
        let touched: Vec<_> = aged.touches().iter().map(|touch| touch.section).collect();
        assert_eq!(touched, order);
        aged.second(1);
        assert!(aged.touches().is_empty());
    }
}
