// SPDX-License-Identifier: Apache-2.0
//! The vhost-user messages, and what each does to a [`Session`].

use super::{
    inflight_fd::{self, InflightRegion, Shape},
    session::{
        Answered, Enabled, Handshake, RingAddresses, Runs, Session, check_event, gone,
        refused_memory, shape_of, signal_of,
    },
};
use crate::{
    blk::config::{self, QUEUE_SIZE_MAX},
    engine::command::{Command, StopHow},
    regions::{REGIONS_MAX, RegionTable},
};
use pagetide_addr::FrontendVa;
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::mpsc::channel,
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

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl Session {
    /// The eventfd that a front end has sent. A descriptor of another kind is refused, and closed
    /// elsewhere.
    fn event(&mut self, file: File) -> Result<OwnedFd> {
        let event = OwnedFd::from(file);
        match check_event(event.as_fd()) {
            Ok(()) => Ok(event),
            Err(refused) => {
                self.discarded.push(event);
                Err(refused)
            }
        }
    }
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
        let files: Vec<OwnedFd> = files.into_iter().map(OwnedFd::from).collect();
        let lengths = regions.iter().map(|region| region.memory_size);
        let mapped = self.check_quota(lengths).and_then(|()| {
            regions.iter().zip(&files).try_for_each(|(wire, file)| {
                let region = self.region(wire.into(), file.as_fd())?;
                table.add(region).map_err(|error| refused_memory(&error))
            })
        });
        self.discarded.extend(files);
        mapped?;
        self.stop_all(StopHow::Drain)?;
        // The old memory is unmapped here, not by an engine.
        let before = std::mem::replace(&mut self.regions, table);
        self.publish_memory()?;
        drop(before);
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
        let Some(fd) = fd else {
            return unsupported("a ring without a kick descriptor");
        };
        let fd = self.event(fd)?;
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.kick = Some(fd);
        if vring.runs == Runs::Yes {
            self.stop(queue, StopHow::Drain).map_err(gone)?;
        }
        self.start_if_ready(queue)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(|fd| self.event(fd)).transpose()?;
        let call = fd.as_ref().map(signal_of).transpose()?;
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.call = fd;
        if vring.runs == Runs::No {
            return Ok(());
        }
        let (reply, taken) = channel();
        let command = Command::SetCall {
            device: self.control.slot,
            queue,
            call,
            reply,
        };
        self.tell_engine(queue, command, &taken)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(|fd| self.event(fd)).transpose()?;
        let (_, vring) = self.vring(u32::from(index))?;
        vring.error = fd;
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
        self.handshake = Handshake::Made;
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
        let opened = InflightRegion::open(file.as_fd(), shape);
        self.discarded.push(file.into());
        let region = opened.map_err(|error| {
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
        let shape = shape_of(wire);
        let region = self
            .check_quota(self.regions.lengths().chain([shape.bytes]))
            .and_then(|()| self.region(shape, file.as_fd()));
        self.discarded.push(file.into());
        let region = region?;
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
        let shape = shape_of(wire);
        let mut table = self.regions.clone();
        table
            .remove(shape.gpa, shape.bytes, shape.frontend)
            .map_err(|error| refused_memory(&error))?;
        // I/O under way may target this region; rings may be in it.
        self.stop_all(StopHow::Drain)?;
        // The old memory is unmapped here, not by an engine.
        let before = std::mem::replace(&mut self.regions, table);
        self.publish_memory()?;
        drop(before);
        self.start_all()?;
        self.answered = Answered::No;
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        fd: File,
    ) -> Result<Option<File>> {
        self.discarded.push(fd.into());
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, file: File) -> Result<()> {
        self.discarded.push(file.into());
        unsupported("SET_LOG_BASE")
    }
}
