// SPDX-License-Identifier: Apache-2.0
//! [`Control`]: what the control threads of a device share.

use crate::{
    engine::command::{AddDevice, Command, EngineShared},
    kind::Kind,
    mailbox::Ended,
    ram::RamPolicy,
    shared::{DeviceShared, Leaving},
};
use pagetide_addr::FileKey;
use pagetide_sys::guest_ram::Sealed;
use pagetide_vhost_backend::Runs;
use pagetide_vpri::{DomainTable, LookUp};
use std::{
    collections::BTreeSet,
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{RecvError, channel},
    },
};

/// Whether a front end is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceState {
    /// No front end is connected.
    #[default]
    Listening,
    /// A front end is connected.
    Connected,
    /// Stopped; the report says why. A new connection starts afresh.
    Stopped,
}

/// An engine does not answer: its io_uring has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the DPU engine has ended; see the log, and restart the daemon")]
pub struct EngineGone;

impl From<Ended> for EngineGone {
    fn from(_: Ended) -> Self {
        Self
    }
}

impl From<RecvError> for EngineGone {
    fn from(_: RecvError) -> Self {
        Self
    }
}

/// State shared by the control threads of one device.
pub(crate) struct Control {
    pub slot: usize,
    pub shared: Arc<DeviceShared>,
    pub engines: Vec<Arc<EngineShared>>,
    pub domains: Arc<DomainTable>,
    pub look_up: LookUp,
    pub queue_count: u16,
    pub ram: RamPolicy,
    pub socket: PathBuf,
    /// Where what outlives this process is kept.
    pub state_dir: PathBuf,
    status: Mutex<Status>,
}

#[derive(Debug, Default)]
struct Status {
    connected: Presence,
    files: Vec<FileKey>,
    sealed: Option<Sealed>,
    /// Queues that run without a record of their requests in flight.
    unrecorded: BTreeSet<u16>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    #[default]
    Nobody,
    There,
}

/// The parts of a device.
pub(crate) struct Parts {
    pub slot: usize,
    pub shared: Arc<DeviceShared>,
    pub engines: Vec<Arc<EngineShared>>,
    pub domains: Arc<DomainTable>,
    pub look_up: LookUp,
    pub queue_count: u16,
    pub ram: RamPolicy,
    pub socket: PathBuf,
    pub state_dir: PathBuf,
}

impl Control {
    pub fn new(parts: Parts) -> Self {
        Self {
            slot: parts.slot,
            shared: parts.shared,
            engines: parts.engines,
            domains: parts.domains,
            look_up: parts.look_up,
            queue_count: parts.queue_count,
            ram: parts.ram,
            socket: parts.socket,
            state_dir: parts.state_dir,
            status: Mutex::default(),
        }
    }

    /// The engine that serves a queue.
    pub fn engine_of(&self, queue: u16) -> &EngineShared {
        let group = self.shared.kind.group_of(queue);
        &self.engines[Kind::engine_of(group, self.slot, self.engines.len())]
    }

    /// Called when the front end goes: requests that its queues have not begun are not done, not
    /// even by queues that are draining now.
    pub fn hurry(&self) {
        self.shared.set_leaving(Leaving::Yes);
        for engine in &self.engines {
            if let Err(error) = engine.mailbox.post(Command::Look) {
                tracing::debug!(%error, "an engine has ended already");
            }
        }
    }

    /// Adds the device to every engine, or to none if one fails.
    pub fn add_to_engines(&self) -> Result<io::Result<()>, EngineGone> {
        let added = self.try_add_to_engines()?;
        if added.is_err() {
            // The engines before that one have it. Their answer does not matter.
            self.remove_from_engines()?.unwrap_or_else(|error| {
                tracing::warn!(%error, "a device that was not added could not be removed again");
            });
        }
        Ok(added)
    }

    fn try_add_to_engines(&self) -> Result<io::Result<()>, EngineGone> {
        for engine in &self.engines {
            let (reply, added) = channel();
            engine.mailbox.post(Command::AddDevice(AddDevice {
                device: self.slot,
                queue_count: self.queue_count,
                shared: self.shared.clone(),
                reply,
            }))?;
            if let Err(error) = added.recv()? {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    /// Removes the device from every engine. Its queues have stopped.
    pub fn remove_from_engines(&self) -> Result<io::Result<()>, EngineGone> {
        let mut outcome = Ok(());
        for engine in &self.engines {
            let (reply, removed) = channel();
            engine.mailbox.post(Command::RemoveDevice {
                device: self.slot,
                reply,
            })?;
            outcome = outcome.and(removed.recv()?);
        }
        Ok(outcome)
    }

    pub fn set_presence(&self, connected: Presence) {
        self.status().connected = connected;
    }

    pub fn set_memory(&self, files: Vec<FileKey>, sealed: Option<Sealed>) {
        let mut status = self.status();
        status.files = files;
        status.sealed = sealed;
    }

    /// Whether the memory that the device uses now is sealed; `None` without memory.
    pub fn sealed(&self) -> Option<Sealed> {
        self.status().sealed
    }

    /// Files of guest RAM that the device uses now.
    pub fn files(&self) -> Vec<FileKey> {
        self.status().files.clone()
    }

    /// A queue runs, or runs no more, without a record of its requests in flight.
    pub fn set_unrecorded(&self, queue: u16, runs: Runs) {
        let mut status = self.status();
        match runs {
            Runs::Yes => status.unrecorded.insert(queue),
            Runs::No => status.unrecorded.remove(&queue),
        };
    }

    /// The first such queue.
    pub fn unrecorded(&self) -> Option<u16> {
        self.status().unrecorded.first().copied()
    }

    pub fn state(&self) -> DeviceState {
        if self.shared.is_stopped() {
            return DeviceState::Stopped;
        }
        match self.status().connected {
            Presence::Nobody => DeviceState::Listening,
            Presence::There => DeviceState::Connected,
        }
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
