// SPDX-License-Identifier: Apache-2.0
//! What a device prefetches: the interfaces, and the choice between the paper's unit and somebody's own.

use super::{Page, Step};
use crate::config::PrefetchConfig;
use crate::prefetch::PrefetchUnit;

/// Learns which source follows which.
pub trait SourcePredictor: std::fmt::Debug {
    /// Records that `tenant` issues a request, and returns the tenant to prefetch for, if there is one. Tenants
    /// are numbered in the order of their first requests; one that has made none yet ends the run with an
    /// error.
    fn observe(&mut self, tenant: u32) -> Option<u32>;

    /// Writes the history-length register.
    fn set_length(&mut self, _length: u32) {}

    /// Why the run must end, if it must.
    fn failure(&mut self) -> Option<String> {
        None
    }
}

/// A predictor of the paper.
pub(crate) trait BuiltInPredictor: SourcePredictor {
    /// A predictor without any history.
    fn new(config: &PrefetchConfig) -> Self;
}

impl SourcePredictor for Box<dyn SourcePredictor> {
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        (**self).observe(tenant)
    }

    fn set_length(&mut self, length: u32) {
        (**self).set_length(length);
    }

    fn failure(&mut self) -> Option<String> {
        (**self).failure()
    }
}

/// Decides what is prefetched, and when.
pub trait Prefetcher: std::fmt::Debug {
    /// The device has looked a request for `page` up; `step` is [`Step::DevTlbHit`], [`Step::BufferHit`] or
    /// [`Step::Miss`]. Appends the pages to be prefetched to `guesses`; a page that no request can be for ends
    /// the run with an error.
    fn looked_up(&mut self, page: &Page, step: Step, guesses: &mut Vec<Page>);

    /// Writes the history-length register.
    fn set_length(&mut self, _length: u32) {}

    /// Why the run must end, if it must.
    fn failure(&mut self) -> Option<String> {
        None
    }
}

/// Any prefetch unit: the paper's, called without indirection, or with somebody's own predictor, or one's own.
#[derive(Debug)]
pub(crate) enum AnyPrefetcher<P> {
    BuiltIn(PrefetchUnit<P>),
    OwnPredictor(PrefetchUnit<Box<dyn SourcePredictor>>),
    Own(Box<dyn Prefetcher>),
}

impl<P: SourcePredictor> Prefetcher for AnyPrefetcher<P> {
    #[inline(always)]
    fn looked_up(&mut self, page: &Page, step: Step, guesses: &mut Vec<Page>) {
        match self {
            Self::BuiltIn(unit) => unit.looked_up(page, step, guesses),
            Self::OwnPredictor(unit) => unit.looked_up(page, step, guesses),
            Self::Own(own) => own.looked_up(page, step, guesses),
        }
    }

    fn set_length(&mut self, length: u32) {
        match self {
            Self::BuiltIn(unit) => unit.set_length(length),
            Self::OwnPredictor(unit) => unit.set_length(length),
            Self::Own(own) => own.set_length(length),
        }
    }

    fn failure(&mut self) -> Option<String> {
        match self {
            Self::BuiltIn(unit) => unit.failure(),
            Self::OwnPredictor(unit) => unit.failure(),
            Self::Own(own) => own.failure(),
        }
    }
}
