// SPDX-License-Identifier: Apache-2.0
//! A network device on one engine: the links of its pairs there, and what is done with a packet.

use super::{
    device::Nic,
    header::{HEADER_BYTES, LEGACY_HEADER_BYTES, NetHeader},
    link::{Link, Offloads, Readable, Sent},
    nic::{is_receiving, pair_of},
    packet::{HEADER_LEN, Outgoing},
    receiver::Receiver,
};
use crate::{
    kind::{
        EnginePlace,
        posted::{Answered, ChainNo, PostedOrder, Ring},
        work::{Acted, Chain, Outcome},
    },
    memory::{DeviceMemory, Span},
};
use std::{os::fd::BorrowedFd, sync::Arc};

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct NicOnEngine {
    nic: Arc<Nic>,
    /// By pair; those that are served here.
    ends: Vec<Option<End>>,
    /// The header of the packet that is sent next, as it was checked: the guest may change its own.
    checked: [u8; HEADER_LEN],
}

/// A pair's link, and what receives from it.
#[derive(Debug)]
struct End {
    link: Link,
    /// While its receiving queue runs.
    receiver: Option<Receiver>,
    readable: Readable,
    /// Number of the front end whose driver has begun to receive last.
    front_end: u64,
}

impl End {
    fn has_arrivals(&self) -> bool {
        let Some(receiver) = &self.receiver else {
            return false;
        };
        let is_ready = match self.link.readiness() {
            Some(_) => self.readable == Readable::Perhaps,
            None => self.link.is_ready(),
        };
        is_ready || receiver.has_staged()
    }
}

impl NicOnEngine {
    /// The part of a device that is served at `place`.
    pub fn open(nic: &Arc<Nic>, place: &EnginePlace<'_>) -> Self {
        let end_of = |pair: u16| {
            let mut link = place.serves(pair).then(|| nic.take_link(pair)).flatten()?;
            link.attach(place.bell);
            Some(End {
                link,
                receiver: None,
                readable: Readable::Perhaps,
                front_end: nic.front_end(),
            })
        };
        Self {
            nic: nic.clone(),
            ends: (0..nic.pairs()).map(end_of).collect(),
            checked: [0; HEADER_LEN],
        }
    }

    /// Whether a packet may be sent. Its header is leased.
    pub fn check(&mut self, chain: Chain<'_>) -> Outcome {
        let mut bytes = [0; HEADER_BYTES as usize];
        // A legacy header is shorter, and there are zeros behind it.
        let header = &mut bytes[..chain.frame.header_bytes().min(HEADER_LEN)];
        if chain.frame.read_header(chain.memory, header).is_err()
            || !chain.buffers.writable.is_empty()
        {
            return Outcome::Failed;
        }
        self.checked = bytes;
        let [fields @ .., _, _] = bytes;
        const _: () = assert!(HEADER_BYTES == LEGACY_HEADER_BYTES + 2);
        match NetHeader::parse(fields).check(packet_bytes(chain)) {
            Ok(()) => Outcome::Done,
            Err(error) => {
                tracing::debug!(%error, "a packet is not sent");
                Outcome::Failed
            }
        }
    }

    /// Sends the packet that was checked.
    pub fn send(&mut self, chain: Chain<'_>) -> Acted {
        let end = self.ends.get_mut(usize::from(pair_of(chain.queue)));
        let link = end.and_then(|end| Some(&mut end.as_mut()?.link));
        let packet = Outgoing::new(&self.checked, chain.memory, &chain.buffers.readable);
        let (Some(link), Some(packet)) = (link, packet) else {
            debug_assert!(false, "a packet was checked that cannot be sent");
            return Acted {
                outcome: Outcome::Failed,
                from_guest_bytes: 0,
            };
        };
        match link.send(&packet) {
            // A packet that the link drops is lost as on a wire: its driver is not told.
            Sent::Gone | Sent::Dropped => {}
        }
        Acted {
            outcome: Outcome::Done,
            from_guest_bytes: u32::try_from(packet.bytes()).unwrap_or(u32::MAX),
        }
    }
}

/// Receiving; see [`crate::kind::posted`].
impl NicOnEngine {
    fn end(&self, queue: u16) -> Option<&End> {
        self.ends.get(usize::from(pair_of(queue)))?.as_ref()
    }

