// SPDX-License-Identifier: Apache-2.0
//! One front end's connection: vhost-user messages become engine commands.
//!
//! A ring *runs* once it has addresses, memory to translate them by, a kick
//! descriptor, and is enabled. Whatever takes one of these away stops it first,
//! and its I/O is done before the message is answered: the front end may reuse
//! what it has taken away.
//!
//! What is refused here is refused with a reason in the log. A front end that
//! would go on in the belief that all is well is hung up on; one that adds or
//! removes a memory region waits for the answer (REPLY_ACK), so it may stay.

use super::{
    Control, EngineGone,
    inflight_fd::{self, InflightRegion, Shape},
};
use crate::{
    blk::config::{self, F_EVENT_IDX, F_INDIRECT_DESC, F_PROTOCOL_FEATURES, QUEUE_SIZE_MAX},
    chain::Indirect,
    engine::command::{Command, QueueSetup, StopHow},
    memory::{REGIONS_MAX, Region, RegionTable},
};
use pagetide_addr::{FileKey, FrontendVa, Gpa};
use pagetide_vpri::DmaDomain;
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc::channel},
};
use vhost::{
    VhostUserMemoryRegionBase,
    vhost_user::{
        Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
        message::{
            VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
            VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig,
            VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
            VhostUserVringState,
        },
    },
};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

