// SPDX-License-Identifier: Apache-2.0
//! The differences between the paper's text and the authors' program: order of service, translation agent,
//! predictor. The pipeline between them ([`crate::machine`]) is common.

use crate::config::{Completion, Config};
use crate::error::SimError;
use crate::link::Link;
use crate::machine::DeviceSet;
use crate::outcome::AllCounts;
use crate::policy::OwnPolicies;
use crate::policy::prefetch::BuiltInPredictor;
use crate::request::{Page, Request, Tag};
use crate::ties::TieBreak;

/// One set of rules.
pub(crate) trait Flavour: Sized {
    /// Order in which a stage serves.
    type Queue: StageQueue;
    /// The part behind PCIe.
    type Agent: TranslationAgent;
    /// The prediction of the next source.
    type Predictor: BuiltInPredictor;
    /// The devices: one, or several.
    type Devices: DeviceSet<Self>;
    /// True if a stage serves at most one request a nanosecond.
    const ONE_A_NANOSECOND: bool;
    /// True if memory may be absent.
    const HAS_FAULTS: bool;
    /// Nanoseconds by which a hit in the device ends before its latency.
    const HIT_ENDS_EARLY_NS: u64;

    /// How ties of the LFU policy are broken.
    fn ties(config: &Config) -> TieBreak {
        TieBreak::Seed(config.seed)
    }

    /// The link, with the length of its slot for a packet as a fraction of nanoseconds.
    fn link(config: &Config) -> Link;
}

/// Requests waiting for a stage, each from the time that it is ready.
pub(crate) trait StageQueue {
    /// An empty queue.
    fn new(completion: Completion) -> Self;
    /// Adds the request in `slot`, ready at `ready_ns`.
    fn push(&mut self, ready_ns: u64, slot: u32);
    /// The next request as a number that grows with the time at which it is
    /// ready; `u64::MAX` if there is none.
    fn next_key(&self) -> u64;
    /// The time of a key.
    fn ready_ns(key: u64) -> u64;
    /// Takes the next request if it is ready at `now_ns`.
    fn pop_ready(&mut self, now_ns: u64) -> Option<u32>;
}

/// The agent's answer to a request that has reached it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// It had the translation: back at the device after that time.
    Return {
        /// Time from now.
        after_ns: u64,
    },
    /// It has to walk; fills its caches after that time.
    Walk {
        /// Time from now.
        after_ns: u64,
        /// Memory accesses of the walk.
        accesses: u64,
    },
    /// Under the flavour's rules the request never ends.
    Lost,
}

/// IOTLB, page-walk caches and page walker.
pub(crate) trait TranslationAgent: Sized {
    /// An agent with empty caches.
    fn new(config: &Config, ties: &TieBreak) -> Self;
    /// Answers `request`.
    fn look_up(&mut self, request: &mut Request) -> Answer;
    /// Puts the entries that the walk for `request` read into the caches.
    fn fill(&mut self, request: &Request);
    /// Drops entries for which `is_void` holds.
    fn invalidate(&mut self, span: &VoidSpan);
    /// The host has taken a page away.
    fn host_unmaps(&mut self, _page: Page) {}
    /// Adds the counts of its caches.
    fn count(&self, counts: &mut AllCounts);
    /// Takes the policies for its caches from `own`; one for a cache that it does not have is an error.
    fn take_policies(&mut self, own: &mut OwnPolicies) -> Result<(), SimError>;
    /// The cache whose policy did something wrong, and what.
    fn failure(&mut self) -> Option<(&'static str, String)>;
}

/// Translations that an invalidation makes void.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum VoidSpan {
    /// All.
    All,
    /// Those of a domain.
    Domain(u32),
    /// Those of a domain that overlap the span of `1 << shift` bytes around an address.
    Pages(Page),
}

impl VoidSpan {
    /// The tags that entries of unknown size have, if only few meet this span; else none.
    pub(crate) fn tags(&self) -> ([Tag; 3], usize) {
        match self {
            Self::Pages(page) if page.shift == 12 => {
                ([12, 21, 30].map(|shift| page.tag_at(shift)), 3)
            }
            _ => ([0; 3], 0),
        }
    }

    /// The tag that entries for `1 << shift` bytes have, if only one meets this span.
    pub(crate) fn tag_at(&self, shift: u32) -> Option<Tag> {
        match self {
            Self::Pages(page) if u32::from(page.shift) <= shift => Some(page.tag_at(shift)),
            _ => None,
        }
    }

    /// True if `page` overlaps this one.
    #[inline(always)]
    pub(crate) fn meets_page(&self, page: &Page) -> bool {
        match self {
            Self::All => true,
            Self::Domain(domain) => page.domain == *domain,
            Self::Pages(span) => {
                let wider = page.shift.max(span.shift);
                (page.iova ^ span.iova) >> wider == 0 && page.domain == span.domain
            }
        }
    }

    /// True if the cached span `tag` of `1 << shift` bytes at most, but not of less than a page, overlaps
    /// this one.
    pub(crate) fn meets(&self, tag: Tag, shift: u32) -> bool {
        use crate::request::{address_of, domain_of};
        match self {
            Self::All => true,
            Self::Domain(domain) => domain_of(tag) == *domain,
            Self::Pages(page) => {
                let wider = shift.max(u32::from(page.shift));
                domain_of(tag) == page.domain && address_of(tag) >> wider == page.iova >> wider
            }
        }
    }
}
