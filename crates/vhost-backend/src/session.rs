// SPDX-License-Identifier: Apache-2.0
//! [`Session`]: what a front end has set so far, and which rings run.

use crate::{
    backend::{Backend, RegionShape, Stop},
    event::check_event,
    record::{InflightRecord, ParkError, Record},
    ring::{Enabled, RingSettings, Runs},
};
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
};
use vhost::vhost_user::{Error, Result};

/// `VHOST_USER_F_PROTOCOL_FEATURES`: without it, rings are enabled from the start.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Whether a message is one of our own, which is for the reader of messages only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prelude {
    UnderWay,
    Over,
}

/// Whether this connection began with a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Handshake {
    Made,
    #[default]
    Missing,
}

/// Whether the message just refused was answered, so that the front end knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Answered {
    Yes,
    #[default]
    No,
}

/// Most files of memory that are kept for a front end, in case another process is to go on with it: all others of
/// this process need descriptors, too.
pub(crate) const REGION_FILES_MAX: usize = 64;

/// One front end's connection to a device.
pub struct Session<B> {
    pub(crate) backend: B,
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    pub(crate) rings: Vec<RingSettings>,
    /// Its memory, with the files that the device has accepted: closing those waits for nobody.
    pub(crate) memory: Vec<(RegionShape, OwnedFd)>,
    /// Regions beyond [`REGION_FILES_MAX`], whose files are not kept.
    pub(crate) unkept_regions: usize,
    /// Its in-flight region, likewise.
    pub(crate) inflight: Option<InflightRecord>,
    pub(crate) answered: Answered,
    /// Unneeded descriptors from the front end; see the crate's documentation.
    pub(crate) discarded: Vec<OwnedFd>,
    pub(crate) handshake: Handshake,
    pub(crate) prelude: Prelude,
    /// It has ended: later messages of its front end have no effect.
    has_ended: bool,
}

impl<B: Backend> Session<B> {
    /// A session in which the front end has set nothing yet.
    pub(crate) fn new(backend: B) -> Self {
        let queues = 0..backend.offer().queue_count;
        Self {
            backend,
            features: 0,
            protocol_features: 0,
            memory: Vec::new(),
            unkept_regions: 0,
            inflight: None,
            rings: queues.map(|_| RingSettings::default()).collect(),
            answered: Answered::No,
            discarded: Vec::new(),
            handshake: Handshake::Missing,
            prelude: Prelude::Over,
            has_ended: false,
        }
    }

