// SPDX-License-Identifier: Apache-2.0
//! [`DeviceBackend`]: what a device does with a front end's settings: they become commands to its
//! engines.

use super::{
    control::{Control, EngineGone},
    inflight_fd::{self, InflightRegion, Shape},
    offer::{F_EVENT_IDX, F_INDIRECT_DESC, QUEUE_SIZE_MAX, RING_FEATURES},
};
use crate::{
    chain::Indirect,
    engine::command::{Command, QueueSetup, RecordSetup, StopHow},
    kind::work::{Chains, Completes},
    net::record::{Tie, file::RecordFile},
    regions::{REGIONS_MAX, Region, RegionTable},
};
use pagetide_addr::Gpa;
use pagetide_sys::signal::EventSignal;
use pagetide_vhost_backend::{
    Backend, Offer, RegionShape, RingAddresses, RingSettings, Runs, Stop, signal_of,
};
use std::{
    fs::File,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
};
use vhost::vhost_user::{Error, Result, VhostUserProtocolFeatures, message::VhostUserInflight};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

/// A device as one front end has set it up.
pub(super) struct DeviceBackend {
    control: Arc<Control>,
    features: u64,
    regions: RegionTable,
    inflight: Option<InflightRegion>,
}

impl DeviceBackend {
    /// Without memory and without features.
    pub fn new(control: Arc<Control>) -> Self {
        Self {
            control,
            features: 0,
            regions: RegionTable::default(),
            inflight: None,
        }
    }

    /// Sends a command to a queue's engine and waits until it has been obeyed. So a front end has
    /// at most one command waiting, however many messages it sends.
    fn tell_engine(&self, queue: u16, command: Command, obeyed: &Receiver<()>) -> Result<()> {
        let mailbox = &self.control.engine_of(queue).mailbox;
        mailbox.post(command).map_err(|e| gone(e.into()))?;
        obeyed.recv().map_err(|e| gone(e.into()))
    }

