// SPDX-License-Identifier: Apache-2.0
//! How packets enter: at a slot of the link, if the PTB has room; and requests the agent, if it knows their address
//! space.

use pagetide_trace::{Event, EventKind, IOVA_BITS, SourceId};

use super::device::{Device, DeviceSet};
use super::input::Supply;
use super::{Machine, Packet, UNKNOWN_PAGE};
use crate::config::{Config, PtbUnit};
use crate::error::SimError;
use crate::flavour::{Flavour, StageQueue as _};
use crate::observe::{Moment, Observer, Step};
use crate::paper::TABLES;
use crate::request::{AgentNote, Answered, Attempt, DOMAINS_MAX, NEVER, Origin, Page, Request};

/// The end of the addresses that requests may have.
pub(super) fn iova_end(config: &Config) -> u64 {
    match config.nested_tlb.entries {
        0 => 1 << IOVA_BITS,
        _ => TABLES,
    }
}

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// True if a request at the agent has to wait for its entry of the PASID table.
    #[inline(never)]
    pub(super) fn waits_for_pasid(&mut self, now_ns: u64, slot: u32) -> bool {
        let Some(pasids) = &mut self.pasids else {
            return false;
        };
        let request = self.requests.get_mut(slot);
        if request.at_agent.is_identified() {
            pasids.fill(&request.page);
            return false;
        }
        request.at_agent.identify();
        if pasids.look_up(&request.page) {
            return false;
        }
        self.observer
            .step(Moment::of(now_ns, slot), Step::PasidMiss, &request.page);
        self.to_agent.push(now_ns + pasids.read_ns, slot);
        true
    }

    /// When the next packet is admitted.
    #[inline(always)]
    pub(super) fn admits_ns(&self) -> u64 {
        let devices = (0..self.devices.count()).map(|at| self.devices.get(at).admits_ns);
        devices.min().unwrap_or(u64::MAX)
    }

    /// Admits what may be admitted now; false if the trace has ended for every device.
    #[inline(always)]
    pub(super) fn admit(&mut self, now_ns: u64) -> Result<bool, SimError> {
        let mut goes_on = false;
        for at in 0..self.devices.count() {
            if self.devices.get(at).admits_ns == now_ns {
                let is_whole = self.admit_packet(now_ns, at)?;
                self.devices.get_mut(at).trace_ended = !is_whole;
            }
            goes_on |= !self.devices.get(at).trace_ended;
        }
        Ok(goes_on)
    }

    /// True if device `at` takes a packet.
    #[inline(always)]
    pub(super) fn has_room(&self, at: usize) -> bool {
        let parking = !F::HAS_FAULTS || self.faults.as_ref().is_none_or(|f| f.has_room(at));
        parking && self.devices.get(at).pending < self.config.ptb.entries
    }

    /// Admits the next packet for device `at`; false if there is none left. An incomplete last packet is admitted
    /// all the same.
    #[inline]
    fn admit_packet(&mut self, now_ns: u64, at: usize) -> Result<bool, SimError> {
        self.requests.check()?;
        if self.has_own {
            self.check_own()?;
        }
        let device = self.devices.get_mut(at);
        device.link.take();
        let tried_ns = std::mem::replace(&mut device.tried_ns, device.link.next_ns());
        if F::Devices::MANY && self.is_idle(now_ns, at)? {
            return Ok(true);
        }
        let waited_ns = now_ns - tried_ns;
        let mut first_tenant = 0;
        let by_packets = self.config.ptb.unit == PtbUnit::Packets;
        let mut packet = u32::MAX;
        let mut is_whole = true;
        for nth in 0..self.config.link.requests_per_packet {
            if !self.goes_to_translation(now_ns, at)? {
                is_whole = false;
                break;
            }
            if by_packets {
                if nth == 0 {
                    packet = self.packets.take();
                    *self.packets.get_mut(packet) = Packet::default();
                    self.devices.get_mut(at).pending += 1;
                }
                self.packets.get_mut(packet).active += 1;
            } else {
                self.devices.get_mut(at).pending += 1;
            }
            let tenant = self.issue(now_ns, at, waited_ns, packet)?;
            first_tenant = if nth == 0 { tenant } else { first_tenant };
        }
        if is_whole {
            self.tenants.tally(first_tenant).packets += 1;
        }
        let admits = is_whole && self.has_room(at);
        let device = self.devices.get_mut(at);
        device.admits_ns = if admits {
            device.link.next_ns()
        } else {
            u64::MAX
        };
        Ok(is_whole)
    }

    /// True if device `at` has no packet yet, because others have to catch up in the trace first: its slot is
    /// empty. What is before its next request takes effect, so that a device without tenants keeps nothing.
    fn is_idle(&mut self, now_ns: u64, at: usize) -> Result<bool, SimError> {
        let per_packet = self.config.link.requests_per_packet.into();
        let most = self.config.devices.ahead_packets.into();
        let devices = &self.devices;
        let device_of = |source: SourceId| devices.of(source.0);
        let supply = self.input.supply(at, per_packet, most, device_of)?;
        let device: &mut Device<F> = self.devices.get_mut(at);
        if supply == Supply::Ready {
            return Ok(false);
        }
        device.idle_slots += 1;
        device.admits_ns = device.link.next_ns();
        self.goes_to_translation(now_ns, at)?;
        Ok(true)
    }

    /// Advances to the next translation request of device `at`, if there is one; the events before it take effect.
    #[inline(always)]
    fn goes_to_translation(&mut self, now_ns: u64, at: usize) -> Result<bool, SimError> {
        loop {
            let event = if F::Devices::MANY {
                self.input.first_of(at).map(|(_, event)| event)
            } else {
                self.input.peek()?
            };
            let Some(event) = event else {
                return Ok(false);
            };
            if event.kind == EventKind::Translate {
                return Ok(true);
            }
            let event = *event;
            if F::Devices::MANY {
                self.input.take_of(at);
            } else {
                self.input.at += 1;
            }
            self.apply(now_ns, &event);
        }
    }

    /// Issues the translation request that is the next one of device `at`.
    #[inline(always)]
    fn issue(
        &mut self,
        now_ns: u64,
        at: usize,
        waited_ns: u64,
        packet: u32,
    ) -> Result<u32, SimError> {
        let many;
        let (number, event) = if F::Devices::MANY {
            many = self.input.take_of(at);
            (many.0, &many.1)
        } else {
            self.input.at += 1;
            (self.tally.issued, &self.input.batch[self.input.at - 1])
        };
        let (source, domain) = (event.source.0, event.domain.0);
        if domain >= DOMAINS_MAX || event.iova.0 >= self.iova_end {
            return Err(too_large(number, event));
        }
        let tenant = self.tenants.number(source);
        let tally = self.tenants.tally(tenant);
        tally.domain = domain;
        tally.waited_ns += waited_ns;
        let page = Page::of(event, tenant, UNKNOWN_PAGE);
        if F::Devices::MANY {
            self.seat(at, tenant);
        }
        let slot = self.requests.take();
        *self.requests.get_mut(slot) = Request {
            page,
            next_use: match self.input.next_uses {
                Some(next_uses) => next_uses.after(number),
                None => NEVER,
            },
            issued_ns: now_ns,
            packet,
            origin: Origin::Demand,
            answer: Answered::No,
            attempt: Attempt::First,
            at_agent: AgentNote::default(),
        };
        if let Some(faults) = self.faults.as_mut().filter(|_| F::HAS_FAULTS) {
            faults.issued(slot, waited_ns);
        }
        self.tally.issued += 1;
        let row = self.row(tenant);
        let latency = &self.config.latency;
        let device = self.devices.get_mut(at);
        let (step, ready_ns) = if device.context_cache.look_up(row) {
            (Step::Issue, latency.context_hit_ns)
        } else {
            let read_ns = latency.context_accesses * latency.dram_ns;
            (Step::ContextMiss, 2 * latency.pcie_ns + read_ns)
        };
        let moment = Moment {
            waited_ns,
            ..Moment::of(now_ns, slot)
        };
        self.observer.step(moment, step, &page);
        device.to_device.push(now_ns + ready_ns, slot);
        Ok(tenant)
    }

    /// Gives a tenant that is new a row in the tables of device `at`.
    fn seat(&mut self, at: usize, tenant: u32) {
        let of_device = &mut self.devices.get_mut(at).tenants;
        #[expect(clippy::cast_possible_truncation, reason = "as many as tenants")]
        if self.tenants.add_row(tenant, of_device.len() as u32) {
            of_device.push(tenant);
        }
    }
}

/// The error for a domain or an address too large for tags.
#[cold]
fn too_large(request: u64, event: &Event) -> SimError {
    let (domain, iova) = (event.domain.0, event.iova.0);
    let reason = if domain >= DOMAINS_MAX {
        format!("its domain is {domain}; the model supports domains below {DOMAINS_MAX}")
    } else {
        format!("its address is {iova:#x}; with a nested TLB addresses are below {TABLES:#x}")
    };
    SimError::Request { request, reason }
}
