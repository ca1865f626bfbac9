// SPDX-License-Identifier: Apache-2.0
//! Events of a trace that are no requests: invalidations, joins and leaves.
//!
//! An invalidation removes matching entries from the caches, and answers then on their way back from the
//! agent are not kept either: hardware must discard an answer that crosses an invalidation. Requests not
//! looked up yet will find the new state.

use pagetide_trace::{Event, EventKind, PageSize};

use super::Machine;
use crate::flavour::{Flavour, TranslationAgent as _, VoidSpan};
use crate::observe::{Moment, Observer, Step};
use crate::request::{Answered, Page, widest_page};

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// Applies an event that is no request.
    #[cold]
    pub(super) fn apply(&mut self, now_ns: u64, event: &Event) {
        let domain = event.domain.0;
        let source = event.source.0;
        let span = match event.kind {
            EventKind::Translate => return,
            EventKind::Join | EventKind::Leave => {
                self.tell_host(event);
                return;
            }
            EventKind::PageOut => {
                self.page_out(now_ns, event);
                return;
            }
            EventKind::InvalidatePages => VoidSpan::Pages(Page::of(event, 0, PageSize::SIZE_4K)),
            EventKind::InvalidateDomain => VoidSpan::Domain(domain),
            EventKind::InvalidateAll => VoidSpan::All,
            EventKind::InvalidateSource => {
                let tallies = &self.tenants.tallies;
                self.context_cache
                    .invalidate(|tenant| tallies[tenant as usize].source == source);
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContextsOfDomain => {
                let tallies = &self.tenants.tallies;
                self.context_cache
                    .invalidate(|tenant| tallies[tenant as usize].domain == domain);
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContexts => {
                self.context_cache.invalidate(|_| true);
                VoidSpan::All
            }
        };
        self.tally.invalidations += 1;
        for cache in [&mut self.devtlb, &mut self.buffer].into_iter().flatten() {
            let (tags, count) = span.tags();
            cache.invalidate(&tags[..count], |tag| span.meets(tag, widest_page(tag)));
        }
        self.agent.invalidate(&span);
        for request in self.requests.all() {
            if request.answer == Answered::Yes && span.meets_page(&request.page) {
                request.answer = Answered::Void;
            }
        }
        let moment = Moment::of_none(now_ns);
        let around = Page::of(event, 0, PageSize::SIZE_4K);
        self.observer.step(moment, Step::Invalidate, &around);
    }

    /// Notifies the host, if there is one, that a tenant joins or leaves.
    fn tell_host(&mut self, event: &Event) {
        let Some(host) = &mut self.host else {
            return;
        };
        if event.kind == EventKind::Join {
            host.joined();
            return;
        }
        let sources = self.tenants.tallies.iter().map(|tally| tally.source);
        for (number, _) in (0..).zip(sources).filter(|(_, s)| *s == event.source.0) {
            host.left(number);
        }
    }
}
