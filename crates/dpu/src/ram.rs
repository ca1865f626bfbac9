// SPDX-License-Identifier: Apache-2.0
//! [`RamPolicy`]: which files a device takes as guest RAM, and how much of them.
//!
//! What a file is has been found out before ([`RamFile`]), without asking anybody who could
//! make us wait. Here it is decided by what can be guaranteed: a memfd keeps its memory if it is
//! sealed, and costs its own device if it is not; a file that can run out of memory by
//! somebody else's doing is taken only if the operator vouches for it.

use crate::regions::MemoryError;
use pagetide_sys::guest_ram::{RamFile, RamFileKind, Sealed};

/// Most guest RAM of one device unless told otherwise. Address space is 128 TiB for all devices, of
/// which there are 128 at most: half of it.
pub const RAM_BYTES_MAX: u64 = 512 << 30;

/// What a device takes as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamPolicy {
    /// Whether files that can be made shorter are taken.
    pub sealing: Sealing,
    /// Whether files on a tmpfs are taken.
    pub tmpfs: RamAllowed,
    /// Whether huge pages of hugetlbfs are taken.
    pub hugetlbfs: RamAllowed,
    /// Most bytes of all regions together, and of any one file: what is kept of a file grows with its
    /// length, however little of it is named.
    pub bytes_max: u64,
}

impl Default for RamPolicy {
    fn default() -> Self {
        Self {
            sealing: Sealing::default(),
            tmpfs: RamAllowed::default(),
            hugetlbfs: RamAllowed::default(),
            bytes_max: RAM_BYTES_MAX,
        }
    }
}

/// Whether a RAM file must be sealed against shrinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sealing {
    /// It is sealed if it takes seals.
    #[default]
    Preferred,
    /// It is refused if it takes none.
    Required,
}

/// Whether a kind of file is taken as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RamAllowed {
    /// The operator vouches for it.
    Yes,
    /// It is refused.
    #[default]
    No,
}

impl RamPolicy {
    /// Refuses what is not to be taken.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`], [`MemoryError::NotSealed`], [`MemoryError::FileOverQuota`].
    pub(crate) fn check(&self, file: &RamFile) -> Result<(), MemoryError> {
        let (allowed, kind) = match file.kind {
            RamFileKind::Memfd => (RamAllowed::Yes, "memfd"),
            RamFileKind::Tmpfs => (self.tmpfs, "tmpfs"),
            RamFileKind::Hugetlbfs => (self.hugetlbfs, "hugetlbfs"),
        };
        if allowed == RamAllowed::No {
            let key = file.key;
            return Err(MemoryError::NotAllowed { key, kind });
        }
        if self.sealing == Sealing::Required && file.sealed == Sealed::No {
            return Err(MemoryError::NotSealed(file.key));
        }
        if file.bytes > self.bytes_max {
            return Err(MemoryError::FileOverQuota {
                key: file.key,
                bytes: file.bytes,
                max_bytes: self.bytes_max,
            });
        }
        Ok(())
    }

    /// Refuses more memory than a front end may have mapped.
    ///
    /// # Errors
    /// [`MemoryError::OverQuota`].
    pub(crate) fn check_bytes(
        &self,
        regions: impl Iterator<Item = u64>,
    ) -> Result<(), MemoryError> {
        let bytes = regions.fold(0, u64::saturating_add);
        let max_bytes = self.bytes_max;
        if bytes > max_bytes {
            return Err(MemoryError::OverQuota { bytes, max_bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::FileKey;

    #[test]
    fn policy_decides_by_what_can_be_guaranteed() {
        let file = |kind, sealed| RamFile {
            key: FileKey { dev: 1, ino: 2 },
            bytes: 4096,
            kind,
            sealed,
            page_bytes: 4096,
        };
        let usual = RamPolicy::default();
        let strict = RamPolicy {
            sealing: Sealing::Required,
            ..usual
        };
        let lenient = RamPolicy {
            tmpfs: RamAllowed::Yes,
            hugetlbfs: RamAllowed::Yes,
            ..usual
        };
        for sealed in [Sealed::Yes, Sealed::No] {
            assert!(usual.check(&file(RamFileKind::Memfd, sealed)).is_ok());
            let strictly = strict.check(&file(RamFileKind::Memfd, sealed));
            assert_eq!(strictly.is_ok(), sealed == Sealed::Yes);
            for kind in [RamFileKind::Tmpfs, RamFileKind::Hugetlbfs] {
                let refused = usual.check(&file(kind, sealed));
                assert!(matches!(refused, Err(MemoryError::NotAllowed { .. })));
                assert!(lenient.check(&file(kind, sealed)).is_ok());
            }
        }
        let long = RamFile {
            bytes: RAM_BYTES_MAX + 1,
            ..file(RamFileKind::Memfd, Sealed::Yes)
        };
        let refused = usual.check(&long);
        assert!(matches!(refused, Err(MemoryError::FileOverQuota { .. })));
        assert!(usual.check_bytes([RAM_BYTES_MAX].into_iter()).is_ok());
        assert!(usual.check_bytes([RAM_BYTES_MAX, 1].into_iter()).is_err());
        assert!(usual.check_bytes([u64::MAX, 1].into_iter()).is_err());
    }
}
