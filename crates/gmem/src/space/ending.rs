// SPDX-License-Identifier: Apache-2.0
//! How a space ends: destroyed, when nothing uses it; or dropped, whatever still does.

use super::address_space::AddressSpace;
use crate::{
    attachments::{Attachment, LastUse, TableMask},
    error::GmError,
    sync::lock,
};

impl AddressSpace {
    /// Destroys a space that has neither devices nor regions.
    ///
    /// # Errors
    /// [`GmError::InUse`], [`GmError::Destroyed`].
    #[doc(alias = "gm_as_destroy")]
    pub fn destroy(&self) -> Result<(), GmError> {
        self.wait_for_changes();
        let devices = self.devices.own();
        if self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        if !devices.is_empty() {
            return Err(GmError::InUse {
                by: "a device that is attached",
            });
        }
        self.regions.destroy()?;
        self.stop_operations();
        Ok(())
    }
}

/// A space that is dropped without being destroyed deactivates its devices: none may keep
/// translating by a table whose frames are given to others.
impl Drop for AddressSpace {
    fn drop(&mut self) {
        let mut list = std::mem::take(&mut *self.devices.own());
        let mut used = TableMask::NONE;
        while let Some((gone, last)) = list.remove_last() {
            if !let_go(self, &gone) {
                used.insert(&gone.table);
            }
            if last == LastUse::Yes && !used.contains(&gone.table) {
                gone.table.destroy();
            }
        }
        if !used.is_empty() {
            // A device still uses frames that the regions hold: those are never freed.
            self.regions.leak();
        }
        self.abandon_operations();
    }
}

/// Deactivates a device in a space that ends; false if it still translates by its table.
fn let_go(space: &AddressSpace, gone: &Attachment) -> bool {
    let mut standing = lock(&gone.device.standing);
    // It may be active elsewhere by now: the thread that activated it there found this space ending.
    let is_here = gone.is_active() && standing.is_active(space);
    let let_go = !is_here || gone.device.mmu().deactivate(gone.table.id()).is_ok();
    standing.forget(space);
    let_go
}
