// SPDX-License-Identifier: Apache-2.0
//! The prefetch unit's part in the pipeline: what it learns from a request, and what it sends.

use super::{DeviceSet as _, Machine};
use crate::flavour::{Flavour, StageQueue as _};
use crate::observe::{Moment, Observer, Step};
use crate::policy::prefetch::{AnyPrefetcher, Prefetcher as _};
use crate::request::{AgentNote, Answered, Attempt, NEVER, Origin, Page, Request};

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// The prefetch unit learns from a request and sends its guesses.
    #[inline(always)]
    pub(super) fn guess(&mut self, now_ns: u64, at: usize, page: &Page, row: u32, step: Step) {
        let device = self.devices.get_mut(at);
        let Some(unit) = &mut device.prefetch else {
            return;
        };
        if let Some(host) = &mut device.host
            && let Some(length) = host.requested(now_ns, row)
        {
            unit.set_length(length);
            self.tally.prefetch.register_writes += 1;
        }
        // The paper's unit does here what its `looked_up` does, without a list of the pages between.
        let AnyPrefetcher::BuiltIn(unit) = unit else {
            self.guess_own(now_ns, page, step);
            return;
        };
        let Some(history) = unit.learn(page, row, step) else {
            return;
        };
        for nth in 0..history.len {
            if let Some(AnyPrefetcher::BuiltIn(unit)) = &self.devices.get(at).prefetch {
                let page = *unit.page(&history, nth);
                self.send_guess(now_ns, page);
            }
        }
    }

    /// The same with a unit or a predictor of the caller's.
    #[cold]
    fn guess_own(&mut self, now_ns: u64, page: &Page, step: Step) {
        // There is one device, for which the caller has a policy.
        let Some(unit) = &mut self.devices.get_mut(0).prefetch else {
            return;
        };
        unit.looked_up(page, step, &mut self.guesses);
        self.sift_guesses();
        let mut guesses = std::mem::take(&mut self.guesses);
        for page in guesses.drain(..) {
            self.send_guess(now_ns, page);
        }
        self.guesses = guesses;
    }

    #[inline(always)]
    fn send_guess(&mut self, now_ns: u64, page: Page) {
        let latency = &self.config.latency;
        let reaches_agent_ns =
            now_ns + latency.pcie_ns + latency.history_accesses * latency.dram_ns;
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
            at_agent: AgentNote::default(),
        };
        self.to_agent.push(reaches_agent_ns, slot);
        self.tally.prefetch.sent += 1;
    }
}
