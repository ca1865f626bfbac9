// SPDX-License-Identifier: Apache-2.0
//! Events of a trace that are no requests: invalidations, joins and leaves.
//!
//! An invalidation removes matching entries from the caches, and answers then on their way back from the
//! agent are not kept either: hardware must discard an answer that crosses an invalidation. Requests not
//! looked up yet will find the new state.

use pagetide_trace::{Event, EventKind, PageSize};

use super::{DeviceSet as _, Machine};
use crate::flavour::{Flavour, TranslationAgent as _, VoidSpan};
use crate::observe::{Moment, Observer, Step};
use crate::request::{Answered, Page, widest_page};
use crate::tenants::Tally;

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
                self.void_contexts(|tally| tally.source == source);
                self.void_spaces(|of, _| of == u64::from(source));
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContextsOfDomain => {
                self.void_contexts(|tally| tally.domain == domain);
                self.void_spaces(|_, of| of == domain);
                VoidSpan::Domain(domain)
            }
            EventKind::InvalidateContexts => {
                self.void_contexts(|_| true);
                self.void_spaces(|_, _| true);
                VoidSpan::All
            }
        };
        self.tally.invalidations += 1;
        self.void_in_devices(&span);
        self.agent.invalidate(&span);
        // Most are about something else.
        for request in self.requests.all() {
            if span.meets_page(&request.page) && request.answer == Answered::Yes {
                request.answer = Answered::Void;
            }
        }
        let moment = Moment::of_none(now_ns);
        let around = Page::of(event, 0, PageSize::SIZE_4K);
        self.observer.step(moment, Step::Invalidate, &around);
    }

    /// Drops what `span` meets from the caches of every device.
    pub(super) fn void_in_devices(&mut self, span: &VoidSpan) {
        for at in 0..self.devices.count() {
            let device = self.devices.get_mut(at);
            for cache in [&mut device.devtlb, &mut device.buffer]
                .into_iter()
                .flatten()
            {
                let (tags, count) = span.tags();
                cache.invalidate(&tags[..count], |tag| span.meets(tag, widest_page(tag)));
            }
        }
    }

    /// Drops the context entries of the tenants for which `is_void` holds.
    fn void_contexts(&mut self, is_void: impl Fn(&Tally) -> bool) {
        let tallies = &self.tenants.tallies;
        for at in 0..self.devices.count() {
            let device = self.devices.get_mut(at);
            let numbers = &device.tenants;
            let number = |row: u32| match F::Devices::MANY {
                true => numbers[row as usize],
                false => row,
            };
            let cache = &mut device.context_cache;
            cache.invalidate(|row| is_void(&tallies[number(row) as usize]));
        }
    }

    /// Drops the PASID-table entries for whose source and domain `is_void` holds.
    fn void_spaces(&mut self, is_void: impl Fn(u64, u32) -> bool) {
        if let Some(pasids) = &mut self.pasids {
            pasids.invalidate(is_void);
        }
    }

    /// Notifies the host, if there is one, that a tenant joins or leaves.
    fn tell_host(&mut self, event: &Event) {
        let at = self.devices.of(event.source.0);
        let device = self.devices.get_mut(at);
        let Some(host) = &mut device.host else {
            return;
        };
        if event.kind == EventKind::Join {
            host.joined();
            return;
        }
        let sources = self.tenants.tallies.iter().map(|tally| tally.source);
        for (number, _) in (0..).zip(sources).filter(|(_, s)| *s == event.source.0) {
            host.left(match F::Devices::MANY {
                true => self.tenants.row(number),
                false => number,
            });
        }
    }
}
