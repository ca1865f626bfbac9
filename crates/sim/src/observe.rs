// SPDX-License-Identifier: Apache-2.0
//! Observing a run step by step. A run without an observer pays nothing for it.

use crate::request::Page;

/// A step of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// It enters the device, whose context cache knows its domain.
    Issue,
    /// It enters the device, which has to read its context entry first.
    ContextMiss,
    /// The DevTLB has it.
    DevTlbHit,
    /// The prefetch buffer has it, the DevTLB does not.
    BufferHit,
    /// The device does not have it: it goes over PCIe.
    Miss,
    /// The prefetch unit sends it.
    Prefetch,
    /// The translation agent has to read its entry of the PASID table first.
    PasidMiss,
    /// The translation agent has it.
    AgentHit,
    /// The translation agent walks for it.
    Walk,
    /// A prefetched translation arrives in the buffer.
    BufferFill,
    /// A demanded translation arrives: the request ends.
    End,
    /// Cached data for the address, the domain or all becomes void.
    Invalidate,
    /// Its page is absent: it waits.
    Fault,
    /// Its source's queue waits for a page: it waits behind.
    Held,
    /// It waits no longer, and has an entry of the PTB again.
    Resume,
    /// The host has brought a page in.
    PageIn,
    /// The host has taken a page away: its translations are void.
    PageOut,
}

/// One step of one request, as an observer receives it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct StepRecord {
    /// Time.
    pub time_ns: u64,
    /// The step.
    pub step: Step,
    /// The request: a number that is unique while it is under way, and is reused later; `None` for an
    /// invalidation and for a page that comes or goes.
    pub flight: Option<u32>,
    /// How long its packet was refused before it entered, in nanoseconds; 0 in
    /// every other step.
    pub waited_ns: u64,
    /// Source id.
    pub source: u32,
    /// Domain.
    pub domain: u32,
    /// Requested address.
    pub iova: u64,
}

/// An observer's information about a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    pub(crate) flight: Option<u32>,
    pub(crate) waited_ns: u64,
}

impl Moment {
    /// A step of no request.
    pub(crate) const fn of_none(now_ns: u64) -> Self {
        Self {
            now_ns,
            flight: None,
            waited_ns: 0,
        }
    }

    /// A step of the request in `slot`.
    #[inline(always)]
    pub(crate) const fn of(now_ns: u64, slot: u32) -> Self {
        Self {
            now_ns,
            flight: Some(slot),
            waited_ns: 0,
        }
    }
}

/// An observer.
pub(crate) trait Observer {
    /// `page`'s request takes `step`.
    fn step(&mut self, moment: Moment, step: Step, page: &Page);
}

/// No observer.
#[derive(Debug)]
pub(crate) struct Nobody;

impl Observer for Nobody {
    #[inline(always)]
    fn step(&mut self, _moment: Moment, _step: Step, _page: &Page) {}
}

/// A function that receives every step.
pub(crate) struct CallbackObserver<'a>(pub(crate) &'a mut dyn FnMut(StepRecord));

impl Observer for CallbackObserver<'_> {
    fn step(&mut self, moment: Moment, step: Step, page: &Page) {
        (self.0)(StepRecord {
            time_ns: moment.now_ns,
            step,
            flight: moment.flight,
            waited_ns: moment.waited_ns,
            source: page.source,
            domain: page.domain,
            iova: page.iova,
        });
    }
}
