// SPDX-License-Identifier: Apache-2.0
//! The prefetch unit's part in the pipeline: what it learns from a request, and what it sends.

use super::Machine;
use crate::flavour::{Flavour, StageQueue as _};
use crate::observe::{Moment, Observer, Step};
use crate::policy::prefetch::Prefetcher as _;
use crate::request::{Answered, Attempt, NEVER, Origin, Page, Request};

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// The prefetch unit learns from a request and sends its guesses.
    #[inline(always)]
    pub(super) fn guess(&mut self, now_ns: u64, page: &Page, step: Step) {
        let Some(unit) = &mut self.prefetch else {
            return;
        };
        if let Some(host) = &mut self.host
            && let Some(length) = host.requested(now_ns, page.tenant)
        {
            unit.set_length(length);
            self.tally.prefetch.register_writes += 1;
        }
        unit.looked_up(page, step, &mut self.guesses);
        if self.guesses.is_empty() {
            return;
        }
        if self.has_own {
            self.sift_guesses();
        }
        let latency = &self.config.latency;
        let reaches_agent_ns =
            now_ns + latency.pcie_ns + latency.history_accesses * latency.dram_ns;
        for page in self.guesses.drain(..) {
            let slot = self.requests.take();
            self.observer
                .step(Moment::of(now_ns, slot), Step::Prefetch, &page);
            *self.requests.get_mut(slot) = Request {
                page,
                next_use: NEVER,
                issued_ns: now_ns,
                packet: u32::MAX,
                origin: Origin::Prefetch,
                answer: Answered::No,
                attempt: Attempt::First,
            };
            self.to_agent.push(reaches_agent_ns, slot);
            self.tally.prefetch.sent += 1;
        }
    }
}
