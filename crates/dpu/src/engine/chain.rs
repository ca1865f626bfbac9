// SPDX-License-Identifier: Apache-2.0
//! A chain from the avail ring to the kernel, or to the parked chains.
//!
//! ```text
//!   pop ─► walk ─► frame ─► lease every page, all or none ─► the kind decides ─► I/O, act, answer
//!            │ │                    │
//!            │ └── table absent ────┴── some absent: release all, park, page requests
//!            └── part outside memory: answered with an error (RAM was unplugged, or the guest lies)
//! ```
//! A resumed chain starts again at *walk*. The guest may have changed it meanwhile; nothing from
//! the first walk is trusted later.

use super::{
    answer::{Answer, Moved},
    begin::Ready,
    device::Device,
    fair::FAULT_COST_BYTES,
    io::Io,
    land::MayLand,
    pages::{Located, Refused, absent_of, all_of, lease_all, locate, wanted_of},
    queue::EngineQueue,
    request::{Origin, Sample, TakenChain},
};
use crate::{
    chain::{AnswerPlace, Buffers},
    kind::work::{Chain, Outcome},
    memory::DeviceMemory,
    page_demand::PageDemand,
    parked::{Ended, ParkedChain, Purpose, Waiter},
    shared::{StopReason, add},
};
use pagetide_addr::Access;
use std::{io, rc::Rc, time::Instant};

