// SPDX-License-Identifier: Apache-2.0
//! Prefetch unit (III): predicts the next source, and fetches that tenant's last pages.
//!
//! The unit proper, on the device, predicts a source; the history reader behind PCIe has each tenant's last
//! pages and requests their translations.

use crate::config::{PrefetchConfig, PrefetchTrigger};
use crate::observe::Step;
use crate::policy::prefetch::{BuiltInPredictor, Prefetcher, SourcePredictor};
use crate::request::Page;

/// Predictor and histories.
#[derive(Debug)]
pub(crate) struct PrefetchUnit<P> {
    predictor: P,
    trigger: PrefetchTrigger,
    /// Pages that a history keeps.
    depth: u32,
    /// The last pages of every tenant, `depth` places each, a ring.
    pages: Vec<Page>,
    /// The state of each tenant's ring.
    rings: Vec<Ring>,
    /// A tenant that was predicted and does not exist.
    unknown: Option<u32>,
}

/// Filling of a ring.
#[derive(Clone, Copy, Debug, Default)]
struct Ring {
    /// Place of the next page, which is that of the oldest once all are in use.
    next: u32,
    /// Places in use.
    len: u32,
}

impl<P: BuiltInPredictor> PrefetchUnit<P> {
    /// A unit without any history.
    pub(crate) fn new(config: &PrefetchConfig) -> Self {
        Self::with(config, P::new(config))
    }
}

impl<P: SourcePredictor> Prefetcher for PrefetchUnit<P> {
    #[inline(always)]
    fn looked_up(&mut self, page: &Page, step: Step, guesses: &mut Vec<Page>) {
        if let Some(history) = self.learn(page, page.tenant, step) {
            guesses.extend((0..history.len).map(|nth| *self.page(&history, nth)));
        }
    }

    fn set_length(&mut self, length: u32) {
        self.predictor.set_length(length);
    }

    fn failure(&mut self) -> Option<String> {
        let unknown = self
            .unknown
            .map(|tenant| format!("it names tenant {tenant}, which has made no request"));
        unknown.or_else(|| self.predictor.failure())
    }
}

impl<P: SourcePredictor> PrefetchUnit<P> {
    /// A unit without any history, and its predictor.
    pub(crate) fn with(config: &PrefetchConfig, predictor: P) -> Self {
        Self {
            predictor,
            trigger: config.trigger,
            unknown: None,
            depth: config.pages_per_tenant,
            pages: Vec::new(),
            rings: Vec::new(),
        }
    }

    /// Learns from a request of the tenant in `row`; returns the history of the tenant to prefetch for, if that is
    /// to be done.
    #[inline(always)]
    pub(crate) fn learn(&mut self, page: &Page, row: u32, step: Step) -> Option<History> {
        self.remember(page, row);
        let next = self.predictor.observe(row)?;
        self.trigger.fires(step).then(|| self.history(next))
    }

    /// Appends `page` to its tenant's history. Repeated pages are appended again, as the history in memory
    /// is a plain log.
    #[inline(always)]
    fn remember(&mut self, page: &Page, row: u32) {
        let tenant = row as usize;
        if self.rings.len() <= tenant {
            self.add(tenant);
        }
        let ring = &mut self.rings[tenant];
        self.pages[tenant * self.depth as usize + ring.next as usize] = *page;
        ring.len = (ring.len + 1).min(self.depth);
        ring.next += 1;
        if ring.next == self.depth {
            ring.next = 0;
        }
    }

    #[cold]
    fn add(&mut self, tenant: usize) {
        self.rings.resize(tenant + 1, Ring::default());
        let places = (tenant + 1) * self.depth as usize;
        self.pages.resize(places, Page::default());
    }

    /// Position of the last pages of `tenant`.
    #[inline(always)]
    fn history(&mut self, tenant: u32) -> History {
        let ring = self.rings.get(tenant as usize).copied();
        if ring.is_none() {
            self.unknown = Some(tenant);
        }
        let ring = ring.unwrap_or_default();
        History {
            first: tenant as usize * self.depth as usize,
            oldest: if ring.len < self.depth { 0 } else { ring.next },
            len: ring.len,
        }
    }

    /// The page number `nth` of a history, from the oldest on.
    #[inline(always)]
    pub(crate) fn page(&self, history: &History, nth: u32) -> &Page {
        let mut place = history.oldest + nth;
        if place >= self.depth {
            place -= self.depth;
        }
        &self.pages[history.first + place as usize]
    }
}

/// A tenant's history among all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct History {
    first: usize,
    oldest: u32,
    /// Pages in it.
    pub(crate) len: u32,
}
