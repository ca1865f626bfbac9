// SPDX-License-Identifier: Apache-2.0
//! The short way of a chain that is done at once, such as a packet that is sent.
//!
//! ```text
//!   pop ─► walk ─► frame ─► lease every page ─► the kind acts ─► used ring, release
//!                  └── anything unusual: nothing was done, and the chain goes the long way (`chain`)
//! ```
//! Nearly all packets are in present memory and done within a fraction of a microsecond, of which the long way takes
//! more for handing a chain on from step to step than for the steps. Both lease, check, act and answer by the same
//! functions; what is absent, injected, broken or refused is dealt with by the long way alone.

use super::{
    answer::{Answer, Moved},
    device::Device,
    fair::{CHAIN_COST_BYTES, LOOK_COST_BYTES, PART_COST_BYTES},
    io::Io,
    pages::{Located, lease_all, locate},
    queue::EngineQueue,
    request::Sample,
};
use crate::{
    chain::Buffers,
    frame::Frame,
    kind::work::{Acted, Chain, Decided},
    memory::DeviceMemory,
    shared::StopReason,
    slo::course::RequestTimeline,
};
use std::time::Instant;

/// Whether a chain was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Short {
    /// It is done, and costs its tenant so much; its entry in the used ring is published with those of its batch.
    Served { cost_bytes: u64 },
    /// Nothing was done: it goes the long way.
    NotServed,
}

impl Io {
    /// Serves a chain that was taken from the ring now, if nothing about it is unusual.
    ///
    /// # Errors
    /// Why the device must stop.
    pub(super) fn serve_at_once(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        (head, course): (u16, &RequestTimeline),
    ) -> Result<Short, StopReason> {
        if device.shared.injector.may_be_due(self.reports.now_ns) {
            return Ok(Short::NotServed);
        }
        let mut buffers = std::mem::take(&mut self.scratch.buffers);
        let served = match locate(queue, memory, head, &mut buffers) {
            Ok(Located::Frame(frame)) => {
                self.serve_located(device, queue, memory, (&frame, &buffers), (head, course))
            }
            Ok(Located::TableAbsent(_) | Located::Refused { .. }) | Err(_) => Ok(Short::NotServed),
        };
        self.scratch.buffers = buffers;
        served
    }

    fn serve_located(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        (frame, buffers): (&Frame, &Buffers),
        (head, course): (u16, &RequestTimeline),
    ) -> Result<Short, StopReason> {
        let began = (self.scratch.sample() == Sample::Yes).then(Instant::now);
        let mut leases = self.scratch.leases();
        let all_there = lease_all(memory, frame, buffers, &mut leases);
        if let Some(began) = began {
            let counters = self.reports.counters(&device.shared);
            self.scratch.record_lookup(counters, began, 1);
        }
        let chain = Chain {
            queue: queue.key.queue,
            memory,
            frame,
            buffers,
        };
        let acted = match all_there {
            true => self.act_on_leased(device, queue, chain),
            false => None,
        };
        let served = match acted {
            Some(acted) => {
                let answer = Answer {
                    head,
                    at: frame.answer,
                    outcome: acted.outcome,
                    moved: Moved::from_guest(acted.from_guest_bytes),
                    course: *course,
                };
                let cost_bytes = cost_bytes(device, queue, buffers, acted);
                let told = self.answer(device, queue, memory, answer);
                told.map(|()| Short::Served { cost_bytes })
            }
            None => Ok(Short::NotServed),
        };
        leases.release(memory);
        self.scratch.keep_leases(leases);
        served
    }

    /// Does what a chain requests, if that needs no I/O.
    fn act_on_leased(
        &mut self,
        device: &mut Device,
        queue: &EngineQueue,
        chain: Chain<'_>,
    ) -> Option<Acted> {
        let decided = device.kind.decide(self.reports.now_ns, chain);
        // Descriptors and header have been read. Zeros in their place would request nothing.
        if queue.lost(chain.memory).is_some() {
            return None;
        }
        match decided {
            Decided::Act => Some(self.act(device, chain)),
            Decided::Answer(outcome) => Some(Acted {
                outcome,
                from_guest_bytes: 0,
            }),
            Decided::Io(_) => {
                debug_assert!(false, "a queue that completes in ring order has no I/O");
                None
            }
        }
    }
}

/// What it costs that a chain was done.
fn cost_bytes(device: &Device, queue: &EngineQueue, buffers: &Buffers, acted: Acted) -> u64 {
    let passage = match device.kind.enters_kernel(queue.key.queue) {
        true => CHAIN_COST_BYTES,
        false => LOOK_COST_BYTES,
    };
    passage + buffers.parts() * PART_COST_BYTES + u64::from(acted.from_guest_bytes)
}