    /// What an engine needs to start a ring; `None` if the ring is not in memory.
    fn setup(&self, queue: u16, settings: &RingSettings) -> Result<Option<QueueSetup>> {
        let (Some(addresses), Some(kick)) = (settings.addresses, &settings.kick) else {
            return Ok(None);
        };
        let Some(ring) = self.ring(settings.size, addresses)? else {
            return Ok(None);
        };
        let kind = &self.control.shared.kind;
        let records =
            (kind.protocol_features()).contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD);
        let inflight = match &self.inflight {
            None => None,
            // Offered or not, some front end may send one.
            Some(_) if !records => None,
            Some(region) => Some(region.queue(queue, settings.size).ok_or_else(|| {
                tracing::warn!(
                    queue,
                    size = settings.size,
                    "the in-flight region has no such queue"
                );
                Error::InvalidParam
            })?),
        };
        let role = kind.role_of(queue, self.features);
        let record = match role.chains {
            Chains::Posted => Some(self.record(queue, &ring)?),
            Chains::Requests => None,
        };
        Ok(Some(QueueSetup {
            number: queue,
            queue: ring,
            next_avail: settings.base,
            indirect: if self.features & F_INDIRECT_DESC == 0 {
                Indirect::Absent
            } else {
                Indirect::Negotiated
            },
            role,
            features: self.features,
            kick: Some(kick.try_clone().map_err(Error::ReqHandlerError)?),
            call: settings.call.as_ref().map(signal_of).transpose()?,
            error: settings.error.as_ref().map(signal_of).transpose()?,
            inflight,
            record,
            on_fault: self.control.shared.on_fault,
        }))
    }

    /// The record of the chains that a ring holds.
    fn record(&self, queue: u16, ring: &Queue) -> Result<RecordSetup> {
        let Control {
            state_dir, socket, ..
        } = &*self.control;
        let file = RecordFile::open(state_dir, socket, queue, ring.size()).map_err(|error| {
            tracing::error!(%error, "a receiving queue cannot start");
            Error::BackendInternalError
        })?;
        let ram = self.regions.file_of(Gpa(ring.desc_table()));
        let ram = ram.ok_or(Error::InvalidParam)?;
        let tie = Tie {
            dev: ram.dev,
            ino: ram.ino,
            descriptors: ring.desc_table(),
            avail: ring.avail_ring(),
            used: ring.used_ring(),
            queue,
            size: ring.size(),
        };
        Ok(RecordSetup { file, tie })
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

    fn region(&self, shape: RegionShape, file: BorrowedFd<'_>) -> Result<Region> {
        let Control { ram, domains, .. } = &*self.control;
        Region::map(shape, file, ram, domains).map_err(|error| refused_memory(&error))
    }

    /// Refuses regions whose total size is too large.
    fn check_quota(&self, lengths: impl Iterator<Item = u64>) -> Result<()> {
        let checked = self.control.ram.check_bytes(lengths);
        checked.map_err(|error| refused_memory(&error))
    }

    /// Gives memory to every engine.
    fn publish(&self, regions: &RegionTable) -> Result<()> {
        for (index, engine) in self.control.engines.iter().enumerate() {
            let memory = regions
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
        self.control.set_memory(regions.files(), regions.sealed());
        Ok(())
    }
}

impl Backend for DeviceBackend {
    type Memory = RegionTable;

    fn offer(&self) -> Offer {
        Offer {
            features: RING_FEATURES | self.control.shared.kind.features(),
            required_features: 0,
            protocol_features: VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::RESET_DEVICE
                | self.control.shared.kind.protocol_features(),
            queue_count: self.control.queue_count,
            queues_told: self
                .control
                .shared
                .kind
                .queues_told(self.control.queue_count),
            queue_size_max: QUEUE_SIZE_MAX,
            regions_max: REGIONS_MAX as u64,
        }
    }

    fn set_features(&mut self, features: u64) {
        self.features = features;
    }

    fn config(&self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        let kind = &self.control.shared.kind;
        kind.config(self.control.queue_count, offset, bytes)
    }

    fn map(&mut self, regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<RegionTable> {
        self.check_quota(regions.iter().map(|(shape, _)| shape.bytes))?;
        let mut table = RegionTable::default();
        for (shape, file) in regions {
            let region = self.region(*shape, *file)?;
            table.add(region).map_err(|error| refused_memory(&error))?;
        }
        Ok(table)
    }

    fn map_one_more(&mut self, shape: RegionShape, file: BorrowedFd<'_>) -> Result<RegionTable> {
        self.check_quota(self.regions.lengths().chain([shape.bytes]))?;
        let region = self.region(shape, file)?;
        let mut table = self.regions.clone();
        table.add(region).map_err(|error| refused_memory(&error))?;
        Ok(table)
    }

    fn map_one_less(&mut self, shape: RegionShape) -> Result<RegionTable> {
        let mut table = self.regions.clone();
        table
            .remove(shape.gpa, shape.bytes, shape.frontend)
            .map_err(|error| refused_memory(&error))?;
        Ok(table)
    }

    fn use_memory(&mut self, memory: RegionTable) -> Result<()> {
        self.publish(&memory)?;
        // The old memory is unmapped here: for large memory this takes long, and an engine has
        // other tenants.
        self.regions = memory;
        Ok(())
    }

    fn start(&mut self, queue: u16, ring: &RingSettings) -> Result<Runs> {
        let Some(setup) = self.setup(queue, ring)? else {
            return Ok(Runs::No);
        };
        let is_unrecorded = setup.inflight.is_none() && !self.keeps_record(queue);
        let kind = &self.control.shared.kind;
        kind.set_running(queue, Some(self.features));
        let (reply, taken) = channel();
        let command = Command::StartQueue {
            device: self.control.slot,
            setup: Box::new(setup),
            reply,
        };
        self.tell_engine(queue, command, &taken)?;
        if is_unrecorded {
            self.control.set_unrecorded(queue, Runs::Yes);
        }
        Ok(Runs::Yes)
    }

    fn stop(&mut self, queue: u16, how: Stop) -> Result<u16> {
        let how = match how {
            Stop::Drain => StopHow::Drain,
            Stop::Abandon => StopHow::Abandon,
        };
        let (reply, stopped) = channel();
        let command = Command::StopQueue {
            device: self.control.slot,
            queue,
            how,
            reply,
        };
        let mailbox = &self.control.engine_of(queue).mailbox;
        mailbox.post(command).map_err(|e| gone(e.into()))?;
        let next = stopped.recv().map_err(|e| gone(e.into()))?;
        self.control.set_unrecorded(queue, Runs::No);
        self.control.shared.kind.set_running(queue, None);
        Ok(next)
    }

    fn set_call(&mut self, queue: u16, call: Option<EventSignal>) -> Result<()> {
        let (reply, taken) = channel();
        let command = Command::SetCall {
            device: self.control.slot,
            queue,
            call,
            reply,
        };
        self.tell_engine(queue, command, &taken)
    }

    fn create_inflight(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        let (file, bytes) = inflight_fd::create(queues, size).map_err(|error| {
            tracing::warn!(%error, "no in-flight region was made");
            Error::InvalidParam
        })?;
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    fn set_inflight(&mut self, region: &VhostUserInflight, file: BorrowedFd<'_>) -> Result<()> {
        let shape = Shape {
            offset: region.mmap_offset,
            bytes: region.mmap_size,
            queues: region.num_queues,
            size: region.queue_size,
        };
        let opened = InflightRegion::open(file, shape).map_err(|error| {
            tracing::warn!(%error, "the in-flight region is refused");
            Error::InvalidParam
        })?;
        self.inflight = Some(opened);
        Ok(())
    }

    fn keeps_record(&self, queue: u16) -> bool {
        let role = self.control.shared.kind.role_of(queue, self.features);
        role.chains == Chains::Posted || role.completes == Completes::InRingOrder
    }

    fn hurry(&mut self) {
        self.control.hurry();
    }

    fn end(&mut self) {
        // Also if an engine that is gone could not be told: the front end's memory goes with it.
        self.regions = RegionTable::default();
        self.inflight = None;
        self.control.shared.kind.front_end_gone();
    }
}

fn refused_memory(error: &dyn std::fmt::Display) -> Error {
    tracing::warn!(%error, "the front end's memory is refused");
    Error::InvalidParam
}

fn gone(error: EngineGone) -> Error {
    tracing::error!(%error, "a front end's request cannot be done");
    Error::BackendInternalError
}
