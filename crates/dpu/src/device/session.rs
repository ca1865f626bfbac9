// SPDX-License-Identifier: Apache-2.0
//! One front end's connection: vhost-user messages become engine commands.
//!
//! A ring *runs* once it has addresses, memory to translate them, and a kick descriptor, and is
//! enabled. A message that takes one of these away stops the ring first, and its I/O is done before
//! the message is answered: the front end may reuse the memory or descriptor it has taken away.
//!
//! Every refusal is logged with its reason. The connection is closed if the front end would
//! otherwise go on unaware of the refusal. A front end that adds or removes a memory region waits
//! for the answer (REPLY_ACK), so it may stay.

use super::{Control, EngineGone, inflight_fd::InflightRegion};
use crate::{
    blk::config::{F_EVENT_IDX, F_INDIRECT_DESC, F_PROTOCOL_FEATURES, QUEUE_SIZE_MAX},
    chain::Indirect,
    engine::command::{Command, QueueSetup, StopHow},
    regions::{Region, RegionShape, RegionTable},
};
use pagetide_addr::{FrontendVa, Gpa};
use pagetide_sys::signal::{EventSignal, SignalError, is_eventfd};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
};
use vhost::vhost_user::{
    Error, Result,
    message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion},
};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

/// Addresses of a ring in the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingAddresses {
    pub descriptors: FrontendVa,
    pub avail: FrontendVa,
    pub used: FrontendVa,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Enabled {
    Yes,
    #[default]
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Runs {
    Yes,
    #[default]
    No,
}

#[derive(Debug, Default)]
pub(super) struct Vring {
    pub size: u16,
    pub addresses: Option<RingAddresses>,
    pub base: u16,
    pub kick: Option<OwnedFd>,
    pub call: Option<OwnedFd>,
    pub error: Option<OwnedFd>,
    pub enabled: Enabled,
    pub runs: Runs,
}

/// A connection.
pub(crate) struct Session {
    pub control: Arc<Control>,
    pub features: u64,
    pub regions: RegionTable,
    pub vrings: Vec<Vring>,
    pub inflight: Option<InflightRegion>,
    pub answered: Answered,
    /// Unneeded descriptors from the front end. Closing one may wait for the front end, so no
    /// thread may do so with the session locked.
    pub discarded: Vec<OwnedFd>,
    /// It has ended: later messages of its front end have no effect.
    ended: bool,
    pub handshake: Handshake,
}

/// Whether this connection began with a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Handshake {
    Made,
    #[default]
    Missing,
}

/// Whether the message just refused was answered, so that the front end knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Answered {
    Yes,
    #[default]
    No,
}

impl Session {
    pub fn new(control: Arc<Control>) -> Self {
        let vrings = (0..control.queue_count).map(|_| Vring::default()).collect();
        Self {
            control,
            features: 0,
            regions: RegionTable::default(),
            vrings,
            inflight: None,
            answered: Answered::No,
            discarded: Vec::new(),
            ended: false,
            handshake: Handshake::Missing,
        }
    }

    /// True if the front end continues where another connection ended, without querying our
    /// features.
    pub fn lacks_handshake(&self) -> bool {
        self.handshake == Handshake::Missing
    }

