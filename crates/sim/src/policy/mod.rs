// SPDX-License-Identifier: Apache-2.0
//! Policies of one's own: what a cache gives up ([`ReplacementPolicy`]), which source follows
//! ([`SourcePredictor`]), and what is prefetched ([`Prefetcher`]).
//!
//! The paper's policies are behind the same interfaces. The pipeline calls those without indirection, and
//! somebody's own through a box:
//!
//! ```
//! use pagetide_sim::policy::{Entries, OwnPolicies, ReplacementPolicy};
//!
//! /// First in, first out.
//! #[derive(Debug, Default)]
//! struct Fifo(u64);
//!
//! impl ReplacementPolicy for Fifo {
//!     fn used(&mut self, _: &mut Entries<'_>, _: usize, _: u64) {}
//!     fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, _: u64) {
//!         self.0 += 1;
//!         entries.set_mark(at, self.0);
//!     }
//!     fn removed(&mut self, _: &mut Entries<'_>, _: usize) {}
//!     fn moved(&mut self, _: &mut Entries<'_>, _: usize, _: usize) {}
//!     fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
//!         let all = entries.of_set(set);
//!         all.min_by_key(|at| entries.mark(*at)).unwrap_or(0)
//!     }
//! }
//!
//! let mut own = OwnPolicies::default();
//! own.devtlb = Some(Box::new(Fifo::default()));
//! // pagetide_sim::run_own(&config, trace, own)
//! # drop(own);
//! ```

pub(crate) mod prefetch;
pub(crate) mod replacement;

pub use crate::observe::Step;
pub use crate::request::Page;
pub use prefetch::{Prefetcher, SourcePredictor};
pub use replacement::{Entries, ReplacementPolicy};

/// Policies in the place of the configuration's; `None`: the configuration's.
#[derive(Debug, Default)]
pub struct OwnPolicies {
    /// Of the device's TLB.
    pub devtlb: Option<Box<dyn ReplacementPolicy>>,
    /// Of the chipset's TLB.
    pub iotlb: Option<Box<dyn ReplacementPolicy>>,
    /// Of the page-walk caches, by level.
    pub levels: [Option<Box<dyn ReplacementPolicy>>; 4],
    /// Which source follows which, for the paper's prefetch unit.
    pub predictor: Option<Box<dyn SourcePredictor>>,
    /// The whole prefetch unit, in the place of predictor and history.
    pub prefetcher: Option<Box<dyn Prefetcher>>,
}

impl OwnPolicies {
    /// True if all are the configuration's.
    pub(crate) fn is_empty(&self) -> bool {
        self.devtlb.is_none()
            && self.iotlb.is_none()
            && self.levels.iter().all(Option::is_none)
            && self.predictor.is_none()
            && self.prefetcher.is_none()
    }
}
