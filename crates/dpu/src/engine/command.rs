// SPDX-License-Identifier: Apache-2.0
//! Commands of control threads to an engine, and the part of an engine that those threads see.

use crate::{
    chain::Indirect,
    inflight::InflightQueue,
    kind::work::QueueRole,
    mailbox::Mailbox,
    memory::DeviceMemory,
    net::record::{Tie, file::RecordFile},
    shared::{DeviceShared, OnFault},
};
use pagetide_sys::signal::EventSignal;
use pagetide_vpri::{AccessPen, Doorbell, FaultAssist};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, atomic::AtomicU64, mpsc::Sender},
};
use virtio_queue::Queue;

/// A command to an engine. Devices are named by their slot.
pub(crate) enum Command {
    AddDevice(AddDevice),
    /// All its queues have been stopped.
    RemoveDevice {
        device: usize,
        reply: Sender<io::Result<()>>,
    },
    /// Replaces the memory. No queue may use what the new memory lacks.
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
        /// Receives the position at which the avail ring is to be read next.
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
    /// Begins nothing more on images. The answer comes once the kernel has nothing of this engine any more.
    Hush(Sender<()>),
    /// Goes on after that.
    Speak,
    /// Only wakes the engine, to check state that was set elsewhere.
    Look,
    /// Sent when all queues have been stopped.
    ShutDown,
}

/// When a command of a front end is obeyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// As soon as the engine takes it.
    AtOnce,
    /// Once the tenant has no debt.
    InItsTurn,
}

impl Command {
    /// The slot of the tenant, if a front end can cause the command by a message.
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
            | Self::Hush(_)
            | Self::Speak
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

/// How to stop a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopHow {
    /// Completes all popped chains first. Impossible without a host: see [`super::stop`].
    Drain,
    /// Completes I/O under way; parked chains stay in the in-flight region.
    Abandon,
}

/// The record of the chains that a queue holds.
#[derive(Debug)]
pub(crate) struct RecordSetup {
    pub file: RecordFile,
    pub tie: Tie,
}

/// A queue as described by its front end.
pub(crate) struct QueueSetup {
    pub number: u16,
    /// Rings and sizes, checked; ready to be made ready.
    pub queue: Queue,
    /// Where to read the avail ring next, unless the in-flight region says otherwise.
    pub next_avail: u16,
    pub indirect: Indirect,
    /// What its chains are made of.
    pub role: QueueRole,
    /// What the driver has accepted.
    pub features: u64,
    pub kick: Option<OwnedFd>,
    pub call: Option<EventSignal>,
    pub error: Option<EventSignal>,
    pub inflight: Option<InflightQueue>,
    /// Of posted chains.
    pub record: Option<RecordSetup>,
    pub on_fault: OnFault,
}

/// The part of an engine that other threads see.
pub(crate) struct EngineShared {
    pub mailbox: Mailbox<Command>,
    pub sleeps: AtomicU64,
}

impl EngineShared {
    pub fn new(bell: Arc<Doorbell>) -> Self {
        Self {
            mailbox: Mailbox::new(bell),
            sleeps: AtomicU64::new(0),
        }
    }
}

/// Answers a control thread, which may be gone.
pub(super) fn answer<T>(reply: &Sender<T>, value: T) {
    if reply.send(value).is_err() {
        tracing::debug!("the sender no longer waits for this engine's answer");
    }
}
