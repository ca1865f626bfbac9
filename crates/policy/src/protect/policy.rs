// SPDX-License-Identifier: Apache-2.0
//! [`ProtectionPolicy`]: the events of one device that a policy receives, and its decisions.

use pagetide_addr::{Access, SectionNo};
use std::time::Duration;

/// One DMA access, as policies see it. An access that spans sections is several touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touch {
    /// The section, in the VM's address space.
    pub section: SectionNo,
    /// When.
    pub at: Duration,
    /// Read or write.
    pub access: Access,
    /// Bytes of the section accessed.
    pub bytes: u64,
}

/// One decision of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// From now on, do not choose the section for eviction.
    Protect(SectionNo),
    /// As far as this device is concerned, it may be chosen again.
    Release(SectionNo),
}

/// An event of a section that the device did not cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The evictor took it: a device that accesses any of it will find it absent. Not reported for a
    /// section of which the greater part stays; reported again when pages that came back, or had stayed,
    /// are evicted too.
    Evicted,
    /// The device accessed it after that: an I/O page fault. Reported before the touch itself.
    Faulted,
    /// It no longer exists: its RAM was unplugged.
    Gone,
}

/// The current state of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PolicyReport {
    /// Sections it remembers, protected or not.
    pub tracked_sections: u64,
    /// Sections it protects now.
    pub protected_sections: u64,
    /// Sections that lost protection, or were refused it, because there were too many, since the start.
    pub dropped_sections: u64,
    /// Memory it takes, in bytes.
    pub bytes: u64,
}

/// One way to protect the DMA of one device. See the module.
pub trait ProtectionPolicy: Send {
    /// The device has touched a section.
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>);

    /// It is `now`: does all that is due. Called about once a second.
    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>);

    /// An event of a section of the VM, used by this device or not. A policy ignores events that do not matter
    /// to it.
    fn fate(
        &mut self,
        _section: SectionNo,
        _fate: Fate,
        _now: Duration,
        _changes: &mut Vec<Change>,
    ) {
    }

    /// The VM has `sections` sections from now on; shares are shares of that.
    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>);

    /// The caller has many VMs and turns to this one now: loads the data into the processor's cache.
    /// Changes nothing.
    fn warm_up(&self) {}

    /// Its current state.
    fn report(&self) -> PolicyReport;
}
