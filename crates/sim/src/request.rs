// SPDX-License-Identifier: Apache-2.0
//! A translation request on its way through the model, and the tags under which caches hold its page.

use pagetide_trace::{Event, PageSize};

/// Most domains of a run: a tag is 45 bits of page number and 19 bits of domain. Far above the thousands of
/// tenants that the model is for.
pub const DOMAINS_MAX: u32 = (1 << DOMAIN_BITS) - 1;
const DOMAIN_BITS: u32 = 19;

/// Page of a domain, of whatever size, as one number: two pages of one domain
/// differ in their first byte's address.
pub(crate) type Tag = u64;

/// A tag that no page has (its domain would be [`DOMAINS_MAX`]).
pub(crate) const NO_TAG: Tag = u64::MAX;

/// Next use of a page that is not used again, as far as known.
pub(crate) const NEVER: u64 = u64::MAX;

/// A page as a tenant requested it: the unit of a history and of a prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// Address as issued.
    pub iova: u64,
    /// Domain, below [`DOMAINS_MAX`].
    pub domain: u32,
    /// Requesting source, as its dense number in this run.
    pub tenant: u32,
    /// Source id as in the trace.
    pub source: u32,
    /// log2 of the page size.
    pub shift: u8,
}

impl Page {
    pub(crate) fn of(event: &Event, tenant: u32, unknown: PageSize) -> Self {
        let size = event.page_size.unwrap_or(unknown);
        #[expect(clippy::cast_possible_truncation, reason = "a shift is at most 57")]
        let shift = size.shift() as u8;
        Self {
            iova: event.iova.0,
            domain: event.domain.0,
            tenant,
            source: event.source.0,
            shift,
        }
    }

    /// Tag of the page itself.
    pub(crate) const fn tag(&self) -> Tag {
        self.tag_at(self.shift as u32)
    }

    /// Tag of the span of `1 << shift` bytes around the address.
    pub(crate) const fn tag_at(&self, shift: u32) -> Tag {
        ((self.iova >> shift << shift) >> 12) << DOMAIN_BITS | self.domain as u64
    }

    /// Page-table level that maps it: 1 for 4 KiB, 2 for 2 MiB, 3 for 1 GiB.
    pub(crate) const fn level(&self) -> u32 {
        // Without a branch, since sizes come in no order.
        3 - 2 * (self.shift == 12) as u32 - (self.shift == 21) as u32
    }
}

/// Domain of a tag.
pub(crate) const fn domain_of(tag: Tag) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "19 bits")]
    let domain = (tag & DOMAINS_MAX as u64) as u32;
    domain
}

/// First address of a tag.
pub(crate) const fn address_of(tag: Tag) -> u64 {
    tag >> DOMAIN_BITS << 12
}

/// log2 of the largest page that may begin where `tag`'s does. A tag does not have its page's size; an
/// invalidation that overlaps the largest possible one voids it, which at worst voids too much.
pub(crate) const fn widest_page(tag: Tag) -> u32 {
    match address_of(tag).trailing_zeros() {
        30.. => 30,
        21.. => 21,
        _ => 12,
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Request {
    /// Its page.
    pub page: Page,
    /// Index of the next request for the same page in the trace, [`NEVER`] if none or unknown.
    pub next_use: u64,
    /// When it entered the device.
    pub issued_ns: u64,
    /// Packet it belongs to, as a slot of the packet table.
    pub packet: u32,
    /// Why it was issued.
    pub origin: Origin,
    /// Its progress.
    pub answer: Answered,
    /// How often it has been at the device.
    pub attempt: Attempt,
    /// What the agent has done for it.
    pub at_agent: AgentNote,
}

const _: () = assert!(size_of::<Request>() == 48, "a request is copied often");

/// What the agent has done for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct AgentNote(u8);

impl AgentNote {
    const IDENTIFIED: u8 = 1 << 7;

    /// Its PASID-table entry is known, or being read.
    pub(crate) const fn is_identified(self) -> bool {
        self.0 & Self::IDENTIFIED != 0
    }

    /// Notes that.
    pub(crate) const fn identify(&mut self) {
        self.0 |= Self::IDENTIFIED;
    }

    /// The highest level of the guest's table that its walk reads; 0 before there is a walk.
    pub(crate) const fn walks_from(self) -> u32 {
        (self.0 & !Self::IDENTIFIED) as u32
    }

    /// Notes that it is `level`, at most 5.
    pub(crate) const fn walk_from(&mut self, level: u32) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 5")]
        let level = level as u8;
        self.0 = self.0 & Self::IDENTIFIED | level;
    }
}

/// How a request comes to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Attempt {
    /// For the first time.
    #[default]
    First,
    /// Again, after it waited behind another one of its source.
    Behind,
    /// Again, after it waited for its page, which it holds.
    Again,
}

/// Whether a request has its translation. One that becomes void on its way back still ends, since its DMA
/// was allowed at the time of the request, but it must not be kept: no cache accepts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Answered {
    /// Not yet: its look-up will find the current state.
    #[default]
    No,
    /// Not yet, but its page was present when the device looked: it may not fault any more.
    Allowed,
    /// It was found, or the walk for it is under way.
    Yes,
    /// It was found, and then an invalidation matched it.
    Void,
    /// The walk has found that its page is absent.
    Absent,
}

/// The origin of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Origin {
    /// A packet waits for it.
    #[default]
    Demand,
    /// The prefetch unit guessed it.
    Prefetch,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_of_the_last_page_of_the_last_domain_is_a_tag() {
        let page = Page {
            iova: (1 << pagetide_trace::IOVA_BITS) - 1,
            domain: DOMAINS_MAX - 1,
            tenant: 0,
            source: 0,
            shift: 12,
        };
        assert_ne!(page.tag(), NO_TAG);
        assert_eq!(domain_of(page.tag()), DOMAINS_MAX - 1);
        assert_eq!(address_of(page.tag()), page.iova >> 12 << 12);
    }

    #[test]
    fn tags_of_one_address_in_two_domains_differ() {
        let page = Page {
            iova: 0x3480_0000,
            shift: 21,
            ..Page::default()
        };
        let other = Page { domain: 1, ..page };
        assert_ne!(page.tag(), other.tag());
    }
}