    /// True if the front end has been told that its last message was refused.
    pub fn was_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered) == Answered::Yes
    }

    /// Descriptors to be closed.
    pub fn take_discarded(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.discarded)
    }

    /// Stops everything and drops the front end's memory. Further calls do nothing.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.control.hurry();
        for queue in 0..self.control.queue_count {
            if let Err(error) = self.stop(queue, StopHow::Abandon) {
                tracing::error!(%error, queue, "a queue could not be stopped");
            }
        }
        let gone = (std::mem::take(&mut self.regions), self.inflight.take());
        if let Err(error) = self.publish_memory() {
            tracing::error!(%error, "an engine could not be made to release guest memory");
        }
        // Unmapped here: for large memory this takes long, and an engine has other tenants.
        drop(gone);
    }

    pub fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring)> {
        let queue = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let vring = self.vrings.get_mut(usize::from(queue)).ok_or_else(|| {
            tracing::warn!(
                index,
                "the front end named a queue that the device does not have"
            );
            Error::InvalidParam
        })?;
        Ok((queue, vring))
    }

    /// Starts a ring if it has all it needs.
    pub fn start_if_ready(&mut self, queue: u16) -> Result<()> {
        let Some(setup) = self.setup(queue)? else {
            return Ok(());
        };
        self.vrings[usize::from(queue)].runs = Runs::Yes;
        let (reply, taken) = channel();
        let command = Command::StartQueue {
            device: self.control.slot,
            setup: Box::new(setup),
            reply,
        };
        self.tell_engine(queue, command, &taken)
    }

    /// Sends a command to a queue's engine and waits until it has been obeyed. So a front end has
    /// at most one command waiting, however many messages it sends.
    pub fn tell_engine(&self, queue: u16, command: Command, obeyed: &Receiver<()>) -> Result<()> {
        let mailbox = &self.control.engine_of(queue).mailbox;
        mailbox.post(command).map_err(|e| gone(e.into()))?;
        obeyed.recv().map_err(|e| gone(e.into()))
    }

    fn setup(&self, queue: u16) -> Result<Option<QueueSetup>> {
        let vring = &self.vrings[usize::from(queue)];
        let (Some(addresses), Some(kick)) = (vring.addresses, &vring.kick) else {
            return Ok(None);
        };
        let wanted = vring.enabled == Enabled::Yes || self.features & F_PROTOCOL_FEATURES == 0;
        if vring.runs == Runs::Yes || !wanted || self.ended {
            return Ok(None);
        }
        // A ring outside memory stays stopped: memory or a new address may still come.
        let Some(ring) = self.ring(vring.size, addresses)? else {
            return Ok(None);
        };
        let inflight = match &self.inflight {
            None => None,
            Some(region) => Some(region.queue(queue, vring.size).ok_or_else(|| {
                tracing::warn!(
                    queue,
                    size = vring.size,
                    "the in-flight region has no such queue"
                );
                Error::InvalidParam
            })?),
        };
        Ok(Some(QueueSetup {
            number: queue,
            queue: ring,
            next_avail: vring.base,
            indirect: if self.features & F_INDIRECT_DESC == 0 {
                Indirect::Absent
            } else {
                Indirect::Negotiated
            },
            kick: Some(kick.try_clone().map_err(Error::ReqHandlerError)?),
            call: vring.call.as_ref().map(signal_of).transpose()?,
            error: vring.error.as_ref().map(signal_of).transpose()?,
            inflight,
            on_fault: self.control.shared.on_fault,
        }))
    }

    /// The ring with guest addresses; `None` if it is not in memory.
    fn ring(&self, size: u16, at: RingAddresses) -> Result<Option<Queue>> {
        let refused = |error: virtio_queue::Error| {
            tracing::warn!(%error, "the front end's ring is refused");
            Error::InvalidParam
        };
        let entries = u64::from(size);
        let places = (
            self.regions.translate(at.descriptors, 16 * entries),
            self.regions.translate(at.avail, 6 + 2 * entries),
            self.regions.translate(at.used, 6 + 8 * entries),
        );
        let (Some(descriptors), Some(avail), Some(used)) = places else {
            return Ok(None);
        };
        let mut ring = Queue::new(QUEUE_SIZE_MAX).map_err(refused)?;
        ring.try_set_size(size).map_err(refused)?;
        ring.try_set_desc_table_address(GuestAddress(descriptors.0))
            .map_err(refused)?;
        ring.try_set_avail_ring_address(GuestAddress(avail.0))
            .map_err(refused)?;
        ring.try_set_used_ring_address(GuestAddress(used.0))
            .map_err(refused)?;
        ring.set_event_idx(self.features & F_EVENT_IDX != 0);
        Ok(Some(ring))
    }

    /// Stops a ring if it runs, and waits until nothing of it is under way.
    pub fn stop(&mut self, queue: u16, how: StopHow) -> std::result::Result<(), EngineGone> {
        let vring = &mut self.vrings[usize::from(queue)];
        if vring.runs == Runs::No {
            return Ok(());
        }
        vring.runs = Runs::No;
        let (reply, stopped) = channel();
        self.control
            .engine_of(queue)
            .mailbox
            .post(Command::StopQueue {
                device: self.control.slot,
                queue,
                how,
                reply,
            })?;
        vring.base = stopped.recv()?;
        Ok(())
    }

    pub fn stop_all(&mut self, how: StopHow) -> Result<()> {
        for queue in 0..self.control.queue_count {
            self.stop(queue, how).map_err(gone)?;
        }
        Ok(())
    }

    pub fn start_all(&mut self) -> Result<()> {
        (0..self.control.queue_count).try_for_each(|queue| self.start_if_ready(queue))
    }

    /// Gives the current memory to every engine.
    pub fn publish_memory(&self) -> Result<()> {
        for (index, engine) in self.control.engines.iter().enumerate() {
            let memory = self
                .regions
                .for_engine(index, self.control.look_up)
                .map_err(|error| refused_memory(&error))?;
            let (reply, taken) = channel();
            let command = Command::SetMemory {
                device: self.control.slot,
                memory,
                reply,
            };
            engine.mailbox.post(command).map_err(|e| gone(e.into()))?;
            taken.recv().map_err(|e| gone(e.into()))?;
        }
        self.control
            .set_memory(self.regions.files(), self.regions.sealed());
        Ok(())
    }

    /// Maps a region described by the front end.
    pub fn region(&self, shape: RegionShape, file: BorrowedFd<'_>) -> Result<Region> {
        if self.ended {
            return Err(Error::BackendInternalError);
        }
        Region::map(shape, file, &self.control.ram, &self.control.domains)
            .map_err(|error| refused_memory(&error))
    }

    /// Refuses regions whose total size is too large.
    pub fn check_quota(&self, lengths: impl Iterator<Item = u64>) -> Result<()> {
        let checked = self.control.ram.check_bytes(lengths);
        checked.map_err(|error| refused_memory(&error))
    }
}