/// Where a front end has a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RingAddresses {
    descriptors: FrontendVa,
    avail: FrontendVa,
    used: FrontendVa,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Enabled {
    Yes,
    #[default]
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Runs {
    Yes,
    #[default]
    No,
}

#[derive(Debug, Default)]
struct Vring {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    enabled: Enabled,
    runs: Runs,
}

/// A connection.
pub(crate) struct Session {
    control: Arc<Control>,
    features: u64,
    regions: RegionTable,
    vrings: Vec<Vring>,
    inflight: Option<InflightRegion>,
    answered: Answered,
}

/// Whether the message just refused was answered, so that the front end knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Answered {
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
        }
    }

    /// True if the front end knows that its last message was refused.
    pub fn was_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered) == Answered::Yes
    }

    /// Stops everything and lets go of the front end's memory.
    pub fn end(&mut self) {
        for queue in 0..self.control.queue_count {
            if let Err(error) = self.stop(queue, StopHow::Abandon) {
                tracing::error!(%error, queue, "a queue could not be stopped");
            }
        }
        self.regions = RegionTable::default();
        if let Err(error) = self.publish_memory() {
            tracing::error!(%error, "an engine could not be told to let go of guest memory");
        }
    }

    fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring)> {
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
    fn start_if_ready(&mut self, queue: u16) -> Result<()> {
        let Some(setup) = self.setup(queue)? else {
            return Ok(());
        };
        self.control
            .engine_of(queue)
            .mailbox
            .post(Command::StartQueue {
                device: self.control.slot,
                setup: Box::new(setup),
            })
            .map_err(|_| Error::BackendInternalError)?;
        self.vrings[usize::from(queue)].runs = Runs::Yes;
        Ok(())
    }

    fn setup(&self, queue: u16) -> Result<Option<QueueSetup>> {
        let vring = &self.vrings[usize::from(queue)];
        let (Some(addresses), Some(kick)) = (vring.addresses, &vring.kick) else {
            return Ok(None);
        };
        let wanted = vring.enabled == Enabled::Yes || self.features & F_PROTOCOL_FEATURES == 0;
        if vring.runs == Runs::Yes || !wanted {
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
        let copy = |fd: &Option<OwnedFd>| match fd {
            Some(fd) => fd.try_clone().map(Some).map_err(Error::ReqHandlerError),
            None => Ok(None),
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
            call: copy(&vring.call)?,
            error: copy(&vring.error)?,
            inflight,
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
    fn stop(&mut self, queue: u16, how: StopHow) -> std::result::Result<(), EngineGone> {
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

    fn stop_all(&mut self, how: StopHow) -> Result<()> {
        for queue in 0..self.control.queue_count {
            self.stop(queue, how).map_err(gone)?;
        }
        Ok(())
    }

    fn start_all(&mut self) -> Result<()> {
        (0..self.control.queue_count).try_for_each(|queue| self.start_if_ready(queue))
    }

    /// Gives every engine the memory as it is now.
    fn publish_memory(&self) -> Result<()> {
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
        self.control.set_files(self.regions.files());
        Ok(())
    }

    fn region(&self, wire: &WireRegion, file: &File) -> Result<Region> {
        let domain = self.domain(file)?;
        Ok(Region {
            gpa: wire.gpa,
            bytes: wire.bytes,
            frontend: wire.frontend,
            file_offset: wire.file_offset,
            domain,
        })
    }

    fn domain(&self, file: &File) -> Result<Arc<DmaDomain>> {
        let stat = rustix::fs::fstat(file).map_err(|e| Error::ReqHandlerError(e.into()))?;
        let key = FileKey {
            dev: stat.st_dev,
            ino: stat.st_ino,
        };
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        self.control
            .domains
            .open(file.as_fd(), key, bytes)
            .map_err(|error| refused_memory(&error))
    }
}

/// A region as it comes in a message.
struct WireRegion {
    gpa: Gpa,
    bytes: u64,
    frontend: FrontendVa,
    file_offset: u64,
}

impl From<&VhostUserMemoryRegion> for WireRegion {
    fn from(wire: &VhostUserMemoryRegion) -> Self {
        Self {
            gpa: Gpa(wire.guest_phys_addr),
            bytes: wire.memory_size,
            frontend: FrontendVa(wire.user_addr),
            file_offset: wire.mmap_offset,
        }
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

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all(StopHow::Abandon)
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all(StopHow::Abandon)
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&self.control.shared.image))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let offered = config::features(&self.control.shared.image);
        if features & !offered != 0 {
            tracing::warn!(
                asked = format_args!("{features:#x}"),
                offered = format_args!("{offered:#x}"),
                "the front end wants features that were not offered"
            );
            return Err(Error::InvalidParam);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut table = RegionTable::default();
        for (wire, file) in regions.iter().zip(&files) {
            let region = self.region(&wire.into(), file)?;
            table.add(region).map_err(|error| refused_memory(&error))?;
        }
        self.stop_all(StopHow::Drain)?;
        self.regions = table;
        self.publish_memory()?;
        self.start_all()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let (_, vring) = self.vring(index)?;
        let size = u16::try_from(num).unwrap_or(0);
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            tracing::warn!(
                num,
                "a queue must have a power of two up to {QUEUE_SIZE_MAX} entries"
            );
            return Err(Error::InvalidParam);
        }
        if vring.runs == Runs::Yes && vring.size != size {
            return Err(Error::InvalidOperation("SET_VRING_NUM of a running ring"));
        }
        vring.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let (queue, vring) = self.vring(index)?;
        let addresses = RingAddresses {
            descriptors: FrontendVa(descriptor),
            avail: FrontendVa(available),
            used: FrontendVa(used),
        };
        if vring.runs == Runs::Yes && vring.addresses != Some(addresses) {
            return Err(Error::InvalidOperation("SET_VRING_ADDR of a running ring"));
        }
        vring.addresses = Some(addresses);
        self.start_if_ready(queue)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let (_, vring) = self.vring(index)?;
        vring.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let (queue, _) = self.vring(index)?;
        self.stop(queue, StopHow::Drain).map_err(gone)?;
        let vring = &mut self.vrings[usize::from(queue)];
        vring.kick = None;
        vring.call = None;
        Ok(VhostUserVringState::new(index, u32::from(vring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let (queue, vring) = self.vring(u32::from(index))?;
        let Some(fd) = fd else {
            return unsupported("a ring without a kick descriptor");
        };
        vring.kick = Some(fd.into());
        if vring.runs == Runs::Yes {
            self.stop(queue, StopHow::Drain).map_err(gone)?;
        }
        self.start_if_ready(queue)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.call = fd.map(OwnedFd::from);
        if vring.runs == Runs::No {
            return Ok(());
        }
        let copy = vring.call.as_ref().map(OwnedFd::try_clone).transpose();
        let call = copy.map_err(Error::ReqHandlerError)?;
        self.control
            .engine_of(queue)
            .mailbox
            .post(Command::SetCall {
                device: self.control.slot,
                queue,
                call,
            })
            .map_err(|error| gone(error.into()))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let (_, vring) = self.vring(u32::from(index))?;
        vring.error = fd.map(OwnedFd::from);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.control.queue_count))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let (queue, vring) = self.vring(index)?;
        if enable {
            vring.enabled = Enabled::Yes;
            self.start_if_ready(queue)
        } else {
            vring.enabled = Enabled::No;
            self.stop(queue, StopHow::Drain).map_err(gone)
        }
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let image = &self.control.shared.image;
        config::read(image, self.control.queue_count, offset, size).ok_or(Error::InvalidParam)
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        unsupported("SET_CONFIG: no field of this device can be written")
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        let (file, bytes) = inflight_fd::create(queues, size).map_err(|error| {
            tracing::warn!(%error, "no in-flight region was made");
            Error::InvalidParam
        })?;
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let shape = Shape {
            offset: inflight.mmap_offset,
            bytes: inflight.mmap_size,
            queues: inflight.num_queues,
            size: inflight.queue_size,
        };
        let region = InflightRegion::open(file, shape).map_err(|error| {
            tracing::warn!(%error, "the in-flight region is refused");
            Error::InvalidParam
        })?;
        self.inflight = Some(region);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        wire: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.answered = Answered::Yes;
        let region = self.region(&wire_of(wire), &file)?;
        let mut table = self.regions.clone();
        table.add(region).map_err(|error| refused_memory(&error))?;
        let before = std::mem::replace(&mut self.regions, table);
        if let Err(error) = self.publish_memory() {
            self.regions = before;
            return Err(error);
        }
        self.start_all()?;
        self.answered = Answered::No;
        Ok(None)
    }

    fn remove_mem_region(&mut self, wire: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.answered = Answered::Yes;
        let wire = wire_of(wire);
        let mut table = self.regions.clone();
        table
            .remove(wire.gpa, wire.bytes, wire.frontend)
            .map_err(|error| refused_memory(&error))?;
        // I/O under way may be to this region; rings may be in it.
        self.stop_all(StopHow::Drain)?;
        self.regions = table;
        self.publish_memory()?;
        self.start_all()?;
        self.answered = Answered::No;
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        unsupported("SET_LOG_BASE")
    }
}

fn wire_of(single: &VhostUserSingleMemoryRegion) -> WireRegion {
    // It derefs to the region in it.
    let region: &VhostUserMemoryRegion = single;
    region.into()
}
