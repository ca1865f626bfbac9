// SPDX-License-Identifier: Apache-2.0
//! DMA protectors: which sections a device is likely to touch again just when the
//! evictor would take them (VPRI 4.2, 6.2).
//!
//! ```text
//!   access log ──► Touch ──► ProtectionPolicy of the device ──► Changes ──► protected sections
//!                                  ▲   ▲                                         │
//!                    time passes ──┘   └── section evicted ◄── evictor ◄─────────┘ spares them
//! ```
//! A policy knows one device of one VM and may use only what has happened. *Protected*
//! means that the evictor does not choose the section as long as others rest that
//! it can take; nothing is locked in memory. And it is not for a policy to say how much of a VM
//! is protected: all devices together have a bound, [`together_max`].
//!
//! Times are durations since any fixed moment, and never run backwards.

pub mod adaptive;
pub mod adp;
pub mod choice;
pub mod lru;
pub mod none;
pub mod parameters;
mod protected;
mod protector;
pub mod recency;
#[cfg(test)]
mod tests;

pub use choice::{PolicyChoice, PolicyError};
pub use protected::ProtectedSections;
pub use protector::{Protector, together_max};

use pagetide_addr::{Access, SectionNo};
use std::time::Duration;

/// One DMA access, as far as policies look at it. One that spans sections is several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Touch {
    /// Where, in the VM's address space.
    pub section: SectionNo,
    /// When.
    pub at: Duration,
    /// What it did.
    pub access: Access,
    /// How much of the section, in bytes.
    pub bytes: u64,
}

/// One decision of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The section shall not be chosen for eviction from now on.
    Protect(SectionNo),
    /// It may be chosen again, as far as this device is concerned.
    Release(SectionNo),
    /// Its absent pages, if it has any, shall come back before the device asks for them.
    BringBack(SectionNo),
}

/// What became of a section without the device's doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The evictor took it: a device that asks for any of it will find it away. Not told of a section of
    /// which the greater part stays; told again when what had come back of it, or had stayed, goes too.
    Evicted,
    /// The device asked for it after that: an I/O page fault. Told before the touch itself.
    Faulted,
    /// A wish to have it back came to nothing: it was there already, there was no room, or too many
    /// others waited.
    NotBroughtBack,
    /// It is no more: its RAM was unplugged.
    Gone,
}

/// What a policy holds now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PolicyReport {
    /// Sections it remembers, protected or not.
    pub tracked_sections: u64,
    /// Sections it protects now.
    pub protected_sections: u64,
    /// Sections that left protection, or were refused it, because there were too many, since the start.
    pub dropped_sections: u64,
    /// Memory it takes, in bytes.
    pub bytes: u64,
}

/// One way to protect the DMA of one device. See the module.
pub trait ProtectionPolicy: Send {
    /// The device has touched a section.
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>);

    /// It is `now`: does what has become due. Called about once a second.
    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>);

    /// Something happened to a section of the VM, of this device or not. A policy to which a fate says nothing
    /// does nothing.
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

    /// The caller has many VMs and turns to this one now: brings what is kept into the processor's cache.
    /// Changes nothing.
    fn warm_up(&self) {}

    /// What it holds now.
    fn report(&self) -> PolicyReport;
}
