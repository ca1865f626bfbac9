// SPDX-License-Identifier: Apache-2.0
//! The pipeline's side of I/O page faults ([`crate::faults`]): which requests stop, when they go on, and what
//! happens to their entries of the PTB meanwhile.

use pagetide_trace::{Event, PageSize};

use super::{DeviceSet as _, Machine};
use crate::config::{FaultDiscipline, PtbUnit};
use crate::faults::Stage;
use crate::flavour::{Flavour, StageQueue as _, TranslationAgent as _, VoidSpan};
use crate::observe::{Moment, Observer, Step};
use crate::request::{
    AgentNote, Answered, Attempt, DOMAINS_MAX, Origin, Page, Request, address_of, domain_of,
};

/// What a request may do at the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Passage {
    /// It goes on.
    Free,
    /// It goes on, and has been learnt from before.
    Again,
    /// It was stopped.
    Stopped,
}

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// Discipline of the faults that `tenant` may have.
    fn discipline_of(&self, tenant: u32) -> FaultDiscipline {
        match &self.faults {
            Some(faults) if faults.concerns(tenant) => faults.config.discipline,
            _ => FaultDiscipline::Pinned,
        }
    }

    /// True if the engine of device `at` stands still.
    #[inline(always)]
    pub(super) fn engine_stands(&self, at: usize) -> bool {
        F::HAS_FAULTS
            && self
                .faults
                .as_ref()
                .is_some_and(|faults| faults.devices[at].engine.is_some())
    }

    /// Decides whether a request at the device goes on: not behind a request that waits, and, where the device
    /// itself sees it, not without its page.
    #[inline(never)]
    pub(super) fn passage(&mut self, now_ns: u64, at: usize, slot: u32) -> Passage {
        let Request { page, attempt, .. } = *self.requests.get(slot);
        let discipline = self.discipline_of(page.tenant);
        let Some(faults) = self
            .faults
            .as_mut()
            .filter(|_| discipline != FaultDiscipline::Pinned)
        else {
            return Passage::Free;
        };
        let pauses = faults.pauses();
        let queue = faults.queue(page.tenant);
        if attempt != Attempt::First {
            queue.coming -= 1;
        }
        let stops = match attempt {
            Attempt::First => pauses && queue.is_paused(),
            Attempt::Behind => queue.faulting > 0,
            Attempt::Again => false,
        };
        if stops {
            match attempt {
                Attempt::Behind => queue.behind.push_front(slot),
                _ => queue.behind.push_back(slot),
            }
            faults.held_back();
            self.observer
                .step(Moment::of(now_ns, slot), Step::Held, &page);
            self.park(now_ns, at, slot);
            return Passage::Stopped;
        }
        let is_present = faults.memory.touch(&page, now_ns);
        self.void_gone(now_ns);
        if !is_present && discipline != FaultDiscipline::AtsPri {
            self.fault(now_ns, at, slot);
            return Passage::Stopped;
        }
        self.let_next_through(now_ns, at, page.tenant);
        if discipline == FaultDiscipline::AtsPri && attempt == Attempt::Again {
            Passage::Again
        } else {
            Passage::Free
        }
    }

    /// What a request that leaves for the agent has been told by the device.
    #[inline(always)]
    pub(super) fn allowed(&self, tenant: u32) -> Answered {
        if !F::HAS_FAULTS || self.faults.is_none() {
            return Answered::No;
        }
        match self.discipline_of(tenant) {
            FaultDiscipline::Vpri | FaultDiscipline::Touch => Answered::Allowed,
            FaultDiscipline::Pinned | FaultDiscipline::AtsPri => Answered::No,
        }
    }

    /// True if a walk has found that the page is absent.
    pub(super) fn walk_finds_absent(&self, request: &Request) -> bool {
        let Some(faults) = &self.faults else {
            return false;
        };
        let discipline = self.discipline_of(request.page.tenant);
        let asks = match request.origin {
            Origin::Demand => discipline == FaultDiscipline::AtsPri,
            Origin::Prefetch => discipline != FaultDiscipline::Pinned,
        };
        asks && request.answer == Answered::Yes && !faults.memory.is_present(request.page.tag())
    }

    /// The request's page is absent: it waits for it.
    pub(super) fn fault(&mut self, now_ns: u64, at: usize, slot: u32) {
        let request = self.requests.get_mut(slot);
        request.answer = Answered::No;
        request.at_agent = AgentNote::default();
        let (page, attempt) = (request.page, request.attempt);
        self.observer
            .step(Moment::of(now_ns, slot), Step::Fault, &page);
        let Some(faults) = &mut self.faults else {
            return;
        };
        if attempt == Attempt::Again {
            faults.memory.release(page.tag());
        }
        faults.ask(now_ns, slot, page.tenant, page.tag());
        if faults.config.discipline == FaultDiscipline::Touch {
            faults.devices[at].engine = Some(slot);
        } else {
            self.park(now_ns, at, slot);
        }
    }

    /// What happens to page requests until `now_ns`.
    #[inline(never)]
    pub(super) fn serve_faults(&mut self, now_ns: u64) {
        while let Some(faults) = &mut self.faults
            && let Some((tag, stage)) = faults.pop_due(now_ns)
        {
            match stage {
                Stage::Arrived => faults.arrived(now_ns, tag),
                Stage::Handled => {
                    faults.handled(now_ns, tag);
                    let page = Page {
                        iova: address_of(tag),
                        domain: domain_of(tag),
                        ..Page::default()
                    };
                    self.observer
                        .step(Moment::of_none(now_ns), Step::PageIn, &page);
                    self.void_gone(now_ns);
                }
                Stage::Answered => self.answered(now_ns, tag),
            }
        }
    }

    fn answered(&mut self, now_ns: u64, tag: u64) {
        let Some(faults) = &mut self.faults else {
            return;
        };
        let waiters = faults.answered(now_ns, tag);
        for slot in &waiters {
            let request = self.requests.get_mut(*slot);
            request.attempt = Attempt::Again;
            let queue = faults.queue(request.page.tenant);
            queue.faulting -= 1;
            queue.coming += 1;
            let device = &mut faults.devices[self.devices.of(request.page.source)];
            if device.engine.is_none() {
                device.resuming.push_back(*slot);
            }
        }
        // Engines go on first.
        for slot in &waiters {
            let at = self.devices.of(self.requests.get(*slot).page.source);
            if let Some(faults) = &mut self.faults
                && faults.devices[at]
                    .engine
                    .take_if(|waits| waits == slot)
                    .is_some()
            {
                self.at_device(now_ns, at, *slot);
            }
        }
        for at in 0..self.devices.count() {
            let is_concerned =
                |slot: &u32| self.devices.of(self.requests.get(*slot).page.source) == at;
            if !self.is_touch() && waiters.iter().any(is_concerned) {
                self.resume(now_ns, at);
            }
        }
    }

    fn is_touch(&self) -> bool {
        self.config.faults.discipline == FaultDiscipline::Touch
    }

    /// With a queue that pauses: the first request that waits behind goes on, if nothing before it waits.
    fn let_next_through(&mut self, now_ns: u64, at: usize, tenant: u32) {
        let Some(faults) = &mut self.faults else {
            return;
        };
        let queue = faults.queue(tenant);
        if queue.faulting > 0 || queue.coming > 0 {
            return;
        }
        let Some(slot) = queue.behind.pop_front() else {
            return;
        };
        queue.coming += 1;
        self.requests.get_mut(slot).attempt = Attempt::Behind;
        faults.devices[at].resuming.push_back(slot);
        self.resume(now_ns, at);
    }

    /// Parks a request: its entry of the PTB is free.
    fn park(&mut self, now_ns: u64, at: usize, slot: u32) {
        if let Some(faults) = &mut self.faults {
            faults.park(at);
        }
        let packet = self.requests.get(slot).packet;
        let pending = &mut self.devices.get_mut(at).pending;
        match self.config.ptb.unit {
            PtbUnit::Requests => *pending -= 1,
            PtbUnit::Packets => {
                let packet = self.packets.get_mut(packet);
                packet.active -= 1;
                packet.parked += 1;
                *pending -= u32::from(packet.active == 0);
            }
        }
        self.resume(now_ns, at);
    }

    /// Lets parked requests of device `at` that may go on have free entries of the PTB, and the link what is left.
    pub(super) fn resume(&mut self, now_ns: u64, at: usize) {
        while let Some(slot) = self
            .faults
            .as_ref()
            .and_then(|f| f.devices[at].resuming.front().copied())
        {
            let Request { page, packet, .. } = *self.requests.get(slot);
            let by_packets = self.config.ptb.unit == PtbUnit::Packets;
            let shares_entry = by_packets && self.packets.get(packet).active > 0;
            let device = self.devices.get_mut(at);
            if !shares_entry {
                if device.pending >= self.config.ptb.entries {
                    break;
                }
                device.pending += 1;
            }
            if by_packets {
                let packet = self.packets.get_mut(packet);
                packet.active += 1;
                packet.parked -= 1;
            }
            if let Some(faults) = &mut self.faults {
                faults.unpark(at);
            }
            self.observer
                .step(Moment::of(now_ns, slot), Step::Resume, &page);
            device.to_device.push(now_ns, slot);
        }
        self.settle_link(now_ns, at);
    }

    /// Opens or closes the link of device `at`, by whether there is room for a packet.
    fn settle_link(&mut self, now_ns: u64, at: usize) {
        if self.devices.get(at).trace_ended {
            return;
        }
        let has_room = self.has_room(at);
        let device = self.devices.get_mut(at);
        if !has_room {
            device.admits_ns = u64::MAX;
        } else if device.admits_ns == u64::MAX {
            device.skip_slots(now_ns);
        }
    }

    /// A page-out event of the trace.
    pub(super) fn page_out(&mut self, now_ns: u64, event: &Event) {
        let span = Page::of(event, 0, PageSize::SIZE_4K);
        let Some(faults) = &mut self.faults else {
            return;
        };
        let can_go = faults.config.discipline != FaultDiscipline::Pinned;
        if can_go && span.domain < DOMAINS_MAX && faults.memory.page_out(&span, now_ns) {
            self.void_page(now_ns, span);
        }
    }

    /// Voids translations of the pages that went.
    fn void_gone(&mut self, now_ns: u64) {
        while let Some(faults) = &mut self.faults
            && !faults.memory.gone.is_empty()
        {
            let page = faults.memory.gone.remove(0);
            self.void_page(now_ns, page);
        }
    }

    fn void_page(&mut self, now_ns: u64, page: Page) {
        let span = VoidSpan::Pages(page);
        self.void_in_devices(&span);
        self.agent.invalidate(&span);
        self.agent.host_unmaps(page);
        for request in self.requests.all() {
            let is_let = matches!(request.answer, Answered::Yes | Answered::Allowed);
            if is_let && span.meets_page(&request.page) {
                request.answer = Answered::Void;
            }
        }
        self.observer
            .step(Moment::of_none(now_ns), Step::PageOut, &page);
    }
}
