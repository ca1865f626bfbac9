// SPDX-License-Identifier: Apache-2.0
//! [`Engine`]: what one engine thread has.

use super::{
    bounce::BounceBuffers,
    command::EngineShared,
    device::Device,
    fair::Fair,
    io::Io,
    kicks::{BELL_TOKEN, Kicks},
    patience::Patience,
    reports::Reports,
    scratch::Scratch,
};
use crate::{parked::ParkedChains, ring::IoRing};
use pagetide_vpri::{DeviceEnd, Doorbell, FaultAssist, HostPresence};
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, mpsc::Sender},
    time::Duration,
};

/// Completions taken per turn, and page responses taken per turn.
pub(super) const EVENTS_PER_TURN: usize = 128;

/// What an engine is built from. It creates the rest on its own thread.
pub(crate) struct Seed {
    pub index: usize,
    pub ring_entries: u32,
    /// Page requests that may be outstanding.
    pub fault_queue_entries: usize,
    pub poll: Duration,
    /// How long a chain waits for its pages before it fails; `None` means forever.
    pub iopf_timeout: Option<Duration>,
    pub lock: OwnedFd,
    pub shared: Arc<EngineShared>,
    pub device_end: DeviceEnd,
    pub bell: Arc<Doorbell>,
}

/// The engine itself.
pub(crate) struct Engine {
    pub io: Io,
    pub shared: Arc<EngineShared>,
    pub devices: Vec<Option<Device>>,
    /// Queues that are running or stopping.
    pub active: Vec<(usize, u16)>,
    /// Slot of the device that goes first in the next turn.
    pub first: usize,
    pub(super) kicks: Kicks,
    pub device_end: DeviceEnd,
    /// Presence of the host at the last check.
    pub host_seen: HostPresence,
    pub bell: Arc<Doorbell>,
    pub assist: Option<Arc<dyn FaultAssist>>,
    pub(super) patience: Patience,
    pub ending: bool,
    /// It begins nothing on images.
    pub(super) hush: Option<Hush>,
}

/// An engine that begins nothing on images, before the process is replaced.
pub(super) enum Hush {
    /// It was asked, and the kernel still has requests of it.
    Asked(Sender<()>),
    /// It has told that the kernel has none.
    Told,
}

impl Engine {
    /// Creates the engine on the calling thread, which must then [`Self::run`] it.
    pub fn new(seed: Seed) -> io::Result<Self> {
        let mut ring = IoRing::new(seed.ring_entries, seed.lock)?;
        ring.poll(seed.bell.as_fd(), BELL_TOKEN)?;
        Ok(Self {
            io: Io {
                ring,
                fair: Fair::new(seed.ring_entries as usize),
                parked: ParkedChains::new(seed.index, seed.iopf_timeout)
                    .with_capacity(seed.fault_queue_entries),
                bounces: BounceBuffers::new(seed.index),
                reports: Reports::new(seed.index),
                scratch: Scratch::new(),
            },
            shared: seed.shared,
            devices: Vec::new(),
            active: Vec::new(),
            first: 0,
            kicks: Kicks::new(),
            device_end: seed.device_end,
            host_seen: HostPresence::Here,
            bell: seed.bell,
            assist: None,
            patience: Patience::new(seed.poll),
            ending: false,
            hush: None,
        })
    }
}
