// SPDX-License-Identifier: Apache-2.0
//! What one process leaves to another that goes on with its devices (Taiji 4.4).
//!
//! ```text
//!   old   hush ──► park ───────────────────────────────────► end
//!                    └─ devices ─► add_parked_… ─► admit        new
//! ```

use super::{Command, Device, Dpu, DpuError, EngineGone, Place};
use crate::device::ParkedDevice;
use std::{
    path::PathBuf,
    sync::mpsc::{RecvTimeoutError, channel},
    time::{Duration, Instant},
};

impl Dpu {
    /// Lets devices that were parked read messages and accept front ends.
    pub fn admit(&self) {
        self.lock()
            .here()
            .for_each(|device| device.endpoint.admit());
        self.tell_engines(|| Command::Look);
    }

    /// Waits until no message of a front end is under way, and then until the kernel has no request of ours on any
    /// image; reads and begins none from then on: what comes stays in sockets and rings. [`Self::park`] is next, and
    /// waits for no disk and no front end then.
    ///
    /// # Errors
    /// [`DpuError::Unanswered`], [`DpuError::Gone`]. Devices and engines go on as before.
    pub fn hush(&self, wait: Duration) -> Result<(), DpuError> {
        let resting: Vec<_> = self
            .lock()
            .here()
            .map(|device| device.endpoint.rest())
            .collect();
        // Rings run meanwhile, and the bound is the same for all.
        for device in resting {
            device.wait();
        }
        let hushed = self.try_hush(wait);
        if hushed.is_err() {
            self.lock()
                .here()
                .for_each(|device| device.endpoint.speak());
            self.tell_engines(|| Command::Speak);
        }
        hushed
    }

    fn tell_engines(&self, command: fn() -> Command) {
        for engine in &self.engines {
            if engine.shared.mailbox.post(command()).is_err() {
                tracing::debug!("an engine had ended already");
            }
        }
    }

    fn try_hush(&self, wait: Duration) -> Result<(), DpuError> {
        let until = Instant::now() + wait;
        let mut asked = Vec::new();
        for engine in &self.engines {
            let (tell, hushed) = channel();
            let posted = engine.shared.mailbox.post(Command::Hush(tell));
            posted.map_err(EngineGone::from)?;
            asked.push(hushed);
        }
        for (engine, hushed) in asked.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            hushed.recv_timeout(left).map_err(|error| match error {
                RecvTimeoutError::Disconnected => EngineGone.into(),
                RecvTimeoutError::Timeout => DpuError::Unanswered {
                    engine,
                    waited_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                },
            })?;
        }
        Ok(())
    }

    /// The first device with a front end that cannot be handed over, since its requests in flight are recorded
    /// nowhere.
    #[must_use]
    pub fn unrecorded(&self) -> Option<(PathBuf, u16)> {
        let devices = self.lock();
        let mut queues = devices.here().filter_map(|device| {
            let queue = device.endpoint.control().unrecorded()?;
            Some((device.config.socket.clone(), queue))
        });
        queues.next()
    }

    /// Stops all devices and the engines, for a process that replaces this one and goes on with the devices. Requests
    /// that are not done stay in the in-flight regions; all that was given to the kernel is done when this returns.
    pub fn park(&self) -> Vec<ParkedDevice> {
        let slots = std::mem::take(&mut self.lock().slots);
        let mut here: Vec<Device> = (slots.into_iter())
            .filter_map(|place| match place {
                Place::Here(device) => Some(device),
                Place::Free | Place::Ending(_) => None,
            })
            .collect();
        // All at once: each takes as long as its I/O under way.
        for device in &here {
            device.endpoint.control().shared.kind.begin_leaving();
            device.endpoint.park();
        }
        let parked = here.iter_mut().filter_map(|device| {
            let parked = device.endpoint.parked();
            let kind = &device.endpoint.control().shared.kind;
            let mut nic = kind.hand_over();
            kind.release();
            let parked = parked?;
            if let (Some(nic), None) = (&mut nic, &parked.front_end) {
                // They are for the guest that has gone, and nobody else's.
                nic.packets.clear();
            }
            Some(ParkedDevice { nic, ..parked })
        });
        let parked = parked.collect();
        self.end_engines();
        parked
    }
}
