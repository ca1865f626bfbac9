// SPDX-License-Identifier: Apache-2.0
//! Claiming RAM for a VM before it is taken over: devices lose it, and no DMA from before is under way.
//!
//! An attach claims all files of a VM, a hotplug one file. Page requests are held from before the bits
//! are cleared until the RAM is served, or the claim is undone.

use super::{failure::failed, shared::Shared};
use crate::control::ControlError;
use pagetide_vmm::layout::RamLayout;
use pagetide_vpri::{DmaMmu, IoSpace};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Interval between polls of the leases.
const DRAIN_LOOK: Duration = Duration::from_micros(200);
/// Refuses pages that were allocated but never written: they look like holes, but cannot be filled.
pub(super) fn refuse_unseen_pages(layout: &RamLayout) -> Result<(), ControlError> {
    match layout.unseen_pages().map_err(failed)? {
        0 => Ok(()),
        pages => Err(ControlError::refused(format!(
            "{pages} pages of the guest's RAM are allocated but were never written (fallocate), which cannot be told \
             from absent ones: start the VMM without preallocation, or let the guest touch its memory first"
        ))),
    }
}

/// Without the device, DMA under way cannot be detected: RAM is only taken over with the device
/// connected.
pub(super) fn refuse_without_dpu(shared: &Shared) -> Result<(), ControlError> {
    let why = shared.spaces.eviction_blocker();
    why.map_or(Ok(()), |why| Err(ControlError::refused(why)))
}

/// The DMA domains of a VM, claimed for it: their bits are cleared and their page requests held.
pub(super) struct Claim<'a> {
    pub(super) mmu: Arc<DmaMmu>,
    attached: Vec<Arc<dyn IoSpace>>,
    shared: &'a Shared,
    kept: bool,
}

impl<'a> Claim<'a> {
    pub(super) fn take(layout: &RamLayout, shared: &'a Shared) -> Result<Self, ControlError> {
        let mut domains = Vec::new();
        for file in layout.files() {
            use std::os::fd::AsFd;
            let domain = shared
                .spaces
                .open(file.file().as_fd(), file.key(), file.pages().bytes())
                .map_err(failed)?;
            domains.push((domain, file.pages()));
        }
        let mmu = Arc::new(DmaMmu::new(domains));
        // Held first: a device in another process finds its pages unmapped as soon as the space is
        // claimed, and sends page requests.
        shared.service.hold(&mmu.domains());
        let mut claim = Self {
            mmu,
            attached: Vec::new(),
            shared,
            kept: false,
        };
        for domain in claim.mmu.domains() {
            let attached = domain.attach();
            attached.map_err(|error| ControlError::refused(error.to_string()))?;
            claim.attached.push(domain);
        }
        for domain in &claim.attached {
            domain.unmap_all();
        }
        Ok(claim)
    }

    /// Makes DMA into absent pages fault; no DMA from before the claim may be under way.
    pub(super) fn watch(&self) -> Result<(), ControlError> {
        let domains = self.mmu.domains();
        domains
            .iter()
            .try_for_each(|domain| domain.watch())
            .map_err(failed)
    }

    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.attached.iter().for_each(|domain| domain.detach());
            self.shared.service.release(&self.mmu.domains());
        }
    }
}

/// Waits until no DMA is under way in `domains` that began before their bits were cleared.
///
/// # Errors
/// An error message, after `patience`.
pub(super) fn drain(domains: &[Arc<dyn IoSpace>], patience: Duration) -> Result<(), ControlError> {
    let begun = Instant::now();
    let is_leased = |domain: &Arc<dyn IoSpace>| domain.is_any_leased();
    while domains.iter().any(is_leased) {
        if begun.elapsed() > patience {
            return Err(ControlError::refused(format!(
                "a device has had I/O in flight for {} s that does not finish; see to its image's storage",
                patience.as_secs()
            )));
        }
        std::thread::sleep(DRAIN_LOOK);
    }
    Ok(())
}
