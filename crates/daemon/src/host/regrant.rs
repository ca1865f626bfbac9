// SPDX-License-Identifier: Apache-2.0
//! What a recovery leaves for later: devices are granted the pages that are present, and vCPUs lose the write
//! protection that eviction rounds of the dead daemon left.
//!
//! ```text
//!   recovery   words ─ wake ─ threads start: faults are served
//!                                 └─ this thread, section by section, its lock held shared:
//!                                      present pages of no round ─► granted to all devices
//! ```
//! Threads of the VMM wait until faults are served, so nothing else may come before. This work grows with what is
//! present: of 16 GiB of dense RAM each page is looked up in the page cache and in the VMM's page table. It is not
//! needed for anything to be right. A device without a page faults on it and gets it; a vCPU that writes to a
//! protected page faults, and the protection is lifted.

use super::{core::VmCore, failure::failed};
use crate::control::ControlError;
use pagetide_sys::cpu::{self, Urgency};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

/// Faults come first; but it must not be without a CPU for long while it holds a section's lock.
const URGENCY: Urgency = Urgency::Yielding(10);

/// The thread that does it.
pub(super) struct Regrant {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Regrant {
    /// Begins with a VM that has just been recovered and is served.
    ///
    /// # Errors
    /// There can be no thread.
    pub(super) fn start(core: &Arc<VmCore>) -> Result<Self, ControlError> {
        let ends = Arc::new(AtomicBool::new(false));
        let (core, told) = (Arc::clone(core), Arc::clone(&ends));
        let name = format!("pt-grant-{}", core.vmm.pid());
        let thread = std::thread::Builder::new().name(name);
        let thread = thread.spawn(move || grant_all(&core, &told));
        Ok(Self {
            ends,
            thread: thread.map_err(failed)?,
        })
    }

    /// Ends it after the section that it is at: the VM is being detached, or has ended.
    pub(super) fn end(self) {
        self.ends.store(true, Relaxed);
        if self.thread.join().is_err() {
            tracing::error!("the thread that grants present pages has panicked");
        }
    }
}

fn grant_all(core: &VmCore, ends: &AtomicBool) {
    if let Err(error) = cpu::set_urgency(URGENCY) {
        tracing::debug!(%error, "present pages are granted as fast as others work");
    }
    let memory = &core.space.memory;
    for section in memory.table().sections() {
        if ends.load(Relaxed) {
            return;
        }
        // It was reported, and who needs a page faults.
        if let Err(error) = memory.grant_section(section) {
            tracing::debug!(vm = core.name, %error, "present pages are granted as they are needed");
            return;
        }
    }
}
