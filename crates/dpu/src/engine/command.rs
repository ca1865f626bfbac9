// SPDX-License-Identifier: Apache-2.0
//! What control threads ask of an engine.

use super::queue::OnFault;
use crate::{chain::Indirect, inflight::InflightQueue, memory::DeviceMemory, shared::DeviceShared};
use pagetide_sys::signal::EventSignal;
use pagetide_vpri::{AccessPen, FaultAssist};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, mpsc::Sender},
};
use virtio_queue::Queue;

/// A command to an engine. Devices are named by their slot.
pub(crate) enum Command {
    AddDevice(AddDevice),
    /// Its queues have been stopped.
    RemoveDevice {
        device: usize,
        reply: Sender<io::Result<()>>,
    },
    /// Replaces the memory; whatever is gone from it must be used by no queue.
    SetMemory {
        device: usize,
        memory: DeviceMemory,
        reply: Sender<()>,
    },
    StartQueue {
        device: usize,
        setup: Box<QueueSetup>,
        reply: Sender<()>,
    },
    StopQueue {
        device: usize,
        queue: u16,
        how: StopHow,
        /// Told where the avail ring is to be read next.
        reply: Sender<u16>,
    },
    SetCall {
        device: usize,
        queue: u16,
        call: Option<EventSignal>,
        reply: Sender<()>,
    },
    SetAssist(Arc<dyn FaultAssist>),
    SetPen(AccessPen),
    /// Nothing but a reason to wake up and look at what has been set elsewhere.
    Look,
    /// To be sent when all queues have been stopped.
    ShutDown,
}

/// When a command of a front end is obeyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// As soon as it is seen.
    AtOnce,
    /// Once the tenant owes nothing.
    InItsTurn,
}

impl Command {
    /// The slot of the tenant on whose behalf it is, if a front end can ask for it by a message.
    pub fn tenant(&self) -> Option<(usize, When)> {
        match self {
            Self::SetMemory { device, .. }
            | Self::StartQueue { device, .. }
            | Self::SetCall { device, .. } => Some((*device, When::InItsTurn)),
            Self::StopQueue { device, .. } => Some((*device, When::AtOnce)),
            Self::AddDevice(_)
            | Self::RemoveDevice { .. }
            | Self::SetAssist(_)
            | Self::SetPen(_)
            | Self::Look
            | Self::ShutDown => None,
        }
    }
}

/// A new device.
pub(crate) struct AddDevice {
    pub device: usize,
    pub queue_count: u16,
    pub shared: Arc<DeviceShared>,
    pub reply: Sender<io::Result<()>>,
}

/// How a queue is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopHow {
    /// All that was popped is completed first. Without a host that cannot be: see [`super::stop`].
    Drain,
    /// I/O under way is completed; parked chains stay in the in-flight region.
    Abandon,
}

/// A queue as its front end has described it.
pub(crate) struct QueueSetup {
    pub number: u16,
    /// Rings and sizes, checked; ready to be made ready.
    pub queue: Queue,
    /// Where the avail ring is to be read next, if the in-flight region does not know better.
    pub next_avail: u16,
    pub indirect: Indirect,
    pub kick: Option<OwnedFd>,
    pub call: Option<EventSignal>,
    pub error: Option<EventSignal>,
    pub inflight: Option<InflightQueue>,
    pub on_fault: OnFault,
}
