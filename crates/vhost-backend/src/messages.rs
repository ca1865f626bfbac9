// SPDX-License-Identifier: Apache-2.0
//! The vhost-user messages, and what each does to a [`Session`].

use crate::{
    backend::{Backend, KickChange, RegionShape, Stop},
    event::signal_of,
    record::InflightRecord,
    ring::{Enabled, RingAddresses, RingSettings, Runs},
    session::{Answered, Handshake, Prelude, REGION_FILES_MAX, Session},
};
use pagetide_addr::FrontendVa;
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
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

/// The region of a message that names one.
fn shape_of(single: &VhostUserSingleMemoryRegion) -> RegionShape {
    // It derefs to the region inside.
    let region: &VhostUserMemoryRegion = single;
    region.into()
}

impl<B: Backend> VhostUserBackendReqHandlerMut for Session<B> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// As the specification recommends, this disables all rings and does nothing else.
    fn reset_owner(&mut self) -> Result<()> {
        self.disable_all()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.disable_all()?;
        self.rings.fill_with(RingSettings::default);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.backend.offer().features)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if self.prelude == Prelude::UnderWay {
            return Ok(());
        }
        let offer = self.backend.offer();
        let missing = offer.required_features & !features;
        if features & !offer.features != 0 || missing != 0 {
            tracing::warn!(
                asked = format_args!("{features:#x}"),
                offered = format_args!("{:#x}", offer.features),
                missing = format_args!("{missing:#x}"),
                "the front end wants features that were not offered, or does not take one that it must"
            );
            return Err(Error::InvalidParam);
        }
        self.features = features;
        self.backend.set_features(features);
        // Rings may have been set up before.
        self.start_all()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let files: Vec<OwnedFd> = files.into_iter().map(OwnedFd::from).collect();
        let shapes = || regions.iter().map(RegionShape::from);
        let described: Vec<_> = shapes().zip(files.iter().map(AsFd::as_fd)).collect();
        let mapped = self
            .check_not_ended()
            .and_then(|()| self.backend.map(&described));
        let memory = match mapped {
            Ok(memory) => memory,
            Err(refused) => {
                self.discarded.extend(files);
                return Err(refused);
            }
        };
        self.stop_all(Stop::Drain)?;
        self.backend.use_memory(memory)?;
        let kept = shapes().zip(files).collect();
        let gone = std::mem::replace(&mut self.memory, kept);
        self.unkept_regions = 0;
        self.discarded
            .extend(gone.into_iter().map(|(_, file)| file));
        self.start_all()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size_max = self.backend.offer().queue_size_max;
        let (_, ring) = self.ring(index)?;
        let size = u16::try_from(num).unwrap_or(0);
        if !size.is_power_of_two() || size > size_max {
            tracing::warn!(
                num,
                "a queue must have a power of two up to {size_max} entries"
            );
            return Err(Error::InvalidParam);
        }
        if ring.runs == Runs::Yes && ring.size != size {
            return unsupported("SET_VRING_NUM of a running ring");
        }
        ring.size = size;
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
        let (queue, ring) = self.ring(index)?;
        let addresses = RingAddresses {
            descriptors: FrontendVa(descriptor),
            avail: FrontendVa(available),
            used: FrontendVa(used),
        };
        if ring.runs == Runs::Yes && ring.addresses != Some(addresses) {
            return unsupported("SET_VRING_ADDR of a running ring");
        }
        ring.addresses = Some(addresses);
        self.start_if_ready(queue)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let (_, ring) = self.ring(index)?;
        ring.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let (queue, _) = self.ring(index)?;
        self.stop(queue, Stop::Drain)?;
        let (_, ring) = self.ring(index)?;
        ring.kick = None;
        ring.call = None;
        Ok(VhostUserVringState::new(index, u32::from(ring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let Some(fd) = fd else {
            return unsupported("a ring without a kick descriptor");
        };
        let fd = self.event(fd)?;
        let (queue, ring) = self.ring(u32::from(index))?;
        let (fd, runs) = (Arc::new(fd), ring.runs);
        ring.kick = Some(Arc::clone(&fd));
        if runs == Runs::Yes && self.backend.set_kick(queue, &fd) == KickChange::NeedsRestart {
            self.stop(queue, Stop::Drain)?;
        }
        self.start_if_ready(queue)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(|fd| self.event(fd)).transpose()?;
        let call = fd.as_ref().map(signal_of).transpose()?;
        let (queue, ring) = self.ring(u32::from(index))?;
        ring.call = fd;
        match ring.runs {
            Runs::Yes => self.backend.set_call(queue, call),
            Runs::No => Ok(()),
        }
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(|fd| self.event(fd)).transpose()?;
        let error = fd.as_ref().map(signal_of).transpose()?;
        let (queue, ring) = self.ring(u32::from(index))?;
        ring.error = fd;
        if ring.runs == Runs::Yes {
            self.backend.set_error(queue, error);
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.backend.offer().protocol_features)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.backend.offer().protocol_features.bits();
        // Messages of features that were not offered would be taken as negotiated from now on.
        if features & !offered != 0 {
            tracing::warn!(
                asked = format_args!("{features:#x}"),
                offered = format_args!("{offered:#x}"),
                "the front end wants protocol features that were not offered"
            );
            return Err(Error::InvalidParam);
        }
        self.protocol_features = features;
        self.handshake = Handshake::Made;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.backend.offer().queues_told))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let (queue, ring) = self.ring(index)?;
        if enable {
            ring.enabled = Enabled::Yes;
            self.start_if_ready(queue)
        } else {
            ring.enabled = Enabled::No;
            self.stop(queue, Stop::Drain)
        }
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        self.backend.config(offset, size).ok_or(Error::InvalidParam)
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
        self.backend.create_inflight(wanted)
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        // A ring that runs records its requests where it began to.
        let taken = self
            .check_not_ended()
            .and_then(|()| match self.runs() {
                true => unsupported("SET_INFLIGHT_FD while a ring runs"),
                false => Ok(()),
            })
            .and_then(|()| self.backend.set_inflight(inflight, file.as_fd()));
        if let Err(refused) = taken {
            self.discarded.push(file.into());
            return Err(refused);
        }
        let gone = self
            .inflight
            .replace(InflightRecord::of(inflight, file.into()));
        self.discarded.extend(gone.map(|gone| gone.file));
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        match self.backend.offer().regions_max {
            0 => unsupported("GET_MAX_MEM_SLOTS"),
            regions_max => Ok(regions_max),
        }
    }

    fn add_mem_region(
        &mut self,
        wire: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.answered = Answered::Yes;
        let mapped = self
            .check_not_ended()
            .and_then(|()| self.backend.map_one_more(shape_of(wire), file.as_fd()));
        let used = mapped.and_then(|memory| self.backend.use_memory(memory));
        if let Err(refused) = used {
            self.discarded.push(file.into());
            return Err(refused);
        }
        if self.memory.len() < REGION_FILES_MAX {
            self.memory.push((shape_of(wire), file.into()));
        } else {
            self.unkept_regions += 1;
            self.discarded.push(file.into());
        }
        self.start_all()?;
        self.answered = Answered::No;
        Ok(None)
    }

    fn remove_mem_region(&mut self, wire: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.answered = Answered::Yes;
        self.check_not_ended()?;
        let memory = self.backend.map_one_less(shape_of(wire))?;
        // I/O under way may target this region; rings may be in it.
        self.stop_all(Stop::Drain)?;
        self.backend.use_memory(memory)?;
        let shape = shape_of(wire);
        let is_it = |(known, _): &(RegionShape, OwnedFd)| {
            (known.gpa, known.bytes, known.frontend) == (shape.gpa, shape.bytes, shape.frontend)
        };
        match self.memory.iter().position(is_it) {
            Some(at) => {
                let (_, file) = self.memory.remove(at);
                self.discarded.push(file);
            }
            None => self.unkept_regions = self.unkept_regions.saturating_sub(1),
        }
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
