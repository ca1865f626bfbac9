// SPDX-License-Identifier: Apache-2.0
//! [`OwnUse`]: memory in which the DPU has something of its own, such as the rings of its VPRI function.
//!
//! It is used without look-up, so it must not be paged: an absent page would be taken for zeros. That concerns
//! a driver that is itself in a VM, whose memory is the VM's RAM. Such a VM cannot be attached meanwhile
//! ([`DomainError::OwnMemory`]), and RAM of an attached one cannot be used so ([`DomainError::OwnInPaged`]).

use super::{DmaDomain, DomainError, DomainTable};
use pagetide_addr::FileKey;
use std::sync::Arc;

/// See the module. As long as it is there, no VM can own the memory.
#[derive(Debug)]
pub struct OwnUse {
    domain: Arc<DmaDomain>,
}

impl DomainTable {
    /// From now on the DPU has something of its own in the file `key`, of `bytes` bytes.
    ///
    /// # Errors
    /// [`DomainError::OwnInPaged`] if a VM owns it, or will once it is recovered; and as [`Self::open`].
    pub fn use_as_own(&self, key: FileKey, bytes: u64) -> Result<OwnUse, DomainError> {
        let domain = match self.open(key, bytes) {
            Err(DomainError::Barred(key)) => return Err(DomainError::OwnInPaged(key)),
            opened => opened?,
        };
        {
            let mut owner = domain.lock_owner();
            if owner.attached {
                return Err(DomainError::OwnInPaged(key));
            }
            owner.own_uses += 1;
        }
        Ok(OwnUse { domain })
    }
}

impl Drop for OwnUse {
    fn drop(&mut self) {
        self.domain.lock_owner().own_uses -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: FileKey = FileKey { dev: 1, ino: 2 };
    const BYTES: u64 = 1 << 20;

    #[test]
    fn memory_of_the_dpus_own_cannot_be_paged_and_paged_memory_cannot_be_its_own() {
        let table = DomainTable::new(1);
        let first = table.use_as_own(KEY, BYTES).unwrap();
        let second = table.use_as_own(KEY, BYTES).unwrap();
        drop(first);
        let domain = table.declare(KEY, BYTES).unwrap();
        assert!(matches!(domain.attach(), Err(DomainError::OwnMemory(KEY))));
        drop(second);
        domain.attach().unwrap();
        let refused = table.use_as_own(KEY, BYTES);
        assert!(matches!(refused, Err(DomainError::OwnInPaged(KEY))));
        domain.detach();
        drop(table.use_as_own(KEY, BYTES).unwrap());
        table.bar(KEY);
        let barred = table.use_as_own(KEY, BYTES);
        assert!(matches!(barred, Err(DomainError::OwnInPaged(KEY))));
    }
}