    /// Stops everything and drops the front end's memory. Further calls do nothing.
    pub(crate) fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        self.backend.hurry();
        for queue in 0..self.queue_count() {
            if let Err(error) = self.stop(queue, Stop::Abandon) {
                tracing::error!(%error, queue, "a queue could not be stopped");
            }
        }
        if let Err(error) = self.backend.use_memory(B::Memory::default()) {
            tracing::error!(%error, "a device could not be made to release guest memory");
        }
        self.memory.clear();
        self.inflight = None;
        self.backend.end();
    }

    /// Stops every ring and gives away everything that the front end has set. Its memory stays mapped, and requests
    /// that are not done stay in its in-flight region: the process is to be replaced. Later messages have no
    /// effect.
    pub(crate) fn park(&mut self) -> std::result::Result<Record, ParkError> {
        if self.has_ended {
            return Err(ParkError::Over);
        }
        let is_unrecorded = |(ring, queue): (&RingSettings, u16)| {
            ring.runs == Runs::Yes && !self.backend.keeps_record(queue)
        };
        if self.inflight.is_none()
            && let Some(queue) = self.rings.iter().zip(0..).position(is_unrecorded)
        {
            return Err(ParkError::NoRecord { queue });
        }
        if self.unkept_regions > 0 {
            return Err(ParkError::Regions {
                regions: self.memory.len() + self.unkept_regions,
            });
        }
        self.has_ended = true;
        self.backend.hurry();
        for queue in 0..self.queue_count() {
            self.stop(queue, Stop::Abandon).map_err(ParkError::Stop)?;
        }
        Ok(Record {
            features: self.features,
            protocol_features: match self.handshake {
                Handshake::Made => Some(self.protocol_features),
                Handshake::Missing => None,
            },
            memory: std::mem::take(&mut self.memory),
            inflight: self.inflight.take(),
            rings: std::mem::take(&mut self.rings),
        })
    }

    /// True if the front end continues where another connection ended, without querying our
    /// features.
    pub(crate) fn lacks_handshake(&self) -> bool {
        self.handshake == Handshake::Missing
    }

    /// True if the front end has been told that its last message was refused.
    pub(crate) fn was_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered) == Answered::Yes
    }

    /// Descriptors to be closed.
    pub(crate) fn take_discarded(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.discarded)
    }

    /// Refuses what needs a front end that is still there.
    pub(crate) fn check_not_ended(&self) -> Result<()> {
        match self.has_ended {
            true => Err(Error::BackendInternalError),
            false => Ok(()),
        }
    }

    pub(crate) fn ring(&mut self, index: u32) -> Result<(u16, &mut RingSettings)> {
        let queue = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let ring = self.rings.get_mut(usize::from(queue)).ok_or_else(|| {
            tracing::warn!(
                index,
                "the front end named a queue that the device does not have"
            );
            Error::InvalidParam
        })?;
        Ok((queue, ring))
    }

    /// The eventfd that a front end has sent. A descriptor of another kind is refused, and closed
    /// elsewhere.
    pub(crate) fn event(&mut self, file: File) -> Result<OwnedFd> {
        let event = OwnedFd::from(file);
        match check_event(event.as_fd()) {
            Ok(()) => Ok(event),
            Err(refused) => {
                self.discarded.push(event);
                Err(refused)
            }
        }
    }

    /// Starts a ring if it has all it needs.
    pub(crate) fn start_if_ready(&mut self, queue: u16) -> Result<()> {
        let ring = &mut self.rings[usize::from(queue)];
        let has_all = ring.addresses.is_some() && ring.kick.is_some();
        let enabled = ring.enabled == Enabled::Yes || self.features & F_PROTOCOL_FEATURES == 0;
        let required = self.backend.offer().required_features;
        let negotiated = self.features & required == required;
        if ring.runs == Runs::Yes || !has_all || !enabled || !negotiated || self.has_ended {
            return Ok(());
        }
        ring.runs = self.backend.start(queue, ring)?;
        Ok(())
    }

    /// Stops a ring if it runs, and waits until nothing of it is under way.
    pub(crate) fn stop(&mut self, queue: u16, how: Stop) -> Result<()> {
        let ring = &mut self.rings[usize::from(queue)];
        if std::mem::take(&mut ring.runs) == Runs::Yes {
            ring.base = self.backend.stop(queue, how)?;
        }
        Ok(())
    }

    /// Stops all rings for a front end that resets the device. Each runs again only once it has another kick
    /// descriptor.
    pub(crate) fn disable_all(&mut self) -> Result<()> {
        self.stop_all(Stop::Abandon)?;
        for ring in &mut self.rings {
            ring.enabled = Enabled::No;
            ring.kick = None;
            ring.call = None;
        }
        Ok(())
    }

    /// Whether a ring runs.
    pub(crate) fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.runs == Runs::Yes)
    }

    pub(crate) fn stop_all(&mut self, how: Stop) -> Result<()> {
        (0..self.queue_count()).try_for_each(|queue| self.stop(queue, how))
    }

    pub(crate) fn start_all(&mut self) -> Result<()> {
        (0..self.queue_count()).try_for_each(|queue| self.start_if_ready(queue))
    }

    fn queue_count(&self) -> u16 {
        self.backend.offer().queue_count
    }
}
