// SPDX-License-Identifier: Apache-2.0
//! Prefetch unit (III): who comes next, and what that tenant asked for last.
//!
//! The unit proper, on the device, predicts a source; the history reader behind
//! PCIe knows each tenant's last pages and asks for their translations.

use crate::config::PrefetchConfig;
use crate::flavour::SourcePredictor;
use crate::request::Page;

/// Predictor and histories.
#[derive(Debug)]
pub(crate) struct PrefetchUnit<P> {
    pub(crate) predictor: P,
    /// Pages that a history keeps.
    depth: usize,
    /// The last pages of every tenant, `depth` places each, oldest first.
    pages: Vec<Page>,
    /// Places in use, of each tenant.
    lengths: Vec<u32>,
}

impl<P: SourcePredictor> PrefetchUnit<P> {
    /// A unit that knows nothing.
    pub(crate) fn new(config: &PrefetchConfig) -> Self {
        Self {
            predictor: P::new(config),
            depth: config.pages_per_tenant as usize,
            pages: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// Writes `page` into its tenant's history. Pages asked for again are
    /// written again, as the history in memory is a plain log.
    #[inline]
    pub(crate) fn remember(&mut self, page: &Page) {
        let tenant = page.tenant as usize;
        if self.lengths.len() <= tenant {
            self.lengths.resize(tenant + 1, 0);
            self.pages
                .resize((tenant + 1) * self.depth, Page::default());
        }
        let history = &mut self.pages[tenant * self.depth..][..self.depth];
        let length = &mut self.lengths[tenant];
        if (*length as usize) < self.depth {
            history[*length as usize] = *page;
            *length += 1;
        } else {
            history.copy_within(1.., 0);
            history[self.depth - 1] = *page;
        }
    }

    /// The last pages of `tenant`, oldest first.
    #[inline]
    pub(crate) fn history(&self, tenant: u32) -> &[Page] {
        let tenant = tenant as usize;
        match self.lengths.get(tenant) {
            Some(length) => &self.pages[tenant * self.depth..][..*length as usize],
            None => &[],
        }
    }
}