/// The right to signal an eventfd from the front end.
pub(super) fn signal_of(event: &OwnedFd) -> Result<EventSignal> {
    EventSignal::new(event.as_fd()).map_err(|error| refused_event(&error))
}

/// Refuses a descriptor that is not an eventfd: polling or writing other files may block.
pub(super) fn check_event(event: BorrowedFd<'_>) -> Result<()> {
    match is_eventfd(event) {
        Ok(true) => Ok(()),
        Ok(false) => Err(refused_event(&SignalError::NotAnEventfd)),
        Err(error) => Err(refused_event(&error)),
    }
}

fn refused_event(error: &SignalError) -> Error {
    tracing::warn!(%error, "the front end's kick, call or error descriptor is refused");
    Error::InvalidParam
}

impl From<&VhostUserMemoryRegion> for RegionShape {
    fn from(wire: &VhostUserMemoryRegion) -> Self {
        Self {
            gpa: Gpa(wire.guest_phys_addr),
            bytes: wire.memory_size,
            frontend: FrontendVa(wire.user_addr),
            file_offset: wire.mmap_offset,
        }
    }
}

pub(super) fn refused_memory(error: &dyn std::fmt::Display) -> Error {
    tracing::warn!(%error, "the front end's memory is refused");
    Error::InvalidParam
}

pub(super) fn gone(error: EngineGone) -> Error {
    tracing::error!(%error, "a front end's request cannot be done");
    Error::BackendInternalError
}

/// The region of a message that names one.
pub(super) fn shape_of(single: &VhostUserSingleMemoryRegion) -> RegionShape {
    // It derefs to the region inside.
    let region: &VhostUserMemoryRegion = single;
    region.into()
}
