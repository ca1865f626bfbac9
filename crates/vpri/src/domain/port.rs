// SPDX-License-Identifier: Apache-2.0
//! [`EnginePort`]: one device's way into a domain.
//!
//! A port without look-up reads no attribute. It may exist only while the domain has no
//! absent page and cannot get any: no VM owns the domain, it is not barred, and all memory
//! with pages elsewhere is known. As long as such a port exists, no VM can be attached
//! ([`DomainError::LookUpOff`]), so a port that was made while everything was known stays
//! valid when a later driver declares the memory that it pages.

use super::{DmaDomain, DomainError, LookUp, RamWindow};
use crate::lease::Lease;
use pagetide_addr::{Access, FileRange};
use std::sync::Arc;

/// One device's way into a domain, used on one engine's thread only.
///
/// Not `Sync`, and to be moved to its engine's thread before the first lease: each engine's
/// counters have one writer.
#[derive(Debug)]
pub struct EnginePort {
    window: Arc<RamWindow>,
    engine: usize,
    look_up: LookUp,
    not_sync: std::marker::PhantomData<std::cell::Cell<()>>,
}

impl EnginePort {
    /// A port of engine number `engine`, through which it reaches `window`.
    ///
    /// # Errors
    /// If look-up is to be off: [`DomainError::LookUpNeeded`] if a VM owns the domain,
    /// [`DomainError::NotKnown`] if a VM may turn out to own it, [`DomainError::Barred`].
    pub fn new(
        window: Arc<RamWindow>,
        engine: usize,
        look_up: LookUp,
    ) -> Result<Self, DomainError> {
        let domain = window.domain();
        if look_up == LookUp::Off {
            // Held until the port is counted: a later change of the initial attribute then finds
            // it.
            let entries = super::lock(&domain.entries);
            let mut owner = domain.lock_owner();
            if owner.attached {
                return Err(DomainError::LookUpNeeded(domain.key));
            }
            entries.permit_without_look_up(domain.key)?;
            owner.ports_without_lookup += 1;
        }
        Ok(Self {
            window,
            engine,
            look_up,
            not_sync: std::marker::PhantomData,
        })
    }

    /// The domain.
    #[must_use]
    pub fn domain(&self) -> &Arc<DmaDomain> {
        self.window.domain()
    }

    /// The part of the domain's file that it reaches.
    #[must_use]
    #[inline]
    pub fn window(&self) -> &Arc<RamWindow> {
        &self.window
    }

    /// Leases `range` if all of it allows `access`; on `None`, send a page request.
    #[inline]
    pub fn lease(&self, range: FileRange, access: Access) -> Option<Lease> {
        match self.look_up {
            LookUp::On => self.domain().attributes.lease(self.engine, range, access),
            LookUp::Off => Some(Lease::nothing()),
            LookUp::Slowed(delay) => {
                delay.pass();
                self.domain().attributes.lease(self.engine, range, access)
            }
        }
    }

    /// Returns a lease that this port gave.
    #[inline]
    pub fn release(&self, lease: Lease) {
        self.domain().attributes.release(self.engine, lease);
    }
}

impl Drop for EnginePort {
    fn drop(&mut self) {
        if self.look_up == LookUp::Off {
            self.domain().lock_owner().ports_without_lookup -= 1;
        }
    }
}
