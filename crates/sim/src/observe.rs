// SPDX-License-Identifier: Apache-2.0
//! Watching a run step by step. A run that nobody watches pays nothing for it.

use crate::request::Page;

/// What happens to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// It enters the device.
    Issue,
    /// The DevTLB has it.
    DevTlbHit,
    /// The prefetch buffer has it, the DevTLB does not.
    BufferHit,
    /// The device does not have it: it goes over PCIe.
    Miss,
    /// The prefetch unit sends it.
    Prefetch,
    /// The translation agent has it.
    AgentHit,
    /// The translation agent walks for it.
    Walk,
    /// A prefetched translation arrives in the buffer.
    BufferFill,
    /// A demanded translation arrives: the request ends.
    End,
}

/// One step of one request, as told to whoever watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct StepRecord {
    /// When.
    pub time_ns: u64,
    /// What.
    pub step: Step,
    /// Source id.
    pub source: u32,
    /// Domain.
    pub domain: u32,
    /// Address asked for.
    pub iova: u64,
}

/// Somebody who watches.
pub(crate) trait Observer {
    /// `page`'s request takes `step`.
    fn step(&mut self, now_ns: u64, step: Step, page: &Page);
}

/// Nobody.
#[derive(Debug)]
pub(crate) struct Nobody;

impl Observer for Nobody {
    #[inline]
    fn step(&mut self, _now_ns: u64, _step: Step, _page: &Page) {}
}

/// A function that is told every step.
pub(crate) struct Told<'a>(pub(crate) &'a mut dyn FnMut(StepRecord));

impl Observer for Told<'_> {
    fn step(&mut self, now_ns: u64, step: Step, page: &Page) {
        (self.0)(StepRecord {
            time_ns: now_ns,
            step,
            source: page.source,
            domain: page.domain,
            iova: page.iova,
        });
    }
}