    fn end_mut(&mut self, queue: u16) -> Option<&mut End> {
        self.ends.get_mut(usize::from(pair_of(queue)))?.as_mut()
    }

    fn receiver(&mut self, queue: u16) -> Option<&mut Receiver> {
        self.end_mut(queue)?.receiver.as_mut()
    }

    pub fn started(&mut self, queue: u16, features: u64) {
        if !is_receiving(queue) {
            return;
        }
        let nic = self.nic.clone();
        let front_end = nic.front_end();
        if let Some(end) = self.end_mut(queue) {
            if end.front_end != front_end {
                end.front_end = front_end;
                nic.count_stop_drops(end.link.clear());
            }
            end.link.begin();
            let receiver = Receiver::new(&nic, pair_of(queue), features);
            end.link.set_offloads(Offloads::of_features(features));
            end.receiver = Some(receiver);
            end.readable = Readable::Perhaps;
        }
    }

    pub fn stopped(&mut self, queue: u16) {
        let nic = self.nic.clone();
        if is_receiving(queue)
            && let Some(end) = self.end_mut(queue)
        {
            end.receiver = None;
            match nic.is_anothers() {
                true => end.link.leave(),
                false => end.link.end(),
            }
        }
    }

    /// Whether packets of that queue are sent and received by system calls.
    pub fn enters_kernel(&self, queue: u16) -> bool {
        self.end(queue)
            .is_some_and(|end| end.link.readiness().is_some())
    }

    pub fn readiness(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        let end = self.end(queue).filter(|_| is_receiving(queue))?;
        end.link.readiness()
    }

    pub fn arrived(&mut self, queue: u16) {
        if let Some(end) = self.end_mut(queue) {
            end.readable = Readable::Perhaps;
        }
    }

    pub fn has_arrivals(&self, queue: u16) -> bool {
        self.end(queue).is_some_and(End::has_arrivals) && !self.nic.is_held()
    }

    pub fn arrive(&mut self, queue: u16, ring: &mut impl Ring) -> PostedOrder {
        if self.nic.is_held() {
            return PostedOrder::Nothing;
        }
        let Some(end) = self.end_mut(queue) else {
            return PostedOrder::Nothing;
        };
        let Some(receiver) = &mut end.receiver else {
            return PostedOrder::Nothing;
        };
        receiver.next(&mut end.link, &mut end.readable, ring)
    }

    pub fn chosen(&self, queue: u16) -> &[ChainNo] {
        let receiver = self.end(queue).and_then(|end| end.receiver.as_ref());
        receiver.map_or(&[], Receiver::chosen)
    }

    pub fn fill(&mut self, queue: u16, memory: &DeviceMemory, into: &[Span], chains: usize) -> u32 {
        self.receiver(queue)
            .map_or(0, |receiver| receiver.fill(memory, into, chains))
    }

    pub fn waits_since(&self, queue: u16) -> Option<u64> {
        self.end(queue)?.receiver.as_ref()?.waits_since()
    }

    pub fn answered(&mut self, queue: u16, chain: ChainNo, answer: Answered) {
        if let Some(receiver) = self.receiver(queue) {
            receiver.answered(chain, answer);
        }
    }

    pub fn is_anothers(&self) -> bool {
        self.nic.is_anothers()
    }

    pub fn leaving(&mut self, queue: u16) -> PostedOrder {
        if self.nic.is_held() {
            // The process that goes on has all packets itself, and those in the kernel are for it.
            return PostedOrder::Nothing;
        }
        let Some(End {
            link,
            receiver: Some(receiver),
            ..
        }) = self.end_mut(queue)
        else {
            return PostedOrder::Nothing;
        };
        let order = receiver.leaving();
        if order == PostedOrder::Nothing {
            receiver.left(link);
        }
        order
    }

    pub fn read_back(&mut self, queue: u16, bytes: &[u8]) {
        if let Some(receiver) = self.receiver(queue) {
            receiver.read_back(bytes);
        }
    }

    pub fn stopping(&mut self, queue: u16) -> PostedOrder {
        self.receiver(queue)
            .map_or(PostedOrder::Nothing, Receiver::stopping)
    }
}

fn packet_bytes(chain: Chain<'_>) -> u64 {
    let lengths = chain.buffers.readable.iter().map(|s| u64::from(s.len));
    lengths.sum()
}
