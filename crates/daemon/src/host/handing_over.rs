// SPDX-License-Identifier: Apache-2.0
//! The end of the work of a daemon that another program is about to succeed.
//!
//! ```text
//!   recording of DMA completed      may fail: its disk does not answer
//!   engines hushed                  may fail: an image's disk does not answer
//!   ─────────────────────────────── from here on there is no way back in this process
//!   budget, feed, limits, reclaim threads stopped; devices parked
//! ```
//! Faults of VMs are served until the process is replaced.

use super::{Host, failure::failed};
use crate::{control::ControlError, steps::Steps};
use pagetide_dpu::ParkedDevice;
use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

/// How long a recording of DMA may take to be completed.
const RECORDING_WAIT: Duration = Duration::from_secs(3);
/// How long I/O of images that is under way may take: more than a disk that works takes for anything. Neither `exec`
/// nor a successor can go on before it is done.
const IMAGES_WAIT: Duration = Duration::from_secs(1);

impl Host {
    /// Stops all work, so that nothing is half done.
    ///
    /// # Errors
    /// A disk does not answer. Everything goes on, but for a recording, which has ended.
    pub(super) fn stop_for_successor(&self) -> Result<Vec<ParkedDevice>, ControlError> {
        let mut steps = Steps::begin();
        self.complete_recording()?;
        steps.done("recording");
        // Requests of disks wait from here on.
        self.devices.hush(IMAGES_WAIT)?;
        steps.done("hush");
        self.vms.close();
        steps.done("vms closed");
        self.shared.budget.stop();
        steps.done("budget");
        self.shared.feed.stop();
        steps.done("feed");
        let vms = self.vms.all();
        // All at once: each takes as long as the step that it is in.
        for vm in &vms {
            vm.core.limit.stop();
        }
        for vm in &vms {
            // Ended by nobody any more: its pool says how far it has come.
            drop(vm.stop_reclaim_thread());
            vm.core.counters.sync();
        }
        steps.done("reclaim");
        let parked = self.devices.park();
        steps.done("disks");
        tracing::info!(us = %steps, "stopped for a successor");
        Ok(parked)
    }

    fn complete_recording(&self) -> Result<(), ControlError> {
        if self.shared.feed.recording().is_err() {
            // There was none.
            return Ok(());
        }
        let feed = Arc::clone(&self.shared.feed);
        let (tell, completed) = mpsc::channel();
        let ending = thread::Builder::new().name("pt-log-end".into());
        ending
            .spawn(move || {
                if let Err(error) = feed.stop_recording() {
                    tracing::warn!(%error, "a recording does not end well");
                }
                if tell.send(()).is_err() {
                    tracing::warn!("a recording is completed late");
                }
            })
            .map_err(failed)?;
        completed.recv_timeout(RECORDING_WAIT).map_err(|_| {
            ControlError::refused(format!(
                "the files of a recording of DMA are not completed within {} s: their disk does not answer; the recording \
                 has ended",
                RECORDING_WAIT.as_secs()
            ))
        })
    }
}
