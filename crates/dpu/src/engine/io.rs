// SPDX-License-Identifier: Apache-2.0
//! [`Io`]: what all chains of an engine share, and who owns what.
//!
//! | what | owner |
//! |---|---|
//! | the io_uring, and the jobs that the kernel has | [`Io::ring`] |
//! | which tenant may begin how much | [`Io::fair`] |
//! | parked chains, and their page requests | [`Io::parked`] |
//! | bounce buffers, and reads whose pages are being installed | [`Io::bounces`] |
//! | counters, accounts, the access log, the time of the batch | [`Io::reports`] |
//! | memory that is reused from request to request | [`Io::scratch`] |
//! | a queue: its rings, its descriptors, its chains that have not begun | its [`Device`](super::device::Device) |
//! | the leases on the pages of a chain | the chain: [`Request::leases`], from its preparation to its answer |
//!
//! The parts do not know one another. The stages of a chain (see [`super`]) are methods of [`Io`],
//! each in its file, because a stage uses several parts.

use super::{
    bounce::BounceBuffers,
    fair::Fair,
    queue::{EngineQueue, PARKED_PER_DEVICE_MAX},
    reports::Reports,
    request::Request,
    scratch::Scratch,
};
use crate::{parked::ParkedChains, ring::IoRing, shared::DeviceShared};
use std::sync::atomic::Ordering;

/// See the module documentation.
pub(crate) struct Io {
    pub ring: IoRing<Request>,
    pub fair: Fair,
    pub parked: ParkedChains,
    pub bounces: BounceBuffers,
    pub reports: Reports,
    pub scratch: Scratch,
}

/// What a turn has done.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Progress {
    pub anything: bool,
}

impl Io {
    /// Charges a tenant, and its queue, for something the tenant began.
    pub fn charge(&mut self, queue: &mut EngineQueue, cost_bytes: u64) {
        queue.credit.spend(cost_bytes);
        self.fair.charge(queue.key.device, cost_bytes);
    }

    /// True if a chain of the device could be parked.
    pub fn may_park(&self, device: &DeviceShared) -> bool {
        let parked = self.reports.counters(device).parked.load(Ordering::Relaxed);
        !self.parked.is_queue_full() && parked < PARKED_PER_DEVICE_MAX as u64
    }
}