impl Io {
    /// Serves one chain as far as possible now.
    pub fn serve(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        chain: TakenChain,
    ) -> io::Result<()> {
        let Some(memory) = device.memory.clone() else {
            return Ok(());
        };
        let served = match chain.origin {
            Origin::Resumed {
                purpose: Purpose::BadStatus,
                ended: Ended::Lost,
                ..
            } => Err(StopReason::ContentLost {
                queue: queue.key.queue,
            }),
            Origin::Resumed {
                ended: Ended::Lost | Ended::TimedOut,
                ..
            }
            | Origin::Resumed {
                purpose: Purpose::BadStatus,
                ..
            } => self.fail_chain(device, queue, &memory, chain),
            _ => match self.prepare(device, queue, &memory, chain) {
                Ok(Tried::Ready(ready)) => return self.begin(device, queue, &memory, ready),
                Ok(Tried::Parked) => Ok(()),
                Ok(Tried::Refused(why)) => {
                    let outside = &self.reports.counters(&device.shared).outside;
                    add(outside, u64::from(why == Refused::Outside));
                    self.fail_chain(device, queue, &memory, chain)
                }
                Err(reason) => Err(reason),
            },
        };
        if let Err(reason) = served {
            add(&self.reports.counters(&device.shared).malformed, 1);
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    /// Finds the chain's buffers and leases them all, or parks it.
    fn prepare(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        mut chain: TakenChain,
    ) -> Result<Tried, StopReason> {
        let mut buffers = std::mem::take(&mut self.scratch.buffers);
        let prepared = self.prepare_with(device, queue, memory, &mut chain, &mut buffers);
        self.scratch.buffers = buffers;
        match prepared? {
            Prepared::Ready(ready) => Ok(Tried::Ready(ready)),
            Prepared::Absent(wanted) => {
                let purpose = Purpose::Dma;
                self.park(device, queue, memory, chain, Parking { wanted, purpose });
                Ok(Tried::Parked)
            }
            Prepared::Refused(why) => Ok(Tried::Refused(why)),
        }
    }

    fn prepare_with(
        &mut self,
        device: &mut Device,
        queue: &EngineQueue,
        memory: &Rc<DeviceMemory>,
        chain: &mut TakenChain,
        buffers: &mut Buffers,
    ) -> Result<Prepared, StopReason> {
        let frame = match locate(queue, memory, chain.head, buffers)? {
            Located::Frame(frame) => frame,
            Located::TableAbsent(spans) => {
                return Ok(Prepared::Absent(wanted_of(memory, &spans, Access::Read)));
            }
            Located::Refused { why, .. } => return Ok(Prepared::Refused(why)),
        };
        let sample = self.scratch.sample();
        let began = (sample == Sample::Yes).then(Instant::now);
        let mut leases = self.scratch.leases();
        let all_there = lease_all(memory, &frame, buffers, &mut leases);
        if let Some(began) = began {
            let counters = self.reports.counters(&device.shared);
            self.scratch.record_lookup(counters, began, 1);
        }
        let held = self.injected(device, memory, buffers, &chain.origin);
        if held.is_some() {
            chain.origin.mark_injected();
        }
        if all_there && held.is_none() {
            return Ok(Prepared::Ready(Ready {
                head: chain.head,
                frame,
                leases,
                sample,
                course: chain.origin.course(),
                bounce: None,
            }));
        }
        leases.release(memory);
        // A chain that had arrived in a bounce buffer does not land again at once: progress comes
        // first.
        if !matches!(chain.origin, Origin::Again(_)) && held.is_none() {
            let located = Chain {
                queue: queue.key.queue,
                memory,
                frame: &frame,
                buffers,
            };
            match self.may_land(device, located) {
                MayLand::No => {}
                MayLand::Later(first) => return Ok(Prepared::Absent(first)),
                MayLand::Now(leases, bounce) => {
                    let bounce = Some(bounce);
                    return Ok(Prepared::Ready(Ready {
                        head: chain.head,
                        frame,
                        leases,
                        sample,
                        course: chain.origin.course(),
                        bounce,
                    }));
                }
            }
        }
        let mut absent = absent_of(memory, &frame, buffers);
        absent.extend(held);
        if absent.is_empty() {
            // The pages came back between the two checks. Request them all the same: the answer
            // comes at once.
            absent = all_of(memory, &frame, buffers);
        }
        Ok(Prepared::Absent(absent))
    }

    fn park(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        chain: TakenChain,
        parking: Parking,
    ) {
        let since = match chain.origin {
            Origin::Fresh(_) | Origin::Again(_) => Instant::now(),
            Origin::Resumed { since, .. } => since,
        };
        let mut course = chain.origin.course();
        course.park(self.reports.now_ns);
        let requests = self.parked.park(ParkedChain {
            asker: queue.asker(&device.shared, memory),
            waiter: Waiter::Chain(chain.head),
            wanted: parking.wanted,
            purpose: parking.purpose,
            since,
            course,
        });
        self.charge(queue, requests as u64 * FAULT_COST_BYTES);
        queue.count_parked(parking.purpose);
        queue.note_pause(memory, self.reports.now_ns);
        self.reports.faults(device, queue.key, requests, &course);
        let counters = self.reports.counters(&device.shared);
        add(&counters.iopfs, requests as u64);
        add(&counters.parked, 1);
    }

    /// Answers a chain whose DMA cannot be done; only its answer is written.
    fn fail_chain(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        chain: TakenChain,
    ) -> Result<(), StopReason> {
        let mut buffers = Buffers::default();
        let place = match locate(queue, memory, chain.head, &mut buffers)? {
            Located::Frame(frame) => frame.answer,
            Located::Refused { answer, .. } => answer,
            Located::TableAbsent(_) if queue.table.layout.answer == AnswerPlace::Nowhere => None,
            Located::TableAbsent(spans) => {
                // The descriptor table holds the address of the answer.
                let wanted = wanted_of(memory, &spans, Access::Read);
                let purpose = Purpose::BadStatus;
                self.park(device, queue, memory, chain, Parking { wanted, purpose });
                return Ok(());
            }
        };
        let mut leases = self.scratch.leases();
        match place {
            Some(place) if !leases.take(memory, place, Access::Write) => {
                let wanted = wanted_of(memory, &[place], Access::Write);
                let purpose = Purpose::BadStatus;
                self.park(device, queue, memory, chain, Parking { wanted, purpose });
                Ok(())
            }
            place => {
                let answer = Answer {
                    head: chain.head,
                    at: place,
                    outcome: Outcome::Failed,
                    moved: Moved::default(),
                    course: chain.origin.course(),
                };
                self.complete(device, queue, memory, answer, leases)
            }
        }
    }
}

/// Why a chain is parked, and until when.
struct Parking {
    /// The pages that it waits for.
    wanted: Vec<PageDemand>,
    purpose: Purpose,
}

enum Prepared {
    Ready(Ready),
    Absent(Vec<PageDemand>),
    Refused(Refused),
}

/// Result of preparing a chain.
#[expect(
    clippy::large_enum_variant,
    reason = "one a request, handed on at once: a box would cost more than the copy"
)]
enum Tried {
    Ready(Ready),
    Parked,
    /// It is to be answered with an error.
    Refused(Refused),
}
