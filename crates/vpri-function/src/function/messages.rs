// SPDX-License-Identifier: Apache-2.0
//! Each vhost-user message of a driver, and what it does to the function's [`State`].

use super::{
    core::FunctionCore,
    memory::{FunctionMemory, RegionShape},
    rings::{QUEUE_SIZE_MAX, RingAddresses, Vring},
    state::State,
};
use crate::wire::{EVENT_QUEUE, QUEUE_COUNT, feature};
use pagetide_sys::signal::{EventSignal, SignalError, is_eventfd};
use std::{fs::File, os::fd::AsFd, sync::Arc};
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

/// VIRTIO_F_EVENT_IDX.
pub(super) const F_EVENT_INDEX: u64 = 1 << 29;
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VIRTIO_F_VERSION_1.
const F_VERSION_1: u64 = 1 << 32;
/// All that the function offers.
const FEATURES: u64 = F_EVENT_INDEX
    | F_PROTOCOL_FEATURES
    | F_VERSION_1
    | feature::ACCESS_LOG
    | feature::LOG_LOSSES
    | feature::OVERWRITE
    | feature::INJECT
    | feature::TOUCHED;

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

fn refused(error: &dyn std::fmt::Display) -> Error {
    tracing::warn!(%error, "a driver's message is refused");
    Error::InvalidParam
}

/// The right to signal an eventfd of the driver.
fn signal_of(event: &File) -> Result<EventSignal> {
    EventSignal::new(event.as_fd()).map_err(|error| refused(&error))
}

/// Refuses a file that is not an eventfd: polling other files may block.
fn check_event(event: &File) -> Result<()> {
    match is_eventfd(event.as_fd()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(refused(&SignalError::NotAnEventfd)),
        Err(error) => Err(refused(&error)),
    }
}

impl State {
    fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring)> {
        let queue = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let vring = self.vrings.get_mut(usize::from(queue));
        Ok((queue, vring.ok_or(Error::InvalidParam)?))
    }

    fn start_if_ready(&mut self, queue: u16) -> Result<()> {
        let event_index = self.event_index();
        let memory = &self.outside.memory;
        if let Some(vring) = self.vrings.get_mut(usize::from(queue)) {
            vring.start(memory, event_index).map_err(|e| refused(&e))?;
        }
        self.follow_phase();
        Ok(())
    }

    /// Stops a queue. If it is the event queue, the driver is gone.
    fn stop(&mut self, queue: u16) {
        if let Some(vring) = self.vrings.get_mut(usize::from(queue)) {
            vring.stop();
        }
        if queue == EVENT_QUEUE {
            self.hang_up();
        } else {
            self.follow_phase();
        }
    }

    fn stop_all(&mut self) {
        (0..QUEUE_COUNT).for_each(|queue| self.stop(queue));
    }

    fn core(&self) -> &FunctionCore {
        &self.core
    }
}

impl VhostUserBackendReqHandlerMut for State {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !FEATURES != 0 || features & F_VERSION_1 == 0 {
            let features = format_args!("{features:#x}");
            tracing::warn!(%features, "a driver wants features that are not offered, or is of before virtio 1");
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
        let shape = |region: &VhostUserMemoryRegion| RegionShape {
            address: region.guest_phys_addr,
            frontend: region.user_addr,
            bytes: region.memory_size,
            offset: region.mmap_offset,
        };
        let memory = FunctionMemory::new(regions.iter().map(shape).zip(files));
        let memory = memory.map_err(|error| refused(&error))?;
        self.stop_all();
        self.outside.memory = memory;
        (0..QUEUE_COUNT).try_for_each(|queue| self.start_if_ready(queue))?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let (_, vring) = self.vring(index)?;
        let size = u16::try_from(num).unwrap_or(0);
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX || vring.ring.is_some() {
            return Err(refused(&format_args!(
                "a queue is a power of two up to {QUEUE_SIZE_MAX} long, set while it is stopped; {num} is not"
            )));
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
        if vring.ring.is_some() {
            return Err(Error::InvalidOperation("SET_VRING_ADDR of a running ring"));
        }
        vring.addresses = Some(RingAddresses {
            descriptors: descriptor,
            avail: available,
            used,
        });
        self.start_if_ready(queue)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let (_, vring) = self.vring(index)?;
        vring.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let (queue, _) = self.vring(index)?;
        self.stop(queue);
        let (_, vring) = self.vring(index)?;
        vring.kick = None;
        vring.call = None;
        Ok(VhostUserVringState::new(index, u32::from(vring.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let Some(fd) = fd else {
            return unsupported("a ring without a kick descriptor");
        };
        check_event(&fd)?;
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.kick = Some(Arc::new(fd.into()));
        self.start_if_ready(queue)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = fd.as_ref().map(signal_of).transpose()?;
        let (_, vring) = self.vring(u32::from(index))?;
        vring.call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = fd.as_ref().map(signal_of).transpose()?;
        let (_, vring) = self.vring(u32::from(index))?;
        vring.error = error;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(QUEUE_COUNT))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let (queue, vring) = self.vring(index)?;
        vring.is_enabled = enable;
        if enable {
            return self.start_if_ready(queue);
        }
        self.stop(queue);
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let config = self.core().limits().encode();
        let end = offset.checked_add(size).ok_or(Error::InvalidParam)?;
        let part = config.get(offset as usize..end as usize);
        Ok(part.ok_or(Error::InvalidParam)?.to_vec())
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

    fn get_inflight_fd(
        &mut self,
        _wanted: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        unsupported("GET_INFLIGHT_FD: what is in flight is sent again after READY")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        unsupported("SET_INFLIGHT_FD")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        unsupported("GET_MAX_MEM_SLOTS")
    }

    fn add_mem_region(
        &mut self,
        _wire: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        unsupported("ADD_MEM_REG")
    }

    fn remove_mem_region(&mut self, _wire: &VhostUserSingleMemoryRegion) -> Result<()> {
        unsupported("REM_MEM_REG")
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
