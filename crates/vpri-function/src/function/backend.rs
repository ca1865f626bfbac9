// SPDX-License-Identifier: Apache-2.0
//! [`FunctionBackend`]: what the function does with a driver's settings.

use super::{
    memory::FunctionMemory,
    rings::QUEUE_SIZE_MAX,
    state::{F_EVENT_INDEX, SharedState},
};
use crate::wire::{EVENT_QUEUE, QUEUE_COUNT, feature};
use pagetide_sys::signal::EventSignal;
use pagetide_vhost_backend::{
    Backend, KickChange, Offer, RegionShape, RingSettings, Runs, Stop, signal_of,
};
use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};
use vhost::vhost_user::{Error, Result, VhostUserProtocolFeatures};

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
    | feature::BLANK
    | feature::INJECT
    | feature::TOUCHED;

/// The function as one driver has set it up. Its state is shared with the engines, so it is locked
/// for each message.
pub(super) struct FunctionBackend(pub SharedState);

impl Backend for FunctionBackend {
    type Memory = FunctionMemory;

    fn offer(&self) -> Offer {
        Offer {
            features: FEATURES,
            // A driver of before virtio 1 has another layout of rings.
            required_features: F_VERSION_1,
            protocol_features: VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::RESET_DEVICE,
            queue_count: QUEUE_COUNT,
            queues_told: QUEUE_COUNT,
            queue_size_max: QUEUE_SIZE_MAX,
            regions_max: 0,
        }
    }

    fn set_features(&mut self, features: u64) {
        self.0.lock().features = features;
    }

    fn config(&self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        let config = self.0.lock().core.limits().encode();
        let end = offset.checked_add(bytes)?;
        let part = config.get(offset as usize..end as usize)?;
        Some(part.to_vec())
    }

    fn map(&mut self, regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<FunctionMemory> {
        let domains = Arc::clone(self.0.lock().core.domains());
        FunctionMemory::new(regions, &domains).map_err(|error| refused(&error))
    }

    fn use_memory(&mut self, memory: FunctionMemory) -> Result<()> {
        self.0.lock().outside.memory = memory;
        Ok(())
    }

    fn start(&mut self, queue: u16, ring: &RingSettings) -> Result<Runs> {
        let call = ring.call.as_ref().map(signal_of).transpose()?;
        let error = ring.error.as_ref().map(signal_of).transpose()?;
        let mut state = self.0.lock();
        let runs = state.start(queue, ring).map_err(|error| refused(&error))?;
        if let Some(vring) = state.vrings.get_mut(usize::from(queue)) {
            vring.call = call;
            vring.error = error;
        }
        state.follow_phase();
        Ok(runs)
    }

    fn stop(&mut self, queue: u16, _how: Stop) -> Result<u16> {
        let mut state = self.0.lock();
        let vring = state.vrings.get_mut(usize::from(queue));
        let base = vring.ok_or(Error::InvalidParam)?.stop();
        if queue == EVENT_QUEUE {
            // Without it, the driver is gone.
            state.hang_up();
        } else {
            state.follow_phase();
        }
        Ok(base)
    }

    fn set_kick(&mut self, queue: u16, kick: &Arc<OwnedFd>) -> KickChange {
        if let Some(vring) = self.0.lock().vrings.get_mut(usize::from(queue)) {
            vring.kick = Some(Arc::clone(kick));
        }
        KickChange::Done
    }

    fn set_call(&mut self, queue: u16, call: Option<EventSignal>) -> Result<()> {
        if let Some(vring) = self.0.lock().vrings.get_mut(usize::from(queue)) {
            vring.call = call;
        }
        Ok(())
    }

    fn set_error(&mut self, queue: u16, error: Option<EventSignal>) {
        if let Some(vring) = self.0.lock().vrings.get_mut(usize::from(queue)) {
            vring.error = error;
        }
    }

    fn end(&mut self) {
        self.0.lock().forget_driver();
    }
}

fn refused(error: &dyn std::fmt::Display) -> Error {
    tracing::warn!(%error, "a driver's message is refused");
    Error::InvalidParam
}
